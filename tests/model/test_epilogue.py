"""What an epilogue resolves to; its mistakes are in tests/golden/diagnostics."""

from attnc.expr.nodes import show
from attnc.model.attention import Attention
from tests.model.resolving import resolve_text


def of_spec(value: str, *inputs: str) -> Attention:
    lines = (
        "input q: bf16[B, M, H, 64]",
        "input k, v: bf16[B, N, H, 64]",
        *inputs,
        "score = dot(q, k)",
        "normalize = softmax",
        f"output o: bf16[B, M, H, 64] = {value}",
    )
    text = "attention spec {\n" + "\n".join(lines) + "\n}\n"
    (found,) = resolve_text(text).attentions
    return found


def test_the_attention_alone_is_no_epilogue() -> None:
    assert of_spec("attention").epilogue is None


def test_columns_and_the_attention_have_names_there() -> None:
    found = of_spec("w[d] * attention + 1", "input w: f32[64]").epilogue
    assert found is not None
    assert show(found) == "w[d] * attention + 1"


def test_inputs_hide_the_column() -> None:
    found = of_spec("d[h] * attention", "input d: f32[H]").epilogue
    assert found is not None
    assert show(found) == "d[h] * attention"
