"""Files of kernels are where the support package looks for them: it knows their names by those of kernels."""

from __future__ import annotations

import pytest

from attnc.target.files import render_files
from attnc.verify.subject import subject_of
from tests.targets import skip_without_compiler
from tests.verify.judging import modules_of, spec

SCHEDULES = {
    "cuda.sm_80": "tile.q = 32, tile.kv = 32, warps = 2",
    "cuda.sm_90a": "consumers = 2, tile.kv = 64",
}


@pytest.mark.parametrize("target", SCHEDULES)
@pytest.mark.parametrize("grads", ["x", "q, x", "k, x", "k", "v", "q, k, v"])
def test_every_kernel_of_a_backward_has_its_file(target: str, grads: str) -> None:
    """With gradients of q, of its keys, and of rows alone, which a kernel of no other name makes."""
    skip_without_compiler(target)
    lines = (
        "input q: f16[B, M, H, 16]",
        "input k, v: f16[B, N, H, 16]",
        "input x: f32[M]",
        *("score = dot(q, k) + x[q_idx]", "normalize = softmax", "output o: f16[B, M, H, 16]"),
        f"grad {grads}",
    )
    (module,) = modules_of(spec(lines, SCHEDULES[target], target=target))
    kernels = subject_of(module).module.CALL.program.kernels.values()
    files = render_files(module, path="a.attn", sha256="")
    assert {kernel.file for kernel in kernels} == {name for name in files if name.endswith(".cu")}
