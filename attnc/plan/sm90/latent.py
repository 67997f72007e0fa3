"""Gradients whose sums two warpgroups share, by wgmma: where the first columns of keys are values, as in
multi-head latent attention, and of other heads of more than 256 columns.

dk = dS^T Q, with P^T dO added to the columns that are values, is one sum of up to 640 columns, and so is dq:
too many for the registers of one warpgroup. Two share them, for the same 64 rows. The first multiplies S and
makes P, which it gives to the other through shared memory, as f32 in the order of fragments. The other
multiplies dP, makes dS, and gives it back rounded. Each then holds both as left operands in registers, and
multiplies them by its half of the columns of Q and dO, or of K. Every product is made once; a tile of K is
one of V too.

`dk`: a block keeps 64 keys, and queries come by, 32 at a time, head after head of those that share the keys.
`dq`: a block keeps 64 queries, and keys come by, 32 at a time.

Values of their own (`WideBackward`) make three kernels of these. Beside K and V of 64 keys that of dk has
room for two tiles of Q, and so has that of dq, beside Q and dO, for two of K; what else dP is made of, dO
or V, comes by 64 columns at a time, each given back as soon as it is multiplied. A kernel for dv
multiplies S once more, so that there are eight products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeAlias, TypeVar

from attnc.expr.nodes import Dim, Index, walk
from attnc.model.attention import Attention, Variant
from attnc.model.dtypes import DType
from attnc.model.schedule import Schedule, TileConfig
from attnc.plan.device import DEVICES
from attnc.plan.gradients import find_score_inputs, has_constant_slope
from attnc.plan.layout import KernelName
from attnc.plan.signature import feature, kv_heads
from attnc.plan.sm80.backward import plan_cuda_backward
from attnc.plan.sm80.layout import GRANULE, CudaBackwardLayout, CudaLayout, over_rows
from attnc.plan.sm90.backward import Sm90Backward
from attnc.plan.sm90.layout import PIECE, WGMMA_ROWS, WIDEST

#: Rows of the tiles that come by; buffers of them.
_ROWS, _STAGES = 32, 2
#: Bytes that may be skipped so that tiles lie right, and of barriers and what is known of tiles.
_BARRIERS = 1024 + 512
#: Pieces of 64 columns whose sums a thread of a warpgroup holds.
_MOST_PIECES = 5
#: Buffers for such pieces of dO, or of V, where whole tiles have no room: as many as fit, for a piece takes
#: longer to come than to be multiplied.
_PIECES = 6
#: Columns of a head beyond which its gradients are shared, and up to which they are.
_NARROWEST, _WIDEST = 256, 512
#: The same of kernels of mma.sync that sum gradients of what the score reads, too, or of that alone.
_WIDEST_BESIDE_SUMS = 288


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentBackward(Sm90Backward):
    """As for `Sm90Backward`, of kernels whose keys are values too."""

    def summed_panels(self, kernel: KernelName) -> int:
        return self.qk_panels

    def first_panels(self, kernel: KernelName) -> int:
        """Those of them that the first warpgroup sums; the other has the rest."""
        return self.summed_panels(kernel) // 2

    @property
    def gives_p(self) -> bool:
        return True

    def tile(self, kernel: KernelName) -> tuple[int, int]:
        return (WGMMA_ROWS, _ROWS) if over_rows(kernel) else (_ROWS, WGMMA_ROWS)

    def staged(self, kernel: KernelName) -> int:
        return 0

    def k_tiles(self, kernel: KernelName) -> int:
        return 1

    def shared_memory(self, config: TileConfig, kernel: KernelName) -> dict[str, int]:
        if kernel not in self.by_wgmma:
            return CudaBackwardLayout.shared_memory(self, config, kernel)
        rows, keys = self.tile(kernel)
        queries_at_once, keys_at_once = (1, _STAGES) if over_rows(kernel) else (_STAGES, 1)
        buffers = {
            "q": queries_at_once * rows * self.qk_panels * 2 * PIECE,
            "do": queries_at_once * rows * self.v_panels * 2 * PIECE,
            "k": keys_at_once * keys * self.qk_panels * 2 * PIECE,
            "p": rows * keys * 4,
            "ds": rows * keys * 2,
            "rows": 0 if over_rows(kernel) else _STAGES * 2 * rows * 4,
            "barriers": _BARRIERS,
        }
        return {name: size for name, size in buffers.items() if size}

    def registers(self, config: TileConfig, kernel: KernelName) -> dict[str, int]:
        if kernel not in self.by_wgmma:
            return CudaBackwardLayout.registers(self, config, kernel)
        held = self.summed_panels(kernel) - self.first_panels(kernel)
        return {kernel: 32 * held, "p": _ROWS // 2, "dp": _ROWS // 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class WideBackward(LatentBackward):
    """As for `LatentBackward`, where values are a tensor of their own."""

    @property
    def pieces(self) -> int:
        return _PIECES

    def summed_panels(self, kernel: KernelName) -> int:
        return self.v_panels if kernel == "dv" else self.qk_panels

    def shared_memory(self, config: TileConfig, kernel: KernelName) -> dict[str, int]:
        if kernel not in self.by_wgmma:
            return CudaBackwardLayout.shared_memory(self, config, kernel)
        rows, keys = self.tile(kernel)
        row, piece = 2 * PIECE, _PIECES * _ROWS * 2 * PIECE
        of_q, of_do = rows * self.qk_panels * row, rows * self.v_panels * row
        of_k, of_v = keys * self.qk_panels * row, keys * self.v_panels * row
        tiles = {
            "dq": {"q": of_q, "do": of_do, "k": _STAGES * of_k, "v": piece},
            "dk": {"q": _STAGES * of_q, "do": piece, "k": of_k, "v": of_v},
            "dv": {"q": _STAGES * of_q, "do": _STAGES * of_do, "k": of_k},
        }
        buffers = {
            **tiles[kernel],
            "p": rows * keys * 4,  # and ds, in the place of p that was read
            "rows": _STAGES * 2 * rows * 4 if self.reads_rows and not over_rows(kernel) else 0,
            "barriers": _BARRIERS,
        }
        return {name: size for name, size in buffers.items() if size}


def plan_latent_backward(variant: Variant, schedule: Schedule, layout: CudaLayout) -> LatentBackward:
    """Returns how the kernels of a schedule lie."""
    return _share(LatentBackward, variant, schedule, layout, {"dq", "dk"})


def plan_wide_backward(variant: Variant, schedule: Schedule, layout: CudaLayout) -> WideBackward:
    """Returns the same of values of their own (`refuse_wide_gradients`)."""
    return _share(WideBackward, variant, schedule, layout, {"dq", "dk", "dv"})


_Shared = TypeVar("_Shared", bound=LatentBackward)


def _share(
    kind: type[_Shared], variant: Variant, schedule: Schedule, layout: CudaLayout, kernels: set[KernelName]
) -> _Shared:
    plan = replace(plan_cuda_backward(variant, schedule, layout), sliced=False)
    return kind(
        **{field.name: getattr(plan, field.name) for field in fields(plan)},
        by_wgmma=frozenset(kernels),
        turns=None,
    )


def refuse_latent_gradients(attention: Attention) -> str:
    """Returns why there are no kernels for gradients of a normalised attention whose values are columns of
    its keys; "" where there are.
    """
    if attention.softmax.form != "softmax":
        return "these kernels make p from the score and lse"
    d, dv = feature(attention.q), feature(attention.v)
    pieces = -(-d // PIECE)
    if d % PIECE or dv % PIECE:
        return f"{d} and {dv} columns are no multiples of {PIECE}"
    if pieces - pieces // 2 > _MOST_PIECES or pieces < 2:
        return f"two warpgroups share {2 * PIECE} to {2 * _MOST_PIECES * PIECE} columns of sums, not {d}"
    if not has_constant_slope(attention) or attention.softmax.dropout is not None:
        return "of ds, p is one factor, and the other a constant here: no soft caps, no dropout"
    # of the kernel for dq: Q and dO of 64 rows, and two tiles of K
    held = (WGMMA_ROWS * (d + dv) + _STAGES * _ROWS * d) * 2 + WGMMA_ROWS * _ROWS * 6 + _BARRIERS
    if held > DEVICES["sm_90"].shared_per_block:
        return f"tiles of {d} and {dv} columns need {held} B of shared memory"
    return _refuse_shared(attention, "q", "k")


def refuse_wide_gradients(attention: Attention) -> str:
    """Returns why there are no kernels for gradients of a normalised attention of more than 256 columns, with
    values of their own, beside a forward that decodes; "" where there are.
    """
    d, dv = feature(attention.q), feature(attention.v)
    if max(d, dv) <= _NARROWEST:
        return "the decode kernel has no backward"
    if min(d, dv) <= PIECE or max(d, dv) > _WIDEST:
        return f"two warpgroups share {PIECE + GRANULE} to {_WIDEST} columns, not {d} and {dv}"
    if attention.q.dtype == DType.F32:
        return "the decode kernel has no backward"
    if (widest := max(d, dv)) > _WIDEST_BESIDE_SUMS:
        if find_score_inputs(attention):
            return (
                f"gradients of what the score reads have {_WIDEST_BESIDE_SUMS} columns at most, not {widest}"
            )
        if not {"q", "k", "v"} & set(attention.grads):
            return (
                f"of more than {_WIDEST_BESIDE_SUMS} columns other gradients come beside those of q, k or v"
            )
    return ""


def shares_wide_gradients(attention: Attention) -> bool:
    """Returns whether two warpgroups share those gradients: of ds, the first hands on what dp - delta is
    multiplied by, one number for each element. Others are made by the kernels of mma.sync: of sticks, where a
    key's ds depends on those behind it, and of softpick beside a slope, since ds needs the sign of the score,
    too.
    """
    form = attention.softmax.form
    if form == "stick_breaking" or (form == "softpick" and not has_constant_slope(attention)):
        return False
    return not _refuse_shared(attention, "q", "k", "v")


def _refuse_shared(attention: Attention, *grads: str) -> str:
    if find_score_inputs(attention) or {"q", "k", "v"} & set(attention.grads) - set(grads):
        *others, last = grads
        return f"these kernels make the gradients of {', '.join(others)} and {last} alone"
    if kv_heads(attention) != Dim("H") and Index("h") in walk(attention.mask):
        return "one mask for all heads that share the keys"
    return ""


#: Products by columns: the first fragment of a consumer's sums, columns, and the first panel of the tile.
Products: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedProducts:
    """What the two consumers of a tile multiply. q_parts, do_parts: of each consumer, the products by columns
    of q or k, and of do; pieces: buffers for 64 columns of what dp is multiplied from, 0 where that comes in
    tiles; apart: values are a tensor of their own; makes_dv: so that dv has a kernel; first_panels: of the
    sums, those of the first consumer.
    """

    pieces: int
    apart: bool
    makes_dv: bool
    first_panels: int
    q_parts: tuple[Products, Products]
    do_parts: tuple[Products, Products]
    makes_dq: bool

    @property
    def widths(self) -> list[int]:
        products = (*self.q_parts, *(() if self.makes_dq else self.do_parts))
        return sorted({columns for parts in products for _, columns, _ in parts})


def share_products(plan: LatentBackward, kernel: KernelName) -> SharedProducts:
    """Returns what each of two warpgroups multiplies in a kernel."""
    apart, first = plan.pieces > 0, plan.first_panels(kernel)
    end = plan.summed_panels(kernel)
    shares = (range(first), range(first, end))
    cut = 0 if apart else plan.v_panels  # where values end: one sum takes products of one shape
    of_do, of_q = kernel == "dv" or not apart, kernel != "dv"
    q_parts = [(*_cut(share, 0, cut), *_cut(share, cut, end)) if of_q else () for share in shares]
    do_parts = [tuple(_cut(share, 0, plan.v_panels)) if of_do else () for share in shares]
    return SharedProducts(
        pieces=plan.pieces if of_q else 0,
        apart=apart,
        makes_dv=not of_q,
        first_panels=first,
        q_parts=(q_parts[0], q_parts[1]),
        do_parts=(do_parts[0], do_parts[1]),
        makes_dq=kernel == "dq",
    )


def _cut(share: range, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    most = WIDEST // PIECE
    stop = min(share.stop, end)
    for first in range(max(share.start, begin), stop, most):
        yield (first - share.start) * PIECE // 8, min(most, stop - first) * PIECE, first
