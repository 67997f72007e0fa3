"""Runs a projection's module on cases and judges every element against the float64 product.

A case passes when y is within the bound that the plan promises for its config (`ir.projection.DotBound`),
does not depend on what surrounds the tensors in memory, and nothing but y was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hypothesis import given, target
from hypothesis import seed as seeded

from attnc.build import digest
from attnc.model.projection import KERNELS
from attnc.model.tensors import DType
from attnc.plan.ir.projection import MOST_ROWS, DotBound, ProjectionModule
from attnc.runtime.loader import load_text
from attnc.target.projection import render_projection
from attnc.verify.boundaries import Boundary, boundaries_of_projection
from attnc.verify.case import Case
from attnc.verify.check import same_bits
from attnc.verify.cover import Met, Summary
from attnc.verify.interpreter import ensure_interpreter, is_interpreting
from attnc.verify.memory import guarding
from attnc.verify.problem import FILLS, Guarded, place_tensor
from attnc.verify.projection_cases import Reach, boundary_cases, cases, draw, facts, fixed_cases, repro
from attnc.verify.search import Failure, Report, TimeIsUp, is_late, searching
from attnc.verify.tolerance import SLACK
from attnc.verify.verdict import Verdict

Progress = Callable[[int, Case, Verdict], None]
_FLUSHED = 2.0**-126
_LARGEST = {DType.F16: 65504.0, DType.BF16: 3.3895313892515355e38, DType.F32: 3.4028234663852886e38}
#: Steps of a tile that a case may take, interpreted and on a GPU.
_WORK = {"cpu": 300, "cuda": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionSubject:
    """What is verified: the loaded module of a plan."""

    planned: ProjectionModule
    module: ModuleType
    device: str = "cpu"

    def reach(self) -> Reach:
        """The configs to draw from: on a GPU those that fit it, elsewhere those that differ in more than
        warps and stages.
        """
        tiles: dict[int, tuple[int, int, int]] = {}
        seen: set[tuple[object, ...]] = set()
        room = 1 << 30
        if self.device != "cpu":
            properties: Any = torch.cuda.get_device_properties(self.device)  # annotated incompletely by torch
            room = properties.shared_memory_per_block_optin
        for at, config in enumerate(self.module.CONFIGS):
            shape = (config.impl, config.BLOCK_N, config.BLOCK_K, config.SPLIT_K)
            if config.shared > room or (self.device == "cpu" and shape in seen):
                continue
            seen.add(shape)
            is_kernel = config.impl in KERNELS
            tiles[at] = (
                (config.BLOCK_N, config.BLOCK_K, MOST_ROWS[config.impl])
                if is_kernel
                else (1 << 20, 1 << 20, 1 << 20)
            )
        return Reach(tiles=tiles, work=_WORK[self.device])


def projection_subject(planned: ProjectionModule, text: str | None = None) -> ProjectionSubject:
    """Renders and loads the module, or loads this text of it; interpreted where there is no GPU."""
    device = "cuda" if torch.cuda.is_available() and not is_interpreting() else "cpu"
    if device == "cpu":
        ensure_interpreter()
    return ProjectionSubject(planned=planned, module=load_text(text or text_of(planned)), device=device)


def text_of(planned: ProjectionModule) -> str:
    """The module's text as the compiler prints it, without measured choices."""
    source = planned.variant.source
    files = render_projection(planned, path=Path(source.path).name, sha256=digest(source))
    (text,) = files.values()
    return text


def check_projection(subject: ProjectionSubject, case: Case, *, fills: Iterable[str] = ("nan",)) -> Verdict:
    """Runs one case, with each of the fills around its tensors; never raises for what the kernel does."""
    variant = subject.planned.variant
    values = draw(variant, case, subject.device)
    bound = subject.planned.bound(case.config)
    first: torch.Tensor | None = None
    verdict = _broken("nothing was run")
    for fill in fills:
        inputs, y = _build(subject, case, values, fill)
        tensors = {name: guarded.view for name, guarded in inputs.items()}
        try:
            with guarding(*tensors.values()):
                function = getattr(subject.module, variant.projection.name)
                function(*tensors.values(), out=y.view, config=subject.module.CONFIGS[case.config])
            if subject.device != "cpu":
                torch.cuda.synchronize()
        except Exception as failure:
            return _broken(f"{type(failure).__name__}: {failure}")
        if any(guarded.disturbed(is_output=False) for guarded in inputs.values()):
            return _broken("an input was written to, or memory around it")
        if y.disturbed(is_output=True):
            return _broken("memory around y was written to")
        if first is None:
            first = y.view
            verdict = _judge(tensors, y.view, bound, variant.projection.dtype)
            if not verdict.ok:
                return verdict
        elif not same_bits(y.view, first):
            return _broken("y depends on memory outside the tensors")
    return verdict


def _build(
    subject: ProjectionSubject, case: Case, values: Mapping[str, torch.Tensor], fill: str
) -> tuple[dict[str, Guarded], Guarded]:
    projection, layouts, device = subject.planned.variant.projection, case.layouts, subject.device
    inputs = {
        name: place_tensor(projection.tensors[name], value, layouts.get(name), fill, device)
        for name, value in values.items()
    }
    empty = torch.full((case.dims["M"], case.dims["N"]), torch.nan, dtype=values["x"].dtype, device=device)
    return inputs, place_tensor(projection.tensors["y"], empty, layouts.get("y"), fill, device)


def _judge(tensors: Mapping[str, torch.Tensor], y: torch.Tensor, bound: DotBound, dtype: DType) -> Verdict:
    """Compares y with the product in float64: NaN and infinities exactly, then every element."""
    x, w = tensors["x"].double(), tensors["w"].double()
    bias = tensors["bias"].double() if "bias" in tensors else torch.zeros((), device=x.device)
    want, size = x @ w.T + bias, x.abs() @ w.abs().T + bias.abs()
    K = x.shape[1]
    flushed = (K + 2) * _FLUSHED * (2 + _largest(x) + _largest(w))
    allowed = SLACK * (bound.relative(K) * size + dtype.unit_roundoff * want.abs()) + flushed
    allowed = allowed + dtype.smallest_subnormal
    got = y.double()
    ratio = (got - want).abs() / allowed
    same = (got == want) | (got.isnan() & want.isnan())
    overflow = size + allowed > _LARGEST[dtype] * (1 - dtype.unit_roundoff)
    open_ = same | (overflow & size.isfinite())
    ratio = torch.where(open_, 0.0, torch.where(ratio.isnan(), torch.inf, ratio))
    if not ratio.numel():
        return Verdict(ok=True, message="nothing to compute")
    at = int(ratio.argmax())
    m, n = divmod(at, ratio.shape[1])
    worst, where = float(ratio[m, n]), f"y[m={m}, n={n}]"
    message = "within the bound"
    if worst > 1:
        off = int((ratio > 1).sum())
        message = (
            f"{where} = {float(got[m, n]):.9g}, expected {float(want[m, n]):.9g} "
            f"+- {float(allowed[m, n]):.3g} ({off} of {ratio.numel()} elements are off)"
        )
    finite = want.isfinite() & got.isfinite() & ~open_
    error = torch.where(finite, (got - want).abs(), 0.0).amax()
    norm = float(error / torch.where(want.isfinite(), want.abs(), 0.0).amax().clamp_min(_FLUSHED))
    return Verdict(ok=worst <= 1, message=message, worst=worst, where=where, norm_ratio=norm)


def _largest(values: torch.Tensor) -> float:
    """The largest finite absolute value, 0 where there is none."""
    finite = values.abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.amax()) if finite.numel() else 0.0


def _broken(message: str) -> Verdict:
    return Verdict(ok=False, message=message, worst=float("inf"))


def verify_projection(
    subject: ProjectionSubject,
    *,
    count: int = 24,
    seconds: float = float("inf"),
    least: int = 0,
    fills: Iterable[str] = tuple(FILLS),
    progress: Progress | None = None,
) -> Report:
    """The fixed cases, and those at boundaries: the same on every run. Stops after `seconds`, though ten
    times later if it has not run `least` cases, or at the third failure.
    """
    started, report = time.monotonic(), Report(examples=0, seconds=0.0)
    variant, reach, configs = subject.planned.variant, subject.reach(), subject.module.CONFIGS
    boundaries, met = boundaries_of_projection(subject.planned), set[tuple[Boundary, int]]()
    at_boundaries = boundary_cases(variant, reach, boundaries, configs)
    first, *others = fills
    for number, case in enumerate((*at_boundaries, *fixed_cases(variant, reach, count))):
        second = others[number % len(others) :][:1] if others else ()
        verdict = check_projection(subject, case, fills=(first, *second))
        met |= set(facts(case, configs).points(boundaries))
        report = _with(report, subject, case, verdict, time.monotonic() - started)
        if progress is not None:
            progress(report.examples, case, verdict)
        if is_late(report, seconds, least) or len(report.failures) == 3:
            break
    points = [(boundary, point) for boundary in boundaries for point in boundary.points]
    listed = (
        Met(boundary=boundary, met=tuple(p for p in boundary.points if (boundary, p) in met))
        for boundary in boundaries
    )
    return replace(
        report, coverage=Summary(points=(len(met), len(points)), pairs=(0, 0), boundaries=tuple(listed))
    )


def _with(report: Report, subject: ProjectionSubject, case: Case, verdict: Verdict, seconds: float) -> Report:
    """The report with one more case in it."""
    worse = verdict.worst > report.worst
    failure = Failure(case=case, verdict=verdict, repro=repro(subject.planned.variant, case))
    return replace(
        report,
        examples=report.examples + 1,
        seconds=seconds,
        worst=max(report.worst, verdict.worst),
        where=verdict.where if worse else report.where,
        worst_case=case if worse else report.worst_case,
        norm_ratio=max(report.norm_ratio, verdict.norm_ratio),
        failures=report.failures if verdict.ok else (*report.failures, failure),
    )


def fuzz_projection(
    subject: ProjectionSubject,
    *,
    examples: int = 100,
    seconds: float = float("inf"),
    seed: int = 0,
    shrink: bool = True,
) -> Report:
    """Draws cases, leaning towards those that come close to the bound, until one fails; shrinks that."""
    started, reports = time.monotonic(), [Report(examples=0, seconds=0.0)]

    @seeded(seed)
    @searching(examples, shrink=shrink)
    @given(cases(subject.planned.variant, subject.reach()))
    def passes(case: Case) -> None:
        spent = time.monotonic() - started
        if spent > seconds and not reports[-1].failures:
            raise TimeIsUp("enough")
        verdict = check_projection(subject, case)
        counted = _with(replace(reports[-1], failures=()), subject, case, verdict, spent)
        reports.append(counted)
        target(min(verdict.worst, 1e3), label="error / bound")
        if not verdict.ok:
            raise _Caught(verdict.message)

    with suppress(_Caught, TimeIsUp):
        passes()
    return reports[-1]


class _Caught(Exception):
    """A failing case on its way out of Hypothesis, which runs the smallest last."""
