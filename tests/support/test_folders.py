"""Which folders are safe to run code from: those that nobody but the user can change."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnc.support import folders
from attnc.support.folders import named_path, others_can_write, private_folder

#: A user that no file of a test's belongs to by itself.
STRANGER = 12345


def give_away(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(path, STRANGER, -1, follow_symlinks=False)


def test_it_is_made_with_its_parents_and_private_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent)] == [0o700, 0o700]
    assert private_folder(made) == made


def test_a_relative_one_is_below_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert private_folder(Path("here")) == tmp_path / "here"
    assert private_folder(Path("here/../there")).is_dir()


def test_sticky_parents_are_open_to_all_and_safe(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    assert private_folder(tmp_path / "tmp" / "mine").is_dir()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_parents_that_others_can_write_to(mode: int, depth: int, tmp_path: Path) -> None:
    """Whoever writes to a parent can put another folder in its place."""
    folder = tmp_path / "a" / "b" / "c" / "mine"
    folder.mkdir(mode=0o700, parents=True)
    parent = folder.parents[depth]
    parent.chmod(mode)
    with pytest.raises(PermissionError, match=f"others can write to {parent}; set ATTNC_CACHE_DIR"):
        private_folder(folder)
    with pytest.raises(PermissionError):
        private_folder(parent / "new")
    assert not (parent / "new").exists()


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_parents_of_somebody_else(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "theirs" / "mine"
    folder.mkdir(mode=0o700, parents=True)
    folder.parent.chmod(mode)
    give_away(folder.parent)
    with pytest.raises(PermissionError, match=f"theirs belongs to another user .{STRANGER}"):
        private_folder(folder)


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_folders_of_somebody_else(mode: int, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode)
    give_away(tmp_path / "theirs")
    with pytest.raises(PermissionError, match=f"theirs belongs to another user .{STRANGER}"):
        private_folder(tmp_path / "theirs")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o720, 0o702])
def test_folders_that_others_can_write_to(mode: int, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine").chmod(mode)
    with pytest.raises(PermissionError, match="mine is not private: others can write to it; remove it"):
        private_folder(tmp_path / "mine")


def test_links_to_a_folder_are_refused_and_links_above_it_followed(tmp_path: Path) -> None:
    """A home on another disk is a link, and as safe as what it leads to."""
    (tmp_path / "disk" / "home").mkdir(parents=True)
    for name, to in {"absolute": str(tmp_path / "disk"), "relative": "disk/../disk"}.items():
        (tmp_path / name).symlink_to(to)
        assert private_folder(tmp_path / name / "home" / "mine").is_dir()
        with pytest.raises(PermissionError, match=f"{name} is a link"):
            private_folder(tmp_path / name)
    (tmp_path / "disk").chmod(0o777)
    with pytest.raises(PermissionError, match=f"others can write to {tmp_path}/disk"):
        private_folder(tmp_path / "absolute" / "home" / "mine")


def test_links_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    give_away(tmp_path / "link")
    with pytest.raises(PermissionError, match=f"link belongs to another user .{STRANGER}"):
        private_folder(tmp_path / "link" / "mine")


@pytest.mark.parametrize("links", [{"a": "b", "b": "a"}, {"a": "a/a"}])
def test_links_that_lead_nowhere(links: dict[str, str], tmp_path: Path) -> None:
    for name, to in links.items():
        (tmp_path / name).symlink_to(to)
    with pytest.raises(PermissionError, match="is a link"):
        private_folder(tmp_path / "a" / "mine")


@pytest.mark.parametrize(("path", "message"), [("file", "is no folder"), ("file/mine", "Not a directory")])
def test_files_in_the_place_of_folders(path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match=message):
        private_folder(tmp_path / path)


@pytest.mark.parametrize(
    ("user", "members", "others"),
    [("ann", [], False), ("ann", ["ann"], False), ("ann", ["bob"], True), ("staff", [], True)],
)
def test_a_group_of_the_user_alone_is_nobody_else(
    user: str, members: list[str], others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many systems give each user such a group, and let it write to what the user makes."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_gid=1000, pw_name="ann"))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=user, gr_mem=members))

    def found(mode: int) -> os.stat_result:
        return os.stat_result((mode, 1, 1, 1, 1000, 1000, 0, 0, 0, 0))

    assert others_can_write(found(0o770)) is others
    assert others_can_write(found(0o772))
    assert not others_can_write(found(0o755))


@pytest.mark.parametrize(
    ("ids", "system"),
    [
        ("0 0 4294967295\n", {0}),  # no container
        ("1000 1000 1\n", {0, 65534}),  # of one user: what is root's shows as nobody's
        ("0 1000 1\n1 100000 999\n", {0, 65534}),
        ("0 1000 1\n1 100000 65536\n", {0}),  # nobody is a user of its own
        ("unreadable", {0}),
    ],
)
def test_root_outside_of_a_container(ids: str, system: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path, **_: object) -> str:
        return ids if path.name == "uid_map" else "65534\n"

    monkeypatch.setattr(Path, "read_text", read)
    assert folders._system_users.__wrapped__() == system


def test_a_tilde_is_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/me")
    assert [named_path(text) for text in ("~", "~/x")] == [Path("/srv/me"), Path("/srv/me/x")]
    assert named_path(Path("a/~/x")) == Path("a/~/x")
    assert named_path("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")


def test_a_group_without_a_name_is_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(grp, "getgrgid", look)
    assert others_can_write(os.stat_result((0o770, 1, 1, 1, 1000, 1000, 0, 0, 0, 0)))


def test_another_process_may_make_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, other = Path.mkdir, list[Path]()

    def after_another(path: Path, *given: Any, **options: Any) -> None:
        if not path.exists():
            other.append(path)
            make(path, mode=0o700)
        make(path, *given, **options)

    monkeypatch.setattr(Path, "mkdir", after_another)
    made = tmp_path / "a" / "b"
    assert private_folder(made) == made
    assert other == [made.parent, made]


def test_a_profile_is_private_where_there_are_no_numbers_of_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "geteuid")
    for _ in range(2):
        assert private_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
