"""Programs in processes of their own, without seconds of imports for each.

They are forked from one process, which has imported PyTorch and what else takes long, and
neither Triton, which an environment variable decides about as it is imported, nor attnc.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess

_IMPORTED = ("torch", "numpy", "hypothesis", "jinja2", "lark")


def run_program(
    program: str | Path,
    *arguments: str | Path,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
    check: bool = False,
) -> CompletedProcess[str]:
    """Runs the text of a program, or a file, as `python -c` or `python` would, in the current folder.

    environment: in place of this process's. check: whether another exit status than 0 is an AssertionError.
    """
    command = [str(argument) for argument in (program if isinstance(program, Path) else "-c", *arguments)]
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "err")]
        variables = dict(os.environ if environment is None else environment)
        text = None if isinstance(program, Path) else program
        arguments_of_child = (text, command, stdin, variables, str(Path.cwd()), [str(path) for path in said])
        child = _forks().Process(target=_run, args=arguments_of_child)
        child.start()
        child.join()
        out, err = (path.read_text(encoding="utf-8") if path.is_file() else "" for path in said)
    status = child.exitcode
    child.close()
    assert status is not None
    assert status == 0 or not check, f"{command}: {status}\n{out}{err}"
    return CompletedProcess(command, status, out, err)


def compiling(program: str, *arguments: str | Path, stdin: str = "") -> CompletedProcess[str]:
    """Runs a program that compiles with Triton, which it does not in a process where tests made it interpret.
    AssertionError where it fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return run_program(program, *arguments, stdin=stdin, environment=environment, check=True)


def forked(count: int, work: Callable[[int], object]) -> list[int]:
    """Runs work in processes that are forked from this one, all at once, each with its number; returns how
    each ended, as `os.waitpid` says it.
    """
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                work(number)
                os._exit(0)
            except BaseException:  # it must not run on as a second pytest
                os._exit(1)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


@cache
def _forks() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED])
    return context


def _run(
    text: str | None,
    command: Sequence[str],
    stdin: str,
    environment: Mapping[str, str],
    folder: str,
    said: Sequence[str],
) -> None:
    """In the child."""
    for number, path in enumerate(said, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    first = str(Path(command[0]).resolve().parent) if text is None else ""
    searched = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv, sys.path[:0] = [*command], [first, *searched]
    sys.stdin = io.StringIO(stdin)
    try:
        if text is None:
            runpy.run_path(command[0], run_name="__main__")
        else:
            exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def cpu_seconds(pid: int) -> float:
    """Returns the processor time that a process has used, its finished children's included; 0 once it is
    gone.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    ticks = text.rpartition(")")[2].split()[11:15]  # behind the name, which may hold anything
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def environment_of(number: int, devices: int) -> dict[str, str]:
    """Returns the environment of one of several processes side by side: one thread each, and the GPUs, of
    which this process sees so many, in turn.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[:devices]
    names = seen if any(seen) else [str(device) for device in range(devices)]
    device = {"CUDA_VISIBLE_DEVICES": names[number % devices]} if devices else {}
    return {**os.environ, **threads, **device}
