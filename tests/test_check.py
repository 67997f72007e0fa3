"""`attnc check` refuses what `attnc compile` refuses, at the same places, and says no more and no less."""

import random
import re
from pathlib import Path

import pytest

from attnc.build import compile_spec, diagnose
from attnc.diagnostics import Diagnostic, DiagnosticError
from attnc.effort import limit_steps
from attnc.syntax.parser import prelude
from tests.hostile import files

WITHOUT_SCHEDULE = """\
attention a {
  input q: f16[B, M, H, 64]
  input k, v: f16[B, N, H, 64]
  input dq: f32[H]
  score = dot(q, k) + dq[h]
  mask = causal
  normalize = softmax
  output o: f16[B, M, H, 64]
  grad q, k, v
}
"""
_SCHEDULE = re.compile(r"^schedule \w+ for [^{\n]*\{(?:[^\n]*\}$|.*?^\}$)\n?", re.MULTILINE | re.DOTALL)
_KINDS = (files._mutated, files._renamed, files._renamed, files._source)


def _compiled(spec: Path) -> tuple[Diagnostic, ...]:
    try:
        return compile_spec(spec).warnings
    except DiagnosticError as failure:
        return failure.diagnostics


def _said(found: tuple[Diagnostic, ...]) -> list[tuple[str, str, int, int]]:
    return [(d.code, d.message, d.primary.span.start, d.primary.span.end) for d in found]


def _drawn(seed: int) -> str:
    """A spec, as a rule with a mistake, that has lost some or all of its schedules."""
    draw = random.Random(seed)
    text = draw.choice(_KINDS)(draw)
    share = draw.choice((0, 0.5, 1))
    return _SCHEDULE.sub(lambda found: "" if draw.random() < share else found[0], text)


def test_names_are_refused_before_there_is_a_schedule(tmp_path: Path) -> None:
    spec = tmp_path / "spec.attn"
    spec.write_text(WITHOUT_SCHEDULE)
    (found,) = diagnose(spec)
    assert (found.code, found.primary.span.line) == ("E0602", 4)
    assert _said((found,)) == _said(_compiled(spec))


def test_what_is_wrong_with_an_added_schedule_is_said_of_its_attention(tmp_path: Path) -> None:
    spec = tmp_path / "spec.attn"
    text = WITHOUT_SCHEDULE.replace("dq", "u")
    spec.write_text(text)
    prelude()  # whose own steps are counted once
    with limit_steps(10_000):
        (found,) = diagnose(spec)
    assert (found.code, found.primary.span.line) == ("E0510", 1)
    assert found.notes[-1] == "'a' has no schedule; this is of the one that attnc gives it for triton"


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_check_and_compile_agree(first: int, tmp_path: Path) -> None:
    spec = tmp_path / "spec.attn"
    for seed in range(first, first + 100):
        spec.write_text(_drawn(seed), encoding="utf-8", errors="surrogatepass")
        found = diagnose(spec)
        assert _said(found) == _said(_compiled(spec)), seed
        length = len(spec.read_text(encoding="utf-8", errors="replace"))
        assert all(d.primary.span.end <= length for d in found), seed
