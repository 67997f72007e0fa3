"""`attnc tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnc.cli.bench import check_target, need_gpu
from attnc.cli.compile import SPECS
from attnc.cli.console import Mistake, find_specs, note, progress, say, split_commas
from attnc.output import write_text

if TYPE_CHECKING:
    from attnc.tune.schedules import TunedSchedules
    from attnc.tuned.tables import Row, Table


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
    is_among_targets: Annotated[
        bool, typer.Option("--among-targets", help="Measure which target is fastest, in place of configs.")
    ] = False,
) -> None:
    """Measure which config of a schedule is fastest on this GPU, and write it to specs/tuned/.

    'attnc compile' embeds the choices in the generated modules, by device and key length; importing or
    calling a kernel never measures anything. Commit the file. Needs a CUDA GPU. For projections it is the
    implementation too that is chosen, by M. With --among-targets it is the target that the function of an
    attention calls (`from generated.NAME import NAME`), by sizes, with gradients and without.

    Example: attnc tune specs/causal_gqa.attn
    """
    paths = find_specs(specs or [])
    check_target(target)
    need_gpu()
    if is_among_targets:
        tune_among_targets(paths, rounds)
        return
    if points is not None:
        tune_points(paths, rounds, points)
        return
    from attnc.build import tuned_path
    from attnc.tune.configs import TUNABLE
    from attnc.tune.configs import tune as measure

    wanted = split_commas(kernels)
    if not wanted or not set(wanted) <= set(TUNABLE):
        raise Mistake(f"there is no kernel '{kernels}'", f"kernels are {', '.join(TUNABLE)}")
    for path in paths:
        tune_layers(path, rounds)
        if not has_attentions(path):
            continue
        with progress(path.name, None) as bar:
            winners = measure(path, rounds, bar.advance, wanted, target)
        tune_labels(path, rounds)
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
    from attnc.build import dispatch_path
    from attnc.tune.targets import tune_targets

    for path in paths:
        if not has_attentions(path):
            continue
        with progress(path.name, None) as bar:
            tables = tune_targets(path, rounds, bar.advance)
        for table in tables:
            for row in table.rows:
                say(f"{table.name} {table.variant} {limits_of(table, row)}: {row.choice['target']}")
        if tables:
            note(f"wrote {dispatch_path(path)}; 'attnc compile {path}' embeds it")


def limits_of(table: Table, row: Row) -> str:
    """The largest sizes that a row admits, in words."""
    sizes = zip(table.sizes, row.limits, strict=True)
    return ", ".join("any" if limit is None else f"{size} <= {limit}" for size, limit in sizes)


def has_attentions(path: Path) -> bool:
    """Whether there is anything to tune besides projections."""
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


def tune_points(paths: tuple[Path, ...], rounds: int, out: Path) -> None:
    """Tunes the schedules of the one attention that has several, and writes all times to a file. Raises
    Mistake when it is not one.
    """
    from attnc.tune.schedules import dump_points, families

    several = [path for path in paths for _ in families(path)]
    if len(several) != 1:
        raise Mistake(
            f"--points is for one variant with several schedules for Triton, and here are {len(several)}",
            "name the spec of one",
        )
    (path,) = several
    (found,) = tune_labels(path, rounds)
    write_text(out, dump_points(found, path))
    note(f"wrote {out}")


def tune_labels(path: Path, rounds: int) -> tuple[TunedSchedules, ...]:
    """Tunes which of several schedules of an attention is taken for which sizes, and prints the table."""
    from attnc.build import dispatch_path
    from attnc.tune.schedules import tune_schedules

    with progress(path.name, None) as bar:
        tuned = tune_schedules(path, rounds, bar.advance)
    for found in tuned:
        for row in found.table.rows:
            say(f"{found.name} {found.variant} {limits_of(found.table, row)}: {row.choice['schedule']}")
    if tuned:
        note(f"wrote {dispatch_path(path)}; 'attnc compile {path}' embeds it")
    return tuned


_SHOWN = ("tile.q", "tile.kv", "warps", "stages", "maxnreg", "dp")
