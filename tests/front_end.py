"""The whole front end as one function, for tests of what it says."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from attnc.build import compile_program, tuned_source
from attnc.diagnostics import Diagnostic, DiagnosticError
from attnc.model.configs import configs
from attnc.model.resolve import resolve
from attnc.model.schedule import PHASES
from attnc.model.variants import variants
from attnc.plan.mask_findings import mask_notes
from attnc.syntax.parser import load, parse, prelude

# The codes that the passes below can report. A new pass is a line in `_warnings` and its range here.
CODE_RANGES = ("E01", "E02", "E03", "E04", "E05", "E06", "W02", "W07", "W08")


def diagnose(path: Path) -> tuple[Diagnostic, ...]:
    """All that is reported about a spec: by the first pass that refuses it, else every warning."""
    try:
        return tuple(_warnings(path))
    except DiagnosticError as failure:
        return failure.diagnostics


def _warnings(path: Path) -> Iterator[Diagnostic]:
    """Runs every pass up to the plan."""
    program = resolve(parse(load(path)), prelude())
    yield from program.warnings
    for attention in program.attentions:
        made = variants(program, attention)
        for schedule in program.schedules:
            if schedule.name == attention.name:
                for variant, phase in product(made, PHASES):
                    configs(schedule, phase, variant)
    compiled = compile_program(program, path.name, tuned_source(path))
    yield from (found for found in compiled.warnings if found not in program.warnings)
    notes = (
        note for a in program.attentions for variant in variants(program, a) for note in mask_notes(variant)
    )
    yield from dict.fromkeys(notes)
