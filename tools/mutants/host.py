"""A process that judges mutants in children, which it forks: imports take seconds, a fork milliseconds.

It reads batches, one a line: mutants of one module. A child judges one after the other, and where the batch
asks for it looks again at what survived, whose code it has. Where a mutant ends it, hangs, or leaves the GPU
unusable, the next child goes on behind it. This process itself never touches the GPU, which would be lost to
its children.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from importlib import import_module
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from tests.processes import cpu_seconds
from tools.mutants.judge import Bench, Judgment
from tools.mutants.operators import Mutant
from tools.mutants.remember import remember_references
from tools.mutants.sample import Phase, Place, texts_of
from tools.mutants.waiting import GLANCE, Watch

#: Seconds without a word after which nothing is said of what a child judges that may use a GPU: it may wait
#: for what others have; processor seconds after which it is taken for one that computes for ever: those of a
#: verification with its compilers.
PATIENCE, WORK = 600.0, 180.0
#: Seconds that the GPU may take for one call, while others use it too, and the simulator, for one launch. No
#: compiler is among what waits.
_STALL, _SIMULATED = 8.0, 60.0
_HUNG = 124
#: CU_CTX_SCHED_BLOCKING_SYNC: who waits for the GPU leaves the processor to others.
_BLOCKING = 4
#: Where code is that may take long.
_LONG = (
    "/triton/compiler/",
    "/triton/backends/nvidia/compiler.py",
    "/attnc/runtime/nvrtc.py",
    "/attnc/support/binaries.py",
    "/subprocess.py",  # those that are programs
    "/tools/mutants/turns.py",  # which waits for others
)
_SIMULATOR = ("/attnc/verify/simt.py",)
#: Functions there that load what was compiled, which waits for kernels that run.
_LOADS = ("_init_handles", "function")


def main() -> None:
    """Answers each batch by a line for each mutant, and a last one, `{}`."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer
    if "--gpu" in sys.argv:
        _preload("triton", "tools.mutants.heavy", *([] if "--no-cupy" in sys.argv else ["cupy"]))
        if _has_opened_gpu():
            os.dup2(answers.fileno(), sys.stdout.fileno())
            os.execv(sys.executable, [sys.executable, "-m", "tools.mutants.host", "--gpu", "--no-cupy"])
    for line in sys.stdin:
        for answer in judge_batch(json.loads(line)):
            print(json.dumps(answer), file=answers, flush=True)
        print("{}", file=answers, flush=True)


def _preload(*names: str) -> None:
    """Imports what children need. Without a GPU Triton has to be told first that it interprets."""
    for name in names:
        import_module(name)


def _has_opened_gpu() -> bool:
    """Returns whether something that was imported has asked for the GPU, which children then have not."""
    for opened in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(opened.readlink()).startswith("/dev/nvidia"):
                return "--no-cupy" not in sys.argv
    return False


def judge_batch(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the number of each mutant of a batch that was judged before its time was over, and what became
    of it.
    """
    at, count = 0, len(batch["mutants"])
    with suppress(Exception):  # a child will meet it too, and say so
        texts_of(Place(**batch["place"]))  # its plan too, which children then have
    with tempfile.TemporaryDirectory(dir=batch["folder"]) as folder:
        while at < count and time.monotonic() < batch["until"]:
            began, first = time.monotonic(), at
            for judgment in _run_child(batch, at, Path(folder)):
                is_another = batch["is_second"] or not judgment.get("is_second", False)
                at += is_another
                took = round(time.monotonic() - began, 2)
                yield {"number": batch["numbers"][at - 1], **judgment, "seconds": took}
                began = time.monotonic()
            if at == first and time.monotonic() >= batch["until"]:
                return


def _run_child(batch: Mapping[str, Any], at: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Forks a child for the mutants from one on, and yields what becomes of each; at last, where a mutant has
    ended it, what that comes to.
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
    begun: Mapping[str, Any] | None = None
    text, is_silent = b"", False
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while True:
            is_silent = not _hears(selector, child)
            if is_silent:
                os.kill(child, signal.SIGKILL)
                break
            part = os.read(reading, 1 << 16)
            if not part:
                break
            *lines, text = (text + part).split(b"\n")
            for line in lines:
                said = json.loads(line)
                begun = said if "outcome" not in said else None
                if begun is None:
                    yield said
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if begun is None:
        if status not in (0, _HUNG):
            yield {"outcome": "unknown", "cases": 0, "message": f"the child ended: {status}"}
    elif "pending" in begun:  # its line, which was made to end a launch, has ended the process
        yield begun["pending"]
    elif not begun["is_second"]:
        yield _judge_end(status, is_silent, batch["place"]["target"])


def _hears(selector: selectors.BaseSelector, child: int) -> bool:
    """Waits for a word of a child. Returns whether one came, or the child ended, before patience was over."""
    began, has_gpu, watch = time.monotonic(), "--gpu" in sys.argv, Watch(child, WORK)
    while not selector.select(GLANCE):
        is_over = watch.is_in_vain()
        if has_gpu:  # it sleeps while the GPU works
            is_over = watch.seconds > watch.most or time.monotonic() - began > PATIENCE
        if is_over:
            return False
    return True


def _judge_end(status: int, is_silent: bool, target: str) -> dict[str, Any]:
    """Returns what became of a mutant at which a child ended."""
    outcome, message = "died", f"exit status {status}"
    if is_silent and "--gpu" in sys.argv:  # it may have waited for memory that others have
        outcome, message = "unknown", "there was no word for minutes, and no call that did not end"
    elif is_silent or status == _HUNG:
        outcome, message = "hung", "a call did not end"
    elif target == "triton" and status < 0:  # no launch ends a process like this: Triton's compiler has
        outcome = "invalid"
    return {"outcome": outcome, "cases": 0, "message": message}


def _judge_mutants(batch: Mapping[str, Any], at: int, folder: Path, writing: int) -> None:
    """In the child: judges mutants until the GPU is unusable, the batch ends, or its time. Says what it
    begins, and then what became of it; before it makes a line end the process, what that comes to.
    """
    with os.fdopen(writing, "w") as out:

        def say(line: Mapping[str, Any]) -> None:
            print(json.dumps(line), file=out, flush=True)

        bench_of = _prepare(batch, folder)
        for phase, data in zip(batch["phases"][at:], batch["mutants"][at:], strict=True):
            if time.monotonic() >= batch["until"]:
                return
            mutant, looks = Mutant(**data), [batch["is_second"]]
            for is_second in looks:
                judged = _look(partial(bench_of, phase), mutant, is_second=is_second, say=say)
                if batch["looks_again"] and not is_second and judged == "survived":
                    looks.append(True)
            if not _is_usable():
                return


def _look(
    bench: Callable[[], Bench], mutant: Mutant, *, is_second: bool, say: Callable[[Mapping[str, Any]], None]
) -> str:
    """Judges a mutant, or looks at it again; says so, and returns the outcome."""
    from tools.mutants.heavy import examine, find_reach

    say({"is_second": is_second})
    began = cpu_seconds(os.getpid())
    try:
        judgment = examine(bench(), mutant) if is_second else bench().judge(mutant)
        if is_second and judgment.outcome == "equal":
            say({"is_second": True, "pending": {**asdict(judgment), "is_second": True}})
            judgment = find_reach(bench(), mutant, judgment)
    except Exception:  # a mistake of these tools, which says nothing of the mutant
        judgment = Judgment(outcome="unknown", message=traceback.format_exc()[-900:])
    say({**asdict(judgment), "is_second": is_second, "cpu": round(cpu_seconds(os.getpid()) - began, 2)})
    return judgment.outcome


def _prepare(batch: Mapping[str, Any], folder: Path) -> Callable[[Phase], Bench]:
    """Makes the GPU ready, and returns what gives the module whose mutants are judged, one for each phase."""
    import torch

    remember_references(folder)
    if torch.cuda.is_available():
        _share_processors()
        torch.zeros(1, device="cuda")
        threading.Thread(target=_watch, daemon=True).start()
    return cache(partial(Bench, Place(**batch["place"]), folder=folder))


def _share_processors() -> None:
    """Makes this process sleep while it waits for the GPU, where it would spin. It must not have used it."""
    driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    driver.cuInit(0)
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDevicePrimaryCtxSetFlags(device, _BLOCKING)


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


def _watch() -> None:
    """Ends this process when its threads have been in the same calls for too long: what autograd calls runs
    in a thread of its own.
    """
    own, before, since = threading.get_ident(), dict[int, tuple[int, int]](), time.monotonic()
    while True:
        time.sleep(0.25)
        frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != own}
        now = {thread: (id(frame), frame.f_lasti) for thread, frame in frames.items()}
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > patience_for(frames):
            os._exit(_HUNG)


def patience_for(frames: Mapping[int, FrameType]) -> float:
    """Returns the seconds that threads, whose innermost frames these are, may be in the same calls."""
    if any(_is_in(frame, _LONG) for frame in frames.values() if frame.f_code.co_name not in _LOADS):
        return inf
    return _SIMULATED if any(_is_in(frame, _SIMULATOR) for frame in frames.values()) else _STALL


def _is_in(innermost: FrameType, files: Collection[str]) -> bool:
    """Returns whether a function of one of these files is at work in a thread."""
    frame: FrameType | None = innermost
    while frame is not None:
        if any(file in frame.f_code.co_filename for file in files):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    with suppress(BrokenPipeError, KeyboardInterrupt):
        main()
