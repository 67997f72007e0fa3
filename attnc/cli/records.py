"""The files of generated/ that are judged, and what is noted of them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnc.cli.console import Mistake

if TYPE_CHECKING:
    from attnc.verify.record import Record, Records
    from attnc.verify.search import Report

GENERATED = Path("generated")


def committed(name: str) -> str:
    """The text of a file below generated/. Raises Mistake where a record would say nothing."""
    from attnc.verify.subjects import has_gpu

    if not has_gpu():
        raise Mistake("a record needs a GPU", "run 'attnc verify' without --record to use the interpreter")
    path = GENERATED / name
    if not path.is_file():
        raise Mistake(f"there is no {path}", "run 'attnc compile' first, in the folder that holds generated/")
    return path.read_text(encoding="utf-8")


def committed_hash(name: str) -> str:
    """What a record calls the code of a file below generated/."""
    from attnc.verify.record import hash_of

    return hash_of(GENERATED / name)


def record_of(sha256: str, target: str, report: Report) -> Record:
    """What is noted of a file whose cases were all right. sha256: of its code."""
    from attnc.runtime.toolchains import toolchain_of
    from attnc.runtime.trial import device_name
    from attnc.verify.record import Record

    return Record(
        sha256=sha256,
        device=device_name(),
        toolchain=toolchain_of(target).version(),
        cases=report.examples,
        worst=round(report.worst, 4),
        where=report.where,
        met=_met(report),
    )


def _met(report: Report) -> Mapping[str, Sequence[int]]:
    """How many of how many points and pairs, and the points of the large tier."""
    found = report.coverage
    if found is None:
        return {}
    large = [n for met in found.boundaries if met.boundary.reach == "large" for n in met.met]
    return {"points": found.points, "pairs": found.pairs, **({"large": sorted(set(large))} if large else {})}


def update_records(change: Callable[[Records], Records]) -> Path:
    """Rewrites the file of records, without what it says of modules that are gone; returns its path."""
    from attnc.output import write_text
    from attnc.verify.record import NAME, dump, read

    try:
        known = read(GENERATED)
    except ValueError as error:
        raise Mistake(str(error), "restore it from version control") from None
    there = (path.relative_to(GENERATED).as_posix() for path in GENERATED.glob("*/*/*.py"))
    write_text(GENERATED / NAME, dump(change(known).only(there)))
    return GENERATED / NAME
