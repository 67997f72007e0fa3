"""The operators of every committed family on a GPU: torch's own checks of them, and captured graphs."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from attnc.plan import ir
from attnc.plan.targets import target_of
from attnc.runtime.loader import load_module
from attnc.runtime.trial import problem_for
from tests.plans import SPECS, plans_of
from tests.targets import skip_without_launcher

LENGTH = 160
#: Of torch's checks, those of tensors of 8 bits: that of the schema multiplies what it compares, which torch
#: cannot do with them.
WITHOUT_PRODUCTS = (
    "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic",
)  # fmt: skip


def taken(module: Any, name: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns what the operator of a function takes for these tensors, what the function computes of them
    included.
    """
    call, found = module.CALL, list[torch.Tensor]()

    def run(inputs: tuple[torch.Tensor, ...], *others: Any) -> Any:
        found[:] = inputs
        return original(inputs, *others)

    original, call.run = call.run, run
    try:
        getattr(module, name)(*tensors)
    finally:
        call.run = original
    return found


@cache
def families() -> dict[str, ir.Module]:
    """The first module of each attention, target and schedule of the committed specs."""
    found: dict[str, ir.Module] = {}
    for spec in sorted(SPECS.glob("*.attn")):
        for module in plans_of(spec).modules:
            label = f"-{module.label}" if module.label else ""
            found.setdefault(f"{module.variant.attention.name}-{module.target}{label}", module)
    return found


@pytest.mark.parametrize("name", families())
def test_operators_keep_what_torch_asks_and_can_be_captured(name: str) -> None:
    planned = families()[name]
    skip_without_launcher(planned.target)
    major, minor = torch.cuda.get_device_capability()
    if not target_of(planned.target).runs_on(10 * major + minor):
        pytest.skip("for other GPUs")
    module: Any = load_module(planned)
    call = module.CALL
    call.register_operators()
    operator = getattr(torch.ops.attnc, call.operator)
    grads = planned.variant.attention.grads
    made = problem_for(planned, LENGTH, tokens=2 * LENGTH, sizes={"H": 4, "Hkv": 2, "G": 2})
    tensors = [
        x.clone().requires_grad_(argument.tensor.name in grads)
        for argument, x in zip(planned.args, made, strict=True)
    ]
    tensors = taken(module, planned.variant.attention.name, tensors)
    counters = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in call.counters]
    has_narrow = any(x.is_floating_point() and x.itemsize == 1 for x in tensors)
    checks = WITHOUT_PRODUCTS if has_narrow else "ALL"
    adds = call.backward is not None and any(
        part.atomic for gradient in call.backward.gradients for part in gradient.parts
    )
    bound = 1e-3 if adds else None  # of sums of thousands of terms, in another order from run to run
    given = (*tensors, *counters, "")
    torch.library.opcheck(operator, given, test_utils=checks, atol=bound, rtol=bound)

    still = [x.detach() for x in tensors]
    operator(*still, *counters, "")
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = operator(*still, *counters, "")
    for x in still[:3]:
        if x.is_floating_point():  # not where packed sequences begin
            x.copy_(x.view(torch.uint8).flip(0).view(x.dtype) if x.itemsize == 1 else x.flip(0))
    graph.replay()
    expected = operator(*still, *counters, "")
    for ours, right in zip(*(x if isinstance(x, tuple) else (x,) for x in (captured, expected)), strict=True):
        assert torch.equal(ours, right)
