"""What a file may cost: counted, in proportion to what it makes, and lifted by the command line alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from attnc.build import MAX_MODULES, compile_program, diagnose, front, plan_program
from attnc.cli import main
from attnc.diagnostics import DiagnosticError
from attnc.effort import (
    MAX_STEPS,
    STEPS_PER_PIECE,
    Exhausted,
    announce,
    at_most,
    lift_limits,
    limit_piece,
    limit_steps,
    memo,
    remember,
    renew,
    share_spent,
    spend,
    watch_pieces,
)
from attnc.model.program import Program
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import parse, prelude

ROOT = Path(__file__).parents[1]
#: Attention as flash-attention ships it: twelve head dimensions, two types, gradients, three targets.
FLASH = """\
attention flash {
  param T in {bf16, f16}, D in {8, 16, 32, 40, 64, 80, 96, 128, 160, 192, 224, 256}REACHES
  input q: T[B, M, Hkv * G, D]
  input k, v: T[B, N, Hkv, D]
  score = softcap(dot(q, k) / sqrt(D), 30)
  mask = where(h < 2, window(1024, 0), causal)MASK
  normalize = softmax
  output o: T[B, M, Hkv * G, D]
  output lse: f32[B, Hkv * G, M]
  grad q, k, v
}
schedule flash for triton {
  tile.q in {64, 128}, tile.kv in {32, 64, 128}, warps in {4, 8}, stages in {1, 2, 3}
  where tile.q * D <= 16384 and tile.kv * D <= 16384
  backward {
    tile.q in {32, 64}, tile.kv in {32, 64, 128}, warps in {4, 8}
    where tile.q * D <= 8192 and tile.kv * D <= 8192
  }
}
schedule flash for cuda.sm_80 { }
schedule flash for cuda.sm_90a { }
"""


ALL_WIDTHS = "{8, 16, 32, 40, 64, 80, 96, 128, 160, 192, 224, 256}"


def flash(reaches: int = 1, widths: str = ALL_WIDTHS) -> str:
    """Returns that spec with so many variants for each of its own, and these head dimensions."""
    choices = ", ".join(str(64 * n) for n in range(1, reaches + 1))
    param, mask = (f", W in {{{choices}}}", " and q_pos - kv_idx < W") if reaches > 1 else ("", "")
    return FLASH.replace("REACHES", param).replace("MASK", mask).replace(ALL_WIDTHS, widths)


def resolved(text: str) -> Program:
    return resolve(parse(Source("spec.attn", text)), prelude())


@pytest.mark.parametrize(
    ("reaches", "widths", "modules"),
    [
        (1, "{8, 96, 256}", 18),
        pytest.param(1, ALL_WIDTHS, 72, marks=pytest.mark.nightly),
        pytest.param(3, ALL_WIDTHS, 216, marks=pytest.mark.nightly),
    ],
)
def test_variants_cost_a_quarter_of_what_they_may_however_many_there_are(
    reaches: int, widths: str, modules: int
) -> None:
    program = resolved(flash(reaches, widths))
    with limit_steps(MAX_STEPS / 4):
        assert len(plan_program(program).modules) == modules


def test_their_texts_cost_a_quarter_of_what_they_may() -> None:
    program = resolved(flash(widths="{64, 256}"))
    with limit_steps(MAX_STEPS / 4):
        assert len(compile_program(program, "spec.attn").outputs) > 12


@pytest.mark.nightly  # each is accepted by day
def test_all_committed_specs_are_accepted_as_one_file(tmp_path: Path) -> None:
    spec = tmp_path / "all.attn"
    spec.write_text("\n".join(path.read_text() for path in sorted((ROOT / "specs").glob("*.attn"))))
    assert [found for found in diagnose(spec) if found.severity == "error"] == []


def test_one_variant_of_many_is_limited_on_its_own() -> None:
    """A mask that is too much is refused although the file has steps for many variants."""
    unequal = " and ".join(f"kv_idx != q_pos - {n}" for n in range(0, 120, 3))
    program = resolved(flash(2).replace("causal)", f"causal) and {unequal}"))
    with pytest.raises(DiagnosticError) as refused, limit_steps(MAX_STEPS / 8):
        plan_program(program)
    (found,) = refused.value.diagnostics
    assert found.code == "E0510"
    assert "variant 'bf16_d8_w64'" in found.primary.text


def test_a_file_of_too_many_variants_is_refused_before_any_is_planned() -> None:
    one = flash(40).replace("schedule flash for triton {", "schedule flash for triton as s0 {")
    more = "".join(f"schedule flash for triton as s{n} {{ tile.q = 64 }}\n" for n in range(1, 4))
    with pytest.raises(DiagnosticError, match=rf"the file has 5760 variants .*; the limit is {MAX_MODULES}"):
        plan_program(resolved(one + more))


def test_the_command_line_lifts_limits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of a tenth, which a fifth of the golden's mask reaches."""
    golden = (ROOT / "tests" / "golden" / "diagnostics" / "E0510_too_much_work.attn").read_text()
    spec = tmp_path / "spec.attn"
    spec.write_text(re.sub(r" and\s+kv_idx != q_pos - ([3-9]\d|\d{3})\b", "", golden))
    monkeypatch.setattr("attnc.effort.at_most", lambda steps: at_most(steps / 10))
    assert main(["check", str(spec)]) == 1
    refused = capfd.readouterr().err
    assert "E0510" in refused
    assert "= help: --no-limits lifts the limit" in refused
    before = dict(os.environ)
    assert main(["check", "--no-limits", str(spec)]) == 0
    assert dict(os.environ) == before
    monkeypatch.setattr("attnc.syntax.parser.MAX_CHARACTERS", 9)  # which is looked at first
    assert main(["check", str(spec)]) == 1
    assert "E0501" in capfd.readouterr().err


def test_pieces_are_announced_and_finished() -> None:
    """Or a progress bar would end before, or after, what it shows."""
    announced, finished = [], []

    def watch(count: int, name: str) -> None:
        announced.append(count)
        finished.extend([name] if name else [])

    with watch_pieces(watch):
        for spec in ("causal_gqa", "linear", "varlen"):
            program = front(ROOT / "specs" / f"{spec}.attn")
            compile_program(program, "spec.attn")
    assert sum(announced) == len(finished)


def test_a_piece_leaves_the_file_what_it_has_not_spent() -> None:
    with limit_steps(100):
        announce(11)  # 10 each for ten of them
        with limit_piece():
            spend(90)
            with pytest.raises(Exhausted):
                spend(20)
        with limit_piece():
            spend(89)
        with pytest.raises(Exhausted):
            spend(2)
    assert STEPS_PER_PIECE == MAX_STEPS // 10


def test_without_limits_nothing_is_exhausted() -> None:
    with lift_limits(), limit_steps(10), limit_piece():
        spend(10 * MAX_STEPS)
    with limit_steps(10), pytest.raises(Exhausted):
        spend(11)


def test_steps_are_counted_within_one_block() -> None:
    spend(10 * MAX_STEPS)  # outside of any
    with limit_steps(10):
        with limit_steps(100):
            spend(8)
        with pytest.raises(Exhausted):
            spend(3)
    with limit_steps(10):
        spend(10)


def test_what_follows_on_plans_has_as_many_steps_again() -> None:
    with limit_steps(10):
        with limit_steps(100):
            spend(8)
        renew()
        spend(10)
        with pytest.raises(Exhausted):
            spend(1)


def test_the_share_that_is_spent_counts_what_was_spent_before_steps_were_renewed() -> None:
    with limit_steps(100):
        spend(20)
        assert share_spent() == 0.2
        renew()
        spend(10)
        assert share_spent() == 0.3
    with limit_steps(100):
        spend(5)
        assert share_spent() == 0.05
    with lift_limits(), limit_steps(100):
        spend(50)
        assert share_spent() == 0


def test_a_check_says_that_a_text_is_too_much_where_plans_cost_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it accepts is compiled, and what plans cheaply is not printed for it."""
    monkeypatch.setattr("attnc.build._STEPS_PER_CHARACTER", 1000)
    spec = tmp_path / "a.attn"
    spec.write_text((ROOT / "specs" / "full.attn").read_text())
    assert [one.code for one in diagnose(spec) if one.severity == "error"] == []
    monkeypatch.setattr("attnc.build._SHARE_THAT_PRINTS", 0.0)
    found = [one for one in diagnose(spec) if one.severity == "error"]
    assert [one.code for one in found] == ["E0510"]
    assert "the text of 'full'" in found[0].primary.text


def test_what_is_remembered_is_forgotten_with_the_block() -> None:
    calls = []

    @memo
    def double(x: int) -> int:
        calls.append(x)
        return 2 * x

    with limit_steps():
        assert (double(1), double(1), double(2)) == (2, 2, 4)
    with limit_steps():
        assert double(1) == 2
    assert (double(1), double(1)) == (2, 2)
    assert calls == [1, 2, 1, 1, 1]


def test_one_call_remembers_what_it_has_computed_and_is_not_limited() -> None:
    calls: list[int] = []

    @memo
    def double(value: int) -> int:
        calls.append(value)
        spend(2 * MAX_STEPS)
        return 2 * value

    with remember():
        assert [double(1), double(1), double(2)] == [2, 2, 4]
    assert calls == [1, 2]
    with remember():
        assert double(1) == 2
    assert calls == [1, 2, 1]
    with limit_steps(), remember(), pytest.raises(Exhausted):  # a limit that holds already goes on
        double(3)
