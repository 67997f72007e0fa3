"""CST -> AST. The trees are named after the rules of grammar/attn.lark.

Non-goals: meaning. The one thing refused here that the grammar lets pass is a positional argument after a
named one. Recursion is safe, because the depth of the tree is checked before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias, cast

from lark import Token, Tree

from attnc.diagnostics import DiagnosticError, Label, error
from attnc.source import Source, Span
from attnc.syntax import ast
from attnc.syntax.limits import MAX_DEPTH, too_deep

Cst: TypeAlias = "Tree[Token]"

_FLAT = frozenset(
    {"file", "attention", "projection", "schedule", "def", "name", "number", "true", "false", "dotted"}
)


def build_items(source: Source, tree: Cst) -> tuple[ast.Item, ...]:
    """The items of a `file` tree. Raises DiagnosticError (E0108, E0502) with the first error."""
    _check_depth(source, tree)
    builder = _Builder(source)
    return tuple(builder.item(child) for child in _trees(tree))


def _check_depth(source: Source, root: Cst) -> None:
    """E0502. A chain of n arithmetic operators is n levels of the AST, any other node at most one."""
    stack = [(root, 0)]
    while stack:
        tree, depth = stack.pop()
        depth += len(tree.children) // 2 if tree.data in ("sum", "product") else tree.data not in _FLAT
        if depth > MAX_DEPTH:
            raise DiagnosticError([too_deep(source.span(tree.meta.start_pos, tree.meta.end_pos))])
        stack += [(child, depth) for child in reversed(_trees(tree))]


def _trees(tree: Cst) -> list[Cst]:
    return [child for child in tree.children if isinstance(child, Tree)]


class _Builder:
    def __init__(self, source: Source) -> None:
        self.source = source

    def span(self, tree: Cst) -> Span:
        return self.source.span(tree.meta.start_pos, tree.meta.end_pos)

    # --- items and statements -------------------------------------------------------------------------------

    def item(self, tree: Cst) -> ast.Item:
        children, span = _trees(tree), self.span(tree)
        name = self.name(children[0])
        match tree.data:
            case "def":
                params = self.names(children[1]) if len(children) == 3 else ()
                return ast.Def(name=name, params=params, value=self.expr(children[-1]), span=span)
            case "attention":
                items = tuple(item for child in children[1:] for item in self.statement(child))
                return ast.Attention(name=name, items=items, span=span)
            case "projection":
                parts = tuple(part for child in children[1:] for part in self.part(child))
                return ast.Projection(name=name, items=parts, span=span)
            case _:
                target, *entries = children[1:]
                label = None
                if entries and entries[0].data == "label":
                    label = self.name(_trees(entries.pop(0))[0])
                return ast.Schedule(
                    attention=name,
                    target=self.name(target),
                    label=label,
                    entries=self.entries(entries),
                    span=span,
                )

    def statement(self, tree: Cst) -> Iterator[ast.AttentionItem]:
        children, span = _trees(tree), self.span(tree)
        match tree.data:
            case "param" | "input" | "output":
                yield from self.declaration(tree)
            case "let":
                yield ast.Let(name=self.name(children[0]), value=self.expr(children[1]), span=span)
            case "length":
                yield ast.Length(name=self.name(children[0]), value=self.expr(children[1]), span=span)
            case "score":
                yield ast.Score(value=self.expr(children[0]), span=span)
            case "mask":
                yield ast.Mask(value=self.expr(children[0]), span=span)
            case "normalize":
                yield ast.Normalize(value=cast("ast.Name | ast.Call", self.expr(children[0])), span=span)
            case _:
                dtype = self.name(children[1]) if len(children) > 1 else None
                yield ast.Grad(names=self.names(children[0]), dtype=dtype, span=span)

    def part(self, tree: Cst) -> Iterator[ast.ProjectionItem]:
        """A statement of a projection."""
        if tree.data == "equation":
            name, value = _trees(tree)
            yield ast.Equation(name=self.name(name), value=self.expr(value), span=self.span(tree))
        else:
            yield from self.declaration(tree)

    def declaration(self, tree: Cst) -> Iterator[ast.Param | ast.Input | ast.Output]:
        children, span = _trees(tree), self.span(tree)
        match tree.data:
            case "param":
                # Each choice is a statement; the first takes the keyword into its span.
                for i, child in enumerate(children):
                    name, *choices = _trees(child)
                    own = self.span(child) if i else span.to(self.span(child))
                    yield ast.Param(name=self.name(name), choices=self.exprs(choices), span=own)
            case "input":
                yield self.input(tree)
            case _:
                dtype, *shape = _trees(children[1])
                name_, type_ = self.name(children[0]), self.name(dtype)
                yield ast.Output(name=name_, dtype=type_, shape=self.exprs(shape), span=span)

    def input(self, tree: Cst) -> ast.Input:
        names, type_, *rest = _trees(tree)
        dtype, *shape = _trees(type_)
        adjectives = {str(child.data): child for child in rest}
        via, facts = adjectives.get("via"), adjectives.get("facts")
        return ast.Input(
            names=self.names(names),
            dtype=self.name(dtype),
            shape=self.exprs(shape),
            storage=self.call(_trees(via)[0]) if via else None,
            facts=self.names(facts) if facts else (),
            span=self.span(tree),
        )

    def entries(self, trees: Iterable[Cst]) -> tuple[ast.ScheduleEntry, ...]:
        return tuple(self.entry(tree) for tree in trees)

    def entry(self, tree: Cst) -> ast.ScheduleEntry:
        first, *rest = _trees(tree)
        span = self.span(tree)
        match tree.data:
            case "where":
                return ast.Where(condition=self.expr(first), span=span)
            case "listed":
                return ast.Listed(settings=tuple(map(self.setting, (first, *rest))), span=span)
            case "when":
                return ast.When(condition=self.expr(first), entries=self.entries(rest), span=span)
            case "phase":
                return ast.Phase(name=self.name(first), entries=self.entries(rest), span=span)
            case _:
                return self.setting(tree)

    def setting(self, tree: Cst) -> ast.Setting:
        key, *values = _trees(tree)
        return ast.Setting(
            key=self.name(key), values=self.exprs(values), is_set=tree.data == "tune", span=self.span(tree)
        )

    # --- expressions ----------------------------------------------------------------------------------------

    def name(self, tree: Cst) -> ast.Name:
        return ast.Name(id=".".join(str(token) for token in tree.children), span=self.span(tree))

    def names(self, tree: Cst) -> tuple[ast.Name, ...]:
        return tuple(self.name(child) for child in _trees(tree))

    def exprs(self, trees: Iterable[Cst]) -> tuple[ast.Expr, ...]:
        return tuple(self.expr(tree) for tree in trees)

    def expr(self, tree: Cst) -> ast.Expr:
        children, span = _trees(tree), self.span(tree)
        match tree.data:
            case "name" | "dotted":
                return self.name(tree)
            case "number":
                text = str(tree.children[0])
                return ast.Number(text=text, value=int(text) if text.isdigit() else float(text), span=span)
            case "true" | "false":
                return ast.Bool(value=tree.data == "true", span=span)
            case "parens":
                return self.expr(children[0])
            case "minus":
                return ast.UnaryOp(op="-", operand=self.expr(children[0]), span=span)
            case "not":
                return ast.Not(operand=self.expr(children[0]), span=span)
            case "sum" | "product":
                return self.chain(tree)
            case "comparison":
                ops = tuple(cast(ast.CompareOp, str(token)) for token in tree.children[1::2])
                return ast.Compare(operands=self.exprs(children), ops=ops, span=span)
            case "and":
                return ast.BoolOp(op="and", operands=self.exprs(children), span=span)
            case "or":
                return ast.BoolOp(op="or", operands=self.exprs(children), span=span)
            case "list":
                return ast.ListValue(items=self.exprs(children), span=span)
            case "call":
                return self.call(tree)
            case "subscript":
                tensor, *indices = children
                return ast.Subscript(tensor=self.name(tensor), indices=self.exprs(indices), span=span)
            case kind:
                raise AssertionError(f"no expression is called {kind}")

    def chain(self, tree: Cst) -> ast.Expr:
        """`a - b + c`, leaning left."""
        operands = _trees(tree)
        value, start = self.expr(operands[0]), self.span(tree)
        for token, operand in zip(tree.children[1::2], operands[1:], strict=True):
            op = cast("ast.ArithmeticOp", str(token))
            value = ast.BinaryOp(
                op=op, left=value, right=self.expr(operand), span=start.to(self.span(operand))
            )
        return value

    def call(self, tree: Cst) -> ast.Call:
        function, *arguments = _trees(tree)
        first_named = next((i for i, a in enumerate(arguments) if a.data == "keyword"), len(arguments))
        positional, named = arguments[:first_named], arguments[first_named:]
        for argument in named:
            if argument.data != "keyword":
                message = "positional argument after a named one"
                related = [Label(self.span(named[0]), "the first named argument")]
                raise DiagnosticError(
                    [error("E0108", message, self.span(argument), "move it to the front", related=related)]
                )
        return ast.Call(
            function=self.name(function),
            args=self.exprs(positional),
            kwargs=tuple(self.keyword(argument) for argument in named),
            span=self.span(tree),
        )

    def keyword(self, tree: Cst) -> ast.Keyword:
        name, value = _trees(tree)
        return ast.Keyword(name=self.name(name), value=self.expr(value), span=self.span(tree))
