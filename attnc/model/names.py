"""Words with a fixed meaning, and the checks for names that a spec introduces.

A name means one thing: nothing declared may reuse a reserved word or a name that is already taken in its
attention. Names of `def`s are looser: an attention's own names hide them, and a file may redefine a def of
the prelude. So are `SOFT` names, which came to the language when specs were already using them.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Mapping

from attnc.diagnostics import Label
from attnc.expr.functions import FUNCTIONS, REAL
from attnc.expr.nodes import INDICES
from attnc.model.report import Report
from attnc.model.tensors import DType
from attnc.syntax import ast

#: Sizes with a fixed meaning. H, Hkv and G are read off the shapes of q and k; D and Dv are known at compile
#: time.
DIMS = ("B", "M", "N", "H", "Hkv", "G", "D", "Dv")
#: The dims that a `param` may fix; the others are run-time sizes.
PARAM_DIMS = ("H", "Hkv", "G", "D", "Dv")
INPUTS = ("q", "k", "v")
OUTPUTS = ("o", "lse")

#: Names of a spec become names in Python, where these mean something else.
PYTHON: Mapping[str, str] = (
    dict.fromkeys(keyword.kwlist, "a word of Python, which kernels are written in")
    | dict.fromkeys(("torch", "triton", "tl"), "a module that kernels import")
    | dict.fromkeys(("out", "config"), "an argument of every generated function")
)
#: What an attention cannot be called: its function would hide what its own module uses.
NOT_FUNCTIONS: Mapping[str, str] = {
    **dict.fromkeys(dir(builtins), "a name of Python's own"),
    **PYTHON,
}
#: Names that a spec may declare as something else: functions, and the constant `inf`.
SOFT = frozenset({"clamp", "inf", *(name for name, function in REAL.items() if not function.is_reserved)})
#: `clamp(x, lo, hi)` is `min(max(x, lo), hi)`, and no function in the tree.
CLAMP_ARGUMENTS = 3
#: Every function of numbers that an expression may call, with its number of arguments.
CALLABLE: Mapping[str, int] = {**FUNCTIONS, "clamp": CLAMP_ARGUMENTS}
RESERVED: dict[str, str] = (
    dict.fromkeys(INDICES, "an index")
    | dict.fromkeys(DIMS, "a dimension")
    | dict.fromkeys((name for name in FUNCTIONS if name not in SOFT), "an intrinsic function")
    | dict.fromkeys(DType, "an element type")
    | dict.fromkeys((*INPUTS, *OUTPUTS), "one of the tensors q, k, v, o, lse")
    | {"dot": "the product of q and k", "softmax": "a normalization"}
    | dict(PYTHON)
)


class Taken:
    """The names declared so far in one scope, with the place of each declaration."""

    def __init__(self, report: Report) -> None:
        self._places: dict[str, ast.Name] = {}
        self._report = report

    def declare(
        self, name: ast.Name, allowed: tuple[str, ...] = (), reserved: Mapping[str, str] = RESERVED
    ) -> bool:
        """Take a name, unless it is reserved (and not `allowed`) or already taken: then report it and return
        False.
        """
        if name.id in reserved and name.id not in allowed:
            self._report.error(
                "E0202",
                f"'{name.id}' is reserved",
                name.span,
                f"always {reserved[name.id]}",
                hints=("choose another name",),
            )
            return False
        first = self._places.setdefault(name.id, name)
        if first is not name:
            self._report.error(
                "E0201",
                f"'{name.id}' is defined twice",
                name.span,
                "second definition",
                related=(Label(first.span, "first definition"),),
            )
        return first is name
