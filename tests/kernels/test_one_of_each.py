"""One small case of each mechanism: `make quick` runs these."""

from __future__ import annotations

import pytest

from attnc.verify.case import Case
from attnc.verify.projection_check import check_projection, projection_subject
from attnc.verify.runners import runner_of
from attnc.verify.simt import available
from attnc.verify.strategies import free_dims
from attnc.verify.subject import subject_of
from tests.planted.registry import module_of, projection_of
from tests.verify.judging import assert_within_bound

#: Attentions by what they have: shared heads, sums, packed rows, pages with splits, a search, dropout.
SIZES = {
    "causal_gqa": {"B": 1, "M": 5, "N": 70, "Hkv": 1, "G": 2},
    "bias": {"B": 1, "M": 5, "N": 7, "H": 2, "Hkv": 1, "G": 2},
    "varlen": {"B": 3, "M": 5, "N": 7, "H": 1, "Hkv": 1, "G": 1},
    "paged_decode": {"B": 2, "M": 1, "N": 40, "Hkv": 1, "G": 3},
    "document": {"B": 1, "M": 70, "N": 70, "H": 1, "Hkv": 1, "G": 1},
    "dropout": {"B": 1, "M": 5, "N": 9, "H": 1, "Hkv": 1, "G": 1},
}


@pytest.mark.quick
@pytest.mark.parametrize("target", ["triton", "cuda.sm_80"])
@pytest.mark.parametrize("name", SIZES)
def test_an_attention_is_right(name: str, target: str) -> None:
    if runner_of(target).warps_matter and not available():
        pytest.skip("g++ compiles CUDA kernels for the CPU")
    made = subject_of(module_of(name, target))
    dims = {dim: SIZES[name][dim] for dim in free_dims(made.variant.attention)}
    assert_within_bound(made, Case(dims=dims, seed=1))


@pytest.mark.quick
def test_a_projection_is_right() -> None:
    made = projection_subject(projection_of("linear"))
    verdict = check_projection(made, Case(dims={"M": 3, "N": 70, "K": 130}, seed=1))
    assert verdict.ok, verdict.message
