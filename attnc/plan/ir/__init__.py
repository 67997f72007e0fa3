"""The plan, on one page: everything that a template prints, and nothing that it would have to compute.

An `ir.Kernel` is one GPU function. Its expressions are trees of `expr.nodes` over names that exist in the
kernel text: `Index` (b, h, q_idx, q_pos, kv_idx, q_lo, q_hi, kv_lo, kv_hi), `Dim` (M, N, H, ... and the tile
symbols BLOCK_M, BLOCK_N) and `Ref` (values the plan named). Conventions: `q_lo`/`q_hi` are the first and the
*last* row of the query tile; loop bounds are half open.
"""

from __future__ import annotations

from attnc.plan.ir.kernel import (
    Dropout,
    ErrorBound,
    Grid,
    Kernel,
    Softmax,
    Step,
    expressions_of,
    kernel_expressions,
)
from attnc.plan.ir.module import Arg, Bind, Module, kernels_of
from attnc.plan.ir.statements import (
    Axis,
    Fetch,
    Let,
    Loop,
    Regions,
    Row,
    Statement,
    fetch_expressions,
    statement_expressions,
)

__all__ = [
    "Arg",
    "Axis",
    "Bind",
    "Dropout",
    "ErrorBound",
    "Fetch",
    "Grid",
    "Kernel",
    "Let",
    "Loop",
    "Module",
    "Regions",
    "Row",
    "Softmax",
    "Statement",
    "Step",
    "expressions_of",
    "fetch_expressions",
    "kernel_expressions",
    "kernels_of",
    "statement_expressions",
]
