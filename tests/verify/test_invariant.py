"""Rows keep their bits under `order = absolute(...)`; mistakes that move one within its bound are found."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from attnc.model.attention import Attention
from attnc.plan import ir
from attnc.target.files import render_files
from attnc.verify.invariant import (
    Agreement,
    compare,
    counts_from_itself,
    has_lengths,
    list_groups,
    looks_back,
)
from attnc.verify.subject import Subject, subject_of
from tests.verify.judging import modules_of

SEGMENT = 32


def spec(
    mask: str = "causal",
    *,
    storage: str = "paged",
    extra: str = "",
    score: str = "dot(q, k) / 4",
    softmax: str = "softmax",
    softmaxes: str = "",
    name: str = "serve",
) -> str:
    """Writes an attention with a schedule for prompts and one that decodes, of small tiles."""
    lengths = "input kv_len: i32[B]\n  length N = kv_len[b]"
    stored = {
        "paged": f" via paged(block_table, page = 8)\n  input block_table: i32[B, P]\n  {lengths}",
        "lengths": f"\n  {lengths}",
        "plain": "",
    }[storage]
    return f"""
attention {name} {{
  input q: f16[B, M, Hkv * G, 16]
  input k, v: f16[B, N, Hkv, 16]{stored}
  {extra}
  score = {score}
  mask = {mask}
  normalize = {softmax}
  order = absolute({SEGMENT})
  output o: f16[B, M, Hkv * G, 16]
  output lse: f32[B, Hkv * G, M]
}}

schedule {name} for triton as prompt {{
  loops = [q, kv], {softmaxes}tile.q = 16, tile.kv = 16
}}

schedule {name} for triton as decode {{
  loops = [kv], pack = gqa, split.kv = fixed({SEGMENT}), {softmaxes}tile.q = 16, tile.kv = 16
}}
"""


def subjects_of(text: str, texts: Mapping[str, tuple[str, str]] | None = None) -> list[Subject]:
    """Loads the modules of a spec; texts: what to replace in that of each label, and by what."""
    [group] = list_groups(modules_of(text))
    return [planted(module, *(texts or {}).get(module.label, ("", ""))) for module in group]


def planted(module: ir.Module, anchor: str, instead: str) -> Subject:
    (text,) = render_files(module, path="serve.attn", sha256="").values()
    assert not anchor or text.count(anchor) == 1, f"{anchor!r} occurs {text.count(anchor)} times"
    return subject_of(module, text.replace(anchor, instead) if anchor else text)


def attention_of(text: str) -> Attention:
    return modules_of(text)[0].variant.attention


def kept(text: str, texts: Mapping[str, tuple[str, str]] | None = None, seeds: int = 1) -> Agreement:
    return compare(subjects_of(text, texts), range(seeds))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(spec(), id="pages"),
        pytest.param(spec("window(20, 0)", storage="lengths"), id="window", marks=pytest.mark.nightly),
        pytest.param(
            spec("window(20, 0) or first(4) and causal", storage="lengths"), id="window and first keys"
        ),
        pytest.param(
            spec(extra="input sink: f32[H]", softmax="softmax(sink = sink[h])", mask="window(9, 0)"),
            id="sinks",
            marks=pytest.mark.nightly,
        ),
        pytest.param(spec(score="softcap(dot(q, k) / 4, 5)"), id="softcap"),
        pytest.param(
            spec(extra="input slope: f32[H]", score="dot(q, k) / 4 + alibi(slope[h])"),
            id="slope of each head",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            spec(softmaxes="softmax = online(rescale = lazy(3)), "),
            id="rescaled lazily",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            spec(
                "causal and doc[b, q_pos] == doc[b, kv_idx]",
                storage="plain",
                extra="input doc: i32[B, N] is sorted",
            ),
            id="documents",
        ),
        pytest.param(spec("true", storage="lengths"), id="all keys"),
    ],
)
def test_rows_keep_their_bits(text: str) -> None:
    found = kept(text)
    assert found.broken == []
    assert found.calls > 6


def test_other_sizes_of_pages_and_other_storage_give_the_same_bits() -> None:
    text = spec() + spec(storage="plain", name="train") + spec(name="other").replace("page = 8", "page = 32")
    assert len(subjects_of(text)) == 6
    assert kept(text).broken == []


#: Of the text of a label: what is changed, and to what; each result stays within the error bound.
BUGS: Mapping[str, tuple[str, str, str]] = {
    "segments that begin with the batch's tile": (
        "prompt",
        "for segment in range(first_segment, hi, 32):",
        "for segment in range(first_segment, hi, 48):",
    ),
    "splits of another size": (
        "decode",
        "split_lo = split * split_size",
        "split_lo = split * split_size + 16 * (split > 0)",
    ),
    "a chain through all segments": (
        "prompt",
        "        m = tl.full([BLOCK_M], -float(\"inf\"), tl.float32)\n        l = tl.zeros",
        "        m = m_all\n        l = tl.zeros",
    ),
    "a maximum of the whole tile": (
        "prompt",
        "m_new = tl.maximum(m, tl.max(s, 1) * SCALE)",
        "m_new = tl.maximum(m, tl.max(tl.max(s, 1) * SCALE, 0))",
    ),
    "exponents rounded twice": (
        "decode",
        "p = tl.exp2(tl.fma(s, SCALE, -shift[:, None]))",
        "p = tl.exp2(s * (SCALE * 1.0000001) - shift[:, None])",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_moved_bits_are_found(name: str) -> None:
    label, anchor, instead = BUGS[name]
    found = kept(spec(storage="lengths"), {label: (anchor, instead)}, seeds=2)
    assert found.broken, "no row has other bits"


def test_calls_are_those_that_leave_a_row_its_keys() -> None:
    assert looks_back(attention_of(spec()))
    assert looks_back(attention_of(spec("window(20, 0)")))
    assert not looks_back(attention_of(spec("window(20, 3)")))
    assert not looks_back(attention_of(spec("true")))
    assert counts_from_itself(attention_of(spec()))
    assert not counts_from_itself(attention_of(spec("kv_idx <= q_idx")))
    assert not counts_from_itself(attention_of(spec(score="dot(q, k) / N")))
    assert has_lengths(attention_of(spec()))
    assert not has_lengths(attention_of(spec(storage="plain")))
