"""Codes of what FlexAttention's mods say that no spec can."""

from __future__ import annotations

from attnc.diagnostics.code import CodeInfo

FLEX = {
    "E0901": CodeInfo(
        "operation of a mod that no spec has",
        "Mods of FlexAttention become specs, which add, multiply, compare, look up elements of tensors and "
        "call a few functions. docs/flex.md lists torch's operations one by one.",
    ),
    "E0902": CodeInfo(
        "mod that depends on a value",
        "A mod is called once, with symbols for its score and positions, to read what it computes. They have "
        "no values yet, so that it cannot branch on one or make a Python number of it.",
    ),
    "E0903": CodeInfo(
        "value of a mod that is no number or condition",
        "A mod computes with single numbers and conditions, or short rows of a tensor: every axis of a "
        "captured tensor is indexed, and what the mod returns is one value.",
    ),
}
