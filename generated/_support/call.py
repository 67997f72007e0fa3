# Copied by `attnc compile`, from attnc/support. Do not edit.
"""A call of an attention, whatever its target: checked and decided once for all calls alike, then launched.

The quick path says of every tensor shape, strides, type and device, looks up what was prepared for such
tensors, allocates the results and launches. Nothing in it loops over declarations.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from .arguments import (
    Sizes,
    Tensor,
    are_transformed,
    check_dense,
    check_outputs,
    check_probability,
    check_tensor,
    clear,
    leaving_transforms,
    plain_number,
    refuse_gradients,
    refuse_shared,
    refuse_tangents,
    reject_overlapping_output,
    require_contiguous_rows,
    scalar_tensor,
    wants_gradient,
)
from .asked import AsksForLess
from .configs import (
    KernelConfig,
    Measured,
    check_backward_configs,
    check_config,
    choose_config,
    decode_configs,
    encode_configs,
)
from .devices import Gpu, functions_of, gpu_of
from .gradients import (
    Applied,
    Backward,
    Differentiable,
    PreparedGradients,
    apply_again,
    group_zeros,
    launch_gradients,
    list_copies,
    prepared_of,
    resume,
    resume_gradients,
)
from .memory import Key, Layout, Memory, allocate, contiguous, kinds, layout, layouts_of, memory_of, plain
from .operators import Operators, call_operator, name_of, repeat_operator
from .place import Place, join_workspaces
from .repeat import Again, Repeated, make_again
from .sizes import as_tuple, evaluate
from .splits import Split

is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
peek_transforms = torch._C._functorch.peek_interpreter_stack
is_negated = torch.Tensor.is_neg
#: Prepared calls that are kept.
_MOST_CALLS = 1024


class Launch(Protocol):
    """Kernels with all that they take, but for addresses."""

    def run(self, tensors: Sequence[Any], /) -> None:
        """Launches with what they take of all tensors of a call: inputs, results, optional arguments and
        scratch memory, in this order, and None for what is not there.
        """


#: What all calls of such tensors have in common: layouts of the results and of scratch memory, and launches,
#: none where there is nothing to compute. A plain tuple is taken apart in no time.
Prepared: TypeAlias = tuple[tuple[Layout, ...], tuple[Layout, ...], tuple[Launch, ...]]


@dataclass(eq=False, kw_only=True)
class Attention(AsksForLess, ABC):
    """The callable of a module, from a declaration of its tensors and kernels.

    name: of the function; operator: what torch knows its kernels by, with a digest, and then it (`name_of`).
    kept: an lse, and the attention before an epilogue, that kernels write if wanted; counters: to add to, if
    given. sizes: those that follow from others; group: query heads of a K/V head, 0 for any number. longest:
    keys that configs are chosen by; costs: of each config, by the sizes of a call: the least is taken where
    nothing was measured; work: 0 where there is nothing to compute. scratch: f32 memory for the kernels;
    made: what the first writes for the others. clears: rows of results that no sequence has are 0.
    probability: a scalar.
    """

    name: str
    operator: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    configs: Sequence[KernelConfig]
    tuned: Measured
    launches: tuple[Any, ...]
    kept: tuple[Tensor, ...] = ()
    counters: tuple[Tensor, ...] = ()
    sizes: dict[str, str] = field(default_factory=dict)
    group: int | None = None
    longest: str = "N"
    costs: tuple[str, ...] = ()
    work: str = "B * H * M"
    scratch: Mapping[str, str] = field(default_factory=dict)
    made: tuple[Tensor, ...] = ()
    split: Split | None = None
    clears: bool = False
    probability: str = ""
    backward: Backward | None = None
    joins_workspaces: ClassVar[bool] = False
    page_kernels: ClassVar[Any]
    prepared: dict[Key, Any] = field(default_factory=dict, init=False, repr=False)
    prepared_gradients: dict[Key, PreparedGradients] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.operator = name_of(self)
        self.config_type: type = type(self.configs[0])
        self.input_names = tuple(tensor.name for tensor in self.inputs)
        self.output_names = tuple(tensor.name for tensor in self.outputs)
        self.has_scalars = any(tensor.is_scalar for tensor in self.inputs)
        self.written_names = tuple(f"out {name}" for name in self.output_names)
        self.extras = (*self.kept, *self.counters)
        self.no_extras = (None,) * len(self.extras)
        self.lse = self.output_names.index("lse") if "lse" in self.output_names else -1
        written = [tensor.name for tensor in (*self.outputs, *self.kept)]
        #: Of the o and lse that a backward reads: the attention where it is kept, and o for want of an lse.
        self.needed = tuple(written.index(n) if n in written else 0 for n in ("attention", "lse"))
        self.is_single = len(self.outputs) == 1
        self.first_shape = self.inputs[0].known_shape
        self.layouts = layouts_of(len(self.inputs))
        self.allocate = allocate
        self.gpu_of: Callable[[int], Gpu] = gpu_of
        #: Whose kernels make the results in place of these, on the GPUs that they are for (`api.family`).
        self.forward: Attention | None = None
        #: Queries of a call up to which they do not, for their tiles have several.
        self.forward_above = 0
        self.first_input = 2 if self.lse >= 0 else 1
        gradients = () if self.backward is None else self.backward.gradients
        self.wanted = tuple(self.input_names.index(gradient.name) for gradient in gradients)
        self.unwanted = tuple(set(range(len(self.inputs))) - set(self.wanted))
        self.decoded_configs: dict[str, tuple[KernelConfig | None, dict[str, KernelConfig]]] = {}
        self.kept_layouts: dict[Any, tuple[Layout, ...]] = {}  #: of what is kept, by the shape of q
        self.repeated = Repeated[Again](lambda call, _: make_again(self, call, ()))
        #: The same while autograd is off, as inside of a compiled graph, whatever tensors require.
        self.repeated_unrecorded = Repeated[Again](lambda call, _: make_again(self, call, ()), gradients=True)
        self.repeated_keeping = Repeated[Applied](self.settle_keeping, gradients=True)
        self.repeated_operator = Repeated[Again](partial(repeat_operator, self), gradients=True)
        #: By how many tensors there are, as the gradient of lse may be none, and how they are turned.
        self.repeated_gradients = defaultdict[Any, Repeated[PreparedGradients]](
            lambda: Repeated(gradients=True)
        )
        self.run = self._runner(traces=True)
        self.execute = self._runner(traces=False)

    # --- calls

    def _runner(self, *, traces: bool) -> Callable[..., Any]:
        """Returns the call itself: a closure, whose variables are found faster than attributes. traces:
        whether it is an operator while torch compiles something, which may be another thread's, of tensors
        without memory and of those of torch.func.
        """
        prepared = self.prepared
        recorded, unrecorded, keeping = self.repeated, self.repeated_unrecorded, self.repeated_keeping
        has_scalars, has_backward, is_single = self.has_scalars, self.backward is not None, self.is_single
        scalars = [at for at, tensor in enumerate(self.inputs) if tensor.is_scalar]
        count, name = len(self.outputs), self.name

        def run(
            inputs: tuple[Any, ...],
            out: Any = None,
            config: KernelConfig | None = None,
            backward_config: Mapping[str, KernelConfig] | None = None,
            extras: tuple[torch.Tensor | None, ...] = (),
            keeps: bool = False,
        ) -> Any:
            """Returns the results. extras: all optional tensors, those that are `kept` and `counters`; keeps:
            for gradients, with an lse alone or none.
            """
            if traces and is_compiling():
                return self.trace(inputs, out, config, backward_config, extras)
            is_plain = out is None and config is None and backward_config is None
            is_plain = is_plain and forward_ad._current_level < 0  # tensors that look alike may have tangents
            if is_plain and extras:
                for x in extras:
                    if x is not None:
                        is_plain = False
            for at in scalars:
                if not isinstance(inputs[at], torch.Tensor):
                    is_plain = False
            records = is_grad_enabled()
            repeated = recorded if records else unrecorded
            if is_plain:
                if records and keeping.guard is not None and getattr(inputs[0], "requires_grad", False):
                    if (applied := keeping.call(inputs)) is not None:
                        return apply_again(applied, *inputs)
                elif repeated.guard is not None and (again := repeated.call(inputs)) is not None:
                    return again(inputs)
            refuse_tangents(name, inputs)
            given = (*inputs, *extras)
            if traces and inputs and (isinstance(inputs[0], FakeTensor) or are_transformed(given, out)):
                return self.trace(inputs, out, config, backward_config, extras)
            if peek_transforms() is not None:  # of other tensors: what is made here is none of theirs
                with leaving_transforms():
                    return run(inputs, out, config, backward_config, extras, keeps)
            if has_backward:
                if is_grad_enabled():
                    for x in inputs:
                        if isinstance(x, torch.Tensor) and x.requires_grad:
                            return self._call_with_gradients(inputs, out, config, backward_config, extras)
                if backward_config is not None:
                    self._check_backward_configs(backward_config)
            if has_scalars:
                inputs = self.tensors_of(inputs)
            if config is not None:
                check_config(config, self.config_type)
            key: Key | None
            try:
                if any(map(is_negated, inputs)):
                    inputs = tuple([x.resolve_neg() for x in inputs])
                key = self.key_of(inputs, out, config, extras)
                call = prepared.get(key)
            except (AttributeError, TypeError, RuntimeError):  # what has no layout is refused by name
                key = call = None
            if call is None:
                call = self._prepare(inputs, out, config, extras)
                if key is not None:
                    prepared[key] = call
            elif keeps:
                keeping.note(call, inputs)
            elif is_plain:
                repeated.note(call, inputs)
            if not has_backward and is_grad_enabled():
                for x in inputs:
                    if x.requires_grad:
                        refuse_gradients(self.name, inputs)
            if not is_plain and not keeps:
                self._refuse_shared(inputs, out, extras)
            memories, scratch, launches = call
            if out is None:
                made = self.allocate(memories + scratch if scratch else memories, inputs[0])
                results = made[:count]
            else:
                results = [out] if is_single else [*out]
                made = [*results, *self.allocate(scratch, inputs[0])] if scratch else results
            if launches:
                tensors = [*inputs, *results, *extras, *made[count:], None]
                for launch in launches:
                    launch.run(tensors)
            elif self.clears:
                clear((*self.outputs, *self.kept), (*results, *extras))
            return results[0] if is_single else tuple(results)

        return run

    def key_of(
        self, inputs: Sequence[Any], out: Any, config: KernelConfig | None, extras: Sequence[Any]
    ) -> Key:
        """Returns what a prepared call is found by. Raises something for what has no layout."""
        key: Key = (self.layouts(inputs), kinds(inputs), config)
        if out is not None:
            key = (key, layout(out) if self.is_single else tuple(map(layout, out)))
        for x in extras:
            if x is not None:
                return key, "extras", *map(layout, extras)  # not `out`, which may look alike
        return key

    def resume(
        self, inputs: Sequence[Any], out: Any = None, axes: Any = None, laid: Any = None
    ) -> Again | None:
        """Returns the call of tensors that look like these, (inputs, out) -> results, for those who compare
        them, in the same mode of autograd; None where none was prepared. axes: the order that the first
        result has the kernel's axes in; laid: as which later calls allocate results in place of `out`.
        """
        return resume(self, inputs, out, axes, laid)

    def settle_keeping(
        self, call: Prepared, inputs: Sequence[Any], axes: Sequence[int] | None = None
    ) -> Applied | None:
        kept = self.kept_layouts[inputs[0].shape] if self.kept else ()
        again = make_again(self, call, kept, self.needed, axes)
        turn = None if axes is None else tuple(map([*axes].index, range(len(axes))))
        return None if again is None else Applied(self, again=again, turn=turn)

    def gradients(self, *given: Any) -> tuple[torch.Tensor, ...]:
        """Gradients of the inputs that have one. given: the gradients of o and of lse (None: 0; of lse only
        where it is a result), the inputs, o, lse, and configs by kernel or None.
        """
        *tensors, configs = given
        call, made = launch_gradients(self, tensors, configs)
        return call.finish(made)

    def resume_gradients(self, tensors: Sequence[Any], look: Callable[[Layout], Layout]) -> Again | None:
        """Returns `gradients` of tensors that look like these (`gradients.resume_gradients`)."""
        return resume_gradients(self, tensors, look)

    def forget(self) -> None:
        self.prepared.clear()
        self.prepared_gradients.clear()
        vars(self).pop("alone", None)
        self.kept_layouts.clear()
        self.repeated.forget()
        self.repeated_unrecorded.forget()
        self.repeated_keeping.forget()
        self.repeated_operator.forget()
        self.repeated_gradients.clear()

    def trace(
        self,
        inputs: tuple[Any, ...],
        out: Any,
        config: KernelConfig | None,
        backward_config: Mapping[str, KernelConfig] | None,
        extras: tuple[torch.Tensor | None, ...],
    ) -> Any:
        """Returns what torch.compile traces, and torch.func transforms: one call of an operator."""
        refuse_tangents(self.name, inputs)
        if self.backward is None:
            refuse_gradients(self.name, inputs)
        elif wants_gradient(*inputs):
            self._check_gradients(inputs, out, extras)
        inputs = self.tensors_of(inputs)
        self.register_operators()
        chosen = self.encode(config, backward_config)
        kept, counters = extras[: len(self.kept)], extras[len(self.kept) :]
        if out is not None:
            results = check_outputs(out, self.output_names)
            getattr(torch.ops.attnc, f"{self.operator}_out")(*inputs, *counters, *results, *kept, chosen)
            return out if self.is_single else results
        made = call_operator(self, (*inputs, *counters), chosen)
        if self.kept:
            for given, x in zip(kept, made[len(self.outputs) :], strict=False):
                if given is not None:
                    given.copy_(x)
            return made[0] if self.is_single else tuple(made[: len(self.outputs)])
        return made

    def register_operators(self) -> bool:
        """Makes the operators known to torch, the first time that they are called for."""
        if not hasattr(torch.ops.attnc, self.operator):
            Operators(self).register()
        return True

    def encode(
        self, config: KernelConfig | None, backward_config: Mapping[str, KernelConfig] | None = None
    ) -> str:
        """Returns a caller's choice as an operator takes it. TypeError and ValueError for what is none."""
        if config is not None:
            check_config(config, self.config_type)
        if backward_config is not None and self.backward is not None:
            self._check_backward_configs(backward_config)
        return encode_configs(config, backward_config)

    # What torch.compiler.assume_constant_result does, without importing the compiler: tracing calls them
    # for real.
    register_operators._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes
    encode._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes

    def decode(self, chosen: str) -> tuple[KernelConfig | None, dict[str, KernelConfig]]:
        found = self.decoded_configs.get(chosen)
        if found is None:
            found = self.decoded_configs[chosen] = decode_configs(chosen, self.config_type)
        return found

    def tensors_of(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the inputs with numbers as tensors, once q is checked, which they are made like."""
        if not self.has_scalars:
            return inputs
        first = self.inputs[0]
        check_tensor(first.name, inputs[0], first.dtype, self.first_shape, inputs[0], first.name)
        made = []
        for tensor, x in zip(self.inputs, inputs, strict=True):
            if tensor.is_scalar:
                value = plain_number(x, tensor.dtype, inputs[0])
                if tensor.name == self.probability:
                    check_probability(tensor.name, value)
                made.append(scalar_tensor(tensor.name, value, tensor.dtype, inputs[0], self.input_names[0]))
            else:
                made.append(x)
        return tuple(made)

    def empty_kept(self, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Memory for what is kept for gradients, whose sizes are those of q."""
        if not self.kept:
            return ()
        check_dense(self.input_names[0], first := inputs[0])
        found = self.kept_layouts.get(first.shape)
        if found is None:
            if len(self.kept_layouts) >= _MOST_CALLS:
                self.kept_layouts.clear()
            sizes = self._sizes()
            sizes.check_one(self.inputs[0], first, first)
            made = [contiguous(sizes.shape_of(tensor), tensor.dtype) for tensor in self.kept]
            found = self.kept_layouts[first.shape] = plain(made)
        return tuple(self.allocate(found, first))

    def bind_sizes(self, inputs: Sequence[torch.Tensor]) -> Sizes:
        """Returns the sizes of inputs that are known to fit each other."""
        (sizes := self._sizes()).bind(self.inputs, inputs)
        return sizes

    def _sizes(self) -> Sizes:
        return Sizes(self.input_names[0], self.sizes, self.group)

    def _call_with_gradients(
        self,
        inputs: tuple[Any, ...],
        out: Any,
        config: KernelConfig | None,
        backward_config: Mapping[str, KernelConfig] | None,
        extras: tuple[Any, ...],
    ) -> Any:
        self._check_gradients(inputs, out, extras)
        if backward_config is not None:
            self._check_backward_configs(backward_config)
        return Differentiable.apply(Applied(self, config, backward_config), *inputs)  # type: ignore[no-untyped-call]  # torch's

    def _check_backward_configs(self, given: object) -> None:
        assert self.backward is not None
        check_backward_configs(given, self.backward.configs, self.config_type)

    def _check_gradients(self, inputs: tuple[Any, ...], out: Any, extras: tuple[Any, ...]) -> None:
        """Refuses what gradients cannot be wanted with."""
        if out is not None:
            raise ValueError("out: cannot be given where a gradient is wanted")
        for tensor, x in zip(self.kept, extras, strict=False):
            if x is not None:
                raise ValueError(f"{tensor.name}: cannot be given where a gradient is wanted")
        for at in self.unwanted:
            if wants_gradient(inputs[at]):
                name = self.input_names[at]
                raise RuntimeError(
                    f"{name} requires a gradient, which the spec does not ask for: "
                    "detach it, or add it to 'grad'"
                )

    def _prepare(
        self, inputs: tuple[Any, ...], out: Any, config: KernelConfig | None, extras: tuple[Any, ...]
    ) -> Prepared:
        """Checks the arguments, and decides all that does not depend on their contents."""
        if len(self.prepared) >= _MOST_CALLS:
            self.prepared.clear()
        sizes, first = self._sizes(), inputs[0]
        sizes.check(self.inputs, inputs)
        for tensor, x in zip(self.counters, extras[len(self.kept) :], strict=True):
            if x is not None:
                sizes.check_one(tensor, x, first)
        for tensor, x in zip(self.inputs, inputs, strict=True):
            if tensor.has_rows:
                require_contiguous_rows(tensor.name, x)
        results = self._results(sizes, out, first)
        for tensor, x in zip(self.kept, extras, strict=False):
            if x is not None:
                sizes.check_one(tensor, x, first)
                reject_overlapping_output(tensor.name, x)
        if evaluate(self.work, sizes) == 0:
            return plain(results), (), ()
        gpu = self.gpu_of(first.get_device())
        ahead = self.forward if not self.forward_above or sizes["M"] > self.forward_above else None
        if config is None and ahead is not None and ahead.serves(gpu):
            return ahead._prepare(inputs, out, None, extras)
        if config is not None and self.split is not None:
            self.split.check(config)
        config = choose_config(
            config,
            gpu,
            evaluate(self.longest, sizes),
            self.configs,
            self.tuned,
            self._order_configs(sizes, gpu),
        )
        names: dict[str, Any] = {**sizes, **self.functions(gpu), "config": config}
        names |= {"BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N}
        if self.split is not None:
            names |= self.split.sizes(names, config, gpu)
        scratch = {
            name: contiguous(as_tuple(evaluate(text, names)), torch.float32)
            for name, text in self.scratch.items()
            if name != "splits" or names["SPLITS"] > 1
        }
        scratch |= {tensor.name: contiguous(sizes.shape_of(tensor), tensor.dtype) for tensor in self.made}
        optional = zip((tensor.name for tensor in self.extras), extras, strict=True)
        memories = {
            **dict(zip(self.input_names, map(memory_of, inputs), strict=True)),
            **dict(zip(self.output_names, results, strict=True)),
            **{name: memory_of(x) for name, x in optional if x is not None},
            **scratch,
        }
        declared = {tensor.name: tensor for tensor in (*self.inputs, *self.outputs, *self.extras)}
        order = (*declared, *scratch)
        declared |= {tensor.name: tensor for tensor in self.made}
        written = (*self.output_names, *(tensor.name for tensor in self.extras))
        place = Place(names, {}, declared, order, written, gpu, first.device).with_memories(memories)
        return plain(results), plain(scratch.values()), self.made_ready(self.launches, place)

    def _order_configs(self, sizes: Sizes, gpu: Gpu) -> Sequence[KernelConfig]:
        """Returns the configs, that which takes least for the sizes of a call first."""
        if self.split is not None:
            return self.split.in_order(self.configs, sizes, gpu)
        names = {**sizes, **self.functions(gpu)}
        costs = [evaluate(text, names) for text in self.costs]
        return (self.configs[costs.index(min(costs))], *self.configs) if costs else self.configs

    def _results(self, sizes: Sizes, out: Any, like: torch.Tensor) -> tuple[Memory, ...]:
        """Layouts of the results: the caller's, or those of new memory."""
        if out is None:
            return tuple(contiguous(sizes.shape_of(tensor), tensor.dtype) for tensor in self.outputs)
        given = check_outputs(out, self.output_names)
        for tensor, x in zip(self.outputs, given, strict=True):
            sizes.check_one(tensor, x, like, f"out {tensor.name}")
        for tensor, x in zip(self.outputs, given, strict=True):
            reject_overlapping_output(f"out {tensor.name}", x)
        for tensor, x in zip(self.outputs, given, strict=True):
            if tensor.has_rows:
                require_contiguous_rows(tensor.name, x)
        return tuple(map(memory_of, given))

    def _refuse_shared(self, inputs: Sequence[Any], out: Any, extras: Sequence[Any]) -> None:
        written = [] if out is None else [out] if self.is_single else [*out]
        names = [*self.written_names] if written else []
        for tensor, x in zip(self.extras, extras, strict=False):
            if x is not None:
                names.append(tensor.name)
                written.append(x)
        if written:
            refuse_shared(self.input_names, inputs, names, written)

    def prepare_gradients(
        self, tensors: Sequence[Any], configs: Mapping[str, KernelConfig]
    ) -> PreparedGradients:
        """Decides all that does not depend on the tensors' contents. tensors: those that `gradients` is
        given.
        """
        if len(self.prepared_gradients) >= _MOST_CALLS:
            self.prepared_gradients.clear()
        backward = self.backward
        assert backward is not None
        inputs = tensors[self.first_input : -2]
        sizes, first = self.bind_sizes(inputs), inputs[0]
        wanted = [
            (gradient, memory_of(inputs[at]))
            for gradient, at in zip(backward.gradients, self.wanted, strict=True)
        ]
        if evaluate(self.work, sizes) == 0:
            zeros = [
                replace(gradient, zeros=True).finish({}, x, first.device, sizes) for gradient, x in wanted
            ]
            return prepared_of(self, (), (), (), lambda made: tuple([zero(made) for zero in zeros]))
        gpu = self.gpu_of(first.get_device())
        longest = evaluate(self.longest, sizes)
        names: dict[str, Any] = {**sizes, **self.functions(gpu)}
        for kernel, known in backward.configs.items():
            chosen = choose_config(configs.get(kernel), gpu, longest, known, backward.tuned[kernel])
            names[f"{kernel}_config"] = chosen
        for name, text in backward.sizes.items():
            names[name] = evaluate(text, names)
        lse = (*self.outputs, *self.kept)[self.needed[1]]
        declared = backward.declare(self.inputs, self.outputs[0], lse)
        given = backward.name_given(self.input_names, has_dlse=self.first_input > 1)
        memories = {name: memory_of(x) for name, x in zip(given, tensors, strict=True) if x is not None}
        allocated = []
        for made in backward.made:
            memory = backward.lay(made, declared[made.name], memories, names)
            if backward.allocates(made, memory.shape):
                memories[made.name] = memory
                allocated.append(made)
        own = [made.name for made in allocated if self.joins_workspaces and backward.is_workspace(made)]
        behind, workspace = join_workspaces(own, memories)
        allocated = [made for made in allocated if made.name not in behind]
        written = (*(made.name for made in allocated), *workspace)
        memories |= workspace
        place = Place(names, {}, declared, (*given, *written), written, gpu, first.device, behind)
        launches = self.made_ready(backward.launches, place := place.with_memories(memories))
        made_now = plain(memories[name] for name in written)
        zeroed, copies = group_zeros(allocated, made_now), list_copies(allocated, given)
        finish, fill = backward.finish(place, wanted, self.page_kernels)
        return prepared_of(self, made_now, zeroed, launches, finish, copies, fill)

    @staticmethod
    def serves(gpu: Gpu) -> bool:
        """Returns whether the kernels are for this device."""
        return True

    @abstractmethod
    def made_ready(self, launches: tuple[Any, ...], place: Place) -> tuple[Launch, ...]:
        """Launches that take nothing but the tensors of a call."""

    def functions(self, gpu: Gpu) -> dict[str, Callable[..., int]]:
        return functions_of(gpu)
