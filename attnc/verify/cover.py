"""What cases meet: the boundaries of a plan, and pairs of what varies from case to case.

A case is a choice of one *level* for every *factor*: how each tensor lies in memory, how long sequences are
beside a tile, which styles of numbers, which config. Most bugs show with one or two particular levels (Kuhn,
Wallace, Gallo, IEEE TSE 30(6), 2004), hence pairs; of styles of numbers each is asked for, but no pair.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, TypeAlias

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Expr, Load, Search, walk
from attnc.model.attention import Attention
from attnc.model.tensors import Dense, Role, Tensor
from attnc.plan import ir
from attnc.support.devices import Gpu
from attnc.verify.boundaries import PROCESSORS, Boundary, CaseFacts, boundaries_of
from attnc.verify.case import Case, TensorLayout
from attnc.verify.data import ORDINARY, ORDINARY_VALUES, SPECIALS, styles_for
from attnc.verify.far import AXES, far_case
from attnc.verify.problem import draw_extras
from attnc.verify.rounds import IN_ROUNDS, has_rounds, rounds_of
from attnc.verify.sections import Sections, Walk, sections_of
from attnc.verify.storage import draw_lengths, lengths_for, memory_dims
from attnc.verify.strategies import CALLS, all_dims, free_dims, locates_rows, size

Level: TypeAlias = tuple[str, str]
Pair: TypeAlias = tuple[Level, Level]
#: A size and the size that it is compared with.
Point: TypeAlias = tuple[Boundary, int]
#: Factors whose levels are not paired: what numbers there are.
_NUMBERS = frozenset({"logits", "values", "special"})
#: How many rows or keys there are beside a tile.
LENGTHS_BY_TILES = ("1", "short", "tile - 1", "tile", "tile + 1", "long", "2 tiles")
GROUPS = (1, 2, 3, 5, 7, 8)
#: What the boundary of an odd stride names as its axes.
PAGES = "pages"
#: What the boundary names as its axes beyond which groups of threads join the splits of a row.
GROUPS_JOIN = "joins by groups"
#: Heads of which some are in other sections than the first.
_MANY = 33


def in_sections(walk: Walk) -> str:
    """Returns what the boundary of a walk over sections of heads names as its axes."""
    return f"heads of {walk}"


@dataclass(frozen=True)
class Space:
    """All that cases of a module can be: its factors with their levels, and the boundaries of its plan.

    configs, backward: those of the module, by number and for each kernel of the backward; usable: numbers of
    the configs that cases are drawn from; processors: of the device; call: of the module, where it is known.
    """

    attention: Attention
    configs: tuple[Any, ...]
    usable: tuple[int, ...]
    backward: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    plan: ir.Module | None = None
    processors: int = PROCESSORS
    call: Any = None

    @cached_property
    def boundaries(self) -> tuple[Boundary, ...]:
        found = () if self.plan is None else boundaries_of(self.plan, self.processors)
        in_force = tuple(boundary for boundary in found if any(map(boundary.is_in_force, self._all_configs)))
        found_here = (*self._far, *self._odd, *self._in_sections, *self._joined_by_groups, *self._in_rounds)
        return (*in_force, *found_here) if in_force else ()

    @cached_property
    def _far(self) -> tuple[Boundary, ...]:
        """What no offset may be counted in: 32 bits, along each axis that tensors can be stretched along."""
        return tuple(
            Boundary(name=f"32 bits, along {axes}", quantity="offsets", value=1 << 31, axes=axes)
            for axes in self.far_cases
        )

    @cached_property
    def far_cases(self) -> Mapping[str, Case]:
        config = self.configs[self.usable[0]]
        found = ((axes, far_case(self.attention, self.tensors, axes, config)) for axes in AXES)
        return {axes: case for axes, case in found if case is not None}

    @property
    def _odd(self) -> Iterator[Boundary]:
        """Pages that begin at no multiple of 16 bytes, while rows of a page and the first page do: what a
        kernel copies follows from the strides of all axes.
        """
        if any(tensor.storage.is_paged for tensor in self.tensors):
            yield Boundary(name="pages at an odd stride", quantity="strides", value=1, axes=PAGES)

    @property
    def _joined_by_groups(self) -> Iterator[Boundary]:
        if self.many_rows:
            name = "rows whose splits groups of threads join"
            yield Boundary(
                name=name, quantity="rows", value=self.many_rows + 1, reach="own", axes=GROUPS_JOIN
            )

    @property
    def many_rows(self) -> int:
        """Rows of a call up to which a block joins the splits of each; 0 where it always does."""
        layout = None if self.plan is None else self.plan.kernel.layout
        return getattr(layout, "many_rows", 0) if getattr(layout, "few_splits", 0) else 0

    def joins_by_groups(self, config: Any) -> bool:
        """Returns whether a config has splits that groups of threads join, of many rows."""
        layout = None if self.plan is None else self.plan.kernel.layout
        fewest, most = getattr(layout, "some_splits", (0, 0))
        return fewest < getattr(config, "splits", 0) <= most

    @property
    def _in_sections(self) -> Iterator[Boundary]:
        for name in self.walks:
            said = f"a short section of heads of {name}"
            yield Boundary(name=said, quantity="sections", value=3, reach="own", axes=in_sections(name))

    @property
    def _in_rounds(self) -> Iterator[Boundary]:
        if has_rounds(self.call):
            yield Boundary(
                name="a last round of fewer queries", quantity="rounds", value=2, reach="own", axes=IN_ROUNDS
            )

    def ends_in_a_short_round(self, case: Case, memory: Mapping[str, int] | None = None) -> bool:
        """Returns whether the backward takes rounds of queries, the last of fewer. memory: see `sections`."""
        sizes = self._sizes_of_call(case, memory)
        found = rounds_of(self.call, self._gpu, sizes, self.configs_of(case)) if sizes else ()
        return any(rounds.end_short for rounds in found)

    @cached_property
    def walks(self) -> tuple[Walk, ...]:
        """Walks over heads in sections, without those over so few, whatever the case, that all are in one."""
        dims = {name: _MANY if name in ("B", "H", "Hkv", "G") else 3 for name in free_dims(self.attention)}
        found = self.sections(Case(dims=dims, config=self.usable[0], lengths="full"))
        return tuple(name for name, sections in found.items() if sections.heads >= _MANY)

    def walks_in_short_sections(self, case: Case, memory: Mapping[str, int] | None = None) -> set[Walk]:
        """Returns which walks over heads end with a short section. memory: as for `sections`."""
        return {name for name, found in self.sections(case, memory).items() if found.ends_short}

    def sections(self, case: Case, memory: Mapping[str, int] | None = None) -> dict[Walk, Sections]:
        """Returns how each walk over heads is in sections, none of an empty case. memory: all sizes of its
        tensors, where they are known.
        """
        sizes = self._sizes_of_call(case, memory)
        return dict(sections_of(self.call, self._gpu, sizes, self.configs_of(case))) if sizes else {}

    def _sizes_of_call(self, case: Case, memory: Mapping[str, int] | None) -> dict[str, int]:
        """Returns the sizes that a call knows; none of an empty case, and of a call that is not known."""
        attention = self.attention
        if self.call is None:
            return {}
        if memory is None:
            known = all_dims(attention, case.dims)
            memory = memory_dims(attention, known, draw_lengths(attention, known, case.seed, case.lengths))
        dims = all_dims(attention, memory)
        kv_heads = size(attention.heads_kv, dims)
        sizes = {"B": size(attention.batch, dims), **dims, "Hkv": kv_heads}
        if 0 in sizes.values():
            return {}
        sizes["G"] = sizes["H"] // kv_heads
        return sizes

    @property
    def _gpu(self) -> Gpu:
        found: Gpu = self.call.gpu_of(-1 if self.processors == PROCESSORS else 0)
        return found

    @property
    def _all_configs(self) -> tuple[dict[str, Any], ...]:
        forward = [{"forward": self.configs[number]} for number in self.usable]
        backward = [{name: config} for name, configs in self.backward.items() for config in configs]
        return (*forward, *backward)

    def configs_of(self, case: Case) -> dict[str, Any]:
        own = {"forward": self.configs[case.config]}
        return own | {
            name: configs[case.backward_config(len(configs))] for name, configs in self.backward.items()
        }

    @cached_property
    def points(self) -> frozenset[Point]:
        return frozenset((boundary, point) for boundary in self.boundaries for point in boundary.points)

    @cached_property
    def factors(self) -> dict[str, tuple[str, ...]]:
        names = free_dims(self.attention)
        found: dict[str, tuple[str, ...]] = {"config": tuple(map(str, self.usable))}
        for name in ("M", "N"):
            if name in names:
                found[name] = LENGTHS_BY_TILES
        if {"M", "N"} <= set(names):
            found["M to N"] = ("M < N", "M = N", "M > N")
        for name in ("B", "H", "Hkv"):
            if name in names:
                found[name] = ("1", "more")
        if "G" in names:
            found["G"] = ("1", "even", "odd")
        found["lengths"] = lengths_for(self.attention)
        found["extras"] = styles_for(self.attention)
        found["call"] = CALLS
        found |= {"logits": ORDINARY, "values": ORDINARY_VALUES, "special": tuple(SPECIALS)}
        for tensor in self.tensors:
            found[f"layout of {tensor.name}"] = self.layouts_for(tensor)
        return {name: levels for name, levels in found.items() if len(levels) > 1}

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        attention = self.attention
        found = [
            tensor
            for tensor in (*attention.inputs, *attention.outputs)
            if tensor.shape and not tensor.storage.is_part
        ]
        if self.backward:
            found += [_gradient(tensor) for tensor in attention.outputs]
        return tuple(found)

    def layouts_for(self, tensor: Tensor) -> tuple[str, ...]:
        rank = len(tensor.shape)
        found = ["plain", "shifted"]
        if not self._has_contiguous_rows(tensor):
            found.append("spread")
        if rank > 1:
            found += ["gapped", "transposed"]
            if not self._has_contiguous_rows(tensor):
                found.append("rows")
            if tensor.storage.is_paged:
                found.append("odd")
        if self._expandable(tensor) is not None:
            found.append("expanded")
        return tuple(found)

    def layout(self, tensor: Tensor, level: str) -> TensorLayout | None:
        axes = tuple(range(len(tensor.shape)))
        none, last = (0,) * len(axes), axes[-1]
        number = self.tensors.index(tensor)
        gaps = (*none[:-1], 8)
        match level:
            case "plain":
                return None
            case "shifted":
                return TensorLayout(order=axes, gaps=none, offset=2 * number + 1)
            case "gapped":
                return TensorLayout(order=axes, gaps=gaps, offset=8)
            case "transposed":
                own = tuple(number + 1 if axis == last else 0 for axis in axes)
                return TensorLayout(order=(*axes[:-1][::-1], last), gaps=own, offset=2 * number + 1)
            case "spread":
                return TensorLayout(order=axes, gaps=none, offset=number % 3, step=2)
            case "rows":
                return TensorLayout(order=axes[::-1], gaps=none)
            case "odd":
                return TensorLayout(order=axes, gaps=none, more=1)
            case _:
                return TensorLayout(order=axes, gaps=none, expanded=self._expandable(tensor) or ())

    def level_of(self, layout: TensorLayout | None) -> str:
        """Returns which level a layout is of; that of no level for rows gigabytes apart."""
        if layout is None:
            return "plain"
        axes = tuple(range(len(layout.order)))
        if layout.is_far:
            return "far"
        if layout.expanded:
            return "expanded"
        if layout.step > 1:
            return "spread"
        if layout.more:
            return "odd"
        if layout.order == axes:
            return "gapped" if any(layout.gaps) else "shifted"
        return "transposed" if layout.order[-1] == axes[-1] else "rows"

    def _has_contiguous_rows(self, tensor: Tensor) -> bool:
        return tensor.name in ("q", "k", "v", "o")

    def _expandable(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Axes that one number may stand for; None: there are none. What `sum().backward()` hands over is one
        number.
        """
        axes = tuple(range(len(tensor.shape)))
        if tensor.name in ("do", "dlse"):
            return axes
        if tensor not in self.attention.inputs or tensor.is_sorted or locates_rows(self.attention, tensor):
            return None
        if tensor.name not in ("q", "k", "v"):
            return axes[:1]
        batch, head = tensor.axis(Role.BATCH), tensor.axis(Role.HEAD)
        if batch is not None:
            return (batch,)
        return None if head is None else (head,)

    # --- what a case is

    def levels(self, case: Case) -> dict[str, str]:
        dims, config = case.dims, self.configs[case.config]
        found = {"config": str(case.config), "lengths": case.lengths, "extras": case.extras}
        found |= {"call": case.call, "logits": case.logits, "values": case.values, "special": case.special}
        for name, tile in (("M", config.BLOCK_M), ("N", config.BLOCK_N)):
            if name in dims:
                found[name] = by_tiles(dims[name], tile)
        if {"M", "N"} <= dims.keys():
            m, n = dims["M"], dims["N"]
            found["M to N"] = "M < N" if m < n else "M = N" if m == n else "M > N"
        for name in ("B", "H", "Hkv"):
            if name in dims:
                found[name] = "more" if dims[name] > 1 else str(dims[name])
        if "G" in dims:
            found["G"] = "1" if dims["G"] == 1 else "odd" if dims["G"] % 2 else "even"
        outputs = {tensor.name for tensor in self.attention.outputs}
        for tensor in self.tensors:
            if case.call == "out" or tensor.name not in outputs:
                found[f"layout of {tensor.name}"] = self.level_of(case.layouts.get(tensor.name))
        return {name: level for name, level in found.items() if level in self.factors.get(name, ())}

    @cached_property
    def pairs(self) -> frozenset[Pair]:
        found = set()
        outputs = {f"layout of {tensor.name}" for tensor in self.attention.outputs}
        for (one, left), (other, right) in combinations(self.factors.items(), 2):
            if not _asked_for(one, other):
                continue
            for a in left:
                for b in right:
                    if (a == "new" and other in outputs) or {one, other} == {"M", "M to N"}:
                        continue
                    found.add(((one, a), (other, b)))
        return frozenset(found)

    def pairs_of(self, levels: Mapping[str, str]) -> Iterator[Pair]:
        ordered = [(name, levels[name]) for name in self.factors if name in levels]
        for one, other in combinations(ordered, 2):
            if _asked_for(one[0], other[0]):
                yield one, other

    def facts(self, case: Case) -> CaseFacts:
        attention = self.attention
        dims = all_dims(attention, case.dims)
        lengths = draw_lengths(attention, dims, case.seed, case.lengths)
        memory = memory_dims(attention, dims, lengths)
        nodes = (node for expr in attention.lengths.values() for node in walk(expr))
        asked = {node.tensor for node in nodes if isinstance(node, Load)}
        values = draw_extras(attention, case, memory, lengths, names=asked)
        count = dims["B"] if "B" in dims else size(attention.batch, dims)
        heads, heads_kv = size(attention.heads_q, dims), size(attention.heads_kv, dims)
        config = self.configs[case.config]
        rows, keys, tiles = set(), set(), 0
        # where every sequence is like the first, one is enough
        alike = not lengths.rows and not attention.lengths
        for b in range(min(count, 1) if alike and heads else count if heads else 0):
            own = {**memory, "M": memory.get("M", dims.get("M", 0)), "N": memory.get("N", dims.get("N", 0))}
            for tensor, name in ((attention.q, "M"), (attention.k, "N")):
                if ends := tensor.storage.ends:
                    own[name] = int(lengths.rows[ends][b])
            for name, expr in attention.lengths.items():
                at_b = Env(indices={"b": b}, dims=own, tensors=values)
                own[name] = min(max(int(evaluate(expr, at_b).item()), 0), own[name])
            rows.add(own["M"])
            tiles += -(-own["M"] // config.BLOCK_M) * heads * (count if alike else 1)
            if own["M"]:
                keys.add(own["N"])
        is_packed = attention.q.storage.is_packed
        sizes: dict[str, set[int]] = {
            "rows": rows,
            "keys": keys,
            "packed": {m * (heads // max(heads_kv, 1)) for m in rows},
            "sequences": {count},
            "heads": {heads if is_packed else heads * count},
            "entries": {size(expr, memory) for expr in self._searched} if rows - {0} else set(),
            "columns": {size(expr, memory) for expr in self._columns},
            "tiles": {tiles},
        }
        longest = max(keys, default=0)
        if splits := getattr(config, "splits", 0):
            sizes["splits"] = {splits} if longest else set()
        elif split_size := getattr(config, "split_size", 0):
            sizes["splits"] = {-(-max(memory.get("N", longest), longest) // split_size)} if longest else set()
        far = {axes for axes, far in self.far_cases.items() if far.layouts.items() <= case.layouts.items()}
        far |= {PAGES} if longest and any(layout.more for layout in case.layouts.values()) else set()
        far |= {in_sections(name) for name in self.walks_in_short_sections(case, memory)}
        if self.many_rows and self.joins_by_groups(config) and count * heads * max(rows) > self.many_rows:
            far.add(GROUPS_JOIN)
        far |= {IN_ROUNDS} if self.ends_in_a_short_round(case, memory) else set()
        return CaseFacts(
            sizes={name: frozenset(found) for name, found in sizes.items()},
            configs=self.configs_of(case),
            far=frozenset(far),
        )

    @cached_property
    def _searched(self) -> tuple[Expr, ...]:
        if self.plan is None:
            return ()
        lets = (
            item.value
            for k in self.plan.kernels.values()
            for item in k.regions.bounds
            if isinstance(item, ir.Let)
        )
        return tuple({node.extents[-1] for e in lets for node in walk(e) if isinstance(node, Search)})

    @cached_property
    def _columns(self) -> tuple[Expr, ...]:
        table = self.attention.k.storage.table
        return (self.attention.tensor(table).shape[1],) if table else ()


@dataclass
class Coverage:
    """What some cases have met of a space."""

    space: Space
    points: set[Point] = field(default_factory=set)
    levels: set[Level] = field(default_factory=set)
    pairs: set[Pair] = field(default_factory=set)

    def gain(self, levels: Mapping[str, str], points: Collection[Point]) -> float:
        new = {level for level in levels.items() if level not in self.levels}
        pairs = sum(pair not in self.pairs for pair in self.space.pairs_of(levels))
        return pairs + 6 * len(new) + 20 * sum(point not in self.points for point in points)

    def note(self, case: Case) -> None:
        levels = self.space.levels(case)
        self.levels |= set(levels.items())
        self.pairs |= set(self.space.pairs_of(levels)) & self.space.pairs
        self.points |= set(self.space.facts(case).points(self.space.boundaries))

    @property
    def summary(self) -> Summary:
        return Summary(
            points=(len(self.points), len(self.space.points)),
            pairs=(len(self.pairs), len(self.space.pairs)),
            boundaries=tuple(
                Met(
                    boundary=boundary,
                    met=tuple(p for p in boundary.points if (boundary, p) in self.points),
                )
                for boundary in self.space.boundaries
            ),
            missed=tuple(sorted(f"{name} {level}" for name, level in self._missed)),
        )

    @property
    def _missed(self) -> Iterator[Level]:
        for name, levels in self.space.factors.items():
            for level in levels:
                if (name, level) not in self.levels:
                    yield name, level


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """A boundary, and which of its points were met."""

    boundary: Boundary
    met: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run has met. points, pairs: how many of how many; missed: levels of factors that no case had."""

    points: tuple[int, int]
    pairs: tuple[int, int]
    boundaries: tuple[Met, ...]
    missed: tuple[str, ...] = ()


def by_tiles(length: int, tile: int) -> str:
    """Returns which of LENGTHS_BY_TILES a length is; "" for none."""
    near = {1: "1", tile - 1: "tile - 1", tile: "tile", tile + 1: "tile + 1", 2 * tile: "2 tiles"}
    return near.get(length, "" if not length else "short" if length < tile else "long")


def _asked_for(one: str, other: str) -> bool:
    return one not in _NUMBERS and other not in _NUMBERS


def _gradient(tensor: Tensor) -> Tensor:
    return replace(tensor, name=f"d{tensor.name}", storage=Dense())
