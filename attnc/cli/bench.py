"""`attnc bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from attnc.cli.console import Mistake, find_specs, loading, note, progress, say, say_lines

if TYPE_CHECKING:
    from attnc.bench.cells import Cell, Phase
    from attnc.bench.decode import DecodeCell
    from attnc.bench.peers import Peer
    from attnc.bench.prefill import PrefillCell
    from attnc.bench.serving import ServingCell

_Named = TypeVar("_Named", "Cell", "DecodeCell", "DecodeCell | ServingCell", "PrefillCell")


def bench(
    out: Annotated[Path, typer.Option(help="Folder for bench.md, bench.json and bench.png.")] = Path(
        "bench-results"
    ),
    cells: Annotated[
        str | None,
        typer.Option(help="Only cells whose name holds one of these, comma separated: d128,causal"),
    ] = None,
    peers: Annotated[
        str, typer.Option(help="Whom to compare with, comma separated.")
    ] = "cudnn,fa2,flex,eager",
    target: Annotated[
        str, typer.Option(help="Whose kernels to time: triton, cuda.sm_80 or cuda.sm_90a.")
    ] = "triton",
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds per cell.")] = 15,
    is_backward: Annotated[
        bool, typer.Option("--backward", help="Time the gradients of q, k and v in place of the forward.")
    ] = False,
    is_papers: Annotated[
        bool,
        typer.Option(
            "--papers", help="Time both loop orders with both splits, and count bytes with Nsight Compute."
        ),
    ] = False,
    is_decode: Annotated[
        bool, typer.Option("--decode", help="Time one new token against caches of many sizes.")
    ] = False,
    is_prefill: Annotated[
        bool, typer.Option("--prefill", help="Time prompts in one tensor, end to end and in pages.")
    ] = False,
    is_f32: Annotated[
        bool, typer.Option("--f32", help="Full and causal attention in single precision.")
    ] = False,
    is_flex: Annotated[
        bool, typer.Option("--flex", help="Time programs of FlexAttention, and what they wait for.")
    ] = False,
    host: Annotated[
        list[Path] | None,
        typer.Option(help="Time what calls of this spec's kernels cost the host; can be repeated."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Share attention out over so many GPUs, beside one.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=10, help="With --ranks: time for everything.")] = 150.0,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="One size of each kind; with --flex, no first results.")
    ] = False,
    is_list: Annotated[bool, typer.Option("--list", help="List the cells and stop.")] = False,
) -> None:
    """Time the generated kernels beside cuDNN, FlashAttention-2, FlexAttention and eager PyTorch.

    One interleaved run on the same data: medians, spreads, TFLOP/s, the ratio to the best peer and the share
    of the matmul ceiling measured in the same seconds. With --decode GB/s of K and V, under CUDA graph replay
    with a cold L2, in files named decode.*. With --prefill prompts of many sequences in one tensor, end to
    end and with keys in pages, in files named prefill.*. With --host, which wants some 50 rounds,
    microseconds of the host for a call, in files named host.*. With --flex programs of FlexAttention by torch
    and by attnc.flex, and unless --quick how long they wait for a first result, in files named flex.*. With
    --ranks one GPU against several that share the rows of a call (context parallelism), torch's and
    hand-written ways to do so, and what the links do, in files named ranks.*. Needs a CUDA GPU.

    Peers are cudnn, fa2, fa3 (where flash_attn_3 is installed), fa4 (flash-attn-4), efficient, flex and
    eager; of attnc triton, its kernels for Triton beside those of --target, two_pass and ordered, CUDA
    gradients that are the same bits in every run, and with --decode page_8 and page_4, small pages.

    Example: attnc bench --quick --cells causal --peers cudnn,flex
    """
    from attnc.bench.cells import extra, masks, quick, single, standard

    check_target(target)
    _one_run(
        {
            "--host": bool(host),
            "--ranks": ranks is not None,
            "--decode": is_decode,
            "--prefill": is_prefill,
            "--flex": is_flex,
            "--papers": is_papers,
            "--f32": is_f32,
            "--quick": is_quick,
            "--backward": is_backward,
        }
    )
    if host:
        _host(out, host, rounds, is_list=is_list)
    elif ranks is not None:
        _ranks(out, ranks, cells, target, rounds, seconds, is_list=is_list)
    elif is_decode:
        _decode(out, cells, peers, target, rounds, is_list)
    elif is_prefill:
        _prefill(out, cells, peers, target, rounds, is_list=is_list)
    elif is_flex:
        _flex(out, cells, rounds, waits=not is_quick, is_list=is_list)
    elif is_papers:
        _papers(out, cells, rounds, is_list=is_list)
    else:
        further = () if is_backward else extra()
        offered = single() if is_f32 else quick() if is_quick else (*standard(), *masks(), *further)
        chosen = _matching(offered, cells)
        phase: Phase = "backward" if is_backward else "forward"
        if is_list:
            _list(chosen, phase)
        else:
            _kernels(out, chosen, _rivals(peers, target), target, rounds, phase)


_TOGETHER = (["--f32", "--backward"], ["--quick", "--backward"], ["--flex", "--quick"])


def _one_run(modes: dict[str, bool]) -> None:
    """Raises Mistake for two modes, of which one would be passed over; --f32 and --quick have gradients."""
    given = [mode for mode, is_given in modes.items() if is_given]
    if len(given) > 1 and given not in _TOGETHER:
        raise Mistake(f"{given[0]} and {given[1]} are not one run", "run one after the other")


def _kernels(
    out: Path, chosen: tuple[Cell, ...], rivals: tuple[Peer, ...], target: str, rounds: int, phase: Phase
) -> None:
    """Every cell in one interleaved run: the forward, or the gradients."""
    need_gpu()
    from attnc.bench.report import machine, markdown, write_report
    from attnc.bench.run import measure, warm_up

    note(f"compiling for {len(chosen)} cells")
    warm_up(chosen, rivals, phase)
    with progress("bench", len(chosen)) as bar:
        results = measure(chosen, rivals, rounds, bar.advance, phase)
    made_on = machine(target)
    say_lines(markdown(results, rivals, made_on))
    for path in write_report(results, rivals, made_on, out):
        note(f"wrote {path}")


def _rivals(peers: str, target: str) -> tuple[Peer, ...]:
    """Those named, and the target's own kernels. Raises Mistake for a name that nobody has."""
    from attnc.bench.run import candidates, known_peers

    try:
        return candidates(_names(peers), target)
    except KeyError as unknown:
        raise Mistake(f"there is no peer {unknown}", f"peers are {', '.join(known_peers())}") from None


def _papers(out: Path, patterns: str | None, rounds: int, *, is_list: bool) -> None:
    from attnc.bench.papers import CELLS, measure
    from attnc.bench.papers_report import write_papers

    chosen = _matching(CELLS, patterns)
    if is_list:
        _list(chosen, "forward")
        return
    need_gpu()
    with progress("papers", len(chosen)) as bar:
        rows = measure(chosen, rounds, bar.advance)
    for path in write_papers(rows, out):
        note(f"wrote {path}")


def _host(out: Path, specs: list[Path], rounds: int, *, is_list: bool) -> None:
    """`attnc bench --host`: microseconds until a call returns, of every target."""
    from attnc.bench.host_cost import (
        calls_of,
        first_variants,
        jobs_of,
        markdown,
        measure_host,
        peers,
        write_host,
    )

    modules = first_variants(find_specs(specs))
    if not modules:
        raise Mistake("no attention of these specs has kernels", "'attnc check' says why")
    if is_list:
        for module in modules:
            say(f"{module.variant.attention.name:26} {module.target}")
        return
    need_gpu()
    from attnc.bench.decode_run import warm_up
    from attnc.bench.report import machine

    note(f"compiling {len(modules)} modules")
    warm_up(jobs_of(modules))
    calls = {call: launch for module in modules for call, launch in calls_of(module).items()} | peers()
    with progress("bench", rounds) as bar:
        costs = measure_host(calls, rounds, bar.advance)
    made_on = machine(", ".join(sorted({module.target for module in modules})))
    say_lines(markdown(costs, made_on))
    for path in write_host(costs, made_on, out):
        note(f"wrote {path}")


def _flex(out: Path, patterns: str | None, rounds: int, *, waits: bool, is_list: bool) -> None:
    """`attnc bench --flex`: torch's FlexAttention beside ours, from the same mods."""
    with loading():
        from attnc.bench.flex import markdown, measure_flex, write_flex
        from attnc.bench.flex_programs import MODS
    wanted = _names(patterns or "")
    chosen = [name for name in MODS if not wanted or any(pattern in name for pattern in wanted)]
    if not chosen:
        raise Mistake(f"no program's name holds '{patterns}'", "attnc bench --flex --list shows them")
    if is_list:
        for name in chosen:
            say(name)
        return
    need_gpu()
    from attnc.bench.report import machine

    with progress("bench", None) as bar:
        results = measure_flex(chosen, rounds, bar.advance, waits=waits)
    made_on = machine(", ".join(sorted({result.target for result in results})))
    say_lines(markdown(results, made_on))
    for path in write_flex(results, made_on, out):
        note(f"wrote {path}")


def _ranks(
    out: Path, ranks: int, patterns: str | None, target: str, rounds: int, seconds: float, *, is_list: bool
) -> None:
    """`attnc bench --ranks`: what several GPUs make of one call."""
    with loading():
        from attnc.bench.ranks import CELLS, bench_ranks
        from attnc.bench.ranks_peers import PEERS
        from attnc.bench.ranks_report import markdown, write_tables
        from attnc.distributed.launch import uses_gpus
    wanted = _names(patterns or "")
    chosen = tuple(cell for cell in CELLS if not wanted or any(pattern in cell.name for pattern in wanted))
    if not chosen:
        raise Mistake(f"no cell's name holds '{patterns}'", "attnc bench --ranks 4 --list shows them")
    if is_list:
        for cell in chosen:
            say(cell.name)
        return
    need_gpu()
    if not uses_gpus(ranks):
        raise Mistake(f"there are no {ranks} GPUs here", "ask for as many ranks as there are GPUs")
    note(f"one GPU and {ranks}, at most {seconds:.0f} seconds")
    path = bench_ranks(ranks, chosen, tuple(PEERS), rounds, seconds, out, target)
    say_lines(markdown(path))
    for written in (path, *write_tables(path)):
        note(f"wrote {written}")


def check_target(target: str) -> None:
    """Raises Mistake where nothing is compiled for a target of this name."""
    from attnc.plan.targets import TARGETS

    if target not in TARGETS:
        raise Mistake(f"there is no target '{target}'", f"targets are {', '.join(sorted(TARGETS))}")


def _decode(out: Path, cells: str | None, peers: str, target: str, rounds: int, is_list: bool) -> None:
    """`attnc bench --decode`: GB/s of K and V under graph replay, and what a call costs the host."""
    from attnc.bench.decode import DecodeCell, decode_cells, scaling_cells
    from attnc.bench.decode_peers import decoders
    from attnc.bench.serving import ServingCell, serving_cells

    offered: tuple[DecodeCell | ServingCell, ...] = (*decode_cells(), *scaling_cells(), *serving_cells())
    every = _matching(offered, cells)
    if is_list:
        for cell in every:
            say(f"{cell.name:26} {cell.bytes * 1e-9:9.3f} GB of K and V")
        return
    wanted = _decoding_peers(peers)
    need_gpu()
    from attnc.bench.decode_report import markdown, write_decode
    from attnc.bench.decode_run import decode_jobs, eager_cost, measure_decode, warm_up
    from attnc.bench.report import machine
    from attnc.bench.serving_run import measure_serving, serving_jobs, serving_markdown

    chosen = tuple(cell for cell in every if isinstance(cell, DecodeCell))
    further = tuple(cell for cell in every if isinstance(cell, ServingCell))
    taking = decoders(wanted, target)
    note(f"compiling for {len(every)} cells")
    warm_up([*decode_jobs(chosen, taking), *serving_jobs(further, target)])
    with progress("bench", len(every)) as bar:
        results = measure_decode(chosen, taking, rounds, bar.advance)
        eager = eager_cost(taking) if chosen else {}
        serving = measure_serving(further, wanted, target, rounds, bar.advance)
    made_on = machine(target)
    say_lines(f"{markdown(results, eager, taking, made_on)}\n{serving_markdown(serving)}")
    for path in write_decode(results, eager, taking, serving, made_on, out):
        note(f"wrote {path}")


def _prefill(out: Path, cells: str | None, peers: str, target: str, rounds: int, *, is_list: bool) -> None:
    """`attnc bench --prefill`: prompts however their keys lie, beside the dense kernel at equal work."""
    from attnc.bench.prefill import prefill_cells

    chosen = _matching(prefill_cells(), cells)
    if is_list:
        for cell in chosen:
            say(f"{cell.name:26} {cell.flops * 1e-9:9.1f} GFLOP")
        return
    wanted = _decoding_peers(peers)
    need_gpu()
    from attnc.bench.decode_run import warm_up
    from attnc.bench.prefill_run import markdown, measure_prefill, prefill_jobs, write_prefill
    from attnc.bench.report import machine

    note(f"compiling for {len(chosen)} cells")
    warm_up(prefill_jobs(target))
    with progress("bench", len(chosen)) as bar:
        results = measure_prefill(chosen, wanted, target, rounds, bar.advance)
    made_on = machine(target)
    say_lines(markdown(results, made_on))
    for path in write_prefill(results, made_on, out):
        note(f"wrote {path}")


def _decoding_peers(peers: str) -> set[str]:
    """Those named. Raises Mistake for a name that nobody has; some of a forward's peers have no part here."""
    from attnc.bench.decode_peers import NAMES
    from attnc.bench.run import known_peers

    wanted = set(_names(peers))
    for name in sorted(wanted - NAMES - known_peers().keys()):
        raise Mistake(f"there is no peer '{name}'", f"peers are {', '.join(sorted(NAMES))}")
    return wanted


def _matching(cells: tuple[_Named, ...], patterns: str | None) -> tuple[_Named, ...]:
    wanted = _names(patterns or "")
    chosen = tuple(cell for cell in cells if not wanted or any(pattern in cell.name for pattern in wanted))
    if not chosen:
        raise Mistake(f"no cell's name holds '{patterns}'", "attnc bench --list shows them")
    return chosen


def _names(text: str) -> list[str]:
    """What stands between the commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _list(cells: tuple[Cell, ...], phase: Phase) -> None:
    for cell in cells:
        say(f"{cell.name:26} b{cell.batch:<3} {cell.flops_of(phase) * 1e-9:9.1f} GFLOP")


def need_gpu() -> None:
    """Raises Mistake where there is no GPU to measure on."""
    with loading():
        from attnc.runtime.devices import gpus

    if not gpus():
        raise Mistake("timing needs a CUDA GPU, and PyTorch sees none", "attnc doctor says what is missing")
