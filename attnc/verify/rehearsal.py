"""One run of a planned module on real tensors, judged: what `attnc demo` shows."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from attnc.plan import ir
from attnc.verify.interpreter import ensure_interpreter
from attnc.verify.tolerance import Verdict, expect, judge

#: Sizes that cross tile borders, small enough for an interpreter.
_SMALL = 160
_LARGE = 2048
_TOKENS = {_SMALL: 2 * _SMALL, _LARGE: 2 * _LARGE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where it ran, on what, how long the call took (with compilation), and whether it was right."""

    device: str
    shapes: str
    seconds: float
    verdict: Verdict


def rehearse(module: ir.Module) -> Outcome:
    """Runs the module on the GPU, or without one in Triton's interpreter, and judges its outputs."""
    if torch.cuda.is_available():
        device, length, name = "cuda", _LARGE, torch.cuda.get_device_name()
    else:
        ensure_interpreter()
        device, length, name = "cpu", _SMALL, "Triton's interpreter (there is no GPU)"
    # Triton decides when it is imported whether it interprets, hence only now:
    from attnc.runtime.trial import problem_for, trial

    problem = problem_for(module, length, device=device, tokens=_TOKENS[length])
    launch = trial(module, problem)
    begin = time.perf_counter()
    result = launch()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    attention = module.variant.attention
    outputs = result if isinstance(result, tuple) else (result,)
    arguments = dict(zip((arg.tensor.name for arg in module.args), problem.tensors, strict=True))
    expected = expect(attention, arguments, module.kernels[0].bound)
    named = dict(zip((arg.tensor.name for arg in module.outputs), outputs, strict=True))
    return Outcome(
        device=name,
        shapes=", ".join(f"{key} {list(arguments[key].shape)}" for key in ("q", "k")),
        seconds=seconds,
        verdict=judge(attention, expected, named),
    )
