"""What generated text computes, as tokens: without comments, docstrings and layout.

Two texts with the same tokens are the same program. The C++ half does the phases of translation that matter
to where a comment ends: trigraphs, spliced lines, comments, literals, directives.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize

_TRIGRAPHS = dict(zip("=/'()!<>-", "#\\^[]|{}~", strict=True))
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_CPP = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/|/\*.*)
    |(?P<raw>(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)")
    |(?P<text>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<end>\n)|(?P<blank>[^\S\n]+)
    |(?P<word>[^\W\d]\w*|\.?\d[\w.']*)|(?P<sign>.)""",
    re.X | re.S,
)


def python_tokens(text: str) -> tuple[str, ...]:
    """The tokens of a Python module. SyntaxError where it is none."""
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and ast.get_docstring(node) is not None
    }
    return tuple(
        "INDENT"
        if token.type == tokenize.INDENT
        else "DEDENT"
        if token.type == tokenize.DEDENT
        else token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if (token.type not in _LAYOUT or token.type in (tokenize.INDENT, tokenize.DEDENT))
        and not (token.type == tokenize.STRING and token.start in docstrings)
    )


def cpp_tokens(text: str) -> tuple[str, ...]:
    """The tokens of a C++ file; each preprocessor directive is one."""
    text = re.sub(r"\?\?([=/'()!<>-])", lambda match: _TRIGRAPHS[match[1]], text)
    text = re.sub(r"\\[ \t]*\r?\n", "", text).replace("\r\n", "\n").replace("\r", "\n")
    found: list[str] = []
    directive: list[str] | None = None
    starts_line = True
    for match in _CPP.finditer(text):
        kind, piece = match.lastgroup, match.group()
        if kind == "end":
            if directive is not None:
                found.append(" ".join(directive))
            directive, starts_line = None, True
        elif kind not in ("comment", "blank"):
            if starts_line and piece == "#":
                directive = []
            (found if directive is None else directive).append(piece)
            starts_line = False
    return (*found, *([] if directive is None else [" ".join(directive)]))


def tokens_of(name: str, text: str) -> tuple[str, ...]:
    """Those of a generated file, by its name."""
    return (python_tokens if name.endswith(".py") else cpp_tokens)(text)
