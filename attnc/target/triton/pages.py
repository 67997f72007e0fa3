"""Look-ups in the block table, as text: the pages of a decode kernel's tiles, tiles before their rows."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.plan.access import Rows
from attnc.plan.ir import Loop
from attnc.target.triton.printer import scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesText:
    """Calls of `_pages_of` (`templates/triton/_decode_rows.py.jinja`).

    rows: of k, whose pages are those of v too; first: the loop that looks ahead; whole: its tiles have all of
    their rows; split: programs share a sequence.
    """

    rows: Rows
    first: Loop
    whole: bool
    split: bool

    def after(self, tiles: int) -> str:
        """The pages of the tile so many tiles after the first: looked up while q is on its way."""
        start = scalar(self.first.start) + (f" + {tiles} * BLOCK_N" if tiles else "")
        if self.whole:
            return self._of(start, scalar(self.first.stop), whole=True)
        return self._within(start, self.first)

    def later(self, loop: Loop) -> str:
        """Those of a tile further on: a look-up waits for all rows that were asked for before.

        Three tiles ahead a short split starts sooner; where programs have whole sequences, two are faster.
        Entry by entry, although they could be vectors: those the compiler asks for behind the rows of a tile.
        """
        ahead = "(3 if SPLIT else 2)" if self.split else "2"
        return self._within(f"kv_lo + {ahead} * BLOCK_N", loop)

    @property
    def own(self) -> str:
        """Those of the tile at hand."""
        return self._of("kv_lo", "N")

    def _within(self, start: str, loop: Loop) -> str:
        """None past the loop's end, where somebody would wait for them."""
        return self._of(start, f"tl.where({start} < {scalar(loop.stop)}, N, 0)")

    def _of(self, start: str, stop: str, whole: bool = False) -> str:
        """The pages of the tile that begins with this key: up to N, as its rows are read up to there."""
        k, form = self.rows, "SPLIT" if self.split else "False"
        where = f"{k.table}, {k.table_stride}, {start}, {stop}"
        return f"_pages_of({where}, {whole}, {form}, BLOCK_N, {k.page})"
