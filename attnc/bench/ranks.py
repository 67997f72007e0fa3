"""`attnc bench --ranks N`: one GPU against N that share the rows, forward and with gradients; decoding with
the keys on N; what the links do; and the others, in processes of their own, so that one that hangs costs
only itself.

Every part is written to `ranks.json` as soon as it is there.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from attnc.bench.decode_run import warm_up
from attnc.bench.ranks_links import links
from attnc.bench.ranks_peers import GROUPS, PEERS
from attnc.bench.report import machine
from attnc.distributed import ContextParallel, SpreadKeys
from attnc.distributed.estimate import rates_of
from attnc.distributed.explain import least
from attnc.distributed.group import Alone
from attnc.distributed.kernels import spec_of
from attnc.distributed.launch import on_processes
from attnc.distributed.plan import make_plan, widths_of
from attnc.distributed.spans import Sizes, Visibility

SPEC = Path(__file__).parent / "specs" / "ranks" / "ranks.attn"
HEADS, KV_HEADS, WIDTH = 32, 8, 128
DEVICE = "cuda"
#: Milliseconds that the launches of a sample take together, about.
_SAMPLE_MS = 40.0

Launch: TypeAlias = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksCell:
    """One call. mask: an attention of `ranks.attn`; length: queries and keys; decode: one token of one
    sequence, against so many keys.
    """

    name: str
    mask: str
    length: int
    decode: bool = False


CELLS = (
    RanksCell(name="causal 64k", mask="causal", length=65536),
    RanksCell(name="documents 64k", mask="documents", length=65536),
    RanksCell(name="window 4096 64k", mask="window", length=65536),
    RanksCell(name="causal 32k", mask="causal", length=32768),
    RanksCell(name="prefix 64k", mask="prefix", length=65536),
    RanksCell(name="decode 256k", mask="token", length=262144, decode=True),
)


def bench_ranks(
    ranks: int,
    cells: tuple[RanksCell, ...],
    peers: tuple[str, ...],
    rounds: int,
    seconds: float,
    out: Path,
    target: str = "triton",
) -> Path:
    """Measures what there is time for; returns the path of the JSON, which has it all.

    seconds: of the clock, for everything: no part starts later, and processes that run longer are ended.
    target: whose kernels ranks run, and one GPU beside them; new tokens are always Triton's.
    """
    out.mkdir(parents=True, exist_ok=True)
    path, begin = out / "ranks.json", time.monotonic()
    path.write_text(json.dumps({"machine": machine(target), "ranks": ranks, "parts": {}}), encoding="utf-8")
    _note(path, "planning", {cell.name: planning(cell) for cell in cells if not cell.decode})
    try:
        warm_up([partial(_warm, mask, over, target) for mask in _masks(cells) for over in (True, False)])
        _note(path, "compiling", {"seconds": round(time.monotonic() - begin, 1)})
    except Exception as failure:  # then ranks compile what they call
        _note(path, "compiling", {"error": _first_line(failure)})

    def left() -> float:
        return seconds - (time.monotonic() - begin)

    ours = partial(_ours_on_rank, target=target)
    works: list[tuple[Callable[..., None], tuple[str, ...]]] = [(ours, ("attnc",))]
    works += [(_peers_on_rank, names) for some in GROUPS if (names := tuple(p for p in some if p in peers))]
    for work, names in works:
        if left() < 10:
            _note(path, names[0], {"error": "no time was left"})
            continue
        limit = left() if work is ours else min(left(), 60.0)
        try:
            on_processes(ranks, work, names, cells, rounds, limit, str(path), seconds=limit, deadline=limit)
        except Exception as failure:  # what one part breaks on is a gap in the table
            _note(path, names[0], {"error": _first_line(failure)}, keep=True)
    return path


def _masks(cells: tuple[RanksCell, ...]) -> list[str]:
    return list(dict.fromkeys(cell.mask for cell in cells))


def _first_line(failure: BaseException) -> str:
    lines = [line for line in str(failure).strip().splitlines() if line.strip()]
    return f"{type(failure).__name__}: {lines[-1] if lines else ''}"[:300]


def _note(path: Path, part: str, data: Mapping[str, Any], *, keep: bool = False) -> None:
    """Adds a part to the file; keep: beside what it has of it."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    before = whole["parts"].get(part, {}) if keep else {}
    whole["parts"][part] = {**before, **data}
    path.write_text(json.dumps(whole, indent=1), encoding="utf-8")


# --- tensors ------------------------------------------------------------------------------------------------


def draw(cell: RanksCell, device: str | torch.device = DEVICE) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v and the other inputs of the whole call; the same on every rank."""
    generator = torch.Generator(device).manual_seed(cell.length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    rows = 1 if cell.decode else cell.length
    qkv = [normal(1, rows, HEADS, WIDTH), *(normal(1, cell.length, KV_HEADS, WIDTH) for _ in range(2))]
    return qkv, {name: x.to(device) for name, x in _reads(cell).items()}


def _reads(cell: RanksCell) -> dict[str, torch.Tensor]:
    """The inputs besides q, k and v, on the host."""
    if cell.mask == "documents":
        return {"doc": documents(cell.length)[None]}
    if cell.mask == "prefix":
        return {"length": torch.tensor([cell.length // 4], dtype=torch.int32)}
    return {"kv_len": torch.tensor([cell.length], dtype=torch.int32)} if cell.decode else {}


def documents(length: int) -> torch.Tensor:
    """Numbers of documents of 1024 to 12288 tokens."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1024, 12289, (length // 1024,), generator=generator)
    numbers = torch.arange(len(sizes), dtype=torch.int32)
    return torch.repeat_interleave(numbers, sizes)[:length]


def _warm(mask: str, over_ranks: bool, target: str) -> None:
    """Compiles the kernels of one attention: as one GPU runs them, or as ranks do."""
    cell = RanksCell(name="warm", mask=mask, length=4096, decode=mask == "token")
    (q, k, v), extras = draw(cell)
    if cell.decode:
        if over_ranks:
            SpreadKeys(SPEC, Alone(), attention=mask)(q, k, v, **extras)
        else:
            _single(mask, "triton")(q, k, v, *extras.values())
    else:
        call: Callable[..., Any] = _single(mask, target)
        if over_ranks:
            cp = ContextParallel(SPEC, Alone(), attention=mask, target=target)
            q, k, v = cp.shard(q, k, v, **extras)[:3]
            call = cp
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = call(*leaves, *extras.values())[0]
        torch.autograd.grad(o, leaves, torch.ones_like(o))
    torch.cuda.synchronize()


def _single(mask: str, target: str) -> Callable[..., Any]:
    """The kernels of one GPU."""
    from attnc.api.compile import compile_family

    return compile_family(SPEC, attention=mask, target=target, warn=False)


# --- timing -------------------------------------------------------------------------------------------------


def alone(launch: Launch, rounds: int) -> float:
    """Milliseconds of a launch on this GPU."""
    return _median(launch, rounds, lambda x: x, lambda: None)


def together(launch: Launch, rounds: int) -> float:
    """The same of a collective one: of the slowest rank, in each round."""

    def slowest(x: float) -> float:
        found = torch.tensor(x, device=DEVICE)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    return _median(launch, rounds, slowest, dist.barrier)


def _median(launch: Launch, rounds: int, agreed: Callable[[float], float], meet: Callable[[], Any]) -> float:
    for _ in range(3):
        launch()
    once = agreed(_sample(launch, 1))
    repeats = max(1, min(200, round(_SAMPLE_MS / max(once, 1e-3))))
    samples = []
    for _ in range(rounds):
        meet()
        samples.append(agreed(_sample(launch, repeats)))
    return statistics.median(samples)


def _host(launch: Launch) -> float:
    """Milliseconds of the host until a launch returns, with nothing before it on the GPU."""
    samples = []
    for _ in range(11):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        launch()
        samples.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(samples)


def _sample(launch: Launch, repeats: int) -> float:
    event: Any = torch.cuda.Event  # torch ships it without annotations
    start, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats


def planning(cell: RanksCell, repeats: int = 50) -> dict[str, float]:
    """Milliseconds of the host for a plan that is not there yet, by the number of ranks."""
    spec = spec_of(SPEC, cell.mask)
    visibility, rates = Visibility(spec.variants[0].attention), rates_of(spec.target)
    tensors = {name: x.long().numpy() for name, x in _reads(cell).items()}
    sizes = Sizes(queries=cell.length, keys=cell.length, heads=HEADS, kv_heads=KV_HEADS, tensors=tensors)
    found = {}
    for ranks in (2, 4, 8):
        samples = []
        for _ in range(repeats):
            begin = time.perf_counter()
            make_plan(visibility, sizes, widths_of(visibility), ranks, rates)
            samples.append(time.perf_counter() - begin)
        found[str(ranks)] = round(1e3 * statistics.median(samples), 3)
    return found


# --- parts --------------------------------------------------------------------------------------------------


def _ours_on_rank(
    rank: int,
    names: tuple[str, ...],
    cells: tuple[RanksCell, ...],
    rounds: int,
    seconds: float,
    path: str,
    *,
    target: str,
) -> None:
    """Links, then every cell; rank 0 writes."""
    begin = time.monotonic()
    for part, work in _ours(cells, rounds, target):
        late = torch.tensor(float(time.monotonic() - begin > seconds - 8), device=DEVICE)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        data: Mapping[str, Any]
        if float(late):
            data = {"error": "no time was left"}
        else:
            try:
                data = work()
            except Exception as failure:  # the other parts are worth having
                data = {"error": _first_line(failure)}
        if rank == 0:
            _note(Path(path), part if part == "links" else f"{names[0]}: {part}", data)
        torch.cuda.empty_cache()
        dist.barrier()


def _ours(
    cells: tuple[RanksCell, ...], rounds: int, target: str
) -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    yield "links", links
    for cell in cells:
        yield (
            cell.name,
            partial(_decode, cell, rounds) if cell.decode else partial(_rows, cell, rounds, target),
        )


def _rows(cell: RanksCell, rounds: int, target: str) -> dict[str, Any]:
    """Rows shared out: T1 and TN, forward and with gradients, and whether results are those of one GPU; keys
    by NCCL, and copied out of symmetric memory.
    """
    ranks = dist.get_world_size()
    drawn = draw(cell)
    (q, k, v), extras = drawn
    one = _single(cell.mask, target)
    with torch.no_grad():
        expected = one(q, k, v, *extras.values())[0]
    found = _shared(cell, drawn, expected, rounds, target, symmetric=False)
    try:
        found["copied"] = _shared(cell, drawn, expected, rounds, target, symmetric=True)
    except Exception as failure:  # not every machine has symmetric memory
        found["copied"] = {"error": _first_line(failure)}
    del expected
    dist.barrier()
    if dist.get_rank() == 0:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        whole = torch.randn_like(q)

        def one_forward() -> Any:
            with torch.no_grad():
                return one(q, k, v, *extras.values())

        def one_both() -> Any:
            return torch.autograd.grad(one(*leaves, *extras.values())[0], leaves, whole)

        found["T1 forward"] = alone(one_forward, rounds)
        found["T1 forward + backward"] = alone(one_both, rounds)
        for phase in ("forward", "forward + backward"):
            found[f"efficiency {phase}"] = found[f"T1 {phase}"] / (ranks * found[f"T{ranks} {phase}"])
    dist.barrier()
    return found


def _shared(
    cell: RanksCell,
    drawn: tuple[list[torch.Tensor], dict[str, Any]],
    expected: torch.Tensor,
    rounds: int,
    target: str,
    *,
    symmetric: bool,
) -> dict[str, Any]:
    """The plan, and what all ranks take. expected: o of one GPU."""
    ranks, ((q, k, v), extras) = dist.get_world_size(), drawn
    cp = ContextParallel(SPEC, attention=cell.mask, target=target, symmetric=symmetric)
    shards = cp.shard(q, k, v, **extras)[:3]
    plan = cp.plan(q, k, **extras)
    local = [x.clone().requires_grad_() for x in shards]
    do = cp.own(torch.randn_like(q), "o").contiguous()

    def forward() -> Any:
        with torch.no_grad():
            return cp(*shards, **extras)

    def both() -> Any:
        return torch.autograd.grad(cp(*local, **extras)[0], local, do)

    o = cp.unshard(forward()[0])
    return {
        "strategy": plan.chosen.strategy,
        "groups": plan.chosen.groups,
        "owners": plan.chosen.owners,
        "imbalance": plan.imbalance,
        "bytes": plan.chosen.bytes,
        "least_bytes": int(least(plan, cp.kernels_for(q)[0].visibility).sum()),
        "estimate_ms": 1e3 * plan.chosen.total,
        "flops": 4.0 * float(plan.load.sum()) * HEADS * WIDTH,
        "same_bits": bool(torch.equal(o, expected)),
        "largest_difference": float((o.float() - expected.float()).abs().max()),
        f"T{ranks} forward": together(forward, rounds),
        f"T{ranks} forward + backward": together(both, rounds),
        "host_ms": _host(forward),
    }


def _decode(cell: RanksCell, rounds: int) -> dict[str, Any]:
    """One token against keys on all ranks: replayed from a CUDA graph, as a serving engine does."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    (q, k, v), extras = draw(cell)
    keys = SpreadKeys(SPEC, attention=cell.mask, block=64)
    positions = torch.arange(cell.length, device=DEVICE)
    mine = positions[keys.spread.rank(positions) == rank]
    own = [x[:, mine].contiguous() for x in (k, v)]
    counts = keys.spread.counts(extras["kv_len"], rank)
    one = _single(cell.mask, "triton")

    def step() -> Any:
        return keys(q, *own, **extras, counts=counts)

    found: dict[str, Any] = {"bytes of keys": 2 * k.numel() * 2}
    found[f"T{ranks} eager"] = together(step, rounds)
    found[f"T{ranks}"] = together(_graph(step), rounds)
    if rank == 0:
        expected = one(q, k, v, *extras.values())[0]
        found["largest_difference"] = float((step_result(step).float() - expected.float()).abs().max())
        found["T1"] = alone(_graph(lambda: one(q, k, v, *extras.values())), rounds)
        found["speedup"] = found["T1"] / found[f"T{ranks}"]
    else:
        step_result(step)
    dist.barrier()
    return found


def step_result(step: Launch) -> torch.Tensor:
    """o of a call."""
    o: torch.Tensor = step()[0]
    return o


def _graph(launch: Launch) -> Launch:
    """The launch, captured."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch is not typed here
    with torch.cuda.stream(stream):
        for _ in range(3):
            launch()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    replay: Launch = graph.replay
    return replay


def _peers_on_rank(
    rank: int, names: tuple[str, ...], cells: tuple[RanksCell, ...], rounds: int, seconds: float, path: str
) -> None:
    """Some peers at every cell that they can run."""
    begin = time.monotonic()
    for name, cell in ((name, cell) for name in names for cell in cells if not cell.decode):
        late = torch.tensor(float(time.monotonic() - begin > seconds - 5), device=DEVICE)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        data: dict[str, Any] = {}
        launches: Mapping[str, Launch] = {}
        problem = "no time was left" if float(late) else ""
        if not problem:
            try:
                launches = PEERS[name](cell.mask, cell.length, draw(cell))
            except Exception as failure:  # what one peer breaks on is a gap in the table
                problem = _first_line(failure)
        broken = torch.tensor(float(bool(problem)), device=DEVICE)
        dist.all_reduce(broken, dist.ReduceOp.MAX)
        if float(broken):
            data["error"] = problem or "another rank failed"
        else:
            for phase, launch in launches.items():
                data[f"T{dist.get_world_size()} {phase}"] = together(launch, rounds)
        if rank == 0:
            _note(Path(path), f"{name}: {cell.name}", data)
        del launches
        torch.cuda.empty_cache()
