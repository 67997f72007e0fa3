"""Talking to the user: results to stdout, everything else to stderr, colour and progress bars only on
terminals.

Names of files and what is in them may come from anywhere. So nothing is printed but by the functions here:
what could steer a terminal is shown as its number (`visible`), and there are no colours but those of `paint`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from attnc.diagnostics import Diagnostic, render, suggest
from attnc.effort import watch_pieces
from attnc.files import strict_json
from attnc.resources import resource
from attnc.source import STDIN, visible

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


_NAME_ONE = "name a spec file, such as my.attn"


class Mistake(Exception):
    """Wrong usage, in one line, with what to do instead. Exit code 2."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def has_color(stream: TextIO) -> bool:
    """Returns whether ANSI colours are welcome there (see no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@dataclass(frozen=True, slots=True)
class Painted:
    """Text in an ANSI colour by its code ("1;32"), where the stream is a terminal."""

    text: str
    style: str


def paint(text: str, style: str) -> Painted:
    """Gives a text a colour, by its ANSI code, where it goes to a terminal."""
    return Painted(text, style)


def say(*parts: str | Painted) -> None:
    """Prints a line of the result."""
    _write(sys.stdout, _line(parts, sys.stdout))


def say_lines(text: str) -> None:
    """Prints a result of several lines: JSON, a table, an explanation."""
    _write(sys.stdout, visible(text, keep="\n"))


def say_json(data: object) -> None:
    """Prints data for programs."""
    say_lines(strict_json(data))


def say_exactly(text: str) -> None:
    """Prints a text that a program reads byte by byte as UTF-8; on a terminal as everything else."""
    if sys.stdout.isatty():
        _write(sys.stdout, visible(text, keep="\n").removesuffix("\n"))
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())


def note(*parts: str | Painted) -> None:
    """Prints a line about the work, which a program that reads the result does not want."""
    _write(sys.stderr, _line(parts, sys.stderr))


def _line(parts: Iterable[str | Painted], stream: TextIO) -> str:
    color = has_color(stream)
    return "".join(
        visible(part)
        if isinstance(part, str)
        else f"\x1b[{part.style}m{visible(part.text)}\x1b[0m"
        if color
        else visible(part.text)
        for part in parts
    )


def _write(stream: TextIO, text: str) -> None:
    """Writes the text and a line end, in what the stream can encode: a C locale must not make an error of
    it.
    """
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, errors="replace").decode(encoding) + "\n")


def complain(message: str, hint: str = "") -> None:
    """Prints an error and what to do about it to stderr."""
    note(paint("error", "1;31"), f": {message}")
    if hint:
        note(f"   = help: {hint}")


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Prints what `warnings.warn` was given, as other messages are printed: in place of
    `warnings.showwarning`.
    """
    note(paint("warning", "1;33"), f": {message}")


def ask(question: str) -> bool:
    """Returns whether the user says yes; no without a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(f"{visible(question)} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def show_diagnostics(diagnostics: Iterable[Diagnostic], *, brief: bool = False) -> None:
    """Renders them; `brief`: warnings in a line each, since `attnc check` shows them whole."""
    color = has_color(sys.stderr)
    for diagnostic in diagnostics:
        if brief and diagnostic.severity != "error":
            code = paint(f"warning[{diagnostic.code}]", "1;33")
            note(f"{diagnostic.primary.span}: ", code, f": {diagnostic.message}")
        else:  # the renderer shows what it quotes as `visible` does
            _write(sys.stderr, render([diagnostic], color=color).removesuffix("\n"))


def find_specs(paths: Sequence[Path], *, reads_stdin: bool = False) -> tuple[Path, ...]:
    """Returns the spec files meant, each once: those named, those in the folders named, or those in specs/;
    or `-` alone, where the command reads it. Raises Mistake.
    """
    if reads_stdin and STDIN in paths:
        if len(paths) > 1:
            raise Mistake("'-' is standard input, and goes with no file", "read one after the other")
        return (STDIN,)
    if not paths and not Path("specs").is_dir():
        raise Mistake(
            "there is no folder 'specs' here", f"{_NAME_ONE}; 'attnc new NAME --like window' writes one"
        )
    found: list[Path] = []
    for path in paths or (Path("specs"),):
        if path.is_dir():
            # a link to nothing is said; what is no file, such as a pipe, has no end
            files = sorted(file for file in path.glob("*.attn") if file.is_file() or not file.exists())
            inside = [file for file in files if not file.name.startswith(".")]  # an editor's, or put away
            if not inside:
                raise Mistake(f"no .attn files in folder '{path}'", "name another folder, or a spec file")
            found += map(one_spec, inside)
        else:
            found.append(one_spec(path))
    by_place: dict[str, Path] = {}
    for path in found:
        by_place.setdefault(os.path.abspath(path), path)  # noqa: PTH100  # which takes out ".." and follows no link
    return tuple(by_place.values())


def one_spec(path: Path) -> Path:
    """Returns the path of a spec file, if it is one that can be read. Raises Mistake."""
    if path == STDIN:
        raise Mistake("'-' is standard input, which only check and fmt read", _NAME_ONE)
    if path.is_dir():
        raise Mistake(f"'{path}' is a folder", "name one spec file")
    if path.is_symlink() and not path.exists():
        raise Mistake(f"'{path}' is a link to nothing", f"it points to '{path.readlink()}'")
    if not path.exists():
        folders = (Path("specs"), path.parent)  # the latter's where both have one of a name
        specs = (other for folder in folders for other in folder.glob("*.attn") if other.is_file())
        beside = {other.name: str(other) for other in specs}
        found = suggest(path.name, beside)
        hint = f"did you mean '{beside[found]}'?" if found else _NAME_ONE
        if not found and path.suffix == ".attn" and (resource("specs") / path.name).is_file():
            hint = f"it is one of attnc's own: 'attnc new {path.stem} --like {path.stem}' writes it to specs/"
        raise Mistake(f"there is no file '{path}'", hint)
    return path


def without_kernels(specs: str, schedules: int) -> Mistake:
    """Returns the message about specs whose schedules, as many as that, make no kernel."""
    if schedules:
        return Mistake(f"no schedule of {specs} is compiled yet", "'attnc check' says why")
    return Mistake(f"no schedule in {specs}", "add one: schedule NAME for triton { ... }")


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Progress]:
    """Shows a bar on stderr while the block runs (total None: of unknown length), which also counts what the
    compiler announces and finishes; nothing where there is no terminal.
    """
    if not sys.stderr.isatty():
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import Progress as RichBar

    with RichBar(console=Console(stderr=True), transient=True) as bar:
        shown = Progress(bar, bar.add_task(_label(label), total=total))
        with watch_pieces(shown.watch):
            yield shown


@contextmanager
def loading() -> Iterator[None]:
    """Says on terminals that something is on its way: importing PyTorch takes seconds, and so does g++."""
    with progress("loading", None):
        yield


def split_commas(text: str) -> list[str]:
    """Splits a list of an option, `64, 128`, at its commas; empty parts are left out."""
    return [part.strip() for part in text.split(",") if part.strip()]


def count_noun(number: int, noun: str) -> str:
    """Says a number of things: `1 file`, `3 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class Progress:
    """What `progress` hands to its block."""

    def __init__(self, bar: Bar | None = None, task: TaskID | None = None) -> None:
        self._bar = bar
        self._task = task

    def advance(self, label: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, description=_label(label))

    def watch(self, announced: int, finished: str) -> None:
        if self._bar is None or self._task is None:
            return
        if finished:
            self.advance(finished)
        elif (total := self._bar.tasks[self._task].total) is not None:
            self._bar.update(self._task, total=total + announced)


def _label(text: str) -> str:
    from rich.markup import escape

    return escape(visible(text))
