"""Which config of a schedule is fastest here: measured once, written beside the spec, embedded by the
compiler.

All configs that fit the device are compiled in parallel processes, then timed taking turns. Each trial writes
outputs of its own, so that no trial can spoil a result; a config that fails to compile or run is left out.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from attnc.build import front, plan_program, tuned_path, write_text
from attnc.plan import ir
from attnc.plan.tuned import BUCKETS, Choice, as_knobs, dump_tuned, load_tuned
from attnc.runtime.timing import Launch, interleave
from attnc.runtime.trial import Problem, device_name, problem_for, synchronize, toolchain, trial
from attnc.source import Source

#: The key length that stands for each bucket.
_LENGTHS = {1024: 1024, 4096: 4096, None: 16384}
_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The result for one variant and bucket: the choice, and how much slower the default config was."""

    choice: Choice
    position: int
    gain: float


def tune(path: Path, rounds: int, report: Callable[[str], None]) -> tuple[Winner, ...]:
    """Measures every Triton variant of a spec in every bucket and merges the choices into its tuned file.

    Raises DiagnosticError for a wrong spec or tuned file, RuntimeError where no config runs. Needs a CUDA
    device.
    """
    planned = [module for module in plan_program(front(path)).modules if module.target == "triton"]
    _compile_all(path, len(planned))
    winners = []
    for module in planned:
        for bucket in BUCKETS:
            report(f"{module.variant.attention.name} {module.variant.name} n<={bucket or 'any'}")
            winners.append(_tune_bucket(module, bucket, rounds))
    target = tuned_path(path)
    known = load_tuned(Source(str(target), target.read_text(encoding="utf-8"))) if target.exists() else ()
    write_text(target, dump_tuned([*known, *(winner.choice for winner in winners)]))
    return tuple(winners)


def _tune_bucket(module: ir.Module, bucket: int | None, rounds: int) -> Winner:
    problem = problem_for(module, _LENGTHS[bucket])
    launches = _launches(module, problem)
    if not launches:
        raise RuntimeError(
            f"no config of {module.variant.attention.name} {module.variant.name} runs on this device"
        )
    timings = interleave(launches, rounds)
    best = min(timings, key=lambda name: timings[name].median)
    default = timings.get("0", timings[best])
    choice = Choice(
        target=module.target,
        attention=module.variant.attention.name,
        variant=module.variant.name,
        device=device_name(),
        toolchain=toolchain(module.target),
        kv_len=bucket,
        config=as_knobs(module.kernels[0].configs[int(best)]),
        microseconds=timings[best].median * 1e3,
    )
    return Winner(choice=choice, position=int(best), gain=default.median / timings[best].median)


def _launches(module: ir.Module, problem: Problem) -> dict[str, Launch]:
    launches: dict[str, Launch] = {}
    for position in range(len(module.kernels[0].configs)):
        launch = trial(module, problem, position)
        try:
            launch()
            synchronize()
        except Exception:  # too large for this device, or the compiler gave up: not a candidate
            continue
        launches[str(position)] = launch
    return launches


def _compile_all(path: Path, variants: int) -> None:
    """Fills Triton's cache, which outlives the processes, with every config of every variant."""
    workers = max(1, min(_WORKERS, (os.cpu_count() or 2) // 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs: Sequence[tuple[int, int]] = [(i, worker) for i in range(variants) for worker in range(workers)]
        list(pool.map(_compile_share, [path] * len(jobs), [workers] * len(jobs), *zip(*jobs, strict=True)))


def _compile_share(path: Path, shares: int, variant: int, share: int) -> None:
    module = [module for module in plan_program(front(path)).modules if module.target == "triton"][variant]
    problem = problem_for(module, min(_LENGTHS.values()))
    for position in range(share, len(module.kernels[0].configs), shares):
        try:
            trial(module, problem, position)()
            synchronize()
        except Exception:  # the measurement meets the same failure
            continue
