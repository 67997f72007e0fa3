"""Typed expressions: lets and defs inlined, with the spans of what was written."""

from attnc.expr.nodes import Load, show, walk
from tests.model.resolving import attention_of, errors_of, plain


def test_def_bodies_have_the_span_of_the_call() -> None:
    attention = attention_of(plain(mask="q_pos >= 3 and window(4, kv_idx - 1)"))
    texts = {show(node): node.span.text for node in walk(attention.mask) if node.span}
    assert texts["q_pos - 4"] == "window(4, kv_idx - 1)"
    assert texts["kv_idx - 1"] == "kv_idx - 1"
    assert texts["q_pos >= 3"] == "q_pos >= 3"


def test_lets_have_their_own_spans() -> None:
    attention = attention_of(plain("let near = kv_idx > q_pos - 5", mask="causal and near"))
    assert show(attention.mask) == "kv_idx <= q_pos and kv_idx > q_pos - 5"
    assert [node.span.line for node in walk(attention.mask) if node.span and "5" in show(node)][-1] == 4


def test_an_input_can_be_an_argument() -> None:
    text = "def same(ids) = ids[b, q_pos] == ids[b, kv_idx]\n" + plain(
        "input doc: i32[B, N] is sorted", mask="same(doc)"
    )
    loads = [node for node in walk(attention_of(text).mask) if isinstance(node, Load)]
    assert [load.tensor for load in loads] == ["doc", "doc"]
    assert all(load.is_sorted and load.type == "int" for load in loads)


def test_scalars_and_numbers() -> None:
    attention = attention_of(plain("input cap: f32[]", score="softcap(dot(q, k), cap) * -0.5 - cap[]"))
    assert show(attention.score) == "cap * tanh(dot(q, k) / cap) * -0.5 - cap"
    assert attention.score.type == "float"


def test_a_type_error_in_a_def_points_at_the_call() -> None:
    [error] = errors_of("def f(x) = x + 1\n" + plain(score="dot(q, k) + f(causal)"))
    assert error.primary.span.text == "f(causal)"
    assert [label.span.text for label in error.related] == ["x"]
