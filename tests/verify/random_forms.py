"""Random forms of an attention: what a key weighs, what is made of o, gates that forget, trees of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from tests.verify.random_words import Extra, Words

_EVERYWHERE, _OF_A_ROW = frozenset({"b", "h", "q_idx", "kv_idx"}), frozenset({"b", "h", "q_idx"})
_WEIGHTS = (
    "sigmoid(score)",
    "score * sigmoid(score) / N",
    "max(score, 0) * max(score, 0)",
    "tanh(score) + ({})",
    "where(score > 0, score, {}) / 64",
)
_EPILOGUES = (
    "({}) * attention",
    "sigmoid({}) * attention",
    "attention + ({})",
    "attention / (1 + abs(attention)) * ({})",
    "where(attention < 0, {}, attention)",
)
#: Words of a tree, and how many bits of each are read.
_TREES = (("u8", 8), ("i32", 32), ("i64", 64), ("i32", 7), ("i64", 40))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """weight, epilogue: "" where a key weighs what a softmax says, and o is the attention; term: of the
    score; tree: of the mask; extras: inputs of these.
    """

    weight: str = ""
    epilogue: str = ""
    term: str = ""
    tree: str = ""
    extras: tuple[Extra, ...] = ()


def draw_forms(words: Words, q_axes: Sequence[str], dtype: str, dv: int) -> Forms:
    """Draws what is more than a score, a mask and a softmax; of most specs nothing."""
    draw, extras = words.draw, []
    weight = epilogue = term = tree = ""
    if draw(st.integers(0, 7)) == 0:
        weight = draw(st.sampled_from(_WEIGHTS)).format(words.float_expr(1, _EVERYWHERE, dot=False))
    if draw(st.integers(0, 5)) == 0:
        value = words.float_expr(1, _OF_A_ROW, dot=False)
        if draw(st.booleans()):
            gate, element = _element(words, q_axes, dtype, dv)
            extras.append(gate)
            value = words.one_of(element, element, f"{element} + {value}", f"{value} * {element}")
        epilogue = f" = {draw(st.sampled_from(_EPILOGUES)).format(value)}"
    if not weight and draw(st.integers(0, 11)) == 0:
        extras.append(Extra("kept_of", "f32", ("B", words.heads, "N"), fact="descending"))
        term = " + kept_of[b, h, q_pos] - kept_of[b, h, kv_idx]"
    if draw(st.integers(0, 11)) == 0:
        word, size = draw(st.sampled_from(_TREES))
        extras.append(Extra("drafted", word, ("B", "Nodes", "Words")))
        tree = f"draft_tree(drafted, {size})"
    return Forms(weight=weight, epilogue=epilogue, term=term, tree=tree, extras=tuple(extras))


def _element(words: Words, q_axes: Sequence[str], dtype: str, dv: int) -> tuple[Extra, str]:
    """An element of each of o's, and the input that has it, with rows as q has them or in another order."""
    packed = {"T": "q_ends[b] + q_idx"}
    homes = {"B": "b", "M": "q_idx", words.heads: "h"} | packed
    axes = tuple(words.draw(st.permutations(q_axes)))
    found = Extra("gate_of", words.one_of(dtype, dtype, "f32"), (*axes, str(dv)))
    return found, f"gate_of[{', '.join(homes[axis] for axis in axes)}, d]"
