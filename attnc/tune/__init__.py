"""`attnc tune`: measures what is fastest here, and writes it beside the spec for `attnc.tuned` to read."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any

from attnc.runtime.children import spawning_safely


class NothingRuns(RuntimeError):
    """No config of a kernel runs on this device: there is nothing to choose from."""


def in_processes(function: Callable[..., None], jobs: Sequence[tuple[Any, ...]], most: int) -> None:
    """Calls the function with the arguments of every job, in at most so many processes at a time. What kills
    one of them ends the others too: the jobs fill caches, and the measurement meets it again and says so.
    """
    workers = min(most, os.cpu_count() or 2, len(jobs))
    if workers:
        with (
            suppress(BrokenProcessPool),
            spawning_safely(),
            ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool,
        ):
            list(pool.map(function, *zip(*jobs, strict=True)))
