"""`to_spec`: what examples of tensors say is what the same sizes say by name."""

from __future__ import annotations

import functools
import itertools
import random
import re
from typing import Any

import pytest
import torch

from attnc.flex import to_spec
from attnc.flex.spec import DTYPES, _fold_line, _title
from attnc.model.names import NOT_FUNCTIONS, RESERVED
from tests.flex.mods import causal

AXES = {"B": torch.zeros(2), "H": torch.zeros(6), "M": torch.zeros(5), "N": torch.zeros(7)}


def biased(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + AXES["B"][b] + AXES["H"][h] + AXES["M"][q] + AXES["N"][kv]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("value_dim", [16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_say_what_sizes_say(dtype: torch.dtype, value_dim: int, kv_heads: int) -> None:
    q = torch.zeros(2, 6, 5, 16, dtype=dtype)
    k, v = (torch.zeros(2, kv_heads, 7, size, dtype=dtype) for size in (16, value_dim))
    text = to_spec(biased, query=q, key=k, value=v)
    named = to_spec(biased, dtype=dtype, head_dim=16, enable_gqa=kv_heads != 6, B=2, H=6, M=5, N=7)
    assert value_dim != 16 or text == named
    for line in ("B]", "H]", "M]", "N]"):
        assert f": f32[{line}" in text
    heads = "Hkv * G" if kv_heads != 6 else "H"
    assert f"q: {DTYPES[dtype]}[B, {heads}, M, 16]" in text
    assert f"{DTYPES[dtype]}[B, {heads.split(' ')[0]}, N, {value_dim}]" in text


def test_axes_of_other_sizes_are_their_own() -> None:
    text = to_spec(biased, B=3, H=6, M=4, N=7)
    assert ": f32[B]" not in text
    assert ": f32[M]" not in text
    assert ": f32[H]" in text
    assert ": f32[N]" in text


def test_without_sizes_axes_are_named_by_their_indices() -> None:
    text = to_spec(biased)
    assert all(f": f32[{axis}]" in text for axis in AXES)


def test_a_spec_has_the_types_and_sizes_of_examples() -> None:
    """No two sizes are alike: heads of 16 columns, values of 32, 9 queries, 21 keys."""
    q, k, v = (
        torch.zeros(3, heads, rows, width).half()
        for heads, rows, width in ((4, 9, 16), (2, 21, 16), (2, 21, 32))
    )
    by_query, by_key, by_head = torch.zeros(9), torch.zeros(21), torch.zeros(4)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + by_query[q_idx] + by_key[kv_idx] + by_head[h]

    lines = to_spec(mod, query=q, key=k, value=v).splitlines()
    for said in (
        "input q: f16[B, Hkv * G, M, 16]",
        "input k: f16[B, Hkv, N, 16]",
        "input v: f16[B, Hkv, N, 32]",
        "input by_query: f32[M]",
        "input by_key: f32[N]",
        "input by_head: f32[H]",
        "output o: f16[B, Hkv * G, M, 32]",
    ):
        assert f"  {said}" in lines, (said, lines)


def test_a_spec_for_no_example() -> None:
    slope = torch.ones(4, requires_grad=True)

    def biased(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + slope[h] * (kv - q)

    assert to_spec(biased, causal, return_lse=False).partition("schedule")[0] == (
        "attention flex_biased_causal {\n"
        "  input q: bf16[B, H, M, D]\n"
        "  input k, v: bf16[B, H, N, D]\n"
        "  input slope: f32[H]\n"
        "  score = dot(q, k) / sqrt(D) + slope[h] * (kv_idx - q_idx)\n"
        "  mask = q_idx >= kv_idx\n"
        "  normalize = softmax\n"
        "  output o: bf16[B, H, M, D]\n"
        "  grad q, k, v, slope\n"
        "}\n\n"
    )


class Holder(torch.nn.Module):
    """Tensors that a mod reaches in other ways than by a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(6))
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.ones(6))

    def mod(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * self.weight[h] + self.shift[h]

    def forward(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * self.weight[h] + self.shift[h]


class Called:
    def __init__(self) -> None:
        self.factor = torch.ones(6)

    def __call__(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * self.factor[h]


def inputs_of(mod: Any, **given: Any) -> list[str]:
    lines = to_spec(mod, **given).splitlines()
    return [line.split()[1].rstrip(":") for line in lines if line.startswith("  input ")][2:]


def test_tensors_have_the_names_that_mods_know_them_by() -> None:
    heat, slope = torch.ones(6), torch.ones(6)

    def inner(score: Any, h: Any) -> Any:
        return score * heat[h]

    def around(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return inner(score, h) + slope[h] + AXES_H[h]

    def again(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return around(inner(score, h), b, h, q, kv)

    def of_several(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        for each in several:
            score = each(score, h)
        return score + slope[h]

    def of_all(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        for each in several:
            score = each(score, h)
        return early(score, h)

    def early(score: Any, h: Any) -> Any:
        return score + warmth[h]

    several, warmth = (inner, inner), torch.ones(6)

    def keyword(score: Any, b: Any, h: Any, q: Any, kv: Any, *, table: Any) -> Any:
        return score + table[h]

    def unset(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * slope[h] if kv is not None else later

    assert inputs_of(around) == ["heat", "slope", "AXES_H"]
    assert inputs_of(again) == ["heat", "slope", "AXES_H"]
    assert inputs_of(of_several) == ["heat", "slope"]
    assert inputs_of(of_all) == ["heat", "warmth"]
    assert inputs_of(functools.partial(keyword, table=torch.ones(6))) == ["table"]
    assert inputs_of(unset) == ["slope"]
    later = 1
    assert inputs_of(Holder().mod) == inputs_of(Holder()) == ["weight", "shift"]
    assert inputs_of(Called()) == ["factor"]
    assert later


AXES_H = torch.ones(6)


def test_names_that_no_spec_can_have_are_others() -> None:
    q, lse, dot, größe, constant = (torch.ones(6) for _ in range(5))

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv: Any) -> Any:
        return score + q[h] * lse[h] * dot[h] * größe[h] * constant[h]

    found = inputs_of(mod)
    assert found == ["q_0", "lse_0", "dot_0", "captured", "constant"]


@pytest.mark.parametrize("name", ["aux", "Con", "com3", "_x", "list"])
def test_names_of_files_that_there_cannot_be(name: str) -> None:
    with pytest.raises(ValueError, match=f"name: expected letters.*got '{name}'"):
        to_spec(name=name)


def test_titles_are_made_of_names_of_mods() -> None:
    def named(name: str) -> Any:
        def mod() -> None: ...

        mod.__name__ = name
        return mod

    assert not [name for name in (*NOT_FUNCTIONS, *RESERVED) if name.startswith("flex")]
    assert _title(()) == _title((None, None)) == "flex"
    assert _title((named("<lambda>"), None)) == "flex"
    assert _title((named("near"), named("far"))) == "flex_near_far"
    assert _title((named("near"), named("near"))) == "flex_near"
    assert _title((named("a b_é"), None)) == "flex_a_b"
    assert len(_title((named("x" * 90), None))) == 48


def test_long_lines_are_folded_and_no_others() -> None:
    chance = random.Random(0)
    for _ in range(200):
        words = [
            chance.choice(("a", "where(x,", "y + z[q_idx])", "and b", "or c_long_name", "+ d"))
            for _ in range(chance.randint(1, 30))
        ]
        line = f"{chance.choice(('let t', 'score', 'mask', 'input x', 'output o'))} = {' '.join(words)}"
        width = chance.choice((30, 60, 100))
        folded = _fold_line(line, width)
        if len(line) <= width or not line.startswith(("let", "score", "mask")):
            assert folded == line
            continue
        head, *rows, last = folded.splitlines()
        assert head == f"{line.partition(' = ')[0]} = ("
        assert last == "  )"
        assert " ".join(row.strip() for row in rows) == line.partition(" = ")[2]
        for row, following in itertools.pairwise(rows):
            assert row.startswith("    ")
            first = re.split(r"(?<=,) | (?=and |or |\+ )", following.strip())[0]
            assert len(row) - 4 + len(first) > width - 8
    assert _fold_line("score = " + "x" * 92) == "score = " + "x" * 92
    assert _fold_line("score = " + "x" * 93) != "score = " + "x" * 93


def test_what_is_used_twice_has_a_name() -> None:
    """The largest such part alone, unless a smaller one is used elsewhere too."""

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        inner = torch.tanh(score * 0.125 + h)
        outer = torch.exp(inner * 0.5 - q)
        return outer * outer + outer

    def both(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        inner = torch.tanh(score * 0.125 + h)
        outer = torch.exp(inner * 0.5 - q)
        return outer * outer + inner

    for each, count in ((mod, 1), (both, 2)):
        text = to_spec(each)
        assert text.count("  let ") == count
        assert text.count("tanh(") == text.count("exp(") == 1


def test_what_is_left_out_of_a_conversion() -> None:
    text = to_spec()
    for line in (
        "input q: bf16[B, H, M, D]",
        "input k, v: bf16[B, H, N, D]",
        "output lse: f32[B, H, M]",
        "grad q, k, v",
    ):
        assert f"  {line}\n" in text
    assert "for triton" in text
    assert "grad" not in to_spec(gradients=False)
    assert "lse" not in to_spec(return_lse=False)
    assert "Hkv * G" in to_spec(enable_gqa=True)
    assert to_spec(name="near_2").startswith("attention near_2 {")
    with pytest.raises(TypeError, match="to_spec: expected the sizes B, H, M, N, got K, Q"):
        to_spec(Q=1, K=2)
    with pytest.raises(TypeError, match=r"dtype: expected .*, got torch.float64"):
        to_spec(dtype=torch.float64)
