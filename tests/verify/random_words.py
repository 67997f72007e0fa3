"""Random expressions of the language, as text, over the inputs of one spec.

Float arithmetic in masks is left out: a rounding error there turns a key over, and no bound can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

_INTS = (0, 1, 2, 3, 5, 7, 16, 17, 33)


@dataclass(frozen=True, slots=True)
class Extra:
    """An input besides q, k and v. fact: what its last axis is, "sorted"; "" for nothing."""

    name: str
    dtype: str
    shape: tuple[str, ...]
    fact: str = ""

    @property
    def is_sorted(self) -> bool:
        return self.fact == "sorted"

    @property
    def type(self) -> str:
        return {"u8": "int", "i32": "int", "i64": "int", "bool": "bool"}.get(self.dtype, "float")

    @property
    def declaration(self) -> str:
        fact = f" is {self.fact}" if self.fact else ""
        return f"input {self.name}: {self.dtype}[{', '.join(self.shape)}]{fact}"


_HOME = {"B": "b", "M": "q_idx", "N": "kv_idx"}


@dataclass(frozen=True, slots=True)
class Words:
    """Draws expressions over the inputs of one spec."""

    draw: st.DrawFn
    extras: Sequence[Extra]
    heads: str

    def one_of(self, *choices: str) -> str:
        return self.draw(st.sampled_from(choices))

    def load(self, wanted: str, places: frozenset[str], depth: int) -> str | None:
        """An element of an input of this type, or None where none is; `places`: indices that may be used."""
        fitting = [extra for extra in self.extras if extra.type == wanted]
        if not fitting:
            return None
        extra = self.draw(st.sampled_from(fitting))
        if not extra.shape:
            return extra.name
        indices = []
        for size in extra.shape:
            home = "h" if size == self.heads else _HOME.get(size)
            if home in places and self.draw(st.integers(0, 3)):
                indices.append(home)
            else:
                indices.append("0" if size == "1" else self.int_expr(depth - 1, places))
        return f"{extra.name}[{', '.join(indices)}]"

    def int_expr(self, depth: int, places: frozenset[str]) -> str:
        kind = self.draw(st.integers(0, 9 if depth > 0 else 3))
        match kind:
            case 0 | 1:
                return self.one_of(*sorted(places), *(("q_pos",) if "q_idx" in places else ()), "M", "N")
            case 2:
                return str(self.draw(st.sampled_from(_INTS)))
            case 3:
                return self.load("int", places, depth) or self.one_of("B", "H", "D")
            case 4 | 5:
                op = self.one_of("+", "-")
                return f"({self.int_expr(depth - 1, places)} {op} {self.int_expr(depth - 1, places)})"
            case 6:
                return f"({self.int_expr(depth - 1, places)} * {self.one_of('2', '-1', '3', '-3', 'H')})"
            case 7:
                divisor = self.one_of("2", "3", "8", "16", "-3", "M", "G", self.int_expr(depth - 1, places))
                return f"({self.int_expr(depth - 1, places)} {self.one_of('//', '%')} {_nonzero(divisor)})"
            case 8:
                function = self.one_of("min", "max", "abs", "clamp")
                count = {"abs": 1, "clamp": 3}.get(function, 2)
                arguments = [self.int_expr(depth - 1, places) for _ in range(count)]
                return f"{function}({', '.join(arguments)})"
            case _:
                branches = f"{self.int_expr(depth - 1, places)}, {self.int_expr(depth - 1, places)}"
                return f"where({self.bool_expr(depth - 1, places)}, {branches})"

    def bool_expr(self, depth: int, places: frozenset[str]) -> str:
        kind = self.draw(st.integers(0, 10 if depth > 0 else 3))
        match kind:
            case 0 | 1:
                op = self.one_of("<", "<=", ">", ">=", "==", "!=")
                return f"({self.int_expr(depth, places)} {op} {self.int_expr(depth, places)})"
            case 2:
                loaded = self.load("float", places, depth)
                return (
                    f"({loaded} {self.one_of('<', '>=')} {self.one_of('0', '0.5', '-1', 'inf', '-inf')})"
                    if loaded
                    else "true"
                )
            case 3:
                return self.load("bool", places, depth) or self.one_of("true", "false")
            case 4:
                bounds = [self.int_expr(depth - 1, places) for _ in range(3)]
                return f"({bounds[0]} <= {bounds[1]} {self.one_of('<', '<=')} {bounds[2]})"
            case 5 | 6:
                op = self.one_of("and", "or")
                return f"({self.bool_expr(depth - 1, places)} {op} {self.bool_expr(depth - 1, places)})"
            case 7:
                return f"(not {self.bool_expr(depth - 1, places)})"
            case 10:
                word = self.load("int", places, depth) or self.int_expr(depth - 1, places)
                place = self.int_expr(depth - 1, places)
                return f"bit({word}, {self.one_of(place, f'{place} % 8', f'{place} % 32', f'{place} % 64')})"
            case 8:
                op = self.one_of("==", "!=")
                return f"({self.bool_expr(depth - 1, places)} {op} {self.bool_expr(depth - 1, places)})"
            case _:
                branches = f"{self.bool_expr(depth - 1, places)}, {self.bool_expr(depth - 1, places)}"
                return f"where({self.bool_expr(depth - 1, places)}, {branches})"

    def _ids(self, places: frozenset[str]) -> str | None:
        """A comparison of what a sorted input has for the key with that of the query, or a number."""
        found = [extra for extra in self.extras if extra.is_sorted]
        if not found or not {"q_idx", "kv_idx"} <= places:
            return None
        extra = self.draw(st.sampled_from(found))
        homes = ("h" if size == self.heads else _HOME.get(size, "0") for size in extra.shape[:-1])
        leading = "".join(f"{self.one_of(home, home, f'{home} + 1', '1 - h')}, " for home in homes)
        q, kv = (f"{extra.name}[{leading}{at}]" for at in (self.one_of("q_idx", "q_pos"), "kv_idx"))
        op = self.one_of("==", "==", "!=", "<=", ">", ">=")
        return self.one_of(
            f"({q} {op} {kv})",
            f"({kv} {op} {self.one_of('2', 'b', 'h')})",
            f"({kv} % 2 {op} {q} % 2)",
            f"({kv} + 1 {op} {q})",
        )

    def _bound(self, places: frozenset[str]) -> str | None:
        """A window, or a limit, as wide as an integer for the call, the sequence or the head says."""
        found = [e for e in self.extras if e.type == "int" and e.shape in ((), ("B",), (self.heads,))]
        if not found or not {"q_idx", "kv_idx", "h"} <= places:
            return None
        extra = self.draw(st.sampled_from(found))
        index = {(): "", ("B",): "[b]"}.get(extra.shape, "[h]")
        x, q = extra.name + index, self.one_of("q_idx", "q_pos")
        return self.one_of(
            f"({q} - {x} <= kv_idx)", f"(kv_idx <= {q} + {x})", f"(kv_idx < {x})", f"(kv_idx + 3 >= {x} * 2)"
        )

    def float_expr(self, depth: int, places: frozenset[str], dot: bool) -> str:
        kind = self.draw(st.integers(0, 12 if depth > 0 else 3))
        match kind:
            case 0 | 1:
                return "dot(q, k)" if dot else self.one_of("0.5", "-1.25", "3", "1e-3")
            case 2:
                return self.load("float", places, depth) or self.one_of("0.25", "2")
            case 3:
                return f"({self.int_expr(0, places)} / {self.one_of('8', '-16', 'sqrt(D)', 'D', '64.0')})"
            case 4 | 5:
                op = self.one_of("+", "-")
                left, right = (self.float_expr(depth - 1, places, dot) for _ in range(2))
                return f"({left} {op} {right})"
            case 6:
                factor = self.one_of("0.5", "-2", "3", "1.5", "D")
                return f"({factor} * {self.float_expr(depth - 1, places, dot)})"
            case 7:
                return f"({self.float_expr(depth - 1, places, dot)} / {self.one_of('sqrt(D)', '-4', '2.5')})"
            case 8:
                function = self.one_of("min", "max")
                return (
                    f"{function}({self.float_expr(depth - 1, places, dot)}, {self.one_of('0', '0.5', '2')})"
                )
            case 9:
                inner = self.float_expr(depth - 1, places, dot)
                form = self.one_of(
                    "tanh({})",
                    "abs({})",
                    "exp(min({}, 1))",
                    "log(abs({}) + 1)",
                    "sqrt(abs({}))",
                    "sigmoid({})",
                    "erf({})",
                    "exp2(min({}, 1))",
                    "log2(abs({}) + 1)",
                    "clamp({}, -1.5, 2)",
                    "max({}, -inf)",
                )
                return form.format(inner)
            case 10:
                inner = self.int_expr(depth - 1, places)
                return self.one_of(
                    "tanh({})",
                    "exp(min({}, 2))",
                    "log(abs({}) + 1)",
                    "sqrt(abs({}))",
                    "sigmoid({})",
                    "erf({} / 8)",
                    "exp2(-abs({}))",
                    "log2(abs({}) + 2)",
                ).format(inner)
            case 11:
                excluded = self.bool_expr(depth - 1, places)
                return f"where({excluded}, -inf, {self.float_expr(depth - 1, places, dot)})"
            case _:
                branches = (
                    f"{self.float_expr(depth - 1, places, dot)}, {self.float_expr(depth - 1, places, dot)}"
                )
                return f"where({self.bool_expr(depth - 1, places)}, {branches})"


def _nonzero(divisor: str) -> str:
    return "4" if divisor == "0" else divisor
