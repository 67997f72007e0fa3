"""The Triton target: what each pass of a plan asks of `target`, and how it is estimated."""

from attnc.plan.triton.target import TRITON, Triton

__all__ = ["TRITON", "Triton"]
