"""Files that ship with the compiler."""

import sys

import pytest

from attnc.resources import kept_code, resource


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
