"""Operators of torch in place of a call, for torch.compile and the transforms of torch.func."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch._compile import _disable_dynamo
from torch._functorch.utils import enable_single_level_autograd_function
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from .arguments import Sizes, Tensor, refuse_tangents
from .configs import KernelConfig
from .gradients import (
    DifferentiableCall,
    Gradient,
    by_input,
    launch_gradients,
    list_asked,
    refuse_second_derivative,
)
from .memory import lay_like
from .repeat import Again, Repeated, make_again

Tensors = Sequence[Any]


class TracedCall(DifferentiableCall, Protocol):
    """What operators ask of a call (`call.Attention`) besides.

    operator: their name; encode, decode: (config, backward_config) as the text that an operator takes;
    bind_sizes: the sizes of its inputs; repeated_operator: what repeats its last call, with the config that
    the call chooses and no counters.
    """

    operator: str
    outputs: tuple[Tensor, ...]
    counters: tuple[Tensor, ...]
    sizes: dict[str, str]
    input_names: tuple[str, ...]

    repeated_operator: Repeated[Again]

    def encode(self, config: KernelConfig | None, backward_config: Any = None) -> str: ...

    def decode(self, chosen: str) -> tuple[KernelConfig | None, dict[str, KernelConfig]]: ...

    def bind_sizes(self, inputs: Sequence[torch.Tensor]) -> Sizes: ...


#: What gradients take behind tensors. Part of names, by which programs that PyTorch keeps on disk call them.
_OPTIONS = ("str chosen", "int asked")
#: The shape of a gradient that nobody asks for, which operators return in its place. Part of names, too.
_UNASKED = (0,)
#: The gradients of o and lse, None where nobody has one: a graph would fill a tensor with zeros. Part of
#: names, too.
_COTANGENTS = ("Tensor? do", "Tensor? dlse")


def name_of(call: TracedCall) -> str:
    """Returns what torch knows a call by: the digest of its kernels, which may serve several, and one of what
    else its operators follow.
    """
    gradients = () if call.backward is None else call.backward.gradients
    declared = (
        call.inputs,
        call.outputs,
        call.kept,
        call.counters,
        call.sizes,
        gradients,
        _OPTIONS,
        _UNASKED,
        _COTANGENTS,
    )
    return call.operator + hashlib.sha256(repr(declared).encode()).hexdigest()[:8]


def call_operator(call: TracedCall, given: Tensors, chosen: str) -> Any:
    """Returns the results, and what is kept, of inputs and counters."""
    return getattr(torch.ops.attnc, call.operator)(*given, chosen)


def _mapping(name: str) -> Callable[..., Any]:
    """Returns what torch.vmap makes of an operator of attnc's: its calls for one after the other."""

    def rule(info: Any, axes: Sequence[Any], *given: Any) -> tuple[Any, Any]:
        operator, count = getattr(torch.ops.attnc, name), info.batch_size
        batches = [
            x if axis is None else _rows(x.movedim(axis, 0)) for x, axis in zip(given, axes, strict=True)
        ]
        each = []
        for number in range(max(count, 1)):  # of an empty batch, what has its results' shapes
            of_one = [
                x if axis is None else x[number] if count else x.new_zeros(x.shape[1:])
                for x, axis in zip(batches, axes, strict=True)
            ]
            each.append(operator(*of_one))
        if isinstance(each[0], torch.Tensor):
            return torch.stack(each)[:count], 0
        results = [torch.stack(x)[:count] for x in zip(*each, strict=True)]
        return type(each[0])(results), type(each[0])([0] * len(results))

    return rule


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous() if x.dim() > 1 and x.stride(-1) != 1 else x


#: What registers kernels and derivatives of operators, as long as the process lives.
_LIBRARY: Any = torch.library.Library("attnc", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
#: What tensors with memory are dispatched to, where nothing stands between autograd and a kernel.
_DEVICES = {torch._C.DispatchKey.CPU: "CPU", torch._C.DispatchKey.CUDA: "CUDA"}


def put_on_devices(custom: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function the kernel of an operator (`torch.library.custom_op`) on each device, without what
    torch does around one: it looks whether results share memory with arguments, which takes as long as a
    call. Returns the kernel. Dynamo, which may be compiling the caller, does not follow.
    """
    kernel: Callable[..., Any] = torch._dynamo.disable(function)
    for device in _DEVICES.values():
        _LIBRARY.impl(custom._opoverload, kernel, device)
    return kernel


def shorten(custom: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes calls of an operator that want no gradient go to its function at once; others go as torch made
    it. It writes to no argument. Returns the kernel.
    """
    kernel, differentiate = put_on_devices(custom, function), make_autograd_impl(custom._opoverload, custom)

    def call(keyset: Any, *given: Any) -> Any:
        wants = torch.is_grad_enabled() and torch._C._any_requires_grad(*given)
        return kernel(*given) if not wants and goes_to_device(keyset) else differentiate(keyset, *given)

    _put_derivative(custom._opoverload, call)
    return kernel


def _put_derivative(operator: Any, call: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        # The operator has one of its own; torch before 2.12 refuses another unless it is asked for.
        _LIBRARY.impl(operator, call, "Autograd", with_keyset=True, allow_override=True)


def goes_to_device(keyset: Any) -> bool:
    """Returns whether a call of an operator that writes to no argument goes from autograd to the kernel of a
    device at once: no tensor without memory, no mode, no view that is to be resolved.
    """
    return (keyset & torch._C._after_ADInplaceOrView_keyset).highestPriorityTypeId() in _DEVICES


def _register_derivative(
    function: str,
    operator: Any,
    kernel: Callable[..., Any],
    keep: Callable[[Any, Tensors, Any], None],
    differentiate: Callable[..., tuple[Any, ...]],
    *,
    writes: bool = False,
) -> None:
    """Registers what `custom_op.register_autograd` does, also for torch.func: the function that torch makes
    of these two knows no transforms. function: what messages call it; kernel: what `put_on_devices` returned;
    keep: (ctx, arguments, results), after a call; writes: whether to arguments.
    """

    class Differentiable(_SingleLevelFunction):  # of one transform: each meets the operator for itself
        @staticmethod
        def forward(ctx: Any, keyset: Any, *given: Any) -> Any:
            # torch has turned these off, for transforms around this one as well
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                made = below(keyset, given)
            keep(ctx, given, made)
            return made

        @staticmethod
        @_disable_dynamo  # or a graph around a transform that left it would have derivatives of gradients
        def backward(ctx: Any, *cotangents: Any) -> Any:
            return (None, *differentiate(ctx, *cotangents))

    def below(keyset: Any, given: Tensors) -> Any:
        if not writes and goes_to_device(keyset):
            return kernel(*given)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *given)

    def call(keyset: Any, *given: Any) -> Any:
        refuse_tangents(function, given)  # also those of a transform around others, which only it sees
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*given)):
            return below(keyset, given)
        with enable_single_level_autograd_function():
            return Differentiable.apply(keyset, *given)  # type: ignore[attr-defined]  # of its base in C++

    _put_derivative(operator, call)


def _make_unasked(gradient: Gradient, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(_UNASKED, dtype=gradient.dtype(x.dtype))


def _alone(results: Tensors) -> Any:
    """Returns several results as a tuple, and a single one as it is."""
    return tuple(results) if len(results) > 1 else results[0]


def repeat_operator(call: Any, prepared: Any, inputs: Tensors) -> Again | None:
    """Returns what an operator returns of inputs like these: the results, and what is kept of them."""
    layouts = call.kept_layouts[inputs[0].shape] if call.kept else ()
    first = len(call.outputs)
    again = (
        None if prepared is None else make_again(call, prepared, layouts, range(first, first + len(layouts)))
    )
    if again is None:
        return None

    def run(given: Tensors) -> Any:
        made, kept = again(given)
        return _alone((made, *kept) if first == 1 else (*made, *kept))

    return run


class Operators:
    """NAME, of the results alone and never with gradients of its own; NAME_out, into tensors of the caller;
    and NAME_backward, which has no derivative.
    """

    def __init__(self, call: TracedCall) -> None:
        self.call = call
        self.usual = call.encode(None, None)
        #: Of gradients by what operators take besides tensors: configs, which of all are asked for, and which
        #: of those of the call that makes them.
        self.chosen: dict[tuple[str, int], tuple[Any, list[bool], list[bool]]] = {}

    def register(self) -> None:
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
        forward.register_vmap(_mapping(call.operator))
        put = shorten if call.backward is None and not call.counters else put_on_devices
        kernel = put(forward, self._forward)
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
        into.register_vmap(self._refuse_vmap)
        if call.backward is None:
            return
        given = [*_COTANGENTS[: call.first_input], *inputs, "Tensor o", "Tensor lse", *_OPTIONS]
        count = len(call.backward.gradients)
        returned = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
        backward = torch.library.custom_op(
            f"{name}_backward", self._backward, mutates_args=(), schema=f"({', '.join(given)}) -> {returned}"
        )
        backward.register_fake(self._backward_fake)
        backward.register_vmap(_mapping(f"{call.operator}_backward"))
        writes = bool(call.counters)
        _register_derivative(
            call.name, forward._opoverload, kernel, self._keep, self._differentiate, writes=writes
        )
        kernel = put_on_devices(backward, self._backward)
        _register_derivative(
            call.name, backward._opoverload, kernel, lambda ctx, given, made: None, self._refuse_derivative
        )

    def _keep(self, ctx: Any, inputs: Tensors, output: Any) -> None:
        *tensors, ctx.chosen = inputs
        ctx.set_materialize_grads(False)
        written = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(*tensors, *(written[at] for at in self.call.needed))

    def _refuse_derivative(self, ctx: Any, *cotangents: Any) -> NoReturn:
        refuse_second_derivative(self.call.name)

    def _refuse_vmap(self, *given: Any) -> NoReturn:
        raise RuntimeError(f"{self.call.name}: out: cannot be given inside of torch.vmap")

    def _split(self, given: Tensors) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        count = len(self.call.inputs)
        return tuple(given[:count]), tuple(given[count:])

    def _forward(self, *given: Any) -> Any:
        *tensors, chosen = given
        inputs, counters = self._split(tensors)
        repeats = chosen == self.usual and all(x is None for x in counters)
        if repeats and (again := self.call.repeated_operator.call(inputs)) is not None:
            return again(inputs)
        kept = self.call.empty_kept(inputs)
        config = self.call.decode(chosen)[0]
        with torch.no_grad():
            made = self.call.execute(inputs, None, config, None, (*kept, *counters))
        if repeats and config is None:
            self.call.repeated_operator.note(self._prepared_of(inputs, kept), inputs)
        return _alone((*(made if isinstance(made, tuple) else (made,)), *kept))

    def _prepared_of(self, inputs: Tensors, kept: Tensors) -> Any:
        """Returns what was prepared for a call; None where that takes other tensors than it was given."""
        if any(x.is_neg() for x in inputs):
            return None
        extras = (*kept, *self.call.no_extras[len(kept) :])
        return self.call.prepared.get(self.call.key_of(inputs, None, None, extras))

    def _fake(self, *given: Any) -> Any:
        inputs, _ = self._split(given)
        sizes = self.call.bind_sizes(inputs)
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
            self.call.execute(inputs, given, self.call.decode(chosen)[0], None, (*kept, *counters))

    def _backward(self, *given: Any) -> Any:
        *tensors, chosen, asked = given
        configs, wants, each = self.chosen.get((chosen, asked)) or self._choose(chosen, asked)
        call = self.call.choose(wants)
        inputs = tensors[self.call.first_input :]
        prepared, made = launch_gradients(call, tensors, configs)
        found = prepared.finish(made, each) if prepared.chooses else prepared.finish(made)
        if all(wants):
            return _alone([lay_like(x, inputs[at]) for at, x in zip(call.wanted, found, strict=True)])
        by_place = dict(zip(call.wanted, found, strict=True))
        return _alone(
            [
                lay_like(by_place[at], inputs[at]) if wanted else _make_unasked(gradient, inputs[at])
                for at, gradient, wanted in zip(self.call.wanted, self._gradients, wants, strict=True)
            ]
        )

    def _choose(self, chosen: str, asked: int) -> tuple[Any, list[bool], list[bool]]:
        wants = self._list_asked(asked)
        each = [wants[self.call.wanted.index(at)] for at in self.call.choose(wants).wanted]
        made = self.chosen[chosen, asked] = self.call.decode(chosen)[1], wants, each
        return made

    @property
    def _gradients(self) -> Sequence[Gradient]:
        assert self.call.backward is not None
        return self.call.backward.gradients

    def _list_asked(self, asked: int) -> list[bool]:
        return [bool(asked >> i & 1) for i in range(len(self.call.wanted))]

    def _backward_fake(self, *given: Any) -> Any:
        inputs = dict(zip(self.call.input_names, given[self.call.first_input :], strict=False))
        made = []
        for gradient, wanted in zip(self._gradients, self._list_asked(given[-1]), strict=True):
            x = inputs[gradient.name]
            dtype = gradient.dtype(x.dtype)
            made.append(torch.empty_like(x, dtype=dtype) if wanted else _make_unasked(gradient, x))
        return _alone(made)

    def _differentiate(self, ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        operator = getattr(torch.ops.attnc, f"{self.call.operator}_backward")
        wanted = cotangents[: self.call.first_input]
        asked = sum(wants << i for i, wants in enumerate(list_asked(self.call, ctx)))
        found = operator(*wanted, *ctx.saved_tensors, ctx.chosen, asked)
        found = found if isinstance(found, tuple) else (found,)
        wants = self._list_asked(asked)
        return (*by_input(self.call, [x if w else None for x, w in zip(found, wants, strict=True)]), None)
