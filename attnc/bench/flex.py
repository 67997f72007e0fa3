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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from attnc.bench.host_cost import Call, measure_host
from attnc.bench.report import ran_on
from attnc.runtime.timing import Launch, Timing, interleave

#: Whose kernels: those that a call picks, ours for Triton where it picks others, and torch's.
OURS, TRITON, TORCH = "attnc.flex", "triton", "FlexAttention"
B, H, D = 2, 16, 128
LENGTH = 8192
#: In turn, in a process that has computed nothing before.
LENGTHS = (4096, 4160, 5000)
_SMALL = 256
_COLUMNS = (
    "target",
    *("forward ms", "Triton", "Flex", "ratio"),
    *("with gradients ms", "Triton", "Flex", "ratio"),
    *("first s", "Flex", "lengths s", "Flex", "host us", "Flex"),
)

Mod = Callable[..., Any] | None
Make = Callable[[int, str], tuple[Mod, Mod]]


def _causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def _alibi(length: int, device: str) -> tuple[Mod, Mod]:
    slope = torch.exp2(-8.0 * torch.arange(1, H + 1, device=device) / H)
    return lambda score, b, h, q, kv: score - slope[h] * (q - kv), _causal


def _softcap(length: int, device: str) -> tuple[Mod, Mod]:
    return lambda score, b, h, q, kv: 30 * torch.tanh(score / 30), _causal


def _documents(length: int, device: str) -> tuple[Mod, Mod]:
    document = (torch.arange(length, device=device) // 1000).int()
    return None, lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)


def _learned(length: int, device: str) -> tuple[Mod, Mod]:
    bias = torch.zeros(H, 2 * 128 + 1, device=device, requires_grad=True)

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + bias[h, torch.clamp(q - kv + 128, 0, 256)]

    return mod, _causal


def _neighbourhood(length: int, device: str) -> tuple[Mod, Mod]:
    width, radius = 64, 6

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        rows = (q // width - kv // width).abs() <= radius
        return rows & ((q % width - kv % width).abs() <= radius)

    return None, near


def _heads(length: int, device: str) -> tuple[Mod, Mod]:
    reach = (128 * 2 ** (torch.arange(H, device=device) // 4)).int()  # 128 to 1024, as many heads of each
    return None, lambda b, h, q, kv: (q >= kv) & (q - kv <= reach[h])


def _padding(length: int, device: str) -> tuple[Mod, Mod]:
    lengths = length - torch.arange(B, device=device, dtype=torch.int32) * (length // 2)
    return None, lambda b, h, q, kv: kv < lengths[b]


#: By name, what makes the mods for a length and a device.
MODS: Mapping[str, Make] = {
    "full": lambda length, device: (None, None),
    "causal": lambda length, device: (None, _causal),
    "window": lambda length, device: (None, lambda b, h, q, kv: (q >= kv) & (q - kv <= 512)),
    "prefix": lambda length, device: (None, lambda b, h, q, kv: (q >= kv) | (kv < 1024)),
    "documents": _documents,
    "alibi": _alibi,
    "softcap": _softcap,
    "learned bias": _learned,
    "neighbourhood": _neighbourhood,
    "chunks": lambda length, device: (None, lambda b, h, q, kv: (q >= kv) & (q // 256 == kv // 256)),
    "heads": _heads,
    "padding": _padding,
}


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


def call(who: str, name: str, length: int, *, gradients: bool = False, small: bool = False) -> Launch:
    """A call of the program, and of its gradients."""
    device = "cuda"
    batch, heads = (1, H) if small else (B, H)
    shape = (batch, heads, length, D)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_(gradients) for _ in range(3)
    )
    score_mod, mask_mod = MODS[name](length, device)
    own = (batch if name == "padding" else None, heads if name == "heads" else None)
    attention = _function(who, score_mod, mask_mod, length, own)
    if not gradients:

        def forward() -> object:
            with torch.no_grad():
                return attention(q, k, v)

        return forward
    do = torch.randn_like(q)
    return lambda: torch.autograd.grad(attention(q, k, v), (q, k, v), do)


def _function(
    who: str, score_mod: Mod, mask_mod: Mod, length: int, own: tuple[int | None, int | None]
) -> Callable[..., Any]:
    """The attention of q, k and v. own: the batch and heads of a block mask that differs among them."""
    if who != TORCH:
        from attnc.flex import flex_attention

        target = None if who == OURS else who
        return lambda q, k, v: flex_attention(q, k, v, score_mod, mask_mod=mask_mod, target=target)
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as torch_flex

    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, *own, length, length, device="cuda")
    compiled: Any = torch.compile(torch_flex)
    return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=block_mask)


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
            {Call(name, who): call(who, name, _SMALL, small=True) for who in (OURS, TORCH)}, rounds, report
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
        command = [sys.executable, "-m", "attnc.bench.flex", who, name]
        done = subprocess.run(
            command, env={**os.environ, **places}, capture_output=True, text=True, check=True
        )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_first_results(who: str, name: str) -> None:
    """What `first_results` runs: the context of the device exists before the clock starts."""
    torch.zeros((), device="cuda")
    seconds = []
    for length in LENGTHS:
        started = time.perf_counter()
        call(who, name, length)()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    print(json.dumps(seconds))


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


if __name__ == "__main__":
    print_first_results(*sys.argv[1:])
