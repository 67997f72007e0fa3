"""A small array of cases that meets the boundaries of a plan, and pairs of all that varies.

The array is made greedily: of some dozens of random candidates, the next case is the one that meets most that
none before it has met, for what it costs (the method of AETG: Cohen, Dalal, Fredman, Patton, IEEE TSE 23(7),
1997). It is the same on every run. Long sequences that are cheap all the same follow, and nothing at all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from attnc.expr.nodes import Dim, Index, walk
from attnc.model.dtypes import DType
from attnc.plan.ir import Decode, pack_of
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.kept_blocks import wants_list
from attnc.plan.lists import listing_of
from attnc.verify.case import Case, TensorLayout
from attnc.verify.cover import GROUPS, Coverage, Space
from attnc.verify.covering_calls import FEW, SEQUENCES, cases_of_calls, full, with_lists
from attnc.verify.inputs_read import find_sinks, lists
from attnc.verify.strategies import MOST_WORDS, Limits, free_dims, size, word_dims

#: Candidates among which each case is chosen.
_CANDIDATES = 40
#: Numbers of a mask that may be widths of windows, of which there are cases of their own.
_WINDOWS = 2
#: Steps of a tile that a case costs beside those that it computes.
_OVERHEAD = 6.0
#: Numbers that hide errors, for the bound is wide or the result nothing: once each is enough.
FORGIVING = ("very_negative", "huge", "zero_q", "constant", "denormal", "zeros", "ones")
#: Cases of the array that come before those at the edges; a run of fewer has no others.
_FIRST = 4
#: The seed of the plain case, and rows and keys that it has beside whole tiles.
_PLAIN, _BESIDE = 1, 5
#: Rows of a case of many keys: all that a thread has of a fragment, 8 apart, and some more.
_ROWS = 20
#: What is drawn when the level of a factor does not matter, more often than what is not.
_ORDINARY = ("plain", "drawn", "none", "random")


def covering_cases(space: Space, limits: Limits, count: int) -> Iterator[Case]:
    """Yields this many covering cases, and a plain one in front of the last of the first. Empty, far and thin
    cases follow these, so that a run that is cut short has met them too.
    """
    coverage = Coverage(space)
    for number in range(count):
        if number == _FIRST - 1:
            yield plain_case(space)
        if number == _FIRST:
            yield from cases_beside_the_array(space, limits)
        rng = random.Random(number)
        drawn = [_candidate(coverage, limits, rng, number) for _ in range(_CANDIDATES)]
        best = max(drawn, key=lambda case: _worth(coverage, limits, case))
        coverage.note(best)
        yield best
    if count == _FIRST:
        yield from cases_beside_the_array(space, limits)


def plain_case(space: Space) -> Case:
    """Returns a case of what calls are mostly like: several tiles of queries, each of which walks over
    several tiles of keys, ordinary numbers, and tensors that lie as they are declared. Of the array few cases
    have that, for each meets many levels.
    """
    attention, names, words = space.attention, free_dims(space.attention), word_dims(space.attention)
    extras = "whole" if lists(attention) else "drawn"
    case = Case(dims={}, seed=_PLAIN, config=_in_two_splits(space), lengths=full(space), extras=extras)
    shape, *others = (made for made in space.configs_of(case).values() if hasattr(made, "BLOCK_N"))
    walks = 2 * max(getattr(shape, "splits", 0), 1) * shape.BLOCK_N
    keys = max((walks, *(made.BLOCK_N for made in others))) + _BESIDE
    sizes = {"B": 2, "H": 2, "Hkv": 1, "G": 2, "M": 1}
    dims = {name: MOST_WORDS if name in words else sizes.get(name, keys) for name in names}
    pack = None if space.plan is None else pack_of(space.plan.kernel)
    rows = shape.BLOCK_M
    if pack is not None:  # a tile has rows of all heads that share keys, and where it is alone of one query
        rows = 0 if pack.alone else rows * size(attention.heads_kv, dims) // size(attention.heads_q, dims)
    rows = max((rows, *(made.BLOCK_M for made in others))) + _BESIDE
    if "M" in dims:  # packed keys may have the lengths of the queries
        dims["M"] = rows if "N" in dims else max(rows, keys)
    return with_lists(space, replace(case, dims=dims), keys)


def cases_beside_the_array(space: Space, limits: Limits) -> Iterator[Case]:
    """Yields the cases at the edges and the thin ones, with lists for all queries and of several entries (of
    short lists most name nothing), and one with lists for some.
    """
    for case in (*edges(space), *thin_cases(space, limits)):
        yield with_lists(space, case, 0)
    yield from _rows_without_a_list(space, limits)
    yield from cases_of_calls(space, limits)


def _worth(coverage: Coverage, limits: Limits, case: Case) -> float:
    space = coverage.space
    looked_for = (boundary for boundary in space.boundaries if boundary.reach != "own")
    points = tuple(space.facts(case).points(looked_for))
    cost = limits.cost(case.dims, case.config)
    return coverage.gain(space.levels(case), points) / math.sqrt(_OVERHEAD + cost)


def _candidate(coverage: Coverage, limits: Limits, rng: random.Random, number: int) -> Case:
    space = coverage.space
    levels = {name: _pick(coverage, name, rng) for name in space.factors}
    config = int(levels.get("config", space.usable[0]))
    special = levels.get("special", "none") if rng.random() < 0.3 else "none"
    case = Case(
        dims={},
        seed=number + len(space.configs) * rng.randrange(4),
        logits=levels.get("logits", "random"),
        values=levels.get("values", "random"),
        special=special,
        layouts=_layouts(space, levels),
        config=config,
        lengths=levels.get("lengths", "drawn"),
        extras=levels.get("extras", "drawn"),
        call=levels.get("call", "out"),
    )
    return replace(case, dims=_dims(coverage, case, levels, limits, rng))


def _pick(coverage: Coverage, name: str, rng: random.Random) -> str:
    choices = coverage.space.factors[name]
    unmet = [level for level in choices if (name, level) not in coverage.levels]
    if unmet and rng.random() < 0.6:
        return rng.choice(unmet)
    ordinary = [level for level in choices if level in _ORDINARY]
    if ordinary and rng.random() < 0.25:
        return ordinary[0]
    return rng.choice([level for level in choices if level not in FORGIVING])


def _layouts(space: Space, levels: Mapping[str, str]) -> dict[str, TensorLayout]:
    """Gives the layout of every tensor whose level is not contiguous; results that the module makes have
    none.
    """
    own = {tensor.name for tensor in space.attention.outputs} if levels.get("call") == "new" else set()
    found = {}
    for tensor in space.tensors:
        layout = space.layout(tensor, levels.get(f"layout of {tensor.name}", "plain"))
        if layout is not None and tensor.name not in own:
            found[tensor.name] = layout
    return found


def _dims(
    coverage: Coverage, case: Case, levels: Mapping[str, str], limits: Limits, rng: random.Random
) -> dict[str, int]:
    space = coverage.space
    config = space.configs[case.config]
    names, words = free_dims(space.attention), word_dims(space.attention)
    wanted = {"B": (1, 2, 3), "H": (1, 2, 5), "Hkv": (1, 2, 2)}
    dims: dict[str, int] = {}
    for name in names:
        if name in wanted:
            more = levels.get(name) == "more"
            dims[name] = rng.choice(wanted[name][1:]) if more else 1
        elif name == "G":
            level = levels.get("G")
            fitting = [n for n in GROUPS if level == ("1" if n == 1 else "odd" if n % 2 else "even")]
            dims[name] = rng.choice(fitting or GROUPS)
        elif name not in ("M", "N"):
            dims[name] = rng.randrange(1, MOST_WORDS + 1 if name in words else 2 * config.BLOCK_N)
    for name, tile, quantity in (("M", config.BLOCK_M, "rows"), ("N", config.BLOCK_N, "keys")):
        if name not in names:
            continue
        points = _unmet(coverage, case, quantity, limits)
        if quantity == "rows" and "G" in dims:
            group = dims["G"]
            points += [p // group for p in _unmet(coverage, case, "packed", limits) if p % group == 0]
        if points and rng.random() < 0.75:
            dims[name] = rng.choice(points)
        else:
            dims[name] = min(_length(levels.get(name, "tile + 1"), tile, rng), limits.longest)
    if {"M", "N"} <= dims.keys():
        match levels.get("M to N"):
            case "M = N":
                dims["M"] = dims["N"]
            case "M < N" if dims["M"] > dims["N"]:
                dims["M"], dims["N"] = dims["N"], dims["M"]
            case "M > N" if dims["M"] < dims["N"]:
                dims["M"], dims["N"] = dims["N"], dims["M"]
    heads = _unmet(coverage, case, "heads", limits)
    if heads and rng.random() < 0.3:
        dims |= _heads(dims, rng.choice(heads))
    for name in ("G", "H", "B", "Hkv", "M", "N"):
        while name in dims and dims[name] > 1 and limits.cost(dims, case.config) > limits.work:
            dims[name] = dims[name] // 2
    return dims


def _heads(dims: Mapping[str, int], heads: int) -> dict[str, int]:
    if "H" in dims:
        return {**dict.fromkeys({"B"} & dims.keys(), 1), "H": heads}
    if "Hkv" in dims:
        return {**dict.fromkeys({"B", "G"} & dims.keys(), 1), "Hkv": heads}
    return {"G": heads} if "G" in dims else {}


def _unmet(coverage: Coverage, case: Case, quantity: str, limits: Limits) -> list[int]:
    configs = coverage.space.configs_of(case)
    return [
        point
        for boundary in coverage.space.boundaries
        if boundary.quantity == quantity and boundary.reach == "default" and boundary.is_in_force(configs)
        for point in boundary.points
        if 0 < point <= limits.longest and (boundary, point) not in coverage.points
    ]


def _length(level: str, tile: int, rng: random.Random) -> int:
    match level:
        case "1":
            return 1
        case "short":
            return rng.randrange(2, max(tile - 1, 3))
        case "long":
            return rng.randrange(tile + 2, 3 * tile)
        case _:
            near = {"tile - 1": tile - 1, "tile": tile, "tile + 1": tile + 1, "2 tiles": 2 * tile}
            return near[level]


def edges(space: Space) -> Iterator[Case]:
    """Yields cases of tensors that span gigabytes; of nothing: no queries, no keys, no sequences; and of
    several groups of heads.
    """
    names = free_dims(space.attention)
    few = {name: {"M": 5, "N": 7}.get(name, 1) for name in names}
    joining = [n for n in space.usable if getattr(space.configs[n], "splits", 0) > 1]
    for case in space.far_cases.values():
        yield replace(case, config=space.usable[0])
        if joining:  # what splits find is put together by another kernel
            yield replace(case, config=joining[0])
    for change in ({"M": 0}, {"N": 0}, {"B": 0}):
        if change.keys() <= few.keys():
            yield Case(dims={**few, **change})
    groups = {"Hkv": 2, "G": 3}  # with fewer of either h // G is h % Hkv, or h
    if groups.keys() <= few.keys():
        yield Case(dims={**few, **groups}, seed=1, lengths=full(space))
    yield _at_halves(space)


def _at_halves(space: Space) -> Case:
    """Returns a case whose tensors, and every second row, begin 8 bytes behind a multiple of 16."""
    shape = space.configs[space.usable[-1]]
    # Each query of a list, or of a decode step, has programs of its own: a few are enough.
    alone = hasattr(shape, "splits") or listing_of(space.attention) is not None
    sizes = {"B": 2, "H": 2, "Hkv": 2, "G": 2, "M": 5 if alone else shape.BLOCK_M + 3, "N": shape.BLOCK_N + 5}
    layouts = {}
    for tensor in space.tensors:
        half, rank = 8 // DType(tensor.dtype).bytes, len(tensor.shape)
        gaps = (*(0,) * (rank - 1), half if rank > 1 else 0)
        layouts[tensor.name] = TensorLayout(order=tuple(range(rank)), gaps=gaps, offset=half)
    dims = {name: sizes.get(name, 3) for name in free_dims(space.attention)}
    return Case(dims=dims, seed=2, layouts=layouts, config=space.usable[-1], lengths=full(space))


def thin_cases(space: Space, limits: Limits) -> Iterator[Case]:
    """Yields the point above each boundary that only thin cases reach: one head, and hardly a key for a row,
    or hardly a row; of tiles, one for each head, with keys for as many steps as a pipeline holds, and for
    one. Scores that rise where a maximum is lazy; a tile whose last query is the first to see a tile of keys,
    and tiles of keys that are seen but for one; gradients with three tiles each way, whose sum tells in which
    order they came. Of sorted inputs several rows, in which a search ends at other tiles.
    """
    names, config = free_dims(space.attention), space.usable[-1]
    extras = "many" if "many" in space.factors.get("extras", ()) else "drawn"
    many = [n for n in space.usable if getattr(space.configs[n], "splits", 0) > 16]
    for number in many:  # every split has a tile, the last one a key, or what outweighs all the others
        splits, tile = space.configs[number].splits, space.configs[number].BLOCK_N
        for logits, n in (("random", (splits - 1) * tile + 1), ("last", splits * tile)):
            dims = {name: n if name == "N" else 1 for name in names}
            yield Case(dims=dims, seed=5, config=number, logits=logits, lengths=full(space))
    if many:  # or any other split does, for some row
        shape, rows = space.configs[many[-1]], "M" if "M" in names else "G"
        sizes = {rows: _ROWS, "N": shape.splits * shape.BLOCK_N}
        dims = {name: sizes.get(name, 1) for name in names}
        if limits.cost(dims, many[-1]) <= limits.most:
            yield Case(dims=dims, seed=5, config=many[-1], logits="own_key", lengths=full(space))
    if many:  # every split takes each stage of its pipeline twice
        number = _in_two_splits(space)
        shape = space.configs[number]
        stages = getattr(shape, "STAGES", 0) or getattr(shape, "num_stages", 0) or 1
        dims = {
            name: 2 * max(shape.splits, 1) * stages * shape.BLOCK_N if name == "N" else 1 for name in names
        }
        for seed in (1, 2):
            yield Case(dims=dims, seed=seed, config=number, lengths=full(space))
    if _guesses(space):  # a sum of exponentials that a float holds, times values that it does not
        dims = {name: {"M": 5, "N": space.configs[config].BLOCK_N + 1}.get(name, 1) for name in names}
        yield Case(dims=dims, seed=1, config=config, logits="spike", values="vast", lengths=full(space))
    if find_sinks(space.attention):  # of rows that see no key they alone are the sum, far from any guess too
        dims = {name: {"M": _ROWS, "N": 3, "H": 24, "Hkv": 24}.get(name, 1) for name in names}
        yield Case(dims=dims, seed=1, config=config, extras="far", lengths=full(space))
    if _is_lazy(space):
        dims = {name: space.configs[config].BLOCK_N + 1 if name == "N" else 1 for name in names}
        for logits in ("large", "huge"):
            yield Case(dims=dims, seed=1, config=config, logits=logits, lengths=full(space))
        sizes = {"M": 40, "N": 3 * space.configs[config].BLOCK_N}
        # rows of infinite sums are computed again, and stored alone, wherever their heads lie
        several = {"B": 2, "H": 2, "Hkv": 2}
        for logits, beside in (("bump", {}), ("early_bump", several)):
            dims = {name: {**sizes, **beside}.get(name, 1) for name in names}
            yield Case(dims=dims, seed=1, config=config, logits=logits, values="ends", lengths=full(space))
    if space.backward and {"M", "N"} <= set(names):
        shape = space.configs[config]
        sizes = {"B": 3, "M": 2 * shape.BLOCK_M + 12, "N": 2 * shape.BLOCK_N + 12}
        dims = {name: sizes.get(name, 1) for name in names}
        if limits.includes_gradients(dims, config):  # asked for twice, by this seed
            yield Case(dims=dims, seed=6, config=config, lengths=full(space))
    if {"M", "N"} <= set(names) and Index("q_pos") in walk(space.attention.mask):
        dims = {**dict.fromkeys(names, 1), **_diagonal(space, config)}
        yield Case(dims={name: dims[name] for name in names}, seed=4, config=config, lengths=full(space))
        plain = "zero" if "zero" in space.factors.get("extras", ()) else "drawn"  # prefixes that add nothing
        for sizes in _cut_tiles(space, config):
            dims = {name: sizes.get(name, 1) for name in names}
            if limits.cost(dims, config) <= limits.most:
                yield Case(dims=dims, seed=4, config=config, lengths=full(space), extras=plain)
    for boundary in space.boundaries:
        if boundary.reach != "thin":
            continue
        size, is_searched = boundary.value + 1, boundary.quantity == "entries"
        match boundary.quantity:
            case "rows":
                longest, change = "M", {"M": size, "N": 3}
            case "keys" | "entries":
                longest, change = "N", {"M": _ROWS, "N": size}
            case "tiles":
                longest = next((name for name in ("B", "Hkv", "H", "G") if name in names), "B")
                change = {longest: size, "M": 1, "N": 3 * space.configs[config].BLOCK_N}
            case _:
                longest, change = "B", {"B": size, "M": 1, "N": 2}
        dims = {name: change.get(name, 1) for name in names}
        if longest not in names:
            continue
        found = [Case(dims=dims, lengths=full(space) if longest == "N" else "drawn")]
        if boundary.quantity == "keys":
            found[0] = replace(found[0], logits="climbing", values="ends")
        if boundary.quantity == "keys" and space.attention.grads and "M" in dims:
            wide = {**dims, "M": 100}  # sums of dq, which tiles of one sign add to
            if limits.includes_gradients(wide, config):
                found.append(replace(found[0], dims=wide, logits="alternating", values="cancelling"))
        if boundary.quantity == "tiles":  # of one step each: what is not given back is missing later
            found.append(Case(dims={**dims, "N": 3} if "N" in dims else dims, seed=4, lengths=full(space)))
        if is_searched:  # one more asks for another round at few places, three times as many at most
            found.append(Case(dims={**dims, "N": 3 * boundary.value}))
        if (
            boundary.quantity == "sequences"
        ):  # numbers that have one bit more, of sequences none of which is empty
            found.append(Case(dims={**dims, "B": size + 1}, lengths=full(space)))
        for case in found:
            if limits.cost(case.dims, config) <= limits.most:
                yield replace(case, seed=4, config=config, extras=extras)
    yield from listed_cases(space)
    yield from _kept_cases(space, limits)
    yield from _draw_inverted(space, limits, config)
    yield from _make_many_heads(space, limits, config)
    if any(tensor.is_sorted and len(tensor.shape) > 1 for tensor in space.attention.extras):
        sizes = {"B": 3, "H": 2, "Hkv": 2, "M": 3, "N": 4 * space.configs[config].BLOCK_N + 1}
        dims = {name: sizes.get(name, 1) for name in names}
        for seed in (7, 8):
            yield Case(dims=dims, seed=seed, config=config, lengths=full(space))


#: Entries, or blocks, that a program looks at together (`templates/triton/_lists.py.jinja`); keys at most.
_LISTED, _LONGEST_LISTED = 128, 4160
#: Keys of more heads than a tile has, so few that gradients are asked for if need be.
_KEYS_OF_MANY_HEADS = (40, 17, 5)
#: Tiles whose rows are looked up together, at most (`templates/sm90/_pages.cu.jinja`).
_LOOKED_UP = 8
#: Blocks of queries that it inverts together there, and those that have bits of one word on Hopper.
_INVERTED = (512, 32)


def listed_cases(space: Space) -> Iterator[Case]:
    """Yields cases with more entries of a list than a program looks at together; most of them name a key that
    the query may see.
    """
    names, config = free_dims(space.attention), space.usable[-1]
    for node in lists(space.attention).values():
        match node.extents[-1]:
            case Dim(name=entries) if {"M", "N"} <= set(names):
                sizes = {"M": 3, "N": min(_LISTED * node.keys, _LONGEST_LISTED) + 5, entries: _LISTED + 70}
                dims = {name: sizes.get(name, 1) for name in names}
                for seed in range(9, 13):  # of lists in several styles
                    yield Case(dims=dims, seed=seed, config=config, lengths=full(space))
                if node.keys == 1:
                    longer = {
                        **dims,
                        "N": 2 * _LISTED + 5,
                        entries: 2 * _LISTED + 70,
                    }  # than there are threads
                    for seed in (10, 12):
                        yield Case(dims=longer, seed=seed, config=config, lengths=full(space))
                    yield _make_many_tokens(space, entries)


def _rows_without_a_list(space: Space, limits: Limits) -> Iterator[Case]:
    """Yields a case with a list less than there are blocks of queries: those of the last see nothing."""
    listing, names, config = listing_of(space.attention), free_dims(space.attention), space.usable[-1]
    if listing is None or listing.row_axis is None or not {"M", "N"} <= set(names):
        return
    match listing.condition.extents[listing.row_axis]:
        case Dim(name=count) if count in names and count not in SEQUENCES:
            sizes = {"M": listing.rows + 1, "N": listing.keys + 5, count: 1}
            dims = {name: sizes.get(name, FEW if name not in SEQUENCES else 1) for name in names}
            if limits.cost(dims, config) <= limits.most:
                yield Case(dims=dims, seed=4, config=config, lengths=full(space), extras="whole")


def _kept_cases(space: Space, limits: Limits) -> Iterator[Case]:
    """Yields cases in which a mask of data keeps some blocks as a whole, others in part, and others not; and
    one in which the last queries alone keep a block.
    """
    names, config = free_dims(space.attention), space.usable[-1]
    if not wants_list(space.attention) or not {"M", "N"} <= set(names):
        return
    keys = _keys_at_end(space)
    rows = _KEPT_KEYS if keys == _KEPT_KEYS else keys // 2
    dims = {name: {"M": rows, "N": keys}.get(name, 1) for name in names}
    if limits.cost(dims, config) <= limits.most:
        for seed in (1, 2, 3):
            yield Case(dims=dims, seed=seed, config=config, lengths=full(space), extras="runs")
    if (blocks := space.plan.lists if space.plan else None) is not None and blocks.kept is not None:
        late = {**dims, "M": blocks.rows, "N": 2 * blocks.rows}
        yield Case(dims=late, seed=1, config=config, lengths=full(space), extras="late")


#: Keys of cases beside masks of data; the most where a number of the mask cuts a block further on; and
#: keys of such a block, at most.
_KEPT_KEYS, _MOST_KEPT, _KEPT_BLOCK = 400, 1200, 512


def _keys_at_end(space: Space) -> int:
    """Returns so many keys that the block is whole which a number of the mask cuts, the largest in reach."""
    numbers = (x.value for x in space.boundaries if x.of_mask and _KEPT_KEYS <= x.value < _MOST_KEPT)
    return max((-(-number // _KEPT_BLOCK) * _KEPT_BLOCK for number in numbers), default=_KEPT_KEYS)


def _draw_inverted(space: Space, limits: Limits, config: int) -> Iterator[Case]:
    listing, names = listing_of(space.attention), free_dims(space.attention)
    if listing is None or listing.row_axis is None or not space.attention.grads:
        return
    if not {"M", "N"} <= set(names):
        return
    *_, entries = extents = listing.condition.extents
    for together, keys in product(
        _INVERTED, (listing.keys + 3, min(listing.keys, space.configs[config].BLOCK_N))
    ):
        sizes = {"M": together * listing.rows + 1, "N": keys}
        for extent, most in ((extents[listing.row_axis], together + 1), (entries, 3)):
            if isinstance(extent, Dim):
                sizes.setdefault(extent.name, most)
        dims = {name: sizes.get(name, 1) for name in names}
        if limits.includes_gradients(dims, config):
            for seed in (2, 4):
                yield Case(dims=dims, seed=seed, config=config, lengths=full(space))
            return


def _in_two_splits(space: Space) -> int:
    return min(space.usable, key=lambda n: abs(getattr(space.configs[n], "splits", 0) - 2))


def _make_many_tokens(space: Space, entries: str) -> Case:
    """Returns a case of a list of tokens in which every split has more than twice the tiles that are looked
    up together. entries: the name of its length.
    """
    number = _in_two_splits(space)
    config = space.configs[number]
    count = max(getattr(config, "splits", 0), 1) * (2 * _LOOKED_UP + 1) * config.BLOCK_N + 5
    sizes = {"N": count, entries: count}
    dims = {name: sizes.get(name, 1) for name in free_dims(space.attention)}
    return Case(dims=dims, seed=10, config=number, lengths=full(space))


def _make_many_heads(space: Space, limits: Limits, config: int) -> Iterator[Case]:
    names = free_dims(space.attention)
    heads = next((name for name in ("G", "H") if name in names), None)
    pack = None if space.plan is None else pack_of(space.plan.kernel)
    if space.plan is None or pack is None or not pack.alone or heads is None:
        return
    tiles = [
        one.tile_q * (2 if isinstance(kernel, BackwardKernel) and kernel.adds else 1)  # heads of its products
        for kernel in space.plan.kernels.values()
        for one in kernel.configs
    ]
    sizes = {"B": 1, "Hkv": 1, "M": 2, heads: max(tiles) + 1}
    of_keys = [{name: {**sizes, "N": keys}.get(name, 3) for name in names} for keys in _KEYS_OF_MANY_HEADS]
    least = [dims for dims in of_keys if limits.includes_gradients(dims, config)]
    dims = next(iter(least if space.attention.grads and least else of_keys))
    yield Case(dims=dims, seed=4, config=config, lengths=full(space))  # whose lists name some keys


def _diagonal(space: Space, config: int) -> dict[str, int]:
    """Returns sizes that put the last query of the first tile at the first key of a tile, with some heads
    alone in the tile where possible: those of one group, of two.
    """
    shape = space.configs[config]
    packs = space.plan is not None and pack_of(space.plan.kernel) is not None
    group, groups = (5, 2) if packs else (1, 1)
    last = (shape.BLOCK_M - 1) // group
    return {"M": last + 2, "N": shape.BLOCK_N + 2, "G": group, "Hkv": groups}


def _cut_tiles(space: Space, config: int) -> Iterator[dict[str, int]]:
    """Yields sizes at which all queries see a tile of keys but for one: its last key, which the first query
    does not see; and for numbers of the mask, as for windows of so many keys, its first key, which the last
    query does not see.
    """
    rows, tile = space.configs[config].BLOCK_M, space.configs[config].BLOCK_N
    yield {"M": rows + 3, "N": rows + tile + 1}  # more than a tile: a gradient's may be smaller
    numbers = [boundary.value for boundary in space.boundaries if boundary.of_mask]
    for keys in numbers[:_WINDOWS]:
        for beyond in (1, 2):  # the number may be the first key of a window, or the last one before it
            yield {"M": 3, "N": keys + tile + beyond}


def _guesses(space: Space) -> bool:
    kernel = None if space.plan is None else space.plan.kernel
    return isinstance(kernel, Decode) and kernel.unified is not None and kernel.unified.fallback


def _is_lazy(space: Space) -> bool:
    softmax = None if space.plan is None else space.plan.kernel.softmax
    return softmax is not None and bool(softmax.headroom or softmax.rescale == "lazy")
