"""AST -> canonical text.

One statement a line, except those that were written on one line with commas; two spaces of indentation;
single blank lines are kept; a long statement is broken at its loosest operator; comments stay where they
were, before a statement or after it, those after one aligned. Formatting twice changes nothing, and the text
parses to the same tree.

An expression has the fewest brackets that keep its tree, with one exception: an `and` inside an `or` is
bracketed, because few readers remember which binds tighter.

Non-goals: sorting, and rewording what was written (numbers keep their digits, comments their text).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from attnc.syntax import ast

_WIDTH = 100
_INDENT = "  "
_COMMENT_COLUMN = 40
_COMMENT_GAP = "   "

_Statement = TypeVar("_Statement", bound=ast.Node)


def format_file(file: ast.File) -> str:
    """Returns the canonical text of a parsed file; empty, or ending with a newline."""
    writer = _Writer(file)
    end = len(file.span.source.text) + 1
    for item in file.items:
        match item:
            case ast.Def():
                head = f"def {item.name.id}" + (f"({_names(item.params)})" if item.params else "")
                writer.statement(_define(head, item.value), 0, item.span.start, item.span.end, end)
            case ast.Attention():
                writer.block([f"attention {item.name.id}"], item, item.name, item.items, 0, end)
            case ast.Projection():
                writer.block([f"projection {item.name.id}"], item, item.name, item.items, 0, end)
            case ast.Schedule():
                head = f"schedule {item.attention.id} for {item.target.id}"
                head += f" as {item.label.id}" if item.label else ""
                writer.block([head], item, item.label or item.target, item.entries, 0, end)
    writer.comments_before(end, 0)
    return "".join(f"{line}\n" for line in _align(writer.rows))


@dataclass(slots=True)
class _TextRow:
    text: str
    depth: int
    comment: str = ""
    after_blank: bool = False

    @property
    def code(self) -> str:
        return _INDENT * self.depth + self.text


class _Writer:
    """Writes rows in the order of the text, taking each comment as it comes by."""

    def __init__(self, file: ast.File) -> None:
        self.source = file.span.source
        self.comments = list(reversed(file.comments))
        self.rows: list[_TextRow] = []
        self.line = 0  # the last line of the text that is written; 0 where a block starts or ends

    def write(self, texts: Sequence[str], depth: int, start: int, end: int) -> None:
        after_blank = bool(self.line) and self.source.position(start)[0] > self.line + 1
        self.rows += [
            _TextRow(text, depth, after_blank=after_blank and i == 0) for i, text in enumerate(texts)
        ]
        self.line = self.source.position(end)[0]

    def comments_before(self, offset: int, depth: int, at: int | None = None) -> None:
        """Writes the comments before an offset, on lines of their own, as if they had stood at the offset
        `at`.
        """
        while self.comments and self.comments[-1].span.start < offset:
            comment = self.comments.pop()
            place = comment.span.start if at is None else at
            self.write([comment.text], depth, place, place)

    def trailing_comment(self, limit: int) -> None:
        """Writes a comment on the line that was written last, if it stands before the offset `limit`."""
        if self.comments:
            start = self.comments[-1].span.start
            if start < limit and self.source.position(start)[0] == self.line:
                self.rows[-1].comment = self.comments.pop().text

    def statement(self, texts: Sequence[str], depth: int, start: int, end: int, limit: int) -> None:
        self.comments_before(start, depth)
        self.comments_before(end, depth, at=start)
        self.write(texts, depth, start, end)
        self.trailing_comment(limit)

    def block(
        self,
        head: Sequence[str],
        node: ast.Node,
        head_end: ast.Node,
        body: Sequence[ast.Node],
        depth: int,
        limit: int,
    ) -> None:
        brace = node.span.end - 1
        self.comments_before(node.span.start, depth)
        self.comments_before(head_end.span.end, depth, at=node.span.start)
        self.write([*head[:-1], f"{head[-1]} {{"], depth, node.span.start, head_end.span.end)
        self.trailing_comment(body[0].span.start if body else brace)
        self.line = 0
        for group in _lines(body):
            match group:
                case [ast.Phase() | ast.When() as inner] if text := _on_one_line(inner, depth + 1):
                    self.statement([text], depth + 1, inner.span.start, inner.span.end, brace)
                case [ast.Phase() as phase]:
                    self.block([phase.name.id], phase, phase.name, phase.entries, depth + 1, brace)
                case [ast.When() as when]:
                    head = _break("when ", when.condition)
                    self.block(head, when, when.condition, when.entries, depth + 1, brace)
                case _:
                    texts = _statement_texts(group)
                    self.statement(texts, depth + 1, group[0].span.start, group[-1].span.end, brace)
        self.comments_before(brace, depth + 1)
        self.line = 0
        self.write(["}"], depth, brace, node.span.end)
        self.trailing_comment(limit)


def _on_one_line(block: ast.Phase | ast.When, depth: int) -> str:
    """Returns the text of a block that was written on one line and has room there; empty for others."""
    if "\n" in block.span.text or any(isinstance(entry, ast.Phase | ast.When) for entry in block.entries):
        return ""
    head = block.name.id if isinstance(block, ast.Phase) else f"when {print_expr(block.condition)}"
    body = [text for group in _lines(block.entries) for text in _statement_texts(group)]
    text = f"{head} {{ {' '.join(body)} }}"
    return text if len(body) == 1 and len(_INDENT) * depth + len(text) <= _WIDTH else ""


def _lines(statements: Iterable[_Statement]) -> Iterator[list[_Statement]]:
    group: list[_Statement] = []
    for statement in statements:
        if group and "\n" in statement.span.source.text[group[-1].span.end : statement.span.start]:
            yield group
            group = []
        group.append(statement)
    if group:
        yield group


def _statement_texts(group: Sequence[ast.Node]) -> list[str]:
    match group[0]:
        case ast.Param():
            params = cast("Sequence[ast.Param]", group)
            return ["param " + ", ".join(f"{p.name.id} in {{{print_list(p.choices)}}}" for p in params)]
        case ast.Setting():
            return [", ".join(_setting(setting) for setting in cast("Sequence[ast.Setting]", group))]
        case ast.Input() as tensor:
            via = f" via {print_expr(tensor.storage)}" if tensor.storage else ""
            facts = f" is {_names(tensor.facts)}" if tensor.facts else ""
            shape = f"{tensor.dtype.id}[{print_list(tensor.shape)}]"
            return [f"input {_names(tensor.names)}: {shape}{via}{facts}"]
        case ast.Output() as tensor:
            declared = f"output {tensor.name.id}: {tensor.dtype.id}[{print_list(tensor.shape)}]"
            return [declared] if tensor.value is None else _define(declared, tensor.value)
        case ast.Let(name=name, value=value):
            return _define(f"let {name.id}", value)
        case ast.Length(name=name, value=value):
            return _define(f"length {name.id}", value)
        case ast.Equation(name=name, value=value):
            return _define(name.id, value)
        case ast.Score(value=value):
            return _define("score", value)
        case ast.Weight(value=value):
            return _define("weight", value)
        case ast.Mask(value=value):
            return _define("mask", value)
        case ast.Normalize(value=value):
            return _define("normalize", value)
        case ast.Order(value=value):
            return _define("order", value)
        case ast.Grad(names=names, dtype=dtype):
            return [f"grad {_names(names)}" + (f": {dtype.id}" if dtype is not None else "")]
        case ast.Where(condition=condition):
            return _break("where ", condition)
        case ast.Listed(settings=settings):
            return ["config " + ", ".join(map(_setting, settings))]
        case node:
            raise AssertionError(f"no statement is a {type(node).__name__}")


def _setting(setting: ast.Setting) -> str:
    values = print_list(setting.values)
    return f"{setting.key.id} in {{{values}}}" if setting.is_set else f"{setting.key.id} = {values}"


def _names(names: Iterable[ast.Name]) -> str:
    return ", ".join(name.id for name in names)


def _define(head: str, value: ast.Expr) -> list[str]:
    return _break(f"{head} = ", value)


def _break(head: str, value: ast.Expr) -> list[str]:
    text = head + print_expr(value)
    if len(_INDENT) + len(text) <= _WIDTH:
        return [text]
    if isinstance(value, ast.Call):
        arguments = ",\n".join(_INDENT + argument for argument in print_arguments(value)).split("\n")
        return [f"{head}{value.function.id}(", *arguments, ")"]
    parts = print_parts(value)
    return [f"{head}(", *(_INDENT + part for part in parts), ")"] if len(parts) > 1 else [text]


def _align(rows: Sequence[_TextRow]) -> Iterator[str]:
    paragraph: list[_TextRow] = []
    for row in rows:
        if paragraph and (row.after_blank or row.depth != paragraph[-1].depth):
            yield from _align_paragraph(paragraph)
            paragraph = []
        if row.after_blank:
            yield ""
        paragraph.append(row)
    yield from _align_paragraph(paragraph)


def _align_paragraph(rows: Sequence[_TextRow]) -> Iterator[str]:
    """Comments start at column 40, or after the longest line that has one and is not long itself."""
    widths = [len(row.code) + len(_COMMENT_GAP) for row in rows if row.comment]
    column = max([_COMMENT_COLUMN, *(width for width in widths if width <= 3 * _WIDTH // 4)])
    for row in rows:
        yield f"{row.code + _COMMENT_GAP:{column}}{row.comment}" if row.comment else row.code


_OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _SIGN, _ATOM = range(8)


def print_expr(expr: ast.Expr) -> str:
    """Returns the text of an expression: `(a or b) and q_pos - W < kv_idx`."""
    return _print(expr, _OR)


def print_parts(expr: ast.Expr) -> tuple[str, ...]:
    """Returns an expression cut at its loosest operator, each part to get a line: `a`, `and b`, `and c`."""
    match expr:
        case ast.BoolOp(op=op, operands=(first, *rest)):
            level = _level(expr) + 1 + (op == "or")
            return (_print(first, level), *(f"{op} {_print(operand, level)}" for operand in rest))
        case ast.Compare(operands=(first, *rest), ops=ops):
            pairs = zip(ops, rest, strict=True)
            return (_print(first, _SUM), *(f"{op} {_print(operand, _SUM)}" for op, operand in pairs))
        case ast.BinaryOp(op=op, left=left, right=right):
            level = _level(expr)
            head = print_parts(left) if _level(left) == level else (_print(left, level),)
            return (*head, f"{op} {_print(right, level + 1)}")
        case _:
            return (print_expr(expr),)


def print_arguments(call: ast.Call) -> tuple[str, ...]:
    """Returns the texts of arguments: `block_table`, `page = 16`."""
    named = (f"{keyword.name.id} = {print_expr(keyword.value)}" for keyword in call.kwargs)
    return (*map(print_expr, call.args), *named)


def print_list(exprs: Iterable[ast.Expr]) -> str:
    """Returns the text of expressions: `a, b + 1`."""
    return ", ".join(map(print_expr, exprs))


def _print(expr: ast.Expr, at_least: int) -> str:
    text = _bare(expr)
    return text if _level(expr) >= at_least else f"({text})"


def _bare(expr: ast.Expr) -> str:
    match expr:
        case ast.Name():
            return expr.id
        case ast.Number():
            return expr.text
        case ast.Bool():
            return "true" if expr.value else "false"
        case ast.UnaryOp():
            return f"{expr.op}{_print(expr.operand, _ATOM)}"
        case ast.Not():
            return f"not {_print(expr.operand, _NOT)}"
        case ast.BinaryOp() | ast.Compare() | ast.BoolOp():
            return " ".join(print_parts(expr))
        case ast.Call():
            return f"{expr.function.id}({', '.join(print_arguments(expr))})"
        case ast.Subscript():
            return f"{expr.tensor.id}[{print_list(expr.indices)}]"
        case ast.ListValue():
            return f"[{print_list(expr.items)}]"


def _level(expr: ast.Expr) -> int:
    match expr:
        case ast.BoolOp():
            return _OR if expr.op == "or" else _AND
        case ast.Not():
            return _NOT
        case ast.Compare():
            return _COMPARE
        case ast.BinaryOp():
            return _SUM if expr.op in ("+", "-") else _PRODUCT
        case ast.UnaryOp():
            return _SIGN
        case _:
            return _ATOM
