"""Files that ship with the compiler."""

import sys
from pathlib import Path

import pytest

from attnc.resources import keep, kept_code, read_kept, resource


def test_resources_are_found() -> None:
    assert resource("grammar").is_dir()
    assert resource("grammar", "prelude.attn").read_text(encoding="utf-8").startswith("#")


def test_missing_resources_are_a_broken_installation() -> None:
    with pytest.raises(FileNotFoundError, match="not completely installed: grammar/nothing is missing"):
        resource("grammar", "nothing")


def test_code_of_resources_is_kept_where_python_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    tag = sys.implementation.cache_tag
    assert str(kept_code("/folder/parser.py", "attn.lark")) == f"/folder/__pycache__/attn.lark.{tag}"
    monkeypatch.setattr(sys, "pycache_prefix", "/elsewhere")
    assert str(kept_code("/folder/parser.py", "attn.lark")) == f"/elsewhere/folder/attn.lark.{tag}"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert kept_code("/folder/parser.py", "attn.lark") is None


def test_what_is_kept_is_read_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "code"
    assert read_kept(place, "a") is None
    keep(place, "a", b"content")
    assert read_kept(place, "a") == b"content"
    assert read_kept(place, "another") is None
    written = place.read_bytes()
    damaged = [written[:i] + bytes([written[i] ^ 1]) + written[i + 1 :] for i in range(len(written))]
    for bytes_ in (*damaged, *(written[:i] for i in range(len(written))), written + b" "):
        place.write_bytes(bytes_)
        assert read_kept(place, "a") is None


def test_nothing_is_kept_where_nothing_can_be(tmp_path: Path) -> None:
    for place in (None, tmp_path, tmp_path / "no folder" / "code"):
        keep(place, "a", b"content")
        assert read_kept(place, "a") is None
    assert [*tmp_path.iterdir()] == []
