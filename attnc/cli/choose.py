"""The options that say which modules of specs are meant, and those modules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnc.cli.console import Mistake, without_kernels
from attnc.cli.judge import AttentionJudge, Judge, ProjectionJudge
from attnc.diagnostics import did_you_mean

if TYPE_CHECKING:
    from attnc.plan import ir

ATTENTION = Annotated[str | None, typer.Option(help="Only this attention of the specs.")]
VARIANT = Annotated[str | None, typer.Option(help="Only this variant, e.g. bf16_d128.")]
TARGET = Annotated[str, typer.Option(help="Only this target.")]


def chosen(
    paths: Sequence[Path], attention: str | None, variant: str | None, target: str
) -> tuple[Judge, ...]:
    """The modules that the options leave, those of projections last. Raises DiagnosticError, and Mistake when
    they leave none.
    """
    from attnc.build import front, plan_program

    programs = [front(path) for path in paths]
    planned = [plan_program(program) for program in programs]
    found: list[Judge] = [
        *(
            AttentionJudge(module, _peers(module, plan.modules))
            for plan in planned
            for module in plan.modules
        ),
        *(ProjectionJudge(module) for plan in planned for module in plan.projections),
    ]
    if not found:
        raise without_kernels("these specs", sum(len(program.schedules) for program in programs))
    for what, wanted in (("target", target), ("attention", attention), ("variant", variant)):
        found = _only(found, what, wanted)
    return tuple(found)


def _peers(module: ir.Module, others: Sequence[ir.Module]) -> list[ir.Module]:
    """The modules of the same variant for other targets."""
    name = (module.variant.attention.name, module.variant.name)
    return [
        other
        for other in others
        if other.target != module.target and (other.variant.attention.name, other.variant.name) == name
    ]


def _only(found: Sequence[Judge], what: str, wanted: str | None) -> list[Judge]:
    """Those with this target, attention or variant, all where none is wanted. Raises Mistake when there is
    none.
    """
    kept = [judge for judge in found if wanted is None or getattr(judge, what) == wanted]
    if not kept:
        known = list(dict.fromkeys(str(getattr(judge, what)) for judge in found))
        hint = "".join(did_you_mean(wanted or "", known)) or f"there is {', '.join(known)}"
        raise Mistake(f"there is no {what} '{wanted}'", hint)
    return kept
