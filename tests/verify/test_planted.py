"""Every planted bug is caught; the table of how soon is the figure of merit (`pytest -s` shows it)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from attnc.build import digest, front, plan_program
from attnc.plan import ir
from attnc.target.render import render
from attnc.verify.backward_bugs import BACKWARD_BUGS
from attnc.verify.bugs import BUGS as FORWARD_BUGS
from attnc.verify.planted import Bug, files_with, hunt, plant, table
from attnc.verify.serving_bugs import SERVING_BUGS

PARTS = {"forward": FORWARD_BUGS, "serving": SERVING_BUGS, "backward": BACKWARD_BUGS}
BUGS = tuple(bug for part in PARTS.values() for bug in part)
SPECS = Path(__file__).parents[2] / "specs"
#: An attention that is the second of its file.
SECOND = {"decode_sink": "decode"}


@cache
def module(name: str) -> ir.Module:
    modules = plan_program(front(SPECS / f"{SECOND.get(name, name)}.attn")).modules
    return next(m for m in modules if name not in SECOND or m.variant.attention.name == name)


@pytest.mark.parametrize("bugs", PARTS.values(), ids=PARTS)
def test_every_bug_has_its_place(bugs: tuple[Bug, ...]) -> None:
    """Says in seconds what the searches would in minutes."""
    assert all(files_with(module(bug.spec), bug) for bug in bugs)


@pytest.mark.slow
@pytest.mark.parametrize("bugs", PARTS.values(), ids=PARTS)
def test_every_bug_is_caught_and_most_are_soon(bugs: tuple[Bug, ...]) -> None:
    catches = [hunt(module(bug.spec), bug, seconds=240) for bug in bugs]
    print(f"\n{table(catches)}")
    assert not [catch.bug.name for catch in catches if not catch.caught]
    examples = sorted(catch.examples for catch in catches)
    assert examples[len(examples) // 2] <= 10


def test_names_are_unique() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 20


def test_anchors_must_match_once() -> None:
    source = module("full").variant.source
    text = render(module("full"), path="full.attn", sha256=digest(source))
    bug = next(bug for bug in BUGS if bug.name == "sum not rescaled")
    patched = plant(text, bug)
    assert len(patched.splitlines()) == len(text.splitlines())
    with pytest.raises(ValueError, match="its anchor occurs 0 times in the module of 'full'"):
        plant(patched, bug)
    with pytest.raises(ValueError, match=r"its anchor occurs \d\d+ times"):
        plant(text, replace(bug, anchor="tl"))
