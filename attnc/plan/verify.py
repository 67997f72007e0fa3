"""Checks a Module between planning and printing, so that a wrong pass fails at its own door and not inside a
kernel.
"""

from __future__ import annotations

from collections.abc import Iterable

from attnc.expr.nodes import Dim, Expr, Index, Load, Param, Ref, walk
from attnc.plan.ir import Fetch, Kernel, Let, Module, Row, Statement
from attnc.plan.ir_backward import BackwardKernel

SCALARS = frozenset({"b", "h", "q_lo", "q_hi", "kv_lo", "kv_hi"})
VECTORS = frozenset({"q_idx", "q_pos", "kv_idx"})
TILES = frozenset({"BLOCK_M", "BLOCK_N"})


def verify_module(module: Module) -> None:
    """Raises ValueError, naming the kernel and the expression, when an invariant of `ir` does not hold."""
    backward = () if module.backward is None else module.backward.kernels
    for planned in backward:
        _verify_chain(planned)
    lets = {planned.kernel.name: planned.chain.shared for planned in backward}
    for kernel in (*module.kernels, *(planned.kernel for planned in backward)):
        _verify_scopes(kernel, lets.get(kernel.name, ()))
        _verify_regions(kernel)
        if not kernel.configs:
            raise ValueError(f"{kernel.name}: no config")


def _verify_scopes(kernel: Kernel, lets: tuple[Let, ...]) -> None:
    """Every name is defined before it is used, and no load is left without one."""
    known: set[str] = set()
    known |= _from_tile(kernel)
    known |= {"h"} if kernel.pack is not None else set()
    known |= {"split_lo", "split_hi"} if kernel.split is not None else set()
    sizes = _sizes(kernel)
    for statement in kernel.program:
        _verify_statement(kernel, statement, known, SCALARS, sizes)
    for statement in (*kernel.outer, *kernel.regions.bounds):
        _verify_statement(kernel, statement, known, SCALARS | VECTORS, sizes)
    for loop in kernel.regions.loops:
        _verify_names(kernel, loop.expressions, known, SCALARS, sizes)
    for fetch in (*kernel.step.fetches, *kernel.step.masked_fetches):
        _verify_statement(kernel, fetch, known, SCALARS | VECTORS, sizes)
    for let in lets:
        _verify_statement(kernel, let, known, SCALARS | VECTORS, sizes)
    for expr in (kernel.step.score, kernel.step.keep, kernel.step.kept, kernel.softmax.sink):
        if expr is not None:
            _verify_names(kernel, (expr,), known, SCALARS | VECTORS, sizes)


def _from_tile(kernel: Kernel) -> frozenset[str]:
    """What a program of packed sequences knows from its tile: the sequence's rows, and where they begin."""
    if kernel.grid.sequences is None:
        return frozenset()
    known = {"q": {"M", "q_rows", "q_first"}, "kv": {"N", "k_first"}, "head": set[str]()}
    return frozenset(known[kernel.grid.over])


def _sizes(kernel: Kernel) -> frozenset[str]:
    """Sizes with a value in the kernel: arguments, tiles, and lengths of the program's sequence."""
    lengths = {item.name for item in kernel.program if isinstance(item, Let) and item.name in ("M", "N")}
    return frozenset(kernel.dims) | TILES | {"G"} | lengths | _from_tile(kernel)


def _verify_chain(planned: BackwardKernel) -> None:
    """Derivatives are over names of the kernel, and every gradient has one way to its tensor."""
    kernel, chain = planned.kernel, planned.chain
    statements = (*kernel.program, *kernel.outer, *kernel.step.fetches, *chain.shared)
    known = {item.name for item in statements}
    sizes = _sizes(kernel)
    exprs = [*(let.value for let in chain.shared), *(adjoint.value for adjoint in chain.adjoints)]
    exprs += [expr for adjoint in chain.adjoints for expr in (*adjoint.load.indices, adjoint.guard)]
    if chain.slope is not None:
        exprs.append(chain.slope)
    _verify_names(kernel, exprs, known, SCALARS | VECTORS, sizes)
    if kernel.grid.over != "q":
        rows = [a.name for a in chain.adjoints if a.along == ("q",) and a.accumulate != "atomic"]
        if rows:
            raise ValueError(f"{kernel.name}: no program has all keys of the rows that {rows} are sums over")


def _verify_statement(
    kernel: Kernel, statement: Statement, known: set[str], indices: frozenset[str], sizes: frozenset[str]
) -> None:
    used: tuple[Expr, ...]
    match statement:
        case Let(value=value):
            used = (value,)
        case Row(indices=indices_of_row):
            used = indices_of_row
        case Fetch(load=load, guard=guard):
            used = (*load.indices, guard)
    _verify_names(kernel, used, known, indices, sizes)
    known.add(statement.name)


def _verify_names(
    kernel: Kernel, exprs: Iterable[Expr], known: set[str], indices: frozenset[str], sizes: frozenset[str]
) -> None:
    for expr in exprs:
        for node in walk(expr):
            match node:
                case Load() | Param():
                    raise ValueError(f"{kernel.name}: {node} was not replaced in {expr}")
                case Ref(name=name) if name not in known:
                    raise ValueError(f"{kernel.name}: '{name}' is used before it is defined, in {expr}")
                case Index(name=name) if name not in indices:
                    raise ValueError(f"{kernel.name}: '{name}' has no value here, in {expr}")
                case Dim(name=name) if name not in sizes:
                    raise ValueError(f"{kernel.name}: the size '{name}' is not an argument, in {expr}")


def _verify_regions(kernel: Kernel) -> None:
    """A partial loop needs a mask, and a kernel without one has only full loops besides its tail."""
    masked = any(loop.masked is not False for loop in kernel.regions.loops)
    if kernel.step.keep is not None and not masked:
        raise ValueError(f"{kernel.name}: a mask, but no partial loop")
    filled = any(loop.zero_fill for loop in kernel.regions.loops)
    if filled and kernel.step.kept is None:
        raise ValueError(f"{kernel.name}: rows are made zero, but it is not said which")
    if kernel.regions.axis != ("q" if kernel.structure in ("forward_kv_q", "backward_dkdv") else "kv"):
        raise ValueError(f"{kernel.name}: loops over {kernel.regions.axis} in {kernel.structure}")
