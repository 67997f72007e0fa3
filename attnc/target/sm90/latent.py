"""The products of Hopper kernels for gradients whose sums two warpgroups share."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.nodes import Expr
from attnc.plan.layout import KernelName
from attnc.plan.sm90.latent import LatentBackward
from attnc.plan.sm90.layout import PIECE, WIDEST
from attnc.target.sm80.printer import scalar


class LatentProducts:
    """What the two consumers of a tile multiply. q_parts, do_parts: of each consumer, the products by columns
    of q or k, and of do, as the first fragment of its sums, columns, and the first panel of the tile;
    widths: the columns of all; ds_factor: the factor of the score, "" where it is 1; pieces: buffers for 64
    columns of what dp is multiplied from, 0 where that comes in tiles; apart: values are a tensor of their
    own; makes_dv: so that dv has a kernel; panels: of the sums, as C++.
    """

    def __init__(self, plan: LatentBackward, kernel: KernelName, slope: Expr | None) -> None:
        self.pieces = 0 if kernel == "dv" else plan.pieces
        self.apart, self.makes_dv = plan.pieces > 0, kernel == "dv"
        self.panels = "V_PANELS" if kernel == "dv" else "QK_PANELS"
        self.first_panels, end = plan.first_panels(kernel), plan.summed_panels(kernel)
        shares = (range(self.first_panels), range(self.first_panels, end))
        self.do_parts: list[list[tuple[int, int, int]]] = [[], []]
        self.q_parts: list[list[tuple[int, int, int]]] = [[], []]
        if kernel == "dv" or not self.apart:
            self.do_parts = [list(_parts(share, 0, plan.v_panels)) for share in shares]
        if kernel != "dv":
            # cut where values end: one sum takes products of one shape
            cut = 0 if self.apart else plan.v_panels
            self.q_parts = [[*_parts(share, 0, cut), *_parts(share, cut, end)] for share in shares]
        products = (*self.q_parts, *(() if kernel == "dq" else self.do_parts))
        self.widths = sorted({columns for parts in products for _, columns, _ in parts})
        self.ds_factor = "" if slope is None else scalar(slope)


def _parts(share: range, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields the products of those panels of a share that are from `begin` to `end`."""
    most = WIDEST // PIECE
    stop = min(share.stop, end)
    for first in range(max(share.start, begin), stop, most):
        yield (first - share.start) * PIECE // 8, min(most, stop - first) * PIECE, first
