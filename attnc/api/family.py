"""The callable that `attnc.compile` returns, and what it knows of itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attnc.runtime.packages import Package
from attnc.source import Source

if TYPE_CHECKING:
    from attnc.build import Planned
    from attnc.model.program import Program
    from attnc.plan import ir
    from attnc.plan.projection import ProjectionModule
    from attnc.verify.search import Report


class Shown(str):
    """A string whose representation is itself: in a notebook the last expression of a cell is readable.

    language: what a notebook colours it as, "" for nothing.
    """

    language: str

    def __new__(cls, text: str, language: str = "") -> Shown:
        made = super().__new__(cls, text)
        made.language = language
        return made

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        return f"```{self.language}\n{self}\n```"


def format_as_text(text: str) -> str:
    """Returns HTML that shows the text with its spaces and line breaks."""
    return f'<pre style="line-height: 1.3">{escape(text)}</pre>'


def fold(title: str, text: str) -> str:
    """Returns HTML that shows the text when its title is clicked."""
    return f"<details><summary>{escape(title)}</summary>{format_as_text(text)}</details>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What `Family.verify` found: a report for each variant. True where all are right.

    place: what the kernels ran on.
    """

    name: str
    place: str
    reports: Mapping[str, Report]

    @property
    def ok(self) -> bool:
        return all(report.ok for report in self.reports.values())

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        lines = []
        for variant, report in self.reports.items():
            state, where = "ok   " if report.ok else "WRONG", f" at {report.where}" if report.where else ""
            cases = f"{report.examples} case" if report.examples == 1 else f"{report.examples} cases"
            lines.append(
                f"{state} {self.name} {variant}: {cases} in {report.seconds:.1f} s on"
                f" {self.place}; worst error {100 * report.worst:.0f} % of the bound{where}"
            )
            lines += (f"      {failure.verdict.message}" for failure in report.failures)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return format_as_text(repr(self))


class Family:
    """The kernels of an attention (or projection) for one target: a module for each variant, and the function
    that picks among them.

    Calling a family calls that function. `function` is the function itself, which saves one Python call;
    `__signature__` and `__doc__` describe its arguments.

    name: of the attention; target: "triton", "cuda.sm_80" or "cuda.sm_90a"
    spec: the text that the kernels were made from, with the schedule that was used
    warnings: what `attnc check` prints of the spec, "" for nothing
    dense: what it says of a condition that is read from a tensor, so that no tile is skipped; "" for nothing
    files: the texts of the package, by file name; folder: where these files are, to read or to copy
    ahead: the kernels of another target that compute what calls return, None where these do
    """

    def __init__(self, module: ModuleType, package: Package) -> None:
        facts = package.facts
        self.name: str = facts["name"]
        self.target: str = facts["target"]
        self.spec = Shown(facts["spec"])
        self.warnings = Shown(facts["warnings"])
        self.dense: str = facts["dense"]
        self.module = module
        self.files = package.files
        self.folder = Path(module.__file__ or "").parent
        self.function: Callable[..., Any] = getattr(module, self.name)
        self.ahead: Family | None = None
        self._path: str = facts["path"]
        self.__name__ = self.__qualname__ = self.name
        self.__doc__ = self.function.__doc__
        self.__signature__ = _readable(inspect.signature(self.function), module.__name__)
        self.__wrapped__ = self.function

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the modules, the default first: `bf16_d128` is `.files["bf16_d128.py"]`."""
        return tuple(self._modules)

    @property
    def source(self) -> Shown:
        return self.source_of(self.variants[0])

    def source_of(self, variant: str) -> Shown:
        """Returns the kernel of a variant. Raises ValueError where there is none of this name."""
        self._module(variant)
        from attnc.target.support import kernel_files

        module = self.files[f"{variant}.py"]
        kernels = kernel_files(module, self.files)
        return Shown(self.files[kernels[0]], "cuda") if kernels else Shown(module, "python")

    def explain(self, variant: str | None = None, *, config: int = 0, arch: str | None = None) -> Shown:
        """Returns the page that `attnc explain` prints of a kernel: tiles, loops, shared memory, roofline.

        variant: None for the default one. config: its position in the schedule. arch: the GPU, such as
        "sm_80"; by default the one of this machine, or sm_90 without one.

        Raises ValueError for a variant, config or GPU that does not exist, and for projections.
        """
        from attnc.explain.backward import backward_text, explain_backward
        from attnc.explain.forward import as_text, explain
        from attnc.plan import ir
        from attnc.plan.device import DEVICES

        module = self._module(variant)
        if not isinstance(module, ir.Module):
            raise ValueError("only attentions are explained; read the top of the projection's module")
        arch = _arch() if arch is None else arch
        if arch not in DEVICES:
            raise ValueError(f"arch: expected one of {', '.join(DEVICES)}, got {arch!r}")
        if not 0 <= config < (count := len(module.kernel.configs)):
            raise ValueError(f"config: expected 0 to {count - 1}, got {config}")
        wanted = (self.name, module.target, module.label)
        schedule = next(s for s in self._program.schedules if (s.name, s.target, s.label) == wanted)
        explanation = explain(module, schedule, DEVICES[arch], config)
        backward = explain_backward(module, DEVICES[arch], {})
        return Shown(f"{as_text(explanation)}\n{backward_text(backward)}".rstrip())

    def verify(self, variant: str | None = None, *, count: int = 24, seconds: float = 60.0) -> Verification:
        """Compares the kernels with the float64 reference under the proven bound, as `attnc verify` does.

        variant: the only one to check; None: all. count: cases for each variant. seconds: time for each.
        The kernels run on the GPU if there is one, otherwise in an interpreter.

        Raises ValueError for a variant that does not exist, or if no cases are asked for. Raises RuntimeError
        without a GPU if Triton was imported as a compiler before, since it then cannot interpret.
        """
        if count < 1 or not seconds >= 0:
            which = f"count: expected at least 1, got {count}" if count < 1 else None
            raise ValueError(which or f"seconds: expected at least 0, got {seconds}")
        names = self.variants if variant is None else (variant,)
        found = {name: _verify_module(self._module(name), count, seconds) for name in names}
        place = next(place for place, _ in found.values())
        return Verification(
            name=self.name, place=place, reports={name: report for name, (_, report) in found.items()}
        )

    def take_forward(self, other: Family, above: int) -> None:
        """Lets kernels of another target, made from the same spec, compute what calls return, with gradients
        and without; gradients are those of these kernels, of what the others leave. Where the other has
        several schedules, it is that for sizes without a limit. above: queries up to which a call is not
        theirs.
        """
        self.ahead = other
        guess = getattr(other.module, "GUESS", None)
        for name in self.files:
            stem, _, suffix = name.partition(".")
            if suffix != "py" or stem == "__init__":
                continue
            label = guess[-1][1] if guess else ""
            found = [x for x in (stem, label, f"{stem}_{label}") if hasattr(other.module, x)]
            own, theirs = getattr(self.module, stem).CALL, getattr(other.module, found[-1]).CALL
            if (own.inputs, own.outputs, own.extras) == (theirs.inputs, theirs.outputs, theirs.extras):
                own.forward, own.forward_above = theirs, above

    def register_operators(self) -> None:
        """Registers the operators of the kernels with torch, under `torch.ops.attnc`.

        Tracing a call does this by itself. A program that loads an exported program (torch.export) has to
        call it first, because operators are defined in Python, under names with a hash of the kernels.

        Raises ValueError for projections, which have no operators.
        """
        modules = [getattr(self.module, variant) for variant in self.variants]
        if not all(hasattr(module, "CALL") for module in modules):
            raise ValueError(f"{self.name}: only attentions have operators")
        for module in modules:
            module.CALL.register_operators()

    def __repr__(self) -> str:
        shapes = inspect.cleandoc(self.__doc__ or "")
        return f"<{self.name} for {self.target}: {', '.join(self.variants)}>\n{shapes}".rstrip()

    def _repr_html_(self) -> str:
        title = f"<b>{escape(self.name)}</b> for {escape(self.target)}: {escape(', '.join(self.variants))}"
        parts = [title, format_as_text(inspect.cleandoc(self.__doc__ or ""))]
        if self.warnings:
            parts.append(format_as_text(self.warnings))
        parts += [fold("spec", self.spec), fold(f"kernel of {self.variants[0]}", self.source)]
        return "".join(parts)

    @cached_property
    def _program(self) -> Program:
        from attnc.model.resolve import resolve
        from attnc.syntax.parser import parse, prelude

        return resolve(parse(Source(self._path, str(self.spec))), prelude())

    @cached_property
    def _planned(self) -> Planned:
        from attnc.build import plan_program

        return plan_program(self._program)

    @cached_property
    def _modules(self) -> Mapping[str, ir.Module | ProjectionModule]:
        planned = self._planned
        attentions = {
            module.variant.name: module
            for module in planned.modules
            if (module.variant.attention.name, module.target) == (self.name, self.target)
        }
        projections = {
            module.variant.name: module
            for module in planned.projections
            if (module.name, module.target) == (self.name, self.target)
        }
        return {**attentions, **projections}

    def _module(self, variant: str | None) -> ir.Module | ProjectionModule:
        if variant is None:
            return next(iter(self._modules.values()))
        if variant not in self._modules:
            raise ValueError(f"variant: expected one of {', '.join(self._modules)}, got {variant!r}")
        return self._modules[variant]


def _readable(signature: inspect.Signature, package: str) -> inspect.Signature:
    own = rf"{re.escape(package)}(\.\w+)*\.(\w+)"

    def show_parameter(parameter: inspect.Parameter) -> inspect.Parameter:
        annotation = inspect.formatannotation(parameter.annotation)
        short = re.sub(rf"{own}( \| {own})*", r"\2", annotation)
        return parameter if short == annotation else parameter.replace(annotation=short)

    return signature.replace(parameters=[show_parameter(one) for one in signature.parameters.values()])


def _arch() -> str:
    """Returns the GPU here, if it is one that is known, else a Hopper."""
    import torch

    from attnc.plan.device import DEVICES

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if f"sm_{major}{minor}" in DEVICES:
            return f"sm_{major}{minor}"
    return "sm_90"


def _verify_module(module: ir.Module | ProjectionModule, count: int, seconds: float) -> tuple[str, Report]:
    from attnc.verify.search import run
    from attnc.verify.trials import trial_of

    trial = trial_of(module)
    return trial.place, run(trial, count=count, seconds=seconds)
