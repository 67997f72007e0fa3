"""The plan, on one page: everything that a template prints, and nothing that it would have to compute.

An `ir.Kernel` is one GPU function: a `Forward`, a `Decode` or a `BackwardKernel`. Its expressions are trees
of `expr.nodes` over names that exist in the kernel text: `Index` (b, h, q_idx, q_pos, kv_idx, q_lo, q_hi,
kv_lo, kv_hi), `Dim` (M, N, H, ... and the tile symbols BLOCK_M, BLOCK_N) and `Ref` (values the plan named).
Conventions: `q_lo`/`q_hi` are the first and the *last* row of the query tile; loop bounds are half open.
"""

from __future__ import annotations

from attnc.plan.ir.bound import ErrorBound
from attnc.plan.ir.kernel import (
    Axis,
    Decode,
    Dropout,
    Epilogue,
    Fetch,
    Forward,
    Grid,
    Let,
    Loop,
    OutputKernel,
    Probabilities,
    Regions,
    Row,
    Softmax,
    Statement,
    Step,
    TileKernel,
    expressions_of,
    fetch_expressions,
    statement_expressions,
)
from attnc.plan.ir.module import Arg, Bind, Kernel, Margin, Module, pack_of, split_of, unified_of

__all__ = [
    "Arg",
    "Axis",
    "Bind",
    "Decode",
    "Dropout",
    "Epilogue",
    "ErrorBound",
    "Fetch",
    "Forward",
    "Grid",
    "Kernel",
    "Let",
    "Loop",
    "Margin",
    "Module",
    "OutputKernel",
    "Probabilities",
    "Regions",
    "Row",
    "Softmax",
    "Statement",
    "Step",
    "TileKernel",
    "expressions_of",
    "fetch_expressions",
    "pack_of",
    "split_of",
    "statement_expressions",
    "unified_of",
]
