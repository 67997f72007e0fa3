"""A plan in words: `attnc explain SPEC --ranks 4`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from attnc.distributed.estimate import TimeEstimate
from attnc.distributed.plan import Plan, RowGroup
from attnc.distributed.spans import BLOCK, CallSizes, Ints, Visibility
from attnc.expr.nodes import Dim, walk
from attnc.model.attention import Attention
from attnc.model.tensors import Role

#: Documents, or packed sequences, of an example.
_DOCUMENTS = 10
_COLUMNS = 64


def example(attention: Attention, dims: Mapping[str, int]) -> tuple[CallSizes, tuple[str, ...]]:
    """Returns sizes with contents made up for what the mask reads, and what was made up, in words.

    dims: M and N, and B, H, Hkv and others where the spec leaves them open. Packed sequences and sorted
    inputs get ten documents of different lengths, the same on every run; other integers are N // 4.
    """
    known = {"B": 1, "M": 8192, "N": dims.get("M", 8192), "Hkv": 8, "G": 4, **dims}
    known["H"] = dims.get("H", known["Hkv"] * known["G"])
    heads = _value(attention.heads_q, known)
    kv_heads = _value(attention.heads_kv, known)
    queries, keys = known["M"], known["N"]
    remarks = []
    ends = {}
    for name, tensor, total in (("q", attention.q, queries), ("k", attention.k, keys)):
        if tensor.storage.is_packed:
            ends[name] = np.append(np.unique(_starts(total)), total)
    if ends:
        count = len(next(iter(ends.values()))) - 1
        known["B"] = count
        remarks.append(f"{count} packed sequences")
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name in Visibility(attention).reads:
        tensor = attention.tensor(name)
        for axis in tensor.shape:
            for node in walk(axis):
                if isinstance(node, Dim):
                    known.setdefault(node.name, keys)  # a size of the spec's own
        shape = tuple(_value(axis, known) for axis in tensor.shape)
        if tensor.is_sorted:
            numbers = np.searchsorted(_starts(shape[-1]), np.arange(shape[-1]), "right")
            tensors[name] = np.broadcast_to(numbers, shape)
            remarks.append(f"{name} numbers {_DOCUMENTS} documents")
        else:
            is_length = any(name in str(length) for length in attention.lengths.values())
            tensors[name] = np.full(shape, keys if is_length else keys // 4)
            remarks.append(f"{name} = {keys if is_length else keys // 4}")
    sizes = CallSizes(
        batch=known["B"],
        queries=queries,
        keys=keys,
        heads=heads,
        kv_heads=kv_heads,
        ends_q=ends.get("q"),
        ends_k=ends.get("k"),
        tensors=tensors,
        dims={name: size for name, size in known.items() if name not in ("B", "M", "N", "H", "Hkv", "G")},
    )
    return sizes, tuple(remarks)


def sizes_known(attention: Attention) -> tuple[str, ...]:
    """Lists the names that `example` takes sizes by: those that mean the same in every spec, then the spec's
    own. The rows of packed sequences are M and N.
    """
    axes = [axis for tensor in attention.inputs for axis in tensor.shape]
    own = {node.name: None for axis in axes for node in walk(axis) if isinstance(node, Dim)}
    rows = (tensor.size(role) for tensor, role in ((attention.q, Role.QUERY), (attention.k, Role.KEY)))
    packed = {node.name for size in rows for node in walk(size) if isinstance(node, Dim)}
    common = ("B", "M", "N", "H", "Hkv", "G")
    return (*common, *(name for name in own if name not in (*common, *packed)))


def _starts(total: int) -> Ints:
    shares = np.random.default_rng(7).exponential(1.0, _DOCUMENTS) + 0.1
    return np.append(0, (shares.cumsum()[:-1] / shares.sum() * total).astype(np.int64))


def _value(size: Any, known: Mapping[str, int], otherwise: int = 1) -> int:
    from attnc.expr.evaluate import Env, evaluate

    dims = {node.name: known.get(node.name, otherwise) for node in walk(size) if isinstance(node, Dim)}
    return int(evaluate(size, Env(dims=dims)))


def least(plan: Plan, visibility: Visibility) -> npt.NDArray[np.int64]:
    """Returns bytes of k and v that the same owners cannot do without, [source, destination]: rows looked at
    one by one, and not by tile.
    """
    tiles = visibility.tiles(plan.sizes, 1)
    rank = plan.owner[tiles.row // plan.chunk]
    keys = plan.sizes.keys
    if tiles.seen is not None:
        needed = np.zeros((plan.ranks, -(-keys // BLOCK)), np.bool_)
        needed[rank[tiles.seen[0]], tiles.seen[1]] = True
        needed = np.repeat(needed, BLOCK, axis=1)[:, :keys]
    else:
        some = tiles.lo < tiles.hi
        change = np.zeros((plan.ranks, keys + 1), np.int64)
        np.add.at(change, (rank[some], tiles.lo[some]), 1)
        np.add.at(change, (rank[some], tiles.hi[some]), -1)
        needed = change.cumsum(axis=1)[:, :keys] > 0
    owner = np.repeat(plan.key_owner, BLOCK)[:keys]
    found = np.zeros((plan.ranks, plan.ranks), np.int64)
    for rank_ in range(plan.ranks):
        found[:, rank_] = np.bincount(owner[needed[rank_]], minlength=plan.ranks)
    np.fill_diagonal(found, 0)
    widths = plan.widths
    return found * (plan.sizes.batch * plan.sizes.kv_heads * (widths.d + widths.dv) * widths.bytes)


def as_dict(plan: Plan, visibility: Visibility, remarks: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "ranks": plan.ranks,
        "queries": plan.sizes.queries,
        "keys": plan.sizes.keys,
        "heads": [plan.sizes.heads, plan.sizes.kv_heads],
        "example": list(remarks),
        "chunk": plan.chunk,
        "owner": plan.owner.tolist(),
        "imbalance": plan.imbalance,
        "work": plan.load.tolist(),
        "bytes": plan.bytes_moved.tolist(),
        "least_bytes": least(plan, visibility).tolist(),
        "chosen": plan.chosen.strategy,
        "stages": plan.chosen.groups,
        "hash": plan.hash.hex(),
        "strategies": [
            {
                "strategy": e.strategy,
                "owners": e.owners,
                "ways": e.ways,
                "groups": e.groups,
                "bytes": e.bytes,
                "compute_s": e.compute,
                "exchange_s": e.exchange,
                "exposed_s": e.exposed,
                "total_s": None if e.refusal else e.total,
                "refusal": e.refusal,
            }
            for e in plan.estimates
        ],
    }


def as_text(plan: Plan, visibility: Visibility, remarks: tuple[str, ...] = ()) -> str:
    return "\n".join(_lines(plan, visibility, remarks))


def _lines(plan: Plan, visibility: Visibility, remarks: tuple[str, ...]) -> Iterator[str]:
    sizes, chosen = plan.sizes, plan.chosen
    name = visibility.attention.name
    batch = "" if sizes.ends_q is not None else f", batch {sizes.batch}"
    yield (
        f"{name} on {plan.ranks} ranks: {sizes.queries} queries, {sizes.keys} keys{batch}, "
        f"{sizes.heads} heads over {sizes.kv_heads} K/V heads"
    )
    if remarks:
        yield f"example: {', '.join(remarks)}"
    yield ""
    where = "of the same tokens" if plan.tied else "in runs of their own"
    yield f"chunks of {plan.chunk} rows, {chosen.owners}; keys {where}"
    yield from _owners(plan)
    yield f"imbalance {plan.imbalance:.3f} (work of the busiest rank over the mean)"
    yield ""
    yield from _matrix(plan, least(plan, visibility))
    yield ""
    yield from _strategies(plan.estimates, chosen)
    yield ""
    yield from _stages(plan)
    yield ""
    yield from _picture(plan)


def _owners(plan: Plan) -> Iterator[str]:
    total = plan.load.sum() or 1.0
    for rank in range(plan.ranks):
        rows = plan.owned_rows(rank)
        share = 100 * plan.load[rank] / total
        yield f"  rank {rank}: {len(rows):8d} rows, {share:5.1f} % of the work: {_runs(rows)}"


def _runs(rows: Ints, most: int = 6) -> str:
    if not len(rows):
        return "none"
    breaks = np.flatnonzero(np.diff(rows) != 1)
    first, last = rows[np.append(0, breaks + 1)], rows[np.append(breaks, len(rows) - 1)]
    runs = [f"{a}-{b}" for a, b in zip(first[:most].tolist(), last[:most].tolist(), strict=True)]
    return ", ".join(runs) + (f", ... ({len(first)} runs)" if len(first) > most else "")


def _matrix(plan: Plan, minimum: npt.NDArray[np.int64]) -> Iterator[str]:
    moved = plan.bytes_moved
    total, smallest = int(moved.sum()), int(minimum.sum())
    ratio = f", {total / smallest:.2f} times that" if smallest else ""
    yield (
        f"moved by '{plan.chosen.strategy}': {_megabytes(total)} a forward; "
        f"keys and values that the same owners cannot do without: {_megabytes(smallest)}{ratio}"
    )
    yield "  from \\ to" + "".join(f"{f'rank {rank}':>20}" for rank in range(plan.ranks))
    for source in range(plan.ranks):
        cells = (
            "-" if source == to else f"{_megabytes(int(moved[source, to]))} / {_megabytes(int(least_))}"
            for to, least_ in enumerate(minimum[source])
        )
        yield f"  rank {source:<5}" + "".join(f"{cell:>20}" for cell in cells)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count else "0"


_MEANING = {
    "need": "only keys that a rank's rows see move to it",
    "gather": "all keys move to all ranks",
    "heads": "all rows of some heads meet on one rank",
    "mixed": "heads within groups of ranks, keys between them",
}


def _strategies(estimates: tuple[TimeEstimate, ...], chosen: TimeEstimate) -> Iterator[str]:
    yield "strategy     total   kernels  exchange   exposed     moved"
    for e in sorted(estimates, key=lambda e: (bool(e.refusal), e.total)):
        mark = "*" if e.strategy == chosen.strategy else " "
        if e.refusal:
            yield f"{mark} {e.strategy:8} not possible: {e.refusal}"
            continue
        times = "".join(f"{1e3 * x:7.2f} ms" for x in (e.total, e.compute, e.exchange, e.exposed))
        yield f"{mark} {e.strategy:8}{times}{_megabytes(e.bytes):>10}  {_MEANING[e.strategy]}"
    others = [e for e in estimates if e.strategy != chosen.strategy and not e.refusal]
    if others:
        second = min(others, key=lambda e: e.total)
        less = 100 * (1 - chosen.total / second.total) if second.total else 0.0
        yield f"chosen: {chosen.strategy}, the shortest estimate, {less:.1f} % less than '{second.strategy}'"


def _stages(plan: Plan) -> Iterator[str]:
    chosen, sizes = plan.chosen, plan.sizes
    width = sizes.kv_heads // (chosen.ways * chosen.groups)
    yield (
        f"stages: {chosen.groups}, each with {width} K/V heads of a rank; the exchange of one runs beside "
        "the kernel of the one before"
    )
    for rank in range(plan.ranks):
        parts = [
            f"{len(part.rows)} queries against keys {part.lo}-{part.hi - 1}{_left_out(part)}"
            f"{', at once' * part.ready}"
            for part in plan.parts(rank)
        ]
        yield f"  rank {rank}: {'; '.join(parts) or 'nothing'}"


def _left_out(part: RowGroup) -> str:
    missing = part.hi - part.lo - len(part.keys)
    return f" without {missing} that none of them sees" if missing else ""


def _picture(plan: Plan) -> Iterator[str]:
    count = len(plan.owner)
    step = max(-(-count // 32), 1)
    columns = min(_COLUMNS, plan.needed.shape[1])
    if not columns:
        return
    yield "keys that the rows of each rank see: # its own, o moved to it, . not needed"
    edges = np.linspace(0, plan.needed.shape[1], columns + 1).astype(np.int64)
    for rank in range(plan.ranks):
        line = ""
        for lo, hi in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            seen, own = plan.needed[rank, lo:hi], plan.key_owner[lo:hi] == rank
            line += "#" if (seen & own).any() else "o" if seen.any() else "."
        yield f"  rank {rank}  {line}"
    owners = "".join("0123456789abcdefghijklmnopqrstuvwxyz"[rank % 36] for rank in plan.owner[::step])
    which = "each chunk" if step == 1 else f"one chunk in {step}"
    yield f"  owner of {which} of queries: {owners}"
