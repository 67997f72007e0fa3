"""What the host does around the kernels: nothing that reads data, nothing that grows with M x N."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnc.model.attention import Attention
from attnc.plan import ir
from attnc.runtime.loader import load_module
from attnc.support.arguments import DTYPES
from attnc.verify.case import Case
from attnc.verify.problem import build
from attnc.verify.strategies import free_dims
from tests.plans import module_of

SIZES = {"B": 2, "M": 300, "N": 400, "H": 2, "Hkv": 2, "G": 2}
#: A new tensor, or another view of one; whatever else there is reads or writes elements.
ALLOCATIONS = {
    "aten.empty.memory_format",
    "aten.empty_strided.default",
    "aten.zeros.default",
    "aten.zeros_like.default",
    "aten.full.default",
    "aten.new_zeros.default",
}
ZEROS = {"aten.zero_.default", "aten._foreach_zero_.default"}
VIEWS = {"aten.detach.default", "aten.view.default", "aten.unbind.int", "aten.alias.default"}
#: Sums over what programs left, their scale, and their conversion to the input's type.
SUMS = {
    "aten.mul.Tensor",
    "aten.sum.dim_IntList",
    "aten.sum.default",
    "aten.slice.Tensor",
    "aten._to_copy.default",
}
NAMES = ("causal_gqa", "local_sink", "dropout", "padding", "prefix_document", "varlen", "fa1")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates it so
    """Notes the operators that run within it, and the bytes that they allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates it so
        self.operators: set[str] = set()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators.add(str(func))
        if str(func) in ALLOCATIONS and not result.is_meta:
            self.bytes += result.numel() * result.element_size()
        return result


class Launches:
    """In place of a kernel: every launch does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: None


def without_kernels(
    module: ir.Module, monkeypatch: pytest.MonkeyPatch
) -> tuple[ModuleType, Callable[..., Any]]:
    loaded, name = load_module(module), module.variant.attention.name
    call = loaded.CALL

    class Launch(call.launch_type):  # type: ignore[misc,name-defined]  # of the module's support package
        def __init__(self, kernel: object, *rest: Any) -> None:
            super().__init__(Launches(), *rest)

    call.forget()
    monkeypatch.setattr(call, "launch_type", Launch)
    return loaded, getattr(loaded, name)


def inputs_of(attention: Attention) -> dict[str, torch.Tensor]:
    sizes = {dim: SIZES[dim] for dim in free_dims(attention)}
    values = build(attention, Case(dims=sizes, seed=2)).inputs
    return {
        tensor.name: torch.as_tensor(values[tensor.name], dtype=DTYPES[tensor.dtype])
        .clone()
        .requires_grad_(tensor.name in attention.grads)
        for tensor in attention.inputs
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_reads_nothing_and_allocates_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = module_of(name).variant.attention
    inputs = inputs_of(attention)
    _, function = without_kernels(module_of(name), monkeypatch)
    wanted = [inputs[name] for name in attention.grads]
    with Recorder() as recorder:
        found = function(*inputs.values())
        outputs = found if isinstance(found, tuple) else (found,)
        cotangents = [torch.empty_like(x) for x in outputs]
        torch.autograd.grad(outputs, wanted, cotangents)
    beyond = recorder.operators - ALLOCATIONS - ZEROS - VIEWS - SUMS - {"aten.empty_like.default"}
    assert not beyond
    q, results = inputs["q"], [*outputs, *wanted]
    heads = q.numel() // q.shape[-1]
    rows = heads + SIZES["B"] * 4 * 128  # lse, lse2 and delta, padded to whole tiles
    gradients = sum(x.numel() * max(x.element_size(), 4) for x in results)
    assert recorder.bytes <= gradients + 3 * 4 * rows + 4096
    assert recorder.bytes < SIZES["B"] * 4 * SIZES["M"] * SIZES["N"] * 4  # f32[B, H, M, N]


@pytest.mark.parametrize("name", ["causal_gqa", "dropout"])
def test_without_gradients_there_are_outputs_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = module_of(name).variant.attention
    inputs = {key: value.detach() for key, value in inputs_of(attention).items()}
    _, function = without_kernels(module_of(name), monkeypatch)
    with Recorder() as recorder:
        found = function(*inputs.values())
    outputs = found if isinstance(found, tuple) else (found,)
    assert recorder.bytes == sum(x.numel() * x.element_size() for x in outputs)
    with Recorder() as recorder:
        function(*inputs.values(), out=found)
    assert recorder.bytes == 0
