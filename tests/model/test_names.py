"""Functions and constants that came later give way to what a spec declares under their names."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import show
from attnc.model.dtypes import DType
from attnc.model.names import CALLABLE, RESERVED, SOFT
from tests.model.resolving import plain, resolve_text
from tests.refusals import refused


def score(extra: str, text: str, before: str = "") -> str:
    (attention,) = resolve_text(before + plain(extra, score=text)).attentions
    return show(attention.score)


def code(extra: str, text: str, before: str = "") -> str:
    return refused(resolve_text, before + plain(extra, score=text)).code


def test_they_mean_what_the_language_says() -> None:
    assert score("", "sigmoid(dot(q, k)) + min(erf(1), inf)") == "sigmoid(dot(q, k)) + min(erf(1), inf)"
    assert score("", "clamp(dot(q, k), -1, 1)") == "min(max(dot(q, k), -1), 1)"
    assert {*CALLABLE, "inf"} >= SOFT
    assert not SOFT & RESERVED.keys()


@pytest.mark.parametrize("name", sorted(SOFT))
def test_what_a_spec_declares_hides_them(name: str) -> None:
    assert score(f"input {name}: f32[Hkv * G]", f"dot(q, k) + {name}[h]") == f"dot(q, k) + {name}[h]"
    assert score(f"input {name}: f32[]", f"dot(q, k) + {name}") == f"dot(q, k) + {name}"
    assert score(f"let {name} = dot(q, k) * 2", name) == "dot(q, k) * 2"
    assert score(f"param {name} in {{1.5, 2}}", f"dot(q, k) * {name}") == f"dot(q, k) * {name}"
    assert score("", f"{name}(dot(q, k), 3)", f"def {name}(x, y) = x * y\n") == "dot(q, k) * 3"
    assert score("", f"twice({name})", f"def {name} = 4\ndef twice(x) = x + {name}\n") == "4 + 4"


def test_they_hide_nothing_elsewhere() -> None:
    """The body of a def does not see the names of the attention that calls it."""
    before = "def squashed(x) = sigmoid(x) + min(x, inf)\n"
    shown = score("input sigmoid, inf: f32[]", "squashed(dot(q, k)) + sigmoid + inf", before)
    assert shown == "sigmoid(dot(q, k)) + min(dot(q, k), inf) + sigmoid + inf"
    assert score("", "first_of(2)", "def first_of(inf) = dot(q, k) + inf\n") == "dot(q, k) + 2"


def test_a_hidden_function_cannot_be_called() -> None:
    assert code("input sigmoid: f32[]", "sigmoid(dot(q, k)) + sigmoid") == "E0207"
    assert code("input inf: f32[Hkv * G]", "dot(q, k) + inf") == "E0207"
    assert code("let early = inf\n  let inf = 3.0", "dot(q, k) + early + inf") == "E0208"


def test_mistakes() -> None:
    assert code("", "clamp(dot(q, k), 1)") == "E0206"
    assert code("", "dot(q, k) + erf") == "E0207"
    assert code("", "sigmod(dot(q, k))") == "E0204"
    assert code("let erf = 3", "erf(dot(q, k)) + erf") == "E0207"
    assert code("", "where((kv_idx < 3) < (q_idx < 4), dot(q, k), 0)") == "E0303"
    assert code("", "where((kv_idx < 3) == 1, dot(q, k), 0)") == "E0303"


@pytest.mark.parametrize("name", [dtype for dtype in DType if dtype.is_narrow])
def test_element_types_of_8_bits_give_way_too(name: str) -> None:
    assert name not in RESERVED
    assert score(f"input {name}: f32[]", f"dot(q, k) + {name}") == f"dot(q, k) + {name}"
    assert score(f"param {name} in {{1.5, 2}}", f"dot(q, k) * {name}") == f"dot(q, k) * {name}"
    assert score(f"input x: f32[{name}]", "dot(q, k) + x[kv_idx]") == "dot(q, k) + x[kv_idx]"
    assert code("", f"dot(q, k) + {name}") == "E0203"
    text = plain(f"param {name} in {{f16, bf16}}\n  input x: {name}[H]", score="dot(q, k) + x[h]")
    (attention,) = resolve_text(text).attentions
    assert attention.tensor("x").dtype == name  # the param
