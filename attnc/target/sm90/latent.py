"""The pieces of the text of Hopper kernels for gradients where the first columns of keys are values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnc.plan.ir import Module
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.sm90.backward import Sm90Backward
from attnc.plan.sm90.latent import LatentBackward
from attnc.plan.sm90.layout import PIECE, WIDEST
from attnc.target.sm80.printer import scalar
from attnc.target.sm90.backward import Sm90BackwardText, Sm90RowsText
from attnc.target.sm90.backward_tiles import Sm90Arguments, Sm90TileText
from attnc.target.sm90.tiles import WgmmaTiles


class LatentText(Sm90TileText):
    """What kernels over queries and over keys have in common. q_parts, do_parts: of each consumer, the
    products by columns of q or k, and of do, as the first fragment of its sums, columns, and the first panel
    of the tile; ds_factor: the factor of the score, "" where it is 1.
    """

    plan: LatentBackward

    def __init__(self, module: Module, arguments: Sm90Arguments, planned: BackwardKernel) -> None:
        super().__init__(module, arguments, planned)
        plan = self.plan
        self.first_panels = plan.first_panels
        shares = (range(plan.first_panels), range(plan.first_panels, plan.qk_panels))
        self.do_parts = [list(_parts(share, 0, plan.v_panels)) for share in shares]
        # cut where values end: one sum takes products of one shape
        self.q_parts = [
            [*of_values, *_parts(share, plan.v_panels, plan.qk_panels)]
            for of_values, share in zip(self.do_parts, shares, strict=True)
        ]
        products = (*self.q_parts, *(self.do_parts if not self.over_q else ()))
        widths = {columns for parts in products for _, columns, _ in parts}
        self.wgmma = WgmmaTiles(self.layout, key_tiles=self.key_tiles, sum_columns=sorted(widths))
        slope = self.chain.slope
        self.ds_factor = "" if slope is None else scalar(slope)
        self.chain = replace(self.chain, slope=None)


def _parts(share: range, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields the products of those panels of a share that are from `begin` to `end`."""
    most = WIDEST // PIECE
    stop = min(share.stop, end)
    for first in range(max(share.start, begin), stop, most):
        yield (first - share.start) * PIECE // 8, min(most, stop - first) * PIECE, first


class LatentKeysText(LatentText, Sm90BackwardText):
    """Attribute by attribute what `templates/sm90/backward_latent_dk.cu.jinja` and its parts print."""

    @property
    def template(self) -> str:
        return "backward_latent_dk"

    def __init__(self, module: Module, arguments: Sm90Arguments, planned: BackwardKernel) -> None:
        super().__init__(module, arguments, planned)
        self.do_tiles = "STAGES"


class LatentRowsText(LatentText, Sm90RowsText):
    """Attribute by attribute what `templates/sm90/backward_latent_dq.cu.jinja` and its parts print."""

    template = "backward_latent_dq"


def text_of(
    module: Module, arguments: Sm90Arguments, planned: BackwardKernel, plan: Sm90Backward
) -> tuple[Sm90BackwardText | Sm90RowsText, str]:
    """Returns the text of a kernel of wgmma, and the frame of its file."""
    if isinstance(plan, LatentBackward):
        latent = LatentRowsText if planned.over_q else LatentKeysText
        return latent(module, arguments, planned), "sm90/latent_module"
    made = Sm90RowsText if planned.over_q else Sm90BackwardText
    return made(module, arguments, planned), "sm90/backward_module"
