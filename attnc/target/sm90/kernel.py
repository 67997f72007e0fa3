"""The text of a Hopper forward kernel, part by part, as its templates place it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from attnc.plan.ir import Forward, Module
from attnc.plan.sm90 import roles_of
from attnc.plan.sm90.layout import Sm90Layout, list_key_tiles
from attnc.target.sm80.kernel import CudaText
from attnc.target.sm80.lists import LIST_THREADS
from attnc.target.sm80.output_arguments import OutputArguments
from attnc.target.sm80.printer import CudaWalk
from attnc.target.sm90.conversion import ConversionText
from attnc.target.sm90.finish import Sm90Finish
from attnc.target.sm90.narrow import NarrowTiles
from attnc.target.sm90.score import Scores, Sm90Step
from attnc.target.sm90.tiles import FRAGMENT, Boxes, WgmmaTiles


class Sm90Text(CudaText):
    """What `templates/sm90/*.jinja` print besides what `cuda.sm_80` has. roles: as they are planned; score:
    what they compute of scores; narrow, conversion: of keys and values of 8 bits.
    """

    kernel: Forward
    layout: Sm90Layout
    step: Sm90Step
    finish: Sm90Finish
    boxes: Boxes
    wgmma: WgmmaTiles
    score: Scores
    body = "forward_q_kv"
    _fragment = FRAGMENT
    _list_threads = str(LIST_THREADS)

    def __init__(self, module: Module, kernel: Forward, layout: Sm90Layout) -> None:
        super().__init__(module.converted, kernel, layout)
        self.roles, self.shape = roles_of(kernel), layout.shape(self.default)
        self.sums_in_memory &= not layout.keeps_sums
        self.loop = replace(self.loop, end=self.loop.hi, ascends=False)
        self.score = Scores(kernel, layout, self.step, self.dtypes, self.module.variant)
        self.step = Sm90Step(kernel, self.dtypes, self.score)
        row = "64 * consumer + 16 * warp + 8 * r + g"
        computed = tuple(item for item in self.thread.computed if item != self.roles.softmax.pair)
        self.thread = replace(self.thread, row=row, computed=computed)
        lanes = "(32 / (BLOCK_M / 64))" if self.roles.own_ranges else "32"
        self.search_lanes = lanes if self.roles.searches_together else ""
        parts, self.boxes = layout.list_products(kernel.configs), Boxes(self.view.row_zero)
        key_tiles = list_key_tiles(kernel.configs)
        self.wgmma = WgmmaTiles(
            layout,
            key_tiles=key_tiles,
            sum_columns=(columns for _, columns in parts),
            parts=parts,
            page=self.rows.page,
            warps=layout.narrow.warps,
            RS_BF16=key_tiles if self.roles.softmax.columns else (),
        )
        self.finish = Sm90Finish(self.module, kernel, self.dtypes, self.wgmma.dv_stored)
        self.conversion = None if module.conversion is None else ConversionText(module, self.dtypes)
        self.narrow = NarrowTiles(self, layout.narrow) if layout.narrow else None

    @cached_property
    def walk(self) -> CudaWalk:
        walk = CudaWalk(walk=self.kernel.walk, of_call="", section="", last=self.roles.claims.last)
        return replace(walk, blocks="clusters", size="CLUSTER_M") if self.layout.clusters else walk

    @cached_property
    def arguments(self) -> OutputArguments:
        """Without sections of heads: blocks are at different tiles of a head, which stays in the L2 cache,
        and not all of them begin a tile at once.
        """
        made = self.conversion
        lists = ["int* _list_bits_ptr;"] if self.lists else []
        return self._pass_arguments(
            sizes=list(dict.fromkeys((*self.kernel.dims, *(made.dims if made else ())))),
            workspaces=[*lists, *(made.pointers if made else ()), *self._sums, "int* counter_ptr;"],
            maps=(*self.roles.boxes, *(["o"] if any(self.roles.ways_out) else [])),
            boxes=self.roles.boxes_alone,
            more_strides=[part.strides for part in made.parts] if made else (),
        )
