"""A planned module made ready to be judged, on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch

from attnc.build import digest
from attnc.plan import ir
from attnc.runtime.loader import load_files
from attnc.target.files import render_files
from attnc.verify.interpreter import ensure_interpreter, is_interpreting
from attnc.verify.simt import attach
from attnc.verify.subject import Subject


def has_gpu() -> bool:
    """Whether kernels run on a GPU here, not in the interpreter."""
    return torch.cuda.is_available()


def subject_of(module: ir.Module, text: str | None = None) -> Subject:
    """Renders and loads the module, or loads this text of it. The first call decides for the whole process
    whether Triton interprets.
    """
    if module.target != "triton":
        return cuda_subject(module, {} if text is None else {f"{module.variant.name}.py": text})
    device = "cuda" if has_gpu() and not is_interpreting() else "cpu"
    if device == "cpu":
        ensure_interpreter()
    # Triton decides when it is imported whether it interprets, hence only now:
    from attnc.runtime.loader import load_module, load_text

    return _subject(module, load_module(module) if text is None else load_text(text), device)


def _subject(module: ir.Module, loaded: ModuleType, device: str) -> Subject:
    return Subject(
        variant=module.variant,
        bound=module.kernels[0].bound,
        module=loaded,
        target=module.target,
        device=device,
        gradients=None if module.backward is None else module.backward.bound,
        split=module.kernels[0].split is not None,
        warps_matter=module.target != "triton",
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


def cuda_subject(module: ir.Module, texts: Mapping[str, str]) -> Subject:
    """Renders and loads a CUDA module, `texts` in place of its files of these names; without a GPU it runs
    thread by thread.
    """
    source = module.variant.source
    files = render_files(module, path=Path(source.path).name, sha256=digest(source))
    loaded = load_files({**files, **texts})
    device = "cuda" if has_gpu() else "cpu"
    if device == "cpu":
        attach(loaded)
    return _subject(module, loaded, device)


def place(subject: Subject) -> str:
    """Where the subject runs, for a reader."""
    if subject.device == "cuda":
        return torch.cuda.get_device_name()
    return "the CPU, thread by thread" if subject.warps_matter else "Triton's interpreter"
