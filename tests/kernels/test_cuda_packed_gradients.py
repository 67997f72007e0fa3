"""Gradients of packed and shortened sequences on the CUDA target, run thread by thread on the CPU."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch

from attnc.verify.properties import violations
from tests.by_day import each_by_day, some_by_day
from tests.kernels import test_packed_gradients as packed
from tests.kernels.test_packed_gradients import FEATURES, KEYS, LENGTHS, PACKED, PLAIN, QUERIES, SELF, case
from tests.targets import needs_gxx
from tests.verify.judging import assert_within_bound, every_fill

pytestmark = [
    pytest.mark.slow,
    needs_gxx,
]

#: Tiles of the two kernels differ, so that the rows are padded to those of either.
SCHEDULE = """schedule a for cuda.sm_80 {
  tile.q = 32, tile.kv = 32, warps = 2
  backward {
    dq {
      tile.q in {64, 32}, tile.kv in {16, 32}, warps = 2, order = longest_first
    }
    dkdv {
      tile.q in {16, 64}, tile.kv = 32, warps in {2, 1}, stages in {2, 1}
    }
    WAYS
  }
}"""
STORAGES = {"two": PACKED, "self": SELF, "queries": QUERIES, "keys": KEYS}
subject = partial(packed.subject, schedule=SCHEDULE)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("storage", "seed"), some_by_day(STORAGES, range(4), of=4))
def test_every_storage(storage: str, seed: int) -> None:
    made = subject(STORAGES[storage])
    assert_within_bound(made, case(made, seed), fills=every_fill())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("storage", each_by_day(STORAGES, of=2))
def test_properties(storage: str) -> None:
    made = subject(STORAGES[storage])
    assert list(violations(made, case(made, 2))) == []


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("feature", "seed"), some_by_day(FEATURES, (3, 4), of=4))
def test_every_feature(feature: str, seed: int) -> None:
    made = subject(**FEATURES[feature])
    assert_within_bound(made, case(made, seed, R=15), fills=("nan",))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("lengths", "dq", "seed"), some_by_day(LENGTHS, ("apart", "atomic", "sequential"), (0, 3), of=5)
)
def test_lengths_of_ordinary_tensors(lengths: str, dq: str, seed: int) -> None:
    backward = "" if dq == "apart" else f"accumulate.dq = {dq}"
    made = subject(PLAIN, **LENGTHS[lengths], backward=backward)
    assert_within_bound(made, case(made, seed), fills=("nan",))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sizes", [{"M": 0}, {"N": 0}, {"B": 0}, {"B": 1}, {"M": 1, "N": 1}], ids=str)
def test_sizes_of_nothing(sizes: dict[str, int]) -> None:
    made = subject()
    assert_within_bound(made, case(made, 1, **sizes), fills=every_fill())


def test_many_sequences() -> None:
    made = subject()
    assert_within_bound(made, case(made, 3, B=150, M=3, N=5, G=1))


def test_packed_equals_one_by_one_bitwise() -> None:
    made = subject(PACKED).module.a
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 5, 5, 70], [0, 40, 44, 121]))
    make = torch.Generator().manual_seed(0)
    given = [torch.randn(n, h, 16, generator=make).half() for n, h in ((70, 2), (121, 1), (121, 1))]
    do = torch.randn(70, 2, 16, generator=make).half()

    def gradients(rows: slice, keys: slice, ends: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        inputs = [x[at].clone().requires_grad_() for x, at in zip(given, (rows, keys, keys), strict=True)]
        return torch.autograd.grad(made(*inputs, *ends)[0], inputs, do[rows])

    together = gradients(slice(None), slice(None), [cu_q, cu_k])
    for (q_from, q_to), (k_from, k_to) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        rows, keys = slice(q_from, q_to), slice(k_from, k_to)
        ends = [torch.tensor([0, part.stop - part.start], dtype=torch.int32) for part in (rows, keys)]
        for one, other, at in zip(gradients(rows, keys, ends), together, (rows, keys, keys), strict=True):
            assert torch.equal(one, other[at])
