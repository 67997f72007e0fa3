"""Runs a generated module on cases and judges what comes out.

A case passes when the outputs are within the plan's error bound of the reference, do not depend on what
surrounds the tensors in memory, and nothing but the outputs was written.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from unittest import SkipTest

import torch
from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis import seed as seeded

from attnc.model.attention import Variant
from attnc.plan import ir
from attnc.plan.ir_backward import GradientBound
from attnc.verify.gradient_check import check_gradients
from attnc.verify.memory import guarding
from attnc.verify.problem import FILLS, Problem, Value, build
from attnc.verify.strategies import Case, Limits, cases, fixed_cases
from attnc.verify.tolerance import Verdict, expect, judge

Progress: TypeAlias = Callable[[int, Case, Verdict], None]
#: Of a case, what is wrong besides its elements; see `properties.violations`.
Rules: TypeAlias = Callable[["Subject", Case], Iterable[str]]
#: Every such case, or the next small one, is held to the rules too: they run the kernel some twenty times.
_EVERY, _SMALL = 8, 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is verified: the module of a variant, and the bound that its plan promises.

    warps_matter: configs that differ in warps or stages alone are different programs even without a GPU.
    split: programs may share the keys of a sequence, as many of them as the shapes suggest.
    atomic: inputs whose gradients are sums in whatever order programs come.
    """

    variant: Variant
    bound: ir.ErrorBound
    module: ModuleType
    target: str = "triton"
    device: str = "cpu"
    gradients: GradientBound | None = None
    warps_matter: bool = False
    split: bool = False
    atomic: frozenset[str] = frozenset()

    @property
    def configs(self) -> tuple[Any, ...]:
        """CONFIGS; where programs may share keys, each is followed by the same with shares that small cases
        have too: these would suit one program, on any device.
        """
        if not self.split:
            return tuple(self.module.CONFIGS)
        pairs = ((config, _shared(config)) for config in self.module.CONFIGS)
        return tuple(config for pair in pairs for config in pair if config is not None)

    def tiles(self) -> dict[int, tuple[int, int]]:
        """(BLOCK_M, BLOCK_N) of `configs`, by number: on a GPU of those that fit it, elsewhere of those that
        differ in more than warps and stages.
        """
        configs = self.configs
        tiles = {n: (config.BLOCK_M, config.BLOCK_N) for n, config in enumerate(configs)}
        if self.device != "cpu":
            properties: Any = torch.cuda.get_device_properties(self.device)  # annotated incompletely by torch
            room = properties.shared_memory_per_block_optin
            return {n: tile for n, tile in tiles.items() if getattr(configs[n], "shared", 0) <= room}
        if self.warps_matter:
            return tiles
        kinds = [(*tiles[n], *_shares(config)) for n, config in enumerate(configs)]
        return {n: tile for n, tile in tiles.items() if kinds[n] not in kinds[:n]}

    def limits(self) -> Limits:
        """What a case may cost here: the interpreter takes milliseconds for a tile, a GPU microseconds."""
        if self.device == "cpu":
            joined = (n for n, config in enumerate(self.configs) if any(_shares(config)))
            return Limits(tiles=self.tiles(), joined=frozenset(joined))
        return Limits(tiles=self.tiles(), longest=2100, work=20_000)

    def run(self, inputs: Mapping[str, Value], outputs: Mapping[str, torch.Tensor], config: int = 0) -> None:
        """Calls the generated function; inputs and outputs in the order of the declaration."""
        function = getattr(self.module, self.variant.attention.name)
        out = tuple(outputs.values())
        tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
        with guarding(*tensors):
            function(*inputs.values(), out=out[0] if len(out) == 1 else out, config=self.configs[config])
        if self.device != "cpu":
            torch.cuda.synchronize()


def _shares(config: Any) -> tuple[int, int]:
    """How many shares a sequence has, and how many keys a share; 0 where that is not fixed."""
    return getattr(config, "splits", 0), getattr(config, "share", 0)


def _shared(config: Any) -> Any:
    """The config with three shares in place of as many as suit, or with shares of one tile; None if their
    number is fixed.
    """
    match _shares(config):
        case 0, 0:
            return config._replace(splits=3)
        case 0, _:
            return config._replace(share=config.BLOCK_N)
        case _:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A case that fails, the smallest found, and the command that runs it again."""

    case: Case
    verdict: Verdict
    repro: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a module did. `worst`, `eager_ratio`, `norm_ratio`: the largest seen; `examples`: how many cases
    were run; `open`: elements of which nothing is promised.
    """

    examples: int
    seconds: float
    worst: float = 0.0
    where: str = ""
    worst_case: Case | None = None
    norm_ratio: float = 0.0
    eager_ratio: float = 0.0
    open: int = 0
    failures: tuple[Failure, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.failures


def check(subject: Subject, case: Case, *, fills: Iterable[str] = ("nan",)) -> Verdict:
    """Runs one case, with each of the fills around its tensors. Nothing that the kernel does makes this
    raise.
    """
    attention = subject.variant.attention
    first: Problem | None = None
    verdict = Verdict(ok=True, message="nothing was run")
    for fill in fills:
        problem = build(attention, case, fill=fill, device=subject.device)
        try:
            subject.run(problem.inputs, problem.outputs, case.config)
        except Exception as error:
            return _broken(f"{type(error).__name__}: {error}")
        disturbed = problem.disturbed()
        if disturbed is not None:
            return _broken(f"memory around '{disturbed}' was written to, or the input itself")
        if first is None:
            first = problem
            verdict = judge(attention, expect(attention, problem.inputs, subject.bound), problem.outputs)
            if verdict.ok and subject.gradients is not None:
                try:
                    verdict = _worse(verdict, _gradients(subject, subject.gradients, problem, case))
                except Exception as error:
                    return _broken(f"backward: {type(error).__name__}: {error}")
                if problem.disturbed() is not None:
                    return _broken("the backward wrote to an input, or around one")
            if not verdict.ok:
                return verdict
        for name, output in problem.outputs.items():
            if not same_bits(output, first.outputs[name]):
                return _broken(f"'{name}' depends on memory outside the tensors")
    return verdict


def _gradients(subject: Subject, bound: GradientBound, problem: Problem, case: Case) -> Verdict:
    attention = subject.variant.attention
    if case.special != "none":
        case = replace(case, special="none")
        problem = build(attention, case, device=subject.device)
    return check_gradients(attention, subject.module, bound, problem, case)


def _worse(outputs: Verdict, gradients: Verdict) -> Verdict:
    """Both in one: the gradients' message if they are wrong, and the larger ratio."""
    worse = gradients if gradients.worst > outputs.worst else outputs
    return replace(
        outputs,
        ok=gradients.ok,
        message=outputs.message if gradients.ok else gradients.message,
        worst=worse.worst,
        where=worse.where,
        open=outputs.open + gradients.open,
        ratios={**outputs.ratios, **gradients.ratios},
    )


def keeps(subject: Subject, case: Case, rules: Rules, verdict: Verdict) -> Verdict:
    """The verdict, unless the case breaks a rule. Nothing that the kernel does makes this raise."""
    try:
        broken = next(iter(rules(subject, case)), None)
    except Exception as error:
        broken = f"{type(error).__name__}: {error}"
    return verdict if broken is None else _broken(broken)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise equality of two tensors, NaN included."""
    left, right = (x.contiguous().flatten().view(torch.uint8) for x in (left, right))
    return torch.equal(left, right)


def _broken(message: str) -> Verdict:
    return Verdict(ok=False, message=message, worst=float("inf"))


@dataclass(slots=True)
class _Tally:
    """Collects verdicts into a report."""

    subject: Subject
    progress: Progress | None
    started: float = field(default_factory=time.monotonic)
    examples: int = 0
    held: int = 0
    worst: tuple[float, str, Case | None] = (0.0, "", None)
    norm_ratio: float = 0.0
    eager_ratio: float = 0.0
    open: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def is_due(self, case: Case) -> bool:
        """Whether this case is to be held to the rules: about every eighth, if it is small."""
        due = (self.examples + 1) // _EVERY > self.held and prod(case.dims.values()) <= _SMALL
        self.held += due
        return due

    def count(self, case: Case, verdict: Verdict) -> None:
        self.examples += 1
        self.norm_ratio = max(self.norm_ratio, verdict.norm_ratio)
        self.eager_ratio = max(self.eager_ratio, verdict.eager_ratio)
        self.open += verdict.open
        if verdict.worst > self.worst[0]:
            self.worst = (verdict.worst, verdict.where, case)
        if self.progress is not None:
            self.progress(self.examples, case, verdict)

    def fail(self, case: Case, verdict: Verdict) -> None:
        self.failures.append(
            Failure(case=case, verdict=verdict, repro=case.repro(self.subject.variant, self.subject.target))
        )

    def report(self) -> Report:
        worst, where, case = self.worst
        return Report(
            examples=self.examples,
            seconds=self.seconds,
            worst=worst,
            where=where,
            worst_case=case,
            norm_ratio=self.norm_ratio,
            eager_ratio=self.eager_ratio,
            open=self.open,
            failures=tuple(self.failures),
        )


def verify(
    subject: Subject,
    *,
    count: int = 24,
    seconds: float = float("inf"),
    fills: Iterable[str] = tuple(FILLS),
    progress: Progress | None = None,
    rules: Rules | None = None,
) -> Report:
    """The fixed cases: the same on every run. Stops after `seconds`, or at the third failure.

    rules: what every eighth case must keep besides the error bound.
    """
    tally = _Tally(subject, progress)
    for case in fixed_cases(subject.variant, subject.limits(), count):
        verdict = check(subject, case, fills=fills)
        if verdict.ok and rules is not None and tally.is_due(case):
            verdict = keeps(subject, case, rules, verdict)
        tally.count(case, verdict)
        if not verdict.ok:
            tally.fail(case, verdict)
        if tally.seconds > seconds or len(tally.failures) == 3:
            break
    return tally.report()


def searching(examples: int, *, shrink: bool) -> settings:
    """How Hypothesis draws cases until one fails: as the seed says, and nothing is kept between runs."""
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.target, *((Phase.shrink,) if shrink else ())),
        suppress_health_check=list(HealthCheck),
    )


def fuzz(
    subject: Subject,
    *,
    examples: int = 100,
    seconds: float = 60.0,
    seed: int = 0,
    shrink: bool = True,
    progress: Progress | None = None,
    failures: Path | None = None,
    rules: Rules | None = None,
) -> Report:
    """Draws cases, leaning towards those that come close to the bound, until one fails; then makes it
    smaller.

    Ends after `examples` or about `seconds`, whichever is first. `failures`: a directory for the case that
    failed, as JSON. rules: what every eighth case must keep besides the error bound.
    """
    tally = _Tally(subject, progress)
    known: dict[str, Verdict] = {}

    @seeded(seed)
    @searching(examples, shrink=shrink)
    @given(cases(subject.variant, subject.limits()))
    def passes(case: Case) -> None:
        key = case.to_json()
        if key not in known:
            if tally.seconds > seconds:
                if all(verdict.ok for verdict in known.values()):
                    raise TimeIsUp("enough")
                return
            known[key] = check(subject, case)
            if known[key].ok and rules is not None and tally.is_due(case):
                known[key] = keeps(subject, case, rules, known[key])
            tally.count(case, known[key])
        verdict = known[key]
        target(min(verdict.worst, 1e3), label="error / bound")
        if not verdict.ok:
            raise _Caught(case, verdict)

    try:
        with suppress(TimeIsUp):
            passes()
    except _Caught as caught:
        tally.fail(caught.case, caught.verdict)
        if failures is not None:
            save(failures, subject, tally.failures[0])
    return tally.report()


class TimeIsUp(SkipTest):
    """Ends a search at once: Hypothesis hands it on, and would go on drawing after a mere return."""


class _Caught(Exception):
    """A failing case on its way out of Hypothesis, which raises the smallest."""

    def __init__(self, case: Case, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.case = case
        self.verdict = verdict


def save(directory: Path, subject: Subject, failure: Failure) -> Path:
    """Writes a failing case as JSON (`Case.from_json` reads it), named after its variant and content."""
    text = failure.case.to_json()
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    variant = subject.variant
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{variant.attention.name}-{variant.name}-{digest}.json"
    path.write_text(text + "\n", encoding="utf-8")
    return path
