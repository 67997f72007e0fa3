"""Lists as nobody should make them, of every kind that kernels take: right where they mean something, and in
their memory where they break a promise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import pytest
import torch

from attnc.verify.case import Case
from attnc.verify.check import check_gradients
from attnc.verify.problem import Problem, build
from attnc.verify.subject import Subject
from attnc.verify.tolerance import expect
from attnc.verify.verdict import Verdict, judge
from tests.targets import skip_without_compiler
from tests.verify.judging import subject_of_text

TEXT = """attention a {
  input q: bf16[B, M, HEADS, WIDTH]
  input k, v: bf16[B, N, KV, WIDTH]
  input idx: i32[B, KV, R, S]FACT
  input cnt: i32[B, KV, R]
  score = dot(q, k) / 4
  mask = listed(idx, rows = ROWS, keys = SIZE, count = cnt)
  normalize = softmax
  output o: bf16[B, M, HEADS, WIDTH]
  output lse: f32[B, HEADS, M]
  GRADS
}

schedule a for TARGET {
  SCHEDULE
}
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """rows, keys: of a block; sizes of its cases follow from them."""

    target: str
    rows: int
    keys: int
    schedule: str
    grads: bool = True
    heads: int = 4
    kv_heads: int = 2

    @property
    def sizes(self) -> Mapping[str, int]:
        M, N = (70, 150) if self.rows > 1 else (5, 75)
        return {"B": 2, "M": M, "N": N, "R": -(-M // self.rows), "S": 7}

    @property
    def blocks(self) -> int:
        return -(-self.sizes["N"] // self.keys)

    def text(self, fact: str = "") -> str:
        words = {
            "TARGET": self.target,
            "ROWS": str(self.rows),
            "SIZE": str(self.keys),
            "SCHEDULE": self.schedule,
            "GRADS": "grad q, k, v" if self.grads else "",
            "HEADS": str(self.heads),
            "KV": str(self.kv_heads),
            "WIDTH": "16" if self.target == "triton" else "64",
            "FACT": fact,
        }
        text = TEXT
        for word, value in words.items():
            text = text.replace(word, value)
        return text


_SMALL = "tile.q = 16, tile.kv = 16"
_PACKED = "loops = [kv], pack = gqa"
KINDS: Mapping[str, Kind] = {
    "blocks on Triton": Kind("triton", 32, 48, f"{_SMALL}\n  backward {{ {_SMALL} }}"),
    "blocks of each query on Triton": Kind("triton", 1, 16, f"{_PACKED}, {_SMALL}"),
    "tokens on Triton": Kind("triton", 1, 1, f"{_PACKED}, {_SMALL}"),
    "blocks on sm_80": Kind("cuda.sm_80", 32, 48, "tile.kv = 16"),
    "blocks of each query on sm_80": Kind("cuda.sm_80", 1, 32, f"{_PACKED}, split.kv = 3", grads=False),
    "blocks on Hopper": Kind("cuda.sm_90a", 64, 64, ""),
    "blocks of each query on Hopper": Kind("cuda.sm_90a", 1, 32, f"{_PACKED}, split.kv = auto", grads=False),
    "tokens on Hopper": Kind("cuda.sm_90a", 1, 1, f"{_PACKED}, split.kv = auto", grads=False),
    "unions on Hopper": Kind(
        "cuda.sm_90a", 1, 1, f"{_PACKED}, lists = union", grads=False, heads=16, kv_heads=1
    ),
    "unions of blocks on Hopper": Kind(
        "cuda.sm_90a", 1, 32, f"{_PACKED}, lists = union", grads=False, heads=16, kv_heads=1
    ),
    "unions of blocks in splits on Hopper": Kind(
        "cuda.sm_90a",
        1,
        16,
        f"{_PACKED}, lists = union, split.kv = 3, overlap = true",
        grads=False,
        heads=32,
        kv_heads=2,
    ),
}
#: (idx, cnt) of a kind: as they are, broadcast by who takes them.
Lists: TypeAlias = Callable[[Kind, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def full(idx: torch.Tensor, value: int) -> torch.Tensor:
    return torch.full_like(idx, value)


def some(kind: Kind, idx: torch.Tensor) -> torch.Tensor:
    """Other blocks of each list, as often as there are few."""
    order = torch.arange(idx.numel()).reshape(idx.shape) * 7 % 13
    return (order % kind.blocks).int()


def spoiled(kind: Kind, idx: torch.Tensor) -> torch.Tensor:
    """Every other entry is no block."""
    bad = torch.tensor([-1, kind.blocks, 2**31 - 1, -(2**31), 2**30, kind.blocks + 1, -7], dtype=torch.int32)
    return torch.where(torch.arange(idx.shape[-1]) % 2 == 0, bad[: idx.shape[-1]], some(kind, idx))


LISTS: Mapping[str, Lists] = {
    "all -1": lambda _, idx, cnt: (full(idx, -1), full(cnt, idx.shape[-1])),
    "none counts": lambda kind, idx, cnt: (some(kind, idx), full(cnt, 0)),
    "fewer than none count": lambda kind, idx, cnt: (some(kind, idx), full(cnt, -5)),
    "more count than there are": lambda kind, idx, cnt: (some(kind, idx), full(cnt, 2**31 - 1)),
    "all the same": lambda kind, idx, cnt: (full(idx, kind.blocks - 1), full(cnt, idx.shape[-1])),
    "one block for all": lambda _, idx, cnt: (full(idx, 0), full(cnt, 1)),
    "descending": lambda kind, idx, cnt: (
        some(kind, idx).sort(-1, descending=True).values,
        full(cnt, idx.shape[-1]),
    ),
    "no blocks among them": lambda kind, idx, cnt: (spoiled(kind, idx), full(cnt, idx.shape[-1])),
    "some lists empty": lambda kind, idx, cnt: (
        some(kind, idx),
        (torch.arange(cnt.numel()).reshape(cnt.shape) % 3 * 2).int(),
    ),
}


@cache
def subject(name: str, fact: str = "") -> Subject:
    kind = KINDS[name]
    skip_without_compiler(kind.target)
    return subject_of_text(kind.text(fact))


def given(made: Subject, kind: Kind, lists: Lists) -> tuple[Case, Problem]:
    """A case of a kind that has these lists."""
    case = Case(dims=kind.sizes, seed=2, config=0)
    problem = build(made.variant.attention, case, device=made.device)
    tensors = [torch.as_tensor(problem.inputs[name]) for name in ("idx", "cnt")]
    for tensor, values in zip(tensors, lists(kind, *(x.cpu() for x in tensors)), strict=True):
        tensor.copy_(values)
    return case, problem


def judged(made: Subject, case: Case, problem: Problem) -> Verdict:
    made.run(problem.inputs, problem.outputs, case.config, case.call)
    attention = made.variant.attention
    verdict = judge(attention, expect(attention, problem.inputs, made.bound), problem.outputs)
    if not verdict.ok or made.gradients is None:
        return verdict
    return check_gradients(made, made.gradients, problem, case)


@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lists", LISTS)
def test_lists_mean_what_they_say(lists: str, name: str) -> None:
    made = subject(name)
    verdict = judged(made, *given(made, KINDS[name], LISTS[lists]))
    assert verdict.ok, verdict.message


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", KINDS)
def test_lists_may_lie_anywhere(name: str) -> None:
    """Those of a list for all heads and sequences, expanded; and of a slice, whose entries lie apart."""
    made, kind = subject(name), KINDS[name]
    case, problem = given(made, kind, LISTS["some lists empty"])
    idx = torch.as_tensor(problem.inputs["idx"])
    for laid in (idx[:1, :1].expand(idx.shape), torch.stack([idx, full(idx, 2**30)], -1)[..., 0]):
        verdict = judged(made, case, replace(problem, inputs={**problem.inputs, "idx": laid}))
        assert verdict.ok, verdict.message


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", KINDS)
def test_a_broken_promise_of_distinct_entries_stays_in_memory(name: str) -> None:
    """Wrong, maybe: a key may count twice. Never outside of the lists, the inputs or the outputs."""
    made = subject(name, " is distinct")
    case, problem = given(made, KINDS[name], LISTS["all the same"])
    made.run(problem.inputs, problem.outputs, case.config, case.call)
    assert torch.as_tensor(problem.outputs["o"]).isfinite().all()
    if made.gradients is not None:
        check_gradients(made, made.gradients, problem, case)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_keys_that_no_list_names_may_be_nan(name: str) -> None:
    made, kind = subject(name), KINDS[name]
    case, problem = given(made, kind, LISTS["one block for all"])
    for tensor in ("k", "v"):
        torch.as_tensor(problem.inputs[tensor])[:, kind.keys :] = torch.nan
    verdict = judged(made, case, problem)
    assert verdict.ok, verdict.message
    assert torch.as_tensor(problem.outputs["o"]).isfinite().all()
