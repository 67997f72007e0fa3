"""Masks that look data up: kernels visit the blocks in which they keep a pair, which are found before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

import pytest
import torch

from attnc.verify.case import Case
from attnc.verify.check import check, check_gradients
from attnc.verify.problem import Problem, build
from attnc.verify.subject import Subject
from attnc.verify.tolerance import expect
from attnc.verify.verdict import Verdict, judge
from tests.profiles import is_night
from tests.targets import skip_without_compiler
from tests.verify.judging import subject_of_text

TEXT = """attention a {
  input q: bf16[B, M, Hkv * G, 64]
  input k, v: bf16[B, N, Hkv, 64] STORAGE
  EXTRAS
  score = dot(q, k) / 8
  mask = MASK
  normalize = softmax
  output o: bf16[B, M, Hkv * G, 64]
  GRADS
}

schedule a for TARGET {
  SCHEDULE
}
"""
USUAL = {"STORAGE": "", "EXTRAS": "input doc: i32[B, N]", "GRADS": "grad q, k, v", "SCHEDULE": ""}
TARGETS = ("triton", "cuda.sm_90a")
SIZES = {"B": 2, "M": 300, "N": 300, "Hkv": 1, "G": 2}


@cache
def subject(target: str, **changes: str) -> Subject:
    skip_without_compiler(target)
    return subject_of_text(text(target, **changes))


def text(target: str, **changes: str) -> str:
    made = TEXT.replace("TARGET", target)
    for word, value in {**USUAL, **changes}.items():
        made = made.replace(word, value)
    return made


def judged(made: Subject, sizes: Mapping[str, int], seed: int, data: Data) -> Verdict:
    """The verdict on results and gradients of drawn inputs, some of which are these instead."""
    case = Case(dims=sizes, seed=seed, config=0)
    problem = build(made.variant.attention, case, device=made.device)
    for name, given in data(**sizes).items():
        put(problem, name, given)
    made.run(problem.inputs, problem.outputs, case.config, case.call)
    verdict = judge(
        made.variant.attention, expect(made.variant.attention, problem.inputs, made.bound), problem.outputs
    )
    if not verdict.ok or made.gradients is None:
        return verdict
    return check_gradients(made, made.gradients, problem, case)


def put(problem: Problem, name: str, given: torch.Tensor) -> None:
    """Gives an input other values, as many as it has."""
    tensor = problem.inputs[name]
    assert isinstance(tensor, torch.Tensor)
    tensor.copy_(given[..., : tensor.shape[-1]])


def documents(*, N: int, **_: int) -> Mapping[str, torch.Tensor]:
    """Runs of 70 keys, whose numbers do not ascend."""
    return {"doc": torch.tensor([5, -1, 2**31 - 1, 0, 3])[torch.arange(N + 32) // 70 % 5].int()}


def long_documents(*, N: int, **_: int) -> Mapping[str, torch.Tensor]:
    """Runs of 200 keys: of some blocks all pairs are kept, of others some."""
    return {"doc": torch.tensor([5, -1, 5, 2**31 - 1])[torch.arange(N + 32) // 200 % 4].int()}


def table(*, M: int, N: int, **_: int) -> Mapping[str, torch.Tensor]:
    """Two blocks as a whole but for a pair of one, and some pairs of others."""
    kept = torch.rand(M, N, generator=torch.Generator().manual_seed(2)) < 1e-3
    kept[:128, :256] = True
    kept[127, 255] = False
    return {"keep": kept}


def pairs(*, M: int, N: int, **_: int) -> Mapping[str, torch.Tensor]:
    """A few pairs of all, at the ends of blocks among them."""
    kept = torch.rand(M, N, generator=torch.Generator().manual_seed(1)) < 1e-4
    kept[127, 255] = kept[128, 0] = kept[-1, -1] = kept[0, 127] = True
    return {"keep": kept}


def pairs_of_heads(*, Hkv: int, **sizes: int) -> Mapping[str, torch.Tensor]:
    kept = pairs(**sizes)["keep"]
    return {"keep": torch.stack([kept, kept.flip(1)])}


def times(*, N: int, **_: int) -> Mapping[str, torch.Tensor]:
    return {"doc": torch.arange(N).flip(0) // 40 - 2}


SAME = "causal and doc[b, q_pos] == doc[b, kv_idx]"
Data: TypeAlias = Callable[..., Mapping[str, torch.Tensor]]
#: Words of the text, what some inputs hold, and sizes.
CASES: Mapping[str, tuple[Mapping[str, str], Data, Mapping[str, int]]] = {
    "documents": ({"MASK": SAME}, documents, {}),
    "full blocks": ({"MASK": SAME}, long_documents, {"M": 520, "N": 600}),
    "full blocks of a table": (
        {"MASK": "keep[q_idx, kv_idx]", "EXTRAS": "input keep: bool[M, N]"},
        table,
        {"M": 300, "N": 300},
    ),
    "flags of keys": (
        {"MASK": "causal and doc[b, kv_idx] > 2", "EXTRAS": "input doc: i32[B, N]"},
        long_documents,
        {"M": 260, "N": 520},
    ),
    "single pairs": ({"MASK": "keep[q_idx, kv_idx]", "EXTRAS": "input keep: bool[M, N]"}, pairs, {}),
    "either of two": (
        {
            "MASK": "causal and (doc[b, q_pos] == doc[b, kv_idx] or kv_idx < first[b])",
            "EXTRAS": "input doc: i32[B, N]\n  input first: i32[B]",
        },
        documents,
        {},
    ),
    "a window of time": (
        {"MASK": "0 <= doc[b, q_pos] - doc[b, kv_idx] <= 1 and window(200, 100)"},
        times,
        {},
    ),
    "a length": (
        {"MASK": SAME, "EXTRAS": "input doc: i32[B, N]\n  input many: i32[B]\n  length N = many[b]"},
        documents,
        {},
    ),
    "pages": (
        {
            "MASK": SAME,
            "STORAGE": "via paged(table, page = 16)",
            "EXTRAS": "input doc: i32[B, N]\n  input table: i32[B, P]\n  input n: i32[B]\n  length N = n[b]",
            "GRADS": "",
        },
        documents,
        {"P": 19},
    ),
    "each K/V head": (
        {"MASK": "keep[h // G, q_idx, kv_idx]", "EXTRAS": "input keep: bool[Hkv, M, N]"},
        pairs_of_heads,
        {"Hkv": 2, "G": 1},
    ),
}


@pytest.mark.one_in(26)  # each runs a kernel over several blocks
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_blocks_of_a_mask(name: str, target: str) -> None:
    changes, data, sizes = CASES[name]
    made = subject(target, **changes)
    assert made.plan is not None
    assert made.plan.lists is not None
    assert made.plan.lists.kept is not None
    for seed in range(2 if is_night() else 1):
        verdict = judged(made, {**SIZES, **sizes}, seed, data)
        assert verdict.ok, verdict.message


@pytest.mark.one_in(6)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "sizes", [{"M": 1, "N": 1}, {"M": 5, "N": 4200}, {"M": 260, "N": 40}, {"M": 40, "N": 0}]
)
def test_sizes_of_all_kinds(target: str, sizes: Mapping[str, int]) -> None:
    made = subject(target, **CASES["documents"][0])
    verdict = judged(made, {**SIZES, **sizes}, 3, documents)
    assert verdict.ok, verdict.message
    verdict = check(made, Case(dims={**SIZES, **sizes}, seed=3, config=0))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("target", TARGETS)
def test_keys_of_no_kept_block_are_not_visited(target: str) -> None:
    """NaN there would show: a product with them has weights of 0."""
    made = subject(target, **CASES["documents"][0])
    sizes = {**SIZES, "B": 1, "M": 384, "N": 384}

    case = Case(dims=sizes, seed=1, config=0)
    problem = build(made.variant.attention, case, device=made.device)
    put(problem, "doc", torch.tensor([7, 1, 4])[torch.arange(384) // 128].int())
    for name in ("k", "v"):
        tensor = problem.inputs[name]
        assert isinstance(tensor, torch.Tensor)
        tensor[:, :128] = torch.nan
    made.run(problem.inputs, problem.outputs, case.config, case.call)
    o = problem.outputs["o"]
    assert o[:, :128].isnan().all()
    assert o[:, 128:].isfinite().all()


def test_data_that_changed_since_are_an_error_of_autograd() -> None:
    made = subject("triton", **CASES["documents"][0])
    q: Any = torch.randn(1, 32, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    k, v = torch.randn(2, 1, 32, 1, 64, dtype=torch.bfloat16)
    doc = torch.zeros(1, 32, dtype=torch.int32)
    o = made.module.a(q, k, v, doc)
    doc += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
