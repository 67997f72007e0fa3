"""`attnc import-flex`: a user's mods as a spec that compiles, and what is said of those that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run

MODS = """
import torch
slope = torch.ones(8)

def biased(score, b, h, q_idx, kv_idx):
    return score + slope[h] * (kv_idx - q_idx)

def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx

def factory(width):
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= width

def branch(b, h, q_idx, kv_idx):
    return q_idx if q_idx > 0 else kv_idx

window = factory(8)
five = 5
"""


@pytest.fixture(autouse=True)
def written(folder: Path) -> Path:
    path = folder / "mods.py"
    path.write_text(MODS)
    return path


def test_the_spec_compiles(run: Run, folder: Path) -> None:
    done = run("import-flex", "mods.py:biased", "mods.py:window", "--head-dim", "64", "--out", "made.attn")
    assert (done.code, done.out) == (0, "")
    text = (folder / "made.attn").read_text()
    assert "input slope: f32[H]" in text
    assert "mask = q_idx - kv_idx <= 8" in text
    assert run("check", "made.attn").code == 0
    assert run("import-flex", "mods.py:biased", "mods.py:window", "--head-dim", "64").out == text


def test_what_a_link_leads_to_is_written(run: Run, folder: Path) -> None:
    (folder / "kept.attn").write_text("")
    (folder / "link.attn").symlink_to("kept.attn")
    assert run("import-flex", "mods.py:causal", "--out", "link.attn").code == 0
    assert (folder / "link.attn").is_symlink()
    assert "mask = q_idx >= kv_idx" in (folder / "kept.attn").read_text()


def test_a_spec_that_is_there_is_left_alone(run: Run, folder: Path) -> None:
    made = folder / "made.attn"
    command = ("import-flex", "mods.py:causal", "--out", "made.attn")
    assert (run(*command).code, run(*command).code) == (0, 0)  # the same again
    made.write_text("# mine\n")
    done = run(*command)
    assert done.code == 2
    assert "error: 'made.attn' is there already\n   = help: choose another name; --force writes" in done.err
    assert made.read_text() == "# mine\n"
    assert run(*command, "--force").code == 0
    assert "mask = q_idx >= kv_idx" in made.read_text()


@pytest.mark.parametrize(
    ("mods", "code", "message"),
    [
        (["mods.py"], 2, "'mods.py' names no mod"),
        (["nothing.py:mod"], 2, "there is no file 'nothing.py'"),
        (["mods.py:casual"], 2, "there is no mod 'casual' in 'mods.py'"),
        (["mods.py:five"], 2, "no function is 'five' in 'mods.py'"),
        (["mods.py:factory"], 2, "'mods.py:factory' takes 1 arguments"),
        (["mods.py:causal", "mods.py:window"], 2, "'mods.py:window' is a second mask_mod"),
        (["mods.py:causal", "--dtype", "f64"], 2, "there is no dtype 'f64'"),
        (["mods.py:causal", "--target", "cuda.sm_79"], 2, "there is no target 'cuda.sm_79'"),
        (["mods.py:causal", "--name", "two words"], 2, "and no reserved word, got 'two words'"),
        (["mods.py:causal", "--name", "class"], 2, "and no reserved word, got 'class'"),
        (["mods.py:causal", "--name", "fenêtre"], 2, "choose another --name"),
        (["mods.py:causal", "--head-dim", "5000"], 2, "head-dim"),
        (["mods.py:branch"], 1, "error[E0902]: a mod cannot branch on its values"),
    ],
)
def test_mistakes(mods: list[str], code: int, message: str, run: Run) -> None:
    done = run("import-flex", *mods)
    assert done.code == code
    assert message in done.err


def test_a_file_that_does_not_run(run: Run, folder: Path) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    done = run("import-flex", "broken.py:mod")
    assert done.code == 2
    assert "'broken.py' cannot be run: ZeroDivisionError: division by zero" in done.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def mod(b, h, q, kv): return q > nothing\n", "a mod raised NameError: name 'nothing'"),
        ("from torch import maximum as mod\n", "that is no mod: no signature found"),
    ],
)
def test_what_a_mod_raises_is_no_bug_of_ours(text: str, message: str, run: Run, folder: Path) -> None:
    (folder / "broken.py").write_text(text)
    done = run("import-flex", "broken.py:mod")
    assert done.code == 2
    assert message in done.err
    assert ("broken.py:1" in done.err) == ("NameError" in message)
