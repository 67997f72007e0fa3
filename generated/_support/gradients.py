# Copied by `attnc compile`, from attnc/support. Do not edit.
"""What torch sees of a call: autograd, by what its backward kernels are declared to leave, and torch.compile,
by operators in its place.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch.autograd import forward_ad

from .arguments import DTYPES, Tensor, check_dense, is_batched, unbatch
from .configs import KernelConfig, Measured
from .memory import Key, Layout, Memory, contiguous, laid_like, layout, layouts_of_3, make_picker
from .pages import KEY_COUNTS, PAGE_NUMBERS, Fill, PageKernels, Pages, lay_rows
from .place import Place
from .repeat import Again, Repeated, make_again
from .sizes import Names, evaluate


@dataclass(frozen=True)
class Made:
    """A tensor that the backward allocates. like: the input or result whose shape it has; type: its own, or
    the element type where it is not that of `like`. zero: kernels add to it, or leave some of it alone;
    copied: it is that input, of 8 bits, in the type; axes: of rows that lie in pages (`pages.Pages`).
    """

    name: str
    like: str = ""
    type: str = ""
    zero: bool = False
    copied: bool = False
    axes: str = ""


@dataclass(frozen=True)
class Part:
    """A summand of a gradient, f32[B, H, *along], by what each axis of the input is: "b", "h", "q_idx",
    "q_pos", "kv_idx", or a constant position. atomic: kernels have summed it in the input's own shape.
    """

    made: str
    along: tuple[str, ...] = ()
    places: tuple[str | int, ...] = ()
    atomic: bool = False

    def summing(self, shape: Sequence[int], names: Names) -> Callable[[torch.Tensor], torch.Tensor]:
        """Makes the function from its tensor to what it adds to a gradient of this shape: summed over what no
        axis of that is, in the order of its axes.
        """
        if self.atomic:
            return lambda part: part
        axes = ["b", "h", *(self.along or ("tile",))]
        rows = names["M"] if "q" in self.along else None
        padding: tuple[int, ...] = ()
        if rows is not None:
            axes[2] = "q_idx"
            if "q_pos" in self.places:
                padding = (*((0, 0) if "kv" in self.along else ()), names["N"] - names["M"], 0)
                axes[2] = "q_pos"
        axes = ["kv_idx" if axis == "kv" else axis for axis in axes]
        lacking = [number for number, axis in enumerate(axes) if axis not in self.places]
        kept = [axis for axis in axes if axis in self.places]
        order = [kept.index(place) for place in self.places if isinstance(place, str)]
        is_sorted = order == sorted(order)
        place = tuple(slice(None) if isinstance(place, str) else place for place in self.places)
        is_placed = any(isinstance(place, int) for place in self.places)

        def summed(part: torch.Tensor) -> torch.Tensor:
            if rows is not None:
                part = part[:, :, :rows]
            if padding:
                part = torch.nn.functional.pad(part, padding)
            if lacking:
                part = part.sum(lacking)
            if not is_sorted:
                part = part.permute(order)
            if not is_placed:
                return part
            if part.numel() == math.prod(shape):
                return part.reshape(shape)
            whole = torch.zeros(shape, dtype=part.dtype, device=part.device)
            whole[place] = part
            return whole

        return summed


@dataclass(frozen=True)
class Gradient:
    """The gradient of an input: `d` and its name among what is made, times a scale; the sum of parts; or,
    where only a condition reads the input, zeros. type: of its elements, where that is not the input's;
    axes: of an input in pages, which get sums of what is made of rows.
    """

    name: str
    type: str = ""
    parts: tuple[Part, ...] = ()
    scale: float | None = None
    zeros: bool = False
    axes: str = ""

    @property
    def is_plain(self) -> bool:
        return not self.parts and self.scale is None and not self.zeros and not self.axes

    def dtype(self, like: torch.dtype) -> torch.dtype:
        return DTYPES[self.type] if self.type else like

    def finish(
        self, at: Mapping[str, int], like: Memory, device: torch.device, names: Names
    ) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
        """Returns what is left to do when the kernels are done: the gradient, from all that is made. at:
        positions there; like: the input.
        """
        dtype, scale = self.dtype(like.dtype), self.scale
        if self.zeros:
            shape, strides, _ = laid_like(like, dtype, has_rows=False)
            return lambda made: torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
        if self.parts:
            summing = [(at[part.made], part.summing(like.shape, names)) for part in self.parts]
            (first, of_first), *others = summing
            if not others:
                return lambda made: of_first(made[first]).to(dtype)
            return lambda made: sum((summed(made[i]) for i, summed in others), of_first(made[first])).to(
                dtype
            )
        own = at[f"d{self.name}"]
        if scale is None:
            return lambda made: made[own]
        if scale == 1.0:
            return lambda made: made[own].to(dtype)
        return lambda made: (made[own] * scale).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Backward:
    """The backward of an attention: configs and measured choices by kernel, sizes besides those of the
    call, what is allocated, the launches in the order of execution, and the gradients. cotangent: what
    kernels call the gradient of o; where it is not "do", that is made, of the attention before an epilogue.
    pages: where keys lie whose rows are made for the kernels. left_out: what is made for none of the kernels.
    """

    configs: Mapping[str, Sequence[KernelConfig]]
    tuned: Mapping[str, Measured]
    made: tuple[Made, ...]
    launches: tuple[Any, ...]
    gradients: tuple[Gradient, ...]
    sizes: Mapping[str, str] = field(default_factory=dict)
    cotangent: str = "do"
    pages: Pages | None = None
    left_out: tuple[str, ...] = ()

    def name_given(self, inputs: Sequence[str], *, has_dlse: bool) -> tuple[str, ...]:
        """Returns the names of what is given: an input in pages leaves its own to its rows."""
        own = inputs if self.pages is None else map(self.pages.own, inputs)
        return (self.cotangent, *("dlse",)[: int(has_dlse)], *own, "o", "lse")

    def allocates(self, made: Made, shape: Sequence[int]) -> bool:
        """Returns whether a call allocates what it would make of this shape: not a workspace without
        elements, which the kernels of other sizes take, unless a gradient is made of it.
        """
        if made.name in self.left_out:
            return False
        return bool(made.like) or self._is_part(made) or self._is_of_pages(made) or 0 not in shape

    def lay(self, made: Made, tensor: Tensor, memories: Mapping[str, Memory], names: Names) -> Memory:
        """Returns what a call would allocate: what is like an input lies as torch would have its gradient,
        but for packed rows.
        """
        if made.axes:
            return lay_rows([evaluate(text, names) for text in tensor.shape], made.axes, tensor.dtype)
        like = memories.get(made.like)
        if like is None:
            return contiguous(tuple(evaluate(text, names) for text in tensor.shape), tensor.dtype)
        if tensor.is_packed:
            return contiguous(like.shape, tensor.dtype)
        return laid_like(like, tensor.dtype, tensor.has_rows)

    def is_workspace(self, made: Made) -> bool:
        """Returns whether kernels alone write and read it."""
        return not (made.like or made.zero or self._is_part(made) or self._is_of_pages(made))

    def finish(
        self,
        place: Place,
        wanted: Sequence[tuple[Gradient, Memory]],
        page_kernels: Callable[[], PageKernels | None],
    ) -> tuple[Callable[..., tuple[Any, ...]], Fill | None]:
        """Returns what makes the gradients of all that is made, and what writes rows of pages first. place:
        of the launches; wanted: gradients, and the inputs that they are of.
        """
        at, pages = {name: i for i, name in enumerate(place.results)}, self.pages
        kernels = page_kernels() if pages is not None and place.device.type == "cuda" else None
        fill = None if pages is None else pages.fill(place, kernels)
        if all(gradient.is_plain for gradient in self.gradients):
            return make_picker([at[f"d{gradient.name}"] for gradient in self.gradients]), fill
        last = {
            gradient.name: gradient.finish(at, x, place.device, place.names)
            for gradient, x in wanted
            if not gradient.axes
        }
        if pages is not None and len(last) < len(wanted):
            likes = [(gradient.name, x, gradient.dtype(x.dtype)) for gradient, x in wanted]
            return pages.finish(place, last, likes, kernels), fill
        return lambda made: tuple([done(made) for done in last.values()]), fill

    def _is_part(self, made: Made) -> bool:
        return any(part.made == made.name for gradient in self.gradients for part in gradient.parts)

    def _is_of_pages(self, made: Made) -> bool:
        """Returns whether torch writes it, before all kernels."""
        return self.pages is not None and (bool(made.axes) or made.name in (PAGE_NUMBERS, KEY_COUNTS))

    def declare(self, inputs: Sequence[Tensor], o: Tensor, lse: Tensor) -> dict[str, Tensor]:
        known = {tensor.name: tensor for tensor in (*inputs, o, lse)}
        known |= {self.cotangent: o.rename(self.cotangent), "dlse": lse.rename("dlse")}
        for made in self.made:
            if made.like:
                like = known[made.like]
                known[made.name] = like.rename(
                    made.name, f"{made.type}[{', '.join(like.shape)}]" if made.type else None
                )
            elif made.axes and self.pages is not None:
                own = self.pages.own(made.name)
                known[own] = known.pop(made.name).rename(own)
                known[made.name] = Tensor(made.name, made.type, made.axes)
            else:
                known[made.name] = Tensor(made.name, made.type)
        return known


class PreparedGradients(NamedTuple):
    """What the gradients of all such tensors have in common.

    made: layouts of what is allocated; zeroed: the positions of what starts from 0, those of a type together;
    finish: the gradients, from what is made once the kernels are done; returned: to autograd, from that;
    copies: positions of what is copied there, and among the tensors; fill: writes rows of pages there.
    chooses: whether `finish` and `returned` may be told which gradients are asked for.
    """

    made: tuple[Layout, ...]
    zeroed: tuple[tuple[int, ...], ...]
    launches: tuple[Any, ...]
    finish: Callable[..., tuple[Any, ...]]
    returned: Callable[..., tuple[torch.Tensor | None, ...]]
    copies: tuple[tuple[int, int], ...] = ()
    fill: Fill | None = None
    chooses: bool = False


def list_copies(made: Sequence[Made], given: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Returns the positions of what is copied among what is made, and among what is given."""
    return tuple((at, given.index(one.like)) for at, one in enumerate(made) if one.copied)


def group_zeros(made: Sequence[Made], layouts: Sequence[Layout]) -> tuple[tuple[int, ...], ...]:
    """Returns the positions of what starts from 0, those of a type together, which one kernel of torch's
    fills.
    """
    by_type: dict[torch.dtype, list[int]] = {}
    for at, (one, (_, _, dtype)) in enumerate(zip(made, layouts, strict=False)):
        if one.zero:
            by_type.setdefault(dtype, []).append(at)
    return tuple(tuple(places) for places in by_type.values())


class DifferentiableCall(Protocol):
    """What autograd asks of a call (`call.Attention`).

    input_names, written_names: of inputs and results; wanted: positions of the inputs that have gradients;
    execute: the results of (inputs, out, config, backward_config, extras); lse: its place among them, -1
    where it is none; needed: where the o and lse that a backward reads are, among results and what is `kept`;
    extras: optional tensors; no_extras: None for each; gradients: as `Attention.gradients`. prepared: by
    `key_of` a call; settle_keeping: what repeats one for gradients; repeated_keeping: what repeats the last.
    alone, choose: as of `asked.AsksForLess`.
    """

    name: str
    inputs: tuple[Tensor, ...]
    input_names: tuple[str, ...]
    written_names: tuple[str, ...]
    wanted: tuple[int, ...]
    has_scalars: bool
    is_single: bool
    backward: Backward | None
    kept: tuple[Tensor, ...]
    needed: tuple[int, ...]
    lse: int
    no_extras: tuple[None, ...]
    execute: Callable[..., Any]
    extras: tuple[Tensor, ...]
    prepared: dict[Key, Any]
    repeated_keeping: "Repeated[Applied]"
    allocate: Callable[..., list[torch.Tensor]]
    first_input: int
    layouts: Callable[[Sequence[Any]], Key]
    prepared_gradients: dict[Key, PreparedGradients]
    repeated_gradients: defaultdict[Any, Repeated[PreparedGradients]]

    @property
    def alone(self) -> "Any | None": ...

    def choose(self, asked: Sequence[bool]) -> Any: ...

    def key_of(self, inputs: Sequence[Any], out: Any, config: Any, extras: Sequence[Any]) -> Key: ...

    def settle_keeping(
        self, call: Any, inputs: Sequence[Any], axes: Sequence[int] | None = None
    ) -> "Applied | None": ...

    def tensors_of(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]: ...

    def empty_kept(self, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]: ...

    def gradients(self, *given: Any) -> tuple[torch.Tensor, ...]: ...

    def prepare_gradients(
        self, tensors: Sequence[Any], configs: Mapping[str, KernelConfig]
    ) -> PreparedGradients: ...


class Applied(NamedTuple):
    """What `Differentiable` applies to inputs. config, chosen: of the forward, and of the backward by kernel;
    None for the plan's. again: of a call like the one before, None where that is not known. turn: where the
    axes of the kernel's o are among those of the caller's, None where they are the same.
    """

    call: "DifferentiableCall"
    config: KernelConfig | None = None
    chosen: Mapping[str, KernelConfig] | None = None
    again: Again | None = None
    turn: tuple[int, ...] | None = None


def run_keeping(
    call: DifferentiableCall, inputs: tuple[Any, ...], config: KernelConfig | None
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Returns the results, and the o and lse that gradients need."""
    repeats = config is None and forward_ad._current_level < 0
    known = call.repeated_keeping.call(inputs) if repeats else None
    if known is not None and known.again is not None:
        found: tuple[Any, tuple[torch.Tensor, ...]] = known.again(inputs)
        return found
    kept = call.empty_kept(inputs)
    extras = (*kept, *call.no_extras[len(kept) :])
    made = call.execute(inputs, None, config, None, extras, keeps=repeats)
    written = (*((made,) if call.is_single else made), *kept)
    return made, tuple([written[at] for at in call.needed])


def resume(
    call: DifferentiableCall,
    inputs: Sequence[Any],
    out: Any,
    axes: Sequence[int] | None = None,
    laid: Sequence[Layout] | None = None,
) -> Again | None:
    if any(x.is_neg() for x in inputs):
        return None
    wants = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if not wants:
        prepared = call.prepared.get(call.key_of(inputs, out, None, ()))
        return None if prepared is None else make_again(call, prepared, (), axes=axes, laid=laid)
    if call.backward is None or out is not None:
        return None
    kept = call.empty_kept(tuple(inputs))
    extras = (*kept, *call.no_extras[len(kept) :])
    prepared = call.prepared.get(call.key_of(inputs, None, None, extras))
    applied = None if prepared is None else call.settle_keeping(prepared, inputs, axes)
    return None if applied is None else lambda inputs, out=None: apply_again(applied, *inputs)


def check_cotangents(given: Sequence[torch.Tensor | None]) -> None:
    """TypeError for a gradient of o or of lse that is sparse, as torch allows."""
    for name, x in zip(("do", "dlse"), given, strict=False):
        if x is not None:
            check_dense(name, x)


def launch_gradients(
    call: DifferentiableCall,
    tensors: list[Any],
    configs: Mapping[str, KernelConfig] | None,
    turn: tuple[int, ...] | None = None,
) -> tuple[PreparedGradients, list[torch.Tensor]]:
    """Launches the kernels of gradients; returns what these have in common, and all that is made. tensors: as
    `Attention.gradients` is given them. turn: of the kernels' o and do among the axes of those given.
    """
    seen = tensors if call.first_input == 1 else [x for x in tensors if x is not None]
    found = None if configs else call.repeated_gradients[len(seen), turn].call(seen)
    if found is None:
        if any(map(is_batched, tensors[: call.first_input])):
            return prepared_of(call, (), (), (), tuple), _find_each(call, tensors, configs, turn)
        found = _find_gradients(call, tensors, configs, turn)
    return found, _launch_prepared(call, found, found.made, tensors)


def _find_each(
    call: DifferentiableCall,
    tensors: Sequence[Any],
    configs: Mapping[str, KernelConfig] | None,
    turn: tuple[int, ...] | None,
) -> list[torch.Tensor]:
    """Returns the gradients for a batch of those of o and lse, computed one after the other."""
    batched = {at: unbatch(x) for at, x in enumerate(tensors) if is_batched(x)}
    whole, level = next(iter(batched.values()))
    each = []
    for number in range(len(whole)):
        of_one = [batched[at][0][number] if at in batched else x for at, x in enumerate(tensors)]
        found, made = launch_gradients(call, of_one, configs, turn)
        each.append(found.finish(made))
    return [torch._add_batch_dim(torch.stack(x), 0, level) for x in zip(*each, strict=True)]


def _launch_prepared(
    call: DifferentiableCall, found: PreparedGradients, layouts: Sequence[Layout], tensors: Sequence[Any]
) -> list[torch.Tensor]:
    """Launches what was prepared for such tensors; returns all that is made, of these layouts."""
    made = call.allocate(layouts, tensors[-1])
    for places in found.zeroed:
        if len(places) == 1:  # half the time of a list
            made[places[0]].zero_()
        else:
            torch._foreach_zero_([made[at] for at in places])
    for at, source in found.copies:
        made[at].copy_(tensors[source])
    if found.fill is not None:
        found.fill(made, tensors)
    given = [*tensors, *made, None]
    for launch in found.launches:
        launch.run(given)
    return made


def resume_gradients(
    call: DifferentiableCall, tensors: Sequence[Any], look: Callable[[Layout], Layout]
) -> Again | None:
    """Returns the gradients of tensors that have these addresses and layouts, for those who compare them
    themselves; None where none were prepared, or kernels take copies. tensors: as `Attention.gradients` is
    given them but for the configs; look: how what is made looks to the caller, of how kernels see it.
    """
    if tensors[0].stride(-1) != 1 or any(x is not None and x.is_neg() for x in tensors):
        return None
    found = call.prepared_gradients.get(_key_of_gradients(call, tensors, None))
    if found is None or found.fill is not None:
        return None
    layouts = tuple(map(look, found.made))
    return lambda tensors: found.finish(_launch_prepared(call, found, layouts, tensors))


def _key_of_gradients(call: DifferentiableCall, tensors: Sequence[Any], chosen: Any) -> Key:
    inputs = tensors[call.first_input : -2]
    key: Key = (call.layouts(inputs), layouts_of_3((tensors[0], tensors[-2], tensors[-1])), chosen)
    return (key, layout(tensors[1])) if call.first_input > 1 else key


def _find_gradients(
    call: DifferentiableCall,
    tensors: list[Any],
    configs: Mapping[str, KernelConfig] | None,
    turn: tuple[int, ...] | None,
) -> PreparedGradients:
    """Returns what gradients have in common that are wanted of such tensors, prepared if there were none.
    Puts those in their place that kernels take as they are.
    """
    seen = [x for x in tensors if x is not None]
    check_cotangents(tensors[: call.first_input])
    if turn is not None:
        tensors[0] = None if tensors[0] is None else tensors[0].permute(turn)
        tensors[-2] = tensors[-2].permute(turn)
    given = tuple(tensors)
    if tensors[0] is None:
        tensors[0] = torch.zeros_like(tensors[-2])
    if any(x is not None and x.is_neg() for x in tensors):
        tensors[:] = [None if x is None else x.resolve_neg() for x in tensors]
    if tensors[0].stride(-1) != 1:
        tensors[0] = tensors[0].contiguous()
    chosen = tuple(configs.items()) if configs else None
    key = _key_of_gradients(call, tensors, chosen)
    found = call.prepared_gradients.get(key)
    if found is None:
        found = call.prepared_gradients[key] = call.prepare_gradients(tensors, configs or {})
    elif not configs and all(x is y for x, y in zip(tensors, given, strict=True)):
        call.repeated_gradients[len(seen), turn].note(found, seen)
    return found


#: Arguments of `Differentiable.forward` before the inputs.
_BEFORE_INPUTS = (None,)


def prepared_of(
    call: DifferentiableCall,
    made: tuple[Layout, ...],
    zeroed: tuple[tuple[int, ...], ...],
    launches: tuple[Any, ...],
    finish: Callable[..., tuple[Any, ...]],
    copies: tuple[tuple[int, int], ...] = (),
    fill: Fill | None = None,
) -> PreparedGradients:
    """Returns prepared gradients, and what autograd is given of them: each, or None, for each argument."""
    count, wanted = len(call.inputs), len(call.wanted)
    behind = (None,) * (count - wanted)

    def returned_first(made: Sequence[torch.Tensor], *asked: Any) -> tuple[torch.Tensor | None, ...]:
        return (*_BEFORE_INPUTS, *finish(made, *asked), *behind)

    def returned(made: Sequence[torch.Tensor], *asked: Any) -> tuple[torch.Tensor | None, ...]:
        return (*_BEFORE_INPUTS, *by_input(call, finish(made, *asked)))

    are_first = call.wanted == tuple(range(wanted))  # as they mostly are: no list then
    chosen = returned_first if are_first else returned
    gradients = () if call.backward is None else call.backward.gradients
    chooses = fill is not None and any(gradient.axes for gradient in gradients)
    return PreparedGradients(made, zeroed, launches, finish, chosen, copies, fill, chooses)


def by_input(
    call: DifferentiableCall, found: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """Returns a gradient or None for each input."""
    each: list[torch.Tensor | None] = [None] * len(call.inputs)
    for at, x in zip(call.wanted, found, strict=True):
        each[at] = x
    return tuple(each)


def list_asked(call: DifferentiableCall, ctx: Any) -> tuple[bool, ...]:
    """Returns which gradients somebody asks for. ctx: of a function with one argument before the inputs."""
    needs = ctx.needs_input_grad
    return tuple([needs[len(_BEFORE_INPUTS) + at] for at in call.wanted])


def refuse_second_derivative(name: str) -> NoReturn:
    """RuntimeError."""
    raise RuntimeError(f"{name} has no second derivative: it was differentiated with create_graph=True")


class Differentiable(torch.autograd.Function):
    """An attention for autograd: lse is kept, and the probabilities are computed again from it."""

    @staticmethod
    def forward(ctx: Any, applied: Applied, *inputs: Any) -> Any:
        call, config, _, again, _ = applied
        if again is not None:
            made, needed = again(inputs)
        else:
            if call.has_scalars:
                inputs = call.tensors_of(inputs)
            made, needed = run_keeping(call, inputs, config)
        ctx.save_for_backward(*inputs, *needed)
        ctx.applied = applied
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        call, _, chosen, _, turn = ctx.applied
        if call.alone is not None:
            call = call.choose(list_asked(call, ctx))
        given = [*cotangents, *ctx.saved_tensors]
        if not torch.is_grad_enabled():
            found, made = launch_gradients(call, given, chosen, turn)
            return found.returned(made, list_asked(call, ctx)) if found.chooses else found.returned(made)
        seen = [x for x in given if x is not None]
        with torch.no_grad():
            found, made = launch_gradients(call, given, chosen, turn)
            asked = (list_asked(call, ctx),) if found.chooses else ()
            returned = found.returned(made, *asked)
        return _DifferentiableOnce.mark(call.name, returned, seen)


class _DifferentiableOnce(torch.autograd.Function):
    """Gradients of create_graph=True, which others may need: RuntimeError where they are differentiated."""

    @staticmethod
    def mark(
        name: str, gradients: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients as what depends on all that is given."""
        made = [x for x in gradients if x is not None]
        marked = iter(_DifferentiableOnce.apply(name, len(made), *made, *given))  # type: ignore[no-untyped-call]  # torch's
        return tuple([None if x is None else next(marked) for x in gradients])

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: torch.Tensor) -> Any:
        ctx.name = name
        return tuple([x.detach() for x in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        refuse_second_derivative(ctx.name)


#: `Differentiable.apply` but for a look for transforms of torch.func, which takes as long as the rest: where
#: a guard has seen that there are none.
apply_again: Callable[..., Any] = super(torch.autograd.Function, Differentiable).apply
