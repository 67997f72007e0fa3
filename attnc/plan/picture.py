"""What the plan visits, tile by tile: its loop bounds evaluated at an example shape, with no kernel and no
GPU.

The picture is made from the plan, not from the mask, so it shows what the kernel does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from attnc.expr.nodes import Expr, Load, Ref, Search, walk
from attnc.plan import ir
from attnc.plan.decay import MARGIN
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.lists import HIDES_SOME, LISTED

if TYPE_CHECKING:
    import numpy.typing as npt

    _Array: TypeAlias = npt.NDArray[Any]

SKIP, PARTIAL, FULL = ".", "/", "#"
#: Values of sizes that no picture depends on much.
_DIMS = {"B": 1, "H": 4, "Hkv": 2, "G": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """`rows[i][j]` is the class of q tile i and kv tile j, for head 0 of sequence 0."""

    queries: int
    keys: int
    tile_q: int
    tile_kv: int
    rows: tuple[str, ...]
    note: str

    def count(self, kind: str) -> int:
        return sum(row.count(kind) for row in self.rows)

    @property
    def tiles(self) -> int:
        return sum(map(len, self.rows))

    @property
    def visited(self) -> int:
        return self.tiles - self.count(SKIP)

    @property
    def keys_read(self) -> int:
        columns = sum(any(kind != SKIP for kind in column) for column in zip(*self.rows, strict=True))
        return min(columns * self.tile_kv, self.keys)


def picture(kernel: ir.Kernel, queries: int, keys: int, tile_q: int, tile_kv: int) -> Picture:
    """Evaluates the kernel's bounds for every tile of its outer axis. A program for the keys that one query
    selects has its heads in the place of queries, which all see them: such a kernel visits every tile.
    """
    import numpy as np

    scene = _Scene(queries=queries, keys=keys, tile_q=tile_q, tile_kv=tile_kv)
    scene.forget(kernel)
    of_query = isinstance(kernel, BackwardKernel) and kernel.selected is not None
    grid = np.full((_ceil(queries, tile_q), _ceil(keys, tile_kv)), PARTIAL if of_query else SKIP)
    by_outer = grid.T if kernel.regions.axis == "q" else grid
    for outer, inner, kinds in () if of_query else _visits(kernel, scene, len(by_outer)):
        by_outer[outer, inner] = kinds
    return Picture(
        queries=queries,
        keys=keys,
        tile_q=tile_q,
        tile_kv=tile_kv,
        rows=tuple("".join(row) for row in grid.tolist()),
        note=scene.note,
    )


class _Dims(dict[str, int]):
    """Sizes by name. What a spec calls a size of its own has as many entries as there are keys."""

    def __init__(self, keys: int, known: Mapping[str, int]) -> None:
        super().__init__(known)
        self._keys = keys

    def __missing__(self, name: str) -> int:
        return self._keys


@dataclass(slots=True, kw_only=True)
class _Scene:
    queries: int
    keys: int
    tile_q: int
    tile_kv: int
    tensors: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def dims(self) -> Mapping[str, int]:
        tiles = {"BLOCK_M": self.tile_q, "BLOCK_N": self.tile_kv}
        return _Dims(self.keys, {**_DIMS, "M": self.queries, "N": self.keys, **tiles})

    def forget(self, kernel: ir.Kernel) -> None:
        """Makes up what falls along its last axis: by the margin in N / 4 keys."""
        import numpy as np

        for _, expr in _scalars(kernel):
            for node in walk(expr):
                if isinstance(node, Search) and node.descends and node.tensor not in self.tensors:
                    sizes = [self._size(extent) for extent in node.extents]
                    self.tensors[node.tensor] = np.broadcast_to(-1.0 * np.arange(sizes[-1]), sizes)
                    self.tensors[MARGIN] = np.full((1, _DIMS["H"]), self.keys / 4)
                    self._remark(f"{node.tensor} falls by the margin in N / 4 keys")

    def provide(self, expr: Expr) -> None:
        """Makes up the tensors that an expression reads: sorted ones number four documents, others hold N /
        4.
        """
        import numpy as np

        for node in walk(expr):
            if not isinstance(node, Load | Search) or node.tensor in self.tensors:
                continue
            sizes = [self._size(extent) for extent in node.extents]
            if isinstance(node, Search) or node.is_sorted:
                length = max(1, -(-sizes[-1] // 4))
                row = np.arange(sizes[-1], dtype=np.int64) // length
                self.tensors[node.tensor] = np.broadcast_to(row, sizes)
                self._remark(f"{node.tensor} numbers 4 equal documents")
            else:
                self.tensors[node.tensor] = np.full(sizes, self.keys // 4, dtype=np.int64)
                self._remark(f"{node.tensor} = N / 4")

    def _remark(self, text: str) -> None:
        self.note = f"{self.note}, {text}" if self.note else text

    def _size(self, extent: Expr) -> int:
        from attnc.expr.evaluate import Env, evaluate

        return int(evaluate(extent, Env(dims=self.dims)))


def _visits(kernel: ir.Kernel, scene: _Scene, outer: int) -> Iterator[tuple[_Array, _Array, _Array]]:
    """Yields the inner tiles that outer tiles visit, loop by loop: numbers of outer tiles, of inner tiles,
    and classes. A bound is evaluated once for all tiles.
    """
    import numpy as np

    from attnc.expr.evaluate import Env, evaluate

    own = ("q", scene.tile_q, scene.queries)
    other = ("kv", scene.tile_kv, scene.keys)
    (name, tile, length), (inner, step, inner_length) = (
        (own, other) if kernel.regions.axis == "kv" else (other, own)
    )
    first = np.arange(outer)[:, None] * tile
    indices: dict[str, Any] = {
        "b": 0,
        "h": 0,
        f"{name}_lo": first,
        f"{name}_hi": np.minimum(first + tile, length) - 1,
    }
    names: dict[str, Any] = {HIDES_SOME.name: True}  # which blocks are full is up to the data

    def value(expr: Expr, shape: tuple[int, ...]) -> _Array:
        scene.provide(expr)
        env = Env(indices=indices, dims=scene.dims, tensors=scene.tensors, names=names)
        return np.broadcast_to(evaluate(expr, env), shape)

    for named, expr in _scalars(kernel):
        names[named] = value(expr, first.shape)
    listed = kernel.regions.loops[0].listed if kernel.regions.loops else None
    if listed is not None:
        names[LISTED.name] = -(-scene.keys // listed.block)  # every block
    if (split := ir.split_of(kernel)) is not None:  # the picture is of all splits together
        names |= {f"split_{end}": value(getattr(split, end), first.shape) for end in ("lo", "hi")}
    for loop in kernel.regions.loops:
        start, stop = value(loop.start, first.shape), value(loop.stop, first.shape)
        most = max(int((-((start - stop) // step)).max(initial=0)), 0)
        position = start + step * np.arange(most)
        indices[f"{inner}_lo"] = position
        indices[f"{inner}_hi"] = np.minimum(position + step, inner_length) - 1
        for test in loop.tests:
            names[test.name] = value(_value_of(test), position.shape)
        is_visited = position < stop
        if loop.guard is not None:
            is_visited = is_visited & value(loop.guard, position.shape)
        if isinstance(loop.masked, bool):
            masked = np.broadcast_to(loop.masked, position.shape)
        else:
            masked = value(loop.masked, position.shape)
        numbers, rounds = np.nonzero(is_visited)
        kinds = np.where(masked[numbers, rounds], PARTIAL, FULL)
        yield numbers, position[numbers, rounds] // step, kinds


def _scalars(kernel: ir.Kernel) -> list[tuple[str, Expr]]:
    split = ir.split_of(kernel)
    ends = () if split is None else (split.lo, split.hi)
    ranges = (x for loop in kernel.regions.loops for x in (loop.start, loop.stop, loop.masked, loop.guard))
    tests = (_value_of(test) for test in kernel.regions.tests)
    used = _refs(*ends, *tests, *(x for x in ranges if x is not None and not isinstance(x, bool)))
    found = []
    for statement in reversed((*kernel.program, *kernel.regions.bounds)):
        if isinstance(statement, ir.Row):  # a pointer: what is read through it is evaluated where it is read
            continue
        if statement.name in used:
            expr = _value_of(statement)
            used |= _refs(expr)
            found.append((statement.name, expr))
    return found[::-1]


def _value_of(statement: ir.Statement) -> Expr:
    assert not isinstance(statement, ir.Row), "a pointer has no value"
    return statement.value if isinstance(statement, ir.Let) else statement.load


def _refs(*exprs: Expr) -> set[str]:
    return {node.name for expr in exprs for node in walk(expr) if isinstance(node, Ref)}


def _ceil(size: int, tile: int) -> int:
    return -(-size // tile)
