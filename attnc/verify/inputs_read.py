"""What an attention reads its inputs as: where rows lie, bits, counts, probabilities, slopes, divisors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from attnc.expr.functions import REAL
from attnc.expr.nodes import Binary, Call, Compare, Expr, Index, InList, Load, Neg, walk
from attnc.model.attention import Attention
from attnc.model.dtypes import DType


def addresses(attention: Attention) -> set[str]:
    """Returns inputs that say where rows lie or how many there are, the seed of dropout, and lists that are
    promised to be distinct.
    """
    found = {name for tensor in (attention.q, attention.k, attention.v) for name in tensor.storage.tables}
    seed = attention.softmax.seed
    exprs = (*attention.lengths.values(), *(() if seed is None else (seed,)))
    promised = {name for name in lists(attention) if attention.tensor(name).is_distinct}
    return found | promised | {name for expr in exprs for name in _loads(expr)}


def lists(attention: Attention) -> dict[str, InList]:
    """Returns the conditions of the mask that lists are read by, by the input that holds them."""
    return {node.tensor: node for node in walk(attention.mask) if isinstance(node, InList)}


def find_words(attention: Attention) -> set[str]:
    """Returns inputs whose elements are words of bits, and nothing else."""
    nodes = list(_nodes(attention))
    words = (node.args[0] for node in nodes if isinstance(node, Call) and node.function == "bit")
    read = Counter(word.tensor for word in words if isinstance(word, Load))
    loaded = Counter(node.tensor for node in nodes if isinstance(node, Load))
    return {name for name, times in read.items() if times == loaded[name]}


def find_counts(attention: Attention) -> dict[str, InList]:
    """Returns the same by the inputs that say how many entries count."""
    return {
        name: node
        for node in lists(attention).values()
        if node.limit is not None
        for name in _loads(node.limit)
    }


def probabilities(attention: Attention) -> set[str]:
    """Returns inputs that dropout reads: probabilities."""
    dropout = attention.softmax.dropout
    return set() if dropout is None else _loads(dropout)


def addends(attention: Attention) -> set[str]:
    """Returns float inputs that are added to the score as they are."""
    return {
        term.tensor
        for term in _terms(attention.score)
        if isinstance(term, Load) and DType(attention.tensor(term.tensor).dtype).is_float
    }


def find_terms(attention: Attention) -> set[str]:
    """Returns float inputs that are added to the score as they are, or taken from it."""
    return {
        term.tensor
        for term in _terms(attention.score, taken=True)
        if isinstance(term, Load) and DType(attention.tensor(term.tensor).dtype).is_float
    }


def find_saturated(attention: Attention) -> set[str]:
    """Returns float inputs that a bounded function of the epilogue reads, such as a gate's."""
    if attention.epilogue is None:
        return set()
    bounded = (
        node
        for node in walk(attention.epilogue)
        if isinstance(node, Call) and node.function in REAL and REAL[node.function].is_bounded
    )
    read = {name for node in bounded for name in _loads(node)}
    return {name for name in read if DType(attention.tensor(name).dtype).is_float}


def find_sinks(attention: Attention) -> set[str]:
    """Returns float inputs that the sink reads."""
    sink = attention.softmax.sink
    return {
        name
        for name in (set() if sink is None else _loads(sink))
        if DType(attention.tensor(name).dtype).is_float
    }


def find_slopes(attention: Attention) -> set[str]:
    """Returns float inputs that multiply a distance or a position in the score."""
    sides = (
        pair
        for node in walk(attention.score)
        if isinstance(node, Binary) and node.op == "*"
        for pair in ((node.left, node.right), (node.right, node.left))
    )
    scaling = {
        name for a, b in sides if any(isinstance(part, Index) for part in walk(b)) for name in _loads(a)
    }
    return {name for name in scaling if DType(attention.tensor(name).dtype).is_float}


def find_divisors(attention: Attention) -> set[str]:
    """Returns integer inputs that divide others."""
    divided = (
        node.right for node in _nodes(attention) if isinstance(node, Binary) and node.op in ("//", "%")
    )
    return {name for expr in divided for name in _loads(expr)}


def find_compared(attention: Attention) -> set[str]:
    """Returns integer inputs whose elements the mask compares with each other."""
    return {
        name
        for node in walk(attention.mask)
        if isinstance(node, Compare)
        for name in _loads(node.left) & _loads(node.right)
        if not DType(attention.tensor(name).dtype).is_float
    }


def _nodes(attention: Attention) -> Iterator[Expr]:
    return (node for expr in attention.expressions for node in walk(expr))


def _terms(expr: Expr, *, taken: bool = False) -> Iterator[Expr]:
    """Yields the terms of a sum, without those that are subtracted unless asked for."""
    match expr:
        case Binary(op="+", left=left, right=right):
            yield from _terms(left, taken=taken)
            yield from _terms(right, taken=taken)
        case Binary(op="-", left=left, right=right):
            yield from _terms(left, taken=taken)
            if taken:
                yield from _terms(right, taken=True)
        case Neg(operand=operand):
            if taken:
                yield from _terms(operand, taken=True)
        case _:
            yield expr


def _loads(expr: Expr) -> set[str]:
    return {node.tensor for node in walk(expr) if isinstance(node, Load)}
