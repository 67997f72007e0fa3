"""Launches every kernel of some generated modules, for a tool that watches the process.

    compute-sanitizer python -m attnc.verify.launches '[[NAME, SPEC, ATTENTION, VARIANT, TARGET], ...]'

Every config of a module runs once on a small problem with ragged tiles, and its first also on tensors that
are not aligned to 16 bytes. Inputs come from the CPU, so that nothing but the kernels under test writes to
the GPU's memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attnc.build import front, plan_program, tuned_of
from attnc.plan import ir
from attnc.runtime.loader import load_module
from attnc.runtime.trial import problem_for
from attnc.support.configs import shared_on
from attnc.verify.sanitize import BEGIN, END

#: Keys and queries: two tiles of the largest size, the second ragged.
_LENGTH = 193


def main(described: str) -> None:
    """Runs the modules in order; each is announced and, when all its kernels have ended, counted."""
    planned: dict[str, tuple[ir.Module, ...]] = {}
    for name, spec, attention, variant, target in json.loads(described):
        if spec not in planned:
            planned[spec] = plan_program(front(Path(spec))).modules
        (module,) = (
            m
            for m in planned[spec]
            if (m.variant.attention.name, m.variant.name, m.target) == (attention, variant, target)
        )
        say(f"{BEGIN}{name}")
        host = load_module(module, tuned_of(Path(spec)))
        say(f"{END}{name} {sum(1 for _ in launches(module, host))}")


def launches(module: ir.Module, host: ModuleType) -> Iterator[None]:
    """Runs the forward under each config, and once with all tensors misaligned; then the backward."""
    callable_: Any = getattr(host, module.variant.attention.name)
    configs = fitting(host.CONFIGS)
    aligned, shifted = (problem(module, offset) for offset in (0, 1))
    for config in configs:
        with torch.no_grad():
            callable_(*aligned, config=config)
        torch.cuda.synchronize()
        yield
    with torch.no_grad():
        callable_(*shifted, config=configs[0])
    torch.cuda.synchronize()
    yield
    if module.backward is not None:
        yield from _gradients(module, host, aligned, shifted)


def _gradients(
    module: ir.Module, host: Any, aligned: list[torch.Tensor], shifted: list[torch.Tensor]
) -> Iterator[None]:
    attention = module.variant.attention
    wanted = [n for n, arg in enumerate(module.args) if arg.tensor.name in attention.grads]
    others = [
        {kernel: config}
        for kernel, configs in host.BACKWARD_CONFIGS.items()
        for config in fitting(configs)[1:]
    ]
    for inputs, chosen in ((aligned, {}), (shifted, {}), *((aligned, choice) for choice in others)):
        leaves = [inputs[n].detach().requires_grad_() for n in wanted]
        given = list(inputs)
        for n, leaf in zip(wanted, leaves, strict=True):
            given[n] = leaf
        found = getattr(host, attention.name)(*given, backward_config=chosen)
        outputs = [x for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
        weights = [torch.ones(x.shape, dtype=x.dtype).cuda() for x in outputs]
        torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
        torch.cuda.synchronize()
        yield


def problem(module: ir.Module, offset: int) -> list[torch.Tensor]:
    """Returns arguments on the GPU, each `offset` elements after the start of its allocation, which ends with
    it.
    """
    made = problem_for(module, _LENGTH, device="cpu", tokens=2 * _LENGTH)
    return [_place_at_offset(x, offset) for x in made]


def fitting(configs: Sequence[Any]) -> list[Any]:
    """Selects configs whose shared memory the GPU has."""
    properties: Any = torch.cuda.get_device_properties(0)  # annotated incompletely by torch
    room = properties.shared_memory_per_block_optin
    return [config for config in configs if shared_on(config, properties.major) <= room]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _place_at_offset(x: torch.Tensor, offset: int) -> torch.Tensor:
    there = torch.cat([x.new_zeros(offset), x.flatten()]).cuda()
    return there[offset:].view(x.shape)


if __name__ == "__main__":
    main(sys.argv[1])
    # A thread of PyTorch's autograd that meets an interpreter on its way out aborts the process now and then,
    # which would count as a finding of the sanitizer's.
    torch.cuda.synchronize()
    os._exit(0)
