"""The order of sums: what `order = absolute(S)` asks of schedules, and why rows then keep their bits.

The bits of a row follow from its own numbers where nothing else decides what is added to what, in which order
and in which products. Of a schedule that holds where

- tiles of keys begin at multiples of `tile.kv`, whatever the mask, and segments at multiples of S, of which
  `tile.kv` is a divisor: windows, lengths and tiles of queries only leave tiles out;
- a tile in which a row sees no key changes nothing of it: its probabilities are exp2(-inf) = 0, its maximum
  stays, and what it has is multiplied by exp2(0) = 1. So it does not matter which tiles a neighbour needs;
- the maximum is the row's own: that of all tiles so far or, under a lazy maximum on Hopper, of the first tile
  of a segment in which the row sees a key, until the row's own sums show that it has grown;
- a segment starts from nothing, and segments are joined one after the other, by the same operations in a
  prompt as in the kernel that joins splits: a segment without a key, joined, changes nothing;
- no compiler contracts a product and a sum into one operation, but where the text says so.

All schedules of a target agree where also their products have one shape (`shape_of`): how many keys a tile
has, and how its sums are laid over threads. In which row of a tile a row lies does not matter: a row of a
product follows from a row of the left operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from attnc.diagnostics import Diagnostic, Label, error
from attnc.expr.nodes import Load, show, walk
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import Choice, ForwardConfig, Knob, Schedule, Value, text_of
from attnc.plan.fitting import unsupported
from attnc.plan.ir import Decode, Kernel, Module, OutputKernel
from attnc.plan.lists import lists_blocks
from attnc.plan.target import Target
from attnc.plan.targets import target_of

_LABELS = {"tile.kv": "sums of other keys", "softmax": "sums rescaled at other times"}
_TRITON = "write a schedule for the target 'triton'"


def check_order(variant: Variant, schedule: Schedule, target: Target) -> Iterator[Diagnostic]:
    """Yields every reason why kernels of this schedule do not sum in the order that the spec asks for."""
    attention = variant.attention
    if attention.segment is None:
        return
    if target.breaks_order:
        message = f"'order = absolute' is not lowered to {target.name}"
        yield unsupported(message, attention.ordered, target.breaks_order, _TRITON)
        return
    if lists_blocks(attention):
        label = "a list has no order of its own"
        yield unsupported("'order = absolute' beside a list of blocks", attention.mask.span, label)
    yield from target.check_order(variant, schedule)
    yield from _check_softmax(schedule, target)
    if not target.walks_segments(variant, schedule):
        yield from _check_splits(schedule, attention.segment_keys)
    loops = schedule.forward.get("loops")
    if loops is not None and ("kv", "q") in loops.choices:
        yield _refuse("o is normalised in between", loops, "sums of a row pass through memory tile by tile",
                      "write 'loops = [q, kv]'")  # fmt: skip


def _check_softmax(schedule: Schedule, target: Target) -> Iterator[Diagnostic]:
    knob = schedule.forward.get("softmax")
    for choice in knob.choices if knob else ():
        assert knob is not None, "it has choices"
        looks_late = isinstance(choice, Choice) and "maximum" in choice.args and not target.keeps_row_maxima
        if isinstance(choice, Choice) and (choice.name != "online" or looks_late):
            what, label = "the maximum is not a row's own", "a tile's other rows decide when a row has one"
            if choice.name != "online":
                what, label = "there is no running maximum", "exponents subtract another number"
            yield _refuse(what, knob, label, "write 'softmax = online'")
        elif isinstance(choice, Choice) and choice.args.get("rescale") == "every_step":
            label = "o is normalised in every tile, also where a row sees no key"
            yield _refuse("tiles without keys change a row", knob, label, "write 'softmax = online'")


def _check_splits(schedule: Schedule, keys: int) -> Iterator[Diagnostic]:
    split = schedule.forward.get("split.kv")
    fixed = Choice(name="fixed", args={"size": keys})
    hint = f"write 'split.kv = fixed({keys})'"
    if split is not None and any(choice not in (1, fixed) for choice in split.choices):
        label = f"segments have {keys} keys, whatever the batch"
        yield _refuse("splits are not segments", split, label, hint)
    elif schedule.is_decode and (split is None or split.choices != (fixed,)):
        knob = split or schedule.forward.get("pack") or schedule.forward.get("loops")
        assert knob is not None, "it makes a decode kernel"
        yield _refuse(
            "a decode kernel whose splits are not segments", knob, "one program would walk over all", hint
        )


def _refuse(what: str, knob: Knob, label: str, *hints: str) -> Diagnostic:
    assert knob.span is not None, "a schedule comes from a file"
    message = f"'{knob.key}' breaks 'order = absolute': {what}"
    return error("E0605", message, knob.span, label, hints=hints)


# --- across schedules


@dataclass(frozen=True, slots=True)
class Ordered:
    """A module of an attention with an order, and the schedule that it is of."""

    module: Module
    schedule: Schedule


def promise_of(module: Module) -> tuple[str, ...]:
    """Returns the facts that two modules of a file must have in common to promise each other the same bits:
    the target, the mathematics, types and columns, but not storage, schedules and heads; () for no promise.
    """
    attention = module.variant.attention
    if attention.segment is None:
        return ()
    scale = () if attention.k_scale is None else (attention.k_scale,)
    said = (*attention.expressions, attention.segment, *scale)
    tensors = (attention.q, attention.k, attention.v, attention.o)
    columns = (f"{tensor.name}: {tensor.dtype}[{show(tensor.shape[-1])}]" for tensor in tensors)
    where = set(_places(attention))
    read = (
        f"{tensor.name}: {tensor.dtype}[{', '.join(map(show, tensor.shape))}]"
        for tensor in attention.extras
        if tensor.name not in where
    )
    return (module.target, *map(show, said), *columns, *read)


def _places(attention: Attention) -> Iterator[str]:
    for tensor in (attention.q, attention.k, attention.v):
        yield from tensor.storage.tables
    for length in attention.lengths.values():
        yield from (node.tensor for node in walk(length) if isinstance(node, Load))


def check_orders(ordered: Iterable[Ordered]) -> Iterator[Diagnostic]:
    """Yields E0605 at the key by which a schedule's products differ from those of the first one of the same
    promise, or by which its own configs differ.
    """
    groups: dict[tuple[str, ...], list[Ordered]] = {}
    for one in ordered:
        groups.setdefault(promise_of(one.module), []).append(one)
    for group in groups.values():
        yield from _check_group(group)


def shape_of(config: ForwardConfig, keys: Sequence[str]) -> dict[str, Value]:
    """Returns the values of the keys of a schedule that decide which sums a tile makes."""
    return {key: config.value(key) for key in keys}


def _check_group(group: Sequence[Ordered]) -> Iterator[Diagnostic]:
    keys = (*target_of(group[0].module.target).product_keys, "softmax")
    first = shape_of(group[0].module.kernel.configs[0], keys)
    size = group[0].module.variant.attention.segment_keys
    for one in group:
        yield from _check_configs(one, first, group[0].schedule)
        tile = one.module.kernel.configs[0].tile_kv
        if size % tile:
            message = f"segments of {size} keys are not made of tiles of {tile}"
            yield _differs(one.schedule, "tile.kv", message, None)


def _check_configs(one: Ordered, first: Mapping[str, Value], of: Schedule) -> Iterator[Diagnostic]:
    for key, value in first.items():
        own = [shape_of(config, [key])[key] for config in one.module.kernel.configs]
        other = next((found for found in own if found != value), None)
        if other is not None:
            told = [f"'{key} = {text_of(x)}'" for x in (value, other)]
            message = f"schedules have {' and '.join(told)}"
            yield _differs(one.schedule, key, message, None if of is one.schedule else of, value)


def _differs(
    schedule: Schedule, key: str, message: str, of: Schedule | None, value: Value | None = None
) -> Diagnostic:
    knob = schedule.forward.get(key)
    span = (knob.span if knob else None) or schedule.span
    assert span is not None, "a schedule comes from a file"
    related: tuple[Label, ...] = ()
    if of is not None:
        theirs = of.forward.get(key)
        place = (theirs.span if theirs else None) or of.span
        related = () if place is None else (Label(place, "the shape of another schedule's products"),)
    hints = (
        () if value is None else (f"write '{key} = {text_of(value)}' in all schedules for {schedule.target}",)
    )
    label = _LABELS.get(key, "sums laid out otherwise")
    return error(
        "E0605", f"'{key}' breaks 'order = absolute': {message}", span, label, related=related, hints=hints
    )


def sums_in_order(kernel: Kernel) -> bool:
    """Returns whether a kernel sums keys in segments, which are joined in order."""
    if isinstance(kernel, OutputKernel) and kernel.segments is not None:
        return True
    return isinstance(kernel, Decode) and kernel.split is not None and kernel.split.segment > 0


# --- for a reader


def explain_order(module: Module) -> Iterator[str]:
    """Yields why rows keep their bits under this module and others of its target, a line each."""
    size = module.variant.attention.segment_keys
    if not size:
        return
    kernel, target = module.kernel, target_of(module.target)
    config = kernel.configs[0]
    shape = ", ".join(f"{key} = {text_of(config.value(key))}" for key in target.product_keys)
    apart = isinstance(kernel, Decode) and kernel.segments is None
    joined = "a program each, joined by another kernel" if apart else "one after the other"
    yield f"segments of {size} keys, from multiples of {size}: {joined}, {target.joins}"
    yield f"tiles of {config.tile_kv} keys, from multiples of {config.tile_kv}, which divides {size}"
    yield "tiles without a key of a row change no bit of it: p = exp2(-inf) = 0, factors exp2(0) = 1"
    if "maximum" in config.softmax.args:
        yield "the maximum is the row's own: of its first tile of a segment, until its sums show a larger one"
    else:
        yield "the maximum is the row's own, looked for in every tile"
    yield f"products of one shape under every schedule for {target.name}: {shape}{target.products}"
    yield "no sum is contracted with a product, but where the text says so"
