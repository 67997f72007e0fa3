"""What names mean: which definition hides which."""

from attnc.expr.nodes import show
from attnc.model.dtypes import DType
from tests.model.resolving import attention_of, errors_of, plain, resolve_text


def test_a_file_may_redefine_what_the_prelude_defines() -> None:
    program = resolve_text("def causal = kv_idx < q_pos\n" + plain())
    assert show(program.attentions[0].mask) == "kv_idx < q_pos"


def test_names_of_an_attention_hide_defs() -> None:
    attention = attention_of(plain("input window: i32[H]", mask="q_pos - kv_idx < window[h]"))
    assert attention.tensor("window").dtype is DType.I32


def test_a_mistake_in_a_def_is_reported_once() -> None:
    [error] = errors_of("def f(x) = x and lost\n" + plain(mask="f(causal) or f(kv_idx > 3)"))
    assert error.primary.span.text == "lost"


def test_defs_see_no_names_of_the_attention() -> None:
    [error] = errors_of("def f = kv_idx < W\n" + plain("param W in {4}", mask="f and kv_idx < W"))
    assert error.code == "E0203"
    assert "does not see" in error.notes[0]
