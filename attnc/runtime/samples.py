"""Inputs of an attention, by name: from a file, or drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from attnc.plan.ir import Module
from attnc.runtime.trial import problem_for

_LENGTH, _TOKENS = 1024, 4096


def load_samples(path: Path) -> dict[str, torch.Tensor]:
    """What `torch.save` wrote: a dict of tensors. v, which scores do not depend on, may be missing.

    Nothing in the file is executed. Raises OSError, and ValueError if it is another kind of file.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as failure:  # of many kinds, whose texts advise to execute what the file holds
        raise ValueError(f"{path} is not a file of tensors that torch.save wrote") from failure
    if not isinstance(found, dict) or not all(isinstance(x, torch.Tensor) for x in found.values()):
        raise ValueError(f"{path} does not hold a dict of tensors")
    samples = {str(name): tensor for name, tensor in found.items()}
    if "k" in samples:
        samples.setdefault("v", torch.zeros_like(samples["k"]))
    return samples


def drawn(module: Module) -> Mapping[str, torch.Tensor]:
    """N(0, 1) inputs of 1024 keys, on the CPU."""
    problem = problem_for(module, _LENGTH, device="cpu", tokens=_TOKENS)
    names = (arg.tensor.name for arg in module.args)
    return dict(zip(names, problem.tensors, strict=True))
