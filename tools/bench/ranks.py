"""`attnc bench --ranks N`: one GPU against N that share the rows, forward and with gradients; decoding with
the keys on N; what the links do; and the others, in processes of their own, so that one that hangs costs
only itself.

Every part is written to `ranks.partial.json` as soon as it is there, and all to `ranks.json` at the end.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from attnc.bench.report import Page, machine
from attnc.bench.run import Benchmark, Report, warm_up
from attnc.distributed import ContextParallel, SpreadKeys
from attnc.distributed.estimate import rates_of
from attnc.distributed.explain import least
from attnc.distributed.group import Alone, on_processes
from attnc.distributed.kernels import spec_of
from attnc.distributed.plan import make_plan, widths_of
from attnc.distributed.spans import CallSizes, Visibility
from attnc.runtime.timing import Launch, Sampler, capture_calls, host_ms, in_bursts, take_turns
from tools.bench.ranks_peers import GROUPS, PEERS, links
from tools.bench.ranks_report import draw_plot, markdown

SPEC = Path(__file__).parent / "specs" / "ranks.attn"
HEADS, WIDTH = 32, 128
DEVICE = "cuda"
#: Milliseconds that the launches of a sample take together, about.
_SAMPLE_MS = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksCell:
    """A call of 32 query heads. mask: an attention of `ranks.attn`; length: queries and keys; kv_heads: that
    share them; batch: of sequences; decode: one token of each sequence, against so many keys.
    """

    name: str
    mask: str
    length: int
    kv_heads: int = 8
    batch: int = 1
    decode: bool = False


#: In the order in which they are measured: what there is no time for comes last.
CELLS = (
    RanksCell(name="causal 64k", mask="causal", length=65536),
    RanksCell(name="documents 64k", mask="documents", length=65536),
    RanksCell(name="decode 256k", mask="token", length=262144, decode=True),
    RanksCell(name="decode 256k b8", mask="token", length=262144, batch=8, decode=True),
    RanksCell(name="causal 256k", mask="causal", length=262144),
    RanksCell(name="window 4096 64k", mask="window", length=65536),
    RanksCell(name="causal 64k hkv1", mask="causal", length=65536, kv_heads=1),
    RanksCell(name="causal 64k hkv2", mask="causal", length=65536, kv_heads=2),
    RanksCell(name="causal 32k", mask="causal", length=32768),
    RanksCell(name="prefix 64k", mask="prefix", length=65536),
)


@dataclass(frozen=True, kw_only=True)
class RanksBenchmark(Benchmark[RanksCell, Mapping[str, Any]]):
    """Measures what there is time for. Results are what the JSON has.

    seconds: of the clock, for everything: no part starts later, and processes that run longer are ended.
    target: whose kernels ranks run, and one GPU beside them; new tokens are always Triton's.
    """

    stem: ClassVar[str] = "ranks"
    ranks: int
    seconds: float
    out: Path
    target: str = "triton"
    peers: Collection[str] = tuple(PEERS)

    @property
    def cells(self) -> Sequence[RanksCell]:
        return CELLS

    def describe(self, cell: RanksCell) -> str:
        return cell.name

    def measure(self, cells: Sequence[RanksCell], rounds: int, report: Report) -> Mapping[str, Any]:
        self.out.mkdir(parents=True, exist_ok=True)
        path, begin = self.out / "ranks.partial.json", time.monotonic()  # for who ends a run early
        start = {"machine": machine(self.target), "ranks": self.ranks, "parts": {}}
        path.write_text(json.dumps(start), encoding="utf-8")
        _note(path, "planning", {cell.name: planning(cell) for cell in cells if not cell.decode})
        masks = dict.fromkeys(cell.mask for cell in cells)
        try:
            warm_up([partial(_warm, mask, over, self.target) for mask in masks for over in (True, False)])
            _note(path, "compiling", {"seconds": round(time.monotonic() - begin, 1)})
        except Exception as failure:  # then ranks compile what they call
            _note(path, "compiling", {"error": _last_line(failure)})

        def left() -> float:
            return self.seconds - (time.monotonic() - begin)

        ours = partial(_ours_on_rank, target=self.target)
        groups = (tuple(peer for peer in group if peer in self.peers) for group in GROUPS)
        works: list[tuple[Callable[..., None], tuple[str, ...]]] = [(ours, ("attnc",))]
        works += [(_peers_on_rank, names) for names in groups if names]
        for work, names in works:
            report(names[0])
            if left() < 10:
                _note(path, names[0], {"error": "no time was left"})
                continue
            # what hangs takes nothing from those after it; the last, torch's Flex CP, compiles for minutes
            limit = left() if names in (works[0][1], works[-1][1]) else min(left(), 60.0)
            told = (names, tuple(cells), rounds, limit, str(path))
            try:
                on_processes(self.ranks, work, *told, seconds=limit, deadline=limit)
            except Exception as failure:  # what one part breaks on is a gap in the table
                _note(path, names[0], {"error": _last_line(failure)}, keep=True)
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        return found

    def steps(self, cells: Sequence[RanksCell], rounds: int) -> int:
        return 1 + len(GROUPS)

    def page(self, results: Mapping[str, Any], machine: Mapping[str, str]) -> Page:
        return Page(markdown=markdown(results), data=results, draw=partial(draw_plot, results))


def _last_line(failure: BaseException) -> str:
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
    """Returns q, k, v and the other inputs of the whole call; the same on every rank."""
    generator = torch.Generator(device).manual_seed(cell.length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    rows = 1 if cell.decode else cell.length
    q = normal(cell.batch, rows, HEADS, WIDTH)
    k, v = (normal(cell.batch, cell.length, cell.kv_heads, WIDTH) for _ in range(2))
    return [q, k, v], {name: x.to(device) for name, x in _reads(cell).items()}


def _reads(cell: RanksCell) -> dict[str, torch.Tensor]:
    if cell.mask == "documents":
        return {"doc": documents(cell.length)[None]}
    if cell.mask == "prefix":
        return {"length": torch.tensor([cell.length // 4], dtype=torch.int32)}
    return {"kv_len": torch.full((cell.batch,), cell.length, dtype=torch.int32)} if cell.decode else {}


def documents(length: int) -> torch.Tensor:
    """Returns numbers of documents of 1024 to 12288 tokens."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1024, 12289, (length // 1024,), generator=generator)
    numbers = torch.arange(len(sizes), dtype=torch.int32)
    return torch.repeat_interleave(numbers, sizes)[:length]


def _warm(mask: str, over_ranks: bool, target: str) -> None:
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
    from attnc.api.compile import compile_family

    return compile_family(SPEC, attention=mask, target=target, warn=False)


# --- timing -------------------------------------------------------------------------------------------------


def alone(launches: Mapping[str, Launch], rounds: int) -> dict[str, float]:
    """Milliseconds of launches that take turns on this GPU."""
    return _medians({name: in_bursts(launch, _SAMPLE_MS) for name, launch in launches.items()}, rounds)


def together(launches: Mapping[str, Launch], rounds: int) -> dict[str, float]:
    """Milliseconds of collective launches that take turns, each round's of the slowest rank."""

    def slowest(x: float) -> float:
        found = torch.tensor(x, device=DEVICE)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def after_all(sample: Sampler) -> float:
        dist.barrier()
        return sample()

    samplers = {name: in_bursts(launch, _SAMPLE_MS, slowest) for name, launch in launches.items()}
    return _medians({name: partial(after_all, sample) for name, sample in samplers.items()}, rounds)


def _medians(samplers: Mapping[str, Sampler], rounds: int) -> dict[str, float]:
    return {name: statistics.median(samples) for name, samples in take_turns(samplers, rounds).items()}


def sizes_of_cell(cell: RanksCell) -> CallSizes:
    """Returns all that the plan of a call depends on."""
    tensors = {name: x.long().numpy() for name, x in _reads(cell).items()}
    return CallSizes(
        queries=cell.length, keys=cell.length, heads=HEADS, kv_heads=cell.kv_heads, tensors=tensors
    )


def planning(cell: RanksCell, repeats: int = 50) -> dict[str, float]:
    """Milliseconds of the host for a plan that is not there yet, by the number of ranks."""
    spec = spec_of(SPEC, cell.mask)
    visibility, rates = Visibility(spec.variants[0].attention), rates_of(spec.target)
    sizes, found = sizes_of_cell(cell), {}
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
    """Measures links, then every cell, in a process that is one rank; rank 0 writes."""
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
                data = {"error": _last_line(failure)}
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
    """Measures rows shared out, forward and with gradients: TN, T1 of one GPU alone and of the slowest while
    all do the same, and whether results are those of one GPU; keys by NCCL, and out of symmetric memory.
    """
    ranks = dist.get_world_size()
    drawn = draw(cell)
    (q, k, v), extras = drawn
    one = _single(cell.mask, target)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    generator = torch.Generator(DEVICE).manual_seed(cell.length + 1)  # the same on all ranks
    do = torch.randn(q.shape, generator=generator, device=DEVICE, dtype=q.dtype)
    o = one(*leaves, *extras.values())[0]
    expected = [o.detach(), *torch.autograd.grad(o, leaves, do)]
    del o
    found = _shared(cell, drawn, do, expected, rounds, target, symmetric=False)
    try:
        found["copied"] = _shared(cell, drawn, do, expected, rounds, target, symmetric=True)
    except Exception as failure:  # not every machine has symmetric memory
        found["copied"] = {"error": _last_line(failure)}
    del expected

    def one_forward() -> Any:
        with torch.no_grad():
            return one(q, k, v, *extras.values())

    def one_both() -> Any:
        return torch.autograd.grad(one(*leaves, *extras.values())[0], leaves, do)

    launches = {"forward": one_forward, "forward + backward": one_both}
    # Of GPUs that all are at work one has the least power to draw, or is the warmest: the others wait for it.
    found |= {f"T1 slowest {name}": x for name, x in together(launches, max(rounds // 2, 3)).items()}
    dist.barrier()
    if dist.get_rank() == 0:
        found |= {f"T1 {name}": x for name, x in alone(launches, rounds).items()}
        for phase in launches:
            found[f"efficiency {phase}"] = found[f"T1 {phase}"] / (ranks * found[f"T{ranks} {phase}"])
    dist.barrier()
    return found


def _shared(
    cell: RanksCell,
    drawn: tuple[list[torch.Tensor], dict[str, Any]],
    do: torch.Tensor,
    expected: list[torch.Tensor],
    rounds: int,
    target: str,
    *,
    symmetric: bool,
) -> dict[str, Any]:
    """Returns the plan, and what all ranks take. do: the gradient of o; expected: o, dq, dk and dv of one
    GPU.
    """
    ranks, ((q, k, v), extras) = dist.get_world_size(), drawn
    cp = ContextParallel(SPEC, attention=cell.mask, target=target, symmetric=symmetric)
    shards = cp.shard(q, k, v, **extras)[:3]
    plan = cp.plan(q, k, **extras)
    local = [x.clone().requires_grad_() for x in shards]
    own_do = cp.own(do, "o").contiguous()

    def forward() -> Any:
        with torch.no_grad():
            return cp(*shards, **extras)

    def both() -> Any:
        return torch.autograd.grad(cp(*local, **extras)[0], local, own_do)

    made = [cp.unshard(x.contiguous(), name) for x, name in zip((forward()[0], *both()), "oqkv", strict=True)]
    far = [float((x.float() - y.float()).abs().max()) for x, y in zip(made, expected, strict=True)]
    most = max(float(x.abs().max()) for x in expected[1:])
    same = bool(torch.equal(made[0], expected[0]))
    del made
    return {
        "strategy": plan.chosen.strategy,
        "groups": plan.chosen.groups,
        "owners": plan.chosen.owners,
        "imbalance": plan.imbalance,
        "bytes": plan.chosen.bytes,
        "least_bytes": int(least(plan, cp.kernels_for(q)[0].visibility).sum()),
        "estimate_ms": 1e3 * plan.chosen.total,
        "flops": 4.0 * float(plan.load.sum()) * HEADS * WIDTH,
        "same_bits": same,
        "largest_difference": far[0],
        "gradients_differ": max(far[1:]) / most,
        **together({f"T{ranks} forward": forward, f"T{ranks} forward + backward": both}, rounds),
        "host_ms": statistics.median(host_ms(forward, 1) for _ in range(11)),
    }


def _decode(cell: RanksCell, rounds: int) -> dict[str, Any]:
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

    for _ in range(3):  # what a first call makes is there before a graph is captured
        step()
    found: dict[str, Any] = {"bytes of keys": 2 * k.numel() * 2}
    found |= together({f"T{ranks} eager": step, f"T{ranks}": capture_calls([step])}, rounds)
    if rank == 0:
        expected = one(q, k, v, *extras.values())[0]
        found["largest_difference"] = float((step_result(step).float() - expected.float()).abs().max())
        found |= alone({"T1": capture_calls([lambda: one(q, k, v, *extras.values())])}, rounds)
        found["speedup"] = found["T1"] / found[f"T{ranks}"]
    else:
        step_result(step)
    dist.barrier()
    return found


def step_result(step: Callable[[], Any]) -> torch.Tensor:
    """Returns o of a call."""
    o: torch.Tensor = step()[0]
    return o


def _peers_on_rank(
    rank: int, names: tuple[str, ...], cells: tuple[RanksCell, ...], rounds: int, seconds: float, path: str
) -> None:
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
                problem = _last_line(failure)
        broken = torch.tensor(float(bool(problem)), device=DEVICE)
        dist.all_reduce(broken, dist.ReduceOp.MAX)
        if float(broken):
            data["error"] = problem or "another rank failed"
        else:
            times = together(launches, rounds)
            data |= {f"T{dist.get_world_size()} {phase}": time for phase, time in times.items()}
        if rank == 0:
            _note(Path(path), f"{name}: {cell.name}", data)
        del launches
        torch.cuda.empty_cache()
