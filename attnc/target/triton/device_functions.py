"""Which device functions of `templates/triton/_device.py.jinja` a module calls."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.nodes import Binary, Call, Expr, Search, walk
from attnc.plan.ir import Kernel, Module
from attnc.plan.ir.statements import expressions_within
from attnc.target.triton.printer import SYNTAX, scalar


def device_functions(module: Module) -> frozenset[str]:
    """Their names. What expressions call follows from the plan's; the rest from how rows lie in memory."""
    (forward,) = module.kernels
    backward = module.backward
    kernels = [forward, *(planned for planned in (backward.kernels if backward else ()))]
    called = {name for expr in expressions_within((module.kernels, backward)) for name in _called_by(expr)}
    called.update(*map(_moves_rows, kernels))
    if any(kernel.grid.sequences is not None for kernel in kernels):
        called.add("_find_sequence")
    if backward is not None:
        called |= {"_load_rows", "_store_rows"}
        packed = module.variant.attention.q.storage.is_packed
        if not packed and any(not planned.over_q for planned in backward.kernels):
            called.add("_load_vector")  # of lse2 and delta
    if any(kernel.softmax.dropout is not None for kernel in kernels):
        called.add("_keep_dropout")
    return frozenset(called)


def _moves_rows(kernel: Kernel) -> Iterator[str]:
    """What loads and stores tiles of rows; kernels that decode have functions of their own for it."""
    if kernel.structure == "decode":
        return
    yield from ("_load_rows", "_store_rows")
    if any(rows.page for rows in kernel.rows.values()):
        yield from ("_find_pages", "_load_pages")


def _called_by(expr: Expr) -> Iterator[str]:
    """What the text of an expression calls."""
    own = {*SYNTAX.functions.values()} - {"tl.minimum", "tl.maximum"}
    for node in walk(expr):
        match node:
            case Call(function=function) if SYNTAX.named(function) in own:
                yield SYNTAX.named(function)
            case Binary(op=op, left=left, right=right) if function := scalar.division(op, left, right):
                yield function
            case Search(side=side):
                yield f"_{side}_bound"
