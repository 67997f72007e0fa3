"""Expr -> source text, with the fewest parentheses that keep the meaning; one operator table per target.

A value that varies along one tile axis prints as a vector (`q_pos`) where everything around it varies
along that axis too, and broadcasts (`q_pos[:, None]`, `kv_idx[None, :]`) inside a two-dimensional
expression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnc.effort import spend
from attnc.expr.construct import in_float32
from attnc.expr.finite import is_never_below_0
from attnc.expr.functions import REAL
from attnc.expr.nodes import (
    COLUMN,
    And,
    Attended,
    Binary,
    Call,
    Compare,
    Const,
    Dim,
    Dot,
    Expr,
    Index,
    InList,
    Load,
    Neg,
    Not,
    Or,
    Param,
    Ref,
    Search,
    walk,
)
from attnc.plan.ir.backward import Adjoint
from attnc.plan.loads import is_nonnegative, is_positive
from attnc.plan.width import is_wide, may_overflow, shifts_wide

ATOM = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """A target's operators.

    binding: how tightly each operator binds (larger is tighter); comparisons never chain in kernel text.
    spelling: text of an operator where it is not the spec's. functions: text of an intrinsic; function: of
    one of a real number that is not among them, by its name. floor:
    functions that divide by a positive number where the dividend may be negative and the target's own
    operators truncate; floor_by_any: for divisors that may be negative or 0.
    broadcast: suffix of a vector along an axis in a tile. keep_nan: an argument by which min and
    max of floats give NaN if one is NaN. real, real_constant: an int, and any constant, as a value that a
    function of reals takes. widen: the 64-bit form of an integer; widen_counter: of the counter of a loop, if
    another; alike: of an integer argument beside one of 64 bits, for an intrinsic then spelled `min:wide`.
    An intrinsic may have a spelling for each type of its result (`abs:int`). number: text of a constant;
    to_float: what makes a float of an int dividend, where `/` of two ints is another operation.
    subtracts_from_dot: whether a constant is added to the product of q and k, and to what is made of it, by
    subtracting its opposite. or_nan: a value where it is NaN, else another one.
    """

    binding: Mapping[str, int]
    spelling: Mapping[str, str]
    functions: Mapping[str, str]
    function: str
    floor: Mapping[str, str]
    floor_by_any: Mapping[str, str]
    broadcast: Mapping[str, str]
    true: str
    false: str
    infinity: str
    search: Callable[[Search, Printer], str]
    number: Callable[[int | float], str] = repr
    to_float: str = ""
    keep_nan: str = ""
    real: str = "{}"
    real_constant: str = "{}"
    widen: str = "{}"
    widen_counter: str = ""
    alike: str = "{}"
    subtracts_from_dot: bool = False
    or_nan: str = ""

    def named(self, function: str) -> str:
        return self.functions.get(function) or self.function.format(function)


def _decided_min(expr: Call) -> tuple[Expr, Expr] | None:
    """Returns what is never below 0, and the constant of 0 or less that is its minimum but for NaN. Of such a
    minimum, written as a comparison, ptxas of CUDA 12 and 13 makes the constant alone.
    """
    if expr.function != "min" or expr.type != "float":
        return None
    for one, other in (expr.args, expr.args[::-1]):
        if isinstance(other, Const) and other.value <= 0 and is_never_below_0(one):
            return one, other
    return None


#: The search from the end of a row that descends, by what is looked for from its beginning.
REVERSED: Mapping[str, str] = {"lower": "upper", "upper": "lower"}


@dataclass(frozen=True, slots=True)
class Printer:
    """Prints expressions of one kernel. `tile` is true inside the two-dimensional step."""

    syntax: Syntax
    tile: bool = False

    def __call__(self, expr: Expr) -> str:
        return self._print(expr)[0]

    def operand(self, expr: Expr) -> str:
        """Prints what stands before any operator, or a method."""
        return self._within(expr, ATOM)

    def division(self, op: str, left: Expr, right: Expr) -> str:
        """Returns the name of the function for // or %; "" if the language has an operator for it."""
        if op not in ("//", "%"):
            return ""
        is_safe = is_positive(right) and not {Dim("M"), Dim("N")} & set(walk(right))  # 0 of an empty sequence
        if is_safe and is_nonnegative(left):
            return ""
        return (self.syntax.floor if is_safe else self.syntax.floor_by_any)[op]

    def _print(self, expr: Expr) -> tuple[str, int]:
        spend()
        match expr:
            case Const(value=value):
                return self._constant(value)
            case Index(name=name):
                axis = {"q_idx": "q", "q_pos": "q", "kv_idx": "kv", COLUMN: "kv"}.get(name)
                return self._vector(name, (axis,) if axis else ()), ATOM
            case Dim(name=name):
                return name, ATOM
            case Dot():
                return "s", ATOM
            case Attended():
                return "o", ATOM
            case Ref(name=name, axes=axes):
                return self._vector(name, axes), ATOM
            case Neg(operand=operand) if is_wide(expr):
                binding = self.syntax.binding["neg"]
                return self.syntax.spelling["neg"] + self._widen(operand, binding, True), binding
            case Neg(operand=operand):
                return self._prefix("neg", operand)
            case Not(operand=operand):
                return self._prefix("not", operand)
            case (
                Binary(op="+", left=Const(value=value), right=rest)
                | Binary(op="+", left=rest, right=Const(value=value))
            ) if self.syntax.subtracts_from_dot and expr.type == "float" and Dot() in walk(rest):
                return self._binary("-", rest, Const(-value))
            case Binary(op=op, left=left, right=right):
                return self._binary(op, left, right)
            case Compare(op=op, left=left, right=right):
                return self._compare(op, left, right)
            case And(operands=operands):
                return self._infix("and", operands)
            case Or(operands=operands):
                return self._infix("or", operands)
            case Call(function="bit", args=(word, place)):
                return self._bit(word, place), self.syntax.binding["!="]
            case Call(function=function, args=args):
                functions = self.syntax.functions
                wide = is_wide(expr)
                kind = "wide" if wide and self.syntax.alike != "{}" else expr.type
                name = functions.get(f"{function}:{kind}") or self.syntax.named(function)
                shown: Iterator[str] = map(self._real if function in REAL else self, args)
                if kind == "wide":
                    shown = (self.syntax.alike.format(self(arg)) for arg in args)
                elif (wide and function == "abs") or any(
                    isinstance(arg, Const) and is_wide(arg) for arg in args
                ):
                    shown = (self._widen(arg, 0, arg.type == "int") for arg in args)
                last = self.syntax.keep_nan if function in ("min", "max") and expr.type == "float" else ""
                if self.syntax.or_nan and (decided := _decided_min(expr)):
                    return self.syntax.or_nan.format(self.operand(decided[0]), self(decided[1])), ATOM
                return f"{name}({', '.join(shown)}{last})", ATOM
            case Search():
                return self.syntax.search(expr, self), ATOM
            case Load() | Param() | InList():
                raise ValueError(f"{expr} has no name in the kernel: a pass was skipped")

    def _bit(self, word: Expr, place: Expr) -> str:
        wide = shifts_wide(word, place)
        shifted = self._widen(word, ATOM, wide)
        if wide and isinstance(word, Const):
            shifted = (self.syntax.widen_counter or self.syntax.widen).format(self._within(word, ATOM))
        return f"(({shifted} >> {self._place(place)}) & 1) != 0"

    def _place(self, place: Expr) -> str:
        if (masked := masked_place(place)) is None:
            return self._within(place, ATOM)
        whole, mask = masked
        return f"({self._within(whole, ATOM)} & {mask})"

    def _absolute(self, expr: Expr) -> str:
        """Returns the absolute value of an int that may be -2^31 as that of a float; "" for anything else.
        ptxas of CUDA 12 and 13 takes it for negative if it is an int that becomes a float.
        """
        match expr:
            case Call(function="abs", args=(operand,)) if expr.type == "int" and is_wide(expr):
                return f"{self.syntax.named('abs')}({self._real(operand)})"
        return ""

    def _real(self, expr: Expr) -> str:
        if isinstance(expr, Const):
            return self.syntax.real_constant.format(self(expr))
        if absolute := self._absolute(expr):
            return absolute
        if expr.type != "int":
            return self(expr)
        return self.syntax.real.format(self(expr) if self.syntax.real == "{}" else self._within(expr, ATOM))

    def _constant(self, value: bool | int | float) -> tuple[str, int]:
        if isinstance(value, bool):
            return (self.syntax.true if value else self.syntax.false), ATOM
        if isinstance(value, float):
            value = in_float32(value)
        if value in (float("inf"), float("-inf")):
            return self.syntax.infinity if value > 0 else f"-{self.syntax.infinity}", self.syntax.binding[
                "neg"
            ]
        return self.syntax.number(value), ATOM if value >= 0 else self.syntax.binding["neg"]

    def _vector(self, name: str, axes: tuple[str, ...]) -> str:
        return name + self.syntax.broadcast[axes[0]] if self.tile and len(axes) == 1 else name

    def _prefix(self, op: str, operand: Expr) -> tuple[str, int]:
        binding = self.syntax.binding[op]
        return self.syntax.spelling[op] + self._within(operand, binding), binding

    def _binary(self, op: str, left: Expr, right: Expr) -> tuple[str, int]:
        wide = may_overflow(op, left, right) and not any(map(_is_held_wide, (left, right)))
        if division := self.division(op, left, right):
            divisor = self._widen(right, 0, wide and isinstance(left, Const))
            return f"{division}({self._widen(left, 0, wide)}, {divisor})", ATOM
        binding = self.syntax.binding[op]
        spelled = self.syntax.spelling.get(op, op)
        if wide and isinstance(left, Const):
            return f"{self(left)} {spelled} {self._widen(right, binding + 1, wide)}", binding
        is_real = op == "/" or "float" in (left.type, right.type)
        first, second = ((is_real and self._absolute(side)) or "" for side in (left, right))
        if not first and op == "/" and "float" not in (left.type, right.type):
            first = self.syntax.to_float + self._within(left, ATOM if self.syntax.to_float else binding)
        first = first or self._widen(left, binding, wide)
        return f"{first} {spelled} {second or self._within(right, binding + 1)}", binding

    def _widen(self, expr: Expr, binding: int, wide: bool) -> str:
        """Returns an operand, in 64 bits if the operation is wide; of a constant it is the other
        one that is.
        """
        if not wide or isinstance(expr, Const) or is_wide(expr):
            return self._within(expr, binding)
        is_counter = expr in (Index("kv_lo"), Index("q_lo")) and self.syntax.widen_counter
        return (self.syntax.widen_counter if is_counter else self.syntax.widen).format(
            self._within(expr, ATOM)
        )

    def _compare(self, op: str, left: Expr, right: Expr) -> tuple[str, int]:
        binding = self.syntax.binding[op]
        wide = left.type == "int" and any(isinstance(side, Const) and is_wide(side) for side in (left, right))
        parts = (self._widen(side, binding + 1, wide) for side in (left, right))
        return f" {self.syntax.spelling.get(op, op)} ".join(parts), binding

    def _infix(self, op: str, operands: tuple[Expr, ...]) -> tuple[str, int]:
        binding = self.syntax.binding[op]
        spelled = self.syntax.spelling.get(op, op)
        return f" {spelled} ".join(self._within(operand, binding) for operand in operands), binding

    def _within(self, expr: Expr, binding: int) -> str:
        text, own = self._print(expr)
        return text if own >= binding else f"({text})"


def _is_held_wide(expr: Expr) -> bool:
    return is_wide(expr) and not isinstance(expr, Const)


IN_ROWS = Compare("<", Index("q_idx"), Dim("M"))
IN_KEYS = Compare("<", Index("kv_idx"), Dim("N"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjointText:
    """The adjoints of one kernel as text. over_q: it has a program per q tile, rows of a tile are queries;
    show: prints expressions of a tile.
    """

    adjoints: tuple[Adjoint, ...]
    over_q: bool
    show: Printer

    #: A term, 0 where p is.
    kept: ClassVar[str]

    def is_vector(self, adjoint: Adjoint) -> bool:
        """Returns whether it varies along the outer axis at most, and so is summed in registers."""
        return adjoint.along in ((), ("q",) if self.over_q else ("kv",))

    @property
    def vectors(self) -> list[str]:
        return [adjoint.name for adjoint in self.adjoints if self.is_vector(adjoint)]

    @property
    def counts_tiles(self) -> bool:
        return any(not adjoint.along and adjoint.accumulate == "two_pass" for adjoint in self.adjoints)

    def factor(self, value: Expr) -> str:
        """Returns `value` as the right operand of a product with a tile."""
        return self.show(Binary("*", Ref("x", "float", ("q", "kv")), value)).removeprefix("x * ")

    def split_sign(self, adjoint: Adjoint) -> tuple[str, str]:
        """Returns what one score adds, as a sign and a size. A masked score adds 0, even where its derivative
        is not a number.
        """
        sign, value = "+", adjoint.value
        match value:
            case Neg(operand=rest) | Binary(op="*", left=Const(value=-1.0), right=rest):
                sign, value = "-", rest
            case Const(value=-1.0):
                sign, value = "-", Const(1.0)
        term = "ds" if value == Const(1.0) else f"ds * {self.factor(value)}"
        return sign, term if adjoint.is_finite else self.kept.format(term)


def masked_place(place: Expr) -> tuple[Expr, int] | None:
    """Returns the integer and the mask that give the place of a bit; None where it is no remainder by a power
    of two, which is the last bits of any integer.
    """
    match place:
        case Binary(op="%", left=left, right=Const(value=int() as size)) if (
            size > 0 and size.bit_count() == 1
        ):
            return left, size - 1
    return None
