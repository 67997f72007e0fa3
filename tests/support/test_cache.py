"""The cache of what was compiled: entries that are checked when they are read, and made again."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attnc.support import cache as caching
from attnc.support.cache import (
    cache_folder,
    kept_entry,
    own_folder,
    read_private,
    read_sealed,
    seal_bytes,
    store_bytes,
    unseal_bytes,
)
from tests.processes import forked
from tests.support.test_folders import STRANGER, give_away


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(folder))
    return folder


def test_a_tilde_in_the_variable_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ATTNC_CACHE_DIR", "~/kept")
    assert cache_folder() == tmp_path / "home" / "kept"
    assert not (tmp_path / "~").exists()


class Maker:
    """What makes an entry, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return b"payload"


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def _flipped_in_its_seal(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def _folder(path: Path) -> None:
    path.unlink()
    (path / "within").mkdir(parents=True)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _broken_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _open_to_others(path: Path) -> None:
    path.chmod(0o622)


def _another_entry(path: Path) -> None:
    path.write_bytes(seal_bytes("another", b"of another"))


#: What happens to files; `give_away` makes one another user's.
DAMAGES: tuple[Callable[[Path], None], ...] = (
    _truncated, _halved, _flipped, _flipped_in_its_seal, _empty, _longer, _folder, _link, _broken_link, _pipe,
    _open_to_others, _another_entry, give_away,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_entry_that_is_not_what_was_written_is_made_again(
    damage: Callable[[Path], None], cache: Path
) -> None:
    make = Maker()
    path = kept_entry("name.so", make).path
    assert kept_entry("name.so", make) == (path, b"payload")
    assert make.calls == 1
    damage(path)
    assert kept_entry("name.so", make) == (path, b"payload")
    assert make.calls == 2
    assert read_sealed(path) == b"payload"
    assert kept_entry("name.so", make).payload == b"payload"
    assert make.calls == 2
    assert [left.name for left in cache.iterdir() if left.name != "elsewhere"] == ["name.so"]


def test_an_entry_that_cannot_be_read_is_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker()
    kept_entry("name.so", make)
    original = os.open

    def refusing(path: Path, flags: int, *mode: int) -> int:
        if not flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    kept_entry("name.so", make)
    monkeypatch.undo()
    assert make.calls == 2
    assert read_sealed(cache / "name.so") == b"payload"


def test_a_seal_is_of_a_name_and_a_payload() -> None:
    for payload in (b"", b"\n", seal_bytes("inner", b"x"), b"\0" * 1000):
        assert unseal_bytes("a", seal_bytes("a", payload)) == payload
        assert unseal_bytes("b", seal_bytes("a", payload)) is None
        assert unseal_bytes("a", payload) is None


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_where_nothing_can_be_written(
    code: int, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, a read-only folder: an error where the user has named it, else a folder of the process."""
    monkeypatch.setattr(caching, "_own_folder_because", caching._own_folder_because.__wrapped__)
    monkeypatch.setenv("ATTNC_CACHE_DIR" if is_named else "XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME" if is_named else "ATTNC_CACHE_DIR", raising=False)
    original = os.fdopen

    def failing(path: Path, content: bytes, *rest: object) -> None:
        if path.is_relative_to(tmp_path):
            raise OSError(code, os.strerror(code), str(path))
        with original(os.open(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.write(content)

    monkeypatch.setattr(caching, "store_bytes", failing)
    if is_named:
        with pytest.raises(OSError, match=os.strerror(code)):
            kept_entry("name.so", Maker())
        return
    with pytest.warns(UserWarning, match=f"attnc cannot be written .{os.strerror(code)}(.|\n)*compiles anew"):
        path, payload = kept_entry("name.so", Maker())
    assert (payload, path.parent) == (b"payload", own_folder())
    assert not any((tmp_path / "attnc").iterdir())


def test_a_file_that_is_not_whole_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, handle: int, *_: object) -> None:
            self.handle = handle

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            os.close(self.handle)

        def write(self, content: bytes) -> None:
            os.write(self.handle, content[:2])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdopen", Full)
    with pytest.raises(OSError, match="No space left"):
        store_bytes(tmp_path / "name", b"content")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("before", [_empty, _folder, _link, _broken_link, _pipe, give_away])
def test_a_file_takes_the_place_of_whatever_is_there(before: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "name"
    path.write_bytes(b"before")
    before(path)
    store_bytes(path, b"content")
    assert read_private(path) == b"content"
    assert path.stat().st_mode & 0o777 == 0o600
    assert {left.name: left.read_bytes() for left in tmp_path.iterdir()} in (
        {"name": b"content"},
        {"name": b"content", "elsewhere": b"before"},  # where a link led to
    )


def test_what_killed_processes_left_goes_after_a_day(tmp_path: Path) -> None:
    left = {name: tmp_path / f".attnc-{name}.tmp" for name in ("old", "new", "folder")}
    left["folder"].mkdir()
    for name in ("old", "new"):
        left[name].write_bytes(b"half")
    for name in ("old", "folder"):
        os.utime(left[name], (time.time() - 2 * 24 * 3600,) * 2)
    store_bytes(tmp_path / "name", b"content")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".attnc-new.tmp", "name"]


# --- folders ------------------------------------------------------------------------------------------------


def test_a_home_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container whose user has no name: there is a folder all the same, of the process."""
    for name in ("ATTNC_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(caching, "_own_folder_because", caching._own_folder_because.__wrapped__)

    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.warns(UserWarning, match="the user has no home; set ATTNC_CACHE_DIR"):
        assert cache_folder() == own_folder()


def test_a_relative_folder_of_the_desktop_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTNC_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "attnc"


def test_a_parent_that_others_can_write_to_is_refused_where_the_user_named_it(cache: Path) -> None:
    cache.parent.chmod(0o777)
    with pytest.raises(PermissionError, match=f"others can write to {cache.parent}"):
        cache_folder()
    assert not cache.exists()


@pytest.mark.parametrize("change", [lambda path: path.chmod(0o777), give_away])
def test_the_folder_of_a_process_is_in_a_safe_one(
    change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """$TMPDIR may be a folder in which others rename what is there."""
    shared = tmp_path / "shared"
    shared.mkdir()
    change(shared)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    found = caching.own_folder.__wrapped__()
    assert not found.is_relative_to(shared)
    assert not list(shared.iterdir())
    assert STRANGER not in (found.stat().st_uid, found.parent.stat().st_uid)


def test_folders_of_processes_that_were_killed_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of processes that live do not, whoever of a family of forked ones lives."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make = caching.own_folder.__wrapped__
    reading, writing = os.pipe()

    def make_and_die(_: int) -> None:
        folder = make()
        (folder / "library.so").write_text("x")
        os.kill(os.getpid(), signal.SIGKILL)

    def make_and_leave_a_child(_: int) -> None:
        make()
        if os.fork() == 0:
            os.close(writing)
            os.read(reading, 1)  # until this process closes its end
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked(1, make_and_die) == [signal.SIGKILL]
    assert len(list(tmp_path.iterdir())) == 1
    own = make()
    assert list(tmp_path.iterdir()) == [own]
    assert forked(1, make_and_leave_a_child) == [signal.SIGKILL]
    (tmp_path / "attnc-process-link").symlink_to(own)
    (tmp_path / "attnc-process-file").write_text("mine")
    assert forked(1, lambda _: make()) == [0]  # of which the folder stays, since it does not end as others do
    assert len([path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]) == 3
    assert own.is_dir()
    os.close(writing)
    os.close(reading)


def test_a_folder_that_was_taken_for_one_that_is_left_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock, taken = caching._lock_own, list[Path]()

    def late(folder: Path) -> int | None:
        if not taken:
            taken.append(folder)
            folder.rmdir()
        return lock(folder)

    monkeypatch.setattr(caching, "_lock_own", late)
    folder = caching.own_folder.__wrapped__()
    assert list(tmp_path.iterdir()) == [folder]
    assert taken != [folder]


def test_a_forked_process_leaves_the_folder_to_the_one_that_made_it() -> None:
    program = """if True:
        import os, sys
        from attnc.support.cache import own_folder
        folder = own_folder()
        if (child := os.fork()) == 0:
            sys.exit()
        os.waitpid(child, 0)
        print(folder.is_dir(), folder)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    is_there, folder = done.stdout.split()
    assert is_there == "True"
    assert not Path(folder).exists()


def test_a_file_is_there_at_every_moment_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "name", list[bytes]()
    store_bytes(path, b"before")
    replace = Path.replace

    def look(self: Path, target: Path) -> Path:
        seen.append(path.read_bytes())
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look)
    store_bytes(path, b"behind")
    assert seen == [b"before"]
    assert path.read_bytes() == b"behind"
