"""Offsets in CUDA kernels: they have 64 bits.

Strides have 64 bits where a kernel declares its arguments, so products with them have too. Numbers of rows in
workspaces do not come from strides: they are products of sizes, such as (b * H + h) * M, and pass 32 bits
only in calls that fill a GPU. So the text is read: a product of three sizes, or of two lengths, has a factor
of 64 bits. What functions return is taken at its word, but for those that return one of their arguments.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|[A-Za-z_]\w*|\d[\w.]*|::|->|\+\+|--|<<=|>>=|[-+*/%&|^<>=!]="
    r"|<<|>>|&&|\|\||[^\s\w]",
    re.DOTALL,
)
_NAME = re.compile(r"[A-Za-z_]\w*$")
#: Operators of two operands, by how tightly they bind, the loosest first.
_LEVELS: tuple[frozenset[str], ...] = tuple(
    frozenset(level.split())
    for level in ("||", "&&", "|", "^", "&", "== !=", "< > <= >=", "<< >>", "+ -", "* / %")
)
#: What an expression may follow.
_BEFORE = frozenset(["return", "(", "[", ",", "+=", "-=", "{", ";"])
_TRUTHS = frozenset(["||", "&&", "==", "!=", "<", ">", "<=", ">="])
_UNARY = frozenset(["+", "-", "!", "~", "*", "&", "++", "--"])
_WIDE = frozenset(("long", "u64", "uint64_t", "size_t"))
_TYPES = _WIDE | frozenset(
    [
        "int",
        "unsigned",
        "u32",
        "u16",
        "u8",
        "float",
        "double",
        "bool",
        "char",
        "short",
        "const",
        "element",
        "auto",
        "void",
        "signed",
    ]
)
#: What a template's arguments may be made of.
_TEMPLATE = re.compile(r"[\w:,+\-*/% ]$|::$|\w+$")
#: Indices of what a call has a size of; rows of lists, of which each query of each sequence may have one.
_INDICES = frozenset(["b", "h", "h_kv", "head", "q", "q_idx", "kv_idx", "page"])
_LINES = frozenset(["line", "list_line"])
#: As how many sizes count the number of a block, of which a grid may have one for each row of each head, and
#: the elements of a row or of a tile, or the rows of all packed sequences; how many may be multiplied in 32
#: bits.
_BLOCKS, _ROW, _MOST = 3, 2, 2
#: Functions that return one of their arguments.
_CHOOSING = frozenset(["max", "min", "where"])
#: Positions in a sequence and lengths of one, which are up to a million.
_LENGTHS = frozenset(["q_idx", "kv_idx", "M", "N"])
#: What a size's name ends with that counts tiles of rows.
_FEW = ("blocks", "tiles")
_ROWS = re.compile(r"D$|DV$|\w+_SIZE$|M_padded$|KEY_ROWS$")


@dataclass(frozen=True, slots=True)
class _Measure:
    """An expression. sizes: how many sizes it is a product of; lengths: how many of these are lengths of
    sequences, of which the product of two is as large as a matrix of scores; is_wide: whether it has 64 bits;
    is_float: it is no integer, but a score.
    """

    sizes: int = 0
    is_wide: bool = False
    lengths: int = 0
    is_float: bool = False

    @property
    def is_large(self) -> bool:
        return not self.is_float and (self.sizes > _MOST or self.lengths > 1)


@lru_cache(maxsize=64)
def narrow_offsets(text: str) -> tuple[str, ...]:
    """Lists the products of three sizes and more, or of two lengths, in a kernel's text that have 32 bits,
    declarations that narrow such a product of 64, and loops whose counter is narrower than their end.
    """
    tokens = list_tokens(text)
    structs = list(_bodies_of(tokens, "struct"))
    fields = frozenset(name for body in structs for name in _find_declared(body, _WIDE))
    sizes = frozenset(name for body in structs if body[1] == "Args" for name in _find_declared(body, {"int"}))
    found: dict[str, None] = {}
    for body in _bodies_of(tokens, "__device__", "__global__"):
        floats = frozenset(_find_declared(body, {"float"}))
        reader = _OffsetReader(body, fields | frozenset(_find_declared(body, _WIDE)), sizes, floats)
        found |= dict.fromkeys(reader.read())
    return tuple(found)


def list_tokens(text: str) -> list[str]:
    """Lists the tokens of CUDA C++, comments left out; a string is one."""
    return [token for token in _TOKEN.findall(text) if not token.startswith(("//", "/*"))]


def _bodies_of(tokens: Sequence[str], *words: str) -> Iterator[list[str]]:
    at = 0
    while at < len(tokens):
        if tokens[at] not in words:
            at += 1
            continue
        end, depth = at, 0
        while end < len(tokens):
            depth += {"{": 1, "}": -1}.get(tokens[end], 0)
            if (tokens[end] == "}" and not depth) or (tokens[end] == ";" and not depth):
                break
            end += 1
        yield list(tokens[at : end + 1])
        at = end + 1


def _find_declared(body: Sequence[str], types: Collection[str]) -> Iterator[str]:
    for at, token in enumerate(body):
        if token in types and body[at + 1 : at + 2] != ["long"]:
            yield from _names_declared(body, at + 1)


def _names_declared(body: Sequence[str], at: int) -> Iterator[str]:
    while at < len(body) and _NAME.match(body[at]) and body[at] not in _TYPES:
        yield body[at]
        depth = 0
        while at < len(body) and (depth > 0 or body[at] not in (",", ";", ":", ")")):
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(body[at], 0)
            at += 1
        if body[at : at + 1] != [","]:
            return
        at += 1


@dataclass(slots=True)
class _OffsetReader:
    tokens: list[str]
    wide: frozenset[str]
    sizes: frozenset[str]
    floats: frozenset[str]
    at: int = 0
    found: dict[int, str] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def read(self) -> list[str]:
        for start, token in enumerate(self.tokens[:-1]):
            if token == "=":
                value = self._read_from(start + 1)
                is_large = value.is_large or self._is_part_of_wide(start + 1)
                if value.is_wide and is_large and self._is_narrow(start):
                    self.found[start] = _show(self.tokens[max(start - 3, 0) : self.at])
            elif token == "for" and self._counts_too_little(start):
                self.found[start] = _show(self.tokens[start : start + 16])
            elif token in _BEFORE and start + 1 not in self.seen:
                self._read_from(start + 1)
        return [self.found[at] for at in sorted(self.found)]

    def _counts_too_little(self, start: int) -> bool:
        head = self.tokens[start + 1 : start + 4]
        if head[:2] != ["(", "int"]:
            return False
        at = self.tokens.index(";", start) + 1
        limit = self.tokens[at : self.tokens.index(";", at)]
        return limit[:2] == [head[2], "<"] and "*" in limit and self._read_from(at + 2).is_wide

    def _is_part_of_wide(self, start: int) -> bool:
        """Returns whether a quotient of what was declared with 64 bits begins at a place."""
        return self.tokens[start] in self.wide and self.tokens[start + 1 : start + 2] == ["/"]

    def _is_narrow(self, equals: int) -> bool:
        """Returns whether what is declared before a sign of equality is an int, and no number of a line, of
        which there are no more than an int counts.
        """
        kind, name = ["", "", *self.tokens[:equals]][-2:]
        return kind == "int" and _NAME.match(name) is not None and name not in _LINES

    def _read_from(self, start: int) -> _Measure:
        self.at = start
        try:
            return self._conditional()
        except IndexError:
            return _Measure()

    def _peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead]

    def _conditional(self) -> _Measure:
        value = self._binary(0)
        if self.at < len(self.tokens) and self._peek() == "?":
            self.at += 1
            one = self._conditional()
            if self._peek() != ":":
                return one
            self.at += 1
            return _join(one, self._conditional())
        return value

    def _binary(self, level: int) -> _Measure:
        if level == len(_LEVELS):
            return self._unary()
        start, value = self.at, self._binary(level + 1)
        while self.at < len(self.tokens) and self._peek() in _LEVELS[level]:
            sign, is_number = self._peek(), self._peek(1)[0].isdigit()
            self.at += 1
            other = self._binary(level + 1)
            if sign == "*":
                is_product = value.sizes > 0 < other.sizes
                value = _Measure(
                    value.sizes + other.sizes,
                    value.is_wide or other.is_wide,
                    value.lengths + other.lengths,
                    value.is_float or other.is_float,
                )
                if is_product and value.is_large and not value.is_wide:
                    self.found.setdefault(start, _show(self.tokens[start : self.at]))
            elif sign == "%":
                value = _Measure(min(value.sizes, other.sizes), value.is_wide and other.is_wide)
            elif sign == "/":  # by a number: a part that grows like the whole
                value = _Measure(
                    value.sizes if is_number else 0, value.is_wide or (is_number and other.is_wide)
                )
            elif sign in _TRUTHS:
                value = _Measure()
            else:
                value = _join(value, other)
        return value

    def _unary(self) -> _Measure:
        while self._peek() in _UNARY:
            self.at += 1
        if self._peek() == "(" and (end := self._end_of_cast()) is not None:
            type_names = self.tokens[self.at + 1 : end]
            self.at = end + 1
            value = self._unary()
            if "*" in type_names:
                return _Measure()
            is_wide = bool(_WIDE & set(type_names))
            return replace(value, is_wide=is_wide) if is_wide or type_names == ["int"] else _Measure()
        return self._primary()

    def _end_of_cast(self) -> int | None:
        at = self.at + 1
        while self.tokens[at] in _TYPES or self.tokens[at] == "*":
            at += 1
        if _NAME.match(self.tokens[at]) and self.tokens[at + 1 : at + 3] == ["*", ")"]:  # of a struct
            at += 2
        return at if at > self.at + 1 and self.tokens[at] == ")" else None

    def _primary(self) -> _Measure:
        token = self._peek()
        if token in (")", "]", "}", ";"):
            return _Measure()
        self.seen.add(self.at)
        self.at += 1
        if token == "(":
            value = self._conditional()
            self._skip_to(")")
        elif token in _CHOOSING:
            return self._suffixes(self._measure_call())
        elif _NAME.match(token):
            value = self._measure_name(token)
        else:
            value = _Measure(is_wide=token.endswith("ll"))
        return self._suffixes(value)

    def _measure_call(self) -> _Measure:
        is_wide = False
        if self._peek() == "<" and (end := self._end_of_template()) is not None:
            is_wide = bool(_WIDE & set(self.tokens[self.at : end]))
            self.at = end + 1
        if self._peek() != "(":
            return _Measure()
        self.at += 1
        value = self._conditional()
        while self._peek() == ",":
            self.at += 1
            value = _join(value, self._conditional())
        self._skip_to(")")
        return replace(value, is_wide=value.is_wide or is_wide)

    def _measure_name(self, name: str) -> _Measure:
        if name in ("blockIdx", "gridDim"):
            return _Measure(_BLOCKS)
        if name in _LINES or _ROWS.match(name):
            return _Measure(_ROW, name in self.wide)
        is_size = name in _INDICES or (name in self.sizes and not name.endswith(_FEW))
        is_length = name in _LENGTHS
        return _Measure(int(is_size or is_length), name in self.wide, int(is_length), name in self.floats)

    def _suffixes(self, value: _Measure) -> _Measure:
        while self.at < len(self.tokens):
            token = self._peek()
            if token in (".", "->", "::"):
                name = self._peek(1)
                self.at += 2
                if name not in ("x", "y", "z"):
                    value = self._measure_name(name)
            elif token in ("(", "["):
                self.at += 1
                self._skip_to(")" if token == "(" else "]")
                if token == "(" or not value.lengths:  # else a position of several
                    value = _Measure()
            elif token == "<" and (end := self._end_of_template()) is not None:
                self.at = end + 1
            elif token in ("++", "--"):
                self.at += 1
            else:
                return value
        return value

    def _end_of_template(self) -> int | None:
        at, depth = self.at + 1, 1
        while at < len(self.tokens) and at < self.at + 16:
            token = self.tokens[at]
            depth += {"<": 1, ">": -1}.get(token, 0)
            if not depth:
                return at if self.tokens[at + 1] == "(" else None
            if not _TEMPLATE.match(token) and token != "<":
                return None
            at += 1
        return None

    def _skip_to(self, closing: str) -> None:
        opening, depth = {")": "(", "]": "["}[closing], 1
        self._conditional()
        while depth:
            if self._peek() == "," and depth == 1:
                self.at += 1
                self._conditional()
                continue
            depth += {opening: 1, closing: -1}.get(self._peek(), 0)
            self.at += 1


def _show(tokens: Sequence[str]) -> str:
    return re.sub(r"(?<=[(\[.]) | (?=[)\].,;])|(?<=[\w)\]]) (?=[(\[])", "", " ".join(tokens))


def _join(one: _Measure, other: _Measure) -> _Measure:
    return _Measure(
        max(one.sizes, other.sizes),
        one.is_wide or other.is_wide,
        max(one.lengths, other.lengths),
        one.is_float or other.is_float,
    )
