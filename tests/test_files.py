"""Writing files of the user: in one step, and never over what is somebody's."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from attnc.files import (
    SavedMeanwhile,
    create_text,
    leftovers,
    locked,
    read_regular,
    replace_file,
    temporary_name,
    update_text,
    write_text,
)
from tests.faults import killed, out_of_disk
from tests.processes import forked


def test_a_file_is_replaced_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    write_text(path, "one\n")
    path.chmod(0o640)
    write_text(path, "two\n")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("two\n", 0o640)
    assert list(path.parent.iterdir()) == [path]


def test_a_file_of_attnc_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"one", b"two"):
        replace_file(path, content)
        assert path.read_bytes() == content
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="file"):
        replace_file(path, b"three")
    assert [*tmp_path.iterdir()] == [path]


def test_what_a_link_leads_to_is_written(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to("file")
    for text in ("one", "two"):
        write_text(link, text)
        assert (link.is_symlink(), path.read_text()) == (True, text)


def test_a_read_only_file_stays(tmp_path: Path) -> None:
    """To root, too."""
    path = tmp_path / "file"
    path.write_text("mine")
    path.chmod(0o444)
    with pytest.raises(PermissionError, match="read-only") as raised:
        write_text(path, "new")
    assert raised.value.filename == str(path)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("mine", [path])


def test_what_was_saved_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    for seen in (b"", b"min", b"mine\n"):
        with pytest.raises(SavedMeanwhile, match="file' was saved meanwhile"):
            write_text(path, "new", instead_of=seen)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("mine", [path])
    write_text(path, "new", instead_of=b"mine")
    assert path.read_text() == "new"
    path.unlink()
    with pytest.raises(SavedMeanwhile):
        write_text(path, "newer", instead_of=b"new")
    assert not path.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link", "link to nothing"])
def test_nothing_is_created_over_what_is_there(kind: str, tmp_path: Path) -> None:
    path, other = tmp_path / "path", tmp_path / "other"
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("other")
    if kind == "link":
        other.write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileExistsError):
        create_text(path, "new")
    assert sorted(tmp_path.iterdir()) == before
    assert "new" not in {path.read_text() for path in before if path.is_file()}


def test_a_file_is_created_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    create_text(tmp_path / "file", "text")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["text"]
    with pytest.raises(FileExistsError):
        create_text(tmp_path / "file", "another")


@pytest.mark.parametrize("write", [write_text, create_text])
def test_a_process_that_is_killed_leaves_a_whole_file(
    write: Callable[[Path, str], None], tmp_path: Path
) -> None:
    numbers = count()
    old = "old" if write is write_text else None

    def prepare() -> Path:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        if old:
            (folder / "file").write_text(old)
        return folder

    def text_in(folder: Path) -> str | None:
        path = folder / "file"
        return path.read_text() if path.exists() else None

    left = list(killed(lambda folder: write(folder / "file", "new"), prepare))
    assert len(left) > 2
    assert any(map(leftovers, left))
    assert {text_in(folder) for folder in left} == {old, "new"}
    for folder in left:
        write_text(folder / "another", "text")
        assert not leftovers(folder)
    for folder in out_of_disk(lambda folder: write(folder / "file", "new"), prepare):
        assert (text_in(folder), leftovers(folder)) == (old, [])


def test_eight_processes_update_a_file_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_text("")
    assert forked(8, lambda n: update_text(path, lambda: f"{path.read_text()}{n}\n")) == [0] * 8
    assert sorted(path.read_text().split()) == [str(n) for n in range(8)]


def test_a_folder_is_locked_while_a_file_is_updated(tmp_path: Path) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)

    def change() -> str:
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "text"

    update_text(tmp_path / "file", change)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)


def test_where_there_are_no_locks_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path), locked(tmp_path):
        write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "path"
    assert read_regular(path) is None
    path.write_bytes(b"content")
    assert read_regular(path) == b"content"
    assert read_regular(path / "below") is None
    (tmp_path / "link").symlink_to(path)
    assert read_regular(tmp_path / "link") is None
    assert read_regular(tmp_path) is None
    os.mkfifo(tmp_path / "pipe")
    assert read_regular(tmp_path / "pipe") is None


def test_names_of_temporary_files_differ_in_forked_processes(tmp_path: Path) -> None:
    def make(_: int) -> None:
        temporary_name(tmp_path).mkdir()

    assert forked(8, make) == [0] * 8
    assert len(leftovers(tmp_path)) == 8
