"""Masks that read bits of words, such as a tree of drafts, in a kernel whose threads have many keys of a row.

A word of a row has the bits of 32 neighbouring keys. Asked for element by element, the mask of a tile of 64 x
64 would load the few words of a row once for each key, with a test of their place. So they are loaded once
for each row of a tile, and moved so that its first key has bit 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnc.expr.affine import affine
from attnc.expr.nodes import Binary, Call, Const, Expr, Index, Ref, uses, walk
from attnc.expr.simplify import substitute
from attnc.plan.ir import Fetch, Step
from attnc.plan.ir.kernel import KeyBits
from attnc.plan.loads import axes_of

#: Bits of a word.
WORD = 32
_KEY = Index("kv_idx")


def with_words(step: Step) -> Step:
    """Returns the step with the words whose bits its mask reads."""
    found = (_bits_of(fetch, step.keep) for fetch in step.masked_fetches if step.keep is not None)
    return replace(step, bits=tuple(bits for bits in found if bits is not None))


def _bits_of(fetch: Fetch, keep: Expr) -> KeyBits | None:
    load = fetch.load
    if load.type != "int" or load.wide or load.is_byte or load.within is not None:
        return None
    for place in _places(load.indices):
        word, value = Binary("//", place, Const(WORD)), Ref(fetch.name, "int", fetch.axes)
        bit = Call("bit", (value, Binary("%", place, Const(WORD))))
        others = (*(x for x in load.indices if x != word), substitute(fetch.guard, {word: Const(0)}))
        rest = substitute(keep, {bit: Ref("seen", "bool", fetch.axes)})
        if rest != keep and not any("kv_idx" in uses(x) for x in others) and value not in walk(rest):
            return KeyBits(fetch=fetch, place=place, word=word, bit=bit)
    return None


def _places(indices: tuple[Expr, ...]) -> Iterator[Expr]:
    """Yields numbers of bits that go up with the key, and are alike for all rows."""
    for index in indices:
        match index:
            case Binary(op="//", left=place, right=Const(value=value)) if value == WORD:
                if dict(affine(place).terms).get(_KEY) == 1 and "q" not in axes_of(place):
                    yield place
