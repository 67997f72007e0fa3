"""`weight = score * sigmoid(score) / N`: what a key counts where nothing is normalised."""

from __future__ import annotations

from attnc.diagnostics import Label, Reporter
from attnc.expr.nodes import Expr
from attnc.model.attention import Softmax
from attnc.model.elaborate import Elaborator
from attnc.syntax import ast


def resolve_weight(
    tree: ast.Weight | None,
    score: Expr | None,
    softmax: Softmax | None,
    elaborator: Elaborator,
    report: Reporter,
) -> Expr | None:
    """Returns the expression of the score by which a value is weighed: the score itself if the spec does not
    say; None after reporting a mistake.
    """
    if tree is None:
        return score
    if softmax is not None and softmax.form != "none":
        report.error(
            "E0325",
            f"a weight beside {'a softmax' if softmax.form == 'softmax' else softmax.form}",
            tree.value.span,
            "the normalization makes weights of its own",
            related=(Label(softmax.span, "the normalization"),) if softmax.span else (),
            hints=("write 'normalize = none'", "or write it into the score"),
        )
        return None
    also = {} if score is None else {"score": score}
    return elaborator.elaborate_typed(tree.value, "float", "a weight", also)


def check_outputs(tree: ast.Attention, softmax: Softmax | None, report: Reporter) -> None:
    """Reports an output lse where there is no softmax, whose denominator it is of."""
    for item in tree.items:
        if (
            isinstance(item, ast.Output)
            and item.name.id == "lse"
            and softmax is not None
            and softmax.form == "none"
        ):
            report.error(
                "E0325",
                "an lse without a softmax",
                item.name.span,
                "the logarithm of a denominator that there is not",
                related=(Label(softmax.span, "nothing is normalised"),) if softmax.span else (),
                hints=("remove it",),
            )
