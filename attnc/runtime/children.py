"""Processes of Python that this one starts. They import from where it does, and not from the folder that they
are started in, where `python -m` and `python -c` look first: that may be anybody's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module, as `python -m` does."""
    program = (
        f"import sys; sys.path[:] = {_path()!r}; import runpy;"
        f" runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", program, *arguments]


@contextmanager
def spawning_safely() -> Iterator[None]:
    """While processes of `multiprocessing` are started, which get `sys.path` from this one."""
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE]
        else:
            os.environ[_SAFE] = before


_SAFE = "PYTHONSAFEPATH"


def _path() -> list[str]:
    """Returns where this process imports from; "" is its own working folder."""
    return [str(Path(place).absolute()) for place in sys.path]
