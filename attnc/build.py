"""Spec files to files in generated/: the whole compiler as one function.

    path --front--> Program --plan_program--> ir.Module... --compile_program--> Output... --write--> files

The text depends on the spec, its tuned choices and the compiler alone: never on the clock, the environment or
the folder that the command was run in.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from attnc.diagnostics import LIFT, MAX_DIAGNOSTICS, Diagnostic, DiagnosticError, error, warning
from attnc.diagnostics.attempts import first_made
from attnc.effort import announce, at_most, finish, grant, limit_steps, memo, renew, share_spent, spend
from attnc.model.added import in_what_is_written, move_to_attentions
from attnc.model.attention import Attention, Variant
from attnc.model.elaborate import report_limit
from attnc.model.program import Program
from attnc.model.resolve import resolve, resolve_schedules
from attnc.model.schedule import Schedule
from attnc.model.variants import (
    MAX_VARIANTS,
    add_label,
    count_variants,
    own_kernels,
    projection_variants,
    variants,
)
from attnc.output import OutputFile
from attnc.plan import ir
from attnc.plan.decay import check_decay
from attnc.plan.differentiable import check_differentiable
from attnc.plan.kept_blocks import wants_list
from attnc.plan.lower import plan
from attnc.plan.mask_findings import DENSE, ScheduleName, check_mask, name_all
from attnc.plan.order import Ordered, check_orders
from attnc.plan.projection import ProjectionModule, plan_projection
from attnc.plan.targets import (
    INSTEAD,
    TARGETS,
    USUAL,
    complete_schedule,
    schedule_for,
    schedules_of_steps,
    steps_for,
    target_of,
)
from attnc.source import Source, Span
from attnc.syntax.parser import load, parse, prelude
from attnc.target.dispatch import render_dispatch, render_one_import, render_projection_dispatch
from attnc.target.files import render_files
from attnc.target.projection import render_projection
from attnc.target.support import support_files
from attnc.tuned.choices import TunedChoice, load_tuned, tuned_choices
from attnc.tuned.tables import ChoiceTable, load_tables, projection_rows, schedule_rows, target_rows

#: Where a limit on the work for a file was reached.
_TOO_MUCH_WORK = "E0510"
#: What choosing a schedule may cost beside planning it, for each variant.
_PIECES_TO_CHOOSE = 2
#: What a module costs whatever its expressions are, and a character of its text.
_STEPS_PER_MODULE = 1500
_STEPS_PER_CHARACTER = 0.15
#: Of the steps of a file: texts cost six times as much as plans at most.
_SHARE_THAT_PRINTS = 0.1
#: Variants of a file, those of every schedule: a file of 1,000 for three targets and more.
MAX_MODULES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The modules of a program, with what was found that is not an error."""

    modules: tuple[ir.Module, ...]
    warnings: tuple[Diagnostic, ...]
    projections: tuple[ProjectionModule, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSpec:
    """The files of a spec, sorted by path, with what was found that is not an error."""

    outputs: tuple[OutputFile, ...]
    warnings: tuple[Diagnostic, ...]


def front(path: Path) -> Program:
    """Reads and resolves a spec. Raises OSError, and DiagnosticError for anything wrong with it."""
    return resolve(parse(load(path)), prelude())


@limit_steps()
def plan_program(program: Program, most: int = MAX_VARIANTS) -> Planned:
    """Returns every schedule of the program at every variant, or at the first `most` of them. Raises
    DiagnosticError with all reasons why one cannot be. What is found of a schedule that attnc has added is
    said at its attention.
    """
    with in_what_is_written(program, program.written):
        planned = _plan_program(program, most)
    return replace(planned, warnings=move_to_attentions(planned.warnings, program, program.written))


def _plan_program(program: Program, most: int) -> Planned:
    found = _Findings(list(program.warnings))
    if not program.attentions and not program.projections:
        found.warnings.append(_declares_nothing(program.source))
    _announce_variants(program, most)
    modules = [
        module for schedule in program.schedules for module in _plan_schedule(program, schedule, most, found)
    ]
    found.problems += check_orders(found.ordered)
    _check_unscheduled(program, most, found)
    projections = _plan_projections(program, found)
    warnings = dict.fromkeys(map(found.name_schedules, found.warnings))
    if found.problems:
        raise DiagnosticError(dict.fromkeys([*found.problems, *warnings]))
    return Planned(
        modules=tuple(modules),
        warnings=tuple(warnings),
        projections=tuple(projections),
    )


@dataclass(slots=True)
class _Findings:
    warnings: list[Diagnostic] = field(default_factory=list)
    problems: list[Diagnostic] = field(default_factory=list)
    ordered: list[Ordered] = field(default_factory=list)
    #: The schedules for which a condition of data excludes no tile, and those that find the blocks of a mask.
    dense: dict[Diagnostic, tuple[list[ScheduleName], list[ScheduleName]]] = field(default_factory=dict)

    def check_attention(
        self, variant: Variant, schedule: Schedule | None = None, *, finds_blocks: bool
    ) -> None:
        """Keeps what there is to say of a mask. finds_blocks: whether blocks that no range of keys excludes
        are found on the device.
        """
        for finding in (*check_mask(variant), *check_decay(variant)):
            if finding.code == DENSE:
                name = ("", "") if schedule is None else (schedule.target, schedule.label)
                self.dense.setdefault(finding, ([], []))[finds_blocks].append(name)
            if finding.code != DENSE or not finds_blocks:
                self.warnings.append(finding)

    def name_schedules(self, finding: Diagnostic) -> Diagnostic:
        """Returns a warning; with the schedules that it holds for, where it does not hold for all."""
        these, others = map(name_all, self.dense.get(finding, ([], [])))
        note = f"so for {these} alone: kernels for {others} find the blocks to visit"
        return replace(finding, notes=(*finding.notes, note)) if others else finding

    def failure(self) -> DiagnosticError:
        """Makes an error of all, errors first."""
        every = dict.fromkeys([*self.problems, *self.warnings])
        return DiagnosticError(sorted(every, key=lambda one: one.severity != "error"))

    @contextmanager
    def keep_problems(self) -> Iterator[None]:
        """Keeps the errors of the block, and goes on. Raises DiagnosticError with too many to read."""
        try:
            yield
        except DiagnosticError as failure:
            self.problems += failure.diagnostics
            if len(self.problems) >= MAX_DIAGNOSTICS:
                raise DiagnosticError(dict.fromkeys([*self.problems, *self.warnings])) from None


def _plan_schedule(program: Program, schedule: Schedule, most: int, found: _Findings) -> list[ir.Module]:
    modules: list[ir.Module] = []
    if schedule.target not in TARGETS and schedule.span is not None:
        found.warnings.append(_not_compiled(schedule, schedule.span))
        return modules
    place = schedule.span or program.source.span(0, 0)
    planned = _planned_modules(
        program.source.text[: place.end], schedule.name, schedule.target, schedule.label
    )
    for plain in variants(program, program.attention(schedule.name), most):
        variant = add_label(plain, schedule.label)
        with report_limit(f"variant '{variant.name}' of this schedule", place), found.keep_problems():
            spend(_STEPS_PER_MODULE)
            chosen = complete_schedule(variant, schedule)
            finds_blocks = False
            try:
                if variant.name not in planned:
                    planned[variant.name] = plan(variant, chosen)
                modules.append(planned[variant.name])
                finds_blocks = modules[-1].finds_blocks
            finally:
                found.warnings += check_differentiable(variant, chosen)
                found.check_attention(variant, chosen, finds_blocks=finds_blocks)
                found.warnings += target_of(chosen.target).check_speed(variant, chosen)
            if variant.attention.segment is not None:
                found.ordered.append(Ordered(modules[-1], chosen))
        finish(f"{schedule.name} {variant.name}")
    return modules


@memo
def _planned_modules(text: str, name: str, target: str, label: str) -> dict[str, ir.Module]:
    """Returns where the plans of a schedule are kept, by variant, while one file is handled: what is tried
    before it is added to the file is not planned again. text: of the file up to the schedule's end.
    """
    return {}


def _check_unscheduled(program: Program, most: int, found: _Findings) -> None:
    for attention in _list_unscheduled(program):
        for variant in variants(program, attention, most):
            with report_limit(f"'{attention.name}'", attention.span or program.source.span(0, 0)):
                found.check_attention(variant, finds_blocks=wants_list(variant.attention))
            finish(f"{attention.name} {variant.name}")


def _list_unscheduled(program: Program) -> list[Attention]:
    scheduled = {schedule.name for schedule in program.schedules if schedule.target in TARGETS}
    return [attention for attention in program.attentions if attention.name not in scheduled]


def _plan_projections(program: Program, found: _Findings) -> list[ProjectionModule]:
    projections: list[ProjectionModule] = []
    for schedule in program.projection_schedules:
        place = schedule.span or program.source.span(0, 0)
        for layer in projection_variants(program, program.projection(schedule.name)):
            with report_limit(f"variant '{layer.name}' of this schedule", place), found.keep_problems():
                projections.append(plan_projection(layer, schedule))
            finish(f"{schedule.name} {layer.name}")
    return projections


def _announce_variants(program: Program, most: int) -> None:
    attentions = [program.attention(one.name) for one in program.schedules if one.target in TARGETS]
    layers = [program.projection(one.name) for one in program.projection_schedules]
    count = sum(min(count_variants(one), most) for one in (*attentions, *_list_unscheduled(program)))
    count += sum(map(count_variants, layers))
    if count > at_most(MAX_MODULES):
        raise DiagnosticError([_refuse_variants(program.source, count)])
    announce(count)


@limit_steps()
def compile_program(
    program: Program,
    name: str,
    tuned: Source | None = None,
    dispatch: Source | None = None,
    sha256: str | None = None,
) -> CompiledSpec:
    """Returns the text of every module, for every schedule the `__init__.py` that picks among them, and for
    every attention the one that picks the target.

    name: what the text calls the spec; tuned: its file of tuned choices; dispatch: its tables of dispatch;
    sha256: the digest of its file, if schedules were added to that. Raises DiagnosticError.
    """
    planned = plan_program(program)
    renew()
    announce(len(planned.modules) + len(planned.projections))
    choices = () if tuned is None else load_tuned(tuned)
    tables = () if dispatch is None else load_tables(dispatch)
    sha256 = sha256 or digest(program.source)
    families: dict[str, list[ir.Module]] = {}

    def render(module: ir.Module) -> dict[str, str]:
        attention, folder = module.variant.attention, folder_of(module)
        with report_limit(f"the text of '{attention.name}'", attention.span or program.source.span(0, 0)):
            files = render_files(module, path=name, sha256=sha256, tuned=tuned_choices(module, choices))
            spend(sum(map(len, files.values())) * _STEPS_PER_CHARACTER)
        finish(f"{folder} {module.variant.name}")
        return {f"{folder}/{file}": text for file, text in files.items()}

    for module in planned.modules:
        families.setdefault(folder_of(module), []).append(module)
    texts = _render_modules(planned.modules, render)
    outputs = [OutputFile(path=path, text=text) for path, text in texts.items()]
    for folder, family in families.items():
        attention = program.attention(family[0].variant.attention.name)
        text = render_dispatch(attention, family, name, schedule_rows(family, tables))
        outputs.append(OutputFile(path=f"{folder}/__init__.py", text=text))
    for name_of, modules in _by_attention(planned.modules).items():
        text = render_one_import(program.attention(name_of), modules, name, target_rows(modules, tables))
        outputs.append(OutputFile(path=f"{name_of}/__init__.py", text=text))
    outputs += _projection_outputs(program, planned.projections, name, tables, sha256)
    ordered = tuple(sorted(outputs, key=lambda output: output.path))
    return CompiledSpec(outputs=ordered, warnings=planned.warnings)


def _render_modules(
    modules: Iterable[ir.Module], render: Callable[[ir.Module], dict[str, str]]
) -> dict[str, str]:
    """Returns the files of modules by path. Variants that differ in the element type alone share kernels, but
    those whose schedules make these differ, which have kernels of their own.
    """
    rendered = [(module, render(module)) for module in modules]
    first: dict[str, str] = {}
    texts = (item for _, files in rendered for item in files.items())
    different = {path for path, text in texts if first.setdefault(path, text) != text}
    made: dict[str, str] = {}
    for module, files in rendered:
        if not different.isdisjoint(files):
            files = render(replace(module, variant=own_kernels(module.variant)))
        made |= files
    return made


def _by_attention(modules: Iterable[ir.Module]) -> dict[str, list[ir.Module]]:
    found: dict[str, list[ir.Module]] = {}
    for module in modules:
        found.setdefault(module.variant.attention.name, []).append(module)
    return found


def support_outputs() -> tuple[OutputFile, ...]:
    """Returns the package beside all modules, which they import."""
    return tuple(OutputFile(path=path, text=text) for path, text in support_files().items())


def _projection_outputs(
    program: Program,
    modules: Iterable[ProjectionModule],
    name: str,
    tables: tuple[ChoiceTable, ...],
    sha256: str,
) -> list[OutputFile]:
    families: dict[str, list[ProjectionModule]] = {}
    outputs: list[OutputFile] = []
    for module in modules:
        families.setdefault(folder_of(module), []).append(module)
        rows = projection_rows(module, tables)
        projection = module.variant.projection
        with report_limit(f"the text of '{module.name}'", projection.span or program.source.span(0, 0)):
            texts = render_projection(module, path=name, sha256=sha256, tuned=rows)
            spend(sum(map(len, texts.values())) * _STEPS_PER_CHARACTER)
        finish(f"{module.name} {module.variant.name}")
        outputs += (OutputFile(path=f"{folder_of(module)}/{file}", text=text) for file, text in texts.items())
    for folder, family in families.items():
        projection = program.projection(family[0].name)
        text = render_projection_dispatch(projection, family, name)
        outputs.append(OutputFile(path=f"{folder}/__init__.py", text=text))
    return outputs


@limit_steps()
def compile_spec(path: Path, root: Path | None = None) -> CompiledSpec:
    """Reads, compiles and renders a spec file. An attention without a schedule has those of `schedule_all`.
    Raises OSError and DiagnosticError.

    The text names the spec by its path below `root` (the folder that holds the output folder), or by its bare
    name elsewhere.
    """
    read = front(path)
    program, _ = schedule_all(read)
    name = display_name(path, root)
    return compile_program(program, name, tuned_source(path), dispatch_source(path), digest(read.source))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSpec:
    """Everything to say about a spec, errors and warnings. packages: the paths of the `__init__.py` that it
    makes, by which it clashes with another spec; none where it is wrong.
    """

    diagnostics: tuple[Diagnostic, ...]
    packages: tuple[str, ...] = ()


@limit_steps()
def check_spec(path: Path) -> CheckedSpec:
    """Does what `compile_spec` does, but for the text, unless that may be too much work. Raises OSError."""
    try:
        program, _ = schedule_all(front(path))
        planned = plan_program(program)
        if share_spent() > _SHARE_THAT_PRINTS:
            compile_program(program, path.name)
        tuned_of(path)
        if dispatch := dispatch_source(path):
            load_tables(dispatch)
    except DiagnosticError as failure:
        return CheckedSpec(diagnostics=failure.diagnostics)
    folders = [*_by_attention(planned.modules), *map(folder_of, planned.projections)]
    packages = tuple(f"{folder}/__init__.py" for folder in dict.fromkeys(folders))
    return CheckedSpec(diagnostics=planned.warnings, packages=packages)


def diagnose(path: Path) -> tuple[Diagnostic, ...]:
    """Returns everything to say about a spec, errors and warnings. Raises OSError."""
    return check_spec(path).diagnostics


def digest(source: Source) -> str:
    """Returns SHA-256 of a spec's text, line endings normalised."""
    return hashlib.sha256(source.text.replace("\r\n", "\n").encode()).hexdigest()


def display_name(path: Path, root: Path | None) -> str:
    """Returns the name of a spec in generated text: never an absolute path."""
    resolved = path.resolve()
    if root is not None and resolved.is_relative_to(root.resolve()):
        return resolved.relative_to(root.resolve()).as_posix()
    return path.name


def folder_of(module: ir.Module | ProjectionModule) -> str:
    """Names the folder of a module below the output folder: `causal_gqa/triton`."""
    name = module.variant.attention.name if isinstance(module, ir.Module) else module.name
    return f"{name}/{target_of(module.target).folder}"


def tuned_path(path: Path) -> Path:
    """Names the file in which the tuned choices of a spec file are kept."""
    return path.parent / "tuned" / f"{path.stem}.json"


def dispatch_path(path: Path) -> Path:
    """Names the file in which the tables of dispatch of a spec file are kept."""
    return path.parent / "tuned" / f"{path.stem}.dispatch.json"


def tuned_source(path: Path) -> Source | None:
    """Returns the text of the tuned choices of a spec file, if there is one. Raises OSError."""
    return _text_of(tuned_path(path))


def tuned_of(path: Path) -> tuple[TunedChoice, ...]:
    """Reads the tuned choices of a spec file, none without measurements. Raises OSError, and
    DiagnosticError (E0603) for a malformed file.
    """
    source = tuned_source(path)
    return () if source is None else load_tuned(source)


def dispatch_source(path: Path) -> Source | None:
    """Returns the text of the tables of dispatch of a spec file, if there is one. Raises OSError."""
    return _text_of(dispatch_path(path))


def _text_of(path: Path) -> Source | None:
    if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file() raises where the name is too long
        return None
    return Source(str(path), path.read_text(encoding="utf-8", errors="replace"))


# --- attentions that have no schedule: what the plan would choose, as text at the end of the spec ----------


def schedules_for(
    program: Program,
    name: str,
    target: str,
    *,
    deterministic: bool = True,
    steps: bool = True,
    splits: int | None = None,
    many: bool = False,
) -> list[str]:
    """Returns the schedules to try for an attention that has none: the first that compiles is taken. Steps,
    and splits of few queries or many, have kernels that do less than others. ValueError for a projection.
    """
    if name not in [attention.name for attention in program.attentions]:
        raise ValueError(f"source: the projection '{name}' has no schedule for {target}; write one")
    if splits is not None:
        return list(schedules_of_steps(program, name, target, splits=splits, many=many))
    of_steps = steps_for(program, name, target) if steps else ()
    return [*of_steps, schedule_for(program, name, target, deterministic=deterministic)]


def add_schedules(program: Program, text: str) -> Program:
    """Returns the program with schedules of its attentions at the end of its text, of which the rest is not
    read again. Raises DiagnosticError.
    """
    if not text:
        return program
    own = program.source.text.rstrip()
    written = len(own) if program.written is None else program.written
    source = Source(program.source.path, f"{own}\n\n{text}")
    with in_what_is_written(program, written):
        added = resolve_schedules(program, parse(source, len(own) + 2))
    return replace(program, source=source, schedules=(*program.schedules, *added), written=written)


def keep(program: Program, name: str, target: str) -> Program:
    """Returns the program with one attention (or projection) and its schedules for one target alone."""
    return replace(
        program,
        attentions=tuple(one for one in program.attentions if one.name == name),
        projections=tuple(one for one in program.projections if one.name == name),
        schedules=tuple(s for s in program.schedules if (s.name, s.target) == (name, target)),
        projection_schedules=tuple(
            s for s in program.projection_schedules if (s.name, s.target) == (name, target)
        ),
    )


@limit_steps()
def schedule_all(
    program: Program,
    targets: Iterable[str] = USUAL,
    attention: str | None = None,
    most: int = MAX_VARIANTS,
    *,
    only_first: bool = False,
) -> tuple[Program, str]:
    """Returns the program whose attentions all have schedules, and the text that was added. One without any
    gets those that `attnc.compile` takes, for each of the targets that has kernels for it, or the first that
    has. attention: that is asked for alone; most: variants of an attention that are tried. Raises
    DiagnosticError where none has: what the first of them says, of each such attention, and all that is wrong
    with the others.
    """
    wanted = [target for target in targets if target in TARGETS]
    scheduled = {schedule.name for schedule in program.schedules}
    declared = [one.name for one in program.attentions]
    asked = [attention] if attention in declared else declared
    names = [name for name in asked if name not in scheduled]
    texts: list[str] = []
    found = _Findings()
    failed: list[str] = []
    for name in names if wanted else ():
        failed.append(name)
        with found.keep_problems():
            program, chosen = _with_chosen(program, name, wanted, most, only_first=only_first)
            texts += chosen
            failed.pop()
        if any(one.code == _TOO_MUCH_WORK for one in found.problems):
            raise found.failure()  # what is left for the others says nothing of them
    renew()
    if failed:
        rest = _leave_out(program, failed)
        with found.keep_problems():
            if rest.attentions or rest.projections:
                found.warnings += plan_program(rest, most).warnings
        raise found.failure()
    return program, "\n".join(texts)


def _leave_out(program: Program, names: Sequence[str]) -> Program:
    """Returns the program without these attentions and their schedules."""
    left = tuple(one for one in program.attentions if one.name not in names)
    known = {one.name for one in left}
    schedules = tuple(one for one in program.schedules if one.name in known)
    return replace(program, attentions=left, schedules=schedules)


def _with_chosen(
    program: Program, name: str, targets: Sequence[str], most: int, *, only_first: bool
) -> tuple[Program, list[str]]:
    """Returns the program with schedules of an attention that had none, and their texts."""
    place = program.attention(name).span or program.source.span(0, 0)
    texts: list[str] = []
    failure = None
    count = min(count_variants(program.attention(name)), most)
    for target in targets:
        if only_first and texts:
            break

        def plan_text(text: str, before: Program = program, target: str = target) -> tuple[Program, str]:
            whole = add_schedules(before, text)
            plan_program(keep(whole, name, target), most)
            return whole, text

        try:
            with report_limit(f"a schedule of '{name}' for {target}", place):
                grant(_PIECES_TO_CHOOSE * count)
                program, text = first_made(schedules_for(program, name, target), plan_text)[0]
                texts.append(text)
        except DiagnosticError as found:
            if any(one.code == _TOO_MUCH_WORK for one in found.diagnostics):
                raise  # there may be kernels for this target, too
            failure = failure or found
    if failure and not texts:
        raise failure
    return program, texts


def _declares_nothing(source: Source) -> Diagnostic:
    return warning(
        "W0804",
        "the file declares no attention and no projection",
        source.span(0, 0),
        "nothing to check or to compile",
        hints=("begin with 'attention NAME {', and add 'schedule NAME for triton { ... }'",),
    )


def _refuse_variants(source: Source, count: int) -> Diagnostic:
    return error(
        "E0508",
        f"the file has {count} variants of schedules; the limit is {MAX_MODULES}",
        source.span(0, 0),
        "each is a kernel of its own",
        hints=("divide the file", LIFT),
    )


def _not_compiled(schedule: Schedule, span: Span) -> Diagnostic:
    message = f"the target '{schedule.target}' is not compiled yet"
    return warning("W0803", message, span, "checked, but makes no file", hints=(INSTEAD,))
