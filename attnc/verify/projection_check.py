"""Runs a projection's module on cases and judges every element against the float64 product.

A case passes when y is within the bound that the plan promises for its config (`plan.projection.DotBound`),
does not depend on what surrounds the tensors in memory, and nothing but y was written. What a call allocates
is full of NaN before its kernels see it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from attnc.build import digest
from attnc.model.dtypes import DType
from attnc.model.program import KERNELS, ProjectionVariant
from attnc.plan.projection import MOST_ROWS, DotBound, ProjectionModule
from attnc.runtime.loader import load_text
from attnc.runtime.watchdog import watch
from attnc.support.arguments import DTYPES
from attnc.target.projection import render_projection
from attnc.verify.boundaries import Boundary, CaseFacts, boundaries_of_projection
from attnc.verify.case import Case, Fit, TensorLayout
from attnc.verify.check import same_bits
from attnc.verify.cover import Met, Summary
from attnc.verify.interpreter import ensure_interpreter, is_interpreting
from attnc.verify.memory import guarding
from attnc.verify.problem import Guarded, place_tensor
from attnc.verify.search import Trial
from attnc.verify.subject import poison_allocations
from attnc.verify.tolerance import SLACK
from attnc.verify.verdict import Verdict

_FLUSHED = 2.0**-126
#: Steps of a tile that a case may take, interpreted and on a GPU.
_WORK = {"cpu": 300, "cuda": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionSubject:
    """What is verified: the loaded module of a plan."""

    planned: ProjectionModule
    module: ModuleType
    device: str

    def reach(self) -> Reach:
        """Returns the configs to draw from: on a GPU those that fit it, elsewhere those that differ in more
        than warps and stages.
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
    """Returns the module's text as the compiler prints it, without measured choices."""
    source = planned.variant.source
    files = render_projection(planned, path=Path(source.path).name, sha256=digest(source))
    (text,) = files.values()
    return text


def check_projection(subject: ProjectionSubject, case: Case, *, fills: Iterable[str] = ("nan",)) -> Verdict:
    """Runs one case, with each of the fills around its tensors; never raises for what the kernel does."""
    variant = subject.planned.variant
    values = draw(variant, case, subject.device)
    bound = subject.planned.state_bound(case.config)
    first: torch.Tensor | None = None
    verdict = _report_broken("nothing was run")
    for fill in fills:
        inputs, y = _build(subject, case, values, fill)
        tensors = {name: guarded.view for name, guarded in inputs.items()}
        try:
            with (
                guarding(*tensors.values()),
                poison_allocations(subject.module),
                watch(f"{variant.projection.name}, case {case.to_json()},", subject.device),
            ):
                function = getattr(subject.module, variant.projection.name)
                function(*tensors.values(), out=y.view, config=subject.module.CONFIGS[case.config])
                if subject.device != "cpu":
                    torch.cuda.synchronize()
        except OSError:  # of the machine
            raise
        except Exception as failure:
            return _report_broken(f"{type(failure).__name__}: {failure}")
        if any(guarded.is_disturbed(is_output=False) for guarded in inputs.values()):
            return _report_broken("an input was written to, or memory around it")
        if y.is_disturbed(is_output=True):
            return _report_broken("memory around y was written to")
        if first is None:
            first = y.view
            verdict = _judge(tensors, y.view, bound, variant.projection.dtype)
            if not verdict.ok:
                return verdict
        elif not same_bits(y.view, first):
            return _report_broken("y depends on memory outside the tensors")
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
    overflow = size + allowed > dtype.largest * (1 - dtype.unit_roundoff)
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
    return Verdict(ok=worst <= 1, message=message, worst=worst, where=where)


def _largest(values: torch.Tensor) -> float:
    finite = values.abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.amax()) if finite.numel() else 0.0


def _report_broken(message: str) -> Verdict:
    return Verdict(ok=False, message=message, worst=float("inf"))


class ProjectionTrial(Trial):
    """A projection has no rules besides the bound."""

    def __init__(self, subject: ProjectionSubject) -> None:
        self.subject, self._variant = subject, subject.planned.variant
        self.name, self.target = f"{subject.planned.name}-{self._variant.name}", subject.planned.target
        self.fit = fit_of(self._variant, len(subject.module.CONFIGS))
        self.device = subject.device
        self.place = "Triton's interpreter" if self.device == "cpu" else torch.cuda.get_device_name()
        self._boundaries = boundaries_of_projection(subject.planned)
        self._met: set[tuple[Boundary, int]] = set()

    def cases(self, count: int) -> Iterable[Case]:
        reach, configs = self.subject.reach(), self.subject.module.CONFIGS
        first = boundary_cases(self._variant, reach, self._boundaries, configs)
        yield from islice(first, _FIRST)
        yield from plain_cases(self._variant, reach)
        yield from first
        yield from fixed_cases(self._variant, reach, count)

    def draw_cases(self) -> SearchStrategy[Case]:
        return cases(self._variant, self.subject.reach())

    def check(self, case: Case, fills: Iterable[str]) -> Verdict:
        return check_projection(self.subject, case, fills=fills)

    def repro(self, case: Case, rule: str = "") -> str:
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


#: Numbers that have broken products: see `draw`.
STYLES = ("random", "cancelling", "one_hot", "growing", "ones", "small")
#: Which tensor gets a special value, and which.
SPECIALS: Mapping[str, tuple[str, float] | None] = {
    "none": None,
    "nan_x": ("x", float("nan")),
    "nan_w": ("w", float("nan")),
    "inf_x": ("x", float("inf")),
    "inf_w": ("w", float("inf")),
    "nan_bias": ("bias", float("nan")),
}
#: Cases in front of the plain one.
_FIRST = 3
_ROWS = (1, 2, 3, 0, 4, 5, 8, 9, 16, 17, 33, 64, 65)
_COLUMNS = (64, 1, 3, 16, 61, 65, 131)
_DEPTHS = (512, 1, 7, 16, 61, 128, 131, 513, 1030)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a case may cost: steps of a tile, for configs with these (BLOCK_N, BLOCK_K, rows), by number."""

    tiles: Mapping[int, tuple[int, int, int]]
    work: int

    def affordable(self, dims: Mapping[str, int], config: int) -> bool:
        block_n, block_k, rows = self.tiles[config]
        steps = -(-dims["N"] // block_n) * -(-max(dims["M"], 1) // rows) * -(-dims["K"] // block_k)
        return steps <= self.work


def fit_of(variant: ProjectionVariant, configs: int) -> Fit:
    """Returns the values that a case of the projection may have, given how many configs there are."""
    ranks = {name: len(tensor.shape) for name, tensor in variant.projection.tensors.items()}
    styles = ("random",)
    return Fit(
        dims=("M", "N", "K"), ranks=ranks, configs=configs, logits=styles, values=STYLES, specials=SPECIALS
    )


def fixed_sizes(variant: ProjectionVariant) -> dict[str, int]:
    sizes = ((name, variant.projection.size(name)) for name in ("N", "K"))
    return {name: size for name, size in sizes if size is not None}


def fixed_cases(variant: ProjectionVariant, reach: Reach, count: int) -> Iterator[Case]:
    """Yields the first `count` of a series that visits every config, size, style and special: always the
    same.
    """
    fixed = fixed_sizes(variant)
    series = zip(
        cycle(reach.tiles), cycle(_ROWS), cycle(_COLUMNS), cycle(_DEPTHS), cycle(STYLES), strict=False
    )
    for seed, (config, M, N, K, style) in enumerate(islice(series, count)):
        special = tuple(SPECIALS)[seed // 5 % len(SPECIALS)] if seed % 5 == 4 else "none"
        dims = {"M": M, "N": N, "K": K, **fixed}
        if not reach.affordable(dims, config):
            dims |= {name: least for name, least in (("M", 1), ("N", 17)) if name not in fixed}
        layouts = _layouts(seed)
        yield Case(dims=dims, seed=seed, values=style, special=special, layouts=layouts, config=config)


def plain_cases(variant: ProjectionVariant, reach: Reach) -> Iterator[Case]:
    """Yields a case of several tiles along every axis, ordinary numbers, and tensors that lie as they are
    declared; none where no config has an affordable one, of sizes that are fixed.
    """
    for config, (block_n, block_k, rows) in reach.tiles.items():
        sizes = {"M": rows + 1, "N": block_n + 1, "K": 2 * block_k + 1, **fixed_sizes(variant)}
        if reach.affordable(sizes, config):
            yield Case(dims=sizes, config=config)
            return


def boundary_cases(
    variant: ProjectionVariant, reach: Reach, boundaries: Iterable[Boundary], configs: Sequence[Any]
) -> Iterator[Case]:
    """Yields a case for every point of the boundaries that is affordable under a config that puts it in
    force.
    """
    fixed, names = fixed_sizes(variant), {"rows": "M", "features": "N", "depth": "K"}
    seen = set()
    for boundary in boundaries:
        fitting = [n for n in reach.tiles if boundary.is_in_force({"forward": configs[n]})]
        shared = [n for n in fitting if boundary.reach == "thin" and configs[n].SPLIT_K > 1]
        for point in boundary.points:
            size = {"M": 2, "N": 17, "K": 70, names[boundary.quantity]: point, **fixed}
            config = next((n for n in shared or fitting if reach.affordable(size, n)), None)
            if config is not None and (config, *size.values()) not in seen:
                seen.add((config, *size.values()))
                yield Case(dims=size, seed=len(seen), config=config)


def facts(case: Case, configs: Sequence[Any]) -> CaseFacts:
    sizes = {"rows": case.dims["M"], "features": case.dims["N"], "depth": case.dims["K"]}
    return CaseFacts(
        sizes={name: frozenset({size}) for name, size in sizes.items()},
        configs={"forward": configs[case.config]},
    )


def _layouts(seed: int) -> dict[str, TensorLayout]:
    gapped = TensorLayout(order=(0, 1), gaps=(0, 8), offset=8)
    odd = TensorLayout(order=(0, 1), gaps=(0, 3), offset=1)
    expanded = TensorLayout(order=(0, 1), gaps=(0, 0), expanded=(0,))
    chosen: tuple[dict[str, TensorLayout], ...] = (
        {},
        {"x": gapped},
        {"w": odd, "y": gapped},
        {"x": expanded},
        {"x": odd, "w": gapped, "y": odd},
    )
    return dict(chosen[seed % len(chosen)])


@st.composite
def cases(draw: st.DrawFn, variant: ProjectionVariant, reach: Reach) -> Case:
    config = draw(st.sampled_from(tuple(reach.tiles)))
    dims = {
        "M": draw(st.one_of(st.sampled_from(_ROWS), st.integers(0, 70))),
        "N": draw(st.one_of(st.sampled_from(_COLUMNS), st.integers(1, 140))),
        "K": draw(st.one_of(st.sampled_from(_DEPTHS), st.integers(1, 1100))),
        **fixed_sizes(variant),
    }
    if not reach.affordable(dims, config):
        dims |= {name: least for name, least in (("M", 1), ("N", 17)) if name not in fixed_sizes(variant)}
    layouts = {
        name: draw(
            st.builds(
                TensorLayout,
                order=st.just((0, 1)),
                gaps=st.tuples(st.just(0), st.sampled_from((0, 1, 8, 13))),
                expanded=st.sampled_from(((), (), (0,))) if name == "x" else st.just(()),
                offset=st.sampled_from((0, 1, 8)),
            )
        )
        for name in ("x", "w", "y")
        if draw(st.booleans())
    }
    return Case(
        dims=dims,
        seed=draw(st.integers(0, 2**16)),
        values=draw(st.sampled_from(STYLES)),
        special=draw(st.sampled_from((*(["none"] * 4), *SPECIALS))),
        layouts=layouts,
        config=config,
    )


def draw(variant: ProjectionVariant, case: Case, device: str) -> dict[str, torch.Tensor]:
    """Returns x, w and bias in the case's style and the projection's type, on the device."""
    projection = variant.projection
    M, N, K = (case.dims[name] for name in "MNK")
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, w, bias = normal(M, K), normal(N, K), normal(N)
    at = torch.arange(K, device=device)
    match case.values:
        case "cancelling":  # neighbours nearly cancel: y is far smaller than its terms
            x, w = x / 16 + 8 * (1 - 2 * (at % 2)), w / 16 + 8
            x, w = x.to(torch.bfloat16).float(), w.to(torch.bfloat16).float()
        case "one_hot":  # y shows single weights
            x = (at == torch.arange(M, device=device)[:, None] * 7 % max(K, 1)).float()
        case "growing":  # the last columns outweigh the rest, so that each lost one shows
            x = x * 2.0 ** (8.0 * at / max(K, 1) - 4)
        case "ones":
            x, w = torch.ones_like(x), torch.ones_like(w) / 8
        case "small":
            x, w = x * 2.0**-7, w * 2.0**-7
        case _:
            pass
    dtype = DTYPES[projection.dtype]
    made = {"x": x.to(dtype), "w": w.to(dtype)} | ({"bias": bias.to(dtype)} if projection.has_bias else {})
    special = SPECIALS[case.special]
    if special is not None and special[0] in made and made[special[0]].numel():
        tensor = made[special[0]].view(-1)
        tensor[case.seed % tensor.numel()] = special[1]
    return made


def repro(variant: ProjectionVariant, case: Case) -> str:
    spec = shlex.quote(variant.source.path)
    return (
        f"attnc verify {spec} --attention {variant.projection.name} --variant {variant.name} "
        f"--case {shlex.quote(case.to_json())}"
    )
