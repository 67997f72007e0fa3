"""FlexAttention's programs: torch's kernels, compiled, beside attnc's, from the same mods.

Times of kernels come from one interleaved run. How long a program waits for its first result, and for one of
another length, is measured in new processes with empty caches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from attnc.bench.flex_programs import LENGTH, LENGTHS, MODS, OURS, SMALL, TORCH, TRITON, B, D, H, call
from attnc.bench.host_cost import Call, measure_host
from attnc.bench.report import ran_on
from attnc.runtime.timing import Launch, Timing, interleave

_COLUMNS = (
    "target",
    *("forward ms", "Triton", "Flex", "ratio"),
    *("with gradients ms", "Triton", "Flex", "ratio"),
    *("first s", "Flex", "lengths s", "Flex", "host us", "Flex"),
)


@dataclass(frozen=True, slots=True)
class FlexResult:
    """Of one program. target: what its calls pick; forward, both: milliseconds of the forward, and with
    gradients, by whose they are; first: seconds until the results for `LENGTHS`, in turn; host: microseconds
    of the host for a call.
    """

    name: str
    target: str
    forward: Mapping[str, Timing]
    both: Mapping[str, Timing]
    first: Mapping[str, Sequence[float]] = field(default_factory=dict)
    host: Mapping[str, float] = field(default_factory=dict)


def target_of_call(name: str) -> str:
    """What a call of the program picks."""
    from attnc.flex import family_of

    q = torch.empty((B, H, LENGTH, D), device="cuda", dtype=torch.bfloat16)
    score_mod, mask_mod = MODS[name](LENGTH, "cuda")
    return family_of(q, q, q, score_mod, mask_mod=mask_mod).target


def measure_flex(
    names: Sequence[str], rounds: int, report: Callable[[str], None], *, waits: bool = True
) -> list[FlexResult]:
    """All figures of the programs of these names. `report` is called with each. waits: how long new processes
    wait for results, too, which takes a quarter of a minute for each program.
    """
    results = []
    for name in names:
        report(name)
        first = {who: first_results(who, name) for who in (OURS, TORCH)} if waits else {}
        torch.compiler.reset()
        target = target_of_call(name)
        whose = (OURS, TORCH) if target == TRITON else (OURS, TRITON, TORCH)
        launches = {
            (who, both): call(who, name, LENGTH, gradients=both) for who in whose for both in (False, True)
        }
        able = {which: launch for which, launch in launches.items() if which[0] != TORCH or _runs(launch)}
        timed = interleave({f"{who} {both}": launch for (who, both), launch in able.items()}, rounds)
        host = measure_host(
            {Call(name, who): call(who, name, SMALL, small=True) for who in (OURS, TORCH)}, rounds, report
        )
        results.append(
            FlexResult(
                name,
                target,
                forward={who: timed[f"{who} {False}"] for who, both in able if not both},
                both={who: timed[f"{who} {True}"] for who, both in able if both},
                first=first,
                host={which.whose: cost for which, cost in host.items()},
            )
        )
    return results


def _runs(launch: Launch) -> bool:
    """Whether torch can run it: some backward kernels of FlexAttention want more memory than a GPU has."""
    try:
        launch()
    except RuntimeError:
        return False
    return True


def first_results(who: str, name: str) -> list[float]:
    """Seconds until the result of each of `LENGTHS`, in a new process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = ("ATTNC_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        places = {variable: str(Path(folder, variable.lower())) for variable in caches}
        command = [sys.executable, "-m", "attnc.bench.flex_programs", who, name]
        done = subprocess.run(
            command, env={**os.environ, **places}, capture_output=True, text=True, check=True
        )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def markdown(results: Sequence[FlexResult], machine: Mapping[str, str]) -> str:
    """A row for each program."""
    lines = [
        ran_on(machine),
        "",
        f"B {B}, H {H}, D {D}, M = N = {LENGTH}, bf16. ms: medians of one interleaved run.",
        f"first s: until the first result (length {LENGTHS[0]}) in a new process with empty caches;",
        f"lengths s: until those of lengths {LENGTHS[1]} and {LENGTHS[2]} after that, block masks included.",
        "host us: microseconds for a call.",
        "",
        f"| | {' | '.join(_COLUMNS)} |",
        f"|{'---|' * (1 + len(_COLUMNS))}",
    ]
    for result in results:
        cells = [result.name, result.target]
        for timed in (result.forward, result.both):
            ours = timed[OURS].median
            theirs = timed[TORCH].median if TORCH in timed else None
            beside = ["n/a", ""] if theirs is None else [f"{theirs:.3f}", f"{theirs / ours:.2f}x"]
            cells += [f"{ours:.3f}", f"{timed.get(TRITON, timed[OURS]).median:.3f}", *beside]
        cells += [f"{result.first[who][0]:.1f}" if who in result.first else "" for who in (OURS, TORCH)]
        cells += [
            " + ".join(f"{s:.2f}" for s in result.first[who][1:]) if who in result.first else ""
            for who in (OURS, TORCH)
        ]
        cells += [f"{result.host[who]:.0f}" if who in result.host else "" for who in (OURS, TORCH)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_flex(results: Sequence[FlexResult], machine: Mapping[str, str], folder: Path) -> tuple[Path, ...]:
    """Writes flex.md and flex.json; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table, data = folder / "flex.md", folder / "flex.json"
    table.write_text(markdown(results, machine), encoding="utf-8")
    rows = [asdict(result) for result in results]
    text = json.dumps({"format": 1, "machine": dict(machine), "results": rows}, indent=2)
    data.write_text(text + "\n", encoding="utf-8")
    return table, data
