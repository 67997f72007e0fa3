"""Tiles of keys that all kernels of stick-breaking's gradients have."""

from __future__ import annotations

import pytest

from attnc.diagnostics import DiagnosticError
from tests.verify.judging import modules_of, spec

LINES = (
    "input q: bf16[B, M, H, 64]",
    "input k, v: bf16[B, N, H, 64]",
    "score = dot(q, k) / sqrt(D)",
    "mask = causal",
    "normalize = stick_breaking",
    "output o: bf16[B, M, H, 64]",
    "grad q, k, v",
)
DQ, DKDV = "tile.q = 64, tile.kv {}, warps = 4", "tile.q = 32, tile.kv {}, warps = {}"


def schedule(dq: str, dkdv: str, warps: int) -> str:
    tiles = DQ.format(dq), DKDV.format(dkdv, warps)
    return "\n  backward {{\n    dq {{\n      {}\n    }}\n    dkdv {{\n      {}\n    }}\n  }}".format(*tiles)


@pytest.mark.parametrize("target", ["cuda.sm_80", "cuda.sm_90a"])
def test_the_first_tiles_of_dq_that_dkdv_has(target: str) -> None:
    (module,) = modules_of(spec(LINES, schedule("in {64, 32}", "= 32", 2), target=target))
    assert {config.tile_kv for kernel in module.backward_kernels.values() for config in kernel.configs} == {
        32
    }


@pytest.mark.parametrize("target", ["cuda.sm_80", "cuda.sm_90a"])
def test_tiles_that_differ_are_refused_at_the_last(target: str) -> None:
    with pytest.raises(DiagnosticError, match="the same tiles of keys in all kernels"):
        modules_of(spec(LINES, schedule("= 64", "= 32", 2), target=target))
