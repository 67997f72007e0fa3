"""The epilogue, planned: what becomes of the rows of o before they leave, and the kernel that carries the
gradient of o through it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attnc.expr.derive import derive
from attnc.expr.nodes import COLUMN, Index, Ref, uses, walk
from attnc.expr.simplify import simplify
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.plan.gradients import WantedLoad, adjoint_of
from attnc.plan.ir import Decode, Epilogue, Fetch, Statement, statement_expressions
from attnc.plan.ir.backward import Accumulate, EpilogueGradient
from attnc.plan.loads import LoadNames
from attnc.plan.steps import count_stored_rows, dims_of, lengths, sequences, sizes
from attnc.plan.steps import program as program_of


def plan_epilogue(attention: Attention, names: LoadNames) -> Epilogue | None:
    """Returns the epilogue of a kernel whose other values have these names."""
    if attention.epilogue is None:
        return None
    own = replace(names, fetches=[], rows={})
    value = own.replace(simplify(attention.epilogue))
    return Epilogue(
        value=value,
        program=program_of(own, ()),
        rows=tuple(fetch for fetch in own.fetches if fetch.axes == ("q",)),
        fetches=_in_tile(own),
        span=attention.epilogue.span,
    )


def plan_epilogue_gradient(
    attention: Attention, wanted: Iterable[tuple[WantedLoad, Accumulate]], taken: frozenset[str]
) -> EpilogueGradient | None:
    """Returns the kernel of the epilogue's gradients. wanted: those of what it loads; taken: names of other
    values.
    """
    if attention.epilogue is None:
        return None
    names = LoadNames.of(attention, "q", taken)
    shortened = lengths(attention, names)
    derivative = derive(attention.epilogue)
    slope = names.replace(derivative.dot)
    values = dict(derivative.loads)
    adjoints = tuple(
        adjoint_of(entry, names.replace(values[entry.load]), accumulate, names)
        for entry, accumulate in wanted
    )
    made = EpilogueGradient(
        name=f"{attention.name}_backward_epilogue",
        dims=(),
        program=program_of(names, shortened),
        rows=tuple(fetch for fetch in names.fetches if fetch.axes == ("q",)),
        fetches=_in_tile(names),
        slope=slope,
        adjoints=adjoints,
        stored=count_stored_rows(attention),
        sequences=sequences(attention),
        span=attention.epilogue.span,
    )
    return replace(made, dims=sizes(attention, dims_of((*made.expressions, made.stored))))


def is_row(fetch: Fetch, dtype: DType) -> bool:
    """Returns whether columns of 16 bits are loaded in their order, under a condition of the row alone, so
    that several may be loaded at once.
    """
    *others, last = fetch.load.indices
    beside = (*others, fetch.guard)
    nodes = [node for expr in beside for node in walk(expr)]
    is_of_columns = any(COLUMN in uses(x) for x in beside) or any(
        isinstance(node, Ref) and "kv" in node.axes for node in nodes
    )
    return last == Index(COLUMN) and not is_of_columns and dtype in (DType.F16, DType.BF16)


def list_lengths(kernel: Decode) -> tuple[Statement, ...]:
    """Returns the statements of a program that give M and N for a sequence, wherever a tile of it begins:
    what the kernel that joins its splits has to know beside the epilogue.
    """
    read, found = {"M", "N"}, list[Statement]()
    for item in reversed(kernel.program):
        nodes = [node for expr in statement_expressions(item) for node in walk(expr)]
        if item.name in read and Index("q_lo") not in nodes:
            found.insert(0, item)
            read |= {node.name for node in nodes if isinstance(node, Ref)}
            read |= {item.row.name} if isinstance(item, Fetch) and item.row is not None else set()
    return tuple(found)


def _in_tile(names: LoadNames) -> tuple[Fetch, ...]:
    return tuple(fetch for fetch in names.fetches if "kv" in fetch.axes)
