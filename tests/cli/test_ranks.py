"""`attnc explain --ranks` and mistakes of the options for several GPUs."""

import json

import pytest

from tests.cli.conftest import Run


def test_explain_shows_the_plan(run: Run) -> None:
    done = run("explain", "specs/tiny.attn", "--ranks", "4", "--size", "M=4096,N=4096,H=8")
    assert done.code == 0, done.err
    assert "tiny on 4 ranks: 4096 queries, 4096 keys" in done.out
    assert "chosen: need" in done.out
    done = run("explain", "specs/tiny.attn", "--ranks", "4", "--size", "M=4096,H=8", "--json")
    figures = json.loads(done.out)
    assert (figures["chosen"], figures["ranks"]) == ("need", 4)
    assert len(figures["owner"]) * figures["chunk"] == 4096


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--size", "M"), "'M' is no size"),
        (("--size", "M=0"), "'M=0' is no size"),
        (("--strategy", "ring"), "there is no strategy 'ring'"),
        (("--strategy", "heads", "--size", "H=3"), "3 K/V heads cannot be shared out to 4 ranks"),
        (("--attention", "tin"), "there is no attention 'tin'"),
    ],
)
def test_mistakes_are_named(run: Run, options: tuple[str, ...], message: str) -> None:
    done = run("explain", "specs/tiny.attn", "--ranks", "4", *options)
    assert done.code == 2
    assert message in done.err


def test_what_ranks_cannot_share_is_said_at_its_place(run: Run) -> None:
    done = run("verify", "specs/tiny.attn", "--ranks", "2", "--attention", "other")
    assert done.code == 2
    assert "there is no attention 'other'" in done.err
