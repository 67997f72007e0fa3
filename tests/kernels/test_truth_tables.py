"""The language against tables written by hand: what the reference and the kernels share is seen by neither.

Every table is a literal. It is held against `evaluate` (through the parser, so precedence counts), against
the reference, and against a kernel of each target: with v = 1 at [j, j], o[i, j] is the weight of key j in
row i, so that a key is seen where it is not 0, and log(o[i, j]) + lse[i] is its score.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from attnc.diagnostics import DiagnosticError
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Expr
from attnc.model.attention import Attention
from attnc.model.resolve import resolve
from attnc.model.variants import variants
from attnc.reference import reference
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.target.files import render_files
from attnc.target.support import with_headers
from attnc.verify.subject import Subject
from tests.plan.planning import planned
from tests.targets import TARGETS, skip_without_compiler, small_tiles
from tests.verify.judging import spec, subject_of_text

INF = math.inf
#: x: the query sees the key; a row for each query. Of 3 queries over 5 keys, the last aligned with the last.
MASKS_3_5 = {
    "causal": ("xxx..", "xxxx.", "xxxxx"),
    "anticausal": ("..xxx", "...xx", "....x"),
    "window(1, 0)": (".xx..", "..xx.", "...xx"),
    "window(1, 1)": (".xxx.", "..xxx", "...xx"),
    "chunk(2)": ("..xx.", "..xx.", "....x"),
    "dilated(2)": ("x.x.x", ".x.x.", "x.x.x"),
    "dilated(3)": ("..x..", "x..x.", ".x..x"),
    "padding(4)": ("xxxx.", "xxxx.", "xxxx."),
    "first(2)": ("xx...", "xx...", "xx..."),
    "prefix_lm(1)": ("xxx..", "xxxx.", "xxxxx"),
    "prefix_lm(4)": ("xxxx.", "xxxx.", "xxxxx"),
    "neighborhood(3, 1)": (".xx.x", "xx.xx", "xxxxx"),
    "kv_idx <= q_idx": ("x....", "xx...", "xxx.."),
}
#: The same of 5 queries over 3 keys: the first two stand before the first key.
MASKS_5_3 = {
    "causal": ("...", "...", "x..", "xx.", "xxx"),
    "anticausal": ("xxx", "xxx", "xxx", ".xx", "..x"),
    "window(1, 0)": ("...", "...", "x..", "xx.", ".xx"),
    "window(1, 1)": ("...", "x..", "xx.", "xxx", ".xx"),
    "chunk(2)": ("...", "...", "xx.", "xx.", "..x"),
    "dilated(2)": ("x.x", ".x.", "x.x", ".x.", "x.x"),
    "dilated(3)": (".x.", "..x", "x..", ".x.", "..x"),
    "padding(4)": ("xxx", "xxx", "xxx", "xxx", "xxx"),
    "first(2)": ("xx.", "xx.", "xx.", "xx.", "xx."),
    "prefix_lm(1)": ("x..", "x..", "x..", "xx.", "xxx"),
    "prefix_lm(4)": ("xxx", "xxx", "xxx", "xxx", "xxx"),
    "neighborhood(3, 1)": ("xxx", ".xx", "xx.", "xxx", ".xx"),
    "kv_idx <= q_idx": ("x..", "xx.", "xxx", "xxx", "xxx"),
}
#: Values at kv_idx = 0, 1, 2, 3, 4 of one query; conditions as 0 and 1.
VALUES = {
    # chains, and how tightly words bind
    "1 <= kv_idx < 3": (0, 1, 1, 0, 0),
    "3 > kv_idx >= 1 != kv_idx": (0, 0, 1, 0, 0),
    "not kv_idx < 2 and kv_idx != 3": (0, 0, 1, 0, 1),
    "kv_idx < 1 or kv_idx > 1 and kv_idx < 3": (1, 0, 1, 0, 0),
    "not kv_idx == 1 or kv_idx == 1": (1, 1, 1, 1, 1),
    "not (kv_idx == 1 or kv_idx == 2)": (1, 0, 0, 1, 1),
    "(kv_idx < 2) == (kv_idx < 4)": (1, 1, 0, 0, 1),
    "(kv_idx < 2) != (kv_idx > 3)": (1, 1, 0, 0, 1),
    # division and remainder of negatives, and by them, and by 0
    "(kv_idx - 3) // 2": (-2, -1, -1, 0, 0),
    "(kv_idx - 3) % 2": (1, 0, 1, 0, 1),
    "(kv_idx - 3) // -2": (1, 1, 0, 0, -1),
    "(kv_idx - 3) % -2": (-1, 0, -1, 0, -1),
    "7 // (kv_idx - 2)": (-4, -7, 0, 7, 3),
    "7 % (kv_idx - 2)": (-1, 0, 0, 0, 1),
    "-7 // (kv_idx - 2)": (3, 7, 0, -7, -4),
    "-7 % (kv_idx - 2)": (-1, 0, 0, 0, 1),
    "-kv_idx // 2": (0, -1, -1, -2, -2),
    "-(kv_idx // 2)": (0, 0, -1, -1, -2),
    # `/` is of numbers, operators of one row go from left to right
    "kv_idx / 2": (0, 0.5, 1, 1.5, 2),
    "4 / 8 * kv_idx": (0, 0.5, 1, 1.5, 2),
    "2 - 3 - kv_idx": (-1, -2, -3, -4, -5),
    "8 / 4 / 2 * kv_idx": (0, 1, 2, 3, 4),
    "2 + 3 * kv_idx % 4": (2, 5, 4, 3, 2),
    "kv_idx * 5 // 3 * 2": (0, 2, 6, 10, 12),
    # outside of a tensor there is 0; table = [3, 1, 4], flags = [true, false, true], reals = [0.5, -2]
    "table[kv_idx - 1]": (0, 3, 1, 4, 0),
    "flags[kv_idx + 1]": (0, 1, 0, 0, 0),
    "reals[-kv_idx]": (0.5, 0, 0, 0, 0),
    "reals[1 - kv_idx]": (-2, 0.5, 0, 0, 0),
    # integers stay integers
    "min(kv_idx, 2) // 2": (0, 0, 1, 1, 1),
    "max(kv_idx, 1) / 2": (0.5, 0.5, 1, 1.5, 2),
    "abs(kv_idx - 2) % 2": (0, 1, 0, 1, 0),
    "min(kv_idx, 2.5)": (0, 1, 2, 2.5, 2.5),
    "clamp(kv_idx, 1, 3) // 1": (1, 1, 2, 3, 3),
    "clamp(kv_idx - 2, -0.5, 1)": (-0.5, -0.5, 0, 1, 1),
    "clamp(kv_idx, 3, 1)": (1, 1, 1, 1, 1),
    "where(kv_idx < 2, 1, 2.5)": (1, 1, 2.5, 2.5, 2.5),
    "where(kv_idx % 2 == 0, kv_idx, -1)": (0, -1, 2, -1, 4),
    "2 * where(kv_idx < 1, 3, 4)": (6, 8, 8, 8, 8),
    # bits of words, the lowest first; a negative one has ones before it, and no word more than 64;
    # octets = [200, 7], longs = [-2^63, 2^40 + 1]
    "bit(kv_idx, 0)": (0, 1, 0, 1, 0),
    "bit(kv_idx, 1)": (0, 0, 1, 1, 0),
    "bit(5, kv_idx)": (1, 0, 1, 0, 0),
    "bit(5, kv_idx + 64)": (0, 0, 0, 0, 0),
    "bit(5, kv_idx - 2)": (0, 0, 1, 0, 1),
    "bit(kv_idx - 2, 31)": (1, 1, 0, 0, 0),
    "bit(kv_idx - 2, 40)": (1, 1, 0, 0, 0),
    "bit(-1, kv_idx + 61)": (1, 1, 1, 0, 0),
    "bit(-2, kv_idx)": (0, 1, 1, 1, 1),
    "bit(table[kv_idx], 1)": (1, 0, 0, 0, 0),
    "bit(table[kv_idx // 2], kv_idx % 2)": (1, 1, 1, 0, 0),
    "bit(octets[0], kv_idx + 3)": (1, 0, 0, 1, 1),
    "bit(octets[kv_idx], 7)": (1, 0, 0, 0, 0),
    "bit(longs[0], kv_idx + 61)": (0, 0, 1, 0, 0),
    "bit(longs[1], 10 * kv_idx)": (1, 0, 0, 0, 1),
    "not bit(3, kv_idx) and kv_idx < 4": (0, 0, 1, 1, 0),
    "(octets[kv_idx] * 2 - 300) / 100": (1, -2.86, -3, -3, -3),
    # functions
    "exp(kv_idx - 2)": (0.13533528323661269, 0.36787944117144233, 1, 2.718281828459045, 7.38905609893065),
    "exp2(kv_idx - 2)": (0.25, 0.5, 1, 2, 4),
    "log(kv_idx + 1)": (0, 0.6931471805599453, 1.0986122886681098, 1.3862943611198906, 1.6094379124341003),
    "log2(kv_idx + 1)": (0, 1, 1.584962500721156, 2, 2.321928094887362),
    "tanh(kv_idx - 2)": (-0.9640275800758169, -0.7615941559557649, 0, 0.7615941559557649, 0.9640275800758169),
    "sigmoid(kv_idx - 2)": (
        0.11920292202211755,
        0.2689414213699951,
        0.5,
        0.7310585786300049,
        0.8807970779778824,
    ),
    "erf(kv_idx - 2)": (-0.9953222650189527, -0.8427007929497149, 0, 0.8427007929497149, 0.9953222650189527),
    "sin(kv_idx - 2)": (-0.9092974268256817, -0.8414709848078965, 0, 0.8414709848078965, 0.9092974268256817),
    "cos(kv_idx - 2)": (-0.4161468365471424, 0.5403023058681398, 1, 0.5403023058681398, -0.4161468365471424),
    "sqrt(kv_idx)": (0, 1, 1.4142135623730951, 1.7320508075688772, 2),
    "softcap(kv_idx - 2, 2)": (
        -1.5231883119115297,
        -0.9242343145200195,
        0,
        0.9242343145200195,
        1.5231883119115297,
    ),
    "where(1 <= kv_idx < 4, 3, -inf)": (-INF, 3, 3, 3, -INF),
    "min(kv_idx, inf) / 4": (0, 0.25, 0.5, 0.75, 1),
}  # fmt: skip
ALIBI = {
    (3, 5): ((-1, -0.5, 0, -0.5, -1), (-1.5, -1, -0.5, 0, -0.5), (-2, -1.5, -1, -0.5, 0)),
    (5, 3): ((-1, -1.5, -2), (-0.5, -1, -1.5), (0, -0.5, -1), (-0.5, 0, -0.5), (-1, -0.5, 0)),
}
EXTRAS = {
    "table": torch.tensor([3, 1, 4], dtype=torch.int32),
    "flags": torch.tensor([True, False, True]),
    "reals": torch.tensor([0.5, -2.0]),
    "octets": torch.tensor([200, 7], dtype=torch.uint8),
    "longs": torch.tensor([-(2**63), 2**40 + 1]),
}


def lines(*more: str) -> tuple[str, ...]:
    return (
        "input q: f32[B, M, H, 16]",
        "input k, v: f32[B, N, H, 16]",
        "input table: i32[X]",
        "input flags: bool[X]",
        "input reals: f32[Y]",
        "input octets: u8[Y]",
        "input longs: i64[Y]",
        "normalize = softmax",
        "output o: f32[B, M, H, 16]",
        "output lse: f32[B, M, H]",
        *more,
    )


def by_head(texts: list[str]) -> list[str]:
    """Lets of each text, a condition as 0 and 1, and `each`: number i of them in head i."""
    lets = [f"let e{i} = {text}" for i, text in enumerate(texts)]

    def chosen(first: int, end: int) -> str:
        if end - first == 1:
            return f"e{first}"
        middle = (first + end) // 2
        return f"where(h < {middle}, {chosen(first, middle)}, {chosen(middle, end)})"

    return [*lets, f"let each = {chosen(0, len(texts))}"]


def attention_of(*more: str) -> Attention:
    program = resolve(parse(Source("a.attn", spec(lines(*more)))), prelude())
    return variants(program, program.attentions[0])[0].attention


def values(expr: Expr, m: int, n: int, h: int = 0) -> np.ndarray[Any, Any]:
    at: dict[str, Any] = {"b": 0, "h": h, "q_idx": np.arange(m)[:, None], "kv_idx": np.arange(n)}
    tensors = {name: tensor.numpy() for name, tensor in EXTRAS.items()}
    env = Env(
        indices=at, dims={"B": 1, "M": m, "N": n, "H": 64, "X": 3, "Y": 2}, tensors=tensors, dot=np.zeros(())
    )
    return np.broadcast_to(evaluate(expr, env), (m, n))


def inputs(m: int, n: int, heads: int) -> dict[str, torch.Tensor]:
    q, k = torch.zeros(1, m, heads, 16), torch.zeros(1, n, heads, 16)
    v = torch.eye(n, 16)[None, :, None].expand(1, n, heads, 16).contiguous()
    return {"q": q, "k": k, "v": v, **EXTRAS}


def weights(made: Subject, m: int, n: int, heads: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The weight of every key [heads, m, n] and the scores, of the kernel."""
    outputs = {"o": torch.empty(1, m, heads, 16), "lse": torch.empty(1, m, heads)}
    made.run({t.name: inputs(m, n, heads)[t.name] for t in made.variant.attention.inputs}, outputs)
    return _weights(outputs["o"].double().numpy(), outputs["lse"].double().numpy(), n)


def _weights(o: Any, lse: Any, n: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    o, lse = o[0, :, :, :n].transpose(1, 0, 2), lse[0].T[:, :, None]
    with np.errstate(divide="ignore"):
        return o, np.log(o) + np.where(np.isneginf(lse), 0.0, lse)


def subject(target: str, *more: str) -> Subject:
    return subject_of_text(spec(lines(*more), small_tiles(target), target=target))


def pictured(rows: np.ndarray[Any, Any]) -> tuple[str, ...]:
    return tuple("".join("x" if seen else "." for seen in row) for row in rows)


@pytest.mark.parametrize(
    ("m", "n", "table"), [(3, 5, MASKS_3_5), (5, 3, MASKS_5_3)], ids=["3 to 5", "5 to 3"]
)
def test_masks_mean_what_the_table_says(m: int, n: int, table: dict[str, tuple[str, ...]]) -> None:
    found, heads = {}, {}
    for text in table:
        attention = attention_of("score = 0", f"mask = {text}")
        found[text] = pictured(values(attention.mask, m, n))
        heads[text] = pictured(reference(attention, inputs(m, n, 1))["o"][0, :, 0, :n] > 0)
    assert found == table
    assert heads == table


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", TARGETS)
def test_masks_of_kernels(target: str) -> None:
    skip_without_compiler(target)
    made = subject(target, *by_head(list(MASKS_3_5)), "score = where(each, 0, -inf)")
    for m, n, table in ((3, 5, MASKS_3_5), (5, 3, MASKS_5_3)):
        seen, _ = weights(made, m, n, len(table))
        assert dict(zip(table, map(pictured, seen > 0), strict=True)) == table


def score_of(text: str) -> str:
    """Conditions as 0 and 1."""
    is_condition = all(value in (0, 1) for value in VALUES[text]) and re.search(
        r"[<>!=]=|[<>]|not |flags|bit\(", text
    )
    return f"where({text}, 1, 0)" if is_condition and not text.startswith("where") else text


def test_expressions_mean_what_the_table_says() -> None:
    for text, expected in VALUES.items():
        attention = attention_of(f"score = {score_of(text)}")
        found = values(attention.score, 1, 5)[0]
        np.testing.assert_allclose(found, np.asarray(expected, float), rtol=4e-16, err_msg=text)
        outputs = reference(attention, inputs(1, 5, 1))
        _, scores = _weights(outputs["o"], outputs["lse"], 5)
        np.testing.assert_allclose(scores[0, 0], np.asarray(expected, float), atol=1e-12, err_msg=text)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", TARGETS)
def test_expressions_of_kernels(target: str) -> None:
    skip_without_compiler(target)
    made = subject(target, *by_head([score_of(text) for text in VALUES]), "score = each")
    _, scores = weights(made, 1, 5, len(VALUES))
    for text, found in zip(VALUES, scores, strict=True):
        np.testing.assert_allclose(found[0], np.asarray(VALUES[text], float), atol=2e-5, err_msg=text)


@pytest.mark.parametrize("target", TARGETS)
def test_alibi(target: str) -> None:
    skip_without_compiler(target)
    made = subject(target, "score = alibi(reals[0])")
    for (m, n), table in ALIBI.items():
        np.testing.assert_allclose(values(made.variant.attention.score, m, n), table, atol=1e-15)
        np.testing.assert_allclose(weights(made, m, n, 1)[1][0], table, atol=1e-5)


@pytest.mark.parametrize(
    "text", ["min(kv_idx, 2.0) // 2", "kv_idx / 1 // 1", "clamp(kv_idx, 0, 2.5) % 2", "inf // 2"]
)
def test_what_is_no_integer_has_no_remainder(text: str) -> None:
    with pytest.raises(DiagnosticError, match="needs integers"):
        attention_of(f"score = {text}")


@pytest.mark.parametrize("target", TARGETS)
def test_a_score_of_minus_infinity_is_an_excluded_key(target: str) -> None:
    """Rows all of whose scores are so have o = 0 and lse = -inf."""
    skip_without_compiler(target)
    made = subject(target, "score = where(causal, kv_idx / 4, -inf)")
    seen, scores = weights(made, 5, 3, 1)
    assert pictured(seen[0] > 0) == MASKS_5_3["causal"]
    rows = (
        (-INF, -INF, -INF), (-INF, -INF, -INF), (0, -INF, -INF), (0, 0.25, -INF), (0, 0.25, 0.5)
    )  # fmt: skip
    np.testing.assert_allclose(scores[0], rows, atol=1e-6)


#: Constants of modules with the scores below: log2(e) / 8, log2(e) / sqrt(128), 30 log2(e).
SCALES = {
    ("dot(q, k) / sqrt(D)", 64): 0.18033688011112042592,
    ("dot(q, k) / sqrt(D)", 128): 0.12751743082459868522,
    ("softcap(dot(q, k) / sqrt(D), 30)", 72): 43.280851226668902222,
}
LN2, LOG2E, TWO_LOG2E = 0.69314718055994530942, 1.4426950408889634074, 2.8853900817779268147
#: 1 / (30 sqrt(72)), by which softcap multiplies.
INSIDE = 0.0039283710065919306911
_CONSTANT = re.compile(r"^ *(?:constexpr float )?(\w+) = (?:tl\.constexpr\()?([\d.e-]+)f?\b", re.M)


@pytest.mark.parametrize(("score", "d"), SCALES)
def test_numbers_of_a_module(score: str, d: int) -> None:
    """Natural logarithms, powers of two and the usual scale, on both targets."""
    for target in TARGETS:
        module = planned(d=d, score=score, target=target, grads="q, k, v")
        files = render_files(module, path="a.attn", sha256="0").values()
        text = "\n".join(map(with_headers, files))
        expected = {"LN2": LN2, "LOG2E": LOG2E, "SCALE": SCALES[score, d]}
        if score.startswith("softcap"):
            expected["TWO_LOG2E"] = TWO_LOG2E
            assert f"{INSIDE!r}" in text
        constants = {name.upper(): float(value) for name, value in _CONSTANT.findall(text)}
        found = {name: value for name, value in constants.items() if name in expected}
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, rel=2e-16), target
