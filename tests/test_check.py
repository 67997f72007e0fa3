"""`attnc check` refuses what `attnc compile` refuses, at the same places, and says no more and no less."""

import random
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attnc import build
from attnc.build import compile_spec, diagnose
from attnc.diagnostics import Diagnostic, DiagnosticError
from attnc.effort import limit_steps
from attnc.syntax import parser
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


def test_all_attentions_are_reported_at_once(tmp_path: Path) -> None:
    scheduled = "schedule c for triton { loops = [kv, q], pack = gqa }\n"
    wrong = WITHOUT_SCHEDULE.replace("dq", "w").replace("attention a", "attention c") + scheduled
    spec = tmp_path / "spec.attn"
    spec.write_text(
        WITHOUT_SCHEDULE
        + WITHOUT_SCHEDULE.replace("attention a", "attention b")
        + FORWARD.replace("attention a", "attention d")
        + wrong
    )
    found = diagnose(spec)
    errors = [(one.code, one.primary.span.line) for one in found if one.severity == "error"]
    assert errors == [("E0602", 4), ("E0602", 14), ("E0602", 39)]
    assert _said(found) == _said(_compiled(spec))


def test_work_grows_with_the_attentions_that_have_no_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Counter[str]()

    def count(module: ModuleType, name: str) -> None:
        function = getattr(module, name)

        def counted(*given: Any) -> Any:
            done[name] += 1
            return function(*given)

        monkeypatch.setattr(module, name, counted)

    prelude()  # parsed once
    count(parser, "_parse_items")
    count(build, "check_mask")
    spec = tmp_path / "spec.attn"
    work = []
    for number in (1, 2, 4):
        spec.write_text("".join(FORWARD.replace("attention a", f"attention a{i}") for i in range(number)))
        done.clear()
        assert not diagnose(spec)
        work.append(dict(done))
    one, two, four = work
    for name in done:
        assert 0 < four[name] - two[name] <= 2 * (two[name] - one[name]), work


def test_a_file_at_its_limit_is_refused_with_a_place(tmp_path: Path) -> None:
    spec = tmp_path / "spec.attn"
    spec.write_text(FORWARD + "".join(f"def fn_{i}(x) = x + {i} + x + x + x + x\n" for i in range(30)))
    prelude()  # whose own steps are counted once
    found = []
    for steps in range(12_000, 45_000, 4_000):
        with limit_steps(steps):
            found.append([one.code for one in diagnose(spec)])
    assert found[0] == ["E0510"]
    assert found[-1] == []


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
