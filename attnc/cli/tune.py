"""`attnc tune` and `attnc calibrate`: what is measured on a GPU, or read off inputs, once."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnc.cli.bench import check_target, need_gpu
from attnc.cli.compile import SPEC, SPECS
from attnc.cli.console import Mistake, find_specs, loading, note, one_spec, progress, say, split_commas
from attnc.cli.writing import holds_nothing, there_already
from attnc.files import SavedMeanwhile, create_text, write_text

if TYPE_CHECKING:
    from attnc.calibrate import Calibration
    from attnc.tune.schedules import TunedSchedules
    from attnc.tuned.tables import ChoiceTable, TableRow


def tune(
    specs: SPECS = None,
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds per config.")] = 9,
    target: Annotated[str, typer.Option(help="For which target.")] = "triton",
    kernels: Annotated[
        str, typer.Option(help="Which kernels, comma separated; all but forward belong to the backward.")
    ] = "forward,dq,dkdv,dk,dv",
    points: Annotated[
        Path | None,
        typer.Option(help="Time only the schedules of one attention, and write every time there as JSON."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over what --points names.")] = False,
    is_among_targets: Annotated[
        bool, typer.Option("--among-targets", help="Measure which target is fastest, in place of configs.")
    ] = False,
) -> None:
    """Measure which config of a schedule is fastest on this GPU, and write it to specs/tuned/.

    Commit the file: 'attnc compile' writes the choices into the modules, by device and by the number of keys.
    Importing or calling a kernel never measures anything. Needs a CUDA GPU. For projections it measures the
    implementations too, by M. With --among-targets it measures the targets of a function (`from
    generated.NAME import NAME`), by sizes, with gradients and without.

    Example: attnc tune specs/causal_gqa.attn
    """
    paths = find_specs(specs or [])
    check_target(target)
    need_gpu()
    if is_among_targets:
        tune_among_targets(paths, rounds)
        return
    if points is not None:
        tune_points(paths, rounds, points, force=force)
        return
    from attnc.tune import NothingRuns
    from attnc.tune.configs import TUNABLE

    wanted = split_commas(kernels)
    if not wanted or not set(wanted) <= set(TUNABLE):
        raise Mistake(f"there is no kernel '{kernels}'", f"kernels are {', '.join(TUNABLE)}")
    for path in paths:
        try:
            tune_layers(path, rounds)
            if has_attentions(path):
                tune_configs(path, rounds, wanted, target)
                tune_labels(path, rounds)
        except NothingRuns as failure:
            raise Mistake(str(failure), "what was measured before it is written") from failure


def tune_configs(path: Path, rounds: int, kernels: Collection[str], target: str) -> None:
    """Tunes the configs of a spec's attentions, and prints what was found."""
    from attnc.build import tuned_path
    from attnc.tune.configs import tune as measure

    with progress(path.name, None) as bar:
        winners = measure(path, rounds, bar.advance, kernels, target)
    for winner in winners:
        choice = winner.choice
        knobs = ", ".join(f"{key} = {choice.config[key]}" for key in _SHOWN if key in choice.config)
        length = "any N" if choice.kv_len is None else f"N <= {choice.kv_len}"
        say(
            f"{choice.attention} {choice.variant:14} {choice.kernel:7} {length:10} {knobs}"
            f"  {choice.microseconds:.1f} us, {winner.gain:.2f}x the default"
        )
    note(f"wrote {tuned_path(path)}; 'attnc compile {path}' embeds it")


def tune_among_targets(paths: tuple[Path, ...], rounds: int) -> None:
    """Tunes which target is taken for which sizes, and prints the tables."""
    from attnc.tune.targets import tune_targets

    for path in paths:
        if not has_attentions(path):
            continue
        with progress(path.name, None) as bar:
            tables = tune_targets(path, rounds, bar.advance)
        say_tables(path, tables, "target")


def say_tables(path: Path, tables: Sequence[ChoiceTable], key: str) -> None:
    """Prints what each row of a spec's tables picks, a target or a schedule, and where they were written."""
    from attnc.build import dispatch_path

    for table in tables:
        for row in table.rows:
            say(f"{table.name} {table.variant} {limits_of(table, row)}: {row.choice[key]}")
    if tables:
        note(f"wrote {dispatch_path(path)}; 'attnc compile {path}' embeds it")


def limits_of(table: ChoiceTable, row: TableRow) -> str:
    """Returns the largest sizes that a row admits, in words."""
    sizes = zip(table.sizes, row.limits, strict=True)
    return ", ".join("any" if limit is None else f"{size} <= {limit}" for size, limit in sizes)


def has_attentions(path: Path) -> bool:
    """Returns whether there is anything to tune besides projections."""
    from attnc.build import front

    return bool(front(path).attentions)


def tune_layers(path: Path, rounds: int) -> None:
    """Tunes the projections of a spec whose sizes are fixed, and prints what was found."""
    from attnc.build import dispatch_path
    from attnc.tune.projections import tune_projections

    with progress(path.name, None) as bar:
        tuned = tune_projections(path, rounds, bar.advance)
    for layer in tuned:
        say(f"{layer.planned.name} {layer.planned.variant.name}: {'; '.join(layer.crossovers.notes())}")
        for M, best in layer.best.items():
            times = ", ".join(f"{impl} {time:.1f} us" for impl, (_, time) in best.items())
            say(f"  M = {M:3}: {layer.crossovers.chosen[M]:12} ({times})")
    if tuned:
        note(f"wrote {dispatch_path(path)}; 'attnc compile {path}' embeds it")


def tune_points(paths: tuple[Path, ...], rounds: int, out: Path, *, force: bool) -> None:
    """Tunes the schedules of the one attention that has several, and writes all times to a file. Raises
    Mistake when it is not one, and where the file is there already.
    """
    from attnc.tune.schedules import dump_points, families

    several = [path for path in paths for _ in families(path)]
    if len(several) != 1:
        raise Mistake(
            f"--points is for one variant with several schedules for Triton, and here are {len(several)}",
            "name the spec of one",
        )
    (path,) = several
    is_new = not (force or holds_nothing(out))
    if is_new and os.path.lexists(out):
        raise there_already(out)
    (found,) = tune_labels(path, rounds)
    try:
        (create_text if is_new else write_text)(out, dump_points(found, path))
    except FileExistsError:
        raise there_already(out) from None
    note(f"wrote {out}")


def tune_labels(path: Path, rounds: int) -> tuple[TunedSchedules, ...]:
    """Tunes which of several schedules of an attention is taken for which sizes, and prints the table."""
    from attnc.tune.schedules import tune_schedules

    with progress(path.name, None) as bar:
        tuned = tune_schedules(path, rounds, bar.advance)
    say_tables(path, [found.table for found in tuned], "schedule")
    return tuned


_SHOWN = ("tile.q", "tile.kv", "warps", "stages", "maxnreg", "dp")


# --- attnc calibrate ----------------------------------------------------------------------------------------


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

    Scores are computed in float64 from the spec's score and mask. The report has percentiles of the largest
    scores of rows, the exponents that the type of the probabilities allows, and how many maxima lie outside
    the bounds: a kernel computes the splits of such rows twice.

    Example: attnc calibrate specs/unified_decode.attn --samples activations.pt --write
    """
    written = spec.read_bytes() if one_spec(spec).is_file() else None
    try:
        with loading():
            from attnc.calibrate import calibrate as measure
            from attnc.support.folders import named_path

            found = measure(spec, None if samples == "random" else named_path(samples), keys)
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
        try:
            write_text(spec, text, instead_of=written)
        except SavedMeanwhile as failure:
            raise Mistake(str(failure), "run it again") from None
        note(f"wrote {spec}; 'attnc compile {spec}' brings its modules up to date")


def report(one: Calibration) -> list[str]:
    """Returns the scores that were seen, the safe bounds, and the line to write."""
    from attnc.calibrate import PERCENTILES

    seen = ", ".join(f"{at:g} % {value:.2f}" for at, value in zip(PERCENTILES, one.percentiles, strict=True))
    return [
        f"{one.attention} for {one.target}: largest scores of {one.count} rows and shares: {seen}",
        f"  safe exponents: {one.safe[0]:.1f} to {one.safe[1]:.1f}",
        f"  outside the bounds: {100 * one.outside_before:.3g} % now, {100 * one.outside:.3g} % with",
        f"  {one.text}",
    ]
