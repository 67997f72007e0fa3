"""Writing to output folders: files that attnc does not own are named and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from attnc.cli.console import Mistake, ask, count_noun, note, paint
from attnc.output import MANIFEST, Drift, Held, NotOurs

FORCE = Annotated[
    bool,
    typer.Option("--force", help="Replace and remove files that were edited, and write beside others'."),
]

_Result = TypeVar("_Result")
_WORDS: dict[Held, str] = {
    "edited": "edited since attnc wrote it",
    "unlisted": "not in the folder's manifest",
    "read-only": "read-only",
    "link": "a link",
    "other": "no file",
    "beyond": "a link or a file is on the way to it",
}
#: Files and entries of a folder that a message lists.
_LISTED = 12


def reason(drift: Drift) -> str:
    """Returns why attnc leaves a file as it is, in words to follow its path; "" where it does not."""
    return f" ({_WORDS[drift.held]})" if drift.held else ""


def write_or_refuse(write: Callable[..., _Result], out: Path, *, force: bool | None) -> _Result:
    """Calls `write(force=..., beside=...)`, which writes to a folder. Where that holds what is others' alone,
    asks on a terminal. Raises Mistake where something is in the way. force: None where the command has no
    such option.
    """
    try:
        return write(force=bool(force), beside=False)
    except NotOurs as refusal:
        if not refusal.others:
            raise _in_the_way(refusal.held, out, has_force=force is not None) from None
        names = ", ".join(refusal.others[:_LISTED]) + _rest(len(refusal.others))
        note(f"'{out}' holds files, and none that attnc has written: {names}")
        if not ask("Write to it, beside what is there?"):
            hint = "name a folder of its own"
            raise Mistake(
                f"'{out}' is not attnc's, and nothing was written to it",
                hint if force is None else f"{hint}, or write beside what is there with --force",
            ) from None
    try:
        return write(force=bool(force), beside=True)
    except NotOurs as refusal:
        raise _in_the_way(refusal.held, out, has_force=force is not None) from None


def refusing(write: Callable[[], _Result], out: Path) -> _Result:
    """Calls `write`, which writes to a folder beside others' files, for a command that has --force. Raises
    Mistake where something is in the way.
    """
    try:
        return write()
    except NotOurs as refusal:
        raise _in_the_way(refusal.held, out, has_force=True) from None


def holds_nothing(place: Path, but: bytes = b"") -> bool:
    """Returns whether something is there, and nothing would be lost with it: an empty file, one that holds
    `but`, or what is no file, such as a pipe.
    """
    return place.exists() and (not place.is_file() or place.read_bytes() in (b"", but))


def there_already(place: Path) -> Mistake:
    return Mistake(f"'{place}' is there already", "choose another name; --force writes over it")


def _in_the_way(held: tuple[Drift, ...], out: Path, *, has_force: bool) -> Mistake:
    for drift in held[:_LISTED]:
        note(paint("in the way", "33"), f" {out.as_posix()}/{drift.path}{reason(drift)}")
    if rest := _rest(len(held)):
        note(f"          {rest}")
    return Mistake(
        f"{count_noun(len(held), 'file')} in '{out}' would be lost, and nothing was written",
        _remedy(out, has_force=has_force),
    )


def _remedy(out: Path, *, has_force: bool) -> str:
    if not has_force:
        return "move them elsewhere, or name another folder"
    if not (out / MANIFEST).exists():
        return "where an older attnc has written them, replace them with --force, once; else move them"
    return "move them elsewhere, or replace them with --force"


def _rest(count: int) -> str:
    return f" and {count - _LISTED} more" if count > _LISTED else ""
