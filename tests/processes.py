"""Programs in processes of their own, without seconds of imports for each.

They are forked from one process, which has imported PyTorch and what else takes long, and
neither Triton, which an environment variable decides about as it is imported, nor attnc. Those that
compile with Triton are forked from another one, which has imported both, and those that only use attnc from
one that has imported attnc.
"""

from __future__ import annotations

import atexit
import io
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess

_IMPORTED = ("torch", "numpy", "hypothesis", "jinja2", "lark")
#: What programs that compile with Triton import besides.
_COMPILERS = ("triton", "attnc.runtime.toolchains", "tests.compiled", "tests.verify.judging")
#: What programs that use attnc import, none of which imports Triton.
_ATTNC = (
    "attnc.api.family",
    "attnc.compat.flash_attn",
    "attnc.flex",
    "attnc.verify.search",
    "attnc.verify.trials",
    "torch.distributed.tensor",  # which torch.testing imports at the first comparison, with SymPy
)
_Run = Callable[[tuple[object, ...]], int | None]


def searched(*more: Path) -> str:
    """Returns PYTHONPATH of a program elsewhere: the checkout and more, before what this process was given,
    which may be where all dependencies are.
    """
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(__file__).parent.parent), *map(str, more), *([given] if given else [])])


def run_program(
    program: str | Path,
    *arguments: str | Path,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
    check: bool = False,
    has_attnc: bool = False,
) -> CompletedProcess[str]:
    """Runs the text of a program, or a file, as `python -c` or `python` would, in the current folder.

    environment: in place of this process's. check: whether another exit status than 0 is an AssertionError.
    has_attnc: whether attnc may be imported before the program begins.
    """
    variables = dict(os.environ if environment is None else environment)
    run = partial(_fork_from, _ATTNC) if has_attnc else _fork
    return _run_in(run, program, arguments, stdin, variables, check=check)


def _run_in(
    run: _Run,
    program: str | Path,
    arguments: Sequence[str | Path],
    stdin: str,
    variables: Mapping[str, str],
    *,
    check: bool,
) -> CompletedProcess[str]:
    """run: calls `_run` with its arguments in another process, and returns the exit status."""
    command = [str(argument) for argument in (program if isinstance(program, Path) else "-c", *arguments)]
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "err")]
        text = None if isinstance(program, Path) else program
        status = run((text, command, stdin, variables, str(Path.cwd()), [str(path) for path in said]))
        out, err = (path.read_text(encoding="utf-8") if path.is_file() else "" for path in said)
    assert status is not None
    assert status == 0 or not check, f"{command}: {status}\n{out}{err}"
    return CompletedProcess(command, status, out, err)


def compiling(program: str, *arguments: str | Path, stdin: str = "") -> CompletedProcess[str]:
    """Runs a program that compiles with Triton, which it does not in a process where tests made it interpret.
    AssertionError where it fails.
    """
    return _run_in(partial(_fork_from, _COMPILERS), program, arguments, stdin, _compiling(), check=True)


def _compiling() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


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


def _fork(arguments: tuple[object, ...]) -> int | None:
    child = _forks().Process(target=_run, args=arguments)
    child.start()
    child.join()
    status = child.exitcode
    child.close()
    return status


def _fork_from(modules: tuple[str, ...], arguments: tuple[object, ...]) -> int | None:
    connection = _server(modules)
    connection.send(arguments)
    status: int | str | None = connection.recv()
    if isinstance(status, str):
        raise ImportError(status)
    return status


@cache
def _server(modules: tuple[str, ...]) -> Connection:
    """Returns the way to a process that has imported modules, and forks programs: it ends with this one."""
    here, there = Pipe()
    _forks().Process(target=_serve, args=(there, modules, _compiling())).start()
    there.close()
    atexit.register(here.close)
    return here


def _serve(connection: Connection, modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """In the process of `_server`. Answers with the traceback where a module cannot be imported."""
    os.environ.clear()
    os.environ.update(environment)
    problem = ""
    try:
        for name in modules:
            import_module(name)
    except BaseException:  # who asks is told
        problem = traceback.format_exc()
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        if problem:
            connection.send(problem)
            continue
        child = get_context("fork").Process(target=_run, args=arguments)
        child.start()
        child.join()
        connection.send(child.exitcode)
        child.close()


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
