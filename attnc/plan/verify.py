"""Checks a Module between planning and printing, so that a wrong pass fails at its own door and not inside a
kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attnc.expr.nodes import COLUMN, Dim, Expr, Index, Load, Param, Ref, walk
from attnc.plan.ir import Decode, Fetch, Forward, Kernel, Let, Module, Row, Statement, pack_of, split_of
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.ir.kernel import KEY_ROW, TILE_COLUMN
from attnc.plan.lists import HIDES_SOME, KV_HEAD, LIST_LENGTH, LISTED, TILE
from attnc.plan.steps import kept_fetches, select_per_head

TILES = frozenset({"BLOCK_M", "BLOCK_N"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scopes:
    """The indices that have a value at each place of a kernel's text, whatever the target, in this order.

    program: once for each program; tile: once for each tile of the outer axis; outer: beside the values along
    that axis; loop: a tile of both axes, before its step; step: inside it.
    """

    program: frozenset[str]
    tile: frozenset[str]
    outer: frozenset[str]
    loop: frozenset[str]
    step: frozenset[str]


def scopes_of(kernel: Kernel) -> Scopes:
    """Returns the scopes of a structure: `templates/*/STRUCTURE.*.jinja` follow them."""
    over_q = kernel.regions.axis == "kv"  # programs, or tiles of their outer loop, are of queries
    lo, hi, rows = ("q_lo", "q_hi", ("q_idx", "q_pos")) if over_q else ("kv_lo", "kv_hi", ("kv_idx",))
    ends, columns = ("kv_lo", "kv_hi") if over_q else ("q_lo", "q_hi"), ("q_idx", "q_pos", "kv_idx")
    program = {"b", *(() if pack_of(kernel) else ("h",))}
    if isinstance(kernel, BackwardKernel) and kernel.selected is not None:  # its keys are of one query
        lo, hi, rows = "q_lo", "q_hi", ("kv_idx",)
    tile = {*program, lo, hi}
    return Scopes(
        program=frozenset(program if kernel.grid.over == "head" else {*program, lo}),
        tile=frozenset(tile),
        outer=frozenset({*tile, *rows}),
        loop=frozenset({*tile, *ends}),
        step=frozenset({*tile, ends[0], *columns}),
    )


def verify_module(module: Module) -> None:
    """Raises ValueError, naming the kernel and the expression, when an invariant of `ir` does not hold."""
    for planned in module.backward_kernels.values():
        _verify_chain(planned)
    for kernel in module.kernels.values():
        _verify_scopes(kernel)
        _verify_regions(kernel)
        if not kernel.configs:
            raise ValueError(f"{kernel.name}: no config")


def _verify_scopes(kernel: Kernel) -> None:
    known: set[str] = set()
    known |= _from_tile(kernel)
    known |= {"h"} if pack_of(kernel) else set()
    known |= {KV_HEAD.name} if pack_of(kernel) or kernel.regions.axis == "q" else set()
    known |= {"split_lo", "split_hi"} if split_of(kernel) else set()
    if any(loop.listed is not None for loop in kernel.regions.loops):
        known |= {LIST_LENGTH.name, LISTED.name, TILE.name}
    sizes, scopes = _sizes(kernel), scopes_of(kernel)
    for statement in kernel.program:
        _verify_statement(kernel, statement, known, scopes.program, sizes)
    of_rows = set(known)
    for fetch in kernel.outer:
        _verify_statement(kernel, fetch, of_rows, scopes.outer, sizes)
    for statement in kernel.regions.bounds:
        _verify_statement(kernel, statement, known, scopes.tile, sizes)
    for loop in kernel.regions.loops:
        _verify_names(kernel, (loop.start, loop.stop), known, scopes.tile, sizes)
        if not isinstance(loop.masked, bool):
            of_list = {HIDES_SOME.name} if loop.listed is not None and loop.listed.knows_full else set[str]()
            _verify_names(kernel, (loop.masked,), known | of_list, scopes.loop, sizes)
        in_tile = set(known)
        for test in loop.tests:
            _verify_statement(kernel, test, in_tile, scopes.loop, sizes)
        if loop.guard is not None:
            _verify_names(kernel, (loop.guard,), in_tile, scopes.loop, sizes)
    known |= of_rows
    for fetch in (*kernel.step.fetches, *kernel.step.masked_fetches):
        _verify_statement(kernel, fetch, known, scopes.step, sizes)
    match kernel:
        case BackwardKernel():
            for let in kernel.chain.shared:
                _verify_statement(kernel, let, known, scopes.step, sizes)
        case Forward() | Decode():
            _verify_names(kernel, kernel.softmax.expressions, known, scopes.outer, sizes)
            of_tile = kernel.of_tile if isinstance(kernel, Decode) else None
            for epilogue in filter(None, (kernel.epilogue, of_tile)):
                columns, finishing = scopes.outer | {COLUMN, "h"}, set(known)
                for item in epilogue.statements:
                    _verify_statement(kernel, item, finishing, columns, sizes)
                _verify_names(kernel, (epilogue.value,), finishing, columns, sizes)
    for scale in kernel.step.scales:
        elements = known | {KEY_ROW.name, TILE_COLUMN.name}
        for fetch in scale.fetches:
            _verify_statement(kernel, fetch, elements, scopes.step, sizes)
        _verify_names(kernel, (scale.value,), elements, scopes.step, sizes)
    for expr in (kernel.step.score, kernel.step.keep, kernel.step.v_scale):
        if expr is not None:
            _verify_names(kernel, (expr,), known, scopes.step, sizes)
    _verify_kept(kernel, sizes)


def _verify_kept(kernel: Kernel, sizes: frozenset[str]) -> None:
    """Checks that it is known which keys are kept before any query, or query head, is: rows of k and v are
    the same for all that share them.
    """
    if kernel.step.kept is None:
        return
    if kernel.step.keep is None:
        raise ValueError(f"{kernel.name}: keys that no query keeps, but no tile is masked")
    late = {item.name for item in select_per_head(kernel.program)}
    early = tuple(item for item in kernel.program if item.name not in late)
    known = {*_from_tile(kernel), *(item.name for item in early)}
    for fetch in kept_fetches(kernel):
        if fetch.row is not None and fetch.row.name in late:
            raise ValueError(f"{kernel.name}: '{fetch.row.name}' changes with the head, in {fetch.name}")
        _verify_statement(kernel, fetch, known, frozenset({"b", "kv_idx"}), sizes)
    inside = () if kernel.step.kept_inside is None else (kernel.step.kept_inside,)
    _verify_names(kernel, (kernel.step.kept, *inside), known, frozenset({"b", "kv_idx"}), sizes)


def _from_tile(kernel: Kernel) -> frozenset[str]:
    if kernel.grid.sequences is None:
        return frozenset()
    known = {"q": {"M", "q_rows", "q_first"}, "kv": {"N", "k_first"}, "head": set[str]()}
    return frozenset(known[kernel.grid.over])


def _sizes(kernel: Kernel) -> frozenset[str]:
    lengths = {item.name for item in kernel.program if isinstance(item, Let) and item.name in ("M", "N")}
    return frozenset(kernel.dims) | TILES | {"G"} | lengths | _from_tile(kernel)


def _verify_chain(kernel: BackwardKernel) -> None:
    chain = kernel.chain
    statements = (*kernel.program, *kernel.outer, *kernel.step.fetches, *chain.shared)
    known = {item.name for item in statements}
    sizes = _sizes(kernel)
    exprs = [*(let.value for let in chain.shared), *(adjoint.value for adjoint in chain.adjoints)]
    exprs += [expr for adjoint in chain.adjoints for expr in (*adjoint.load.indices, adjoint.guard)]
    if chain.slope is not None:
        exprs.append(chain.slope)
    _verify_names(kernel, exprs, known, scopes_of(kernel).step, sizes)
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
    masked = any(loop.masked is not False for loop in kernel.regions.loops)
    if kernel.step.keep is not None and not masked:
        raise ValueError(f"{kernel.name}: a mask, but no partial loop")
    filled = any(loop.zero_fill for loop in kernel.regions.loops)
    if filled and kernel.step.kept is None:
        raise ValueError(f"{kernel.name}: rows are made zero, but it is not said which")
