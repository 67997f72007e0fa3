"""`attnc verify`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from attnc.cli.compile import JSON, SPECS
from attnc.cli.console import Mistake, find_specs, paint, progress, say, without_kernels
from attnc.cli.projections import (
    chosen_projections,
    path_of_projection,
    place_of,
    row,
    run_case,
    title,
    verify_one,
)
from attnc.diagnostics import did_you_mean

if TYPE_CHECKING:
    from attnc.plan import ir
    from attnc.verify.check import Report, Subject
    from attnc.verify.record import Record, Records
    from attnc.verify.strategies import Case
    from attnc.verify.tolerance import Verdict

GENERATED = Path("generated")
ATTENTION = Annotated[str | None, typer.Option(help="Only this attention of the specs.")]
VARIANT = Annotated[str | None, typer.Option(help="Only this variant, e.g. bf16_d128.")]
TARGET = Annotated[str, typer.Option(help="Only this target.")]


def verify(
    specs: SPECS = None,
    attention: ATTENTION = None,
    variant: VARIANT = None,
    target: TARGET = "triton",
    count: Annotated[int, typer.Option(min=1, help="Random cases for each variant.")] = 24,
    seconds: Annotated[float, typer.Option(min=0, help="Time for each variant.")] = 60.0,
    case: Annotated[str | None, typer.Option(help="Run this one case, as a failure printed it.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Verify the files of generated/ and note it there; needs a GPU.")
    ] = False,
    is_sanitized: Annotated[
        bool,
        typer.Option("--sanitize", help="Run the files of generated/ under compute-sanitizer instead."),
    ] = False,
    as_json: JSON = False,
) -> None:
    """Run kernels on chosen inputs and judge every element against the float64 reference.

    The tolerance is no constant but the error bound that the plan proves. The cases are the same on every
    run: edge lengths, strides, hostile values, guarded memory. On the GPU where there is one, else
    interpreted. Every eighth case is also held to what must be true between runs: determinism, invariance,
    identities of the gradients.

    Example: attnc verify specs/causal_gqa.attn --variant bf16_d64
    """
    from attnc.verify.check import verify as run
    from attnc.verify.properties import violations

    paths = find_specs(specs or [])
    layers = chosen_projections(paths, attention, variant, target)
    modules = chosen_modules(paths, attention, variant, target)
    if is_sanitized:
        from attnc.cli.sanitize import sanitize_modules

        sanitize_modules(modules, is_recorded=record, as_json=as_json)
        return
    reports: list[dict[str, Any]] = []
    failed = False
    new: dict[str, Record] = {}
    for module in modules:
        text = committed(path_of(module)) if record else None
        subject = _subject(module, text)
        if case is not None:
            failed |= not _one_case(subject, case)
            continue
        name = _name(module)
        with progress(name, count) as bar:
            report = run(
                subject,
                count=count,
                seconds=seconds,
                progress=lambda *_, bar=bar, name=name: bar.advance(name),
                rules=violations,
            )
        failed |= not report.ok
        if text is not None and report.ok:
            new[path_of(module)] = _record(text, module.target, report)
        reports.append(as_dict(subject, report))
        if not as_json:
            show_report(subject, report)
    for layer in layers:
        if case is not None:
            failed |= not run_case(layer, case)
            continue
        text = committed(path_of_projection(layer)) if record else None
        device, report = verify_one(layer, text, count, seconds)
        failed |= not report.ok
        if text is not None and report.ok:
            new[path_of_projection(layer)] = _record(text, layer.target, report)
        reports.append(row(layer, device, report))
        if not as_json:
            show_result(title(layer), place_of(device), report)
    if record:
        path = update_records(lambda known: known.with_verified(new))
        say(f"wrote {path}: {len(new)} verified")
    if as_json:
        say(json.dumps(reports, indent=2))
    if failed:
        raise typer.Exit(1)


def chosen_modules(
    paths: tuple[Path, ...], attention: str | None, variant: str | None, target: str
) -> tuple[ir.Module, ...]:
    """The modules of attentions that the options leave. Raises DiagnosticError, and Mistake when they leave
    no module at all, be it of a projection.
    """
    from attnc.build import front, plan_program

    programs = [front(path) for path in paths]
    planned = [plan_program(program) for program in programs]
    found = [
        *((m.target, m.variant.attention.name, m.variant.name, m) for p in planned for m in p.modules),
        *((m.target, m.name, m.variant.name, None) for p in planned for m in p.projections),
    ]
    if not found:
        raise without_kernels("these specs", sum(len(program.schedules) for program in programs))
    for at, (what, wanted) in enumerate((("target", target), ("attention", attention), ("variant", variant))):
        found = _only(found, what, wanted, at)
    return tuple(module for *_, module in found if module is not None)


_Named: TypeAlias = "tuple[str, str, str, ir.Module | None]"


def _only(modules: list[_Named], what: str, wanted: str | None, at: int) -> list[_Named]:
    """Those with this name at a position, all where none is wanted. Raises Mistake when there is none."""
    found = [module for module in modules if wanted is None or module[at] == wanted]
    if not found:
        known = list(dict.fromkeys(str(module[at]) for module in modules))
        hint = "".join(did_you_mean(wanted or "", known)) or f"there is {', '.join(known)}"
        raise Mistake(f"there is no {what} '{wanted}'", hint)
    return found


def parse_case(text: str) -> Case:
    """A case from the JSON of a failure. Raises Mistake for anything else."""
    from attnc.verify.strategies import Case

    try:
        return Case.from_json(text)
    except (ValueError, TypeError, KeyError) as failure:
        raise Mistake(f"not a case: {failure}", "a failure prints the whole command") from None


def show_report(subject: Subject, report: Report) -> None:
    from attnc.verify.subjects import place

    show_result(f"{subject.variant.attention.name} {subject.variant.name}", place(subject), report)


def show_result(name: str, where_run: str, report: Report) -> None:
    """A line about a module, and two about each failure."""
    state = paint("ok   ", "32") if report.ok else paint("WRONG", "1;31")
    where = f" at {report.where}" if report.where else ""
    say(
        f"{state} {name}: {report.examples} cases in {report.seconds:.1f} s on {where_run};"
        f" worst error {100 * report.worst:.0f} % of the bound{where}"
    )
    for failure in report.failures:
        say(f"      {failure.verdict.message}")
        say(f"      {failure.repro}")


def as_dict(subject: Subject, report: Report) -> dict[str, Any]:
    return {
        "attention": subject.variant.attention.name,
        "variant": subject.variant.name,
        "device": subject.device,
        "ok": report.ok,
        "cases": report.examples,
        "seconds": round(report.seconds, 3),
        "worst": report.worst,
        "where": report.where,
        "eager_ratio": report.eager_ratio,
        "failures": [{"message": f.verdict.message, "repro": f.repro} for f in report.failures],
    }


def _one_case(subject: Subject, text: str) -> bool:
    verdict = checked(subject, parse_case(text))
    say(f"{verdict.message}; worst error {100 * verdict.worst:.0f} % of the bound at {verdict.where or '-'}")
    return verdict.ok


def checked(subject: Subject, case: Case) -> Verdict:
    """The verdict on a case, all rules included."""
    from attnc.verify.check import check, keeps
    from attnc.verify.properties import violations

    verdict = check(subject, case)
    return keeps(subject, case, violations, verdict) if verdict.ok else verdict


def _subject(module: ir.Module, text: str | None = None) -> Subject:
    from attnc.verify.subjects import subject_of

    return subject_of(module, text)


def path_of(module: ir.Module) -> str:
    """The module's file below generated/."""
    from attnc.build import folder_of

    return f"{folder_of(module)}/{module.variant.name}.py"


def committed(name: str) -> str:
    """The text of a file below generated/. Raises Mistake where a record would say nothing."""
    from attnc.verify.subjects import has_gpu

    if not has_gpu():
        raise Mistake("a record needs a GPU", "run 'attnc verify' without --record to use the interpreter")
    path = GENERATED / name
    if not path.is_file():
        raise Mistake(f"there is no {path}", "run 'attnc compile' first, in the folder that holds generated/")
    return path.read_text(encoding="utf-8")


def _record(text: str, target: str, report: Report) -> Record:
    from attnc.runtime.trial import device_name, toolchain
    from attnc.verify.record import Record, hash_of

    return Record(
        sha256=hash_of(text),
        device=device_name(),
        toolchain=toolchain(target),
        cases=report.examples,
        worst=round(report.worst, 4),
        where=report.where,
    )


def update_records(change: Callable[[Records], Records]) -> Path:
    """Rewrites the file of records, without what it says of modules that are gone; returns its path."""
    from attnc.build import write_text
    from attnc.verify.record import NAME, dump, read

    try:
        known = read(GENERATED)
    except ValueError as error:
        raise Mistake(str(error), "restore it from version control") from None
    there = (path.relative_to(GENERATED).as_posix() for path in GENERATED.glob("*/*/*.py"))
    write_text(GENERATED / NAME, dump(change(known).only(there)))
    return GENERATED / NAME


def _name(module: ir.Module) -> str:
    return f"{module.variant.attention.name} {module.variant.name}"
