"""Addresses of kernels are computed in 64 bits, or provably small: the proof, and that it can fail."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from attnc.target.files import render_files
from attnc.verify.subject import Subject
from tests.kernels.test_lists import LISTS, subject, subject_of_queries
from tests.plans import files_of, plans_of
from tests.target.addresses import Finding, findings
from tests.target.cuda_addresses import cuda_findings
from tests.targets import TARGETS
from tests.verify.judging import modules_of
from tests.verify.judging import spec as spec_of
from tests.verify.random_specs import specs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "specs").glob("*.attn"))


@cache
def texts(spec: str, target: str) -> dict[str, str]:
    """The kernels of the first variant of each attention of a spec, by file, as generated/ holds them."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for module in plans_of(spec).modules:
        name = module.variant.attention.name
        if module.target == target and name not in seen:
            seen.add(name)
            found |= {f"{name}/{file}": text for file, text in kernels_among(files_of(module)).items()}
    return found


def kernels_among(files: Mapping[str, str]) -> dict[str, str]:
    """The files with kernels: C++ beside a module, or the module itself."""
    sources = {file: text for file, text in files.items() if file.endswith(".cu")}
    return sources or dict(files)


def judge(name: str, text: str) -> tuple[Finding, ...]:
    return findings(text) if name.endswith(".py") else cuda_findings(text)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", [path.stem for path in SPECS])
def test_every_address_is_proved(spec: str, target: str) -> None:
    for name, text in texts(spec, target).items():
        assert not judge(name, text), name


def text_of(made: Subject) -> str:
    """The text of a module of Triton kernels that a test compiled."""
    text: str = getattr(made.module.__loader__, "content", b"").decode()
    assert "@triton.jit" in text
    return text


@pytest.mark.parametrize("name", ["in another order", "of 64 bits", "of other heads"])
def test_every_address_beside_lists_of_any_axes_is_proved(name: str) -> None:
    assert not findings(text_of(subject(**LISTS[name])))


@pytest.mark.parametrize("name", ["of four tokens", "in pages"])
def test_every_address_beside_lists_of_few_queries_is_proved(name: str) -> None:
    assert not findings(text_of(subject_of_queries(name)))


# -- a cast less is a finding ------------------------------------------------------------------------------

#: Spec, attention and file, and the strides whose products it has.
CASES = (
    ("local_sink", "local_sink/w128_d64.py", "qb qh kb kh vb vh ob oh lseb lseh lsem sink_0"),
    ("local_sink", "local_sink/w128_d64.py", "dob doh dqb dqh dkb dkh dvb dvh dlseb dlseh dlsem"),
    ("bias", "bias/d64.py", "pair_0 pair_1 pair_2 key_bias_0 key_bias_1"),
    ("paged_decode", "paged_decode/d128.py", "block_table_0 kv_len_0 qb qm kh vh om"),
    ("varlen", "varlen/d128.py", "qm kn vn om lsem dqm dkn dvn dom"),
)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("spec", "file", "stride"), [(s, f, stride) for s, f, strides in CASES for stride in strides.split()]
)
def test_a_stride_without_its_cast_is_found(spec: str, file: str, stride: str) -> None:
    """Each product with the stride, one by one, in 32 bits."""
    text = texts(spec, "triton")[file]
    product = re.compile(rf"\.to\(tl\.int64\)((?:\[[^]]*\])? \* stride_{stride}\b)")
    places = list(product.finditer(text))
    assert places
    for place in places:
        line = text.count("\n", 0, place.start()) + 1
        found = findings(text[: place.start()] + place[1] + text[place.end() :])
        assert any(abs(one.line - line) <= 4 for one in found), f"line {line}: {place[0]}"


#: Products without a stride's name: rows of delta and lse, pages, searches, splits, tiles by pointers.
WITHOUT_STRIDES = (
    ("padding", "padding/d64.py", ".to(tl.int64) * M_padded"),
    ("padding", "padding/d64.py", "tl.load(x + row.to(tl.int64)[:, None] * stride"),  # q, k, v, o, do
    ("padding", "padding/d64.py", "tl.store(x + row.to(tl.int64)[:, None] * stride"),  # o, dq, dk, dv
    ("paged_decode", "paged_decode/d128.py", "page.to(tl.int64) * stride_page"),
    ("paged_decode", "paged_decode/d128.py", "entry.to(tl.int64) * stride"),
    ("paged_decode", "paged_decode/d128.py", "(row // PAGE).to(tl.int64) * stride"),
    ("paged_decode", "paged_decode/d128.py", "tl.cast(start // PAGE, tl.int64) * stride"),
    ("paged_decode", "paged_decode/d128.py", ".to(tl.int64) * SPLITS"),
    ("document", "document/d128.py", "last.to(tl.int64) * stride"),
    ("varlen", "varlen/d128.py", "next.to(tl.int64) * stride"),
    ("bias", "bias/d64.py", "q_idx.to(tl.int64)[:, None] * N"),  # dpair
    ("bias", "bias/d64.py", "(b * H + h).to(tl.int64) * N"),  # dkey_bias
    ("block_sparse", "block_sparse/d128.py", "(tl.program_id(0) // tiles).to(tl.int64)"),  # lists of a group
    ("block_sparse", "block_sparse/d128.py", "line.to(tl.int64) * (S + 1)"),
    ("selected_blocks", "selected_blocks/d128.py", "line.to(tl.int64) * (S + 1)"),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("spec", "file", "product"), WITHOUT_STRIDES)
def test_another_product_without_its_cast_is_found(spec: str, file: str, product: str) -> None:
    text = texts(spec, "triton")[file]
    assert product in text
    cut = product.replace(".to(tl.int64)", "").replace("tl.cast(start // PAGE, tl.int64)", "start // PAGE")
    assert findings(text.replace(product, cut, 1))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("* 64\n            + list_item", "* 128\n            + list_item"),
        ("(N + 63) // 64", "(N + 63) // 32"),
        ("row_tiles = M * head_tiles", "row_tiles = tl.cdiv(M * (head_tiles * BLOCK_M), BLOCK_M)"),
    ],
    ids=["another block", "more blocks than the sequence has", "rows, not tiles"],
)
def test_positions_of_lists_are_bounded_by_what_the_host_counts(old: str, new: str) -> None:
    text = texts("selected_blocks", "triton")["selected_blocks/d128.py"]
    assert old in text
    assert findings(text.replace(old, new))


def planted(text: str) -> Iterator[str]:
    """A `.cu` file with one number of 64 bits less: a cast, the type of a stride, that of a row's place."""
    for match in re.finditer(r"\(long long\)(?!DV|M \* DV)", text):  # those two are small
        yield text[: match.start()] + text[match.end() :]
    for match in re.finditer(r"\blong long (?=[^;(){}=]*stride)|(?<=const )long long (?=\w+ =)", text):
        yield f"{text[: match.start()]}int {text[match.end() :]}"


@pytest.mark.parametrize(
    ("spec", "attention"),
    [
        ("local_sink", "local_sink"),
        ("paged_decode", "paged_decode"),
        ("varlen", "varlen"),
        ("bias", "bias"),
        ("fa1", "fa1"),
    ],
)
def test_a_cast_or_type_less_is_found_on_cuda(spec: str, attention: str) -> None:
    files = {
        name: text for name, text in texts(spec, "cuda.sm_80").items() if name.startswith(f"{attention}/")
    }
    assert files
    for name, text in files.items():
        for wrong in planted(text):
            assert cuda_findings(wrong), name


def test_a_finding_names_its_line() -> None:
    text = "@triton.jit\ndef f(x, stride, N):\n    at = N - 1\n    return tl.load(x + at * stride)\n"
    assert [str(one) for one in findings(text)] == ["line 4: at * stride has 32 bits"]
    wide = text.replace("N - 1", "N.to(tl.int64)")
    assert not findings(wide)
    assert findings(wide.replace("N.to(tl.int64)", "N.to(tl.int64).to(tl.int32)"))
    text = "struct Args { long long stride_qm; };\nfloat f(int i) {\n    return q_ptr[i * stride];\n}\n"
    assert [str(one) for one in cuda_findings(text)] == ["line 3: i * stride has 32 bits"]


def reads(at: str, before: str = "if True:") -> tuple[str, ...]:
    """What is found where a kernel reads at an offset."""
    return tuple(one.text for one in findings(_READS.format(before=before, at=at)))


_READS = """
@triton.jit
def _floor_div(x, size):
    return tl.where(x >= 0, x // size, -1 - (-1 - x) // size)

@triton.jit
def _floor_mod(x, size):
    return x - _floor_div(x, size) * size

@triton.jit
def f(X, SPLITS, M, K, T):
    {before}
        tl.load(X + ({at}))
"""


@pytest.mark.parametrize("of", ["0, {}", "{}", "0, {}, K", "{}, -1, -1"])
def test_the_counter_of_a_loop_is_bounded_by_its_ends(of: str) -> None:
    def found(end: str, at: str) -> tuple[str, ...]:
        return reads(at, f"for done in range({of.format(end)}):")

    at = "(tl.cdiv(SPLITS, 16) - 1 - done) * 16"
    assert not found("tl.cdiv(SPLITS, 16)", at)
    assert found("K", at) == (at,)
    assert found("tl.load(X)", at) == (at,)
    assert found("SPLITS * K", at) == (at,)  # may have overflowed
    assert found("SPLITS", "done * K") == ("done * K",)


def test_a_size_times_the_quotient_by_it_is_bounded_by_what_is_divided() -> None:
    at = "_floor_div(M, K // 2) * (K // 2)"
    assert not reads(at)
    for wrong in ("_floor_div(M, K // 2) * K", "_floor_div(M, 2) * K", "_floor_div(K, T) * T"):
        assert reads(wrong) == (wrong,)
    assert reads(f"{at} * 64") == (f"{at} * 64",)  # it is no smaller, either


def test_a_remainder_is_exact_whatever_its_quotient() -> None:
    assert not reads("_floor_mod(M, K)")
    assert not reads("K - _floor_div(K, T) * T")
    assert reads("_floor_mod(M, K) * T") == ("_floor_mod(M, K) * T",)
    assert reads("M - _floor_div(K, T) * T") == ("_floor_div(K, T) * T",)
    assert reads("_floor_mod(K * T, T)") == ("K * T",)


#: The first key that is kept follows from a remainder of 32 bits.
_REMAINDER = (
    "param K in {3}",
    "input q: f16[B, M, H, 64]",
    "input k, v: f16[B, N, H, 64]",
    "score = dot(q, k) / sqrt(64)",
    "mask = kv_idx != ((K + 7) - (q_idx % M))",
    "normalize = softmax",
    "output o: f16[B, M, H, 64]",
)


@settings(
    max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate]
)  # texts are too long to shrink
@example(spec_of(_REMAINDER))
@given(st.booleans().flatmap(lambda on_cuda: specs(targets=TARGETS if on_cuda else ("triton",))))
def test_addresses_of_random_specs_are_proved(text: str) -> None:
    for module in modules_of(text):
        files = render_files(module, path="a.attn", sha256="0" * 64)
        for name, kernel in kernels_among(files).items():
            assert not judge(name, kernel), kernel
