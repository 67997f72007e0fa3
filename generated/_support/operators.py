# Copied by `attnc compile`, from attnc/support. Do not edit.
"""A callable as operators of torch: what torch.compile sees in place of it."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .arguments import Sizes, Tensor
from .configs import KernelConfig
from .gradients import Backward, DifferentiableCall

Tensors = Sequence[Any]


class TracedCall(DifferentiableCall, Protocol):
    """What operators ask of a call (`call.Attention`) besides.

    operator: their name; decoded: (config, backward_config) of the text that an operator takes; bound: the
    sizes of its inputs.
    """

    operator: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    counters: tuple[Tensor, ...]
    input_names: tuple[str, ...]
    backward: Backward | None

    def decoded(self, chosen: str) -> tuple[KernelConfig | None, dict[str, KernelConfig]]: ...

    def bound(self, inputs: Sequence[torch.Tensor]) -> Sizes: ...


class Operators:
    """NAME, of the results alone and never with gradients of its own; NAME_out, into tensors of the caller;
    and NAME_backward, which has no derivative.
    """

    def __init__(self, call: TracedCall) -> None:
        self.call = call

    def register(self) -> None:
        """Makes the operators known to torch."""
        call, name = self.call, f"attnc::{self.call.operator}"
        inputs = [f"Tensor {tensor.name}" for tensor in call.inputs]
        counters = [f"Tensor(a{i}!)? {tensor.name}" for i, tensor in enumerate(call.counters)]
        results = [tensor.name for tensor in (*call.outputs, *call.kept)]
        returned = "Tensor" if len(results) == 1 else f"({', '.join(['Tensor'] * len(results))})"
        forward = torch.library.custom_op(
            name,
            self._forward,
            mutates_args=[tensor.name for tensor in call.counters],
            schema=f"({', '.join([*inputs, *counters, 'str chosen'])}) -> {returned}",
        )
        forward.register_fake(self._fake)
        written = [
            f"Tensor(o{i}!){'?' if tensor in call.kept else ''} {tensor.name}"
            for i, tensor in enumerate((*call.outputs, *call.kept))
        ]
        into = torch.library.custom_op(
            f"{name}_out",
            self._forward_out,
            mutates_args=[*(tensor.name for tensor in call.counters), *results],
            schema=f"({', '.join([*inputs, *counters, *written, 'str chosen'])}) -> ()",
        )
        into.register_fake(lambda *tensors: None)
        if call.backward is None:
            return
        cotangents = ["Tensor do", *([] if call.kept else ["Tensor dlse"])]
        given = [*cotangents, *inputs, "Tensor o", "Tensor lse", "str chosen"]
        backward = torch.library.custom_op(
            f"{name}_backward", self._backward, mutates_args=(), schema=f"({', '.join(given)}) -> Tensor[]"
        )
        backward.register_fake(self._backward_fake)
        forward.register_autograd(self._differentiate, setup_context=_keep)

    def _split(self, given: Tensors) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """(inputs, what follows them)."""
        count = len(self.call.inputs)
        return tuple(given[:count]), tuple(given[count:])

    def _forward(self, *given: Any) -> Any:
        *tensors, chosen = given
        inputs, counters = self._split(tensors)
        kept = tuple(self.call.empty_kept(inputs) for _ in self.call.kept)
        with torch.no_grad():
            made = self.call.execute(inputs, None, self.call.decoded(chosen)[0], None, (*kept, *counters))
        results = (*(made if isinstance(made, tuple) else (made,)), *kept)
        return results if len(results) > 1 else results[0]

    def _fake(self, *given: Any) -> Any:
        """Shapes and types of the results."""
        inputs, _ = self._split(given)
        sizes = self.call.bound(inputs)
        made = tuple(
            torch.empty(sizes.shape_of(tensor), dtype=tensor.dtype, device=inputs[0].device)
            for tensor in (*self.call.outputs, *self.call.kept)
        )
        return made if len(made) > 1 else made[0]

    def _forward_out(self, *given: Any) -> None:
        *tensors, chosen = given
        inputs, rest = self._split(tensors)
        count = len(self.call.counters)
        counters, written = rest[:count], rest[count:]
        out, kept = written[: len(self.call.outputs)], written[len(self.call.outputs) :]
        with torch.no_grad():
            given = out if len(out) > 1 else out[0]
            self.call.execute(inputs, given, self.call.decoded(chosen)[0], None, (*kept, *counters))

    def _backward(self, *given: Any) -> list[torch.Tensor]:
        *tensors, chosen = given
        found = self.call.gradients(*tensors, self.call.decoded(chosen)[1])
        return [x.contiguous() for x in found]

    def _backward_fake(self, *given: Any) -> list[torch.Tensor]:
        inputs = dict(zip(self.call.input_names, given[1 if self.call.kept else 2 :], strict=False))
        assert self.call.backward is not None
        pairs = [(gradient, inputs[gradient.name]) for gradient in self.call.backward.gradients]
        return [torch.empty(x.shape, dtype=gradient.dtype(x.dtype), device=x.device) for gradient, x in pairs]

    def _differentiate(self, ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        operator = getattr(torch.ops.attnc, f"{self.call.operator}_backward")
        wanted = cotangents[: 1 if self.call.kept else 2]
        found = operator(*wanted, *ctx.saved_tensors, ctx.chosen)
        return (*self.call.by_input(found), None)


def _keep(ctx: Any, inputs: Tensors, output: Any) -> None:
    *tensors, ctx.chosen = inputs
    ctx.save_for_backward(*tensors, *(output if isinstance(output, tuple) else (output,)))
