"""Slips of the hand: what people write who come from Python, C or a formula, and what to write here."""

from __future__ import annotations

import re

from attnc.diagnostics import Diagnostic, error
from attnc.source import Source, Span

_NOT_AN_OPERATOR = "'{}' is not an operator of the language"

_SLIPS = tuple(
    (re.compile(pattern), message, hint)
    for pattern, message, hint in (
        (r"&&?", _NOT_AN_OPERATOR, "write 'and'"),
        (r"\|\|?", _NOT_AN_OPERATOR, "write 'or'"),
        (r"!(?!=)|~", _NOT_AN_OPERATOR, "write 'not'"),
        (r"\*\*", _NOT_AN_OPERATOR, "write x * x for a square"),
        (r"\^", _NOT_AN_OPERATOR, "write x * x for a square, '!=' for an exclusive or"),
        (r"<>", _NOT_AN_OPERATOR, "write '!='"),
        (r"=<", _NOT_AN_OPERATOR, "write '<='"),
        (r"=>", _NOT_AN_OPERATOR, "write '>='"),
        (r"===|!==", _NOT_AN_OPERATOR, "write '==' or '!='"),
        (r"<<|>>", _NOT_AN_OPERATOR, "multiply or divide ('//') by a power of two"),
        (r":=", _NOT_AN_OPERATOR, "write '='"),
        (r"[-+*/%]=", _NOT_AN_OPERATOR, "every name is defined once, with '='"),
        (r"\+\+|--", _NOT_AN_OPERATOR, "every name is defined once, with '='"),
        (r"@", _NOT_AN_OPERATOR, "write dot(q, k), in a projection dot(x, w)"),
        (r"\?|if\b|else\b", "there are no conditional expressions", "write where(condition, a, b)"),
        (r"->|lambda\b", "functions are not values", "define one: def name(x) = ..."),
        (r";", "statements end with their line", "remove ';' and start a new line"),
        (r"['\"`]", "there are no strings", "write names without quotes"),
    )
)

_FORMULA = {
    "≤": "write '<='",
    "≥": "write '>='",
    "≠": "write '!='",
    "×": "write '*'",
    "·": "write '*'",
    "÷": "write '/' or '//'",
    "−": "write '-'",
    "–": "write '-'",
    "∧": "write 'and'",
    "∨": "write 'or'",
    "¬": "write 'not'",
    "√": "write sqrt(x)",
    "∞": "leave the bound out",
    "∈": "write 'in'",
    "’": "write names without quotes",
    "“": "write names without quotes",
    "”": "write names without quotes",
}


def find_slip(source: Source, start: int, beyond: int) -> Diagnostic | None:
    """E0106 if a known slip starts at `start` and reaches beyond the offset `beyond`, or None."""
    for pattern, message, hint in _SLIPS:
        match = pattern.match(source.text, start)
        if match and match.end() > beyond:
            span = source.span(match.start(), match.end())
            return error("E0106", message.format(span.text), span, hints=[hint])
    return None


def foreign_character(span: Span) -> Diagnostic:
    """E0101: a character that is no part of the language."""
    char = span.text
    name = f"'{char}'" if char.isprintable() and not char.isspace() else f"U+{ord(char):04X}"
    if char.isspace():
        hints = ["write a plain space"]
    elif char in _FORMULA:
        hints = [_FORMULA[char]]
    elif char.isalnum():
        hints = ["names consist of the letters a-z and A-Z, digits and '_'"]
    else:
        hints = []
    return error(
        "E0101", f"character {name} is not used in specs", span, "not part of the language", hints=hints
    )
