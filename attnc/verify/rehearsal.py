"""One run of a planned module on real tensors, judged: what `attnc demo` shows."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from attnc.plan import ir
from attnc.runtime.trial import problem_for
from attnc.verify.subjects import place, subject_of
from attnc.verify.tolerance import expect
from attnc.verify.verdict import Verdict, judge

#: Lengths that cross tile borders: on a GPU, and small enough for an interpreter.
_LENGTHS = {"cuda": 2048, "cpu": 160}
_SEQUENCES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where it ran, on what, how long the call took (with compilation), and whether it was right."""

    device: str
    shapes: str
    seconds: float
    verdict: Verdict


def rehearse(module: ir.Module) -> Outcome:
    """Runs the module on the GPU, or without one on the CPU, and judges its outputs."""
    subject = subject_of(module)
    attention, device = module.variant.attention, subject.device
    length = _LENGTHS[device]
    problem = problem_for(module, length, device=device, tokens=_SEQUENCES * length)
    function = getattr(subject.module, attention.name)
    begin = time.perf_counter()
    result = function(*problem.tensors)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    outputs = result if isinstance(result, tuple) else (result,)
    arguments = dict(zip((arg.tensor.name for arg in module.args), problem.tensors, strict=True))
    expected = expect(attention, arguments, module.kernel.bound)
    named = dict(zip((arg.tensor.name for arg in module.outputs), outputs, strict=True))
    return Outcome(
        device=place(subject) if device == "cuda" else f"{place(subject)} (there is no GPU)",
        shapes=", ".join(f"{key} {list(arguments[key].shape)}" for key in ("q", "k")),
        seconds=seconds,
        verdict=judge(attention, expected, named),
    )
