"""What keeps a version from being released, and that the changelog is one of releases."""

import re
from pathlib import Path

import pytest

from attnc.version import __version__, describe_checkout
from tools.release import find_problems

ROOT = Path(__file__).parents[2]
GOOD = "# Changelog\n\n## [1.2.0] - 2026-11-24\n\n- a bullet\n\n## [1.1.0] - 2026-01-01\n\n- another\n"


def test_a_clean_checkout_with_a_dated_section_is_released() -> None:
    assert find_problems("1.2.0", GOOD, "", ["v1.1.0"]) == []


@pytest.mark.parametrize(
    ("version", "changelog", "changed", "tags", "said"),
    [
        ("1.3.0", GOOD, "", [], r"begins with \[1.2.0\], the package is 1.3.0"),
        ("1.2.0", GOOD.replace("## [1.2.0] - 2026-11-24", "## [Unreleased]"), "", [], r"\[Unreleased\]"),
        ("1.2.0", GOOD.replace(" - 2026-11-24", ""), "", [], "gives no date"),
        ("1.2.0", GOOD.replace("- a bullet\n", "- a bullet\n" * 41), "", [], "41 bullets"),
        ("1.2.0", GOOD.replace("- a bullet\n", ""), "", [], "0 bullets"),
        ("1.2.0", "", "", [], r"begins with \[\]"),
        ("1.2.0", GOOD, " M attnc/version.py\n", [], "has changes"),
        ("1.2.0", GOOD, "", ["v1.2.0"], "tag v1.2.0 exists"),
    ],
)
def test_each_problem_is_named(
    version: str, changelog: str, changed: str, tags: list[str], said: str
) -> None:
    (problem,) = find_problems(version, changelog, changed, tags)
    assert re.search(said, problem)


def test_the_changelog_is_ready_for_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert find_problems(__version__, changelog, "", []) == []


def test_a_folder_without_git_has_no_commit(tmp_path: Path) -> None:
    assert describe_checkout(tmp_path) is None
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    assert describe_checkout(tmp_path) is None
