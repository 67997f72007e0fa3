"""`attnc explain` of attentions that leave their schedules open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import TINY, Run

#: Packed queries that select tokens of a cache, which Triton has no kernels for.
OF_HOPPER = """\
attention tiny {
  input q: bf16[T, 16, 64] via ragged(cu)
  input k, v: bf16[B, N, 1, 64]
  input cu: i32[B + 1]
  input chosen: i32[B, S]
  score = dot(q, k) / 8
  mask = listed(chosen, keys = 1)
  normalize = softmax
  output o: bf16[T, 16, 64]
}
"""


def test_the_schedule_of_a_spec_without_one_is_explained_and_can_be_kept(run: Run, folder: Path) -> None:
    spec = folder / "specs" / "tiny.attn"
    spec.write_text(TINY.partition("schedule ")[0])
    targets = ("triton", "cuda.sm_80")
    explained = [run("explain", "specs/tiny.attn", "--target", name, "--no-compile") for name in targets]
    for target, said in zip(targets, explained, strict=True):
        assert said.code == 0
        assert f"leaves its schedule open; for {target} attnc.compile takes:" in said.err
        assert f"schedule tiny for {target}" in said.err
    done = explained[-1]
    assert "kernels for triton, cuda.sm_90a then need schedules, too" in done.err
    added = done.err.partition("\n\n")[2].partition("\n\n   = help")[0] + "\n"
    spec.write_text(f"{spec.read_text()}\n{added}")
    again = run("explain", "specs/tiny.attn", "--target", "cuda.sm_80", "--no-compile")
    assert again.out == done.out, "line numbers, too"
    assert again.err == ""


def test_an_attention_that_one_target_has_kernels_for_is_explained_for_that(run: Run, folder: Path) -> None:
    spec = folder / "specs" / "tiny.attn"
    spec.write_text(OF_HOPPER)
    assert run("check").code == 0
    done = run("explain", "specs/tiny.attn", "--no-compile")
    assert done.code == 0
    assert "leaves its schedule open; for cuda.sm_90a attnc.compile takes:" in done.err
    assert "kernels for triton, cuda.sm_80 then need schedules, too" in done.err


@pytest.mark.parametrize("command", ["explain --no-compile", "verify --count 1"])
def test_an_attention_that_is_asked_for_needs_no_kernels_of_the_others(
    run: Run, folder: Path, command: str
) -> None:
    text = TINY.partition("schedule ")[0]
    refused = text.replace("tiny", "other").replace("64]", "1024]").replace("T[", "f32[")
    refused = refused.replace("  output", "  order = absolute(1024)\n  output")
    (folder / "specs" / "tiny.attn").write_text(f"{refused}\n{text}")
    assert run(*command.split(), "specs/tiny.attn").code == 1
    done = run(*command.split(), "specs/tiny.attn", "--attention", "tiny")
    assert done.code == 0, done.err


def test_json_has_the_schedule_that_was_added(run: Run, folder: Path) -> None:
    spec = folder / "specs" / "tiny.attn"
    written = json.loads(run("explain", "specs/tiny.attn", "--no-compile", "--json").out)
    assert "schedule_added" not in written
    spec.write_text(TINY.partition("schedule ")[0])
    done = run("explain", "specs/tiny.attn", "--no-compile", "--json")
    added = json.loads(done.out)["schedule_added"]
    assert (done.err, added[:24]) == ("", "schedule tiny for triton")
    spec.write_text(f"{spec.read_text()}\n{added}")
    kept = json.loads(run("explain", "specs/tiny.attn", "--no-compile", "--json").out)
    assert kept == {name: value for name, value in json.loads(done.out).items() if name != "schedule_added"}
