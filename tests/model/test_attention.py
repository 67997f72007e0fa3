"""Sizes that an attention derives from its tensors."""

from attnc.expr.nodes import Binary, Dim
from tests.model.resolving import spec


def test_group_of_grouped_queries_is_a_tree() -> None:
    attention = spec("causal_gqa")
    assert attention.heads_q == Binary("*", Dim("Hkv"), Dim("G"))
    assert attention.heads_kv == Dim("Hkv")
    assert attention.group == Dim("G")
    assert attention.batch == Dim("B")


def test_what_is_computed_of_inputs_is_in_one_list() -> None:
    attention = spec("gated")
    assert attention.expressions == (attention.score, attention.mask, attention.epilogue)
    sink = spec("local_sink")
    assert sink.expressions == (sink.score, sink.mask, sink.softmax.sink)
