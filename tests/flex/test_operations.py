"""Every operation of mods, and random compositions: what the spec means is what torch computes, pair by
pair.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attnc.flex import FlexError
from attnc.flex.symbols import OPERATIONS
from tests.flex.meaning import check_meaning, check_tape, products, spec_slopes, torch_slopes, trace_at
from tests.flex.mods import CASES, Case, Setting
from tests.flex.random_mods import drawn

#: torch's own, of isin.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
ROOT = Path(__file__).parents[2]
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
_DRAW = torch.Generator().manual_seed(2)
PRODUCT = products(2, 2, 7, 9)
ROWS = torch.randn(9, 5, generator=_DRAW)
INTS = torch.randint(-4, 5, (9, 3), generator=_DRAW)
FLAGS = torch.rand(9, 3, generator=_DRAW) > 0.4
BYTES = torch.randint(0, 256, (9,), generator=_DRAW).to(torch.uint8)
SHORT = torch.randint(-30000, 30000, (9,), generator=_DRAW).to(torch.int16)
#: What texts may read beside score, b, h, q, kv.
SPACE = {"torch": torch, "F": F, "rows": ROWS, "ints": INTS, "flags": FLAGS, "bytes_": BYTES, "short": SHORT,
         "few": torch.tensor([1, 3, 4]), "wide": torch.ones(9, 33), "three": torch.tensor(3),
         "yes": torch.tensor(True)}  # fmt: skip


def _split(texts: str) -> tuple[str, ...]:
    return tuple(" ".join(text.split()) for text in texts.split(";"))


#: Functions of one float, where `x` stands for it: any, or one that is positive.
OF_ANY = _split(
    """
    torch.exp(x / 8); torch.exp2(x / 8); torch.special.exp2(x / 8); torch.tanh(x); torch.sigmoid(x);
    torch.special.expit(x); torch.erf(x); torch.special.erf(x); torch.sin(x); torch.cos(x);
    torch.expm1(x / 8); torch.special.expm1(x / 8); torch.reciprocal(x + 100); torch.erfc(x);
    torch.special.erfc(x); F.logsigmoid(x); F.softplus(x); F.softplus(x, beta=2); F.silu(x); F.relu(x);
    torch.relu(x); F.leaky_relu(x); F.leaky_relu(x, 0.3); F.elu(x / 4); F.elu(x / 4, alpha=0.5); F.gelu(x);
    F.gelu(x, approximate='tanh'); torch.cosh(x / 8); torch.sinh(x / 8); torch.tan(x / 40); torch.sign(x);
    torch.sgn(x); torch.square(x); torch.abs(x); torch.absolute(x); x.abs(); -x; +x; torch.neg(x);
    torch.negative(x); x.neg(); torch.positive(x); torch.clone(x); x.contiguous(); x.float(); x.double();
    x.to(torch.float32); x.type_as(score); x.bool(); x.view(()); x.reshape(()); x.expand(()); x.cpu();
    x.view_as(h); x.squeeze(); x.clamp(-1, 1); x.clamp(min=0.5); x.clamp(max=0.5); x.clip(0, 2);
    torch.clamp(x, -2); x.clamp_min(1); x.clamp_max(1); x.to(dtype=torch.bool); torch.zeros_like(x);
    torch.ones_like(x); x.new_zeros(()); x.new_ones(()); torch.full_like(x, 3); x.new_full((), 2.5);
    x.new_tensor(1.5); torch.full_like(x, 2, dtype=torch.int32) // 3 * x;
    x.new_ones((), dtype=torch.bool) & (x > 0); x[...] + x[()]; F.softplus(x, beta=0.5);
    torch.relu(x) ** 1.5; torch.relu(x) ** 2.5; torch.relu(x) ** 0.5; torch.relu(x) ** 2.0;
    F.relu6(x); F.hardtanh(x); F.hardtanh(x, -2, 0.5); F.hardsigmoid(x); F.hardswish(x); F.hardshrink(x);
    F.softshrink(x, 0.75); F.threshold(x, 0.5, -1.0); F.celu(x / 4, 0.5); F.selu(x / 4); F.mish(x);
    F.softsign(x); F.tanhshrink(x); torch.isnan(torch.sqrt(x)); torch.isinf(1 / x.clamp(0));
    torch.isfinite(torch.sqrt(x)); torch.nan_to_num(torch.sqrt(x)); torch.nan_to_num(x, 3.0);
    torch.isposinf(1 / x.clamp(0)); torch.isneginf(torch.log(x.clamp(0)));
    torch.nan_to_num(torch.log(x.clamp(0)), neginf=-1.0); x.clamp(1, -1); torch.clip(x, 0.5, -0.5)
    """
)
OF_POSITIVE = _split(
    """
    torch.log(x); torch.log2(x); torch.log10(x); torch.log1p(x); torch.special.log1p(x); torch.sqrt(x);
    torch.rsqrt(x); x ** -3.0; x ** -2.5; x ** -2.0; x ** -1.5; x ** -1.0; x ** -0.5; x ** 0.0; x ** 0.5;
    x ** 1.0; x ** 1.5; x ** 2.0; x ** 2.5; x ** 3.0; x ** 3.5; x ** 4.0; x ** 4.5; x ** 5.0; x ** 0;
    x ** 1; x ** 2; x ** -3; x ** 8; torch.pow(x, 3); torch.pow(x, 2.5); torch.float_power(x, 2);
    2 ** (x / 4); 2.0 ** -x; 1.5 ** x; 0.5 ** x; 8 ** (x / 10); torch.pow(2, x); torch.pow(3.0, x / 10)
    """
)
#: Of two floats.
OF_TWO = _split(
    """
    torch.logaddexp(x, y); torch.logaddexp2(x, y); torch.logaddexp(x, x);
    torch.maximum(x, abs(x)); torch.minimum(x, y * 0 + x); torch.maximum(-x, torch.tensor(0.0));
    torch.max(3 * x, x); torch.min(x, torch.relu(x)); torch.fmax(2 * x, abs(x)); torch.fmin(x, 3 * x);
    x + y; x - y; x * y; x / (y * y + 1); torch.add(x, y); torch.add(x, y, alpha=3); torch.sub(x, y);
    torch.sub(x, y, alpha=0.5); torch.sub(x, y, alpha=-1); torch.add(x, y, alpha=-1);
    torch.subtract(x, y); torch.rsub(x, y); torch.mul(x, y);
    torch.multiply(x, y); torch.div(x, y * y + 1); torch.divide(x, y * y + 1);
    torch.true_divide(x, y * y + 1); 1 - x; 3 / (x * x + 1); torch.minimum(x, y); torch.maximum(x, y);
    torch.fmin(x, y); torch.fmax(x, y); torch.min(x, y); torch.max(x, y); torch.lerp(x, y, 0.25);
    torch.addcmul(x, y, y); torch.addcmul(x, y, x, value=0.5); torch.where(x > y, x, y);
    torch.hypot(x, y); x.masked_fill(y > 0, 2); torch.where(x > 0, x, 1); torch.where(x > y, True, y > 0);
    torch.where(x > y, x > 0, y); x == y; x != y; x < y; x <= y; x > y; x >= y; torch.eq(x, y);
    torch.ne(x, y); torch.lt(x, y); torch.le(x, y); torch.gt(x, y); torch.ge(x, y); torch.not_equal(x, y);
    torch.less(x, y); torch.less_equal(x, y); torch.greater(x, y); torch.greater_equal(x, y)
    """
)
#: Of two integers, the second of them never 0.
OF_INTEGERS = _split(
    """
    i + j; i - j; i * j; i // j; i // 3; i // -2; i % j; i % 3; i % -4; torch.floor_divide(i, j);
    torch.remainder(i, 3); torch.div(i, j, rounding_mode='floor'); torch.div(i, j, rounding_mode='trunc');
    torch.div(q, j, rounding_mode='trunc'); torch.div(i, q + 1, rounding_mode='trunc');
    torch.div(kv, -3, rounding_mode='trunc'); torch.div(kv - 1, 2, rounding_mode='trunc'); torch.ceil(i / j);
    torch.ceil(i / -3); torch.ceil(i); torch.trunc(i / 4); torch.trunc(i / -2);
    torch.fix(i / j);
    torch.floor(i / j); torch.floor(i); (i / j).int(); (i / j).long(); (i / 3).to(torch.int32); i / j;
    torch.fmod(q, 3); torch.fmod(kv + 1, q + 1); torch.fmod(i, 3); torch.fmod(i, -4); torch.fmod(i, j);
    torch.fmod(short[kv], bytes_[q] + 1); torch.abs(i); torch.sign(i); i << 2; i >> 1; i >> 0;
    torch.bitwise_left_shift(i, 1); torch.bitwise_right_shift(i, 2); -i; ~i; i.bitwise_not(); i.int();
    i.long(); i.short(); i.char(); i.byte(); i.half() + 0.0; i.bool(); i.to(torch.int8);
    i.type(torch.int32); torch.minimum(i, j); torch.maximum(i, j); torch.clamp(i, -2, 3);
    torch.clamp(i, 3, -2);
    torch.where(i > j, i, j); i * (i > j); (i > j) + i; (i > j) + (i > 0); (i > j) * (i > 0);
    (i > j).int() - 1; i ** 2; i ** 3; three + i; three - i; three * i; three // j; three % j; three / j;
    three - score; score / three; bytes_[kv] + bytes_[q]; bytes_[kv] - 7; -bytes_[kv]; bytes_[kv] * 3;
    bytes_[kv] + 300 * i; short[kv] * 2; short[kv] - short[q]; short[kv] + bytes_[q]; torch.abs(short[kv]);
    bytes_[kv] // 2; bytes_[kv] % 7; torch.where(i > j, bytes_[kv], short[q]) * 2;
    torch.minimum(bytes_[kv], bytes_[q]) + 200; bytes_[kv].int() * 300; (i * 50).to(torch.uint8);
    (i * 9000).to(torch.int16); (i * 50).to(torch.int8) // 2;
    i & 1; i & 6; i & 5; i & -4; i & ~5; 3 & i; i & 0; i | 3; i | -4; 8 | i; i ^ 1; i ^ -3; i ^ 21;
    torch.bitwise_and(i, 2147483647); torch.bitwise_or(i, 12); torch.bitwise_xor(i, 12); i & -2147483648;
    q & kv; q | kv; q ^ kv; q & i; kv & three; (i & 7) ^ (j & 3); (i & 15) | (kv & 3); i & (i > j);
    bytes_[kv] & 15; bytes_[kv] & bytes_[q]; bytes_[kv] | bytes_[q]; bytes_[kv] ^ bytes_[q];
    short[kv] & 255; short[kv] ^ 255; short[kv] & bytes_[q];
    3 * bytes_[kv]; 200 + bytes_[kv]; (i > j) + bytes_[kv]; bytes_[kv] / -3;
    bytes_[kv] / (bytes_[q] + 1); i.detach(); (i > j).detach(); torch.fmod(q - 1, 3); ints[kv, 0] & q;
    ints[kv, 0] | q;
    ints[kv, 0] ^ q; i << kv; three << kv; i >> kv; short[kv].int() >> q; (ints[q, 1] >> kv) & 1;
    torch.bitwise_left_shift(three, q); torch.bitwise_right_shift(i, q); (q & -q) * 2; ~i & 7; i & h
    """
)
#: Integers of either sign divided by integers of either sign, known or not: by operation and dividend.
QUOTIENTS = tuple(
    tuple(operation.format(x, y) for y in ("3", "-3", "(q + 1)", "(-1 - kv)", "j"))
    for operation in (
        "torch.fmod({}, {})", "{} % {}", "{} // {}", "torch.div({}, {}, rounding_mode='trunc')",
        "torch.ceil({} / {})", "torch.floor({} / {})",
    )
    for x in ("q", "i", "(kv - 20)", "short[kv]", "bytes_[kv].int()")
)  # fmt: skip
#: Of two conditions.
OF_CONDITIONS = _split(
    """
    c & d; c | d; c ^ d; ~c; c == d; c != d; c + d; c * d; torch.bitwise_and(c, d); torch.bitwise_or(c, d);
    torch.bitwise_xor(c, d); torch.bitwise_not(c); torch.logical_and(c, d); torch.logical_or(c, d);
    torch.logical_xor(c, d); torch.logical_not(c); torch.logical_not(~c); torch.logical_not(c & d);
    torch.logical_and(c, i); torch.logical_or(i, c); torch.logical_xor(i, j); torch.logical_not(i);
    torch.minimum(c, d); torch.maximum(c, d); torch.where(c, d, ~d); yes & c; yes | c; yes ^ c; yes == c;
    c & True; False | c; c ^ True; torch.where(torch.ones_like(c), c, d);
    torch.where(torch.zeros_like(c), c, d); c < d; c >= d; c.int() + d.int() > 1; c.masked_fill(d, True);
    (c + 1) * (d + 2) > 3; c.float() > 0.5
    """
)
#: Of rows of captured tensors.
OF_ROWS = _split(
    """
    rows[kv].sum(); rows[kv].mean(); rows[kv].amax(); rows[kv].amin(); rows[kv].prod(); ints[q].sum();
    ints[kv].prod(); flags[kv].any(); flags[kv].all(); flags[kv].sum(); flags[kv].float().mean();
    torch.sum(rows[kv] * rows[q]); torch.dot(rows[kv], rows[q]); torch.inner(rows[kv], rows[q]);
    torch.vdot(rows[kv], rows[q]); (rows[kv] - rows[q]).abs().amax(); rows[kv][2]; rows[kv, -1];
    rows[kv][-2]; (rows[kv] * 2 + 1)[3]; (rows[kv] - 1)[3,]; torch.where(rows[kv] > 0, rows[q], 0.0).sum();
    (ints[q] == ints[kv]).all(); torch.amax(rows[kv]); torch.mean(rows[q] ** 2); (1 - rows[kv]).sum();
    rows[-1 - kv][0]; rows[q - kv][1]; (rows[kv] * 2).ndim + rows[kv].ndim; (rows[kv] * 2).shape[0];
    rows[kv].shape[0] * x; x.ndim + x.dim() + x.numel() + len(x.size()) + len(x.shape);
    torch.isin(kv, few); torch.isin(kv, few, invert=True); torch.isin(i, few - 2) * x; torch.isin(q, few[:0]);
    torch.bucketize(kv, few); torch.bucketize(kv, few, right=True); torch.bucketize(x, few / 2) * 0.5;
    torch.searchsorted(few, kv); torch.searchsorted(few, kv, side='right'); rows[torch.bucketize(q, few), 2];
    torch.searchsorted(ints[3].sort().values, i, right=True)
    """
)


def mod_of_text(text: str, *, is_mask: bool) -> Callable[..., Any]:
    """Returns a mod of this text, whose value is made a score."""
    lines = {
        "x": "x = torch.abs(score) + 0.25" if text in OF_POSITIVE else "x = score * 1.5 - 0.25 * h",
        "y": "y = score * 0.5 + rows[kv, 1]",
        "i": "i = q - kv + 0 * b",
        "j": "j = torch.where(q > kv, kv - 9, q + 1)",
        "c": "c = q >= kv",
        "d": "d = (q + kv) % 3 == 0",
    }
    used = [line for name, line in lines.items() if re.search(rf"\b{name}\b", text)]
    body = "".join(f"    {line}\n" for line in used)
    head = "b, h, q, kv" if is_mask else "score, b, h, q, kv"
    result = text if is_mask else f"score * 0 + ({text})"
    space: dict[str, Any] = dict(SPACE)
    exec(f"def mod({head}):\n{body}    return {result}\n", space)
    mod: Callable[..., Any] = space["mod"]
    return mod


def _sum(texts: Sequence[str]) -> str:
    """Returns the sum of texts, each of which has a factor of its own."""
    return " + ".join(f"{1 + 0.37 * at} * ({text})" for at, text in enumerate(texts))


TEXTS: Mapping[str, bool] = {
    **dict.fromkeys((*OF_ANY, *OF_POSITIVE, *OF_TWO, *OF_INTEGERS, *OF_ROWS), False),
    **dict.fromkeys(OF_CONDITIONS, True),
}


GROUPS = {
    "one": OF_ANY, "positive": OF_POSITIVE, "two": OF_TWO, "integers": OF_INTEGERS,
    "conditions": OF_CONDITIONS, "rows": [_sum(OF_ROWS[at : at + 6]) for at in range(0, len(OF_ROWS), 6)],
    "quotients": [_sum(texts) for texts in QUOTIENTS],
}  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_a_tape_computes_what_torch_computes(group: str) -> None:
    for text in GROUPS[group]:
        print(text)
        mod = mod_of_text(text, is_mask=text in OF_CONDITIONS)
        is_mask = text in OF_CONDITIONS
        check_tape(None if is_mask else mod, mod if is_mask else None, PRODUCT, has_rows=group == "rows")


@pytest.mark.one_in(29)
@pytest.mark.parametrize("text", TEXTS)
def test_an_operation_means_what_torch_computes(text: str) -> None:
    mod = mod_of_text(text, is_mask=TEXTS[text])
    check_meaning(None if TEXTS[text] else mod, mod if TEXTS[text] else None, PRODUCT)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("text", [text for text, is_mask in TEXTS.items() if not is_mask])
def test_the_derivative_of_an_operation_is_torchs(text: str) -> None:
    """At 0 too, where many have a kink: scores of padding are 0."""
    mod = mod_of_text(text, is_mask=False)
    found, expected = spec_slopes(mod, PRODUCT), torch_slopes(mod, PRODUCT)
    torch.testing.assert_close(found, expected.double(), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", [case for case in CASES if not case.refused], ids=lambda case: case.name)
def test_a_mod_of_the_table_means_what_torch_computes(case: Case) -> None:
    setting = Setting(S=24)
    check_meaning(*case.make(setting), products(setting.B, setting.H, setting.S, setting.S))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", range(0, 2000 if NIGHTLY else 48, 8))
def test_random_mods_mean_what_torch_computes(first: int) -> None:
    for seed in range(1000 + first, 1008 + first):
        draw = drawn(seed)
        print(draw)
        (B, H, M, _), N = draw.q.shape, draw.k.shape[2]
        check_meaning(draw.score_mod, draw.mask_mod, products(B, H, M, N))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("torch.fmod(q, 3)", "q % 3"),
        ("torch.div(q, 3, rounding_mode='trunc')", "q // 3"),
        ("torch.div(q, kv, rounding_mode='trunc')", "q // kv"),
        ("(bytes_[kv] // 2).to(torch.uint8)", "bytes_[kv] // 2"),
        ("bytes_[kv].to(torch.int16) + bytes_[q].to(torch.int16)", "bytes_[kv].int() + bytes_[q].int()"),
        ("three.long() * 2", "three * 2"),
        ("~~c", "c"),
        ("c & True", "c"),
        ("torch.clone(x)", "x"),
        ("rows[torch.abs(i) // 2 + bytes_[q] % 2, 1]", "rows[torch.abs(i) // 2 + bytes_[q] % 2][1]"),
    ],
)
def test_nothing_is_computed_that_changes_nothing(text: str, plain: str) -> None:
    """What is known of integers spares what negative ones need."""
    found, expected = (trace_at(mod_of_text(each, is_mask=False), None, PRODUCT) for each in (text, plain))
    assert found.tape.show(found.score, 9) == expected.tape.show(expected.score, 9)


def test_defaults_of_operations_are_torchs() -> None:
    for name in sorted(OPERATIONS):
        of_torch = getattr(F, name, getattr(torch, name, None))
        if not isinstance(of_torch, FunctionType):
            continue
        theirs = inspect.signature(of_torch).parameters
        for parameter in inspect.signature(OPERATIONS[name]).parameters.values():
            if parameter.name in theirs and parameter.default is not parameter.empty:
                assert parameter.default == theirs[parameter.name].default, (name, parameter.name)


#: What mods of these texts are told: the code, and words of the message.
REFUSED = {
    "torch.isin(kv, wide[0])": "E0903.*rows have 32 elements",
    "torch.bucketize(kv, wide)": "E0903.*a tensor of shape",
    "torch.dot(rows[kv], ints[q])": "E0903.*rows of 5 and 3 elements",
    "(rows[kv] * ints[q]).sum()": "E0903.*rows of 3 and 5 elements",
    "i & (1 << 31)": "E0901.*bits of 2147483648",
    "i | (-1 << 32)": "E0901.*bits of -4294967296",
    "i << 31": "E0901.*a shift by 31",
    "i >> -1": "E0901.*a shift by -1",
    "i & ints[kv, 0]": "E0901.*'&' of these integers",
    "x & 3": "E0901.*'&' of floats",
    "x << kv": "E0901.*a shift of floats",
    "x.int()": "E0901.*a float cannot become an integer",
    "x // 2": "E0901.*'//' of floats",
    "x % 2": "E0901.*'%' of floats",
    "torch.div(x, 2, rounding_mode='trunc')": "E0901.*rounding_mode='trunc'",
    "torch.floor(x)": "E0901.*'floor' cannot be written",
    "torch.ceil(x)": "E0901.*'ceil' cannot be written",
    "torch.trunc(x)": "E0901.*'trunc' cannot be written",
    "x.detach()": "E0901.*'detach' cannot be written",
    "x ** 8.5": "E0901.*'pow' with this exponent",
    "x ** 0.25": "E0901.*'pow' with this exponent",
    "(-2.0) ** x": "E0901.*'pow' with this exponent",
    "x.view(torch.int32)": "E0901.*bits as another type",
    "x[0]": "E0901.*a scalar has no axes",
    "x[q]": "E0901.*a scalar has no axes",
    "(rows[kv] * 2)[None]": "E0901.*a row of values takes a number",
    "rows[kv, :].sum()": "E0901.*':' as an index",
    "rows[kv, ...].sum()": "E0901.*'...' as an index",
    "rows[kv, True]": "E0901.*'True' as an index",
    "rows[kv, q, h]": "E0903.*3 indices of a tensor with 2 axes",
    "rows[q > kv, 0]": "E0903.*an index that is a bool",
    "rows[kv] + 1": "E0903.*score_mod .* returned a value of shape",
    "wide[kv].sum()": "E0903.*a value of shape .33.",
    "rows.sum() + rows": "E0903.*a tensor of shape .9, 5.",
    "x + 'a'": "E0903.*a str in a mod",
    "rows.index_select(0, kv)": "E0901.*a lookup by name",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_no_spec_can_say_is_refused(text: str) -> None:
    mod = mod_of_text(text, is_mask=False)
    with pytest.raises(FlexError, match=rf"(?s){REFUSED[text]}"):
        trace_at(mod, None, PRODUCT)


def test_powers_have_torchs_slopes_at_0() -> None:
    """Where that of a root has none."""
    for exponents in ((0.5,), (1.0, 1.5, 2.0, 2.5, 3)):
        text = _sum([f"torch.abs(score) ** {exponent}" for exponent in exponents])
        found, right = (
            slopes(mod_of_text(text, is_mask=False), PRODUCT) for slopes in (spec_slopes, torch_slopes)
        )
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert right.isnan().any() == (exponents == (0.5,))


def test_every_operation_of_the_docs_is_among_them() -> None:
    page = (ROOT / "docs" / "flex.md").read_text(encoding="utf-8")
    table = page.partition("\n## Operations\n")[2].partition("\nRefused")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`\.?([a-z_0-9]+)`", row)}
    called = set(re.findall(r"[a-z_]\w*", " ".join(TEXTS)))
    assert named - called == {
        "and_masks",
        "or_masks",
        "noop_mask",
    }  # of torch's own module, and of the table of mods
