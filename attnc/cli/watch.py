"""Files that change while somebody watches: `attnc compile --watch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from attnc.cli.console import Mistake, find_specs, note

#: What is compared of a file: it is another text if one of these differs.
_Stamp: TypeAlias = tuple[int, int, int] | None

_SECONDS = 0.25


def changes(
    find: Callable[[], Iterable[Path]], wait: Callable[[], None] = lambda: time.sleep(_SECONDS)
) -> Iterator[tuple[tuple[Path, ...], tuple[Path, ...]]]:
    """(written, removed) each time that files are, without end.

    find: the files as they are now; wait: returns when it is time to look again. A file that is being
    replaced, as editors do, counts when it is whole: what cannot be read is not there.
    """
    before = _stamps(find())
    while True:
        wait()
        now = _stamps(find())
        written = tuple(path for path, stamp in now.items() if before.get(path) != stamp)
        removed = tuple(path for path in before if path not in now)
        before = now
        if written or removed:
            yield written, removed


def _stamps(paths: Iterable[Path]) -> dict[Path, _Stamp]:
    stamps: dict[Path, _Stamp] = {}
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        stamps[path] = (status.st_mtime_ns, status.st_size, status.st_ino)
    return stamps


def watch_specs(specs: Sequence[Path] | None, compile_again: Callable[[tuple[Path, ...]], None]) -> None:
    """Hands over all specs meant, then those that change or whose measurements do, until Ctrl-C.

    Where one is removed it hands over all that are left. Raises Mistake if there is none at the start.
    """
    from attnc.build import dispatch_path, tuned_path

    def belonging(path: Path) -> tuple[Path, Path, Path]:
        return path, tuned_path(path), dispatch_path(path)

    def present() -> tuple[Path, ...]:
        try:
            return find_specs(specs or [])
        except Mistake:  # between the removal of a file and its return
            return ()

    compile_again(find_specs(specs or []))
    note("watching; Ctrl-C ends it")
    try:
        for written, removed in changes(lambda: [file for path in present() for file in belonging(path)]):
            touched = tuple(path for path in present() if removed or set(belonging(path)) & set(written))
            if touched:
                compile_again(touched)
    except KeyboardInterrupt:
        note("stopped")
