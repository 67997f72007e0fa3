"""`def`s: collected, checked for unknown names and recursion, ready to be inlined where they are called.

A body sees its parameters, the indices, the dimensions, the intrinsics and other defs, but no name of the
attention that calls it: whatever else it needs is an argument. So each body is checked once, here, and a
mistake in it is reported once, however many calls there are; a definition with a mistake is `broken`, and its
calls are silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from attnc.diagnostics import Label, did_you_mean
from attnc.expr.nodes import INDICES
from attnc.model.names import CALLABLE, DIMS, Taken
from attnc.model.report import Report
from attnc.syntax import ast


@dataclass(slots=True, eq=False)
class Definition:
    """A def and what its body may call. `broken` once a mistake in it has been reported."""

    tree: ast.Def
    visible: Mapping[str, Definition]
    broken: bool = field(default=False)

    @property
    def name(self) -> str:
        return self.tree.name.id

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(name.id for name in self.tree.params)

    def callees(self) -> list[Definition]:
        """The definitions that the body mentions, each once, in order of first mention."""
        seen = {
            id(callee): callee
            for name in mentioned(self.tree.value)
            if name.id not in self.params and (callee := self.visible.get(name.id)) is not None
        }
        return list(seen.values())


def collect(prelude: ast.File, file: ast.File, report: Report) -> Mapping[str, Definition]:
    """What every def name means to the file: its own defs, and those of the prelude that it does not
    redefine.
    """
    shipped: dict[str, Definition] = {}
    for tree in prelude.items:
        if isinstance(tree, ast.Def):
            shipped[tree.name.id] = Definition(tree, shipped)
    visible = dict(shipped)
    own: list[Definition] = []
    taken = Taken(report)
    for tree in file.items:
        if isinstance(tree, ast.Def):
            fresh = taken.declare(tree.name)
            own.append(Definition(tree, visible, broken=not fresh))
            if fresh or tree.name.id not in visible:
                visible[tree.name.id] = own[-1]
    for definition in (*shipped.values(), *own):
        _check_names(definition, report)
    _check_recursion((*shipped.values(), *own), report)
    return visible


def _check_names(definition: Definition, report: Report) -> None:
    before = report.errors
    taken = Taken(report)
    for name in definition.tree.params:
        taken.declare(name)
    values = (*definition.params, *INDICES, *DIMS, "inf")
    functions = (*CALLABLE, "dot", *definition.visible)
    for name in mentioned(definition.tree.value):
        if name.id not in values and name.id not in functions and name.id not in ("q", "k"):
            report.error(
                "E0203",
                f"unknown name '{name.id}'",
                name.span,
                "not a parameter, index, dimension or def",
                notes=("a def does not see the inputs, params and lets of the attentions that use it",),
                hints=did_you_mean(name.id, (*values, *functions)),
            )
    definition.broken |= report.errors > before


def _check_recursion(definitions: Sequence[Definition], report: Report) -> None:
    """Report every cycle once and break its members; depth first, with a stack of its own against long
    chains.
    """
    done: set[Definition] = set()
    for root in definitions:
        path = {} if root in done else {root: iter(root.callees())}
        while path:
            last = next(reversed(path))
            callee = next(path[last], None)
            if callee is None:
                path.popitem()
                done.add(last)
            elif callee in path and not callee.broken:
                members = list(path)
                _report_cycle(members[members.index(callee) :], report)
            elif callee not in path and callee not in done:
                path[callee] = iter(callee.callees())


def _report_cycle(cycle: Sequence[Definition], report: Report) -> None:
    first, *rest = cycle
    report.error(
        "E0205",
        f"def '{first.name}' calls itself" + (" through others" if rest else ""),
        first.tree.name.span,
        "expanding it would never end",
        related=tuple(Label(d.tree.name.span, "by way of this def") for d in rest),
    )
    for definition in cycle:
        definition.broken = True


def mentioned(tree: ast.Expr) -> Iterator[ast.Name]:
    """Every name in an expression, of values and of functions, in source order."""
    match tree:
        case ast.Name():
            yield tree
        case ast.UnaryOp(operand=operand) | ast.Not(operand=operand):
            yield from mentioned(operand)
        case ast.BinaryOp(left=left, right=right):
            yield from mentioned(left)
            yield from mentioned(right)
        case ast.Compare(operands=parts) | ast.BoolOp(operands=parts) | ast.ListValue(items=parts):
            for part in parts:
                yield from mentioned(part)
        case ast.Call(function=function, args=args, kwargs=kwargs):
            yield function
            for part in (*args, *(keyword.value for keyword in kwargs)):
                yield from mentioned(part)
        case ast.Subscript(tensor=tensor, indices=indices):
            yield tensor
            for part in indices:
                yield from mentioned(part)
        case _:
            pass
