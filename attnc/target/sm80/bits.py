"""Words whose bits the mask of a tile reads, as text."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnc.expr.affine import KV_LO
from attnc.expr.construct import ZERO, compare
from attnc.expr.nodes import Expr, Index, Ref
from attnc.expr.simplify import substitute
from attnc.model.dtypes import DType
from attnc.plan.ir.kernel import KeyBits
from attnc.target.sm80.printer import at_row, load

_WORD = Ref("word", "int")


@dataclass(frozen=True, slots=True)
class BitsText:
    """Words of a row. name: of a load; first: the bit of a tile's first key; value: word `word` of row r;
    bit: what a mask reads, and what stands for it: a bit of those of the tile.
    """

    name: str
    first: str
    value: str
    bit: tuple[Expr, Expr]


def text_of_bits(bits: KeyBits, dtype: DType) -> BitsText:
    """Returns the text of words of a type."""
    fetch, word = bits.fetch, {bits.word: _WORD}
    indices = tuple(substitute(index, word) for index in fetch.load.indices)
    of_word = replace(fetch.load, indices=indices)
    loaded = load(replace(fetch, load=of_word, guard=substitute(fetch.guard, word)), dtype)
    first = at_row(substitute(bits.place, {Index("kv_idx"): KV_LO}))
    bit = Ref(f"({fetch.name}_bits[r][j / 4] >> (8 * j % 32 + c) & 1)", "int", fetch.axes)
    return BitsText(fetch.name, first, loaded, (bits.bit, compare("!=", bit, ZERO)))
