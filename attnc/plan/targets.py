"""All targets that are compiled, by the names that schedules give them. A new one is added to `_ALL`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from attnc.effort import remember
from attnc.model.attention import Variant
from attnc.model.configs import schedule_of
from attnc.model.knobs import ACCUMULATE_DQ
from attnc.model.program import Program
from attnc.model.schedule import Knob, Schedule
from attnc.model.variants import variants
from attnc.plan.fitting import WIDE, Tiles, TileShape, shape_of
from attnc.plan.kept_blocks import add_list
from attnc.plan.key_rows import in_rows
from attnc.plan.listed_rows import can_unite
from attnc.plan.lists import adds_to_keys, listing_of
from attnc.plan.signature import normalise
from attnc.plan.sm80 import SM80
from attnc.plan.sm90 import SM90A
from attnc.plan.target import Target
from attnc.plan.triton import TRITON

_ALL: tuple[Target, ...] = (TRITON, *SM80, SM90A)

#: By name; `model.resolve_schedule.TARGETS` has those too for which there are no kernels yet.
TARGETS: Mapping[str, Target] = MappingProxyType({target.name: target for target in _ALL})
#: One of each family: what an attention without a schedule is made for.
USUAL: tuple[str, ...] = (TRITON.name, SM80[0].name, SM90A.name)
#: What to write in place of a target that is not compiled yet.
INSTEAD = "a schedule for 'cuda.sm_80' runs on this architecture too"


def target_of(name: str) -> Target:
    """Returns the target that a schedule, or a module made for it, names. ValueError for one that is not
    compiled.
    """
    if name not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(sorted(TARGETS))}, got {name!r}")
    return TARGETS[name]


def shape_in(program: Program, name: str) -> TileShape:
    """Returns the facts on which the choice of a target and of a schedule depends, for an attention of a
    program: those of its variants, as far as they have the same rows.
    """
    attention = program.attention(name)
    shapes = [shape_of(variant.attention) for variant in variants(program, attention)]
    is_one = len({shape.width for shape in shapes}) == 1
    found = shapes[0] if is_one else replace(shape_of(attention), dtype=shapes[0].dtype)
    is_one_segment = len({shape.segment for shape in shapes}) == 1
    found = replace(
        found, narrow_cache=any(shape.narrow_cache for shape in shapes), is_one_segment=is_one_segment
    )
    listing = listing_of(next(iter(variants(program, attention))).attention)
    if listing is None:
        return found
    unites = all(can_unite(variant.attention) for variant in variants(program, attention))
    return replace(found, listed=(listing.rows, listing.keys), unites=unites)


@remember()
def schedule_for(
    program: Program, name: str, target: str, *, wanted: Tiles | None = None, deterministic: bool = True
) -> str:
    """Returns the text of a schedule, or of several, for an attention of a program that has none. wanted:
    sizes of its forward; deterministic: whether its gradients have the same bits in every run, or are the
    fastest.
    """
    attention, made = program.attention(name), target_of(target)
    shape = replace(shape_in(program, name), wanted=wanted or Tiles())
    lines = _forward_lines(program, name, made, shape)
    if "q" in attention.grads:
        lines += _backward_lines([
            (variant, _sum_of_dq(variant, made, deterministic=deterministic))
            for variant in variants(program, attention)
        ])  # fmt: skip
    if not deterministic and made.has_selected_gradients and adds_to_keys(attention):
        summed = [f"  accumulate.d{grad} = atomic" for grad in attention.grads if grad in ("k", "v")]
        lines += ["backward {", *summed, "}"]
    return _schedule_texts(name, target, lines, made.default_labels(shape))


def _forward_lines(program: Program, name: str, made: Target, shape: TileShape) -> list[str]:
    """Returns the lines of a forward: where only some variants have wide rows, those of each kind under a
    condition, unless they say something of a backward, which no condition holds.
    """
    found = [*variants(program, program.attention(name))]
    widths = [shape_of(variant.attention).width for variant in found]
    wide = [variant for variant, width in zip(found, widths, strict=True) if width > WIDE]
    if not wide:
        return list(made.default_schedule(shape))
    whys = [made.refuse_wide_gradients(normalise(variant.attention)) for variant in wide]
    of_wide = [*made.default_schedule(replace(shape, width=max(widths), shares_sums=not any(whys)))]
    if len(wide) == len(found):
        return of_wide
    of_others = [*made.default_schedule(replace(shape, width=min(shape.width, WIDE)))]
    if of_others == of_wide or any(line.endswith("{") for line in (*of_wide, *of_others)):
        return of_others
    others = [variant for variant in found if variant not in wide]
    return [*_when(others, of_others), *_when(wide, of_wide)]


def _when(held: Sequence[Variant], lines: Sequence[str]) -> list[str]:
    """Returns lines that hold for some variants alone."""
    return [f"when {' or '.join(map(_condition_of, held))} {{", *(f"  {line}" for line in lines), "}"]


def _condition_of(variant: Variant) -> str:
    return " and ".join(f"{name} == {_write(x)}" for name, x in variant.params.items())


def _sum_of_dq(variant: Variant, target: Target, *, deterministic: bool) -> str:
    """Returns how dq is summed where no schedule says it: of a mask whose blocks may be listed it is left
    open, as far as it has the same bits in every run, until that is known.
    """
    listed = add_list(variant) if target.lists_kept_blocks else None
    if listed is not None and deterministic:
        return "two_pass"  # which no line says
    return target.sum_of_dq(in_rows(listed or variant), deterministic=deterministic)


def steps_for(program: Program, name: str, target: str) -> Iterator[str]:
    """Yields texts of schedules for an attention of a program that has none: that of `schedule_for` and one
    for single tokens and drafts, and one for chunks, so that calls choose by their sizes
    (`tuned.tables.guess_rows`). None where all calls have the kernels of `schedule_for`. The caller takes the
    first that compiles: kernels of chunks have less than those for decoding, and these less than others.
    """
    attention, made = program.attention(name), target_of(target)
    shape = shape_in(program, name)
    if attention.grads or shape.packed or shape.segment or shape.listed is not None:
        return
    lines, labels = _forward_lines(program, name, made, shape), made.default_labels(shape)
    steps = list(made.default_steps(shape))
    if not steps or lines[:1] == steps[:1]:
        return
    named = {"prompt": labels[""]} if list(labels) == [""] else labels
    rest = [
        _schedule_text(name, target, "decode", steps),
        _schedule_texts(name, target, lines, named),
    ]
    if chunks := list(made.default_chunks(shape)):
        yield "\n".join([rest[0], _schedule_text(name, target, "chunk", chunks), rest[1]])
    yield "\n".join(rest)


def schedules_of_steps(
    program: Program, name: str, target: str, *, splits: int, many: bool = False
) -> Iterator[str]:
    """Yields texts of the schedule for few queries alone, of which the caller takes the first that compiles.
    splits: how many programs share the keys of a head; 0: as many as suit the device and the sizes; many:
    whether queries are those of chunks.
    """
    made, shape, count = target_of(target), shape_in(program, name), str(splits or "auto")
    if many and (chunks := list(made.default_chunks(shape, count))):
        yield _schedule_text(name, target, "", chunks)
    lines = list(made.default_steps(shape, count)) or list(made.default_schedule(shape))
    yield _schedule_text(name, target, "", lines)


def _schedule_texts(name: str, target: str, lines: Sequence[str], labels: Mapping[str, Sequence[str]]) -> str:
    """Returns a schedule for each label, of lines that all have and of its own."""
    return "\n".join(_schedule_text(name, target, label, [*lines, *own]) for label, own in labels.items())


def _schedule_text(name: str, target: str, label: str, lines: Sequence[str]) -> str:
    called = f" as {label}" if label else ""
    body = "\n".join(f"  {line}" for line in lines)
    return f"schedule {name} for {target}{called} {{\n{body}\n}}\n"


def complete_schedule(variant: Variant, schedule: Schedule) -> Schedule:
    """Returns the schedule of one variant (`schedule_of`), and how dq is summed: where the schedule says
    nothing of that and of its kernels, by the target's fastest way that gives the same bits in every run.
    """
    chosen = schedule_of(schedule, variant)
    if "q" not in variant.attention.grads or chosen.is_decode or not _leaves_sum_open(chosen):
        return chosen
    way = target_of(chosen.target).sum_of_dq(in_rows(variant), deterministic=True)
    if way == ACCUMULATE_DQ.default:
        return chosen
    own = {**chosen.knobs.get("backward", {}), _SUM_OF_DQ: Knob(key=_SUM_OF_DQ, choices=(way,))}
    return replace(chosen, knobs={**chosen.knobs, "backward": own})


def as_written(schedule: Schedule) -> Schedule:
    """Returns a completed schedule without the sum of dq that nobody wrote."""
    backward = schedule.knobs.get("backward", {})
    written = {key: knob for key, knob in backward.items() if key != _SUM_OF_DQ or knob.span is not None}
    return replace(schedule, knobs={**schedule.knobs, "backward": written})


_SUM_OF_DQ = "accumulate.dq"


def _leaves_sum_open(schedule: Schedule) -> bool:
    """Returns whether a schedule says neither how dq is summed nor anything that only kernels of one way may
    have: their tiles.
    """
    of_kernels = [
        said.get(phase)
        for said in (schedule.knobs, schedule.where, schedule.listed)
        for phase in ("dq", "dkdv")
    ]
    said = schedule.phases["backward"].keys() - {"loops", "order"}
    others = all(key.startswith("accumulate.") and key != _SUM_OF_DQ for key in said)
    return others and not any(of_kernels)


def _backward_lines(sums: Sequence[tuple[Variant, str]]) -> list[str]:
    """Returns the block that sums dq so, where some variant does not by `two_pass`, as it does unsaid."""
    ways = {way for _, way in sums}
    if ways <= {"two_pass"}:
        return []
    if len(ways) == 1:
        return ["backward {", *(f"  accumulate.dq = {way}" for way in ways), "}"]
    lines = []
    for variant, way in sums:
        if way != "two_pass":
            lines.append(f"  when {_condition_of(variant)} {{ accumulate.dq = {way} }}")
    return ["backward {", *lines, "}"]


def _write(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
