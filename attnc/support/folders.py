"""Folders that only the user can change. Code is run or loaded from such folders only."""

import functools
import os
import stat
from pathlib import Path

#: Links that a path may lead through; Linux allows as many.
_MOST_LINKS = 40
_ELSEWHERE = "set ATTNC_CACHE_DIR to a folder of yours"
_REMEDY = "remove it or set ATTNC_CACHE_DIR"


def named_path(given: str | os.PathLike[str]) -> Path:
    """Returns the path that a user has written: `~` is their home, also where no shell has put it in. One
    that begins with the name of no user is as it is written.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError:
        return Path(given)


def private_folder(folder: Path) -> Path:
    """Returns the folder as an absolute path. It and its parents are made with mode 0700 where they are not
    there.

    PermissionError where somebody else could change what is in it: where it is a link, or it or a parent
    belongs to another user or can be written to by others. Parents may be root's; one that others can write
    to has to be sticky, as /tmp is, so that they cannot put a folder of theirs in the place of the user's.
    Links among the parents are followed, and what they lead to is checked in the same way.
    """
    folder = folder.absolute()
    if not hasattr(os, "geteuid"):  # Windows, where a profile is private to its user
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    place, left, links = Path(folder.anchor), [*folder.parts[:0:-1]], 0
    while left:
        _check_parent(place, folder)
        part = left.pop()
        if part == "..":
            place = place.parent
            continue
        step = place / part
        found = _make(step, folder)
        if not stat.S_ISLNK(found.st_mode):
            place = step
            continue
        links += 1
        if not left or links > _MOST_LINKS:
            raise PermissionError(f"{folder} is a link; {_REMEDY}")
        _check_owner(found, step, folder)
        target = step.readlink()
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        place = Path(target.anchor) if target.is_absolute() else place
    _check_own(place, folder)
    return folder


def others_can_write(found: os.stat_result) -> bool:
    """Returns whether a mode lets anybody but the owner write. A group that has the owner alone in it, as
    many systems give each user, is nobody else.
    """
    return bool(found.st_mode & 0o002) or (bool(found.st_mode & 0o020) and not _is_own_group(found.st_gid))


def _make(step: Path, folder: Path) -> os.stat_result:
    try:
        try:
            return step.lstat()
        except FileNotFoundError:
            step.mkdir(mode=0o700, exist_ok=True)  # another process may make the same
            return step.lstat()
    except OSError as failure:
        raise PermissionError(f"{folder} cannot be made ({failure.strerror}); {_ELSEWHERE}") from failure


def _check_parent(place: Path, folder: Path) -> None:
    found = place.stat()
    _check_owner(found, place, folder)
    if others_can_write(found) and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(f"{folder} is not private: others can write to {place}; {_ELSEWHERE}")


def _check_owner(found: os.stat_result, place: Path, folder: Path) -> None:
    if found.st_uid not in {os.geteuid(), *_system_users()}:
        owner = f"{place} belongs to another user ({found.st_uid})"
        raise PermissionError(f"{folder} is not private: {owner}; {_ELSEWHERE}")


def _check_own(place: Path, folder: Path) -> None:
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode):
        wrong = "is no folder"
    elif found.st_uid != os.geteuid():
        wrong = f"belongs to another user ({found.st_uid})"
    elif others_can_write(found):
        wrong = "is not private: others can write to it"
    else:
        return
    raise PermissionError(f"{folder} {wrong}; {_REMEDY}")


@functools.cache
def _system_users() -> frozenset[int]:
    """Returns who owns what comes with the system: root, and in a container that has no number for the root
    outside of it, whom it shows in its place.
    """
    try:
        rows = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
        shown = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
        ranges = [tuple(map(int, row.split())) for row in rows]
        knows_root = any(outside == 0 for _, outside, _ in ranges)
        is_taken = any(inside <= shown < inside + count for inside, _, count in ranges)
    except (OSError, ValueError):  # not Linux
        return frozenset({0})
    return frozenset({0} if knows_root or is_taken else {0, shown})


def _is_own_group(group: int) -> bool:
    if os.geteuid() == 0:  # the group of root has other users in it on some systems
        return False
    try:
        import grp
        import pwd

        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except (ImportError, KeyError):
        return False
    is_first = user.pw_gid == group and found.gr_name == user.pw_name
    return is_first and set(found.gr_mem) <= {user.pw_name}
