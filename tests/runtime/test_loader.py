"""Importing generated text, from a folder that nobody else can write to."""

from pathlib import Path

import pytest

from attnc.runtime.cache import cache_folder, store
from attnc.runtime.loader import load_text


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(folder))
    return folder


def test_equal_texts_are_one_module(cache: Path) -> None:
    first, again = load_text("VALUE = [1]\n"), load_text("VALUE = [1]\n")
    assert first is again
    assert first.VALUE == [1]
    assert load_text("VALUE = [2]\n") is not first


def test_a_module_that_fails_is_not_kept(cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_text("1 / 0\n")


def test_the_folder_is_private(cache: Path) -> None:
    assert cache_folder().stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_to_is_refused(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write"):
        cache_folder()


def test_a_link_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="is a link"):
        cache_folder()


def test_a_spoilt_file_is_replaced(cache: Path) -> None:
    path = store("VALUE = 3\n")
    path.write_bytes(b"\xff broken")
    assert store("VALUE = 3\n") == path
    assert path.read_text() == "VALUE = 3\n"
    assert [p.name for p in cache.iterdir()] == [path.name]
