"""Rows keep their bits under `order = absolute(...)`; mistakes that move one within its bound are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def hopper(
    mask: str = "causal",
    *,
    storage: str = "paged",
    page: int = 8,
    extra: str = "",
    score: str = "dot(q, k) / 8",
    softmax: str = "softmax",
    knobs: str = "softmax = online(maximum = lazy(20))",
    prompt: str = "",
    name: str = "serve",
) -> str:
    """Writes the same for Hopper, of tiles of 32 keys and segments of 64."""
    is_packed = storage == "packed"
    text = spec(
        mask,
        storage="paged" if is_packed else storage,
        extra=f"input cu_q: i32[B + 1]\n  {extra}" if is_packed else extra,
        score=score,
        softmax=softmax,
        name=name,
    )
    text = text.replace(", 16]", ", 64]").replace(f"absolute({SEGMENT})", "absolute(64)")
    text = text.replace("page = 8", f"page = {page}")
    if is_packed:
        text = text.replace("q: f16[B, M, Hkv * G, 64]", "q: f16[T, Hkv * G, 64] via ragged(cu_q)")
        text = text.replace("o: f16[B, M, Hkv * G, 64]", "o: f16[T, Hkv * G, 64]")
        text = text.replace("[B, Hkv * G, M]", "[Hkv * G, T]")
    text = f"""{text[: text.index("schedule")]}
schedule {name} for cuda.sm_90a as prompt {{
  tile.kv = 32, stages = 2, {knobs} {prompt}
}}
"""
    return f"""{text}
schedule {name} for cuda.sm_90a as decode {{
  loops = [kv], pack = gqa, split.kv = fixed(64), tile.kv = 32, {knobs}
}}
"""


def latents(
    mask: str = "causal",
    *,
    storage: str = "lengths",
    extra: str = "",
    softmax: str = "softmax",
    part: bool = True,
) -> str:
    """Writes the same of heads whose columns two warpgroups share. part: values lie in the keys."""
    columns = "448" if part else "384"
    text = hopper(mask, storage=storage, extra=extra, softmax=softmax, knobs="softmax = online")
    text = (
        text.replace("Hkv * G", "G")
        .replace("Hkv", "1")
        .replace("as prompt {", "as prompt {\n  loops = [kv], pack = gqa")
    )
    text = text.replace("q: f16[B, M, G, 64]", f"q: f16[B, M, G, {columns}]")
    text = text.replace("o: f16[B, M, G, 64]", "o: f16[B, M, G, 384]")
    if not part:
        return text.replace("1, 64]", "1, 384]")
    text = text.replace("input k, v: f16[B, N, 1, 64]", f"input k: f16[B, N, 1, {columns}]")
    return text.replace("  score", "  input v: f16[B, N, 1, 384] via prefix(k)\n  score")


def gated(text: str, value: str = "sigmoid(gate[b, q_idx, h, d]) * attention") -> str:
    """Rewrites a spec for an epilogue."""
    (line,) = (line for line in text.splitlines() if line.startswith("  output o:"))
    shape = line.removeprefix("  output o: ")
    return text.replace(line, f"  input gate: {shape}\n{line} = {value}")


def narrow(text: str, dtype: str) -> str:
    """Rewrites a spec for keys and values of 8 bits."""
    return text.replace("input k, v: f16", f"input k, v: {dtype}")


def subjects_of(text: str, texts: Mapping[str, tuple[str, str]] | None = None) -> list[Subject]:
    """Loads the modules of a spec; texts: what to replace in that of each label, and by what."""
    [group] = list_groups(modules_of(text))
    return [planted(module, *(texts or {}).get(module.label, ("", ""))) for module in group]


def planted(module: ir.Module, anchor: str, instead: str) -> Subject:
    files = render_files(module, path="serve.attn", sha256="")
    if not anchor:
        return subject_of(module, files)
    places = [name for name, text in files.items() for _ in range(text.count(anchor))]
    assert len(places) == 1, f"{anchor!r} occurs {len(places)} times"
    return subject_of(module, files | {places[0]: files[places[0]].replace(anchor, instead)})


def attention_of(text: str) -> Attention:
    return modules_of(text)[0].variant.attention


def kept(text: str, texts: Mapping[str, tuple[str, str]] | None = None, seeds: int = 1) -> Agreement:
    return compare(subjects_of(text, texts), range(seeds))


SCALED: Mapping[str, Any] = {
    "extra": "input scale: f32[B, Hkv]",
    "softmax": "softmax(v_scale = scale[b, h // G])",
}
SCALED_BY_KEY: Mapping[str, Any] = {
    "extra": "input scale: f32[B, N]",
    "softmax": "softmax(v_scale = scale[b, kv_idx])",
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(spec(), id="pages", marks=pytest.mark.nightly),  # by day among other storage, below
        pytest.param(spec("window(20, 0)", storage="lengths"), id="window", marks=pytest.mark.nightly),
        pytest.param(
            spec("window(20, 0) or first(4) and causal", storage="lengths"),
            id="window and first keys",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            spec(extra="input sink: f32[H]", softmax="softmax(sink = sink[h])", mask="window(9, 0)"),
            id="sinks",
            marks=pytest.mark.nightly,
        ),
        pytest.param(spec(score="softcap(dot(q, k) / 4, 5)"), id="softcap", marks=pytest.mark.nightly),
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
            marks=pytest.mark.nightly,
        ),
        pytest.param(spec("true", storage="lengths"), id="all keys", marks=pytest.mark.nightly),
        pytest.param(spec(**SCALED), id="a scale of v", marks=pytest.mark.nightly),
        pytest.param(
            gated(spec(), "(attention * gate[b, q_idx, h, d] + gate[b, q_idx, h, d]) / 3"),
            id="an epilogue",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            spec(
                extra="input scale: f32[R, 8, Hkv]",
                softmax="softmax(v_scale = scale[block_table[b, kv_idx // 8], kv_idx % 8, h // G])",
            ),
            id="a scale of each v in pages",
        ),
        pytest.param(
            spec(storage="lengths", **SCALED_BY_KEY), id="a scale of each v", marks=pytest.mark.nightly
        ),
    ],
)
def test_rows_keep_their_bits(text: str) -> None:
    found = kept(text)
    assert found.broken == []
    assert found.calls > 6


@pytest.mark.parametrize(
    "others", [["storage"], pytest.param(["storage", "pages"], marks=pytest.mark.nightly)], ids=len
)
def test_other_sizes_of_pages_and_other_storage_give_the_same_bits(others: Sequence[str]) -> None:
    """By day of other storage alone."""
    texts = {
        "storage": spec(storage="plain", name="train"),
        "pages": spec(name="other").replace("page = 8", "page = 32"),
    }
    text = spec() + "".join(texts[other] for other in others)
    assert len(subjects_of(text)) == 2 + 2 * len(others)
    found = kept(text)
    assert found.broken == []
    assert found.calls > 6 + 6 * len(others)


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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BUGS)
def test_moved_bits_are_found(name: str) -> None:
    label, anchor, instead = BUGS[name]
    found = kept(spec(storage="lengths"), {label: (anchor, instead)}, seeds=2)
    assert found.broken, "no row has other bits"


#: Scores that outgrow what a lazy maximum serves for: sums say nothing, and rows are computed again.
FAR = "dot(q, k) * 40"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(hopper(score=FAR), id="scores far apart"),
        pytest.param(
            hopper(knobs="softmax = online", page=4),
            id="maxima of tiles, small pages",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            hopper(
                "window(20, 0)",
                extra="input sink: f32[H]",
                softmax="softmax(sink = sink[h])",
                storage="lengths",
            ),
            id="window and sinks",
        ),
        pytest.param(
            hopper(storage="packed", name="packed") + hopper(),
            id="packed beside pages",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            hopper("window(90, 0)", storage="plain", prompt=", tile.q = 192"),
            id="own ranges",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            hopper("window(20, 0) or first(4) and causal", storage="lengths", score=FAR),
            id="window and first keys",
            marks=pytest.mark.nightly,
        ),
        pytest.param(hopper(score="softcap(dot(q, k) / 4, 5)"), id="softcap", marks=pytest.mark.nightly),
        pytest.param(
            hopper(extra="input slope: f32[H]", score="dot(q, k) / 8 + alibi(slope[h])"),
            id="slope of each head",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            hopper(
                "causal and doc[b, q_pos] == doc[b, kv_idx]",
                storage="plain",
                extra="input doc: i32[B, N] is sorted",
            ),
            id="documents",
            marks=pytest.mark.nightly,
        ),
        pytest.param(hopper("true", storage="lengths"), id="all keys", marks=pytest.mark.nightly),
        pytest.param(
            hopper(knobs="softmax = online(rescale = lazy(3))"),
            id="rescaled lazily",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            hopper(storage="plain", prompt=", cluster = 2"), id="clusters", marks=pytest.mark.nightly
        ),
        pytest.param(hopper(prompt=", pingpong = true"), id="turns", marks=pytest.mark.nightly),
        pytest.param(gated(hopper(storage="plain")), id="a gate", marks=pytest.mark.nightly),
        pytest.param(
            gated(hopper(), "(attention + gate[b, q_idx, h, d]) / 3"),
            id="what is added to o",
            marks=pytest.mark.nightly,
        ),
        pytest.param(hopper(prompt=", overlap = false"), id="in sequence", marks=pytest.mark.nightly),
    ],
)
def test_rows_keep_their_bits_on_hopper(text: str) -> None:
    found = kept(text)
    assert found.broken == []
    assert found.calls > 6


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(latents(), id="latents"),
        pytest.param(latents(storage="paged"), id="latents in pages", marks=pytest.mark.nightly),
        pytest.param(
            latents("window(40, 0)", extra="input sink: f32[G]", softmax="softmax(sink = sink[h])"),
            id="latents in a window, with sinks",
            marks=pytest.mark.nightly,
        ),
        pytest.param(latents(part=False), id="384 columns", marks=pytest.mark.nightly),
        pytest.param(gated(latents(part=False)), id="384 columns and a gate", marks=pytest.mark.nightly),
        pytest.param(
            hopper(storage="plain").replace(", 64]", ", 256]"), id="256 columns", marks=pytest.mark.nightly
        ),
        pytest.param(
            hopper(score=FAR).replace(", 64]", ", 256]"),
            id="256 columns far apart",
            marks=pytest.mark.nightly,
        ),
        pytest.param(narrow(hopper(), "e4m3"), id="8 bits", marks=pytest.mark.nightly),
        pytest.param(narrow(hopper(**SCALED), "e4m3"), id="8 bits with a scale", marks=pytest.mark.nightly),
        pytest.param(
            hopper(
                "window(20, 0)",
                extra=f"{SCALED['extra']}\n  input sink: f32[H]",
                softmax="softmax(v_scale = scale[b, h // G], sink = sink[h])",
                storage="lengths",
            ),
            id="a scale of v and sinks",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            hopper(storage="lengths", **SCALED_BY_KEY), id="a scale of each v", marks=pytest.mark.nightly
        ),
        pytest.param(
            latents(extra="input scale: f32[B]", softmax="softmax(v_scale = scale[b])"),
            id="latents with a scale",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            narrow(hopper(page=4, knobs="softmax = online"), "i8"),
            id="8 bits in small pages",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_rows_of_wide_heads_and_of_8_bits_keep_their_bits_on_hopper(text: str) -> None:
    found = kept(text)
    assert found.broken == []
    assert found.calls > 6


def dropping(write: Callable[..., str]) -> str:
    """Writes prompts that drop keys."""
    text = write(storage="plain", softmax="softmax(dropout = 0.1, seed = s)", extra="input s: i64[]")
    return text[: text.index("schedule serve", text.index("schedule serve") + 1)]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(dropping(spec), id="triton"),
        pytest.param(dropping(hopper), id="hopper", marks=pytest.mark.nightly),
    ],
)
def test_rows_that_stay_in_their_place_keep_their_bits_under_dropout(text: str) -> None:
    assert not counts_from_itself(attention_of(text))
    found = kept(text)
    assert (found.broken, found.calls) == ([], 2)


#: The same as above, of kernels for Hopper.
BUGS_OF_HOPPER: Mapping[str, tuple[str, str, str]] = {
    "segments that begin with the walk": (
        "prompt",
        "int segment_lo = max(kv_lo, 0) / SEGMENT * SEGMENT;",
        "int segment_lo = max(kv_lo - SEGMENT + BLOCK_N, 0);",
    ),
    "splits of another size": (
        "decode",
        "constexpr int SEGMENT = 64;",
        "constexpr int SEGMENT = 128;",
    ),
    "a maximum of all tiles so far": (
        "decode",
        "m[r] = known[r] ? m[r] : top[r];",
        "m[r] = fmaxf(m[r], top[r]);",
    ),
    "a maximum that a neighbour raises": (
        "prompt",
        "const bool grows = known[r] && !(most < SUM_LIMIT);",
        "const bool grows = known[r];",
    ),
    "rows that are computed again as before": (
        "prompt",
        "find_maxima(scores, m, alpha, known, recompute);",
        "find_maxima(scores, m, alpha, known, false);",
    ),
    "exponents rounded twice": (
        "decode",
        "exp2_(fmaf(s[j][2 * r + c], SCALE, -m[r]));",
        "exp2_(s[j][2 * r + c] * SCALE - m[r]);",
    ),
    "a chain through all segments": (
        "prompt",
        "    shares[r] = share(m_all[r], m_of[r]);",
        "    shares[r] = share(m_all[r], fmaxf(m_of[r], m_all[r]));",
    ),
}  # fmt: skip


#: What a day replays of them.
_BY_DAY = ("a maximum of all tiles so far", "rows that are computed again as before")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in _BY_DAY else pytest.mark.nightly) for x in BUGS_OF_HOPPER],
)
def test_moved_bits_are_found_on_hopper(name: str) -> None:
    label, anchor, instead = BUGS_OF_HOPPER[name]
    text = hopper(
        score="dot(q, k) * 4" if "neighbour" in name else FAR if "again" in name else "dot(q, k) / 8"
    )
    found = kept(text, {label: (anchor, instead)}, seeds=2)
    assert found.broken, "no row has other bits"


BUGS_OF_LATENTS: Mapping[str, tuple[str, str, str]] = {
    "turns that begin with the walk": (
        "prompt",
        "const int leads = first / BLOCK_N & 1;",
        "const int leads = 0;",
    ),
    "segments that begin with the walk": (
        "prompt",
        "int segment_lo = max(first, 0) / SEGMENT * SEGMENT;",
        "int segment_lo = max(first - SEGMENT + BLOCK_N, 0);",
    ),
    "a chain through all segments": (
        "prompt",
        "    shares[r] = share(m_all[r], m_of[r]);",
        "    shares[r] = share(m_all[r], fmaxf(m_of[r], m_all[r]));",
    ),
    "a denominator of both turns": (
        "decode",
        "l[r] = load_shared<float>(sums_at + ((1 - consumer) * BLOCK_M + 8 * r) * 16);",
        "l[r] = load_shared<float>(sums_at + ((1 - consumer) * BLOCK_M + 8 * r) * 16) * 1.0000001f;",
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x.startswith("turns") else pytest.mark.nightly) for x in BUGS_OF_LATENTS],
)
def test_moved_bits_of_latents_are_found(name: str) -> None:
    label, anchor, instead = BUGS_OF_LATENTS[name]
    assert kept(latents(), {label: (anchor, instead)}, seeds=2).broken, "no row has other bits"


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
