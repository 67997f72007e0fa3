"""Runs every command on hostile files, in this process: no traceback, nothing raw on the terminal, no word of
a spec outside comments and literals of what is generated.

The suite runs a few. This runs many, and goes on where it was interrupted:

    python -m tests.hostile.run --count 20000 --workers 8 --folder /tmp/hostile

A log of every 250 files is in the folder. A run goes on with the logs that it finds there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import typer

from attnc.effort import watch_pieces
from tests.hostile.files import MARK, ROOT, HostileFile, hostile_file
from tests.tokens import tokens_of

COMMANDS = {
    "check": ("check", "--", "{}"),
    "fmt --diff": ("fmt", "--diff", "--", "{}"),
    "explain": ("explain", "--no-compile", "--", "{}"),
    "compile": ("compile", "--out", "out", "--", "{}"),
    "fmt": ("fmt", "--", "{}"),
}


@dataclass(slots=True)
class Finding:
    """What a command did that it must not: a traceback, raw text on the terminal, a token in what it made, no
    explanation and no module ("late") of what `attnc check` accepts.
    """

    what: str
    command: str
    detail: str


@dataclass(slots=True)
class Outcome:
    findings: list[Finding] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    #: Attentions, variants and texts that a command announced: it may take a tenth of a second for each.
    pieces: dict[str, int] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)


_SECONDS_PER_PIECE = 0.1
#: Files that share a log.
_LOGGED = 250


class _Stopped(BaseException):
    """A command took too long to wait for its end."""


def check_file(
    file: HostileFile, folder: Path, *, commands: Iterable[str] = COMMANDS, patience: float | None = None
) -> Outcome:
    """Runs commands on a file, in an empty folder of its own. patience: CPU seconds until one is stopped."""
    outcome = Outcome()
    spec = folder / file.name
    spec.write_bytes(file.data)
    before = Path.cwd()
    os.chdir(folder)
    try:
        for name in commands:
            arguments = [argument.replace("{}", file.name) for argument in COMMANDS[name]]
            _run_one(outcome, name, arguments, patience)
            if name == "compile":
                outcome.findings += _foreign_tokens(Path("out"))
            if name in ("explain", "compile") and (outcome.codes.get("check"), outcome.codes[name]) == (0, 1):
                outcome.findings.append(Finding("late", name, "what check accepts is explained and compiled"))
    finally:
        os.chdir(before)
    return outcome


def _run_one(outcome: Outcome, name: str, arguments: list[str], patience: float | None) -> None:
    from attnc.cli import main

    out, err = io.StringIO(), io.StringIO()
    pieces: list[int] = []
    start = time.process_time()
    try:
        with (
            _alarm(patience),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.dict(os.environ, {"ATTNC_DEBUG": "1", "NO_COLOR": "1"}),
            mock.patch("attnc.cli.app.app", _app()),
            watch_pieces(lambda announced, _: pieces.append(announced)),
        ):
            code = main(arguments)
    except _Stopped as stopped:
        outcome.findings.append(Finding("hang", name, str(stopped)))
        code = -1
    except BaseException:
        outcome.findings.append(Finding("traceback", name, traceback.format_exc()[-2000:]))
        code = 3
    outcome.seconds[name], outcome.codes[name] = time.process_time() - start, code
    outcome.pieces[name] = sum(pieces)
    if code not in (0, 1, 2, -1):
        outcome.findings.append(Finding("traceback", name, f"exit {code}: {err.getvalue()[-1500:]}"))
    for text in (out.getvalue(), err.getvalue()):
        if any(not (char.isprintable() or char == "\n") for char in text):
            outcome.findings.append(Finding("raw", name, repr(text[:300])))


@cache
def _app() -> Callable[..., object]:
    """The command, made once: Typer makes it anew at every call, which takes longer than most files."""
    from attnc.cli.app import app

    return typer.main.get_command(app)


@contextlib.contextmanager
def _alarm(seconds: float | None) -> Iterator[None]:
    def stop(_: int, frame: FrameType | None) -> None:
        raise _Stopped("".join(traceback.format_stack(frame)[-6:]))

    if seconds is None:
        yield
        return
    old = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)


def _foreign_tokens(out: Path) -> Iterator[Finding]:
    """What generated files hold outside comments and literals that none of them should."""
    for path in sorted(out.glob("**/*.*")):
        text = path.read_text(encoding="utf-8")
        try:
            tokens = tokens_of(path.name, text)
        except (SyntaxError, ValueError) as failure:
            yield Finding("token", "compile", f"{path}: {failure!r}")
            continue
        if strange := [token for token in tokens if MARK in token]:
            yield Finding("token", "compile", f"{path}: {strange[:5]}")
        directives = [token for token in tokens if token.startswith("# ")]
        if path.suffix == ".cu" and (strange := [d for d in directives if not DIRECTIVE.fullmatch(d)]):
            yield Finding("token", "compile", f"{path}: {strange[:5]}")


#: Headers that kernels include.
_HEADERS = "|".join(re.escape(path.name) for path in sorted((ROOT / "attnc" / "support").glob("*.cuh")))
#: Lines of the preprocessor that are of the templates, as `tokens_of` has them.
DIRECTIVE = re.compile(
    r"# (pragma unroll( \d+)?|ifn?def ATTNC_SHIM|ifndef (BLOCK_M|IN_PARTS|KEEPS_DS)|if ALIGNED|ifdef MAXNREG"
    r"|else|endif"
    rf"|include \"(simt\.h|{_HEADERS})\""
    r"|define (BLOCK_M|BLOCK_N|WARPS|STAGES|ALIGNED|Q_TILES|O_TILES|OVERLAP|CLUSTER|PINGPONG"
    r"|IN_PARTS|KEEPS_DS|RAW_TILES|BLOCKS|(PRODUCER|CONSUMER)_REGISTERS|BLOCK_D) \d+"
    r"|define (ELEMENT (bf16|f16|float)|ELEMENT_IS_F32|LANES_SEARCH (32|\( 32 / \( BLOCK_M / 64 \) \)))"
    r"|define BOUNDS (__maxnreg__|__launch_bounds__)\(\w+\))"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes, each with a share of the files")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hostile")
    parser.add_argument(
        "--limit", type=float, default=2.0, help="CPU seconds that a command may take for one variant"
    )
    wanted = parser.parse_args()
    wanted.folder.mkdir(parents=True, exist_ok=True)
    shares = shares_of(range(wanted.first, wanted.first + wanted.count))
    jobs = [(share, wanted.folder, wanted.limit) for share in shares]
    if wanted.workers == 1:
        for job in jobs:
            run(*job)
    else:  # processes of their own: a command may change the folder it is in, and sets an alarm
        with get_context("spawn").Pool(wanted.workers) as pool:
            pool.starmap(run, jobs, chunksize=1)
    summarize([entry for share in shares for entry in entries_of(share, wanted.folder)])


def shares_of(seeds: range) -> list[range]:
    """Splits seeds where a log ends: at the multiples of its length."""
    inner = range(seeds.start // _LOGGED * _LOGGED + _LOGGED, seeds.stop, _LOGGED)
    return [range(*span) for span in pairwise([seeds.start, *inner, seeds.stop])]


def run(seeds: range, folder: Path, limit: float) -> None:
    """Runs the commands on the files of these numbers that the log lacks, a line of it for each."""
    log = _log(seeds, folder)
    done = len(entries_of(seeds, folder)) if log.exists() else 0
    if done == len(seeds):
        return
    _run_one(Outcome(), "warm", ["check", str(ROOT / "specs" / "full.attn")], None)
    with log.open("a") as lines:
        for seed in seeds[done:]:
            file = hostile_file(seed)
            place = folder / f"work_{os.getpid()}"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            outcome = check_file(file, place, patience=300 * limit)
            slow = {
                name: round(taken, 2)
                for name, taken in outcome.seconds.items()
                if taken > limit + _SECONDS_PER_PIECE * outcome.pieces[name]
            }
            entry = {
                "seed": seed,
                "kind": file.kind,
                "codes": outcome.codes,
                "worst": round(max(outcome.seconds.values()), 3),
                "slow": slow,
                "findings": [[f.what, f.command, f.detail] for f in outcome.findings],
            }
            lines.write(json.dumps(entry) + "\n")
            lines.flush()
            if slow or outcome.findings:
                found = [(f.what, f.command) for f in outcome.findings]
                print(seed, file.kind, repr(file.name)[:60], slow, found, flush=True)


def _log(seeds: range, folder: Path) -> Path:
    return folder / f"log_{seeds.start}_{seeds.stop}.jsonl"


def entries_of(seeds: range, folder: Path) -> list[dict[str, Any]]:
    """What the log says of these files."""
    with _log(seeds, folder).open() as lines:
        return [json.loads(line) for line in lines]


def summarize(entries: list[dict[str, Any]]) -> None:
    """Prints the figures of a log."""
    found = Counter(finding[0] for entry in entries for finding in entry["findings"])
    hangs = sum(bool(entry["slow"]) for entry in entries)
    compiled = sum(entry["codes"].get("compile") == 0 for entry in entries)
    print(f"{len(entries)} files through {', '.join(COMMANDS)}; {compiled} compile")
    print(
        f"tracebacks {found['traceback']}, over the limit {hangs}, "
        f"tokens {found['token']}, raw text {found['raw']}, refused late {found['late']}"
    )
    print(
        "slowest:", max(((entry["worst"], entry["seed"], entry["kind"]) for entry in entries), default=None)
    )
    print("kinds:", dict(Counter(entry["kind"] for entry in entries)))


if __name__ == "__main__":
    main()
