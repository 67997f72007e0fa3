"""Keys and values of 8 bits: the kernel has the bits of that of 16 bits on the same numbers, in every kind of
storage and loop; and a scale of v, which is a factor of o.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import attnc
from attnc.diagnostics import DiagnosticError
from attnc.model.dtypes import DType
from attnc.plan.device import DEVICES
from attnc.plan.listed_rows import is_of_page
from attnc.plan.signature import key_bytes
from attnc.plan.triton.resources import estimate, misfit, unreadable
from attnc.runtime.loader import load_text
from attnc.runtime.toolchains import usage_of
from attnc.support.arguments import DTYPES
from attnc.target.triton.device import print_functions
from attnc.target.triton.printer import widening
from attnc.target.triton.render import triton_environment
from attnc.verify.case import Case
from attnc.verify.check import same_bits
from attnc.verify.narrow import _pairs, twin_of
from attnc.verify.problem import FILLS, Value, build
from attnc.verify.rerun import FinishedRun
from attnc.verify.storage import alter, convert
from attnc.verify.subject import Subject, subject_of
from attnc.verify.tolerance import expect
from tests.by_day import some_by_day
from tests.plans import module_of
from tests.targets import needs_gxx
from tests.verify.judging import assert_within_bound, every_fill, modules_of, spec, subject_of_text

NARROW = tuple(dtype for dtype in DType if dtype.is_narrow)
DECODE = "loops = [kv], pack = gqa\n  tile.q = 16, tile.kv = 32\n  split.kv = 3"
TILES = "tile.q = 16, tile.kv in {32, 16}"
#: By name the axes of q, those of k and v, what is stored where, and the schedule.
KINDS: Mapping[str, tuple[str, str, tuple[str, ...], str]] = {
    "forward": ("B, M, Hkv * G", "B, N, Hkv", (), f"{TILES}\n  loops = [q, kv]"),
    "heads first": ("B, Hkv * G, M", "B, Hkv, N", (), f"{TILES}\n  loops = [q, kv]"),
    "two passes": ("B, M, Hkv * G", "B, N, Hkv", (), f"{TILES}\n  softmax = two_pass"),
    "every step": ("B, M, Hkv * G", "B, N, Hkv", (), f"{TILES}\n  softmax = online(rescale = every_step)"),
    "keys first": (
        *("B, M, Hkv * G", "B, N, Hkv", ()),
        f"{TILES}\n  loops = [kv, q]\n  softmax = online(rescale = every_step)",
    ),
    "persistent": ("B, M, Hkv * G", "B, N, Hkv", (), f"{TILES}\n  persistent = true"),
    "packed": (
        *("T, Hkv * G", "S, Hkv", ("via ragged(q_ends)", "via ragged(k_ends)")),
        f"{TILES}\n  loops = [q, kv]",
    ),
    "pages": ("T, Hkv * G", "B, N, Hkv", ("via ragged(q_ends)", "via paged(slots, page = 8)"), TILES),
    "decode": ("B, M, Hkv * G", "B, N, Hkv", (), DECODE),
    "decode pages": ("B, M, Hkv * G", "B, N, Hkv", ("", "via paged(slots, page = 8)"), DECODE),
    "unified maximum": (
        *("B, M, Hkv * G", "B, N, Hkv", ()),
        f"{DECODE}\n  softmax = unified_max(phi = 0.5, bounds = [-4, 4], fallback = online)",
    ),
    "prefix": ("B, M, Hkv * G", "B, N, Hkv", ("", "", "prefix"), TILES),
    "decode prefix": ("B, M, Hkv * G", "B, N, Hkv", ("", "via paged(slots, page = 8)", "prefix"), DECODE),
}
#: Types of k and v; those of a prefix are alike.
PAIRS = (("e4m3", "e4m3"), ("e5m2", "i8"), ("i8", "bf16"), ("bf16", "e5m2"))
DIMS = {"B": 2, "M": 37, "N": 75, "Hkv": 2, "G": 2}


def text_of(kind: str, k: str, v: str, *, q: str = "bf16", scaled: bool = True, also: str = "") -> str:
    """A spec of this kind: a scale for each head of k, and of v one for each sequence and head."""
    rows, keys, (of_q, of_k, *prefix), schedule = _kind(kind)
    d, dv = (48, 32) if prefix else (24, 40)
    lines = [
        f"input q: {q}[{rows}, {d}] {of_q}",
        f"input k: {k}[{keys}, {d}] {of_k}",
        f"input v: {v}[{keys}, {dv}] {'via prefix(k)' if prefix else of_k}",
        "input ks: f32[Hkv]",
        "score = dot(q, k) * ks[h // G] / sqrt(D)",
        "mask = causal" if "loops = [kv, q]" not in schedule else "mask = window(40, 3)",
        f"output o: {q}[{rows}, {dv}]",
        f"output lse: f32[{rows}]",
        also,
    ]
    if scaled:
        lines.append("input vs: f32[B, H]")
    lines.append(f"normalize = softmax{'(v_scale = vs[b, h])' if scaled else ''}")
    lines += ["input q_ends: i32[B + 1]"] if "q_ends" in of_q else []
    lines += ["input k_ends: i32[B + 1]"] if "k_ends" in of_k else []
    if "slots" in of_k:
        lines += ["input slots: i32[B, P]", "input lens: i32[B]", "length N = lens[b]"]
    return spec(lines, schedule)


def _kind(kind: str) -> tuple[str, str, tuple[str, ...], str]:
    rows, keys, storage, schedule = KINDS[kind]
    return rows, keys, (*storage, *("", "")[len(storage) :]), schedule


@cache
def subject(kind: str, k: str, v: str, q: str = "bf16") -> Subject:
    return subject_of_text(text_of(kind, k, v, q=q))


def case(made: Subject, **changes: object) -> Case:
    sizes = dict(DIMS)
    if made.plan is not None and made.plan.kernel.structure == "decode":
        sizes["M"] = 3
    return Case(**{"dims": sizes, "seed": 3, **changes})  # type: ignore[arg-type]  # fields of a case


def types_of(kind: str, pair: tuple[str, str]) -> tuple[str, str]:
    return (pair[0], pair[0]) if "prefix" in kind else pair


def widened(value: Value, dtype: torch.dtype) -> Value:
    """Numbers of 8 bits in another type; its strides stay as they are, as far as they can."""
    is_narrow = isinstance(value, torch.Tensor) and value.dtype in [DTYPES[narrow] for narrow in NARROW]
    return value.to(dtype) if is_narrow and isinstance(value, torch.Tensor) else value


def test_the_rule_for_8_bits_compares_every_config() -> None:
    """One that finds no twin of a config would hold of anything."""
    made = subject("forward", "e4m3", "e4m3")
    assert made.plan is not None
    twin = twin_of(made, made.plan)
    assert twin is not None
    assert [number for number, *_ in _pairs(made, twin)] == [*range(len(made.configs))]


@pytest.mark.parametrize(
    ("scale", "is_alike"),
    [
        ("ks[table[b, kv_idx // 16], kv_idx % 16, d // 32]", True),
        ("ks[table[b, kv_idx // 16], 0, d // 32]", True),
        ("ks[b, kv_idx % 16, d // 32]", False),
        ("ks[table[b, kv_idx // 16], kv_idx % 8, d // 32]", False),
        ("ks[0, kv_idx, d // 32]", False),
    ],
)
def test_pages_are_converted_where_all_sequences_scale_them_alike(scale: str, is_alike: bool) -> None:
    lines = (
        "input q: bf16[B, M, H, 128]",
        "input k, v: e4m3[B, N, H, 128] via paged(table, page = 16)",
        "input table: i32[B, P]",
        "input lens: i32[B]",
        "input ks: f32[R, S, 4]",
        "length N = lens[b]",
        f"score = dot(q, k * {scale})",
        "normalize = softmax",
        "output o: bf16[B, M, H, 128]",
    )
    (module,) = modules_of(spec(lines, "loops = [kv], pack = gqa"))
    attention = module.variant.attention
    assert is_of_page(attention, attention.column_scales["k"]) == is_alike


def test_three_of_four_cases_have_scales_of_all_pages() -> None:
    """Of keys whose scale is missing nothing is promised, and nothing would be verified."""
    attention = module_of("latent_types", "cuda.sm_90a").variant.attention
    for pages in range(8):
        case = Case(dims={"B": 2, "M": 1, "G": 1, "N": 130, "R": pages})
        scale, table = (build(attention, case).inputs[name] for name in ("scale", "block_table"))
        assert isinstance(scale, torch.Tensor)
        assert isinstance(table, torch.Tensor)
        assert (len(scale) > int(table.max())) == (pages % 4 != 3)


@pytest.mark.parametrize(("kind", "pair", "q"), some_by_day(KINDS, PAIRS[:3], ("bf16", "f16"), of=18))
def test_the_bits_are_those_of_the_same_numbers_in_16_bits(kind: str, pair: tuple[str, str], q: str) -> None:
    k, v = (q if dtype == "bf16" else dtype for dtype in types_of(kind, pair))
    narrow, wide = subject(kind, k, v, q), subject(kind, q, q, q)
    for number in range(len(narrow.configs)):
        run = FinishedRun.of(narrow, case(narrow, config=number, logits=("random", "spike")[number % 2]))
        same = FinishedRun.of(wide, run.case)
        inputs = {name: widened(value, DTYPES[q]) for name, value in run.inputs.items()}
        outputs = same.again(inputs)
        for name, output in run.outputs.items():
            assert same_bits(output, outputs[name]), (name, number)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "pair"), some_by_day(KINDS, PAIRS, of=8))
def test_outputs_are_within_the_bound(kind: str, pair: tuple[str, str]) -> None:
    made = subject(kind, *types_of(kind, pair))
    for number, (values, special) in enumerate(
        (("random", "none"), ("cancelling", "nan_v"), ("ones", "inf_k"))
    ):
        assert_within_bound(made, case(made, seed=number, values=values, special=special), fills=every_fill())


KERNEL = """import triton
import triton.language as tl

{function}

@triton.jit
def convert(x, y, STAYS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, {name}(tl.load(x + at), STAYS))
"""


def numbers(dtype: DType, element: DType, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """What the function of generated kernels makes of all codes, and what PyTorch does."""
    name = widening(dtype, element)
    function = print_functions([name], triton_environment(), {})
    module = load_text(KERNEL.format(function=function, name=name))
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(DTYPES[dtype]).to(device)
    found = []
    for stays in (False, True):
        found.append(torch.empty(256, dtype=DTYPES[element], device=device))
        module.convert[(1,)](codes, found[-1], stays, BLOCK=256)
    assert torch.equal(*(y.view(torch.int16) for y in found))
    return found[0].cpu(), codes.cpu().double().to(DTYPES[element])


def same_numbers(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether bits are the same, but for those of NaN."""
    at = ~expected.isnan()
    bits = got[at].view(torch.int16), expected[at].view(torch.int16)
    return torch.equal(*bits) and bool(got[~at].isnan().all())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("element", [DType.F16, DType.BF16])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_code_becomes_its_number(dtype: DType, element: DType) -> None:
    got, expected = numbers(dtype, element)
    assert same_numbers(got, expected)
    assert expected.isnan().sum() == {DType.E4M3: 2, DType.E5M2: 6, DType.I8: 0}[dtype]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", NARROW)
def test_numbers_that_are_stored_are_those_of_the_type(dtype: DType) -> None:
    given = torch.tensor(
        [0.0, -0.0, 1.0, -3.0, 1e9, -1e9, torch.nan, torch.inf, -torch.inf], dtype=torch.float64
    )
    numbers = convert(given, dtype).double().tolist()
    most = {DType.E4M3: 448, DType.E5M2: 57344, DType.I8: 127}[dtype]
    assert numbers[:5] == [0, 0, 1, -3, most]
    match dtype:
        case DType.E4M3:
            assert numbers[5] == -448
            assert all(number != number for number in numbers[6:])
        case DType.E5M2:
            assert numbers[5] == -57344
            assert numbers[6] != numbers[6]
            assert numbers[7:] == [torch.inf, -torch.inf]
        case _:
            assert numbers[5:] == [-128, -128, 127, -128]
    kept = convert(given, dtype)
    assert torch.equal(alter(kept, lambda x: x).view(torch.uint8), kept.view(torch.uint8))


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("kind", "scale"),
    some_by_day(
        ["forward", "decode", "every step", "packed"],
        ["0.25", "vs[b, q_idx]", "vs[h, q_pos - 1] * 2", "exp(vs[h, b]) + 0.5 * h - q_idx"],
        of=2,
    ),
)
def test_a_scale_of_v_may_depend_on_the_query(kind: str, scale: str) -> None:
    also = "" if "vs" not in scale else "input vs: f32[X, Y]"
    text = text_of(kind, "bf16", "bf16", scaled=False, also=also)
    made = subject_of_text(text.replace("normalize = softmax\n", f"normalize = softmax(v_scale = {scale})\n"))
    dims = {**case(made).dims, **({"X": 4, "Y": 70} if also else {})}
    for seed in range(2):
        assert_within_bound(made, case(made, dims=dims, seed=seed), fills=every_fill())


def scaled_by_key(kind: str, scale: str) -> Subject:
    """A kernel of this kind, where v has a scale of each key."""
    text = text_of(kind, *types_of(kind, PAIRS[1]), q="f16", scaled=False, also="input vs: f32[X, Y]")
    return subject_of_text(text.replace("normalize = softmax\n", f"normalize = softmax(v_scale = {scale})\n"))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kind", "scale"),
    some_by_day(
        [kind for kind in KINDS if kind != "unified maximum"],
        ["vs[b, kv_idx]", "vs[h // G, kv_idx] * (1 + q_idx) - 0.5 * h"],
        of=4,
    ),
)
def test_a_scale_of_v_may_depend_on_the_key(kind: str, scale: str) -> None:
    if kind == "keys first" and "q_idx" in scale:
        scale = "vs[h // G, kv_idx]"
    made = scaled_by_key(kind, scale)
    dims = {**case(made).dims, "X": 2, "Y": 70}  # of keys from the 70th on the scale is 0
    for seed, values in enumerate(("random", "cancelling")):
        assert_within_bound(made, case(made, dims=dims, seed=seed, values=values), fills=every_fill())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["forward", "two passes", "every step", "decode"])
def test_scales_of_keys_that_are_not_seen_count_for_nothing(kind: str) -> None:
    made = scaled_by_key(kind, "vs[b, kv_idx]")
    sizes = {**case(made).dims, "X": 2, "Y": 75}
    run = FinishedRun.of(made, case(made, dims=sizes))
    for spoiled in (torch.nan, torch.inf, -torch.inf):
        scales = run.tensor("vs").clone()
        scales[:, -1] = spoiled  # the last query alone sees the last key
        found = run.again({**run.inputs, "vs": scales})
        assert same_bits(found["o"][:, :-1], run.outputs["o"][:, :-1])
        assert not bool(found["o"][:, -1].isfinite().any())
        assert same_bits(found["lse"], run.outputs["lse"])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("scale", [0.0, -1.0, -0.0, 2.0**-140])
def test_scales_of_keys_of_every_kind_have_a_meaning(scale: float) -> None:
    made = scaled_by_key("forward", "vs[b, kv_idx]")
    run = FinishedRun.of(made, case(made, dims={**DIMS, "X": 2, "Y": 75}))
    found = run.again({**run.inputs, "vs": torch.full_like(run.tensor("vs"), scale)})["o"]
    ones = run.again({**run.inputs, "vs": torch.ones_like(run.tensor("vs"))})["o"]
    assert torch.equal(found, ones * scale if abs(scale) in (0, 1) else torch.zeros_like(ones))


#: Kinds of kernels that multiply elements of k and v by scales of their columns, and the columns of a block.
BLOCKS: Mapping[str, int] = {
    kind: 8 if "prefix" not in kind else 16 for kind in KINDS if kind != "keys first"
}


def in_blocks(kind: str, k: str, v: str, *, byte: bool = False) -> str:
    """A spec with a scale for each block of columns: a float, or a power of two by its exponent."""
    columns = BLOCKS[kind]
    index = f"[b, kv_idx, h // G, d // {columns}]"
    of_k = f"exp2(blocks{index} - 127)" if byte else f"blocks{index}"
    text = text_of(kind, k, v, scaled=False, also=f"input blocks: {'u8' if byte else 'f32'}[X, Y, Hkv, 6]")
    return text.replace("dot(q, k)", f"dot(q, k * {of_k})").replace(
        "normalize = softmax\n", f"normalize = softmax(v_scale = {of_k})\n"
    )


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("kind", "byte"), some_by_day(BLOCKS, (False, True), of=4))
def test_blocks_of_columns_have_scales(kind: str, byte: bool) -> None:
    made = subject_of_text(in_blocks(kind, *types_of(kind, PAIRS[0]), byte=byte))
    sizes = {**case(made).dims, "X": 2, "Y": 75}
    for seed in range(2):
        given = case(made, dims=sizes, seed=seed)
        run = FinishedRun.of(made, given)
        exponents = run.tensor("blocks")
        exponents = (exponents % 8 + 123).to(torch.uint8) if byte else exponents
        outputs = run.again({**run.inputs, "blocks": exponents})
        expected = expect(made.variant.attention, {**run.inputs, "blocks": exponents}, made.bound)
        for name, output in outputs.items():
            wanted = expected[name]
            with np.errstate(invalid="ignore"):
                near = np.abs(output.double().numpy() - wanted.value) <= wanted.allowed
            same = (output.double().numpy() == wanted.value) | np.isnan(
                output.double().numpy() + wanted.value
            )
            assert (near | same | wanted.open).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["forward", "decode pages", "prefix"])
def test_scales_of_columns_give_the_bits_of_rows_that_were_converted(kind: str) -> None:
    """Of the same numbers in 16 bits, each a product in float32 that is rounded once."""
    k, v = types_of(kind, ("e4m3", "e4m3"))
    made, plain = (
        subject_of_text(in_blocks(kind, k, v)),
        subject_of_text(text_of(kind, "bf16", "bf16", scaled=False)),
    )
    sizes = {**case(made).dims, "X": 2, "Y": 96}
    run = FinishedRun.of(made, case(made, dims=sizes))
    scales = run.tensor("blocks")[:1, :1].expand_as(run.tensor("blocks")).contiguous()  # of all keys alike
    columns, inputs = BLOCKS[kind], {name: x for name, x in run.inputs.items() if name != "blocks"}
    for name in ("k",) if "prefix" in kind else ("k", "v"):
        x = run.tensor(name)
        of_columns = scales[0, 0].repeat_interleave(columns, 1)[:, : x.shape[-1]]
        inputs[name] = (x.float() * of_columns).to(torch.bfloat16)
    outputs = run.again({**run.inputs, "blocks": scales})
    same = FinishedRun.of(plain, replace(run.case, dims=case(plain).dims)).again(inputs)
    for name, output in outputs.items():
        assert same_bits(output, same[name]), name


@pytest.mark.one_in(12)
@pytest.mark.parametrize("kind", some_by_day(KINDS, of=2))
def test_the_lse_is_without_the_scale_of_v(kind: str) -> None:
    scaled = FinishedRun.of(subject(kind, "e4m3", "e4m3"), case(subject(kind, "e4m3", "e4m3")))
    ones = torch.ones_like(scaled.tensor("vs"))
    plain = scaled.again({**scaled.inputs, "vs": ones})
    assert same_bits(scaled.outputs["lse"], plain["lse"])
    twice = scaled.again({**scaled.inputs, "vs": 2 * scaled.tensor("vs")})
    assert torch.equal(2 * scaled.outputs["o"], twice["o"])


def test_padding_of_every_type_is_hostile() -> None:
    """What lies between rows and in unused pages spoils a result that reads it."""
    for dtype in NARROW:
        made = subject("decode pages", dtype, dtype)
        attention = made.variant.attention
        found = {fill: build(attention, case(made), fill=fill).inputs["k"] for fill in FILLS}
        assert isinstance(found["nan"], torch.Tensor)
        spoiled = found["nan"].double()
        assert (spoiled.isnan() | (spoiled == -128)).any()


TEXT = """attention kv {{
  {params}
  input q: {q}[B, M, H, 16]
  input k: {k}[B, N, H, 16]
  input v: {v}[B, N, H, 16]
  score = dot(q, k) / 4
  normalize = softmax
  output o: {o}[B, M, H, 16]
}}
schedule kv for triton {{
  tile.q = 16, tile.kv = 16
}}
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("params", "q", "k", "v", "count"),
    [
        ("", "bf16", "e4m3", "bf16", 1),
        ("", "f16", "i8", "e5m2", 1),
        ("param KV in {bf16, e4m3, i8}", "bf16", "KV", "KV", 3),
        ("param K in {i8, e5m2}\n  param V in {f16, e4m3}", "f16", "K", "V", 4),
        ("param T in {f16, bf16}", "T", "e4m3", "T", 2),
        ("param T in {f16, bf16}\n  param KV in {e4m3, i8}", "T", "KV", "KV", 4),
    ],
)
def test_types_that_go_together(params: str, q: str, k: str, v: str, count: int) -> None:
    modules = modules_of(TEXT.format(params=params, q=q, k=k, v=v, o=q))
    assert len({module.variant.name for module in modules}) == len(modules) == count
    for module in modules:
        bound = module.kernel.bound
        assert bound.p_dtype == bound.input_dtype == module.variant.attention.q.dtype


@pytest.mark.parametrize(
    ("params", "q", "k", "v", "o"),
    [
        ("", "f32", "e4m3", "f32", "f32"),
        ("", "i8", "i8", "i8", "bf16"),
        ("", "bf16", "bf16", "f16", "bf16"),
        ("", "bf16", "i32", "bf16", "bf16"),
        ("", "bf16", "e4m3", "e4m3", "e4m3"),
        ("param KV in {f16, e4m3}", "bf16", "KV", "KV", "bf16"),
        ("param KV in {bf16, f16, e4m3}", "bf16", "KV", "KV", "bf16"),
        ("param T in {f16, bf16}\n  param KV in {bf16, e4m3}", "T", "KV", "KV", "T"),
        ("param T in {f16, f32}", "T", "e4m3", "T", "T"),
        ("param T in {bf16, e4m3}", "T", "T", "T", "bf16"),
    ],
)
def test_types_that_do_not_are_refused(params: str, q: str, k: str, v: str, o: str) -> None:
    with pytest.raises(DiagnosticError) as failure:
        modules_of(TEXT.format(params=params, q=q, k=k, v=v, o=o))
    assert {diagnostic.code for diagnostic in failure.value.diagnostics} == {"E0313"}


def test_a_family_calls_the_kernel_of_the_cache() -> None:
    """By the dtype of each of two caches, as of one."""
    text = TEXT.format(
        params="param K in {bf16, e4m3}\n  param V in {i8, bf16}", q="bf16", k="K", v="V", o="bf16"
    )
    family = attnc.compile(text)
    q = torch.randn(1, 5, 2, 16, dtype=torch.bfloat16)
    k, v = (torch.randint(-9, 10, (1, 20, 2, 16)).to(torch.int8) for _ in range(2))
    found = [
        family(q, k.to(of_k), v.to(of_v))
        for of_k in (torch.bfloat16, torch.float8_e4m3fn)
        for of_v in (torch.int8, torch.bfloat16)
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])
    with pytest.raises(ValueError, match=r"was not compiled for K = torch\.float8_e5m2"):
        family(q, k.to(torch.float8_e5m2), v)


def test_what_keys_take_is_counted_in_their_bytes() -> None:
    estimates = {}
    for dtype in ("bf16", "e4m3"):
        (module,) = modules_of(text_of("decode", dtype, dtype))
        needs = estimate(module.kernel.configs[0], module.variant, DEVICES["sm_90"])
        estimates[dtype] = {buffer.name: buffer.bytes for buffer in needs.buffers}
        assert key_bytes(module.variant.attention) == (24 + 40) * (2 if dtype == "bf16" else 1)
    assert 2 * estimates["e4m3"]["k"] == estimates["bf16"]["k"]
    assert 2 * estimates["e4m3"]["v"] == estimates["bf16"]["v"]


def test_gpus_that_do_not_read_e4m3_are_named() -> None:
    for dtype, wanted in (
        ("e4m3", "k and v of e4m3 need a GPU of compute capability 8.9 or newer"),
        ("e5m2", ""),
    ):
        (module,) = modules_of(text_of("forward", dtype, dtype))
        said = unreadable(module.variant.attention, DEVICES["sm_80"])
        assert said.startswith(wanted)
        assert bool(said) == bool(wanted)
        assert unreadable(module.variant.attention, DEVICES["sm_89"]) == ""
        rejection = misfit(module.kernel.configs[0], module.variant, DEVICES["sm_80"])
        assert (rejection is None) == (not wanted)
        if wanted:
            with pytest.raises(ValueError, match=wanted):
                usage_of(module, 0, DEVICES["sm_80"])


#: Byte 255 of e8m0, 2^128 here, beside keys above 0.
INFINITE_SCALES = """
attention a {{
  input q: bf16[B, M, Hkv * G, 64]
  input k, v: i8[B, N, Hkv, 64]
  input exponent: u8[B, N, Hkv, 2]
  score = dot(q, k * exp2(exponent[b, kv_idx, h // G, d // 32] - 127)) / 8
  mask = causal
  normalize = softmax
  output o: bf16[B, M, Hkv * G, 64]
  output lse: f32[B, Hkv * G, M]
}}

schedule a for {target} {{
  {schedule}
}}
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("target", "schedule"),
    [
        ("triton", "tile.q = 16, tile.kv = 16"),
        ("triton", "loops = [kv], pack = gqa, tile.q = 16, tile.kv = 16, split.kv = 2"),
        pytest.param("cuda.sm_90a", "loops = [kv], pack = gqa, tile.kv = 32", marks=needs_gxx),
    ],
)
def test_a_row_whose_scales_make_all_scores_minus_infinity_sees_no_key(target: str, schedule: str) -> None:
    [module] = modules_of(INFINITE_SCALES.format(target=target, schedule=schedule))
    made = subject_of(module)
    keys = torch.ones(1, 40, 1, 64, dtype=torch.int8, device=made.device)
    exponent = torch.full((1, 40, 1, 2), 255, dtype=torch.uint8, device=made.device)
    q = torch.full((1, 3, 2, 64), -0.5, dtype=torch.bfloat16, device=made.device)
    outputs = {
        "o": torch.full((1, 3, 2, 64), torch.nan, dtype=torch.bfloat16, device=made.device),
        "lse": torch.full((1, 2, 3), torch.nan, device=made.device),
    }
    made.run({"q": q, "k": keys, "v": keys, "exponent": exponent}, outputs, 0)
    assert not outputs["o"].any()
    assert torch.isneginf(outputs["lse"]).all()
