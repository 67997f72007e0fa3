"""What a call costs the host: microseconds until it returns, on inputs so small that it waits for nothing.

All calls take turns in one process, in bursts, and the fastest burst of each counts: what makes others slower
is the machine. Beside them is PyTorch's attention, of the same shapes, and what autograd takes for a function
that does nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnc.bench.report import ran_on
from attnc.build import front, plan_program
from attnc.plan import ir
from attnc.runtime.loader import load_module
from attnc.runtime.timing import Launch
from attnc.runtime.trial import problem_for

#: Of the inputs; a decode kernel gets one row of q.
SIZES = {"B": 2, "H": 8, "Hkv": 2, "G": 4, "M": 200, "N": 200}
#: Launches of a burst: fewer than the driver queues.
_BURST = 50
_PEER = "PyTorch"


@dataclass(frozen=True, slots=True)
class Call:
    """What is timed. what: the row of the table; whose: its column."""

    what: str
    whose: str


def first_variants(specs: Sequence[Path]) -> list[ir.Module]:
    """The first variant of every attention of the specs, for each target. Raises DiagnosticError."""
    first: dict[tuple[str, str], ir.Module] = {}
    for spec in specs:
        for module in plan_program(front(spec)).modules:
            first.setdefault((module.variant.attention.name, module.target), module)
    return list(first.values())


def jobs_of(modules: Sequence[ir.Module]) -> list[Callable[[], None]]:
    """What fills the compile caches, module by module, each in a process of its own."""
    return [partial(_call_once, module) for module in modules]


def _call_once(module: ir.Module) -> None:
    with suppress(Exception):  # the measurement meets the same failure and reports it
        for call in calls_of(module).values():
            call()
        torch.cuda.synchronize()


def calls_of(module: ir.Module) -> dict[Call, Launch]:
    """The call itself, and where there are gradients also with what they need, and they by autograd."""
    name, grads = module.variant.attention.name, module.variant.attention.grads
    function = getattr(load_module(module), name)
    sizes = SIZES | ({"M": 1} if module.kernels[0].structure == "decode" else {})
    tensors = problem_for(module, SIZES["N"], sizes=sizes).tensors
    calls: dict[Call, Launch] = {Call(name, module.target): lambda: function(*tensors)}
    if grads:
        names = (arg.tensor.name for arg in module.args)
        inputs = [x.clone().requires_grad_(n in grads) for n, x in zip(names, tensors, strict=True)]
        calls |= _differentiated(name, module.target, function, inputs)
    return calls


def peers() -> dict[Call, Launch]:
    """PyTorch's attention of such shapes, and an autograd function that does nothing."""
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = torch.randn(3, SIZES["B"], SIZES["H"], SIZES["N"], 64, device="cuda", dtype=torch.bfloat16)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    attention = partial(scaled_dot_product_attention, is_causal=True)
    return {
        Call("scaled_dot_product_attention", _PEER): lambda: attention(q, k, v),
        **_differentiated("scaled_dot_product_attention", _PEER, attention, inputs),
        **_differentiated("a function that does nothing", _PEER, _Nothing.apply, inputs),
    }


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return cotangents * len(ctx.saved_tensors)


def _differentiated(
    name: str, whose: str, function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> dict[Call, Launch]:
    found = function(*inputs)
    o = found[0] if isinstance(found, tuple) else found
    wanted, do = [x for x in inputs if x.requires_grad], torch.randn_like(o)
    return {
        Call(f"{name}, with what a gradient needs", whose): lambda: function(*inputs),
        Call(f"{name}, its backward by autograd", whose): (
            lambda: torch.autograd.grad(o, wanted, do, retain_graph=True)
        ),
    }


def measure_host(
    calls: Mapping[Call, Launch], rounds: int, report: Callable[[str], None]
) -> dict[Call, float]:
    """Microseconds of the fastest burst. `report` is called with the number of each round."""
    for call in calls.values():
        for _ in range(3):
            call()
    best = dict.fromkeys(calls, float("inf"))
    for number in range(rounds):
        report(f"round {number + 1}")
        for which, call in calls.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(_BURST):
                call()
            best[which] = min(best[which], (time.perf_counter() - started) / _BURST * 1e6)
    torch.cuda.synchronize()
    return best


def markdown(costs: Mapping[Call, float], machine: Mapping[str, str]) -> str:
    """A row for each call, a column for each target."""
    whose = list(dict.fromkeys(call.whose for call in costs))
    lines = [
        ran_on(machine),
        "",
        f"Microseconds of the host for a call, of the fastest burst of {_BURST}.",
        "",
        f"| call | {' | '.join(whose)} |",
        f"|{'---|' * (1 + len(whose))}",
    ]
    for what in dict.fromkeys(call.what for call in costs):
        row = (costs.get(Call(what, who)) for who in whose)
        lines.append(f"| {what} | {' | '.join('' if x is None else f'{x:.1f}' for x in row)} |")
    return "\n".join(lines) + "\n"


def as_json(costs: Mapping[Call, float], machine: Mapping[str, str]) -> str:
    """All figures, by call and by whose it is."""
    rows: dict[str, dict[str, float]] = {}
    for call, microseconds in costs.items():
        rows.setdefault(call.what, {})[call.whose] = round(microseconds, 2)
    return json.dumps({"format": 1, "machine": dict(machine), "us": rows}, indent=2) + "\n"


def write_host(costs: Mapping[Call, float], machine: Mapping[str, str], folder: Path) -> tuple[Path, ...]:
    """Writes host.md and host.json; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table, data = folder / "host.md", folder / "host.json"
    table.write_text(markdown(costs, machine), encoding="utf-8")
    data.write_text(as_json(costs, machine), encoding="utf-8")
    return (table, data)
