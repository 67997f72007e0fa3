"""Which config of a schedule is fastest here: measured once, written beside the spec, embedded by the
compiler.

All configs that fit the device are compiled in parallel processes, then timed taking turns: those of the
forward kernel and of each backward kernel. A backward kernel's config is judged by the time of the whole
backward, with the choices of the other kernels fixed. Each trial writes outputs of its own, so that no trial
can spoil a result; a config that fails to compile or run is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnc.build import front, plan_program, tuned_of, tuned_path
from attnc.files import update_text
from attnc.plan import ir
from attnc.plan.layout import Which
from attnc.runtime.timing import Launch, Timing, interleave
from attnc.runtime.toolchains import toolchain_of
from attnc.runtime.trial import (
    Arguments,
    backward_trial,
    device_name,
    problem_for,
    synchronize,
    trial,
)
from attnc.runtime.watchdog import watch
from attnc.tune import NothingRuns, in_processes
from attnc.tuned.choices import BUCKETS, TunedChoice, dump_tuned, knobs_of_kernel

#: Kernels whose configs are measured.
TUNABLE: tuple[Which, ...] = ("forward", "dq", "dkdv", "dk", "dv")
#: The key length that stands for each bucket.
_LENGTHS = {1024: 1024, 4096: 4096, None: 16384}
#: A config that gains no more than this share of the time over the default is not faster, but lucky.
_TIE = 0.01
_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The result for one kernel and bucket: the choice, and how much slower the default config was."""

    choice: TunedChoice
    gain: float


def tune(
    path: Path,
    rounds: int,
    report: Callable[[str], None],
    kernels: Collection[str] = TUNABLE,
    target: str = "triton",
) -> tuple[Winner, ...]:
    """Measures these kernels of a spec's variants for a target in every bucket and merges the choices into
    its tuned file, those of a variant once all of its buckets are measured.

    Raises DiagnosticError for a wrong spec or tuned file, NothingRuns where no config does. Needs a CUDA
    device.
    """
    tuned_of(path)  # before anything is measured that could not be written
    planned = [module for module in plan_program(front(path)).modules if module.target == target]
    _compile_all(path, planned, kernels)
    winners: list[Winner] = []
    for module in planned:
        found: list[Winner] = []
        for bucket in BUCKETS:
            tensors = problem_for(module, _LENGTHS[bucket])
            for kernel in _configs_of(module, kernels):
                report(f"{module.variant.attention.name} {module.variant.name} n<={bucket or 'any'} {kernel}")
                found.append(_tune_kernel(module, kernel, tensors, bucket, rounds))
        _merge_choices(path, [winner.choice for winner in found])
        winners += found
    return tuple(winners)


def _merge_choices(path: Path, choices: Sequence[TunedChoice]) -> None:
    update_text(tuned_path(path), lambda: dump_tuned([*tuned_of(path), *choices]))


def _configs_of(module: ir.Module, kernels: Collection[str]) -> dict[Which, ir.Kernel]:
    return {name: kernel for name, kernel in module.kernels.items() if name in kernels}


def _tune_kernel(
    module: ir.Module, kernel: Which, tensors: Arguments, bucket: int | None, rounds: int
) -> Winner:
    configs = _configs_of(module, (kernel,))[kernel].configs
    launches = _launches(module, kernel, tensors, len(configs))
    timings = interleave(launches, rounds)
    default, best = timings[_default(timings)], fastest(timings)
    choice = TunedChoice(
        target=module.target,
        attention=module.variant.attention.name,
        variant=module.variant.name,
        kernel=kernel,
        device=device_name(),
        toolchain=toolchain_of(module.target).version(),
        kv_len=bucket,
        config=knobs_of_kernel(kernel, configs[int(best)]),
        microseconds=timings[best].median * 1e3,
    )
    return Winner(choice=choice, gain=default.median / timings[best].median)


def fastest(timings: Mapping[str, Timing]) -> str:
    """Returns the position of the fastest config; of the default, the first that runs, where none gains more
    than chance does.
    """
    best, default = min(timings, key=lambda name: timings[name].median), _default(timings)
    return default if timings[default].median <= timings[best].median * (1 + _TIE) else best


def _default(timings: Mapping[str, Timing]) -> str:
    return min(timings, key=int)


def _launches(module: ir.Module, kernel: Which, tensors: Arguments, count: int) -> dict[str, Launch]:
    launches: dict[str, Launch] = {}
    last: Exception | None = None
    for position in range(count):
        try:
            launch = _trial(module, kernel, tensors, position)
            with watch(_name(module, kernel, position), "cuda"):
                launch()
                synchronize()
        except Exception as failure:  # too large for this device, or the compiler gave up: not a candidate
            last = failure
            continue
        launches[str(position)] = launch
    if not launches:
        name = f"{module.variant.attention.name} {module.variant.name}"
        raise NothingRuns(f"no config of {kernel} of {name} runs on this device: {last}") from last
    return launches


def _name(module: ir.Module, kernel: Which, position: int) -> str:
    return f"config {position} of {kernel} of {module.variant.attention.name} for {module.target}"


def _trial(module: ir.Module, kernel: Which, tensors: Arguments, position: int) -> Launch:
    if kernel == "forward":
        return trial(module, tensors, position)
    return backward_trial(module, tensors, kernel, position)


def _compile_all(path: Path, planned: Sequence[ir.Module], kernels: Collection[str]) -> None:
    jobs = [
        (path, module.target, variant, kernel, position)
        for variant, module in enumerate(planned)
        for kernel, made in _configs_of(module, kernels).items()
        for position in range(len(made.configs))
    ]
    in_processes(_compile_one, jobs, _WORKERS)


def _compile_one(path: Path, target: str, variant: int, kernel: Which, position: int) -> None:
    module = [module for module in plan_program(front(path)).modules if module.target == target][variant]
    try:
        launch = _trial(module, kernel, problem_for(module, min(_LENGTHS.values())), position)
        with watch(_name(module, kernel, position), "cuda"):
            launch()
            synchronize()
    except Exception:  # the measurement meets the same failure
        return
