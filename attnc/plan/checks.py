"""What a target cannot lower, said before any planning: each refusal at its span, with what to write instead.

Nothing is ever silently different from what a schedule asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attnc.diagnostics import Diagnostic
from attnc.expr.nodes import uses
from attnc.model.attention import Attention, Variant
from attnc.model.dtypes import DType
from attnc.model.knobs import KEYS
from attnc.model.schedule import Choice, Knob, Schedule
from attnc.plan.columns import refuse_column_scales, refuse_joined_keys
from attnc.plan.conversion import convert_variant
from attnc.plan.differentiable import (
    refuse_backward,
    refuse_narrow_gradients,
    refuse_rounded_gradients,
)
from attnc.plan.fitting import unsupported
from attnc.plan.key_rows import in_rows
from attnc.plan.list_refusals import refuse_lists
from attnc.plan.listed_rows import lists_rows
from attnc.plan.lists import listing_of, lists_blocks, walks_packed_lists
from attnc.plan.names import cannot_be_passed
from attnc.plan.order import check_order
from attnc.plan.signature import arguments, capacity, find_unbound
from attnc.plan.softmax import check_softmax
from attnc.plan.target import Target
from attnc.plan.targets import INSTEAD, TARGETS, target_of
from attnc.source import Span


def check_lowerable(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields every reason why this target cannot compile this variant under this schedule."""
    target = TARGETS.get(schedule.target)
    if target is None:
        yield unsupported(f"'{schedule.target}' has no kernels yet", schedule.span, "for it", INSTEAD)
        return
    yield from refuse_names(variant, schedule)
    knobs = schedule.forward
    yield from refuse_sizes(variant)
    yield from refuse_foreign_keys(schedule, knobs)
    yield from refuse_joined_keys(variant, schedule, target)
    yield from refuse_narrow_gradients(in_rows(variant), schedule)
    if target.converts_before(variant, schedule):
        variant = convert_variant(variant)
    yield from refuse_narrow_types(variant, schedule, target)
    yield from refuse_column_scales(variant, schedule, target)
    yield from refuse_epilogue(variant, schedule)
    yield from refuse_lists(variant, schedule, target)
    yield from target.check(variant, schedule)
    yield from refuse_combine_keys(schedule)
    if schedule.is_decode:
        by_rows = lists_rows(variant.attention, schedule, target)
        yield from refuse_decoding(variant, schedule, target, by_rows=by_rows)
    yield from check_softmax(variant, schedule, target)
    yield from check_order(variant, schedule, target)
    yield from refuse_backward(in_rows(variant), schedule, target)
    if not target.has_f32_dq:
        yield from refuse_rounded_gradients(variant, schedule)
    loops = knobs.get("loops")
    if loops and ("kv", "q") in loops.choices:
        yield from refuse_storages(variant)
        yield from refuse_scales_of_rows(variant)
        yield from refuse_walks(variant, loops.span)


def refuse_narrow_types(variant: Variant, schedule: Schedule, target: Target) -> Iterator[Diagnostic]:
    """Yields a refusal of keys and values of 8 bits, and of a scale of v, by targets that have neither."""
    attention = variant.attention
    if target.reads_narrow(schedule):
        return
    instead = "write a schedule for the target 'triton'"
    for tensor in (attention.k, attention.v):
        if DType(tensor.dtype).is_narrow:
            label = "these kernels multiply it as it was copied"
            message = f"{tensor.name} of {tensor.dtype} is not lowered to {target.name}"
            yield unsupported(message, tensor.span, label, instead)
    if attention.softmax.v_scale is not None:
        label = "o leaves as it is divided by the row's sum"
        yield unsupported(
            f"a scale of v is not lowered to {target.name}", attention.softmax.span, label, instead
        )


def refuse_epilogue(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields a refusal of an epilogue by kernels whose o lies in memory, or whose rows are not its own."""
    epilogue, loops = variant.attention.epilogue, schedule.forward.get("loops")
    if epilogue is None:
        return
    if schedule.is_decode:
        if listing_of(variant.attention) is not None:
            label, instead = "rows are those of queries with lists", "apply it to what the call returns"
            yield unsupported("lists of a decode kernel have no epilogue", epilogue.span, label, instead)
    elif loops and ("kv", "q") in loops.choices:
        label = "o lies in memory between two visits"
        yield unsupported("loops = [kv, q] has no epilogue", epilogue.span, label, "write 'loops = [q, kv]'")


def refuse_foreign_keys(schedule: Schedule, knobs: Mapping[str, Knob]) -> Iterator[Diagnostic]:
    """Yields a refusal of keys that only one target has."""
    for knob in knobs.values():
        target = KEYS[knob.key].target if knob.key in KEYS else ""
        if target not in ("", schedule.target):
            label = f"'{target}' has it alone"
            yield unsupported(f"'{knob.key}' is no key of '{schedule.target}'", knob.span, label, "remove it")


def refuse_combine_keys(schedule: Schedule) -> Iterator[Diagnostic]:
    for knob in schedule.phases["combine"].values():
        message = f"the combine kernel has nothing to configure for {schedule.target}"
        yield unsupported(message, knob.span, "one row per program", "remove it")


def refuse_decoding(
    variant: Variant, schedule: Schedule, target: Target, *, by_rows: bool
) -> Iterator[Diagnostic]:
    """Yields refusals of schedules that the decode kernel cannot do: it has one loop over the keys, and rows
    of one sequence. by_rows: packed sequences count as one, since each query has a list of rows.
    """
    attention, knobs = variant.attention, schedule.forward
    for key in ("loops", "persistent", "order"):
        knob = knobs.get(key)
        if knob is None:
            continue
        match key, knob.choices[0]:
            case "loops", ("kv", "q"):
                label = "a query tile would lose its place in the loop over the keys"
                yield unsupported("loops = [kv, q] cannot pack or split", knob.span, label)
            case "persistent", True:
                yield unsupported("the decode kernel is not persistent", knob.span, "with split.kv or pack")
            case "order", "longest_first":
                label = "few q tiles, all as long"
                yield unsupported("the decode kernel has no order of q tiles", knob.span, label)
    yield from refuse_cut_tiles(knobs)
    if attention.q.storage.is_packed and not by_rows and target.packs_decoded_queries:
        yield from _refuse_shared_keys(attention, knobs)
    elif attention.q.storage.is_packed and not by_rows and not walks_packed_lists(attention):
        if target.decodes_packed_rows and listing_of(attention) is None:
            yield from _refuse_packed_rows(attention, knobs)
        else:
            span = attention.q.storage.span
            message = "a kernel for decoding (split.kv, pack) needs q to be an ordinary tensor"
            yield unsupported(message, span, "q is packed here", *_beside_lists(attention, target))
    if attention.softmax.dropout is not None and (instead := target.instead_of_drawing(variant, schedule)):
        label = "a probability is drawn to be dropped"
        yield unsupported("the decode kernel has no dropout", attention.softmax.span, label, instead)


def _refuse_packed_rows(attention: Attention, knobs: Mapping[str, Knob]) -> Iterator[Diagnostic]:
    """Yields refusals of kernels whose tiles hold the query heads of one packed query."""
    span, pack, split = attention.q.storage.span, knobs.get("pack"), knobs.get("split.kv")
    if pack is None or "gqa" not in pack.choices:
        message = "a kernel for decoding packed queries has the heads of one query in a tile"
        yield unsupported(message, span, "q is packed here", "write 'pack = gqa'")
    if attention.segment is not None:
        message = "packed queries are not decoded in an absolute order"
        yield unsupported(message, span, "q is packed here", "write 'loops = [q, kv]'")
    elif attention.epilogue is not None and split is not None and split.choices != (1,):
        message = "what splits found of packed queries is joined without an epilogue"
        yield unsupported(message, split.span, "beside an epilogue of packed rows", "remove it")


def _refuse_shared_keys(attention: Attention, knobs: Mapping[str, Knob]) -> Iterator[Diagnostic]:
    split, warps = knobs.get("split.kv"), knobs.get("warp_split")
    if attention.epilogue is not None and split is not None and split.choices != (1,):
        message = "what splits found of packed queries is joined without an epilogue"
        yield unsupported(message, split.span, "beside an epilogue of packed rows", "remove it")
    if warps is not None and "kv" in warps.choices:
        label = "sequences have other numbers of rows in each call"
        message = "keys of packed queries are not shared out among warps"
        yield unsupported(message, warps.span, label, "remove it")


def _beside_lists(attention: Attention, target: Target) -> tuple[str, ...]:
    listing = listing_of(attention)
    if listing is None:
        return ()
    if not target.decodes_packed_rows:
        return ("write a schedule for the target 'triton'",)
    if listing.keys == 1:
        rows = "lists of tokens become rows of memory"
        return (f"pack k and v, too, or write a schedule for 'cuda.sm_90a': {rows}",)
    rows = "write a schedule for 'cuda.sm_90a' with 'loops = [kv], pack = gqa': blocks become rows of memory"
    if listing.rows == 0 and not listing.gathers:
        return (
            "give each query a list, or write 'loops = [q, kv]', where a list may be for all",
            f"or {rows}",
        )
    return ("list blocks of a multiple of 16 keys, for each query", f"or {rows}")


def refuse_cut_tiles(knobs: Mapping[str, Knob]) -> Iterator[Diagnostic]:
    """Yields a refusal where splits of a fixed number of keys are not made of whole tiles."""
    tiles = knobs["tile.kv"].choices if "tile.kv" in knobs else (64,)
    split = knobs.get("split.kv")
    for choice in split.choices if split else ():
        match choice:
            case Choice(name="fixed", args={"size": int() as size}):
                cut = [tile for tile in tiles if isinstance(tile, int) and size % tile]
                if cut and split:
                    yield unsupported(
                        f"splits of {size} keys are not made of whole tiles of {cut[0]}",
                        split.span,
                        "a split begins and ends with a tile",
                        f"write a multiple of {max(tile for tile in tiles if isinstance(tile, int))}",
                    )


def refuse_storages(variant: Variant) -> Iterator[Diagnostic]:
    """Yields a refusal of packed and paged tensors, where the keys are outermost."""
    for tensor in variant.attention.inputs:
        if not tensor.storage.is_plain:
            yield unsupported(
                f"loops = [kv, q] needs ordinary tensors, and {tensor.name} is {tensor.storage.name}",
                tensor.storage.span,
                "of this input",
                "write 'loops = [q, kv]'",
            )


def refuse_scales_of_rows(variant: Variant) -> Iterator[Diagnostic]:
    """Yields a refusal of a scale of v that differs from query to query, where the keys are outermost."""
    softmax = variant.attention.softmax
    if softmax.v_scale is not None and "q_idx" in uses(softmax.v_scale):
        yield unsupported(
            "loops = [kv, q] needs one scale of v for all queries of a head",
            softmax.v_scale.span or softmax.span,
            "differs from query to query",
            "write 'loops = [q, kv]'",
        )


def refuse_walks(variant: Variant, span: Span | None) -> Iterator[Diagnostic]:
    """Yields a refusal of lists where the keys are outermost: each tile of queries has a list of its own."""
    if lists_blocks(variant.attention):
        label = "a program would need the lists of all queries"
        yield unsupported("loops = [kv, q] walks over no lists", span, label, "write 'loops = [q, kv]'")


def refuse_names(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields a refusal of inputs whose names mean something else in the interface of the generated module."""
    attention = variant.attention
    for tensor in attention.inputs:
        is_own = tensor.name in target_of(schedule.target).own_tensors
        if is_own or cannot_be_passed(tensor.name, attention, schedule):
            yield unsupported(
                f"the input cannot be called '{tensor.name}' in a generated module",
                tensor.span,
                "its interface has a name like this",
                "give it another name",
            )


def refuse_sizes(variant: Variant) -> Iterator[Diagnostic]:
    """Yields a refusal of sizes that no argument tells."""
    attention = variant.attention
    for name in sorted(find_unbound(arguments(attention)) - {size.name for size in capacity(attention)}):
        culprit = next(t for t in attention.inputs if any(name in str(size) for size in t.shape))
        yield unsupported(
            f"the size '{name}' cannot be inferred from the arguments",
            culprit.span,
            f"'{name}' appears only inside a product or a sum",
            f"give some input an axis of size '{name}' alone",
        )
