"""Every planted bug is caught: by the case kept for it, and, every night, by a search from scratch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnc.verify.simt import available
from tests.planted.bug import Bug, plant
from tests.planted.hunting import files_with, hunt, table
from tests.planted.registry import BUGS, PARTS

NEEDS_GXX = pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
PER_PART = [
    pytest.param(bugs, id=part, marks=[NEEDS_GXX] if part.startswith("cuda") else [])
    for part, bugs in PARTS.items()
]


@pytest.mark.parametrize("bugs", PER_PART)
def test_every_bug_has_its_place(bugs: tuple[Bug, ...]) -> None:
    """Says in seconds what the searches would in minutes."""
    assert all(files_with(bug) for bug in bugs)


@pytest.mark.slow
@pytest.mark.parametrize("bugs", PER_PART)
def test_every_bug_is_caught(bugs: tuple[Bug, ...]) -> None:
    catches = [hunt(bug) for bug in bugs]
    print(f"\n{table(catches)}")
    assert not [catch.bug.name for catch in catches if catch.case is None]


def test_names_are_unique() -> None:
    assert len(BUGS) == sum(len(bugs) for bugs in PARTS.values()) > 150


def test_anchors_must_match_once() -> None:
    bug = BUGS["triton forward: sum not rescaled"]
    (patched,) = files_with(bug).values()
    with pytest.raises(ValueError, match="the anchor occurs 0 times: 'l_new = l"):
        plant(patched, bug)
    with pytest.raises(ValueError, match=r"the anchor occurs \d\d+ times: 'tl'"):
        plant(patched, replace(bug, anchor="tl"))
