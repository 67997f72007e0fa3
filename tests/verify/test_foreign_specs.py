"""Right kernels of other people's scores are called right: properties ask no more than is promised.

Each spec here was called wrong once, by the rule that its name says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from attnc.verify.case import Case
from attnc.verify.check import check, keeps
from attnc.verify.properties import PROPERTIES, violations
from attnc.verify.subject import Subject, subject_of
from tests.kernels.test_random_specs import drawn
from tests.profiles import is_night
from tests.targets import TARGETS, needs_gxx
from tests.verify.foreign_specs import foreign_specs
from tests.verify.judging import modules_of, subject_of_text

_TEXT = """attention a {{
  input q: bf16[B, M, H, 16]
  input k, v: bf16[B, N, H, 16]
  {inputs}
  score = {score}
  {mask}
  normalize = softmax
  output o: bf16[B, M, H, 16]
  output lse: f32[B, M, H]
  grad q, k, v{grads}
}}
schedule a for triton {{ tile.q = 16, tile.kv = 16 }}
"""


@dataclass(frozen=True)
class Alarm:
    """A spec that was called wrong. inputs: their types by name; rule: what said so; case: its styles."""

    score: str
    inputs: Mapping[str, str]
    rule: str
    mask: str = ""
    grads: str = ""
    case: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        declared = "\n  ".join(f"input {name}: {type_}" for name, type_ in self.inputs.items())
        return _TEXT.format(
            score=self.score,
            inputs=declared,
            mask=f"mask = {self.mask}" if self.mask else "",
            grads="".join(f", {name}" for name in self.grads.split()),
        )


ALARMS: Mapping[str, Alarm] = {
    "a gate that forgets": Alarm(
        "dot(q, k) / sqrt(D) + c[b, h, q_pos] - c[b, h, kv_idx]",
        {"c": "f32[B, H, N]"},
        "equal values show delta",
        mask="causal",
        grads="c",
        case={"extras": "masked"},
    ),
    "the logarithm of a gate": Alarm(
        "dot(q, k) / sqrt(D) + log(g[b, h, kv_idx])",
        {"g": "f32[B, H, N]"},
        "equal values show delta",
        grads="g",
        case={"extras": "negative"},
    ),
    "odds of a gate": Alarm(
        "dot(q, k) / sqrt(D) + log(g[b, h, kv_idx]) - log(1 - g[b, h, kv_idx])",
        {"g": "f32[B, H, N]", "pad": "bool[B, N]"},
        "the unseen has gradient 0",
        mask="not pad[b, kv_idx]",
        grads="g",
    ),
    "small differences of large scores": Alarm(
        "dot(q, k) + 3e6 + x[b, kv_idx]", {"x": "f32[B, N]"}, "equal values show delta", grads="x"
    ),
    "the largest of large scores": Alarm(
        "dot(q, k) + 1e8 + 4 * x[b, kv_idx]", {"x": "f32[B, N]"}, "visible keys count", grads="x"
    ),
    "a bias of keys nobody sees": Alarm(
        "dot(q, k) / sqrt(D) + bias[b, h, q_idx, kv_idx]",
        {"bias": "f32[B, H, M, N]", "open": "f32[H, N]"},
        "gradients ignore the unseen",
        mask="open[h, kv_idx] > 0.3",
        grads="bias",
        case={"extras": "zero"},
    ),
    "a number of keys": Alarm(
        "dot(q, k) * log(N)",
        {},
        "prefixes agree",
        mask="causal",
    ),
    "a key ahead": Alarm(
        "dot(q, k) + x[b, kv_idx + 1]",
        {"x": "f32[B, N]"},
        "prefixes agree",
        mask="causal",
        grads="x",
    ),
    "a table as long as there are sequences": Alarm(
        "dot(q, k) + x[kv_idx % 2]",
        {"x": "f32[B]"},
        "batches permute",
        grads="x",
    ),
    "a table as long as there are heads": Alarm(
        "dot(q, k) + x[kv_idx % 2]",
        {"x": "f32[H]"},
        "heads permute",
        grads="x",
    ),
}


@cache
def _subject(name: str) -> Subject:
    return subject_of_text(ALARMS[name].text)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ALARMS)
def test_a_right_kernel_keeps_the_rule(name: str) -> None:
    alarm, made = ALARMS[name], _subject(name)
    case = Case(dims={"B": 2, "M": 20, "N": 23, "H": 2}, seed=3, **alarm.case)  # type: ignore[arg-type]  # names of styles
    assert list(violations(made, case, only=alarm.rule)) == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["a gate that forgets", "the logarithm of a gate", "odds of a gate"])
def test_gradients_of_rows_that_are_nan_are_left_open(name: str) -> None:
    """A score of NaN makes its row NaN, and what 0 times that reaches."""
    case = Case(dims={"B": 2, "M": 20, "N": 23, "H": 2}, seed=3, **ALARMS[name].case)  # type: ignore[arg-type]  # names of styles
    verdict = check(_subject(name), case)
    assert verdict.ok, verdict.message
    assert verdict.open > 0


def test_gradients_of_loads_may_vanish_below_the_normal_numbers() -> None:
    """Each score's part may be taken for 0, and so may their sum."""
    logit = "(dot(q, k) / sqrt(D) + log(g[h, kv_idx]))"
    text = _TEXT.format(
        score=f"{logit} * sigmoid({logit})", inputs="input g: f32[H, N]", mask="", grads=", g"
    )
    sizes, styles = {"B": 1, "M": 127, "N": 61, "H": 2}, {"logits": "falling", "values": "positive"}
    verdict = check(subject_of_text(text), Case(dims=sizes, **styles, extras="one"))  # type: ignore[arg-type]  # names of styles
    assert verdict.ok, verdict.message


def test_rules_that_still_apply() -> None:
    """To what reads inputs at its own position alone, and says positions by how far they are apart."""
    inputs = {"x": "f32[B, M]", "y": "f32[B, N]", "z": "f32[H, N]", "w": "f32[B, H]", "t": "f32[R]"}
    text = _TEXT.format(
        score="dot(q, k) + x[b, q_idx] - y[b, q_pos] * z[h, kv_idx] + w[b, h] + t[q_pos - kv_idx]",
        inputs="\n  ".join(f"input {name}: {type_}" for name, type_ in inputs.items()),
        mask="mask = causal and q_idx - kv_idx < 9",
        grads="",
    )
    attention = subject_of_text(text).variant.attention
    applied = {rule.name for rule in PROPERTIES if rule.applies(attention)}
    assert applied >= {"prefixes agree", "batches permute", "heads permute"}


def held(made: Subject, case: Case) -> None:
    """To its bound, and to every rule."""
    verdict = check(made, case)
    assert verdict.ok, verdict.message
    verdict = keeps(made, case, violations, verdict)
    assert verdict.ok, verdict.message


@pytest.mark.slow
@settings(
    max_examples=settings().max_examples // (10 if is_night() else 20),
    suppress_health_check=list(HealthCheck),
)
@given(foreign_specs(), st.data())
def test_foreign_specs_are_right(text: str, data: st.DataObject) -> None:
    """As `python -m tests.gpu.random_specs --foreign` says of thousands, on three targets."""
    note(text)
    made = subject_of_text(text)
    held(made, drawn(data, made))


@pytest.mark.nightly
@needs_gxx
@settings(max_examples=settings().max_examples // 16, suppress_health_check=list(HealthCheck))
@given(foreign_specs(targets=TARGETS), st.data())
def test_foreign_specs_are_right_on_cuda_too(text: str, data: st.DataObject) -> None:
    note(text)
    made = next(subject_of(module) for module in modules_of(text) if module.target != "triton")
    held(made, drawn(data, made))
