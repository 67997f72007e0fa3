"""A plan that is run as it says, tile by tile in float64, without any target: which pairs of rows and keys
its loops visit, and what its expressions are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Expr, Load
from attnc.model.tensors import Ragged
from attnc.plan.ir import Fetch, Kernel, Let, Statement
from attnc.plan.ir.kernel import Decode
from attnc.plan.lists import KV_HEAD
from attnc.reference import Head, bind, capacity, rows

Array = npt.NDArray[Any]
#: Splits that share the keys of a tile of rows.
SPLITS = 3


@dataclass
class Scope:
    """Values of names at a place of a kernel."""

    tensors: Mapping[str, Array]
    indices: dict[str, Any]
    dims: dict[str, Any]
    names: dict[str, Any] = field(default_factory=dict)

    def value(self, expr: Expr, dot: Array | None = None) -> Array:
        here = Env(indices=self.indices, dims=self.dims, names=self.names, tensors=self.tensors, dot=dot)
        return evaluate(expr, here)

    def run(self, statements: Iterable[Statement]) -> None:
        """Runs statements in order; M and N are sizes from then on."""
        for item in statements:
            match item:
                case Let(name=name, value=value):
                    self._set(name, self.value(value))
                case Fetch(name=name, load=load, guard=guard):
                    self._set(name, self._load(load, guard))

    def _load(self, load: Load, guard: Expr) -> Array:
        """Reads what the guard allows: IndexError where it allows what is outside of the tensor."""
        allowed = self.value(guard)
        inside = np.asarray(True)
        for index, size in zip(load.indices, self.tensors[load.tensor].shape, strict=True):
            at = self.value(index)
            inside = inside & (at >= 0) & (at < size)
        if not (inside | ~allowed | ~self.exists).all():
            raise IndexError(f"{load.tensor} is read outside")
        return np.where(allowed, self.value(load), 0).astype(self.value(load).dtype)

    @property
    def exists(self) -> Array:
        """Which elements of the tile are of rows and keys that there are."""
        found = np.asarray(True)
        for name, size in (("q_idx", "M"), ("kv_idx", "N")):
            if name in self.indices:
                found = found & (np.asarray(self.indices[name]) < self.dims[size])
        return found

    def _set(self, name: str, value: Array) -> None:
        self.names[name] = value
        if name in ("M", "N"):
            self.dims[name] = value

    def inner(self, **indices: Any) -> Scope:
        """Returns a scope inside of this one."""
        return Scope(self.tensors, {**self.indices, **indices}, dict(self.dims), dict(self.names))


@dataclass(frozen=True)
class Tile:
    """A tile that a kernel visits. scope: in its step, before its loads; masked: whether it evaluates the
    mask; fills: whether rows of keys without `Step.kept` are made zero.
    """

    scope: Scope
    q_lo: int
    kv_lo: int
    masked: bool
    fills: bool


def tiles_of(kernel: Kernel, head: Head, block_m: int, block_n: int) -> Iterator[Tile]:
    """Yields the tiles of a head that the kernel visits."""
    over_q = kernel.regions.axis == "kv"
    outer, inner = (("q", block_m), ("kv", block_n)) if over_q else (("kv", block_n), ("q", block_m))
    first = _scope_of(kernel, head, block_m, block_n)
    stored = int(first.dims["M" if over_q else "N"])
    for lo in range(0, stored, outer[1]):
        scope = first.inner(**{f"{outer[0]}_lo": lo})
        scope.run(kernel.program)
        size = int(scope.dims["M" if over_q else "N"])
        hi = min(lo + outer[1], size) - 1
        scope.indices[f"{outer[0]}_hi"] = hi
        own = np.arange(lo, lo + outer[1])
        of_rows = scope.inner(**({"q_idx": own[:, None]} if over_q else {"kv_idx": own[None, :]}))
        of_rows.run(kernel.outer)
        scope.run(kernel.regions.bounds)
        of_rows.names.update(scope.names)
        for start, masked, fills in _walk(kernel, scope, inner):
            at = np.arange(start, start + inner[1])
            index = {"kv_idx": at[None, :]} if over_q else {"q_idx": at[:, None]}
            in_step = of_rows.inner(**scope.indices, **index, **{f"{inner[0]}_lo": start})
            q_lo, kv_lo = (lo, start) if over_q else (start, lo)
            yield Tile(in_step, q_lo, kv_lo, masked, fills)


def _scope_of(kernel: Kernel, head: Head, block_m: int, block_n: int) -> Scope:
    attention, b = head.attention, head.b
    shape = bind(attention, head.arrays)
    q = len(rows(attention.q, head.arrays, b))
    dims = {**shape, "M": q, "N": capacity(attention.k, head.arrays, b)}
    dims |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "G": shape["H"] // max(shape["Hkv"], 1)}
    scope = Scope(head.arrays, {"b": b, "h": head.h}, dims)
    scope.names |= {KV_HEAD.name: head.h // max(dims["G"], 1), "h": head.h}
    if kernel.grid.sequences is not None:
        scope.names |= {"q_rows": q, "M": q}
        for tensor, name in ((attention.q, "q_first"), (attention.k, "k_first")):
            if isinstance(tensor.storage, Ragged):
                scope.names[name] = int(head.arrays[tensor.storage.cu_seqlens][b])
    return scope


def _walk(kernel: Kernel, scope: Scope, inner: tuple[str, int]) -> Iterator[tuple[int, bool, bool]]:
    """Yields where tiles of a row tile begin, split by split, and whether each is masked, and fills."""
    split = kernel.split if isinstance(kernel, Decode) else None
    if split is None:
        yield from _walk_loops(kernel, scope, inner)
        return
    lo, hi = int(scope.value(split.lo)), int(scope.value(split.hi))
    tiles = max(-(-(hi - lo) // inner[1]), 0)
    each = -(-tiles // SPLITS) * inner[1]
    for number in range(SPLITS):
        here = scope.inner()
        here.names |= {
            "split_lo": min(lo + number * each, max(hi, lo)),
            "split_hi": min(lo + (number + 1) * each, hi),
        }
        yield from _walk_loops(kernel, here, inner)


def _walk_loops(kernel: Kernel, scope: Scope, inner: tuple[str, int]) -> Iterator[tuple[int, bool, bool]]:
    axis, size = inner
    length = int(scope.dims["N" if axis == "kv" else "M"])
    for loop in kernel.regions.loops:
        for at in range(int(scope.value(loop.start)), int(scope.value(loop.stop)), size):
            here = scope.inner(**{f"{axis}_lo": at, f"{axis}_hi": min(at + size, length) - 1})
            here.run(loop.tests)
            if loop.guard is None or here.value(loop.guard):
                masked = loop.masked if isinstance(loop.masked, bool) else bool(here.value(loop.masked))
                yield at, masked, loop.zero_fill
