"""AST -> canonical text.

One statement a line, except those that were written on one line with commas; two spaces of indentation;
single blank lines are kept; a long statement is broken at its loosest operator, and so is one with comments
between its parts; comments stay where they were, before a statement or part or after it, those after one
aligned. Formatting twice changes nothing, and the text parses to the same tree.

An expression has the fewest brackets that keep its tree, with one exception: an `and` inside an `or` is
bracketed, because few readers remember which binds tighter.

Non-goals: sorting, and rewording what was written (numbers keep their digits, comments their text).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, cast

from attnc.source import Span
from attnc.syntax import ast

_WIDTH = 100
_INDENT = "  "
_COMMENT_COLUMN = 40
_COMMENT_GAP = "   "

#: A closing bracket and what stands before it. A comment is read to the end of its line: what ended anywhere
#: would take brackets in comments for it, and try all ways to cut a row of `#` into comments.
_CLOSING = re.compile(r"(?:\s|#[^\n]*\n)*\)")

_Statement = TypeVar("_Statement", bound=ast.Node)


def format_file(file: ast.File) -> str:
    """Returns the canonical text of a parsed file; empty, or ending with a newline."""
    writer = _Writer(file)
    end = len(file.span.source.text) + 1
    for item in file.items:
        match item:
            case ast.Def():
                writer.statement([item], 0, end)
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
        self.comment_starts = {comment.span.end: comment.span.start for comment in file.comments}
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

    def statement(self, group: Sequence[ast.Node], depth: int, limit: int, text: str = "") -> None:
        """Writes statements of one line. text: of a block on one line."""
        start, end = group[0].span.start, group[-1].span.end
        self.comments_before(start, depth)
        head, value = _definition(group[0]) or ("", None)
        if value is not None and self.has_comment(end) and _splits(value):
            self.write([f"{head}{_opening(value)}"], depth, start, start)
            around = self.brackets(value, end)
            self.parts(value, depth + 1, end if around is None else around.end - 1)
            self.rows.append(_TextRow(")", depth))
            self.line = self.source.position(end)[0]
        else:
            self.comments_before(end, depth, at=start)
            self.write([text] if text else _statement_texts(group), depth, start, end)
        self.trailing_comment(limit)

    def has_comment(self, before: int, after: int = 0) -> bool:
        """Whether a comment that is not written stands between two offsets."""
        for comment in reversed(self.comments):
            if comment.span.start >= before:
                return False
            if comment.span.start > after:
                return True
        return False

    def comments_inside(self, offset: int, depth: int) -> None:
        """Writes the comments before an offset, without blank lines."""
        count = len(self.rows)
        self.comments_before(offset, depth)
        for row in self.rows[count:]:
            row.after_blank = False

    def brackets(self, expr: ast.Expr, end: int) -> Span | None:
        """Returns an expression with its brackets; None if it has none that end by the offset `end`."""
        if isinstance(expr, ast.Call):
            return expr.span
        text, start, place = self.source.text, expr.span.start, expr.span
        while (before := text[:start].rstrip()) and len(before) in self.comment_starts:
            start = self.comment_starts[len(before)]
        found = _CLOSING.match(text, place.end) if before.endswith("(") else None
        return self.source.span(len(before) - 1, found.end()) if found and found.end() <= end else None

    def parts(self, expr: ast.Expr, depth: int, end: int) -> None:
        """Writes the parts of an expression and the comments between them, up to the offset `end`."""
        parts = _split(expr)
        starts = [part.span.start for _, part, _, _ in parts]
        self.trailing_comment(starts[0])
        for (before, part, level, behind), following in zip(parts, [*starts[1:], end], strict=True):
            around = self.brackets(part, end)
            if around and _splits(part) and self.has_comment(around.end, around.start):
                self.comments_inside(around.start, depth)
                self.rows.append(_TextRow(before + _opening(part), depth))
                self.line = self.source.position(around.start)[0]
                self.parts(part, depth + 1, around.end - 1)
                self.rows.append(_TextRow(f"){behind}", depth))
            else:
                around = part.span
                self.comments_inside(around.end, depth)
                self.rows.append(_TextRow(f"{before}{_print(part, level)}{behind}", depth))
            self.line = self.source.position(around.end)[0]
            self.trailing_comment(following)
        self.comments_inside(end, depth)

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
                    self.statement(group, depth + 1, brace, text)
                case [ast.Phase() as phase]:
                    self.block([phase.name.id], phase, phase.name, phase.entries, depth + 1, brace)
                case [ast.When() as when]:
                    head = _break("when ", when.condition)
                    self.block(head, when, when.condition, when.entries, depth + 1, brace)
                case _:
                    self.statement(group, depth + 1, brace)
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


def _definition(node: ast.Node) -> tuple[str, ast.Expr] | None:
    """Returns the text before the expression of a statement, and the expression; None if the statement is not
    one expression.
    """
    match node:
        case ast.Def(name=name, params=params, value=value):
            return f"def {name.id}" + (f"({_names(params)})" if params else "") + " = ", value
        case ast.Output(name=name, value=value) if value is not None:
            return f"output {name.id}: {node.dtype.id}[{print_list(node.shape)}] = ", value
        case ast.Let(name=name, value=value) | ast.Length(name=name, value=value):
            return f"{type(node).__name__.lower()} {name.id} = ", value
        case ast.Equation(name=name, value=value):
            return f"{name.id} = ", value
        case ast.Score() | ast.Weight() | ast.Mask() | ast.Normalize() | ast.Order():
            return f"{type(node).__name__.lower()} = ", node.value
        case ast.Where(condition=condition):
            return "where ", condition
        case _:
            return None


def _statement_texts(group: Sequence[ast.Node]) -> list[str]:
    if definition := _definition(group[0]):
        return _break(*definition)
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
            return [f"output {tensor.name.id}: {tensor.dtype.id}[{print_list(tensor.shape)}]"]
        case ast.Grad(names=names, dtype=dtype):
            return [f"grad {_names(names)}" + (f": {dtype.id}" if dtype is not None else "")]
        case ast.Listed(settings=settings):
            return ["config " + ", ".join(map(_setting, settings))]
        case node:
            raise AssertionError(f"no statement is a {type(node).__name__}")


def _setting(setting: ast.Setting) -> str:
    values = print_list(setting.values)
    return f"{setting.key.id} in {{{values}}}" if setting.is_set else f"{setting.key.id} = {values}"


def _names(names: Iterable[ast.Name]) -> str:
    return ", ".join(name.id for name in names)


def _break(head: str, value: ast.Expr) -> list[str]:
    text = head + print_expr(value)
    if len(_INDENT) + len(text) <= _WIDTH or not _splits(value):
        return [text]
    parts = (f"{before}{_print(part, level)}{behind}" for before, part, level, behind in _split(value))
    return [f"{head}{_opening(value)}", *(_INDENT + part for part in parts), ")"]


def _opening(value: ast.Expr) -> str:
    return f"{value.function.id}(" if isinstance(value, ast.Call) else "("


def _splits(expr: ast.Expr) -> bool:
    return len(_split(expr)) > (not isinstance(expr, ast.Call))


#: What stands before a part, the part, the level that it needs to stand without brackets, and what is behind.
_Part: TypeAlias = tuple[str, ast.Expr, int, str]


def _split(expr: ast.Expr) -> Sequence[_Part]:
    """Returns an expression cut at its loosest operator, or at the commas of a call."""
    match expr:
        case ast.Call(args=args, kwargs=kwargs):
            named = ((f"{keyword.name.id} = ", keyword.value) for keyword in kwargs)
            parts = [*(("", arg) for arg in args), *named]
            return [(name, part, _OR, "," * (i < len(parts))) for i, (name, part) in enumerate(parts, 1)]
        case ast.BoolOp(op=op, operands=operands):
            level = _level(expr) + 1 + (op == "or")
            return [(f"{op} " * (i > 0), operand, level, "") for i, operand in enumerate(operands)]
        case ast.Compare(operands=(first, *rest), ops=ops):
            pairs = zip(ops, rest, strict=True)
            return [("", first, _SUM, ""), *((f"{op} ", operand, _SUM, "") for op, operand in pairs)]
        case ast.BinaryOp(op=op, left=left, right=right):
            level = _level(expr)
            head = _split(left) if _level(left) == level else [("", left, level, "")]
            return [*head, (f"{op} ", right, level + 1, "")]
        case _:
            return [("", expr, _OR, "")]


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
    if isinstance(expr, ast.Call):
        return (print_expr(expr),)
    return tuple(f"{before}{_print(part, level)}" for before, part, level, _ in _split(expr))


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
