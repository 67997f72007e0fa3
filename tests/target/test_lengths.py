"""Lengths as text: what torch makes of it for all sequences is what the expression is of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from attnc.expr.evaluate import Env, evaluate
from attnc.support.pages import count_keys
from attnc.target.lengths import show_length
from tests.verify.judging import modules_of, spec

SIZES = {"B": 4, "M": 3, "N": 64, "P": 4, "R": 5}
TENSORS: Mapping[str, Any] = {
    "lens": torch.tensor([7, -2, 40, 99], dtype=torch.int32),
    "words": torch.tensor([5, 0, -1, 2**40], dtype=torch.int64),
    "scale": torch.tensor([0.5, 2.0, -1.0, 0.25]),
    "few": torch.tensor([3, 1, 4, 1, 5], dtype=torch.int32),
}
#: A length, and the text of it.
LENGTHS = {
    "lens[b]": "at(lens, b)",
    "lens[b] + M - 1": "(at(lens, b) + M) - 1",
    "lens[b + 1] - lens[b]": "at(lens, b + 1) - at(lens, b)",
    "min(max(lens[b], 2), N - 5)": "least(most(at(lens, b), 2), N - 5)",
    "lens[b] // 3 * 3 + lens[b] % 4": "(quotient(at(lens, b), 3) * 3) + remainder(at(lens, b), 4)",
    "lens[b] // b": "quotient(at(lens, b), b)",
    "few[few[b]]": "at(few, at(few, b))",
    "few[b - 2]": "at(few, b - 2)",
    "abs(lens[b] - 20)": "absolute(at(lens, b) - 20)",
    "-lens[b] + 30": "(-at(lens, b)) + 30",
    "where(bit(words[b], 2), 9, 11)": "where(bit(at(words, b), 2), 9, 11)",
    "where(scale[b] > 0.3 and not (b == 1), 9, N)": "where((at(scale, b) > 0.3) & (b != 1), 9, N)",
    "where(scale[b] * 2.0 >= 1.0 or M < 0, 9, 5)": "where(((at(scale, b) * 2.0) >= 1.0) | (M < 0), 9, 5)",
    "where(exp(scale[b]) < 1.5, 3, 4)": "where(real('exp', at(scale, b)) < 1.5, 3, 4)",
    "where(scale[b] > -inf and lens[b] / 3 > M / 2, 9, 5)": (
        "where((at(scale, b) > (-inf)) & (ratio(at(lens, b), 3) > ratio(M, 2)), 9, 5)"
    ),
    "where(M > 2, lens[b], 12)": "where(M > 2, at(lens, b), 12)",
}


@pytest.mark.parametrize("length", LENGTHS)
def test_the_text_of_a_length_is_what_it_says(length: str) -> None:
    lines = [
        "input q: f16[B, M, H, 16]",
        "input k, v: f16[B, N, H, 16] via paged(table, page = 16)",
        "input table: i32[B, P]",
        "input lens: i32[B]",
        "input words: i64[B]",
        "input scale: f32[B]",
        "input few: i32[R]",
        f"length N = {length}",
        "score = dot(q, k)",
        "normalize = softmax",
        "output o: f16[B, M, H, 16]",
        "grad q",
    ]
    (module,) = modules_of(spec(lines))
    rows = module.key_rows
    assert rows is not None
    text = show_length(rows.length)
    assert text == LENGTHS[length]
    arrays = {name: np.asarray(x) for name, x in TENSORS.items()}
    env = Env(indices={"b": np.arange(SIZES["B"])}, dims=SIZES, tensors=arrays)
    expected = np.broadcast_to(evaluate(rows.length, env), (SIZES["B"],)).clip(0, SIZES["N"])
    assert count_keys(text, TENSORS, SIZES).clamp(0, SIZES["N"]).tolist() == expected.tolist()
