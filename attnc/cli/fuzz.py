"""`attnc fuzz`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from attnc.cli.choose import ATTENTION, TARGET, VARIANT, chosen
from attnc.cli.compile import JSON, SPEC
from attnc.cli.console import Mistake, note, one_spec, say
from attnc.cli.judge import FAILURES, Judge, conclude, parse_case


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
    judges = chosen([one_spec(spec)], attention, variant, target)
    if repro is not None:
        _run_failed_case(repro, judges)
        return
    results = []
    for judge in judges:
        results.append(judge.fuzz(examples, seconds, seed, across=targets_agree))
        if not as_json:
            results[-1].show()
    conclude(results, as_json=as_json)


def _run_failed_case(path: Path, judges: Iterable[Judge]) -> None:
    if not path.is_file():
        raise Mistake(f"there is no file '{path}'", f"failures are kept in {FAILURES.as_posix()}/")
    case = parse_case(path.read_text(encoding="utf-8", errors="replace"))
    failed = False
    for judge in judges:
        verdict = judge.verdict(case)
        failed |= not verdict.ok
        say(f"{judge.variant}: {verdict.message}; {100 * verdict.worst:.0f} % of the bound")
    if failed:
        note("the case still fails")
        raise typer.Exit(1)
