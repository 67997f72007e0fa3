"""Plans of projections: tiles, and which kernel is guessed for which size."""

from attnc.build import plan_program
from attnc.plan.projection import ProjectionModule
from tests.model.projections import LAYER, SCHEDULE, program


def modules(text: str) -> tuple[ProjectionModule, ...]:
    return plan_program(program(text)).projections


def test_tiles_are_ragged_where_the_size_says_so() -> None:
    first, second, *_ = modules(LAYER + SCHEDULE)
    assert first.ragged_n == {"gemv", "flat"}
    assert first.ragged_k == {"gemv"} == second.ragged_k
    assert not first.is_split


def test_the_guess_is_in_the_order_of_m() -> None:
    assert modules(LAYER + "schedule layer for triton {\n}\n")[0].guess == (
        (1, "gemv"),
        (64, "flat"),
        (None, "conventional"),
    )
    assert modules(LAYER + "schedule layer for triton {\n impl = flat\n}\n")[0].guess == ((None, "flat"),)
