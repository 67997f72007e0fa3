"""Processes that die, or run out of disk, at each step that they take below a folder."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from tests.processes import forked

#: What a process does to files, as Python's audit hooks name it; `open` may be for reading.
_STEPS = (
    "open", "os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate",
    "os.utime",
)  # fmt: skip
_UNDISTURBED = 77


def killed(work: Callable[[Path], object], prepare: Callable[[], Path], stride: int = 1) -> Iterator[Path]:
    """Yields folders, each as a process left it that was killed before one of the steps of `work`: the first,
    the one a stride behind, and so on to the last.
    """
    yield from _disturbed(work, prepare, _kill, stride)


def out_of_disk(
    work: Callable[[Path], object], prepare: Callable[[], Path], stride: int = 1
) -> Iterator[Path]:
    """Yields folders, each after `work` for which the disk was full from one of its steps on, so that it
    raised an OSError which names the folder, or something in it.
    """

    def checked(folder: Path) -> None:
        failure = _failure_of(work, folder)
        if failure is None:  # no step that needs room was left
            os._exit(_UNDISTURBED)
        assert failure.errno == errno.ENOSPC
        assert Path(failure.filename).is_relative_to(folder)
        assert not Path(failure.filename).name.endswith(".tmp")

    yield from _disturbed(checked, prepare, _fill, stride)


def _failure_of(work: Callable[[Path], object], folder: Path) -> OSError | None:
    try:
        work(folder)
    except OSError as failure:
        return failure
    return None


def _kill(event: str, arguments: tuple[object, ...]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fill(event: str, arguments: tuple[object, ...]) -> None:
    needs_room = event in ("os.mkdir", "os.link") or (event == "open" and _is_for_writing(arguments))
    if needs_room:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), arguments[0])


def _is_for_writing(arguments: tuple[object, ...]) -> bool:
    flags = arguments[2]
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _disturbed(
    work: Callable[[Path], object],
    prepare: Callable[[], Path],
    disturb: Callable[[str, tuple[object, ...]], None],
    stride: int,
) -> Iterator[Path]:
    for last in count(step=stride):
        folder = prepare()

        def run(_: int, folder: Path = folder, last: int = last) -> None:
            left = last

            def watch(event: str, arguments: tuple[object, ...]) -> None:
                nonlocal left
                if event in _STEPS and str(folder) in str(arguments[0]):
                    left -= 1
                    if left < 0:
                        disturb(event, arguments)

            sys.addaudithook(watch)  # for the life of this process
            work(folder)
            if left >= 0:
                os._exit(_UNDISTURBED)

        (status,) = forked(1, run)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _UNDISTURBED:
            return
        assert status in (0, signal.SIGKILL), status
        yield folder
