"""The backward of the Hopper target: compiled by NVRTC, and run on the CPU in any order of warps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnc.plan.ir import Module
from attnc.plan.sm90.backward import CONSUMERS
from attnc.plan.sm90.layout import entry_registers
from attnc.runtime.loader import load_module, program_of
from attnc.runtime.nvrtc import compile_cubin
from attnc.verify.simt import SimtFault, attach, available
from tests.plan.test_sm90_backward import CAUSAL, planned

#: Bytes of what a thread that copies keeps in local memory, with 24 registers. That none that multiplies
#: spills in its loop was seen in the machine code; more than this would be one that does.
SPILLED_BY_COPIES = 96
KERNEL = "under_test_backward_dkdv"


def compiled(mask: str, **options: Any) -> Any:
    program = program_of(load_module(planned(mask, **options)))
    _, source, (config, *_) = program.kernels[KERNEL]
    assert source.endswith("_backward_dkdv.cu")
    return compile_cubin(program.source(KERNEL), program.options(config, True, "sm_90"))


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["atomic", "two_pass"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", ["true", CAUSAL])
def test_products_are_not_serialised(mask: str, d: int, accumulate: str) -> None:
    """ptxas says so by C75xx alone, and the kernel is a fifth slower."""
    cubin = compiled(mask, d=d, accumulate=accumulate)
    assert cubin.warnings == ()
    assert cubin.registers == entry_registers(CONSUMERS)
    assert cubin.spills <= SPILLED_BY_COPIES


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a module run on the CPU, its kernel after a change; undone, for equal modules are one."""

    def load(module: Module, change: Callable[[str], str] = str) -> Any:
        host: Any = load_module(module)
        of_all = host.CALL.program.source
        for name in ("launch_type", "gpu_of", "tensor_map"):
            monkeypatch.setattr(host.CALL, name, getattr(host.CALL, name))
        changed = {KERNEL: change(of_all(KERNEL))}
        monkeypatch.setattr(host.CALL.program, "source", lambda name: changed.get(name) or of_all(name))
        attach(host)
        return host

    return load


def gradients(
    host: Any, shape: tuple[int, int, int, int], d: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """dq, dk and dv of a causal attention by its kernels, and by float64. shape: B, H, M, N."""
    b, h, m, n = shape
    torch.manual_seed(m + n)
    q, do = (torch.randn(b, h, m, d).bfloat16() for _ in range(2))
    k, v = (torch.randn(b, h, n, d).bfloat16() for _ in range(2))
    given = [x.requires_grad_() for x in (q, k, v)]
    o, _ = host.under_test(*given)
    found = torch.autograd.grad(o, given, do)
    exact = [x.detach().double().requires_grad_() for x in given]
    seen = torch.arange(n)[None] <= torch.arange(m)[:, None] + n - m
    scores = exact[0] @ exact[1].mT / math.sqrt(d)
    p = torch.softmax(scores.masked_fill(~seen, -math.inf), -1).nan_to_num(0)
    return list(found), list(torch.autograd.grad(p @ exact[2], exact, do.double()))


@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
@pytest.mark.parametrize(
    ("d", "accumulate"),
    [
        (64, "atomic"),
        pytest.param(128, "atomic", marks=pytest.mark.slow),
        pytest.param(64, "two_pass", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_right_whatever_warps_are_first(
    d: int, accumulate: str, on_cpu: Callable[..., Any]
) -> None:
    host = on_cpu(planned(CAUSAL, d=d, accumulate=accumulate))
    for shape in ((1, 2, 100, 200), (1, 1, 150, 40)):
        for found, wanted in zip(*gradients(host, shape, d), strict=True):
            assert torch.linalg.vector_norm(found.double() - wanted) < 6e-3 * torch.linalg.vector_norm(wanted)


@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (r"(left_ds\[m\]\[3\]\);\n\s+)proxy_fence\(\);", r"\1", "without a fence.proxy.async"),
        (r"mbarrier_wait\(barrier_of\(base, DS_FULL[^;]*;", "", "may still read"),
        (r"(mbarrier_wait\(barrier_of\(base, DO_FULL, q\.at\)), q\.parity", r"\1, q.parity ^ 1", "deadlock"),
        (r"DS_EMPTY, i\), 4 \* CONSUMERS", "DS_EMPTY, i), 4 * CONSUMERS - 1", "may still read"),
    ],
)
def test_a_mistake_in_it_is_found(right: str, wrong: str, said: str, on_cpu: Callable[..., Any]) -> None:
    def change(source: str) -> str:
        changed, count = re.subn(right, wrong, source)
        assert count == 1
        return changed

    host = on_cpu(planned(CAUSAL), change)
    with pytest.raises(SimtFault, match=said):
        gradients(host, (1, 2, 400, 300), 64)
