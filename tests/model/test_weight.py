"""What a weight resolves to; its mistakes are in tests/golden/diagnostics."""

from attnc.expr.nodes import show
from attnc.model.attention import Attention
from tests.model.resolving import resolve_text


def of_spec(*lines: str) -> Attention:
    declared = (
        "input q: bf16[B, M, H, 64]",
        "input k, v: bf16[B, N, H, 64]",
        "score = 2 * dot(q, k)",
        "output o: bf16[B, M, H, 64]",
    )
    (found,) = resolve_text("attention spec {\n" + "\n".join((*declared, *lines)) + "\n}\n").attentions
    return found


def test_a_weight_is_of_the_score() -> None:
    found = of_spec("weight = max(score, 0) / N", "normalize = none")
    assert not found.normalises
    assert show(found.score) == "max(2 * dot(q, k), 0) / N"


def test_without_a_weight_a_key_counts_its_score() -> None:
    found = of_spec("normalize = none")
    assert show(found.score) == "2 * dot(q, k)"
    assert found.scored is None


def test_a_let_hides_the_score() -> None:
    found = of_spec("let score = 3", "weight = score * dot(q, k)", "normalize = none")
    assert show(found.score) == "3 * dot(q, k)"
