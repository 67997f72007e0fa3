"""`attnc verify`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from attnc.cli.choose import ATTENTION, TARGET, VARIANT, chosen
from attnc.cli.compile import JSON, SPECS
from attnc.cli.console import find_specs, say
from attnc.cli.judge import Judge, Judged, conclude, parse_case
from attnc.cli.records import GENERATED, committed, committed_hash, record_of, update_records

if TYPE_CHECKING:
    from attnc.verify.record import Records

#: Cases that a record speaks of at least, however slow they are.
_RECORDED = 12


def verify(
    specs: SPECS = None,
    attention: ATTENTION = None,
    variant: VARIANT = None,
    target: TARGET = "triton",
    count: Annotated[int, typer.Option(min=1, help="Cases of the array for each variant.")] = 24,
    seconds: Annotated[float, typer.Option(min=0, help="Time for each variant.")] = 60.0,
    case: Annotated[str | None, typer.Option(help="Run this one case, as a failure printed it.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Verify the files of generated/ and note it there; needs a GPU.")
    ] = False,
    is_sanitized: Annotated[
        bool,
        typer.Option("--sanitize", help="Run the files of generated/ under compute-sanitizer instead."),
    ] = False,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="List the boundaries of the plans that cases have met.")
    ] = False,
    is_large: Annotated[
        bool, typer.Option("--large", help="Run sizes that only a GPU reaches instead; takes minutes.")
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Run the attentions on so many processes instead (context parallelism)."),
    ] = None,
    as_json: JSON = False,
) -> None:
    """Run kernels on chosen inputs and judge every element against the float64 reference.

    The tolerance is no constant but the error bound that the plan proves. The cases are the same on every
    run: an array that meets the boundaries of the plan (tiles, splits, searches, sections: one less, as many,
    one more) and pairs of layouts, lengths, styles of inputs, configs and ways to call; --coverage lists
    which. Failures once found are replayed. What --record notes is of twelve cases at least, in ten times
    the time if need be. Memory around tensors is guarded. On the GPU where there is one,
    else interpreted. Every eighth case is also held to what must be true between runs: determinism,
    invariance, identities of the gradients, and that a call launches the same whatever was called before.
    Sizes that only a GPU reaches (thousands of rows, sequences and splits, 65536 heads) are run by --large.
    With --ranks the attentions are run by several processes, forward and gradients, under every strategy:
    with a GPU each where there are as many, else interpreted, over gloo.

    Example: attnc verify specs/causal_gqa.attn --variant bf16_d64
    """
    if ranks is not None:
        from attnc.cli.ranks import verify_ranks

        verify_ranks(find_specs(specs or []), attention, variant, target, ranks, count, as_json=as_json)
        return
    judges = chosen(find_specs(specs or []), attention, variant, target)
    if is_sanitized:
        from attnc.cli.sanitize import sanitize_modules

        attentions = [judge for judge in judges if not judge.is_projection]
        sanitize_modules(attentions, is_recorded=record, as_json=as_json)
    elif case is not None:
        _run(judges, case, large=is_large)
    else:
        texts = {judge.path: committed(judge.path) for judge in judges} if record else {}
        hashes = {path: committed_hash(path) for path in texts}
        results = []
        for judge in judges:
            text = texts.get(judge.path)
            results.append(
                judge.verify_large(text, seconds)
                if is_large
                else judge.verify(text, count, seconds, least=_RECORDED if record else 0)
            )
            if not as_json:
                results[-1].show(covered=coverage)
        if record:
            _note(results, hashes, large=is_large)
        conclude(results, as_json=as_json)


def _run(judges: Iterable[Judge], text: str, *, large: bool) -> None:
    """Runs one case on each module. Exit(1) if it fails on one."""
    case, failed = parse_case(text), False
    for judge in judges:
        verdict = judge.verdict(case, large=large)
        failed |= not verdict.ok
        share = f"{100 * verdict.worst:.0f} % of the bound at {verdict.where or '-'}"
        say(f"{verdict.message}; worst error {share}")
    if failed:
        raise typer.Exit(1)


def _note(results: Iterable[Judged], hashes: Mapping[str, str], *, large: bool) -> None:
    """Writes down the files whose cases were all right; large: of those that have a record of their text."""
    from attnc.verify.record import support_hash

    new = {
        judged.judge.path: record_of(hashes[judged.judge.path], judged.judge.target, judged.report)
        for judged in results
        if judged.report.ok
    }
    support = support_hash(GENERATED)

    def change(known: Records) -> Records:
        changed = known.with_large(new) if large else known.with_verified(new)
        return changed.with_support(support, new)

    written = update_records(change)
    say(f"wrote {written}: {len(new)} verified")
