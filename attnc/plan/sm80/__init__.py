"""The mma.sync family of CUDA targets: what each pass of a plan asks of `target`, and how it is decided."""

from attnc.plan.sm80.target import SM80, Sm80, backward_layout_of, layout_of

__all__ = ["SM80", "Sm80", "backward_layout_of", "layout_of"]
