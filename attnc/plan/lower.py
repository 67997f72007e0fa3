"""Variant + schedule -> Module: the one entry of this package.

What a target cannot lower is said first (`checks`), then kernels are planned, then the plan is verified.
"""

from __future__ import annotations

from dataclasses import replace

from attnc.diagnostics import DiagnosticError
from attnc.effort import remember
from attnc.model.attention import Variant
from attnc.model.schedule import Schedule
from attnc.plan.backward import plan_backward
from attnc.plan.checks import check_lowerable
from attnc.plan.conversion import plan_conversion
from attnc.plan.decay import decay_of, margin_of
from attnc.plan.decode import plan_decode
from attnc.plan.differentiable import has_backward, leaves_gradients
from attnc.plan.forward import plan_forward
from attnc.plan.ir import Decode, Forward, Module
from attnc.plan.ir.backward import Backward
from attnc.plan.kept_blocks import add_list, plan_kept_blocks
from attnc.plan.key_rows import plan_key_rows
from attnc.plan.listed_rows import (
    as_rows,
    lists_rows,
    name_sequences,
    plan_listed_rows,
    queries_of_walk,
    row_sizes,
)
from attnc.plan.lists import list_making, list_sizes, listing_of, unite
from attnc.plan.signature import arguments, capacity, kept_for_gradients, normalise, results
from attnc.plan.targets import TARGETS, as_written, complete_schedule, target_of
from attnc.plan.verify import verify_module


@remember()
def plan(variant: Variant, schedule: Schedule) -> Module:
    """Returns all kernels of a variant under a schedule.

    Raises DiagnosticError with every reason why the schedule's target cannot compile it.
    """
    schedule = complete_schedule(variant, schedule)
    target = TARGETS.get(schedule.target)
    listed = add_list(variant, schedule) if target is not None and target.lists_kept_blocks else None
    if listed is None or has_backward(listed.attention, schedule) != has_backward(
        variant.attention, schedule
    ):
        return _plan(variant, variant, schedule)
    try:
        return _plan(variant, listed, complete_schedule(listed, as_written(schedule)))
    except DiagnosticError:  # kernels cannot walk over the blocks, or no tiles divide them
        return _plan(variant, variant, schedule)


def _plan(declared: Variant, variant: Variant, schedule: Schedule) -> Module:
    """declared: the variant without a list of the blocks that its mask keeps."""
    problems = tuple(check_lowerable(variant, schedule))
    if problems:
        raise DiagnosticError(problems)
    conversion = None
    if target_of(schedule.target).converts_before(variant, schedule):
        conversion = plan_conversion(variant)
        variant = conversion.variant
    listed_rows, seen, made = None, declared, listing_of(normalise(variant.attention))
    kept = None if made is None else plan_kept_blocks(normalise(variant.attention), made)
    if lists_rows(variant.attention, schedule, target_of(schedule.target)):
        listed_rows = plan_listed_rows(variant, schedule)
        seen = variant = as_rows(variant, listed_rows)
        made = listing_of(normalise(name_sequences(declared.attention)))
    attention = normalise(variant.attention)
    listing, together = listing_of(attention), queries_of_walk(variant.attention, schedule)
    sizes = (*capacity(normalise(declared.attention)), *list_sizes(attention, listing))
    sizes = (*row_sizes(normalise(declared.attention)), *sizes) if listed_rows else sizes
    differentiable = has_backward(attention, schedule)
    if listing is not None:
        attention = replace(attention, mask=listing.rest)
    if schedule.is_decode:
        kernel: Decode | Forward = plan_decode(variant, attention, schedule, listing, listed_rows, together)
    else:
        kernel = plan_forward(variant, attention, schedule, listing)
    lists = None
    if made is not None:
        is_distinct = kept is None and attention.tensor(made.condition.tensor).is_distinct
        by_entry = made.gathers or listed_rows is not None
        lists = list_making(made, is_distinct=is_distinct, by_entry=by_entry, kept=kept)
        lists = lists if together == 1 else unite(lists, attention, made, together)
    decay = decay_of(attention, "kv") if kernel.bound.left_out else None
    stored = variant if conversion is None else declared  # before it, in pages
    has_pages = differentiable and stored.attention.k.storage.is_paged
    key_rows = plan_key_rows(stored) if has_pages else None
    module = Module(
        variant=declared,
        target=schedule.target,
        args=arguments(seen.attention),
        sizes=sizes,
        outputs=results(attention),
        kernel=kernel,
        kept=kept_for_gradients(attention)
        if differentiable or leaves_gradients(declared.attention, schedule)
        else (),
        label=schedule.label,
        margin=None if decay is None else margin_of(decay),
        conversion=conversion,
        key_rows=key_rows,
        backward=_plan_gradients(variant if key_rows is None else key_rows.variant, schedule, kernel)
        if differentiable
        else None,
        lists=lists,
        listed_rows=listed_rows,
        rows_of=None if listed_rows is None else seen,
    )
    verify_module(module)
    return module


def _plan_gradients(variant: Variant, schedule: Schedule, forward: Decode | Forward) -> Backward:
    attention = normalise(variant.attention)
    listing = listing_of(attention)
    if listing is not None:
        attention = replace(attention, mask=listing.rest)
    return plan_backward(variant, attention, schedule, forward, listing)
