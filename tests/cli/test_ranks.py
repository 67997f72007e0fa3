"""`attnc explain --ranks` and mistakes of the options for several GPUs."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Run


def test_explain_shows_the_plan(run: Run) -> None:
    done = run("explain", "specs/tiny.attn", "--ranks", "4", "--size", "M=4096,N=4096,H=8")
    assert done.code == 0, done.err
    assert "tiny on 4 ranks: 4096 queries, 4096 keys" in done.out
    assert "chosen: need" in done.out
    done = run("explain", "specs/tiny.attn", "--ranks", "4", "--size", "M=4096,H=8", "--json")
    figures = json.loads(done.out)
    assert (figures["chosen"], figures["ranks"]) == ("need", 4)
    assert len(figures["owner"]) * figures["chunk"] == 4096


def test_a_size_of_the_spec_is_as_large_as_there_are_keys(run: Run, tmp_path: Path) -> None:
    spec = tmp_path / "reach.attn"
    spec.write_text((ROOT / "specs" / "head_mask.attn").read_text().replace("i32[H]", "i32[P]"))
    done = run("explain", str(spec), "--ranks", "2", "--size", "M=512")
    assert (done.code, done.out.splitlines()[1]) == (0, "example: reach = 128")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--size", "M"), "'M' is no size"),
        (("--size", "M=0"), "'M=0' is no size"),
        (("--size", "M=1073741824"), "'M=1073741824' is no size"),
        (("--size", f"M={'9' * 5000}"), f"'M={'9' * 38}' is no size"),
        (("--size", "M=999999999"), "a plan of so many rows for 4 ranks takes too much memory"),
        (("--size", "M=64,Q=3"), "'tiny' has no size 'Q'\n   = help: its sizes are B, M, N, H, Hkv, G"),
        (("--strategy", "ring"), "there is no strategy 'ring'"),
        (("--strategy", "heads", "--size", "H=3"), "3 K/V heads cannot be shared out to 4 ranks"),
        (("--attention", "tin"), "there is no attention 'tin'"),
    ],
)
def test_mistakes_are_named(run: Run, options: tuple[str, ...], message: str) -> None:
    done = run("explain", "specs/tiny.attn", "--ranks", "4", *options)
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize("variant", ["d128", "d128_split", "d128_rows"])
def test_a_variant_is_named_with_the_label_of_its_schedule_or_without(run: Run, variant: str) -> None:
    done = run("explain", str(ROOT / "specs/extend.attn"), "--ranks", "2", "--variant", variant)
    assert (done.code, done.err) == (0, "")


def test_variants_are_listed_under_each_label(run: Run) -> None:
    done = run("verify", str(ROOT / "specs/extend.attn"), "--ranks", "2", "--variant", "nothing")
    assert done.code == 2
    assert "variants are d128, d128_split, d128_drafts, d128_rows" in done.err


@pytest.mark.parametrize("spec", ["warp_split", "packed_training"])
def test_a_target_without_a_schedule_is_said_before_ranks_start(run: Run, spec: str) -> None:
    """Whatever the compiler says of a rank's kernels is said here, not from within a process."""
    done = run("verify", str(ROOT / f"specs/{spec}.attn"), "--ranks", "2", "--count", "1")
    assert done.code == 2, "nothing was verified, which no script takes for a success"
    assert "nothing was verified: ranks share out none of these attentions" in done.err
    assert "has no schedule for triton, which ranks would run" in done.out


def test_heads_that_ranks_cannot_share_are_said_before_they_start(run: Run, tmp_path: Path) -> None:
    spec = tmp_path / "few.attn"
    spec.write_text(
        (ROOT / "specs" / "dropout.attn").read_text().replace(" H, D]", " 3, D]").replace(" H,", " 3,")
    )
    done = run("verify", str(spec), "--ranks", "2", "--count", "1")
    assert done.code == 2
    assert "dropout shares out heads alone, and 3 K/V heads are no multiple of 2 ranks" in done.out


def test_json_of_what_ranks_cannot_share_is_written_too(run: Run) -> None:
    done = run("verify", str(ROOT / "specs/warp_split.attn"), "--ranks", "2", "--count", "1", "--json")
    rows = json.loads(done.out)
    assert (done.code, {row["ok"] for row in rows}) == (2, {None})
    assert all("has no schedule for triton" in row["reason"] for row in rows)
    assert "nothing was verified" in done.err


@pytest.mark.parametrize("option", [("--size", "M=64"), ("--strategy", "need")])
def test_options_of_ranks_are_not_passed_over_without_them(run: Run, option: tuple[str, str]) -> None:
    done = run("explain", "specs/tiny.attn", *option)
    assert done.code == 2
    assert f"{option[0]} says nothing without --ranks" in done.err


@pytest.mark.parametrize(
    "modes",
    [
        ("--ranks 2", "--large"),
        ("--ranks 2", "--record"),
        ("--sanitize", "--case {}"),
        ("--case {}", "--json"),
    ],
)
def test_a_mode_of_verify_is_not_passed_over(run: Run, modes: tuple[str, str]) -> None:
    done = run("verify", "specs/tiny.attn", *" ".join(modes).split())
    assert done.code == 2
    first, second = (mode.split()[0] for mode in modes)
    assert f"{first} and {second} are not one run" in done.err


def test_what_ranks_cannot_share_is_said_at_its_place(run: Run) -> None:
    done = run("verify", "specs/tiny.attn", "--ranks", "2", "--attention", "other")
    assert done.code == 2
    assert "there is no attention 'other'" in done.err
