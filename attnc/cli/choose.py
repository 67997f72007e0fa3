"""The options that say which modules of specs are meant, and those modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from attnc.cli.console import Mistake, progress, without_kernels
from attnc.cli.judge import Judge
from attnc.diagnostics import did_you_mean

if TYPE_CHECKING:
    from attnc.plan import ir

Item = TypeVar("Item")
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

    programs, planned = [], []
    with progress("plan", len(paths)) as bar:
        for path in paths:
            bar.advance(path.name)
            programs.append(front(path))
            planned.append(plan_program(programs[-1]))
    found: list[Judge] = [
        *(Judge(module, _peers(module, plan.modules)) for plan in planned for module in plan.modules),
        *(Judge(module) for plan in planned for module in plan.projections),
    ]
    if not found:
        raise without_kernels("these specs", sum(len(program.schedules) for program in programs))
    found = only(found, "target", target, lambda judge: judge.target)
    found = only(found, "attention", attention, lambda judge: judge.attention)
    return tuple(only(found, "variant", variant, lambda judge: judge.variant))


def _peers(module: ir.Module, others: Sequence[ir.Module]) -> list[ir.Module]:
    """The modules of the same variant for other targets."""
    name = (module.variant.attention.name, module.variant.name)
    return [
        other
        for other in others
        if other.target != module.target and (other.variant.attention.name, other.variant.name) == name
    ]


def only(found: Sequence[Item], what: str, wanted: str | None, name_of: Callable[[Item], str]) -> list[Item]:
    """Selects what has this name, or all where none is wanted. Raises Mistake when there is none."""
    kept = [item for item in found if wanted is None or name_of(item) == wanted]
    if not kept:
        known = list(dict.fromkeys(map(name_of, found)))
        hint = "".join(did_you_mean(wanted or "", known)) or f"{what}s are {', '.join(known)}"
        raise Mistake(f"there is no {what} '{wanted}'", hint)
    return kept
