"""Runs a projection's module on cases and judges every element against the float64 product.

A case passes when y is within the bound that the plan promises for its config (`ir.projection.DotBound`),
does not depend on what surrounds the tensors in memory, and nothing but y was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy

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
from attnc.verify.problem import Guarded, place_tensor
from attnc.verify.projection_cases import (
    Reach,
    boundary_cases,
    cases,
    draw,
    facts,
    fit_of,
    fixed_cases,
    repro,
)
from attnc.verify.search import Trial
from attnc.verify.tolerance import SLACK
from attnc.verify.verdict import Verdict

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


class ProjectionTrial(Trial):
    """A projection has no rules besides the bound."""

    def __init__(self, subject: ProjectionSubject) -> None:
        self.subject, self._variant = subject, subject.planned.variant
        self.name = f"{subject.planned.name}-{self._variant.name}"
        self.fit = fit_of(self._variant, len(subject.module.CONFIGS))
        self.device = subject.device
        self.place = "Triton's interpreter" if self.device == "cpu" else torch.cuda.get_device_name()
        self._boundaries = boundaries_of_projection(subject.planned)
        self._met: set[tuple[Boundary, int]] = set()

    def cases(self, count: int) -> Iterable[Case]:
        reach, configs = self.subject.reach(), self.subject.module.CONFIGS
        yield from boundary_cases(self._variant, reach, self._boundaries, configs)
        yield from fixed_cases(self._variant, reach, count)

    def drawn(self) -> SearchStrategy[Case]:
        return cases(self._variant, self.subject.reach())

    def check(self, case: Case, fills: Iterable[str]) -> Verdict:
        return check_projection(self.subject, case, fills=fills)

    def repro(self, case: Case) -> str:
        return repro(self._variant, case)

    def note(self, case: Case) -> None:
        self._met |= set(facts(case, self.subject.module.CONFIGS).points(self._boundaries))

    @property
    def coverage(self) -> Summary:
        points = sum(len(boundary.points) for boundary in self._boundaries)
        listed = (
            Met(boundary=boundary, met=tuple(p for p in boundary.points if (boundary, p) in self._met))
            for boundary in self._boundaries
        )
        return Summary(points=(len(self._met), points), pairs=(0, 0), boundaries=tuple(listed))
