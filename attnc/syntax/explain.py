"""What to say about a syntax error: from the place where the parser stopped to one precise diagnostic.

The causes are tried from the most to the least specific: a bracket, a slip from another language, a misplaced
or misspelt word, else the expected and the found tokens. Slips are habits from Python, C or formulas.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from lark import Token
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from attnc.diagnostics import Diagnostic, Label, did_you_mean, error
from attnc.source import Source, Span

_PARTNER = {"(": ")", "[": "]", "{": "}"}
_PARTNER_TYPE = {"(": "RPAR", "[": "RSQB", "{": "RBRACE"}
_ITEMS = ("attention", "projection", "schedule", "def")
_STATEMENTS = (
    "param",
    "input",
    "output",
    "let",
    "length",
    "score",
    "weight",
    "mask",
    "normalize",
    "order",
    "grad",
)
#: Words that stand inside of a statement, and those that begin one.
_JOINING = ("and", "or", "in", "for", "as", "via", "is")
_STARTING = frozenset((*_STATEMENTS, "where", "when", "config"))
#: What is written for statements that there are not.
_WRITE: Mapping[str, str] = {
    **dict.fromkeys(
        ("norm", "normalise", "normalization", "normalisation", "softmax", "activation"),
        "normalize = softmax",
    ),
    **dict.fromkeys(("dropout", "p_drop"), "normalize = softmax(dropout = p, seed = seed)"),
    **dict.fromkeys(("sink", "sinks"), "normalize = softmax(sink = sink[h])"),
    **dict.fromkeys(("backward", "gradient", "gradients", "differentiate", "requires_grad"), "grad q, k, v"),
    **dict.fromkeys(("tensor", "arg", "argument", "buffer"), "input NAME: f32[H]"),
    **dict.fromkeys(("const", "constant", "var", "set", "define"), "let NAME = ..."),
    **dict.fromkeys(("constexpr", "template", "choice", "tune"), "param NAME in {64, 128}"),
    **dict.fromkeys(("return", "result", "out"), "output o: bf16[B, M, H, D]"),
    **dict.fromkeys(
        ("scale", "softmax_scale", "sm_scale", "scores", "logits"), "score = dot(q, k) / sqrt(D)"
    ),
    **dict.fromkeys(("softcap", "logit_cap"), "score = softcap(dot(q, k) / sqrt(D), 50)"),
    **dict.fromkeys(("bias", "score_mod"), "score = dot(q, k) / sqrt(D) + bias[h, q_idx, kv_idx]"),
    **dict.fromkeys(("mask_mod", "attn_mask"), "mask = causal"),
    **dict.fromkeys(("causal", "is_causal"), "mask = causal"),
    **dict.fromkeys(("window", "sliding_window"), "mask = window(128, 0)"),
    **dict.fromkeys(
        ("epilogue", "gate", "postprocess", "post", "residual"),
        "output o: bf16[B, M, H, D] = attention * sigmoid(gate[b, q_idx, h, d])",
    ),
    **dict.fromkeys(("lengths", "seqlens", "seqlen"), "length N = kv_len[b]"),
}

#: Words of recurrences and of loops, which no spec has.
_STATES = frozenset(("state", "scan", "recurrence", "hidden", "carry", "for", "while", "loop", "repeat"))
_NO_STATE = "a spec has no state and no loops: recurrences over a sequence are outside of the language"

_EXPRESSION = {"NAME", "NUMBER", "LPAR", "NOT", "MINUS", "TRUE", "FALSE"}
_OPERATORS = {"PLUS", "MINUS", "PRODUCT", "COMPARISON", "AND", "OR", "LPAR", "LSQB", "DOT"}
_WORDS = {
    "NAME": "a name",
    "EQUAL": "'='",
    "IN": "'in'",
    "COLON": "':'",
    "FOR": "'for'",
    "AS": "'as'",
    "VIA": "'via'",
    "IS": "'is'",
    "LBRACE": "'{'",
    "LPAR": "'('",
    "LSQB": "'['",
    "DOT": "'.'",
    "COMMA": "','",
    "RPAR": "')'",
    "RSQB": "']'",
    "RBRACE": "'}'",
    "_NL": "the end of the line",
    "$END": "the end of the file",
}


@dataclass(frozen=True, slots=True)
class Stop:
    """Where the parser stopped: the rejected token, the tokens before it, and the acceptable ones."""

    source: Source
    kind: str
    span: Span
    taken: Sequence[Token]
    accepts: Collection[str]
    end: int

    @property
    def touches_last(self) -> bool:
        return bool(self.taken) and _end(self.taken[-1]) == self.span.start

    @property
    def starts_line(self) -> bool:
        return _starts_line(self.source, self.span.start)


def _starts_line(source: Source, offset: int) -> bool:
    line, column = source.position(offset)
    return not source.line_text(line)[: column - 1].strip()


_COMMENTS = "comments start with '#'"
#: What follows the names of tensors where they are declared.
_DECLARED = re.compile(r"(?:[ \t]*,[ \t]*\w+)*[ \t]*:")
_SEVERAL_LINES = "put an expression that takes several lines in parentheses"


def explain(
    source: Source, taken: Sequence[Token], failure: UnexpectedInput, accepts: Collection[str], end: int
) -> Diagnostic:
    """Returns the diagnostic for a parse of the text up to `end` that took some tokens and then failed."""
    if isinstance(failure, UnexpectedCharacters):
        at = cast(int, failure.pos_in_stream)
        stop = Stop(source, "", source.span(at, at + 1), taken, accepts, end)
        return _slip(stop) or foreign_character(stop.span)
    assert isinstance(failure, UnexpectedToken)
    token = failure.token
    if token.type in ("_NL", "$END"):  # blame the end of the last word, before any comment
        at = _end(taken[-1]) if taken else end
        span = source.span(at, at)
    else:
        span = source.span(_start(token), _end(token))
    stop = Stop(source, token.type, span, taken, accepts, end)
    return _bracket(stop) or _unclosed_list(stop) or _slip(stop) or _word(stop) or _expectation(stop)


def _bracket(stop: Stop) -> Diagnostic | None:
    opened = _open_brackets(stop.taken)
    closing = stop.span.text if stop.kind in _PARTNER_TYPE.values() else ""
    if closing and (not opened or (opened[-1] == "{" and closing != "}")):
        return error("E0104", f"unmatched '{closing}'", stop.span, "closes nothing")
    if not opened:
        return None
    innermost = opened[-1]
    place = stop.source.span(_start(innermost), _end(innermost))
    partner = _PARTNER[innermost]
    if stop.kind == "$END":
        message = f"'{innermost}' is never closed"
        return error("E0103", message, place, "opened here", hints=[_where_to_close(stop, partner)])
    # Where newlines do not count, a word that starts a line after a complete operand is a new statement.
    broken_off = stop.starts_line and place.line < stop.span.line and _PARTNER_TYPE[innermost] in stop.accepts
    if (closing and closing != partner) or (broken_off and not _is_block(innermost, stop.taken)):
        return _never_closed(stop.source, innermost, stop.span)
    return None


def _never_closed(source: Source, bracket: Token, before: Span) -> Diagnostic:
    place = source.span(_start(bracket), _end(bracket))
    related = [Label(before, f"expected '{_PARTNER[bracket]}' before this")]
    return error("E0103", f"'{bracket}' is never closed", place, "opened here", related=related)


def _open_brackets(tokens: Sequence[Token]) -> list[Token]:
    opened: list[Token] = []
    for token in tokens:
        if token in _PARTNER:
            opened.append(token)
        elif token in _PARTNER.values():
            opened.pop()
    return opened


def _is_block(bracket: Token, tokens: Sequence[Token]) -> bool:
    before = [token for token in tokens if _end(token) <= _start(bracket)]
    return bracket == "{" and before[-1].type != "IN"


def _where_to_close(stop: Stop, partner: str) -> str:
    text = stop.source.text
    if stop.end == len(text):
        return f"add '{partner}' at the end of the file"
    following = text[stop.end :].split(maxsplit=1)[0]
    if text[stop.end].isspace() and following == "def":
        return "'def' starts a new item; inside a block write 'let'"
    line = stop.source.position(stop.end)[0]
    return f"add '{partner}' before line {line}, where '{following}' starts a new item"


def _slip(stop: Stop) -> Diagnostic | None:
    source, start = stop.source, stop.span.start
    text = stop.span.text
    if text == "=" and "COMPARISON" in stop.accepts and not source.text.startswith(("=<", "=>"), start):
        return error("E0106", "'=' does not compare", stop.span, "write '=='")
    if text == "==" and "EQUAL" in stop.accepts:
        return error("E0106", "'==' does not define", stop.span, "write '='")
    # An operator such as '**' is cut in two: the first half was taken as an operator of ours.
    if (
        stop.taken
        and _end(stop.taken[-1]) == start
        and (slip := find_slip(source, _start(stop.taken[-1]), start))
    ):
        return slip
    return find_slip(source, start, start)


def _unclosed_list(stop: Stop) -> Diagnostic | None:
    """Returns E0103 where the next key of a schedule is read as a value, as in `loops = [kv, pack = gqa`."""
    opened, first = _open_brackets(stop.taken), len(stop.taken) - 1
    while first > 0 and stop.taken[first - 1].type == "DOT":
        first -= 2
    if stop.span.text not in ("=", "in") or not opened or opened[-1] == "(":
        return None
    if [token.type for token in stop.taken[first - 1 : first + 1]] != ["COMMA", "NAME"]:
        return None
    line = stop.source.text[stop.span.end :].split("\n", 1)[0].split("#", 1)[0]
    bracket, partner = opened[-1], _PARTNER[opened[-1]]
    if line.count(partner) > line.count(bracket):
        return None
    return _never_closed(
        stop.source, bracket, stop.source.span(_start(stop.taken[first]), _end(stop.taken[-1]))
    )


def _word(stop: Stop) -> Diagnostic | None:
    text, span = stop.span.text, stop.span
    if "ATTENTION" in stop.accepts:
        label = "expected 'attention', 'projection', 'schedule' or 'def'"
        hints = (_COMMENTS,) if _is_comment_of_c(stop) else did_you_mean(text, _ITEMS)
        return error("E0107", f"unexpected {_describe_found(stop)}", span, label, hints=hints)
    if "SCORE" in stop.accepts and stop.kind == "NAME":
        label = f"expected {_any_of(_STATEMENTS)}"
        hints = (_SEVERAL_LINES,) if text in ("and", "or") else did_you_mean(text, _STATEMENTS)
        if text in _WRITE:
            hints = (f"write '{_WRITE[text]}'",)
        elif text in _STATES:
            hints = (_NO_STATE,)
        elif not hints and _DECLARED.match(stop.source.text, span.end):
            hints = (f"write 'input {text}: ...'",)
        return error("E0102", f"unknown statement '{text}'", span, label, hints=hints)
    if stop.kind == "NAME" and stop.taken and stop.taken[-1].type == "NUMBER" and stop.touches_last:
        span = stop.source.span(_start(stop.taken[-1]), span.end)
        label = "names do not start with a digit"
        return error("E0102", f"'{span.text}' is neither a number nor a name", span, label)
    return None


def _is_comment_of_c(stop: Stop) -> bool:
    return stop.starts_line and stop.source.text.startswith(("//", "/*"), stop.span.start)


def _expectation(stop: Stop) -> Diagnostic:
    label = f"expected {_describe_expected(stop.accepts)}"
    hints = _advice(stop) or _misspelt(stop)
    return error("E0102", f"unexpected {_describe_found(stop)}", stop.span, label, hints=hints)


def _misspelt(stop: Stop) -> Sequence[str]:
    """Returns the hint about a word that is close to one that may stand there, or before the rejected one."""
    text = stop.span.text
    if stop.kind == "NAME" and "_NL" in stop.accepts and text in _STARTING:
        return ("each statement has a line of its own",)
    words = [word for word in _JOINING if word.upper() in stop.accepts]
    near = [word for word in words if set(text) < set(word) or sorted(text) == sorted(word)]
    if stop.kind == "NAME" and (hints := did_you_mean(near[0] if near else text, words)):
        return hints
    first = stop.taken[-1] if stop.taken else None
    if first is not None and first.type == "NAME" and _starts_line(stop.source, _start(first)):
        return did_you_mean(first, ("where", "when", "config"))
    return ()


def _advice(stop: Stop) -> list[str]:
    text, last = stop.source.text, stop.taken[-1].type if stop.taken else ""
    if (
        stop.kind == "_NL"
        and "LBRACE" in stop.accepts
        and text[stop.span.end : stop.end].lstrip().startswith("{")
    ):
        return ["'{' stands on the line that it belongs to"]
    if _is_comment_of_c(stop):
        return [_COMMENTS]
    types = [token.type for token in stop.taken]
    if stop.kind == "LPAR" and types[-3:] == ["NAME", "DOT", "NAME"]:
        return [f"functions have no module before their names: write '{stop.taken[-1]}(...)'"]
    if stop.kind == "DOT" and types[-2:] == ["COLON", "NAME"]:
        return ["an element type is one word, such as f16, bf16 or f32"]
    if stop.kind == "LPAR" and types[-2:] == ["ATTENTION", "NAME"]:
        return ["inputs are declared between the braces: 'input q: bf16[B, M, H, D]'"]
    if stop.kind == "COLON" and "DEF" in types and types[-1:] == ["RPAR"]:
        return ["a def is a function of numbers; an attention begins with 'attention NAME {'"]
    if stop.kind == "IN" and "PLUS" in stop.accepts:
        return ["compare with each value: 'x == 1 or x == 2'"]
    if (stop.kind == "_NL" and last in _OPERATORS) or (stop.kind in _OPERATORS and stop.starts_line):
        return [_SEVERAL_LINES]
    if stop.taken and stop.taken[-1] in ("where", "when", "config") and stop.kind == "NAME":
        return ["each statement has a line of its own"]
    if stop.kind == "_NL" and last == "COMMA":
        return ["what follows the comma stands on the same line"]
    if stop.kind == "LBRACE" and last == "EQUAL":
        return ["'=' takes one value; a set of choices follows 'in'"]
    if stop.kind == "EQUAL" and "IN" in stop.accepts:
        value = re.compile(r"[ \t]*([\w.]+)").match(text, stop.span.end)
        choice = value[1] if value else "32"
        return [f"a param has choices, even a single one: write '{stop.taken[-1]} in {{{choice}}}'"]
    if stop.kind == "EQUAL" and "COLON" in stop.accepts:
        return ["the type follows ':'"]
    if stop.kind == "_NL" and "LSQB" in stop.accepts and [t.type for t in stop.taken[-2:-1]] == ["COLON"]:
        return [f"one number for the whole call has empty brackets: '{stop.taken[-1]}[]'"]
    if "LBRACE" in stop.accepts and last == "IN":
        return ["choices stand in braces, even a single one"]
    if stop.kind == "LSQB" and last == "RPAR":
        return ["inputs alone are indexed: a value of one query, key and head has no others"]
    if stop.kind == "COLON" and _open_brackets(stop.taken)[-1:] == ["["]:
        return ["there are no slices"]
    if stop.kind == "DOT" and (last == "NUMBER" or text[stop.span.end : stop.span.end + 1].isdigit()):
        return ["a decimal number has digits on both sides of the point: 0.5, 2.0"]
    if stop.kind == "PLUS":
        return ["there is no sign '+'"]
    return []


def _describe_found(stop: Stop) -> str:
    return {"_NL": "end of line", "$END": "end of file"}.get(stop.kind, f"'{stop.span.text}'")


def _describe_expected(accepts: Collection[str]) -> str:
    rest, words = set(accepts), []
    if rest >= {"NAME", "NUMBER", "LPAR"}:
        words.append("a value" if "LSQB" in rest else "an expression")
        rest -= _EXPRESSION | {"LSQB"}
    elif {"PLUS", "PRODUCT"} <= rest:
        words.append("an operator")
        rest -= _OPERATORS
    if "_NL" in rest:
        rest -= {"$END", "RBRACE"}
    words += [word for kind, word in _WORDS.items() if kind in rest]
    words += [statement for statement in _STATEMENTS if statement.upper() in rest]
    words += [word for word in ("where", "config", "when") if word.upper() in rest]
    return _any_of(words)


def _any_of(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _start(token: Token) -> int:
    assert token.start_pos is not None
    return token.start_pos


def _end(token: Token) -> int:
    assert token.end_pos is not None
    return token.end_pos


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
        (r"<<", _NOT_AN_OPERATOR, "multiply by a power of two"),
        (r">>", _NOT_AN_OPERATOR, "write bit(x, i) for bit i, or divide ('//') by a power of two"),
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
    "²": "write x * x",
    "∞": "leave the bound out, or write 'inf' in a score",
    "∈": "write 'in'",
    "’": "write names without quotes",
    "“": "write names without quotes",
    "”": "write names without quotes",
}


def find_slip(source: Source, start: int, beyond: int) -> Diagnostic | None:
    """Returns E0106 if a known slip starts at `start` and reaches beyond the offset `beyond`, or None."""
    for pattern, message, hint in _SLIPS:
        match = pattern.match(source.text, start)
        if match and match.end() > beyond:
            span = source.span(match.start(), match.end())
            return error("E0106", message.format(span.text), span, hints=[hint])
    return None


def foreign_character(span: Span) -> Diagnostic:
    """Returns E0101 for a character that is no part of the language."""
    char = span.text
    name = f"'{char}'" if char.isprintable() and not char.isspace() else f"U+{ord(char):04X}"
    plain = unicodedata.normalize("NFKC", char)
    if char == "\r":
        hints = ["lines end with a line feed: convert the ends of lines, to LF or CRLF"]
    elif char.isspace():
        hints = ["write a plain space"]
    elif unicodedata.category(char) == "Cf":
        hints = ["remove it: it is not visible"]
    elif char in _FORMULA:
        hints = [_FORMULA[char]]
    elif plain != char and plain.isascii() and plain.isprintable() and unicodedata.category(char) != "No":
        hints = [f"write '{plain}'"]
    elif char == "\\":
        hints = [f"{_SEVERAL_LINES}, without '\\'"]
    elif char.isalnum():
        hints = ["names consist of the letters a-z and A-Z, digits and '_'"]
    else:
        hints = []
    return error(
        "E0101", f"character {name} is not used in specs", span, "not part of the language", hints=hints
    )
