"""`output o: bf16[B, M, H, D] = sigmoid(gate[b, q_idx, h, d]) * attention`: what becomes of the rows of o
before they leave the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

from attnc.diagnostics import Label, Reporter
from attnc.expr.nodes import COLUMN, Attended, Dot, Expr, Index, uses, walk
from attnc.model.elaborate import Elaborator
from attnc.syntax import ast

#: What an epilogue reads besides: the attention, and the column of o.
READ: Mapping[str, Expr] = {"attention": Attended(), COLUMN: Index(COLUMN)}


def resolve_epilogue(tree: ast.Attention, elaborator: Elaborator, report: Reporter) -> Expr | None:
    """Returns o as an expression of the attention; None if the spec has none, or after reporting a
    mistake.
    """
    made: Expr | None = None
    for item in tree.items:
        if not isinstance(item, ast.Output) or item.value is None:
            continue
        if item.name.id != "o":
            report.error(
                "E0324",
                f"'{item.name.id}' has an epilogue",
                item.value.span,
                "only o has one",
                hints=("write 'output o: ... = ...'",),
            )
            continue
        value = elaborator.elaborate_typed(item.value, "float", "o", READ)
        if value is not None and _fits(value, item.value, item, report):
            made = None if value == Attended() else value
    return made


def _fits(value: Expr, tree: ast.Expr, output: ast.Output, report: Reporter) -> bool:
    nodes = tuple(walk(value))
    if any(isinstance(node, Dot) for node in nodes) or "kv_idx" in uses(value):
        report.error(
            "E0324",
            "an epilogue of one key",
            tree.span,
            "may depend on 'attention', b, h, the query and the column d",
            hints=("what differs from key to key belongs to the score",),
        )
        return False
    if Attended() not in nodes:
        report.error(
            "E0324",
            "o does not depend on the attention",
            tree.span,
            "'attention' is the normalised sum over the keys",
            related=(Label(output.name.span, "declared here"),),
            hints=("write 'output o: ... = gate[b, q_idx, h, d] * attention'",),
        )
        return False
    return True
