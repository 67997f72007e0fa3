"""Findings about schedules that attnc has added: they are said of the attentions that have none."""

from __future__ import annotations

import pytest

from attnc.diagnostics import DiagnosticError, error
from attnc.model.added import in_what_is_written, move_to_attentions
from attnc.model.program import Program
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import parse, prelude

FORWARD = """\
attention a {
  input q: f16[B, M, H, 64]
  input k, v: f16[B, N, H, 64]
  score = dot(q, k)
  mask = causal
  normalize = softmax
  output o: f16[B, M, H, 64]
}
"""
ADDED = "schedule a for triton {\n  loops = [q, kv]\n}\n"


def program(text: str) -> Program:
    return resolve(parse(Source("spec.attn", text)), prelude())


def test_a_finding_in_an_added_schedule_is_said_of_its_attention() -> None:
    whole = program(FORWARD + ADDED)
    found = error("E0602", "wrong", whole.source.span(len(FORWARD) + 30, len(FORWARD) + 35))
    with pytest.raises(DiagnosticError) as raised, in_what_is_written(whole, len(FORWARD)):
        raise DiagnosticError([found, found])
    (moved,) = raised.value.diagnostics
    assert moved.primary.span == whole.attention("a").span
    assert moved.notes == ("'a' has no schedule; this is of the one that attnc gives it for triton",)


def test_what_the_user_wrote_stays_where_it_is() -> None:
    whole = program(FORWARD + ADDED)
    found = error("E0602", "wrong", whole.source.span(20, 30))
    added = error("E0602", "wrong", whole.source.span(len(FORWARD) + 30, len(FORWARD) + 35))
    assert move_to_attentions([found], whole, len(FORWARD)) == (found,)
    assert move_to_attentions([added], whole, None) == (added,)


def test_places_in_other_sources_stay_where_they_are() -> None:
    elsewhere = Source("prelude.attn", "def fn(x) = x\n" * 100).span(1000, 1010)
    found = error("E0602", "wrong", elsewhere)
    assert move_to_attentions([found], program(FORWARD), len(FORWARD)) == (found,)
