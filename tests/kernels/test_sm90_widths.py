"""Rows on Hopper whose columns are multiples of 8, thread by thread on the CPU: products are 16 columns deep,
and what they have beyond a row is in no tensor. Between the rows lies NaN, as it does behind the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
import torch

import attnc
from attnc.plan.sm90 import layout_of
from attnc.plan.sm90.backward import Sm90Backward
from attnc.target.files import render_files
from attnc.verify.case import Case, TensorLayout
from attnc.verify.check import check
from attnc.verify.subject import Subject, subject_of
from tests.by_day import some_by_day
from tests.profiles import is_night
from tests.targets import needs_gxx
from tests.verify.judging import modules_of, spec, subject_of_text

pytestmark = [needs_gxx, pytest.mark.slow]

LAZY = "softmax = online(maximum = lazy(20))"
DECODE = "loops = [kv], pack = gqa, tile.kv = 32, stages = 2, split.kv in {1, 3}"
SMALL = f"consumers = 2, tile.kv = 32, stages = 2, {LAZY}"
#: Rows 16 bytes further apart than they are long, which TMA takes.
APART = TensorLayout(order=(0, 1, 2, 3), gaps=(0, 0, 0, 8))


def dense(
    d: int,
    dv: int,
    schedule: str = LAZY,
    *,
    mask: str = "causal",
    score: str = "dot(q, k) / 8",
    more: Sequence[str] = (),
    values: str = "",
    grads: bool = False,
) -> str:
    """Prompts. values: the storage of v."""
    lines = [
        f"input q: bf16[B, M, H, {d}]",
        f"input k: bf16[B, N, H, {d}]",
        f"input v: bf16[B, N, H, {dv}]{values}",
        *more,
        f"score = {score}",
        f"mask = {mask}",
        "normalize = softmax",
        f"output o: bf16[B, M, H, {dv}]",
        "output lse: f32[B, H, M]",
        *(["grad q, k, v"] if grads else []),
    ]
    return spec(lines, schedule, target="cuda.sm_90a")


def grouped(d: int, dv: int, schedule: str, *, page: int = 0, values: str = "", heads: str = "Hkv") -> str:
    """Queries whose heads share keys, which may lie in pages. values: the storage of v, if another."""
    queries = "Hkv * G" if heads == "Hkv" else "G"
    pages = f" via paged(table, page = {page})" if page else ""
    lines = [
        f"input q: f16[B, M, {queries}, {d}]",
        f"input k: f16[B, N, {heads}, {d}]{pages}",
        f"input v: f16[B, N, {heads}, {dv}]{values or pages}",
        *(["input table: i32[B, P]"] if page else []),
        "input lens: i32[B]",
        "length N = lens[b]",
        "score = dot(q, k) / 8",
        "mask = causal",
        "normalize = softmax",
        f"output o: f16[B, M, {queries}, {dv}]",
        f"output lse: f32[B, {queries}, M]",
    ]
    return spec(lines, schedule, target="cuda.sm_90a")


def packed(d: int, dv: int) -> str:
    """Sequences one behind the other, whose last rows leave one by one."""
    lines = [
        f"input q: bf16[T, H, {d}] via ragged(cu_q)",
        f"input k: bf16[S, H, {d}] via ragged(cu_k)",
        f"input v: bf16[S, H, {dv}] via ragged(cu_k)",
        "input cu_q, cu_k: i32[B + 1]",
        "score = dot(q, k) / 8",
        "mask = causal",
        "normalize = softmax",
        f"output o: bf16[T, H, {dv}]",
        "grad q, k, v",
    ]
    return spec(lines, SMALL, target="cuda.sm_90a")


def is_right(
    made: Subject, dims: dict[str, int], apart: Collection[str] = ("q", "k", "v", "o", "do")
) -> None:
    """Judges each config with rows side by side and apart from each other; by day one of the two, in turn."""
    named = {tensor.name for tensor in made.variant.attention.inputs} | {"o", "do"}
    lying: tuple[dict[str, TensorLayout], ...] = ({name: APART for name in apart if name in named}, {})
    for config in range(len(made.configs)):
        for layouts in lying if is_night() else (lying[config % 2],):
            case = Case(dims=dims, logits="rising", config=config, seed=config, layouts=layouts)
            found = check(made, case, fills=("nan",))
            assert found.ok, found.message


PROMPT = {"B": 1, "H": 2, "M": 130, "N": 200}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "widths",
    some_by_day(
        [
            *[(8, 8), (24, 40), (40, 24), (72, 72), (88, 64), (64, 88)],
            *[(120, 120), (192, 136), (200, 72), (248, 248)],
        ],
        of=3,
    ),
)
def test_every_width(widths: tuple[int, int]) -> None:
    d, dv = widths
    is_right(subject_of_text(dense(d, dv)), PROMPT)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("d", "dv", "tiles", "way"),
    [
        (72, 72, "tile.kv = 64, stages = 2", "tile"),
        (136, 136, "tile.kv = 64, stages = 2", "q"),
        (136, 136, "tile.kv = 96, stages = 2", "v"),
        (136, 136, "consumers = 3, tile.kv = 64, stages = 2", ""),
    ],
)
def test_every_way_out(d: int, dv: int, tiles: str, way: str) -> None:
    text = dense(d, dv, f"{LAZY}, {tiles}")
    (module,) = modules_of(text)
    assert layout_of(module.kernel).way_out(module.kernel.configs[0]) == way
    is_right(subject_of_text(text), PROMPT)


BIAS = ("input bias: f32[B, N]",)
KINDS = {
    "cluster": dense(72, 40, f"{SMALL}, cluster = 2"),
    "cluster_and_turns": dense(136, 200, f"{SMALL}, cluster = 2, pingpong = true"),
    "turns": dense(40, 88, f"{SMALL}, pingpong = true, overlap = false"),
    "two_blocks": dense(40, 88, f"{SMALL}, blocks = 2, overlap = false"),
    "one_or_two_blocks": dense(64, 64, f"{SMALL}, blocks in {{1, 2}}, order = longest_first"),
    "alibi": dense(
        72,
        72,
        SMALL,
        score="dot(q, k) / 8 - slope[h] * (q_pos - kv_idx)",
        more=("input slope: f32[H]",),
    ),
    "key_bias": dense(72, 136, SMALL, score="dot(q, k) / 8 + bias[b, kv_idx]", more=BIAS),
    "pairs": dense(
        40, 72, SMALL, score="dot(q, k) / 8 + bias[h, q_idx, kv_idx]", more=("input bias: f32[H, M, N]",)
    ),
    "prefix": dense(72, 40, SMALL, values=" via prefix(k)"),
    "lengths": dense(72, 40, SMALL, more=("input lens: i32[B]", "length N = lens[b]")),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", some_by_day(KINDS, of=2))
def test_every_kind_of_prompt(kind: str) -> None:
    is_right(subject_of_text(KINDS[kind]), PROMPT)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("widths", "page"), some_by_day([(8, 24), (72, 72), (64, 72), (136, 40), (248, 200)], [16, 1, 20], of=3)
)
def test_prompts_over_pages(widths: tuple[int, int], page: int) -> None:
    d, dv = widths
    dims = {"B": 2, "M": 70, "G": 2, "Hkv": 1, "N": 110}
    is_right(subject_of_text(grouped(d, dv, SMALL, page=page)), dims)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("widths", "page"),
    some_by_day([(8, 8), (40, 24), (72, 72), (72, 64), (64, 72), (248, 136)], [0, 16, 4], of=6),
)
def test_decoding(widths: tuple[int, int], page: int) -> None:
    d, dv = widths
    dims = {"B": 2, "M": 3, "G": 3, "Hkv": 2, "N": 110}
    is_right(subject_of_text(grouped(d, dv, DECODE, page=page)), dims)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("widths", "page"),
    some_by_day([(72, 40), (200, 72), (136, 128), (144, 128), (328, 256)], [0, 16, 1], of=3),
)
def test_values_that_are_columns_of_decoded_keys(widths: tuple[int, int], page: int) -> None:
    d, dv = widths
    more = "" if dv % 128 else ", consumers = 2"
    text = grouped(d, dv, f"{DECODE}{more}", page=page, values=" via prefix(k)", heads="1")
    made = subject_of_text(text)
    is_right(made, {"B": 2, "M": 3, "G": 3, "N": 110}, apart=("q", "k", "o"))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "widths",
    some_by_day(
        [
            (8, 8, "atomic"),
            (40, 24, "atomic"),
            (24, 40, "ordered"),
            (72, 72, "ordered"),
            (120, 88, "atomic"),
            (88, 120, "two_pass"),
            (72, 64, "two_pass"),
            (64, 72, "two_pass"),
            (136, 136, "two_pass"),
            (200, 72, "two_pass"),
            (72, 248, "two_pass"),
        ],
        of=3,
    ),
)
def test_gradients(widths: tuple[int, int, str]) -> None:
    d, dv, way = widths
    text = dense(d, dv, f"{LAZY}\n  backward {{ accumulate.dq = {way} }}", grads=True)
    (module,) = modules_of(text)
    assert module.backward is not None
    assert isinstance(module.backward.layout, Sm90Backward)
    assert "dkdv" in module.backward.layout.by_wgmma
    is_right(subject_of_text(text), {**PROMPT, "H": 1})


@pytest.mark.parametrize("widths", some_by_day([(72, 40), (136, 200)], of=2))
def test_gradients_of_a_capped_score(widths: tuple[int, int]) -> None:
    """Of wide heads dk and dv have a kernel each."""
    is_right(
        subject_of_text(dense(*widths, score="softcap(dot(q, k) / 8, 2)", grads=True)), {**PROMPT, "H": 1}
    )


@pytest.mark.parametrize("widths", some_by_day([(40, 24), (72, 40), (136, 200)], of=3))
def test_gradients_in_f32(widths: tuple[int, int]) -> None:
    """They leave from registers, as do zeros of a tile of keys that nobody sees."""
    text = dense(*widths, mask="window(40, 0)", grads=True).replace(
        "grad q, k, v", "grad q\n  grad k, v: f32"
    )
    is_right(subject_of_text(text), {"B": 1, "H": 1, "M": 70, "N": 330})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("gap", [8, 5])
def test_rows_anywhere(gap: int) -> None:
    """What TMA does not take, for its address or its strides, is copied first."""
    layouts = {
        "q": TensorLayout(order=(0, 2, 1, 3), gaps=(0, 0, 0, gap)),
        "k": TensorLayout(order=(2, 0, 1, 3), gaps=(0, 3, 0, 0), offset=gap),
        "v": TensorLayout(order=(0, 1, 2, 3), gaps=(0, 0, 1, gap)),
        "o": TensorLayout(order=(0, 2, 1, 3), gaps=(1, 0, 0, gap)),
    }
    for text in (dense(72, 40, SMALL), grouped(72, 40, DECODE)):
        heads = {"Hkv": 2, "G": 1} if "Hkv" in text else {"H": 2}
        case = Case(dims={"B": 2, "M": 5, "N": 70, **heads}, layouts=layouts)
        found = check(subject_of_text(text), case, fills=("nan",))
        assert found.ok, found.message


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shift", [0, 8, 1])
def test_a_prepared_call_reads_addresses(shift: int) -> None:
    """Another view of the same elements gives the same, also where they are copied because their address, a
    multiple of 2 bytes, is none of 16.
    """
    call = attnc.compile(dense(64, 64, SMALL), target="cuda.sm_90a").module.default.CALL
    torch.manual_seed(0)
    given = [torch.randn(1, n, 2, 64).bfloat16() for n in (5, 70, 70)]
    o, lse = call.run((*given,))
    out = torch.empty_like(o), torch.empty_like(lse)
    call.run((*given,), out)
    shifted = [torch.cat([x.new_zeros(shift), x.flatten()])[shift:] for x in (*given, o * torch.nan)]
    *turned, other = [x.view_as(y).transpose(1, 2) for x, y in zip(shifted, (*given, o), strict=True)]
    into = other, torch.full_like(lse, torch.nan)
    again, again_into = call.resume(given), call.resume(given, out)
    again_into(turned, into)
    for found in (again(turned), (into[0].transpose(1, 2), into[1])):
        assert torch.equal(found[0], o)
        assert torch.equal(found[1], lse)


@pytest.mark.parametrize("widths", some_by_day([(72, 40), (40, 136)], of=2))
def test_packed_sequences(widths: tuple[int, int]) -> None:
    is_right(subject_of_text(packed(*widths)), {"B": 3, "H": 2, "M": 70, "N": 90}, apart=())


@pytest.mark.parametrize(
    ("text", "wrong", "instead"),
    [
        (
            dense(136, 136, f"{LAZY}, consumers = 3, tile.kv = 64, stages = 2"),
            "j < 136 / 8; ++j)",
            "j < DV / 8; ++j)",
        ),
        (grouped(72, 40, DECODE), "j < 40 / 8; ++j)", "j < COLUMNS / 8; ++j)"),
        (grouped(72, 40, DECODE), "if (column / 16 * 16 + 8 < 40)", ""),
    ],
    ids=["from registers", "of decoding", "of joined splits"],
)
def test_an_output_that_is_stored_as_wide_as_products_are_shows(text: str, wrong: str, instead: str) -> None:
    (module,) = modules_of(text)
    source = render_files(module, path="a.attn", sha256="")["default.cu"]
    assert source.count(wrong) == 1
    made = subject_of(module, {"default.cu": source.replace(wrong, instead)})
    heads = {"Hkv": 1, "G": 2} if "Hkv" in text else {"H": 2}
    found = [
        check(
            made,
            Case(dims={"B": 1, "M": 3, "N": 70, **heads}, config=config, layouts={"o": APART}),
            fills=("nan",),
        )
        for config in range(len(made.configs))
    ]
    assert any("memory around 'o' was written to" in verdict.message for verdict in found)


def test_a_plan_says_what_is_stored_and_what_is_multiplied() -> None:
    (module,) = modules_of(dense(72, 64))
    layout = layout_of(module.kernel)
    assert (layout.d, layout.d_multiplied, layout.qk.width) == (72, 80, 128)
    assert (layout.dv, layout.dv_multiplied, layout.v.width) == (64, 64, 64)
    assert layout.is_padded
