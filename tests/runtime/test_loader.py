"""Importing generated text, from a folder that nobody else can write to."""

import os
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from attnc.runtime.loader import load_text, store
from attnc.support.cache import cache_folder


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


def test_a_thread_never_meets_half_a_module(cache: Path) -> None:
    """Another thread asks for the module while it is imported, and gets it when it is whole."""
    text = "from tests.runtime import test_loader\ntest_loader.asking.start()\nVALUE = 1\n"
    asking.text = text
    load_text(text)
    assert asking.result() == 1


class _Asking:
    text = ""

    def start(self) -> None:
        self.crew = ThreadPoolExecutor(1)
        self.found = self.crew.submit(lambda: load_text(self.text).VALUE)
        wait([self.found], timeout=0.2)  # one that does not wait is done by then

    def result(self) -> object:
        with self.crew:
            return self.found.result()


asking = _Asking()


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


def test_without_a_folder_of_the_user_a_process_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container whose user has no home: kernels are compiled, and it is told how to keep them."""
    (tmp_path / "home").write_text("")
    monkeypatch.delenv("ATTNC_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    told = r"home/attnc cannot be made \(Not a directory\); set ATTNC_CACHE_DIR(.|\n)*compiles anew"
    with pytest.warns(UserWarning, match=told):
        folder = cache_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == folder  # and says so once
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(tmp_path / "home" / "mine"))
    with pytest.raises(PermissionError, match="mine cannot be made"):
        cache_folder()


def test_a_folder_of_the_user_that_is_read_only_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTNC_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.warns(UserWarning, match="attnc is read-only; set ATTNC_CACHE_DIR"):
        assert not cache_folder().is_relative_to(tmp_path)


def test_what_could_not_be_written_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        store("VALUE = 4\n")
    assert not list(cache.iterdir())
