"""A process that judges mutants in children, which it forks: imports take seconds, a fork milliseconds.

It reads batches, one a line: mutants of one module. A child judges one mutant after the other. Where a mutant
ends it, hangs, or leaves the GPU unusable, the next child goes on behind it. This process itself never
touches the GPU, which would be lost to its children.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from tools.mutants.operators import Mutant
from tools.mutants.sample import Place

#: Seconds without a word after which a child is taken for one that waits for ever: the default budget of a
#: verification, and what compilers take.
PATIENCE = 180.0
#: Seconds that the GPU may take for one call, while others use it too. No compiler is among what waits.
_STALL = 8.0
_HUNG = 124
#: Folders whose code may take long.
_COMPILERS = (
    "/triton/compiler/",
    "/triton/backends/",
    "/attnc/runtime/nvrtc.py",
    "/attnc/support/binaries.py",
)


def main() -> None:
    """Answers each batch by a line for each mutant, and a last one, `{}`."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer
    if "--gpu" in sys.argv:
        _preload()
    for line in sys.stdin:
        for answer in judge_batch(json.loads(line)):
            print(json.dumps(answer), file=answers, flush=True)
        print("{}", file=answers, flush=True)


def _preload() -> None:
    """Imports what children need. Without a GPU Triton has to be told first that it interprets."""
    for name in ("triton", "tools.mutants.heavy"):
        import_module(name)


def judge_batch(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the number of each mutant of a batch that was judged before its time was over, and what became
    of it.
    """
    at, count = 0, len(batch["mutants"])
    with tempfile.TemporaryDirectory(dir=batch["folder"]) as folder:
        while at < count and time.monotonic() < batch["until"]:
            began, first = time.monotonic(), at
            for said in _run_child(batch, at, Path(folder)):
                took = round(time.monotonic() - began, 2)
                if "again" in said:
                    yield {
                        "number": batch["numbers"][at - 1],
                        **said["again"],
                        "seconds": took,
                        "again": True,
                    }
                elif "judgment" in said:
                    yield {"number": batch["numbers"][at], **said["judgment"], "seconds": took}
                    at += 1
                began = time.monotonic()
            if at == first and time.monotonic() >= batch["until"]:
                return


def _run_child(batch: Mapping[str, Any], at: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Forks a child for the mutants from one on, and yields what it says; at last, where a mutant has ended
    it, what that comes to.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status = 1
        try:
            _judge_mutants(batch, at, folder, writing)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)  # it is no second host
    os.close(writing)
    begun, text, is_silent = "", b"", False
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while True:
            is_silent = not selector.select(PATIENCE)
            if is_silent:
                os.kill(child, signal.SIGKILL)
                break
            part = os.read(reading, 1 << 16)
            if not part:
                break
            *lines, text = (text + part).split(b"\n")
            for line in lines:
                said = json.loads(line)
                begun = said.get("begin", "")
                yield said
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if begun:
        yield {begun: _judge_end(status, is_silent, batch["place"]["target"])}
    elif status not in (0, _HUNG):
        yield {"judgment": {"outcome": "unknown", "cases": 0, "message": f"the child ended: {status}"}}


def _judge_end(status: int, is_silent: bool, target: str) -> dict[str, Any]:
    """Returns what became of a mutant at which a child ended."""
    outcome, message = "died", f"exit status {status}"
    if is_silent or status == _HUNG:
        outcome, message = "hung", "a call did not end"
    elif target == "triton" and status < 0:  # no launch ends a process like this: Triton's compiler has
        outcome = "invalid"
    return {"outcome": outcome, "cases": 0, "message": message}


def _judge_mutants(batch: Mapping[str, Any], at: int, folder: Path, writing: int) -> None:
    """In the child: judges mutants until the GPU is unusable, the batch ends, or its time."""
    with os.fdopen(writing, "w") as out:

        def say(line: Mapping[str, Any]) -> None:
            print(json.dumps(line), file=out, flush=True)

        oracles = _prepare(batch, folder)
        for data in batch["mutants"][at:]:
            for name, oracle in oracles.items():
                if time.monotonic() >= batch["until"]:
                    return
                say({"begin": name})
                try:
                    judgment = oracle(Mutant(**data))
                except Exception:  # a mistake of these tools, which says nothing of the mutant
                    judgment = {"outcome": "unknown", "cases": 0, "message": traceback.format_exc()[-900:]}
                say({name: judgment})
                if not _is_usable():
                    return
                if judgment["outcome"] != "survived":
                    break


def _prepare(batch: Mapping[str, Any], folder: Path) -> Mapping[str, Callable[[Mutant], dict[str, Any]]]:
    """Makes the GPU ready, and returns what judges a mutant, and what survives again."""
    import torch

    from tools.mutants.heavy import examine
    from tools.mutants.judge import Bench
    from tools.mutants.remember import remember_references

    remember_references(folder)
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        threading.Thread(target=_watch, args=(threading.main_thread().ident,), daemon=True).start()
    bench = Bench(Place(**batch["place"]), batch["phase"])
    oracles: dict[str, Callable[[Mutant], dict[str, Any]]] = {
        "judgment": lambda mutant: asdict(bench.judge(mutant))
    }
    if batch["heavy"]:
        oracles["again"] = lambda mutant: asdict(examine(bench, mutant))
    return oracles


def _is_usable() -> bool:
    """Returns whether the GPU still works for this process, and gives back what memory it does not need."""
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:  # of CUDA, after a fault
        return False
    return True


def _watch(thread: int) -> None:
    """Ends this process when its main thread has been in one call for long, and that is no compiler's."""
    before: object = None
    since = time.monotonic()
    while True:
        time.sleep(0.25)
        frame = sys._current_frames().get(thread)
        now = None if frame is None else (id(frame), frame.f_lasti)
        if now != before or frame is None or _compiles(frame):
            before, since = now, time.monotonic()
        elif time.monotonic() - since > _STALL:
            os._exit(_HUNG)


def _compiles(frame: FrameType | None) -> bool:
    while frame is not None:
        if any(folder in frame.f_code.co_filename for folder in _COMPILERS):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    with suppress(BrokenPipeError, KeyboardInterrupt):
        main()
