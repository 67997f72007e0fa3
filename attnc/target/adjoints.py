"""What the sums of the gradients of what the score loads have in common, whatever the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnc.expr.nodes import Binary, Compare, Const, Dim, Expr, Index, Neg, Ref
from attnc.plan.ir.backward import Adjoint
from attnc.target.printer import Printer

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
        """Whether it varies along the outer axis at most, and so is summed in registers."""
        return adjoint.along in ((), ("q",) if self.over_q else ("kv",))

    @property
    def vectors(self) -> list[str]:
        return [adjoint.name for adjoint in self.adjoints if self.is_vector(adjoint)]

    def factor(self, value: Expr) -> str:
        """`value` as the right operand of a product with a tile."""
        return self.show(Binary("*", Ref("x", "float", ("q", "kv")), value)).removeprefix("x * ")

    def signed(self, adjoint: Adjoint) -> tuple[str, str]:
        """What one score adds, as a sign and a size. A masked score adds 0, even where its derivative is not
        a number.
        """
        sign, value = "+", adjoint.value
        match value:
            case Neg(operand=rest) | Binary(op="*", left=Const(value=-1.0), right=rest):
                sign, value = "-", rest
            case Const(value=-1.0):
                sign, value = "-", Const(1.0)
        term = "ds" if value == Const(1.0) else f"ds * {self.factor(value)}"
        return sign, term if adjoint.is_finite else self.kept.format(term)
