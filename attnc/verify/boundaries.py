"""Where a plan changes its ways: the sizes at which its kernels and launches do something else, as data.

Every constant of a plan that a size is compared with, or divided by, is a boundary: tiles, stages of a
pipeline, splits, rounds of a search, pages, sections of heads, limits of a launch. A kernel that is wrong at
one is wrong at the value, just below it or just above. These three are its points, and a case meets one when
a sequence, or a whole call, has that size while the constant is in force.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from attnc.expr.nodes import Const, Expr, Search, walk
from attnc.model.schedule import ProductConfig
from attnc.model.tensors import Paged, Ragged
from attnc.plan import ir
from attnc.plan.decode import MOST_SPLITS
from attnc.plan.fitting import keys_of_split
from attnc.plan.projection import MOST_ROWS, ProjectionModule, impl_of
from attnc.verify.runners import runner_of

#: What is counted. rows, keys: of one sequence; packed: rows of one KV head; heads: of all sequences;
#: entries: of what is searched; columns: of a block table; splits: of a sequence's keys; tiles: of all rows
#: of the call; offsets: of elements, along an axis of some tensors; strides: of pages; sections: of heads,
#: the last of them short. Of a projection: rows, features (N) and depth (K).
Quantity: TypeAlias = Literal[
    "rows",
    "keys",
    "packed",
    "sequences",
    "heads",
    "entries",
    "columns",
    "splits",
    "tiles",
    "offsets",
    "strides",
    "sections",
    "rounds",
    "features",
    "depth",
]
#: default: cases of any kind reach it; thin: one sequence and head, with hardly a key for each row; own: a
#: case is made for it, and the array does not look for one; large: on a GPU.
Reach: TypeAlias = Literal["default", "thin", "own", "large"]

#: A search looks at as many places in a round (`_bound` and `_find_sequence` of `templates/triton/device`).
_ROUND = 128
#: Entries of a block table that are asked for ahead (`_ask_for_table` of `templates/triton/device`).
_ASKED_FOR = 4096
#: Programs of a persistent grid where there is no GPU (`support.devices.CPU`).
PROCESSORS = 4
#: One more than there are programs along the second and third axes of a grid, or numbers of 16 bits below it.
_GRID = 65536
#: Sizes that no plan has, but kernels are known to be wrong beyond: what one block can scan, or hold.
_SCANNED = 4096
#: The longest sequences of ordinary cases, and of large ones: what a mask compares with more, such as a
#: window of 2^31 - 1 keys that leaves nothing out, is no boundary that a case gets to.
_LONGEST, _MOST_KEYS = 320, 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """name: the constant and whose it is; quantity: what is compared with it; where: the config's fields that
    put it in force, of this kernel ("": of none); reach: which cases get there; axes: along which offsets
    pass it, or strides are odd, or which heads have sections; of_mask: whether it is a number of the mask.
    """

    name: str
    quantity: Quantity
    value: int
    kernel: str = ""
    where: tuple[tuple[str, int], ...] = ()
    reach: Reach = "default"
    axes: str = ""
    of_mask: bool = False

    @property
    def points(self) -> tuple[int, ...]:
        if self.axes:
            return (self.value,)
        return tuple(n for n in (self.value - 1, self.value, self.value + 1) if n >= 0)

    def is_in_force(self, configs: Mapping[str, Any]) -> bool:
        if not self.kernel:
            return True
        config = configs.get(self.kernel)
        return config is not None and all(getattr(config, name, None) == value for name, value in self.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFacts:
    """What a case is, as far as boundaries ask: sizes by quantity, the config of every kernel, and the axes
    along which offsets pass 32 bits, strides are odd, or sections of heads end with a short one.
    """

    sizes: Mapping[str, frozenset[int]]
    configs: Mapping[str, Any]
    far: frozenset[str] = frozenset()

    def points(self, boundaries: Iterable[Boundary]) -> Iterator[tuple[Boundary, int]]:
        for boundary in boundaries:
            found = self.sizes.get(boundary.quantity, ())
            if boundary.axes in self.far:
                yield boundary, boundary.value
            elif found and boundary.is_in_force(self.configs):
                for point in boundary.points:
                    if point in found:
                        yield boundary, point


def boundaries_of(module: ir.Module, processors: int = PROCESSORS) -> tuple[Boundary, ...]:
    """Returns all of a module, each once. processors: of the device, as many as a persistent grid has
    programs.
    """
    forward = module.kernel
    runner = runner_of(module.target)
    found = [*_empty(), *_kernel("forward", forward, runner.stages), *_mask(module), *_storage(module)]
    found += _list_conversions(forward)
    for makes, planned in module.backward_kernels.items():
        found += _kernel(makes, planned, runner.stages)
    found += _searches(module)
    section = forward.grid.section
    for heads in (section.least, section.most) if section and section.most else ():
        found.append(Boundary(name=f"{heads} heads of a section", quantity="heads", value=heads))
    if forward.grid.persistent or (runner.takes_tiles and forward.structure != "decode"):
        for count in sorted({1, 2, *(config.stages + 1 for config in forward.configs)}):
            label = "programs of a persistent grid" if count == 1 else f"{count} tiles for each program"
            found.append(Boundary(name=label, quantity="tiles", value=count * processors, reach="thin"))
    found.append(Boundary(name="programs of a grid axis", quantity="heads", value=_GRID, reach="large"))
    for quantity in ("rows", "keys"):
        found.append(Boundary(name="what a block scans", quantity=quantity, value=_SCANNED, reach="thin"))
    return tuple(dict.fromkeys(found))


def _empty() -> Iterator[Boundary]:
    for quantity in ("rows", "keys", "sequences"):
        yield Boundary(name=f"no {quantity}", quantity=quantity, value=0)


def _kernel(name: str, kernel: ir.Kernel, stages_field: str) -> Iterator[Boundary]:
    """Yields boundaries of tiles: one, two, and as many as a pipeline holds, by a config's field of this
    name; splits.
    """
    rows: Quantity = "rows" if ir.pack_of(kernel) is None else "packed"
    for config in kernel.configs:
        block_m, block_n = config.tile_q, config.tile_kv
        for key, quantity, field, tile in (
            ("tile.q", rows, "BLOCK_M", block_m),
            ("tile.kv", "keys", "BLOCK_N", block_n),
        ):
            for count in (1, 2):
                times = "" if count == 1 else f"{count} x "
                label = f"{times}{key} = {tile} of {name}"
                yield _near(label, quantity, count * tile, name, ((field, tile),))
        over_keys = kernel.grid.over == "q"
        stages, inner = config.stages, ("BLOCK_N", block_n) if over_keys else ("BLOCK_M", block_m)
        if stages > 2:
            where = (inner, (stages_field, stages))
            filled = stages * inner[1]
            yield _near(
                f"{stages} stages of {inner[1]} of {name}", "keys" if over_keys else rows, filled, name, where
            )
        yield from _splits(name, kernel, config)


def _list_conversions(kernel: ir.Forward | ir.Decode) -> Iterator[Boundary]:
    for config in kernel.configs:
        chosen = {} if kernel.layout is None else kernel.layout.chosen(config)
        if ahead := chosen.get("RAW_TILES"):
            where = (("BLOCK_N", config.tile_kv), ("RAW_TILES", ahead))
            yield _near(f"{ahead} tiles of 8 bits", "keys", ahead * config.tile_kv, "forward", where)


def _splits(name: str, kernel: ir.Kernel, config: Any) -> Iterator[Boundary]:
    if ir.split_of(kernel) is None:
        return
    for splits in (2, 16, 64):  # they are joined as a power of two, by lanes that take several
        yield Boundary(name=f"splits joined as {splits}", quantity="splits", value=splits)
    yield Boundary(name="most splits", quantity="splits", value=MOST_SPLITS, reach="large")
    if split_size := keys_of_split(config):
        yield _near(f"fixed({split_size}) of {name}", "keys", split_size, name, (("split_size", split_size),))


def _mask(module: ir.Module) -> Iterator[Boundary]:
    exprs: tuple[Expr, ...] = (module.variant.attention.mask,)
    values = {node.value for expr in exprs for node in walk(expr) if isinstance(node, Const)}
    numbers = (value for value in values if isinstance(value, int) and not isinstance(value, bool))
    for value in sorted(n for n in numbers if 2 < n <= _MOST_KEYS):
        yield replace(_near(f"{value} of the mask", "keys", value, "", ()), of_mask=True)


def _storage(module: ir.Module) -> Iterator[Boundary]:
    attention = module.variant.attention
    for tensor in (attention.k, attention.q):
        match tensor.storage:
            case Paged(page=page):
                yield _near("a page", "keys", page, "", ())
                yield Boundary(
                    name="table asked for ahead", quantity="columns", value=_ASKED_FOR, reach="large"
                )
            case Ragged() if tensor is attention.q:
                yield Boundary(
                    name="round over sequences", quantity="sequences", value=_ROUND - 1, reach="thin"
                )
                yield Boundary(
                    name="two rounds over sequences",
                    quantity="sequences",
                    value=_ROUND**2 - 1,
                    reach="large",
                )


def _searches(module: ir.Module) -> Iterator[Boundary]:
    exprs = [
        value
        for kernel in module.kernels.values()
        for item in kernel.regions.bounds
        if isinstance(item, ir.Let)
        for value in (item.value,)
    ]
    if any(isinstance(node, Search) for expr in exprs for node in walk(expr)):
        yield Boundary(name="round of a search", quantity="entries", value=_ROUND)
        yield Boundary(name="two rounds of a search", quantity="entries", value=_ROUND**2, reach="thin")


def _near(
    name: str, quantity: Quantity, value: int, kernel: str, where: tuple[tuple[str, int], ...]
) -> Boundary:
    reach: Reach = "default" if value < _LONGEST else "large"
    return Boundary(name=name, quantity=quantity, value=value, kernel=kernel, where=where, reach=reach)


def boundaries_of_projection(module: ProjectionModule) -> tuple[Boundary, ...]:
    """Returns all of a projection: tiles, the rows of a program, splits of K, and what one program joins."""
    found = [Boundary(name="no rows", quantity="rows", value=0)]
    projection = module.variant.projection
    sizes = {"features": projection.size("N"), "depth": projection.size("K")}
    for config in module.configs:
        if not isinstance(config, ProductConfig):
            continue
        kernel = impl_of(config)
        most = MOST_ROWS[kernel]
        found.append(Boundary(name=f"rows of {kernel}", quantity="rows", value=most, reach="default"))
        if sizes["features"] is None:
            tile = config.tile_n
            found.append(
                Boundary(
                    name=f"tile.n of {kernel}",
                    quantity="features",
                    value=tile,
                    kernel="forward",
                    where=(("BLOCK_N", tile),),
                )
            )
        if sizes["depth"] is None:
            tile, split = config.tile_k, config.split_k
            found += [
                Boundary(
                    name=f"{count} x tile.k of {kernel}",
                    quantity="depth",
                    value=count * tile,
                    kernel="forward",
                    where=(("BLOCK_K", tile),),
                )
                for count in sorted({1, 2, split})
            ]
    if module.is_split and sizes["features"] is None:
        found.append(
            Boundary(name="columns that are joined", quantity="features", value=_JOINED, reach="thin")
        )
    return tuple(dict.fromkeys(found))


#: Columns of a projection that one program joins (`templates/triton/projection.py.jinja`).
_JOINED = 1024
