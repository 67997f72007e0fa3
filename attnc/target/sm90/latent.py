"""The products of Hopper kernels for gradients where the first columns of keys are values."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.nodes import Expr
from attnc.plan.sm90.latent import LatentBackward
from attnc.plan.sm90.layout import PIECE, WIDEST
from attnc.target.sm80.printer import scalar


class LatentProducts:
    """What the two consumers of a tile multiply. q_parts, do_parts: of each consumer, the products by columns
    of q or k, and of do, as the first fragment of its sums, columns, and the first panel of the tile;
    widths: the columns of all; ds_factor: the factor of the score, "" where it is 1.
    """

    def __init__(self, plan: LatentBackward, *, over_q: bool, slope: Expr | None) -> None:
        self.first_panels = plan.first_panels
        shares = (range(plan.first_panels), range(plan.first_panels, plan.qk_panels))
        self.do_parts = [list(_parts(share, 0, plan.v_panels)) for share in shares]
        # cut where values end: one sum takes products of one shape
        self.q_parts = [
            [*of_values, *_parts(share, plan.v_panels, plan.qk_panels)]
            for of_values, share in zip(self.do_parts, shares, strict=True)
        ]
        products = (*self.q_parts, *(() if over_q else self.do_parts))
        self.widths = sorted({columns for parts in products for _, columns, _ in parts})
        self.ds_factor = "" if slope is None else scalar(slope)


def _parts(share: range, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields the products of those panels of a share that are from `begin` to `end`."""
    most = WIDEST // PIECE
    stop = min(share.stop, end)
    for first in range(max(share.start, begin), stop, most):
        yield (first - share.start) * PIECE // 8, min(most, stop - first) * PIECE, first
