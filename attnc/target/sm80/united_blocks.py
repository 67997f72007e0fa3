"""The kernel that makes bits of the blocks that the queries of a tile list: what
`templates/sm90/_list_blocks.cu.jinja` prints of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from attnc.model.dtypes import DType
from attnc.plan.ir import Decode, Module
from attnc.plan.ir.list_making import ListMaking
from attnc.plan.lists import QUERY, QUERY_ROW
from attnc.target.declaration import CallText, tiles
from attnc.target.sm80.launches import cuda_kernel
from attnc.target.sm80.lists import CudaListsText
from attnc.target.sm80.loop import WORDS_OF_UNION
from attnc.target.sm80.pack import HeadPack
from attnc.target.sm80.printer import local, scalar, sizes_of_call

_WORD = re.compile(r"[A-Za-z_]\w*")


class UnitedBlocksText(CudaListsText):
    """As for lists of blocks as bits, of tiles of several queries, which a warp each makes."""

    def __init__(self, module: Module, made: ListMaking, dtypes: Mapping[str, DType]) -> None:
        assert isinstance(module.kernel, Decode)
        super().__init__(module, made, dtypes, threads="THREADS")
        self._tiles = tiles(module, module.kernel)

    words_of_tile = WORDS_OF_UNION

    @property
    def lines(self) -> str:
        return self._tiles

    @property
    def _words_each(self) -> str:
        return f"{WORDS_OF_UNION} * "

    def sizes_for(self, place: list[str], pack: HeadPack) -> Iterator[str]:
        """Yields declarations of the sizes that these statements read, and the kernel itself."""
        packed = pack.sequences is not None
        texts = (*place, *self.of_query, self.exists, self.offset, self.count, pack.heads)
        read = {word for text in texts for word in _WORD.findall(re.sub(r"args\.\w+", "", text))}
        read |= {"B"} if packed else {"B", "M"}
        rows = [] if pack.sequences is None else [scalar(pack.sequences.rows)]
        known = [*self.made.dims, "B", "M", "H", "G", "Hkv", *rows]
        yield from sizes_of_call(
            name for name in dict.fromkeys(known) if name in read and not (packed and name == "M")
        )

    def is_none(self, pack: HeadPack) -> str:
        """Returns whether there is no such tile: warps of the last block may be too many."""
        return "b >= B" if pack.sequences is None else f"{pack.head} >= {pack.heads}" if pack.head else ""

    @property
    def of_query(self) -> list[str]:
        """Declarations of a query of the tile, by the number of one of its entries."""
        found = [local("const int", {QUERY.name: "q_lo + place / most"})]
        if any(QUERY_ROW.name in _WORD.findall(scalar(place)) for place in self.made.places):
            found.append(local("const int", {QUERY_ROW.name: f"q_first + {QUERY.name}"}))
        return found

    @property
    def exists(self) -> str:
        return f"{QUERY.name} < M && {scalar(self.made.exists)}"

    def _at(self, tensor: str) -> str:
        return "".join(  # places are names and numbers
            f" + {scalar(place)} * args.stride_{tensor}_{axis}" for axis, place in enumerate(self.made.places)
        )

    @property
    def most_entries(self) -> str:
        return self._size(self.made.extents[-1])

    @property
    def launch(self) -> CallText:
        return cuda_kernel(self.name, f"cdiv({self._tiles}, config.WARPS)", changes={"shared": "0"})
