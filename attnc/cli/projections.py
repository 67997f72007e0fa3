"""What `attnc verify` and `attnc fuzz` do with the projections of a spec."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnc.cli.console import progress, say

if TYPE_CHECKING:
    from attnc.plan.ir_projection import ProjectionModule
    from attnc.verify.check import Report


def chosen_projections(
    paths: tuple[Path, ...], name: str | None, variant: str | None, target: str
) -> tuple[ProjectionModule, ...]:
    """The projections that the options leave; none is no mistake here. Raises DiagnosticError."""
    from attnc.build import front, plan_program

    return tuple(
        module
        for path in paths
        for module in plan_program(front(path)).projections
        if name in (None, module.name) and variant in (None, module.variant.name) and target == module.target
    )


def path_of_projection(module: ProjectionModule) -> str:
    """The module's file below generated/."""
    from attnc.build import projection_folder

    return f"{projection_folder(module)}/{module.variant.name}.py"


def verify_one(module: ProjectionModule, text: str | None, count: int, seconds: float) -> tuple[str, Report]:
    """Runs the fixed cases on the module, or on this text of it; where it ran, and the report."""
    from attnc.verify.projection_check import projection_subject, verify_projection

    subject, name = projection_subject(module, text), title(module)
    with progress(name, count) as bar:
        report = verify_projection(
            subject, count=count, seconds=seconds, progress=lambda *_: bar.advance(name)
        )
    return subject.device, report


def fuzz_one(module: ProjectionModule, examples: int, seconds: float, seed: int) -> tuple[str, Report]:
    """Draws cases until one fails; where it ran, and the report."""
    from attnc.verify.projection_check import fuzz_projection, projection_subject

    subject = projection_subject(module)
    with progress(title(module), None):
        return subject.device, fuzz_projection(subject, examples=examples, seconds=seconds, seed=seed)


def run_case(module: ProjectionModule, text: str) -> bool:
    """Runs one case, given as JSON. Raises Mistake for anything else."""
    from attnc.cli.verify import parse_case
    from attnc.verify.projection_check import check_projection, projection_subject

    verdict = check_projection(projection_subject(module), parse_case(text))
    say(f"{verdict.message}; worst error {100 * verdict.worst:.0f} % of the bound at {verdict.where or '-'}")
    return verdict.ok


def place_of(device: str) -> str:
    """Where the module ran, for a reader."""
    from attnc.runtime.trial import device_name

    return "Triton's interpreter" if device == "cpu" else device_name()


def title(module: ProjectionModule) -> str:
    return f"{module.name} {module.variant.name}"


def row(module: ProjectionModule, device: str, report: Report) -> dict[str, Any]:
    """The report as data, with the fields that those of attentions have."""
    return {
        "attention": module.name,
        "variant": module.variant.name,
        "device": device,
        "ok": report.ok,
        "cases": report.examples,
        "seconds": round(report.seconds, 3),
        "worst": report.worst,
        "where": report.where,
        "eager_ratio": report.eager_ratio,
        "failures": [{"message": f.verdict.message, "repro": f.repro} for f in report.failures],
    }
