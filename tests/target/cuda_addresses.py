"""Proves of the text of a CUDA kernel that no address is computed in 32 bits where it may not fit.

Strides are `long long`, and so is every product with one. Other products of an address (rows of a head, tiles
of a sum) are followed operand by operand, each with its width or its bound, as in `addresses`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.target.addresses import LIMIT, POSITIONS, TILE, Finding

_TOKEN = re.compile(
    r"[A-Za-z_]\w*|0x[\da-fA-Fp.+-]+\w*|\d[\w.]*(?:e[+-]?\d+f?)?|->|::|<<|>>|[-+*/%=<>!&|^]=|\S"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*", re.S | re.M)
_NAMES = r"\w+(?:\s*=[^,;{}]*)?"
_DECLARED = re.compile(
    rf"\b(?:const )?(long long|int|u32|bool|float|auto)\s+({_NAMES}(?:,\s*{_NAMES})*)\s*[;)=,{{]"
)
#: Strides that are declared, and 64-bit numbers that are kept, as something else.
_NARROW = re.compile(
    r"\b(?:int|u32|short)\s+(?:\w+,\s*)*\w*stride\w*\s*[;,)=]|\bint\s+\w+\s*=\s*\(long long\)[^;]*"
)
_CASTS = frozenset({"long long", "int", "u32", "float", "unsigned short", "unsigned long long"})
_TYPES = frozenset(
    {"element", "float", "int", "bool", "bf16", "f16", "char", "void", "Value", "Chunk", "Pair", "u32"}
)
#: Where a tile, a row or a key can be, by the names that generated kernels have for them.
_POSITIONS = frozenset((
    "M", "N", "M_padded", "q_lo", "kv_lo", "q_idx", "kv_idx", "row", "key", "first", "stop", "start",
    "row_lo", "q_first", "k_first", "q_rows", "q_next", "kv_next", "k_next", "v_next", "rank", "split_size",
    "i", "q", "column",
))  # fmt: skip
#: Places in a tile, threads, and small counts.
_SMALL = frozenset((
    "r", "j", "c", "e", "n", "w", "t", "g", "x", "d", "lane", "warp", "chunk", "stage", "part", "group", "G",
    "split", "run", "SPLITS", "SPLIT_SIZE", "piece", "half", "first_key", "first_query", "threadIdx",
    "at_tile", "slice",
))  # fmt: skip
#: Numbers of programs, of rows, and of sums that are joined, all of which memory holds; padded rows in front
#: of a sequence.
_COUNTS = frozenset((
    "b * H", "h_kv * G", "B * H", "h_kv * H", "B * Hkv", "q_tiles * SECTION", "kv_tiles * KV_SECTION",
    "(q_first / ROW_TILE + sequence) * ROW_TILE", "(q_first / ROW_TILE + b) * ROW_TILE",
))  # fmt: skip
#: Rows of all heads up to where the last packed sequence ends, at most all of them.
_ROWS_OF_HEADS = re.compile(r"args\.KEY_ROWS / args\.\w+ \* args\.\w+_ptr\[args\.B \* [\w.]+\]")


@dataclass(frozen=True, slots=True)
class _Operand:
    text: str
    wide: bool
    bound: int


def cuda_findings(text: str) -> tuple[Finding, ...]:
    """Lists the addresses of a `.cu` file that are not proved, line by line."""
    code = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    reader = _Reader(code)
    return tuple(dict.fromkeys(reader.findings()))


class _Reader:
    """The tokens of a file, and which names in it have 64 bits."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.tokens = [(match[0], match.start()) for match in _TOKEN.finditer(code)]
        widths: dict[str, set[bool]] = {}
        for kind, names in _DECLARED.findall(code):
            for name in re.findall(r"(?:^|,)\s*(\w+)", names):
                widths.setdefault(name, set()).add(kind in ("long long", "float", "auto"))
        for kind, name in re.findall(r"\b(long long|int|u32)\s+(\w+)(?=[,)])", code):
            widths.setdefault(name, set()).add(kind == "long long")
        self.wide = {name for name, found in widths.items() if found == {True}}
        self.sizes = {name: int(size) for name, size in re.findall(r"\b(DV?(?:_TILE)?) = (\d+)", code)}

    def findings(self) -> Iterator[Finding]:
        for match in _NARROW.finditer(self.code):
            line = self.code.count("\n", 0, match.start()) + 1
            yield Finding(line=line, text=re.sub(r"\s+", " ", match[0]).strip())
        for i, (token, place) in enumerate(self.tokens):
            if token == "*" and self._is_product(i) and not self._in_chain(i):
                start, operands = self._chain(i)
                if not self._is_address(start, operands):
                    continue
                if self._value(operands) is None:
                    line = self.code.count("\n", 0, place) + 1
                    shown = " ".join(text for text, _ in operands)
                    yield Finding(line=line, text=re.sub(r"\s+", " ", shown))

    def _is_product(self, i: int) -> bool:
        before, after = self.tokens[i - 1][0], self.tokens[i + 1][0]
        if before in _TYPES or before in ("const", ">") or after in ("const", ">", ")", ",", "&"):
            return False
        return bool(re.fullmatch(r"\w+|[)\]]", before)) and before not in ("return", "case")

    def _in_chain(self, i: int) -> bool:
        """Whether an earlier factor of the same product was met before."""
        at = self._operand_start(i - 1)
        return at > 0 and self.tokens[at - 1][0] == "*" and self._is_product(at - 1)

    def _operand_start(self, end: int) -> int:
        """Finds where the operand that ends here begins, casts included."""
        at = end
        while True:
            token = self.tokens[at][0]
            if token in (")", "]"):
                at = self._open(at)
                before = self.tokens[at - 1][0]
                if (
                    re.fullmatch(r"\w+|[)\]]", before)
                    and before not in ("return", "if", "while", "for")
                    and not self._is_cast(at - 1)
                ):
                    at -= 1
                    continue
                if before == ">" and (name := self._template(at - 1)) is not None:
                    at = name
                    continue
            if self.tokens[at - 1][0] in (".", "->", "::"):
                at -= 2
                continue
            break
        while self.tokens[at - 1][0] == ")" and self._is_cast(at - 1):
            at = self._open(at - 1)
        return at

    def _template(self, close: int) -> int | None:
        """The name before `<...>`, if that is a list of template arguments."""
        at, depth = close, 0
        while at > 0:
            depth += {">": 1, "<": -1}.get(self.tokens[at][0], 0)
            if depth == 0:
                return at - 1 if re.fullmatch(r"[A-Za-z_]\w*", self.tokens[at - 1][0]) else None
            if self.tokens[at][0] in (";", "{", "}"):
                return None
            at -= 1
        return None

    def _open(self, close: int) -> int:
        depth, at = 0, close
        while True:
            token = self.tokens[at][0]
            depth += (token in ")]}") - (token in "([{")
            if depth == 0:
                return at
            at -= 1

    def _close(self, open_: int) -> int:
        depth, at = 0, open_
        while True:
            token = self.tokens[at][0]
            depth += (token in "([{") - (token in ")]}")
            if depth == 0:
                return at
            at += 1

    def _is_cast(self, close: int) -> bool:
        """Whether the parentheses that end here hold nothing but a type."""
        if self.tokens[close][0] != ")":
            return False
        return " ".join(token for token, _ in self.tokens[self._open(close) + 1 : close]) in _CASTS

    def _operand_end(self, start: int) -> int:
        """Finds where the operand that begins here ends."""
        at = start
        while self.tokens[at][0] in ("-", "!") or (
            self.tokens[at][0] == "(" and self._is_cast(self._close(at))
        ):
            at = at + 1 if self.tokens[at][0] in ("-", "!") else self._close(at) + 1
        if self.tokens[at][0] == "(":
            at = self._close(at)
        while at + 1 < len(self.tokens):
            after = self.tokens[at + 1][0]
            if after in (".", "->", "::"):
                at += 2
            elif after in ("(", "["):
                at = self._close(at + 1)
            else:
                break
        return at

    def _chain(self, i: int) -> tuple[int, list[tuple[str, tuple[int, int]]]]:
        """The factors of a product, with the operators between them, and where it begins."""
        start = self._operand_start(i - 1)
        while self.tokens[start - 1][0] in ("/", "%"):
            start = self._operand_start(start - 2)
        found, at = [], start
        while True:
            end = self._operand_end(at)
            found.append((self._text(at, end), (at, end)))
            if self.tokens[end + 1][0] not in ("*", "/", "%"):
                return start, found
            found.append((self.tokens[end + 1][0], (end + 1, end + 1)))
            at = end + 2

    def _text(self, start: int, end: int) -> str:
        first, (token, last) = self.tokens[start][1], self.tokens[end]
        return self.code[first : last + len(token)]

    def _is_address(self, start: int, operands: list[tuple[str, tuple[int, int]]]) -> bool:
        """Whether the product is part of an address, or of a number that is kept in 64 bits for one."""
        if any("stride" in text for text, _ in operands):
            return True
        first, depth = start, 0
        while self.tokens[first - 1][0] not in (";", "{", "}"):
            first -= 1
            depth += (self.tokens[first][0] in ")]") - (self.tokens[first][0] in "([")
            if depth < 0 and self.tokens[first][0] == "[":
                return True
            depth = max(depth, 0)
        head = self._text(first, start)
        return bool(
            re.search(
                r"_ptr\b|\blong long \w+ =|\belement\*|float\* const|_rows\[|\bsum \+ |\bfrom \+|\bto \+",
                head,
            )
        )

    def _value(self, operands: list[tuple[str, tuple[int, int]]]) -> _Operand | None:
        """The product, from left to right; None where it may overflow."""
        value = self._operand(*operands[0][1])
        for (op, _), (_, span) in zip(operands[1::2], operands[2::2], strict=True):
            other = self._operand(*span)
            wide = value.wide or other.wide
            text = f"{value.text} {op} {other.text}"
            bound = {"*": value.bound * other.bound, "/": value.bound, "%": min(value.bound, other.bound)}[op]
            if op == "*" and not wide and bound >= LIMIT:
                is_counted = text.replace("args.", "") in _COUNTS or _ROWS_OF_HEADS.fullmatch(text)
                if not is_counted and not self._in_tile(text):
                    return None
                bound = LIMIT - 1
            value = _Operand(text, wide, bound)
        return value

    @staticmethod
    def _in_tile(text: str) -> bool:
        """Whether constants and numbers of pieces are all that it consists of, or it is a place in shared
        memory (of rows PITCH apart): bounded by a tile.
        """
        if re.search(r"\bPITCH\b", text):
            return True
        names = re.findall(r"[A-Za-z_]\w*", text)
        return all(name in _SMALL or name == "i" or name.isupper() for name in names)

    def _operand(self, start: int, end: int) -> _Operand:
        text = self._text(start, end)
        if text.startswith("(") and self._is_cast(self._close(start)):
            kind = self._text(start + 1, self._close(start) - 1)
            inner = self._operand(self._close(start) + 1, end)
            return _Operand(text, "long long" in kind or kind == "float" or inner.wide, inner.bound)
        if text == "(q_lo + row)":  # which is a position too
            return _Operand(text, wide=False, bound=POSITIONS)
        if name_bound := self.sizes.get(text):
            return _Operand(text, wide=False, bound=name_bound)
        if self.tokens[start][0] == "(" and self._close(start) == end:
            return self._sum(start + 1, end - 1)
        if re.fullmatch(r"\d+", text):
            return _Operand(text, wide=False, bound=int(text))
        if re.match(r"[\d.]", text):
            return _Operand(text, wide=True, bound=LIMIT)
        name = re.split(r"[\[(]", text)[0].split(".")[-1].split("->")[-1]
        if name == "x":
            name = text.split(".")[0]
        if name in self.wide:
            return _Operand(text, wide=True, bound=LIMIT)
        if name in _SMALL or (name.isupper() and len(name) > 1 and name not in ("SECTION",)) or name == "D":
            return _Operand(text, wide=False, bound=TILE)
        if name in _POSITIONS:
            return _Operand(text, wide=False, bound=POSITIONS)
        return _Operand(text, wide=False, bound=LIMIT - 1)

    def _sum(self, start: int, end: int) -> _Operand:
        """What stands in parentheses: a sum of products."""
        parts, at, depth = [], start, 0
        for i in range(start, end + 1):
            token = self.tokens[i][0]
            depth += (token in "([{") - (token in ")]}")
            if depth == 0 and token in ("+", "-") and i > at:
                parts.append((at, i - 1))
                at = i + 1
        parts.append((at, end))
        wide, bound = False, 0
        for first, last in parts:
            one = self._operand(first, last) if self._operand_end(first) == last else None
            if one is None and self._operand_end(first) < last:
                span = self._operand_end(first)
                if self.tokens[span + 1][0] in ("*", "/", "%"):
                    one = self._value(self._chain(span + 1)[1])
            wide, bound = wide or (one is not None and one.wide), bound + (one.bound if one else LIMIT - 1)
        return _Operand(self._text(start - 1, end + 1), wide, min(bound, LIMIT - 1))
