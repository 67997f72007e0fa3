"""`attnc fuzz`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnc.cli.compile import JSON, SPEC
from attnc.cli.console import Mistake, note, one_spec, progress, say
from attnc.cli.projections import chosen_projections, fuzz_one, place_of, row, title
from attnc.cli.verify import (
    ATTENTION,
    TARGET,
    VARIANT,
    as_dict,
    checked,
    chosen_modules,
    parse_case,
    show_report,
    show_result,
)

if TYPE_CHECKING:
    from attnc.plan import ir
    from attnc.verify.check import Rules

_FAILURES = Path(".attnc") / "failures"


def fuzz(
    spec: SPEC,
    attention: ATTENTION = None,
    variant: VARIANT = None,
    target: TARGET = "triton",
    seconds: Annotated[float, typer.Option(min=0, help="Time for each variant.")] = 60.0,
    examples: Annotated[int, typer.Option(min=1, help="Most cases for each variant.")] = 1000,
    seed: Annotated[int, typer.Option(help="Another seed draws other cases.")] = 0,
    targets_agree: Annotated[
        bool, typer.Option("--across", help="Hold every eighth case to the spec's other targets instead.")
    ] = False,
    repro: Annotated[Path | None, typer.Option(help="Run the case in this file again.")] = None,
    as_json: JSON = False,
) -> None:
    """Draw shapes, strides and values until a kernel leaves its error bound, and shrink what is found.

    Failing cases are kept in .attnc/failures/; each prints the command that runs it again.

    Example: attnc fuzz specs/causal_gqa.attn --seconds 30 --seed 7
    """
    from attnc.verify.check import fuzz as run
    from attnc.verify.properties import violations
    from attnc.verify.subjects import subject_of

    path = one_spec(spec)
    layers = chosen_projections((path,), attention, variant, target)
    modules = chosen_modules((path,), attention, variant, target)
    if repro is not None:
        _again(repro, modules)
        return
    reports: list[dict[str, Any]] = []
    for module in modules:
        subject = subject_of(module)
        rules = _agreement(path, module) if targets_agree else violations
        name = f"{module.variant.attention.name} {module.variant.name}"
        with progress(name, examples) as bar:
            report = run(
                subject,
                examples=examples,
                seconds=seconds,
                seed=seed,
                failures=_FAILURES,
                progress=lambda *_, bar=bar, name=name: bar.advance(name),
                rules=rules,
            )
        reports.append(as_dict(subject, report))
        if not as_json:
            show_report(subject, report)
    for layer in layers:
        device, report = fuzz_one(layer, examples, seconds, seed)
        reports.append(row(layer, device, report))
        if not as_json:
            show_result(title(layer), place_of(device), report)
    if as_json:
        say(json.dumps(reports, indent=2))
    if not all(report["ok"] for report in reports):
        raise typer.Exit(1)


def _agreement(path: Path, module: ir.Module) -> Rules:
    """The rule that the variant's modules for other targets compute the same. Mistake when there is none."""
    from attnc.build import front, plan_program
    from attnc.verify.agreement import across
    from attnc.verify.subjects import subject_of

    variant = module.variant
    peers = {
        other.target: subject_of(other)
        for other in plan_program(front(path)).modules
        if other.target != module.target
        and (other.variant.attention.name, other.variant.name) == (variant.attention.name, variant.name)
    }
    if not peers:
        raise Mistake(f"'{variant.attention.name}' has schedules for {module.target} alone", "add one more")
    return across(peers)


def _again(path: Path, modules: Any) -> None:
    from attnc.verify.subjects import subject_of

    if not path.is_file():
        raise Mistake(f"there is no file '{path}'", f"failures are kept in {_FAILURES.as_posix()}/")
    case = parse_case(path.read_text(encoding="utf-8", errors="replace"))
    failed = False
    for module in modules:
        verdict = checked(subject_of(module), case)
        failed |= not verdict.ok
        say(f"{module.variant.name}: {verdict.message}; {100 * verdict.worst:.0f} % of the bound")
    if failed:
        note("the case still fails")
        raise typer.Exit(1)
