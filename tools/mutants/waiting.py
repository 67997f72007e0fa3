"""Whether a process that says nothing is still worth waiting for: by what it and those below it do, and no
clock. Who is ready and has no processor, on a busy machine, is waited for however long it takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: Seconds between two looks.
GLANCE = 2.0
#: Looks in turn that find all of them asleep, after which they wait for what does not come.
_LOOKS = 45
#: Processor seconds between two looks, below which they slept.
_ASLEEP = 0.1


@dataclass(slots=True)
class _Process:
    """What Linux says of a process. seconds: of processors, with those of its children that have ended."""

    number: int
    parent: int
    session: int
    state: str
    seconds: float

    @property
    def is_ready(self) -> bool:
        """Whether one of its threads runs, waits for a processor, or for a disk."""
        return any(thread.state in ("R", "D") for thread in _read_stats(Path(f"/proc/{self.number}/task")))


class Watch:
    """Looks at a child and what runs below it. limit: processor seconds that they may use from now on."""

    def __init__(self, child: int, limit: float) -> None:
        self.child, self.slept = child, 0
        self.seconds = sum(each.seconds for each in self.list_family())
        self.most = self.seconds + limit

    def is_in_vain(self) -> bool:
        """Looks again, and returns whether nothing comes any more: the child has ended, all of them have
        slept at each of many looks, or they have used up their processor seconds.
        """
        family = self.list_family()
        seconds = sum(process.seconds for process in family)
        is_asleep = abs(seconds - self.seconds) < _ASLEEP and not any(each.is_ready for each in family)
        self.slept = self.slept + 1 if is_asleep else 0
        self.seconds = seconds
        has_ended = any(each.number == self.child and each.state == "Z" for each in family)
        return has_ended or self.slept >= _LOOKS or seconds > self.most

    def list_family(self) -> list[_Process]:
        """Lists the child, the processes of its session, and all that these have begun."""
        processes = list(_read_stats(Path("/proc")))
        found = {self.child} | {each.number for each in processes if each.session == self.child}
        count = 0
        while count != len(found):
            count = len(found)
            found |= {each.number for each in processes if each.parent in found}
        return [each for each in processes if each.number in found]


def _read_stats(folder: Path) -> Iterator[_Process]:
    """Yields the processes, or the threads, of a folder of /proc."""
    tick = os.sysconf("SC_CLK_TCK")
    with suppress(OSError):
        for place in folder.iterdir():
            if not place.name.isdecimal():
                continue
            with suppress(OSError):  # it has ended
                text = (place / "stat").read_text(encoding="utf-8", errors="replace")
                state, *numbers = text.rpartition(")")[2].split()
                seconds = sum(map(int, numbers[10:14])) / tick
                yield _Process(int(place.name), int(numbers[0]), int(numbers[2]), state, seconds)
