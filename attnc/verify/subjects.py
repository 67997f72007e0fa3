"""A planned module made ready to be judged, on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import torch

from attnc.plan import ir
from attnc.verify.check import Subject
from attnc.verify.interpreter import ensure_interpreter, is_interpreting


def has_gpu() -> bool:
    """Whether kernels run on a GPU here, not in the interpreter."""
    return torch.cuda.is_available()


def subject_of(module: ir.Module, text: str | None = None) -> Subject:
    """Renders and loads the module, or loads this text of it. The first call decides for the whole process
    whether Triton interprets.
    """
    device = "cuda" if torch.cuda.is_available() and not is_interpreting() else "cpu"
    if device == "cpu":
        ensure_interpreter()
    # Triton decides when it is imported whether it interprets, hence only now:
    from attnc.runtime.loader import load_module, load_text

    loaded = load_module(module) if text is None else load_text(text)
    return Subject(variant=module.variant, bound=module.kernels[0].bound, module=loaded, device=device)


def place(subject: Subject) -> str:
    """Where the subject runs, for a reader."""
    return torch.cuda.get_device_name() if subject.device == "cuda" else "Triton's interpreter"
