"""Which spec ranks run, and what of one they cannot share out."""

from importlib import import_module
from typing import Any

import pytest
import torch

from attnc.diagnostics import DiagnosticError
from attnc.distributed import ContextParallel
from attnc.distributed.group import Alone
from attnc.distributed.kernels import spec_of
from attnc.expr.construct import number
from attnc.support.arguments import DTYPES
from attnc.verify.interpreter import ensure_interpreter
from tests.distributed.specs import SPECS, text

ensure_interpreter()


def test_an_attention_is_named_where_there_are_several() -> None:
    two = SPECS["causal"] + SPECS["window"].replace("small", "other")
    with pytest.raises(ValueError, match=r"attention: expected one of small, other, got None"):
        ContextParallel(two, Alone())
    with pytest.raises(ValueError, match=r"attention: expected one of small, got 'other'"):
        ContextParallel(SPECS["causal"], Alone(), attention="other")
    assert ContextParallel(two, Alone(), attention="other").spec.attention.name == "other"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", ["triton", "cuda_sm_80", "cuda_sm_90a"])
def test_a_generated_function_says_what_it_is_of(target: str) -> None:
    """Its spec, with what was measured for it, its attention, and its target unless another is asked for."""
    function = import_module(f"generated.causal_gqa.{target}").causal_gqa
    spec = spec_of(function)
    assert (spec.attention.name, spec.target) == ("causal_gqa", target.replace("_", ".", 1))
    assert spec.tuned is not None
    assert spec_of(function, target="triton").target == "triton"


def test_packed_queries_with_other_keys_are_refused() -> None:
    """Rows of both lie alike, or ranks cannot share them out."""
    spec = text(inputs=("cu_q: i32[B + 1]",)).replace("grad q, k, v", "")
    spec = spec.replace("q: f32[B, M, Hkv * G, 16]", "q: f32[T, Hkv * G, 16] via ragged(cu_q)")
    spec = spec.replace("o: f32[B, M,", "o: f32[T,").replace(
        "lse: f32[B, Hkv * G, M]", "lse: f32[T, Hkv * G]"
    )
    cp = ContextParallel(spec, Alone())
    with pytest.raises(DiagnosticError) as failure:
        cp.plan(torch.zeros(8, 2, 16), torch.zeros(1, 8, 2, 16), cu_q=torch.tensor([0, 8]))
    (problem,) = failure.value.diagnostics
    assert problem.code == "E0602"
    assert problem.message == "packed queries with keys that are not packed are not shared out over ranks"


def test_a_variant_has_the_columns_of_q() -> None:
    """Those, and not more."""
    spec = spec_of("specs/causal_gqa.attn")
    widths: dict[Any, Any] = {number(found.attention.q.shape[-1]): found for found in spec.variants}
    dtype = DTYPES[next(iter(widths.values())).attention.q.dtype]
    assert len(widths) > 1
    for width, found in widths.items():
        assert spec.variant(dtype, width, {}) is found
        assert spec.variant(dtype, width, found.params) is found
        for wrong, params in ((width - 1, {}), (width + 1, {}), (width, {"D": -1})):
            with pytest.raises(ValueError, match=rf"q: expected .*, got {dtype}, D = {wrong}"):
                spec.variant(dtype, wrong, params)
    with pytest.raises(ValueError, match="q: expected"):
        spec.variant(torch.float64, next(iter(widths)), {})
