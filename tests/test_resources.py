"""Files that ship with the compiler."""

import pytest

from attnc.resources import resource


def test_resources_are_found() -> None:
    assert resource("grammar").is_dir()
    assert resource("grammar", "prelude.attn").read_text(encoding="utf-8").startswith("#")


def test_missing_resources_are_a_broken_installation() -> None:
    with pytest.raises(FileNotFoundError, match="not completely installed: grammar/nothing is missing"):
        resource("grammar", "nothing")
