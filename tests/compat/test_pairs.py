"""Functions of flash-attention and PyTorch, every value of an argument beside every value of every other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from attnc.api import repeats
from attnc.api.fastest import HOPPER
from attnc.compat import call, sdpa
from attnc.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from tests.by_day import each_by_day
from tests.compat import torch_grid
from tests.compat.flash_grid import Case, run
from tests.compat.torch_grid import RUNS
from tests.pairs import Axes, Values, any_of, covering

BOTH = (False, True)
SCORES: Axes = {
    "dtype": (torch.float16, torch.bfloat16),
    "heads": ((4, 4), (4, 2), (3, 1)),
    "mask": ((False, False), (True, False), (False, True), (True, True)),
    "softcap": (0.0, 15.0),
    "scale": (None, 0.3),
    "alibi": (0, 1, 2),
    "sink": BOTH,
    "strided": BOTH,
    "out": BOTH,
}
DENSE: Axes = {
    **SCORES,
    "shape": ((21, 37), (37, 21), (1, 37), (4, 33)),
    "sizes": ((32, 0), (40, 16)),
    "dropout": (0.0, 0.17),
    "grads": BOTH,
}
VARLEN: Axes = {
    **SCORES,
    "shape": ((21, 37), (37, 21), (1, 37)),
    "dropout": (0.0, 0.17),
    "grads": BOTH,
    "page": (0, 5, 16),
    "used": BOTH,
    "empty": BOTH,
}
CACHE: Axes = {
    **SCORES,
    "shape": ((1, 37), (3, 40), (18, 37), (2, 32)),
    "storage": ("plain", "pages", "odd pages", "chosen"),
    "new": (0, 1, 3, "joined"),
    "lengths": ("tensor", "number", "none"),
    "leftpad": BOTH,
    "empty": BOTH,
    "ragged": BOTH,
    "splits": (0, 1, 3),
    "rotary": (0.0, 0.5, 1.0),
    "interleaved": BOTH,
    "own_angles": BOTH,
}


def fits_training(x: Values) -> bool:
    return not (x["grads"] and (x["out"] or x.get("page") or x.get("used")))


def fits_cache(x: Values) -> bool:
    needs_lengths = x["new"] or "pages" in x["storage"]
    if (needs_lengths and x["lengths"] == "none") or (x["empty"] and x["lengths"] != "tensor"):
        return False
    if x["leftpad"] and x["empty"]:
        return False
    return bool(x["new"]) if x["rotary"] else x["interleaved"] and not x["own_angles"]


def case_of(call: str, x: Values) -> Case:
    """The case that values of axes say."""
    said = dict(x)
    said["causal"], said["local"] = said.pop("mask")
    said["rows"], said["keys"] = said.pop("shape")
    said["size"], said["size_v"] = said.pop("sizes", (32, 0))
    storage = said.pop("storage", "plain")
    said["page"] = {"pages": 16, "odd pages": 5}.get(storage, said.get("page", 0))
    said["chosen"] = storage == "chosen"
    if said.get("new") == "joined":
        said |= {"new": 3, "joined": True}
    return Case(call=call, batch=3 if call == "varlen" else 2, **said)


SPACES: dict[str, tuple[Axes, Any]] = {
    "dense": (DENSE, fits_training),
    "varlen": (VARLEN, fits_training),
    "cache": (CACHE, fits_cache),
}
CASES = [case_of(call, x) for call, (axes, fits) in SPACES.items() for x in covering(axes, fits)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", each_by_day(CASES, of=5), ids=str)
def test_every_pair_of_arguments(case: Case) -> None:
    run(case, torch.device("cpu"))


TORCH_CASES = [(call, x) for call, (axes, _) in RUNS.items() for x in covering(axes, torch_grid.fits)]


@pytest.fixture
def active() -> Iterator[None]:
    handle = sdpa.activate("CPU")
    yield
    handle.remove()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("call", "x"), each_by_day(TORCH_CASES, of=5), ids=lambda x: x if isinstance(x, str) else ""
)
def test_every_pair_of_arguments_of_torch(call: str, x: Values, active: None) -> None:
    torch_grid.run(call, x)


@pytest.mark.nightly
@pytest.mark.parametrize("call", RUNS)
def test_any_arguments_of_torch(call: str, active: None) -> None:
    """By day: a third of the cases that have every pair."""

    @settings(max_examples=600)
    @given(any_of(RUNS[call][0], torch_grid.fits))
    def check(x: Values) -> None:
        torch_grid.run(call, x)

    check()


@pytest.mark.nightly
@pytest.mark.parametrize("call", SPACES)
def test_any_arguments(call: str) -> None:
    """By day: a third of the cases that have every pair."""

    @settings(max_examples=600)
    @given(any_of(*SPACES[call]))
    def check(x: Values) -> None:
        run(case_of(call, x), torch.device("cpu"))

    check()


def test_gradients_of_short_packed_sequences_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that is the faster way; by the longest sequence that the caller names."""
    asked: list[bool] = []
    monkeypatch.setattr(call.Call, "hurry", lambda self, deterministic: asked.append(deterministic))
    q, k, v = torch.randn(3, 20, 2, 16, dtype=torch.float16)
    ends = torch.tensor([0, 5, 20], dtype=torch.int32)
    for longest in (15, call.FEW_KEYS, call.FEW_KEYS + 1, None):
        flash_attn_varlen_func(q, k, v, ends, ends, 15, longest)
        repeats.forget()
    assert asked == [True, True, False, False]


@pytest.mark.parametrize("keys", [call.TILE_KEYS, call.TILE_KEYS + 1])
def test_gradients_beside_one_tile_of_keys_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, keys: int
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(call, "targets_of_call", lambda *_, **__: (HOPPER, "triton"))

    def prepare(self: Any) -> Any:
        asked.append("fast" in self._form)
        raise InterruptedError

    monkeypatch.setattr(call.Call, "_prepare_function", prepare)
    q, k, v = (torch.randn(1, n, 2, 16).half().requires_grad_() for n in (300, keys, keys))
    with pytest.raises(InterruptedError):
        flash_attn_func(q, k, v)
    repeats.forget()
    assert asked == [keys > call.TILE_KEYS]
