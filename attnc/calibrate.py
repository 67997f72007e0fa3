"""Where the scores of real inputs lie, and the phi and bounds of a unified maximum that follow from them.

A decode kernel with `softmax = unified_max(...)` subtracts phi from every score and looks, split by split of
the keys, whether the largest exponent of a row stays within the bounds; a split in which it does not is
computed again. So what counts are the maxima of rows over runs of keys. phi puts their middle into the middle
of the exponents that the type of P allows, and the bounds allow all of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnc.build import front, plan_program
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.schedule import Choice, Knob
from attnc.plan.ir import Module
from attnc.plan.softmax import bounds_of, safe_range
from attnc.reference import Floats, Input, heads, to_arrays
from attnc.runtime.trial import draw_samples, load_samples
from attnc.source import Span

#: Percentiles of the maxima that are reported.
PERCENTILES = (0.0, 1.0, 50.0, 99.0, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What to write for one schedule, and why.

    span: the schedule's `softmax = ...`; text: what it should say; count: maxima seen, those of rows that
    see no key left out; percentiles: of the maxima, at PERCENTILES; safe: the exponents that the type of P
    allows; outside: the share of the maxima outside the new bounds, and `outside_before` outside those that
    the spec has now.
    """

    attention: str
    target: str
    span: Span
    text: str
    count: int
    percentiles: tuple[float, ...]
    safe: tuple[float, float]
    phi: float
    bounds: tuple[float, float]
    outside: float
    outside_before: float


def calibrate(path: Path, samples: Path | None, keys: int) -> tuple[Calibration, ...]:
    """Returns a calibration for each schedule of the spec with a unified maximum.

    samples: a file that `torch.save` wrote, a dict of inputs by name (v may be missing); None: N(0, 1)
    inputs. keys: length of the runs of keys whose maxima count. Raises DiagnosticError for a wrong spec,
    OSError for a file that cannot be read, ValueError where the samples do not fit.
    """
    program = front(path)
    given = None if samples is None else load_samples(samples)
    modules = plan_program(program).modules
    found = []
    for schedule in program.schedules:
        whens = (when.knobs for when in schedule.whens.get("forward", ()))
        knob = next((said["softmax"] for said in (schedule.forward, *whens) if "softmax" in said), None)
        if knob is not None and (choice := _find_unified(knob)) is not None and knob.span is not None:
            made_for = (schedule.name, schedule.target)
            own = [made for made in modules if (made.variant.attention.name, made.target) == made_for]
            if own:
                found.append(_calibrate(own, choice, knob.span, given, keys))
    return tuple(found)


def _calibrate(
    modules: list[Module], choice: Choice, span: Span, given: Mapping[str, Input] | None, keys: int
) -> Calibration:
    types, seen, misfits = set(), [], []
    for module in modules:
        attention = module.variant.attention
        try:
            maxima = list(_maxima(attention, draw_samples(module) if given is None else given, keys))
        except (KeyError, ValueError) as misfit:
            misfits.append(f"{attention.name} {module.variant.name}: {misfit}")
            continue
        types.add(attention.element)
        seen += maxima
    if not any(map(len, seen)):
        raise ValueError("; ".join(misfits) or "no row of the samples sees a key")
    values = np.concatenate(seen)
    safe = _narrowest(types)
    phi, bounds = choose(values, safe)
    old_phi = choice.args["phi"]
    assert isinstance(old_phi, float)
    knobs = f"phi = {phi:g}, bounds = [{bounds[0]:g}, {bounds[1]:g}], fallback = online"
    return Calibration(
        attention=modules[0].variant.attention.name,
        target=modules[0].target,
        span=span,
        text=f"softmax = unified_max({knobs})",
        count=len(values),
        percentiles=tuple(float(np.percentile(values, at)) for at in PERCENTILES),
        safe=safe,
        phi=phi,
        bounds=bounds,
        outside=_outside(values, phi, bounds),
        outside_before=_outside(values, old_phi, bounds_of(choice)),
    )


def choose(maxima: Floats, safe: tuple[float, float]) -> tuple[float, tuple[float, float]]:
    """Returns (phi, bounds) for these maxima, whole numbers: their middle lies in the middle of what is safe,
    and all that is safe is allowed, since narrower bounds would only make more splits be computed twice.
    """
    middle = (float(np.min(maxima)) + float(np.max(maxima))) / 2
    return float(round(middle - (safe[0] + safe[1]) / 2)), (math.ceil(safe[0]), math.floor(safe[1]))


def _maxima(attention: Attention, inputs: Mapping[str, Input], keys: int) -> Iterator[Floats]:
    for head in heads(attention, to_arrays(attention, inputs)):
        scores = head.scores
        for first in range(0, scores.shape[1], keys):
            run = scores[:, first : first + keys].max(axis=1)
            yield run[~np.isneginf(run)]


def _outside(maxima: Floats, phi: float, bounds: tuple[float, float]) -> float:
    exponents = maxima - phi
    inside = (exponents >= bounds[0]) & (exponents <= bounds[1])
    return float(1.0 - inside.mean())


def _narrowest(types: set[DType]) -> tuple[float, float]:
    ranges = [safe_range(dtype) for dtype in types]
    return max(low for low, _ in ranges), min(high for _, high in ranges)


def _find_unified(knob: Knob) -> Choice | None:
    chosen = (choice for choice in knob.choices if isinstance(choice, Choice))
    return next((choice for choice in chosen if choice.name == "unified_max"), None)
