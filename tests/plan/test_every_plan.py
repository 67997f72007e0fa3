"""What holds of the plans of committed specs, for all targets: they are run as they say, without kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import e, log2
from pathlib import Path

import numpy as np
import pytest

from attnc.diagnostics import DiagnosticError
from attnc.expr.nodes import Const, Expr
from attnc.model.dtypes import DType
from attnc.plan import ir
from attnc.plan.device import DEVICES
from attnc.plan.ir import Kernel
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.ir.kernel import Decode, DotPart, OutputKernel
from attnc.plan.layout import Which, fits
from attnc.plan.signature import feature
from attnc.plan.targets import target_of
from attnc.reference import Head, heads, to_arrays
from attnc.verify.case import Case
from attnc.verify.problem import draw_values
from attnc.verify.storage import draw_lengths, memory_dims
from attnc.verify.strategies import all_dims, free_dims
from tests.plan.planning import planned
from tests.plan.running import Scope, Tile, tiles_of
from tests.plans import SPECS, plans_of
from tests.targets import TARGETS

TELLING = Path(__file__).parents[1] / "telling_specs"
PATHS = [*sorted(SPECS.glob("*.attn")), *sorted(TELLING.glob("*.attn"))]
#: A slope from which on it is not compared with differences.
_STEEP = 100.0
#: Sizes of a case, which no tile divides, and of a tile.
SIZES, BLOCK_M, BLOCK_N = {"B": 2, "M": 23, "N": 41, "H": 2, "Hkv": 2, "G": 2}, 16, 16


def _kernels(path: Path) -> Iterator[tuple[ir.Module, list[Kernel]]]:
    """Yields modules of a spec with their kernels, without those that say the same of rows and keys as one
    before, walk over lists of blocks, or read what is made before a call.
    """
    seen = set[str]()
    for module in plans_of(path).modules:
        found = []
        for kernel in module.kernels.values():
            said = repr((kernel.program, kernel.outer, kernel.regions, kernel.step, type(kernel)))
            is_listed = any(loop.listed is not None for loop in kernel.regions.loops)
            is_of_one = isinstance(kernel, BackwardKernel) and kernel.selected is not None
            if said not in seen and not is_listed and not is_of_one and module.margin is None:
                found.append(kernel)
            seen.add(said)
        if found:
            yield module, found


def _heads(module: ir.Module) -> Iterator[Head]:
    """Yields a head of each of two cases: a few rows against more keys, and more rows than keys."""
    attention = module.variant.attention
    for seed, sizes in enumerate((SIZES, {**SIZES, "M": 41, "N": 23})):
        dims = {name: sizes.get(name, 2) for name in free_dims(attention)}
        chosen, case = all_dims(attention, dims), Case(dims=dims, seed=seed)
        lengths = draw_lengths(attention, chosen, seed, case.lengths)
        drawn = draw_values(attention, case, memory_dims(attention, chosen, lengths), lengths, "zero")
        found = [*heads(attention, to_arrays(attention, drawn))]
        yield from found[1 - seed :: max(len(found), 2)]


def _tiles(kernel: Kernel, head: Head) -> list[Tile]:
    return list(tiles_of(kernel, head, BLOCK_M, BLOCK_N))


def _inside(tile: Tile, head: Head) -> tuple[slice, slice]:
    """Returns the rows and keys of a tile that there are."""
    rows, keys = head.shape
    return (
        slice(tile.q_lo, min(tile.q_lo + BLOCK_M, rows)),
        slice(tile.kv_lo, min(tile.kv_lo + BLOCK_N, keys)),
    )


def _check_walk(kernel: Kernel, head: Head, tiles: list[Tile]) -> None:
    """Every pair that the mask keeps is visited once, no tile twice; a full tile keeps all of its pairs, and
    a partial one those of the mask.
    """
    visits = np.zeros(head.shape, int)
    for tile in tiles:
        at = _inside(tile, head)
        visits[at] += 1
        visible = head.visible[at]
        assert tile.q_lo % BLOCK_M == 0 or kernel.regions.axis == "q"
        if not tile.masked:
            assert visible.all()
            assert kernel.regions.axis == "q" or tile.kv_lo + BLOCK_N <= head.shape[1]
        elif kernel.step.keep is not None:
            keep = np.broadcast_to(tile.scope.value(kernel.step.keep), (BLOCK_M, BLOCK_N))
            assert (keep[: visible.shape[0], : visible.shape[1]] == visible).all()
            assert not keep[: visible.shape[0], visible.shape[1] :].any() or kernel.regions.axis == "q"
    assert (visits[head.visible] == 1).all()
    assert visits.max(initial=0) <= 1


def _check_fills(kernel: Kernel, head: Head, tiles: list[Tile]) -> None:
    """No query sees a key that is made zero, and steps that make none zero have no key that should be."""
    if kernel.step.kept is None or kernel.regions.axis == "q":
        return
    for tile in tiles:
        _, keys = _inside(tile, head)
        kept = np.broadcast_to(tile.scope.value(kernel.step.kept), (1, BLOCK_N))[0, : keys.stop - keys.start]
        assert not head.visible[:, keys][:, ~kept].any()
        assert kept.all() or tile.fills


def _dot(head: Head, tile: Tile) -> np.ndarray:
    """Returns the products of a tile, 0 past the ends."""
    found, at = np.zeros((BLOCK_M, BLOCK_N)), _inside(tile, head)
    with np.errstate(all="ignore"):
        product = head.q[at[0]] @ head.k[at[1]].T
    found[: product.shape[0], : product.shape[1]] = product
    return found


def _score(head: Head, tile: Tile, dot: np.ndarray) -> np.ndarray:
    """Returns what the spec says of the pairs of a tile."""
    env = Scope(head.arrays, {**tile.scope.indices}, {**head.dims})
    return np.broadcast_to(env.value(head.attention.score, dot), dot.shape)


def _value(tile: Tile, expr: Expr | None, dot: np.ndarray) -> np.ndarray:
    return np.broadcast_to(dot if expr is None else tile.scope.value(expr, dot), dot.shape)


def _check_score(kernel: Kernel, head: Head, tile: Tile) -> None:
    """Scores are the spec's in base 2, or are its weights."""
    dot = _dot(head, tile)
    softmax, at = kernel.softmax, _inside(tile, head)
    if isinstance(kernel, BackwardKernel):
        for let in kernel.chain.shared:
            tile.scope.names[let.name] = _value(tile, let.value, dot)
    made = _value(tile, kernel.step.score, dot) * (1.0 if softmax.scale is None else softmax.scale)
    factor = kernel.chain.factor if isinstance(kernel, BackwardKernel) else None
    if softmax.form == "none" and isinstance(kernel, OutputKernel):
        factor = kernel.softmax.v_scale
    if factor is not None and softmax.form == "none":
        made = made * tile.scope.value(factor)
    said = _score(head, tile, dot) * (1.0 if softmax.form == "none" else log2(e))
    visible = head.visible[at]
    rows, keys = visible.shape
    np.testing.assert_allclose(made[:rows, :keys][visible], said[:rows, :keys][visible], rtol=1e-5, atol=1e-7)


def _check_chain(kernel: BackwardKernel, head: Head, tile: Tile) -> None:
    """Derivatives are those of the spec's score, by differences."""
    dot, chain, at = _dot(head, tile), kernel.chain, _inside(tile, head)
    visible = head.visible[at]
    rows, keys = visible.shape
    slope = chain.scale * _value(tile, Const(1.0) if chain.slope is None else chain.slope, dot)
    if chain.factor is not None:
        slope = slope * tile.scope.value(chain.factor)
    step = 1e-6
    said = (_score(head, tile, dot + step) - _score(head, tile, dot - step)) / (2 * step)
    told, said = slope[:rows, :keys][visible], said[:rows, :keys][visible]
    near = np.abs(told) < _STEEP  # beside a pole differences say little
    np.testing.assert_allclose(told[near], said[near], rtol=1e-4, atol=1e-6)


def _check_sums(kernel: BackwardKernel, head: Head, tile: Tile) -> None:
    """What a load of floats is multiplied by is how the spec's score changes with one of its elements."""
    dot, at = _dot(head, tile), _inside(tile, head)
    seen = np.zeros(dot.shape, bool)
    seen[: at[0].stop - at[0].start, : at[1].stop - at[1].start] = head.visible[at]
    for adjoint in kernel.chain.adjoints:
        where = [np.broadcast_to(tile.scope.value(index), dot.shape) for index in adjoint.load.indices]
        values = _value(tile, adjoint.value, dot)
        reads = seen & np.broadcast_to(tile.scope.value(adjoint.guard), dot.shape)
        if not reads.any():
            continue
        element = tuple(int(index[reads][-1]) for index in where)
        here = reads & np.logical_and.reduce([index == x for index, x in zip(where, element, strict=True)])
        changed, step = [], 1e-4
        for sign in (1.0, -1.0):
            tensor = head.arrays[adjoint.load.tensor].astype(np.float64)
            tensor[element] += sign * step
            arrays = {**head.arrays, adjoint.load.tensor: tensor}
            changed.append(_score(replace(head, arrays=arrays), tile, dot))
        with np.errstate(all="ignore"):
            said = (changed[0] - changed[1])[seen].sum() / (2 * step)
        if abs(said) < _STEEP:
            np.testing.assert_allclose(values[here].sum(), said, rtol=1e-3, atol=1e-5)


def _check_bound(module: ir.Module, kernel: OutputKernel) -> None:
    """The bound is of the largest and the smallest tiles, of sums as long as they get, and of what causes
    other errors where it is there.
    """
    keys, bound = [config.tile_kv for config in kernel.configs], kernel.bound
    attention = module.variant.attention
    assert (bound.product_error > 0) == (attention.element is DType.F32)
    cuts = attention.softmax.form == "stick_breaking" and target_of(module.target).cuts_summands
    assert (bound.summand_error > 0) == cuts
    assert (bound.left_out > 0) == (module.margin is not None)
    assert min(bound.left_out, bound.tail, bound.summand_error) >= 0
    assert bound.most_probability >= 1
    assert bound.most_probability == 1 or attention.softmax.scales_keys
    assert (bound.tile_kv, bound.min_tile_kv) == (max(keys), min(keys))
    assert bound.renormalised == (kernel.softmax.rescale == "every_step")
    if isinstance(kernel, Decode) and kernel.split is not None and not kernel.split.segment:
        counts = [c.split_kv if isinstance(c.split_kv, int) else kernel.split.most for c in kernel.configs]
        assert bound.splits >= max(counts)


def _check_parts(parts: tuple[DotPart, ...], columns: int) -> None:
    """Parts of columns follow each other, and are all of them."""
    ends = [0, *(part.first + part.width for part in parts)]
    assert [part.first for part in parts] == ends[:-1]
    assert not parts or ends[-1] == columns


def _check_resources(module: ir.Module, which: Which, kernel: Kernel) -> None:
    """Some device has the shared memory of every config, and none is there twice. On CUDA `attnc explain`
    adds up what a launch asks for, tiles are of 16 rows and keys, and a thread has as many registers.
    """
    assert len({*kernel.configs}) == len(kernel.configs) == len(kernel.shared)
    _check_parts(getattr(kernel, "parts", ()), feature(module.seen.variant.attention.q))
    assert kernel.grid.persistent == any(getattr(config, "persistent", False) for config in kernel.configs)
    device = DEVICES["sm_80" if module.target == "cuda.sm_80" else "sm_90"]
    for config, shared in zip(kernel.configs, kernel.shared, strict=True):
        assert any(fits(shared, device) for device in DEVICES.values())
        if module.target != "triton":
            needs = target_of(module.target).estimate(module, config, which, device)
            assert needs.shared == shared == sum(buffer.bytes for buffer in needs.buffers)
            assert needs.registers_per_thread == sum(needs.registers.values()) <= 255
            assert config.tile_q % 16 == config.tile_kv % 16 == 0


@pytest.mark.one_in(8)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_plan_says_what_the_spec_says(path: Path) -> None:
    for module, kernels in _kernels(path):
        cases = [*_heads(module)]
        for number, kernel in enumerate(kernels):
            head = cases[number % len(cases)]
            tiles = _tiles(kernel, head)
            for tile in tiles:
                tile.scope.run((*kernel.step.fetches, *kernel.step.masked_fetches))
            _check_walk(kernel, head, tiles)
            _check_fills(kernel, head, tiles)
            for tile in tiles[len(tiles) // 2 :][:1]:
                _check_score(kernel, head, tile)
                if isinstance(kernel, BackwardKernel):
                    _check_chain(kernel, head, tile)
                    _check_sums(kernel, head, tile)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_plan_keeps_to_its_own_bounds(path: Path) -> None:
    for module in plans_of(path).modules:
        for which, kernel in module.kernels.items():
            _check_resources(module, which, kernel)
            if isinstance(kernel, OutputKernel):
                _check_bound(module, kernel)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [16, 40, 64, 72, 96, 128, 160, 192, 256, 320, 512])
@pytest.mark.parametrize(("dtype", "mask"), [("bf16", "causal"), ("f32", "window(20, 3)"), ("f16", "true")])
def test_heads_of_every_width_have_room(dtype: str, mask: str, width: int, target: str) -> None:
    """What a schedule does not say fits, and is right; of wide heads, and of f32, some are refused."""
    try:
        module = planned(mask, d=width, dtype=dtype, target=target, grads="q, k, v")
    except DiagnosticError:
        if width <= 256 and dtype != "f32":
            raise
        return
    head = next(_heads(module))
    for which, kernel in module.kernels.items():
        _check_resources(module, which, kernel)
        _check_walk(kernel, head, _tiles(kernel, head))
