"""A planned module made ready to be judged, on the GPU where there is one, else as its runner does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from attnc.build import digest
from attnc.plan import ir
from attnc.plan.ir import split_of
from attnc.runtime.loader import load_files
from attnc.target.files import render_files
from attnc.verify.runners import runner_of
from attnc.verify.subject import Subject


def has_gpu() -> bool:
    """Whether kernels run on a GPU here, not in the interpreter."""
    return torch.cuda.is_available()


def subject_of(module: ir.Module, text: str | Mapping[str, str] | None = None) -> Subject:
    """Renders and loads the module, or loads this text of it, or these texts in place of its files of these
    names. Without a GPU the first call decides for the whole process whether Triton interprets.
    """
    runner, source = runner_of(module.target), module.variant.source
    device = runner.device(module.target)
    if device == "cpu":
        runner.prepare()
    if isinstance(text, str):
        text = {f"{module.variant.name}.py": text}
    files = render_files(module, path=Path(source.path).name, sha256=digest(source))
    loaded = load_files({**files, **(text or {})})
    if device == "cpu":
        runner.attach(loaded)
    return Subject(
        variant=module.variant,
        bound=module.kernel.bound,
        module=loaded,
        target=module.target,
        device=device,
        gradients=None if module.backward is None else module.backward.bound,
        split=split_of(module.kernel) is not None,
        warps_matter=runner.warps_matter,
        atomic=atomic_inputs(module),
        plan=module,
    )


def atomic_inputs(module: ir.Module) -> frozenset[str]:
    """Inputs whose gradients are not the same, bit for bit, in every run."""
    backward = module.backward
    if backward is None:
        return frozenset()
    found = {
        gradient.tensor.name
        for gradient in backward.gradients
        if any(part.accumulate == "atomic" for part in gradient.parts)
    }
    return frozenset(
        found | ({"q"} if any(kernel.chain.adds_dq == "atomic" for kernel in backward.kernels) else set())
    )


def place(subject: Subject) -> str:
    """Where the subject runs, for a reader."""
    return torch.cuda.get_device_name() if subject.device == "cuda" else runner_of(subject.target).without_gpu
