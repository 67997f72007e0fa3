"""Text -> CST -> AST: `load` reads a file, `parse` parses it, `prelude` has the defs that every spec may use.

The text is cut into items first, before each line that starts with `attention`, `schedule` or `def`, and
the items are parsed one by one: a mistake costs the item that it is in, and an item reports at most one.
(An LALR parser that repairs its stack guesses, and reports its wrong guesses.) Limits on size and nesting
are checked token by token, before anything is parsed, so that nothing behind them needs to think about
hostile specs; a tree can be deeper than its brackets (`a + a + a` leans left, one level for each
operator), and is checked again.

Non-goals: names, shapes and types. That `kv_indx` is unknown is for `model.resolve` to say. The one thing
refused here that the grammar lets pass is a positional argument after a named one.
"""

from __future__ import annotations

import errno
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from io import BytesIO
from itertools import islice, pairwise
from pathlib import Path
from typing import TypeAlias, cast

from lark import Lark, Token, Tree
from lark import __version__ as lark_version
from lark.exceptions import UnexpectedInput
from lark.lark import PostLex
from lark.utils import TextSlice

from attnc.diagnostics import LIFT, Diagnostic, DiagnosticError, Label, error
from attnc.effort import at_most, spend
from attnc.resources import keep, kept_code, read_kept, resource
from attnc.source import STDIN, Source, Span
from attnc.syntax import ast
from attnc.syntax.explain import explain
from attnc.syntax.spans import keep_spans_alone

MAX_ERRORS = 50

#: Not a line of an expression over several, such as `attention` or `* attention`.
_ITEM_START = re.compile(
    r"^[ \t]*(?:(?:attention|projection|schedule|def)(?:[ \t]+[A-Za-z_{(]|[{(])"
    r"|(?:projection|schedule|def)[ \t]*$)",
    re.MULTILINE,
)
_COMMENT = re.compile(r"#[^\n]*")


def load(path: Path) -> Source:
    """Reads a spec file, or standard input. Raises OSError, and DiagnosticError for what is not UTF-8."""
    most = at_most(4 * MAX_CHARACTERS)  # bytes; `check_size` refuses a file that has more
    count = int(most) + 4 if most == 4 * MAX_CHARACTERS else -1
    if path == STDIN:
        if sys.stdin is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), "standard input")
        path, data = Path("<stdin>"), sys.stdin.buffer.read(count)
    else:
        with path.open("rb") as file:
            data = file.read(count)
    cut_off = len(data) > most  # so decoding may be rough
    try:
        text = data.decode("utf-8-sig", errors="replace" if cut_off else "strict")
    except UnicodeDecodeError as failure:
        # `failure.start` counts from after a byte order mark when there is one.
        source = Source(str(path), data.decode("utf-8-sig", errors="replace"))
        good = len(failure.object[: failure.start].decode("utf-8-sig"))
        byte = failure.object[failure.start]
        span = source.span(good, good + 1)
        raise DiagnosticError(
            [error("E0105", "the file is not UTF-8 text", span, f"byte 0x{byte:02x}")]
        ) from None
    return Source(str(path), text)


def parse(source: Source, start: int = 0) -> ast.File:
    """Returns the tree of a file, or of what is behind an offset, where a line begins. Raises DiagnosticError
    with an error for each wrong item (at most `MAX_ERRORS`).
    """
    if oversized := check_size(source, start):
        raise DiagnosticError([oversized])
    items: list[ast.Item] = []
    errors: list[Diagnostic] = []
    for begin, end in _item_ranges(source.text, start):
        try:
            items += _parse_items(source, begin, end)
        except DiagnosticError as failure:
            [found] = failure.diagnostics
            # The rest of an unclosed block may stand behind the item that cut it off.
            if not (errors and errors[-1].code == "E0103" and found.code in ("E0104", "E0107")):
                errors.append(found)
            if len(errors) == MAX_ERRORS:
                break
    if errors:
        raise DiagnosticError(errors)
    span = source.span(start, len(source.text))
    return ast.File(items=tuple(items), comments=_comments(span), span=span)


def _item_ranges(text: str, start: int) -> Iterator[tuple[int, int]]:
    starts = [match.start() for match in _ITEM_START.finditer(text, start) if match.start() > start]
    return pairwise([start, *starts, len(text)])


def _parse_items(source: Source, start: int, end: int) -> tuple[ast.Item, ...]:
    if exceeded := check_limits(source, start, end):
        raise DiagnosticError([exceeded])
    written = source.text[start:end]
    tree = _read_short(written) if len(written) <= _SHORT else _read(written)
    if tree is None:
        raise DiagnosticError([_find_mistake(source, start, end)])
    return build_items(source, tree, start)


def _read(text: str) -> Cst | None:
    """Returns the tree of the items of a text, None where it is wrong."""
    with suppress(UnexpectedInput):
        return _lark().parse(text)
    return None


#: Most items of a file that is edited, or that differs from another in its schedules, were read before.
_read_short = lru_cache(maxsize=256)(_read)
#: Characters of an item that is remembered.
_SHORT = 4096


def _find_mistake(source: Source, start: int, end: int) -> Diagnostic:
    """Returns what is wrong with a range of a text that is not read."""
    text = TextSlice(source.text, start, end)
    session = _lark().parse_interactive(text)
    tokens: list[Token] = []
    try:
        for token in session.iter_parse():
            tokens.append(token)  # noqa: PERF402 - the tokens before a failure are needed
        session.feed_token(Token("$END", "", end, end_pos=end))
    except UnexpectedInput as failure:
        taken = tokens[:-1] if tokens and tokens[-1] is getattr(failure, "token", None) else tokens
        return explain(source, taken, failure, _list_accepted(text, len(taken)), end)
    raise AssertionError("what is not read by itself is read in its file")


def _list_accepted(text: TextSlice[str], count: int) -> set[str]:
    """Returns the types of token that may follow the first `count` tokens.

    Parsed anew: the parser that failed may have reduced before it saw that it could not go on.
    """
    session = _lark().parse_interactive(text)
    with suppress(UnexpectedInput):
        for _ in islice(session.iter_parse(), count + 1):  # the last one is read and not yet taken
            pass
    accepts: Callable[[], set[str]] = session.accepts
    return accepts()


def _comments(place: Span) -> tuple[ast.Comment, ...]:
    source = place.source
    return tuple(
        ast.Comment(text=text, span=source.span(match.start(), match.start() + len(text)))
        for match in _COMMENT.finditer(source.text, place.start)
        if (text := match.group().rstrip())
    )


@cache
def _lark() -> Lark:
    """Returns the parser, from the tables that Lark has made for an earlier process if there are any."""
    made = _make_or_load()
    keep_spans_alone(made)
    return made


def _make_or_load() -> Lark:
    grammar = resource("grammar", "attn.lark").read_text(encoding="utf-8")
    made_of = "\0".join((lark_version, sys.version, Path(__file__).read_text(encoding="utf-8"), grammar))
    place = kept_code(__file__, "attn.lark")
    tables = read_kept(place, made_of)
    if tables is not None:
        return Lark.load(BytesIO(tables))
    made = Lark(
        grammar,
        start="file",
        parser="lalr",
        postlex=_Newlines(),
        propagate_positions=True,
        maybe_placeholders=False,
    )
    written = BytesIO()
    made.save(written)
    keep(place, made_of, written.getvalue())
    return made


class _Newlines(PostLex):
    """Drops the newlines that end no statement: those inside ( ), [ ] and sets, and all but one of a run."""

    # Read everywhere as what they are: 'andb' is never 'and' and 'b', '==' never '=' and '='.
    always_accept = ("_NL", "NAME", "COMPARISON")

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        ends_statement = [True]
        before = ""
        for token in stream:
            if token.type != "_NL":
                yield token
                if token.type in ("LPAR", "LSQB", "LBRACE"):
                    ends_statement.append(token.type == "LBRACE" and before != "IN")
                elif token.type in ("RPAR", "RSQB", "RBRACE") and len(ends_statement) > 1:
                    ends_statement.pop()
            elif ends_statement[-1] and before != "_NL":
                yield token
            else:
                continue
            before = token.type


@cache
def prelude() -> ast.File:
    """Returns the tree of the prelude. Its source is named without the place of the installation."""
    return parse(Source("prelude.attn", resource("grammar", "prelude.attn").read_text(encoding="utf-8")))


# --- from a CST to the AST


_FLAT = frozenset(
    {"file", "attention", "projection", "schedule", "def", "name", "number", "true", "false", "dotted"}
)


def build_items(source: Source, tree: Cst, start: int) -> tuple[ast.Item, ...]:
    """Returns the items of a `file` tree of the text from an offset on. Raises DiagnosticError (E0108, E0502)
    with the first error.
    """
    _check_depth(source, tree, start)
    builder = _Builder(source, start)
    return tuple(builder.item(child) for child in _trees(tree))


def _check_depth(source: Source, root: Cst, start: int) -> None:
    """Raises E0502 where the tree is too deep. A chain of n arithmetic operators is n levels of the AST, any
    other node at most one.
    """
    stack = [(root, 0)]
    while stack:
        tree, depth = stack.pop()
        depth += len(tree.children) // 2 if tree.data in ("sum", "product") else tree.data not in _FLAT
        if depth > MAX_DEPTH:
            place = source.span(start + tree.meta.start_pos, start + tree.meta.end_pos)
            raise DiagnosticError([too_deep(place)])
        stack += [(child, depth) for child in reversed(_trees(tree))]


def _trees(tree: Cst) -> list[Cst]:
    return [child for child in tree.children if isinstance(child, Tree)]


class _Builder:
    def __init__(self, source: Source, start: int) -> None:
        self.source, self.start = source, start

    def span(self, tree: Cst) -> Span:
        return self.source.span(self.start + tree.meta.start_pos, self.start + tree.meta.end_pos)

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
            case "weight":
                yield ast.Weight(value=self.expr(children[0]), span=span)
            case "mask":
                yield ast.Mask(value=self.expr(children[0]), span=span)
            case "normalize":
                yield ast.Normalize(value=cast("ast.Name | ast.Call", self.expr(children[0])), span=span)
            case "order":
                yield ast.Order(value=cast("ast.Name | ast.Call", self.expr(children[0])), span=span)
            case _:
                dtype = self.name(children[1]) if len(children) > 1 else None
                yield ast.Grad(names=self.names(children[0]), dtype=dtype, span=span)

    def part(self, tree: Cst) -> Iterator[ast.ProjectionItem]:
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
                value = self.expr(children[2]) if len(children) > 2 else None
                yield ast.Output(name=name_, dtype=type_, shape=self.exprs(shape), value=value, span=span)

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


# --- limits


MAX_CHARACTERS = 256 * 1024
#: Of lines, and of words, numbers and signs outside comments.
MAX_TOKENS = 32 * 1024
MAX_DEPTH = 64
MAX_DIGITS = 32
MAX_NAME = 64
_STEPS_PER_TOKEN = 15

_TOKEN = re.compile(
    r"(?P<comment>\#[^\n]*) | (?P<open>[(\[{]) | (?P<close>[)\]}]) | (?P<sign>- | not\b)"
    r" | (?P<name>[A-Za-z_][A-Za-z0-9_]*) | (?P<number>[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?) | [^\s]",
    re.VERBOSE,
)


def check_size(source: Source, start: int = 0) -> Diagnostic | None:
    """Returns E0501, or None. Counts what reading the file costs from an offset on."""
    if len(source.text) > at_most(MAX_CHARACTERS):
        message = f"the file has {len(source.text)} characters; the limit is {MAX_CHARACTERS}"
        return error("E0501", message, source.span(0, 0), "too large to be a spec", hints=(LIFT,))
    tokens = sum(match.lastgroup != "comment" for match in _TOKEN.finditer(source.text, start))
    for count, what in ((source.text.count("\n"), "lines"), (tokens, "words, numbers and signs")):
        if count > at_most(MAX_TOKENS):
            message = f"the file has {count} {what}; the limit is {MAX_TOKENS}"
            return error("E0501", message, source.span(0, 0), "too large to be a spec", hints=(LIFT,))
    spend(_STEPS_PER_TOKEN * tokens)
    return None


def check_limits(source: Source, start: int, end: int) -> Diagnostic | None:
    """Returns the first place in [start, end) that exceeds a limit, or None."""
    return next(_violations(source, start, end), None)


def too_deep(span: Span) -> Diagnostic:
    hint = "give parts of the expression a name with 'let' or 'def'"
    return error("E0502", f"more than {MAX_DEPTH} levels of nesting", span, "too deep", hints=[hint])


def _violations(source: Source, start: int, end: int) -> Iterator[Diagnostic]:
    depth = signs = 0
    for match in _TOKEN.finditer(source.text, start, end):
        kind, length = match.lastgroup, match.end() - match.start()
        span = source.span(match.start(), match.end())
        signs = signs + 1 if kind == "sign" else 0
        depth += (kind == "open") - (kind == "close" and depth > 0)
        if depth + signs > MAX_DEPTH:
            yield too_deep(span)
        elif kind == "name" and length > MAX_NAME:
            yield error("E0504", f"name of {length} characters", span, f"the limit is {MAX_NAME}")
        elif kind == "number" and (digits := sum(map(str.isdigit, match.group()))) > MAX_DIGITS:
            yield error("E0503", f"number of {digits} digits", span, f"the limit is {MAX_DIGITS}")
        elif kind == "number" and not math.isfinite(float(match.group())):
            yield error("E0505", f"'{span.text}' is too large", span, "not a finite float64")


Cst: TypeAlias = "Tree[Token]"
