"""`attnc calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnc.cli.compile import SPEC
from attnc.cli.console import Mistake, loading, note, one_spec, say
from attnc.output import write_text

if TYPE_CHECKING:
    from attnc.calibrate import Calibration


def calibrate(
    spec: SPEC,
    samples: Annotated[
        str, typer.Option(help="A file of inputs by name that torch.save wrote, or 'random' for N(0, 1).")
    ] = "random",
    keys: Annotated[int, typer.Option(min=16, help="Keys of a split: maxima are taken over so many.")] = 512,
    is_written: Annotated[
        bool, typer.Option("--write", help="Put the new phi and bounds into the spec.")
    ] = False,
) -> None:
    """Find phi and bounds of a unified maximum from sampled inputs.

    Scores are evaluated in float64 from the spec's own score and mask. Printed are percentiles of the largest
    scores of rows, the exponents that the type of the probabilities allows, and how many of the maxima lie
    outside the bounds: their splits of keys would be computed twice.

    Example: attnc calibrate specs/unified_decode.attn --samples activations.pt --write
    """
    one_spec(spec)
    try:
        with loading():
            from attnc.calibrate import calibrate as measure

            found = measure(spec, None if samples == "random" else Path(samples), keys)
    except ValueError as misfit:
        raise Mistake(
            f"the samples do not fit {spec}: {misfit}", "the file holds a dict of the spec's inputs by name"
        ) from None
    if not found:
        raise Mistake(
            f"no schedule of {spec} has softmax = unified_max(...)", "there is nothing to calibrate"
        )
    for one in found:
        for line in report(one):
            say(line)
    if is_written:
        text = found[0].span.source.text  # what the spans are of, ends of lines included
        for one in sorted(found, key=lambda one: one.span.start, reverse=True):
            text = text[: one.span.start] + one.text + text[one.span.end :]
        write_text(spec, text)
        note(f"wrote {spec}; 'attnc compile {spec}' brings its modules up to date")


def report(one: Calibration) -> list[str]:
    """What was seen, what is safe, what to write."""
    from attnc.calibrate import PERCENTILES

    seen = ", ".join(f"{at:g} % {value:.2f}" for at, value in zip(PERCENTILES, one.percentiles, strict=True))
    return [
        f"{one.attention} for {one.target}: largest scores of {one.count} rows and shares: {seen}",
        f"  safe exponents: {one.safe[0]:.1f} to {one.safe[1]:.1f}",
        f"  outside the bounds: {100 * one.outside_before:.3g} % now, {100 * one.outside:.3g} % with",
        f"  {one.text}",
    ]
