"""Text -> CST -> AST: `load` reads a file, `parse` parses it.

The text is cut into items first, before each line that starts with `attention`, `schedule` or `def`, and the
items are parsed one by one: a mistake costs the item that it is in, and an item reports at most one. (An LALR
parser that repairs its stack guesses, and reports its wrong guesses.)

Non-goals: names, shapes and types. That `kv_indx` is unknown is for `model.resolve` to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import islice, pairwise
from pathlib import Path

from lark import Lark, Token
from lark.exceptions import UnexpectedInput
from lark.lark import PostLex
from lark.utils import TextSlice

from attnc.diagnostics import Diagnostic, DiagnosticError, error
from attnc.resources import resource
from attnc.source import Source
from attnc.syntax import ast
from attnc.syntax.build import build_items
from attnc.syntax.explain import explain
from attnc.syntax.limits import MAX_CHARACTERS, check_limits, check_size

MAX_ERRORS = 50

_ITEM_START = re.compile(r"^[ \t]*(?:attention|projection|schedule|def)\b", re.MULTILINE)
_COMMENT = re.compile(r"#[^\n]*")


def load(path: Path) -> Source:
    """Reads a spec file. Raises OSError, and DiagnosticError for text that is not UTF-8."""
    with path.open("rb") as file:
        data = file.read(4 * MAX_CHARACTERS + 4)
    cut_off = (
        len(data) > 4 * MAX_CHARACTERS
    )  # more than enough for `parse` to refuse it, so decoding may be rough
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


def parse(source: Source) -> ast.File:
    """The tree of a file. Raises DiagnosticError with an error for each wrong item (at most `MAX_ERRORS`)."""
    if oversized := check_size(source):
        raise DiagnosticError([oversized])
    items: list[ast.Item] = []
    errors: list[Diagnostic] = []
    for start, end in _item_ranges(source.text):
        try:
            items += _parse_items(source, start, end)
        except DiagnosticError as failure:
            [found] = failure.diagnostics
            # The rest of an unclosed block may stand behind the item that cut it off.
            if not (errors and errors[-1].code == "E0103" and found.code in ("E0104", "E0107")):
                errors.append(found)
            if len(errors) == MAX_ERRORS:
                break
    if errors:
        raise DiagnosticError(errors)
    return ast.File(items=tuple(items), comments=_comments(source), span=source.span(0, len(source.text)))


def _item_ranges(text: str) -> Iterator[tuple[int, int]]:
    starts = [match.start() for match in _ITEM_START.finditer(text) if match.start() > 0]
    return pairwise([0, *starts, len(text)])


def _parse_items(source: Source, start: int, end: int) -> tuple[ast.Item, ...]:
    """The item in [start, end); none before the first. Raises with exactly one error."""
    if exceeded := check_limits(source, start, end):
        raise DiagnosticError([exceeded])
    text = TextSlice(source.text, start, end)
    session = _lark().parse_interactive(text)
    tokens: list[Token] = []
    try:
        for token in session.iter_parse():
            tokens.append(token)  # noqa: PERF402 - the tokens before a failure are needed
        tree = session.feed_token(Token("$END", "", end, end_pos=end))
    except UnexpectedInput as failure:
        taken = tokens[:-1] if tokens and tokens[-1] is getattr(failure, "token", None) else tokens
        raise DiagnosticError([explain(source, taken, failure, _accepted(text, len(taken)), end)]) from None
    return build_items(source, tree)


def _accepted(text: TextSlice[str], count: int) -> set[str]:
    """The types of token that may follow the first `count` tokens.

    Parsed anew: the parser that failed may have reduced before it saw that it could not go on.
    """
    session = _lark().parse_interactive(text)
    with suppress(UnexpectedInput):
        for _ in islice(session.iter_parse(), count + 1):  # the last one is read and not yet taken
            pass
    accepts: Callable[[], set[str]] = session.accepts
    return accepts()


def _comments(source: Source) -> tuple[ast.Comment, ...]:
    """Every comment. The language has no strings, so that every '#' starts one."""
    return tuple(
        ast.Comment(text=text, span=source.span(match.start(), match.start() + len(text)))
        for match in _COMMENT.finditer(source.text)
        if (text := match.group().rstrip())
    )


@cache
def _lark() -> Lark:
    grammar = resource("grammar", "attn.lark").read_text(encoding="utf-8")
    return Lark(
        grammar,
        start="file",
        parser="lalr",
        postlex=_Newlines(),
        propagate_positions=True,
        maybe_placeholders=False,
    )


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
