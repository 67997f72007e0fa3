"""The text of a Hopper decode kernel, part by part, and of the kernel that joins its splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice, takewhile

from attnc.plan.ir import Decode, Let, Module
from attnc.plan.sm90.decode_layout import Sm90DecodeLayout, knows_first_tile, shows_unseen_values
from attnc.plan.sm90.layout import list_key_tiles
from attnc.target.sm80.kernel import CudaDecodeText
from attnc.target.sm80.lists import CudaListsText
from attnc.target.sm80.output_arguments import OutputArguments
from attnc.target.sm80.pack import HeadPack
from attnc.target.sm80.row_lists import in_sequence_of, lists_text
from attnc.target.sm90.conversion import ConversionText
from attnc.target.sm90.finish import Sm90Finish
from attnc.target.sm90.narrow import NarrowTiles
from attnc.target.sm90.tiles import FRAGMENT, Boxes, WgmmaTiles


class Sm90DecodeText(CudaDecodeText):
    """What `templates/sm90/decode.cu.jinja`, `decode_warps.cu.jinja` and their parts print; scores, masks and
    splits are as for `cuda.sm_80`.

    unites: what the queries of a tile list together; starts_early: whether the first tile is known before any
    length is; unseen_values: whether rows of v in a partial tile have to be made zero; conversion: of keys
    and values of 8 bits, before the kernel.
    """

    kernel: Decode
    layout: Sm90DecodeLayout
    boxes: Boxes
    wgmma: WgmmaTiles
    search_lanes = ""
    _fragment = FRAGMENT
    _alone_type = HeadPack

    def __init__(self, module: Module, kernel: Decode, layout: Sm90DecodeLayout) -> None:
        super().__init__(module.converted, kernel, layout)
        warps = kernel.configs[0].warps  # of all, since they say how many consumers there are
        self.conversion = ConversionText(module, self.dtypes, warps=warps) if module.conversion else None
        self.body = "decode_warps" if layout.by_warps else "decode"
        self.pack = replace(self.pack, last_first=layout.splits_keys)
        by_entry, pages = (made.by_entry, made.page_rows) if (made := self.lists) else (False, "")
        self.rows = replace(self.rows, page=layout.page, by_entry=by_entry, listed_pages=pages)
        self.unites = self.lists.unites if self.lists else ""
        self.starts_early = knows_first_tile(kernel) and self.lists is None and not self.segment
        if self.split is not None and self.split.in_turn:
            self.loop = replace(self.loop, step="split_step")
        self.loop = self.loop.descend() if self.segment else self.loop
        row = f"{'64 * consumer + ' * layout.by_rows}{'16 * warp + ' * (not layout.by_warps)}8 * r + g"
        lane = "consumer == 0 && " if layout.shares_columns else ""
        self.thread = replace(self.thread, row=row, lane=lane, in_sequence=in_sequence_of(module, row))
        self.finish = Sm90Finish(module, kernel, self.dtypes, "COLUMNS")
        parts = layout.list_products(kernel.configs)
        sums = list(dict.fromkeys(columns for part in parts for _, columns in part))
        key_tiles, self.boxes = list_key_tiles(kernel.configs), Boxes(self.view.row_zero)
        self.wgmma = WgmmaTiles(
            layout,
            key_tiles=key_tiles,
            sum_columns=sums,
            parts=parts[0],
            page=layout.page,
            warps=layout.narrow.warps,
            SS_ROWS=sums if layout.shares_columns else (),
            RS_COLUMNS=key_tiles if layout.keeps_rest else (),
        )
        self.narrow = NarrowTiles(self, layout.narrow) if layout.narrow else None
        self.unseen_values = shows_unseen_values(kernel, layout)

    def _make_lists(self) -> CudaListsText | None:
        return lists_text(self.module, self.dtypes)

    @property
    def first_loads(self) -> list[str]:
        """The first lines of `program`, which ask memory and wait for nothing: where rows lie, lengths."""
        found = takewhile(lambda item: not isinstance(item, Let), self.kernel.program)
        of_list = [item for item in self.kernel.program if item.name != "N"]  # which no other reads
        return list(map(self.step.statement, of_list if self.rows.by_entry else found))

    @property
    def program(self) -> Iterator[str]:
        if not self.rows.by_entry:
            yield from islice(super().program, len(self.first_loads), None)

    @cached_property
    def arguments(self) -> OutputArguments:
        made, lists = self.conversion, () if self.lists is None else self.lists.sizes
        return self._pass_arguments(
            sizes=list(dict.fromkeys((*self._size_names, *lists, *(made.dims if made else ())))),
            workspaces=[*self._split_results, *(made.pointers if made else ()), *self._sums, *self._listed],
            maps=self.layout.mapped,
            boxes=self.layout.mapped,
            more_strides=[part.strides for part in made.parts] if made else (),
        )
