"""Mods that are recorded as steps, which graphs hold as a text: done again, they compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attnc.flex import FlexError
from attnc.flex.compiled import mod_of, read, written
from attnc.flex.recording import Recorder
from tests.flex.meaning import products, tape_values, trace_at
from tests.flex.random_mods import drawn
from tests.flex.test_operations import OF_CONDITIONS, PRODUCT, TEXTS, mod_of_text

CPU = torch.device("cpu")
POSITIONS = (torch.int32,) * 4


def again(mods: tuple[Any, Any]) -> tuple[tuple[Any, Any], Recorder]:
    """Returns a score_mod and a mask_mod that do what these did, with what was recorded of both together."""
    recorder = Recorder(CPU)
    of = [((torch.float32, *POSITIONS), mods[0]), (POSITIONS, mods[1])]
    steps = [None if mod is None else recorder.record(mod, types) for types, mod in of]
    program = read(written(*steps, None, False, "BHMD", False, (), "", (None, None)))
    lists = recorder.tensors, recorder.floats, recorder.integers
    score, mask = (mod_of(each, *lists, None) for each in (program.score, program.mask))
    return (score, mask), recorder


def check(mods: tuple[Any, Any], product: torch.Tensor) -> Recorder:
    (found, recorder), direct = again(mods), trace_at(*mods, product)
    traced = trace_at(*found, product)
    for ours, right in ((traced.score, direct.score), (traced.mask, direct.mask)):
        x, y = tape_values(traced, product)[ours], tape_values(direct, product)[right]
        assert x.dtype == y.dtype
        assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))
    assert sorted(map(id, recorder.tensors)) == sorted({*map(id, recorder.tensors)})
    return recorder


@pytest.mark.parametrize("first", range(4))
def test_operations_are_done_again(first: int) -> None:
    for text in [*TEXTS][first::9]:
        if text.startswith("x.cpu"):  # which has no data there
            continue
        print(text)
        mod = mod_of_text(text, is_mask=text in OF_CONDITIONS)
        check((None, mod) if text in OF_CONDITIONS else (mod, None), PRODUCT)


@pytest.mark.parametrize("first", range(0, 12, 4))
def test_random_mods_are_done_again(first: int) -> None:
    for seed in range(3000 + first, 3004 + first):
        draw = drawn(seed)
        print(draw)
        (B, H, M, _), N = draw.q.shape, draw.k.shape[2]
        check((draw.score_mod, draw.mask_mod), products(B, H, M, N))


def test_numbers_and_tensors_are_lists_beside_the_steps() -> None:
    """Each tensor once, each number where it is used."""
    a, b = torch.linspace(-1, 1, 9), torch.arange(9)

    def score(score: Any, _b: Any, h: Any, q: Any, kv: Any) -> Any:
        found = torch.where(q > 2, score * 0.25, a[kv] + 3 * b[kv]) + a[q] * 0.75 - np.float64(0.125) * h
        return torch.clamp(found, min=-5, max=2.5) + torch.stack([torch.ones(()), torch.zeros(())]).sum()

    def mask(_b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (b[kv] - q < 4) & (kv != 7)

    recorder = check((score, mask), PRODUCT)
    assert [x for x in recorder.tensors if x.dim()] == [a, b] or [id(x) for x in recorder.tensors[:2]]
    assert {0.25, 0.75, 2.5} <= {*recorder.floats}
    assert recorder.integers == [2, 3, -5, 4, 7]


def test_a_mod_may_return_what_it_was_given() -> None:
    check((lambda score, b, h, q, kv: score, None), PRODUCT)
    check((lambda score, b, h, q, kv: score.contiguous() + score.view(()), None), PRODUCT)


@pytest.mark.parametrize(
    ("code", "mod"),
    [
        ("E0902", lambda score, b, h, q, kv: score if q > kv else -score),
        ("E0902", lambda score, b, h, q, kv: score * float(q)),
        ("E0902", lambda score, b, h, q, kv: score * (q - kv).item()),
        ("E0902", lambda score, b, h, q, kv: [score][int(h)]),
    ],
)
def test_what_asks_for_a_number_is_refused(code: str, mod: Callable[..., Any]) -> None:
    with pytest.raises(FlexError, match=code):
        again((mod, None))
    check(
        (lambda score, b, h, q, kv: score * float(torch.ones(())) if bool(torch.ones(())) else q, None),
        PRODUCT,
    )


def test_what_no_text_can_hold_is_refused() -> None:
    with pytest.raises(FlexError, match=r"E0903(.|\n)*a object in a mod"):
        written(object())
    values: Any = (
        1,
        0.5,
        True,
        None,
        "a",
        torch.int32,
        torch.device("cpu"),
        slice(None),
        Ellipsis,
        (1, (2,)),
    )
    assert read(written(*values[:4], "BHMD", False, (), values[4], values)).places == values
