"""Scales of columns of k and v: `dot(q, k * k_scale[b, kv_idx, h // G, d // 32])`, a `v_scale` that reads d.

What is stored times its scale, in float32, is rounded once to the type of q; k and v are these numbers. So a
scale is one that is loaded, or a power of two by its exponent: of anything else kernels and the reference
would compute different floats, which may be rounded to different numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnc.expr.nodes import COLUMN, Binary, Call, Const, Dim, Expr, Index, Load, uses
from attnc.expr.simplify import substitute


@dataclass(frozen=True, slots=True)
class Keys:
    """What `dot` multiplies q by. scale: of the columns of k, None where they have none; rest: the load of
    the columns behind them, None where there are none.
    """

    scale: Expr | None = None
    rest: Load | None = None


#: What a scale of columns reads besides.
COLUMNS: Mapping[str, Expr] = {COLUMN: Index(COLUMN)}
COLUMN_LABEL = "may depend on b, kv_idx, h // G and the column d"
COLUMN_HINT = "write a load of an input, such as 'k_scale[b, kv_idx, h // G, d // 32]', or exp2 of an integer"
REST_LABEL = "may depend on b, kv_idx, h // G, and on the column d by its last index alone"
REST_HINT = "write a load of an input of the type of q, such as 'rope[b, kv_idx, h // G, d]'"
_GROUP = Binary("//", Index("h"), Dim("G"))


def reads_columns(scale: Expr | None) -> bool:
    """Returns whether a scale differs from column to column."""
    return scale is not None and COLUMN in uses(scale)


def find_column_mistake(scale: Expr, of: str) -> str:
    """Returns the mistake in a scale of columns of k or v; "" if there is none."""
    if uses(scale) & {"q_idx", "q_pos"}:
        return f"the scale of columns of {of} differs from query to query"
    match scale:
        case Load(type="float"):
            return ""
        case Call(function="exp2", args=(exponent,)) if exponent.type == "int":
            return ""
        case _:
            return f"the scale of columns of {of} is computed"


def find_rest_mistake(rest: Expr) -> str:
    """Returns the mistake in the columns behind those of k; "" if there is none."""
    match rest:
        case Load(type="float", indices=(*others, Index(name=name))) if name == COLUMN:
            read = {used for index in others for used in uses(index)}
            if not read & {"q_idx", "q_pos", COLUMN}:
                return ""
    return "columns behind those of k are no rows of an input"


def is_shared(scale: Expr) -> bool:
    """Returns whether a scale is the same for all query heads that share a K/V head."""
    return "h" not in uses(substitute(scale, {_GROUP: Const(0)}))
