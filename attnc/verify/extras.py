"""What inputs besides q, k and v hold: values at which masks, scores and dropout change their nature.

A style changes numbers that were drawn, and is a name: the same (style, seed, shape) always gives the same
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from attnc.expr.nodes import Binary, Compare, Expr, Load, Neg, walk
from attnc.model.attention import Attention
from attnc.model.tensors import DType, Tensor
from attnc.reference_arrays import Array
from attnc.verify.data import Rng


def _drawn(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    return drawn


def _zero(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Nothing is dropped, scaled or added."""
    return np.zeros_like(drawn)


def _one(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Everything is dropped; every flag is set."""
    return np.ones_like(drawn)


def _negative(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Scales turn scores around; quotients and remainders of integers round below zero."""
    if drawn.dtype == np.bool_:
        return ~drawn
    if tensor.name in probabilities(attention):
        return drawn
    if np.issubdtype(drawn.dtype, np.integer):
        return np.minimum(drawn, ~drawn)  # the least integer has no opposite
    return -np.abs(drawn)


def _masked(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """What is added to a score is -inf: in whole rows, and here and there."""
    if tensor.name not in addends(attention) or not drawn.ndim:
        return drawn
    rows = rng.random((*drawn.shape[:-1], 1)) < 0.3
    return np.where(rows | (rng.random(drawn.shape) < 0.2), -np.inf, drawn)


def _many(attention: Attention, tensor: Tensor, drawn: Array, rng: Rng) -> Array:
    """Ids of so many things that each has a few positions; what is searched holds many values."""
    if not drawn.ndim or tensor.name not in compared(attention):
        return drawn
    found: Array = rng.integers(0, max(drawn.shape[-1] // 6, 2), drawn.shape)
    return found


EXTRAS: Mapping[str, Callable[[Attention, Tensor, Array, Rng], Array]] = {
    "drawn": _drawn,
    "zero": _zero,
    "one": _one,
    "negative": _negative,
    "masked": _masked,
    "many": _many,
}


def restyled(attention: Attention, tensor: Tensor, drawn: Array, style: str, rng: Rng) -> Array:
    """The numbers of an input in this style; what says where rows lie, and seeds, stay as they are."""
    if tensor.name in addresses(attention):
        return drawn
    return EXTRAS[style](attention, tensor, drawn, rng)


def styles_for(attention: Attention) -> tuple[str, ...]:
    """The styles that make a difference to this attention, the ordinary one first."""
    free = [tensor for tensor in attention.extras if tensor.name not in addresses(attention)]
    if not free:
        return ("drawn",)
    found = ["drawn", "zero", "one", "negative"]
    if any(tensor.shape and tensor.name in addends(attention) for tensor in free):
        found.append("masked")
    if any(tensor.shape and tensor.name in compared(attention) for tensor in free):
        found.append("many")
    return tuple(found)


def addresses(attention: Attention) -> set[str]:
    """Inputs that say where rows lie or how many there are, and the seed of dropout."""
    found = {name for tensor in (attention.q, attention.k, attention.v) for name in tensor.storage.tables}
    seed = attention.softmax.seed
    exprs = (*attention.lengths.values(), *(() if seed is None else (seed,)))
    return found | {name for expr in exprs for name in _loads(expr)}


def probabilities(attention: Attention) -> set[str]:
    """Inputs that dropout reads: probabilities."""
    dropout = attention.softmax.dropout
    return set() if dropout is None else _loads(dropout)


def addends(attention: Attention) -> set[str]:
    """Float inputs that are added to the score as they are."""
    return {
        term.tensor
        for term in _terms(attention.score)
        if isinstance(term, Load) and DType(attention.tensor(term.tensor).dtype).is_float
    }


def compared(attention: Attention) -> set[str]:
    """Integer inputs whose elements the mask compares with each other."""
    return {
        name
        for node in walk(attention.mask)
        if isinstance(node, Compare)
        for name in _loads(node.left) & _loads(node.right)
        if not DType(attention.tensor(name).dtype).is_float
    }


def _terms(expr: Expr) -> Iterator[Expr]:
    match expr:
        case Binary(op="+", left=left, right=right):
            yield from _terms(left)
            yield from _terms(right)
        case Binary(op="-", left=left):
            yield from _terms(left)
        case Neg():
            return
        case _:
            yield expr


def _loads(expr: Expr) -> set[str]:
    return {node.tensor for node in walk(expr) if isinstance(node, Load)}
