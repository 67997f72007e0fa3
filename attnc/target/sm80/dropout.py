"""What a CUDA kernel prints of dropout."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.plan.ir.kernel import Dropout
from attnc.target.sm80.printer import scalar


@dataclass(frozen=True, slots=True)
class Drawing:
    """How elements that are kept are drawn, and what they are multiplied by."""

    planned: Dropout | None

    @property
    def p(self) -> str:
        assert self.planned is not None
        return scalar(self.planned.p)

    @property
    def seed(self) -> str:
        assert self.planned is not None
        return scalar(self.planned.seed)

    @property
    def drawn_by(self) -> str:
        assert self.planned is not None
        return f"{self.seed}, b, {scalar(self.planned.head)}"

    @property
    def choice_of_scale(self) -> str:
        return f"{self.p} < 1.0f ? 1.0f / (1.0f - {self.p}) : 0.0f"

    @property
    def scale(self) -> str:
        return "1.0f" if self.planned is None else f"({self.choice_of_scale})"

    @property
    def times_scale(self) -> str:
        return "" if self.planned is None else f" * {self.scale}"
