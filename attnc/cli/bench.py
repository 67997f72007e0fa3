"""`attnc bench`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnc.cli.console import (
    Mistake,
    count_noun,
    find_specs,
    loading,
    note,
    progress,
    say,
    say_lines,
    split_commas,
)
from attnc.cli.writing import refusing
from attnc.output import check_places

if TYPE_CHECKING:
    from attnc.bench.cells import Phase
    from attnc.bench.run import Benchmark


def bench(
    out: Annotated[Path, typer.Option(help="Folder for bench.md, bench.json and bench.png.")] = Path(
        "bench-results"
    ),
    cells: Annotated[
        str | None,
        typer.Option(help="Only cells whose name holds one of these, comma separated: d128,causal"),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Whom to compare with, comma separated; by default cudnn,fa2,flex,eager, with --models"
            " cudnn,sdpa, with --lists flex."
        ),
    ] = None,
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
    is_models: Annotated[
        bool, typer.Option("--models", help="Time calls as some thirty models make them.")
    ] = False,
    is_odd: Annotated[
        bool, typer.Option("--odd", help="With --models, in place of them: sizes that no table has.")
    ] = False,
    is_lists: Annotated[
        bool, typer.Option("--lists", help="Time attention over lists of blocks and tokens.")
    ] = False,
    host: Annotated[
        list[Path] | None,
        typer.Option(help="Time what calls of this spec's kernels cost the host; can be repeated."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Share attention out over so many GPUs, beside one.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=10, help="With --ranks, 150, and with --models and --lists, 240: time for everything."
        ),
    ] = None,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="One size of each kind; with --flex, no first results.")
    ] = False,
    is_list: Annotated[bool, typer.Option("--list", help="List the cells and stop.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files of the report's names that are no reports.")
    ] = False,
) -> None:
    """Time the generated kernels beside cuDNN, FlashAttention-2, FlexAttention and eager PyTorch.

    Everything is timed on the same data, in interleaved rounds. The report has medians, spreads, TFLOP/s, the
    ratio to the best peer, and the share of the speed of a matmul that is timed in the same seconds. Needs a
    CUDA GPU.

    Other options time something else, and name the files of the report after it. --decode: GB/s of K and V,
    from CUDA graphs, with a cold L2 cache. --prefill: prompts of many sequences in one tensor, end to end,
    and with keys in pages. --host: microseconds of the CPU for a call; use some 50 rounds. --flex: programs
    of FlexAttention by torch and by attnc.flex, and the time to the first result unless --quick. --models:
    calls as models make them, through the functions of attnc.compat and without a schedule: training,
    prompts, chunks, drafts, decoding; with --odd, of lengths, heads and widths of every kind. --lists:
    attention over lists of blocks and tokens, beside attention over all keys. --ranks: one GPU beside several
    that share the rows of a call (context parallelism), beside PyTorch's and hand-written ways to do so, and
    the speed of the links. --ranks and --papers need a checkout.

    Peers are cudnn, fa2, fa3 (the package flash_attn_3), fa4 (flash-attn-4), efficient, flex and eager, as
    far as they are installed. Kernels of attnc that can be timed as peers: triton, beside those of --target;
    two_pass and ordered, CUDA gradients with the same bits in every run; page_4 and page_1, small pages, with
    --decode and --prefill; page_8, attnc_flex (attnc.flex), and e4m3 and page_16_e4m3, caches of 8 bits, with
    --decode, beside fa3_e4m3, which multiplies in 8 bits (vLLM's FlashAttention-3). With --models peers are
    cudnn, sdpa (the one that PyTorch chooses), fa3, fa3_vllm (vLLM's build, which has sinks), fa4, flex and
    flashmla (of vLLM), and for gradients with the same bits in every run sdpa_deterministic and
    fa3_deterministic.
    With --lists they are flex, fa4, flashmla and nsa (parallel_nsa of flash-linear-attention), and of tokens
    whose keys are rows of 656 bytes rows656 (attnc's) and flashmla_rows656.

    Example: attnc bench --quick --cells causal --peers cudnn,flex
    """
    check_target(target)
    _one_run(
        {
            "--host": bool(host),
            "--ranks": ranks is not None,
            "--decode": is_decode,
            "--prefill": is_prefill,
            "--flex": is_flex,
            "--models": is_models,
            "--lists": is_lists,
            "--papers": is_papers,
            "--f32": is_f32,
            "--quick": is_quick,
            "--backward": is_backward,
        }
    )
    if is_odd and not is_models:
        raise Mistake("--odd is about calls as models make them", "give --models too")
    benchmark: Benchmark[Any, Any]
    with loading():
        if host:
            benchmark = _make_host(host)
        elif ranks is not None:
            benchmark = _make_ranks(ranks, seconds or 150.0, out, target, is_list=is_list)
        elif is_decode or is_prefill:
            benchmark = _make_serving(peers or _PEERS, target, is_decode=is_decode, is_list=is_list)
        elif is_flex:
            from attnc.bench.flex import FlexBenchmark

            benchmark = FlexBenchmark(waits=not is_quick)
        elif is_models:
            benchmark = _make_models(peers, seconds, is_odd=is_odd)
        elif is_lists:
            benchmark = _make_lists(peers, seconds)
        elif is_papers:
            benchmark = _import_research("papers").PapersBenchmark()
        else:
            phase: Phase = "backward" if is_backward else "forward"
            benchmark = _make_attention(
                peers or _PEERS, target, phase, is_f32=is_f32, is_quick=is_quick, is_list=is_list
            )
    chosen = _matching(benchmark.cells, "" if host else cells)
    if is_list:
        for cell in chosen:
            say(benchmark.describe(cell))
    else:
        _run(benchmark, chosen, rounds, out, target, force=force)


#: The peers by default.
_PEERS = "cudnn,fa2,flex,eager"
_TOGETHER = (["--f32", "--backward"], ["--quick", "--backward"], ["--flex", "--quick"])


def _one_run(modes: dict[str, bool]) -> None:
    """Raises Mistake for two modes, of which one would be passed over; --f32 and --quick have gradients."""
    given = [mode for mode, is_given in modes.items() if is_given]
    if len(given) > 1 and given not in _TOGETHER:
        raise Mistake(f"{given[0]} and {given[1]} are not one run", "run one after the other")


def _run(
    benchmark: Benchmark[Any, Any],
    chosen: Sequence[Any],
    rounds: int,
    out: Path,
    target: str,
    *,
    force: bool = False,
) -> None:
    need_gpu()
    from attnc.bench.report import machine, names
    from attnc.bench.run import warm_up

    refusing(partial(check_places, names(benchmark.stem), out, force=force), out)  # before minutes of work

    if jobs := benchmark.jobs(chosen):
        note(f"compiling for {count_noun(len(chosen), 'cell')}")
        warm_up(jobs)
    with progress("bench", benchmark.steps(chosen, rounds)) as bar:
        results = benchmark.measure(chosen, rounds, bar.advance)
    page = benchmark.page(results, machine(target))
    say_lines(page.markdown.rstrip())
    for path in refusing(partial(page.write, out, benchmark.stem, force=force), out):
        note(f"wrote {path}")


def _make_attention(
    peers: str, target: str, phase: Phase, *, is_f32: bool, is_quick: bool, is_list: bool
) -> Benchmark[Any, Any]:
    from attnc.bench.attention import AttentionBenchmark, known_peers
    from attnc.bench.cells import extra, masks, quick, single, standard

    further = () if phase == "backward" else extra()
    offered = single() if is_f32 else quick() if is_quick else (*standard(), *masks(), *further)
    known = known_peers(target)
    wanted = _known_names(peers, known, known) if not is_list else []
    return AttentionBenchmark(offered=offered, peers=wanted, target=target, phase=phase)


def _make_serving(peers: str, target: str, *, is_decode: bool, is_list: bool) -> Benchmark[Any, Any]:
    from attnc.bench.attention import known_peers
    from attnc.bench.decode import NAMES, DecodeBenchmark
    from attnc.bench.prefill import PrefillBenchmark

    wanted = _known_names(peers, NAMES | known_peers().keys(), NAMES) if not is_list else []
    made: Benchmark[Any, Any] = (DecodeBenchmark if is_decode else PrefillBenchmark)(
        peers=wanted, target=target
    )
    return made


def _make_models(peers: str | None, seconds: float | None, *, is_odd: bool) -> Benchmark[Any, Any]:
    from attnc.bench.model_peers import PEERS
    from attnc.bench.models import ModelBenchmark

    wanted = _known_names(peers or "cudnn,sdpa", PEERS, PEERS)
    return ModelBenchmark(peers=wanted, seconds=seconds or 240.0, is_odd=is_odd)


def _make_lists(peers: str | None, seconds: float | None) -> Benchmark[Any, Any]:
    from attnc.bench.list_peers import PEERS
    from attnc.bench.lists import ListBenchmark

    wanted = _known_names(peers or "flex", PEERS, PEERS)
    return ListBenchmark(peers=wanted, seconds=seconds or 240.0)


def _make_host(specs: list[Path]) -> Benchmark[Any, Any]:
    from attnc.bench.host_cost import HostBenchmark, first_variants

    modules = first_variants(find_specs(specs))
    if not modules:
        raise Mistake("no attention of these specs has kernels", "'attnc check' says why")
    return HostBenchmark(modules)


def _make_ranks(ranks: int, seconds: float, out: Path, target: str, *, is_list: bool) -> Benchmark[Any, Any]:
    from attnc.distributed.group import uses_gpus

    research = _import_research("ranks")
    if not is_list:
        need_gpu()
        if not uses_gpus(ranks):
            raise Mistake(f"there are no {ranks} GPUs here", "ask for as many ranks as there are GPUs")
        note(f"one GPU and {ranks}, at most {seconds:.0f} seconds")
    made: Benchmark[Any, Any] = research.RanksBenchmark(ranks=ranks, seconds=seconds, out=out, target=target)
    return made


def _import_research(name: str) -> ModuleType:
    """Imports a benchmark of `tools/bench`. Raises Mistake where attnc was installed from a wheel, which has
    none.
    """
    root = Path(__file__).parents[2]
    if not (root / "tools" / "bench" / f"{name}.py").is_file():
        raise Mistake(
            f"--{name} runs from a checkout alone", "run it with attnc installed by 'pip install -e .'"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module(f"tools.bench.{name}")


def _known_names(peers: str, known: Collection[str], offered: Collection[str]) -> list[str]:
    wanted = split_commas(peers)
    for name in wanted:
        if name not in known:
            raise Mistake(f"there is no peer '{name}'", f"peers are {', '.join(sorted(offered))}")
    return wanted


def check_target(target: str) -> None:
    """Raises Mistake where nothing is compiled for a target of this name."""
    from attnc.plan.targets import TARGETS

    if target not in TARGETS:
        raise Mistake(f"there is no target '{target}'", f"targets are {', '.join(sorted(TARGETS))}")


def _matching(cells: Sequence[Any], patterns: str | None) -> Sequence[Any]:
    wanted = split_commas(patterns or "")
    chosen = [cell for cell in cells if not wanted or any(pattern in cell.name for pattern in wanted)]
    if not chosen:
        raise Mistake(f"no cell's name holds '{patterns}'", "attnc bench --list shows them")
    return chosen


def need_gpu() -> None:
    """Raises Mistake where there is no GPU to measure on."""
    with loading():
        from attnc.runtime.devices import gpus

    if not gpus():
        raise Mistake("timing needs a CUDA GPU, and PyTorch sees none", "attnc doctor says what is missing")
