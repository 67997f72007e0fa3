"""Of which lists ds is kept, and what a call declares of the rounds in which it is."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from attnc.plan.ir.backward import Backward
from attnc.plan.sm90.kept import KEPT_BYTES, KEPT_TILE
from attnc.support.devices import MOST_KEPT
from attnc.support.sizes import count_kept, evaluate
from tests.verify.judging import modules_of

TEXT = """attention a {
  input q: bf16[B, M, Hkv * G, D]
  input k, v: bf16[B, N, Hkv, D]
  input idx: i32[B, Hkv, R, S]
  EXTRAS
  score = dot(q, k) / 8
  mask = MASK
  normalize = softmax
  output o: bf16[B, M, Hkv * G, D]
  grad q, k, v
}

schedule a for cuda.sm_90a {
  backward { WAY }
}
"""


class Config(NamedTuple):
    """Of the kernel for dk and dv, as sizes read it."""

    BLOCK_N: int = 128
    kept: int = 0


PLAIN = "listed(idx, rows = 128, keys = 128)"


def backward(mask: str = PLAIN, *, d: int = 64, extras: str = "", way: str = "") -> Backward:
    text = TEXT.replace("D]", f"{d}]").replace("MASK", mask).replace("EXTRAS", extras).replace("WAY", way)
    (module,) = modules_of(text)
    assert module.backward is not None
    return module.backward


@pytest.mark.parametrize(
    ("mask", "options", "keeps"),
    [
        (PLAIN, {}, True),
        (f"{PLAIN} and causal", {}, True),
        (f"{PLAIN} and (kv_idx < 40 or window(70, 0))", {}, True),
        ("listed(idx, rows = 256, keys = 384)", {"d": 128}, True),
        ("listed(idx, rows = 128, keys = 64)", {}, False),
        ("listed(idx, rows = 64, keys = 128)", {}, False),
        (f"{PLAIN} and kv_idx >= left[b]", {"extras": "input left: i32[B]"}, False),  # a load for each tile
        (f"{PLAIN} and kv_idx >= 5", {}, False),  # keys that no query sees may be NaN
        (PLAIN, {"extras": "input n: i32[B]\n  length N = n[b]"}, False),
        (PLAIN, {"way": "accumulate.dq = atomic"}, False),
    ],
)
def test_ds_of_whole_tiles_is_kept(mask: str, options: dict[str, Any], keeps: bool) -> None:
    made = backward(mask, **options)
    assert (made.last is not None, made.rounds is not None) == (keeps, keeps)
    assert any(planned.kept is not None for planned in made.kernels) == keeps


def test_dq_is_made_of_whole_tiles_of_ds() -> None:
    last = backward().last
    assert last is not None
    (config,) = last.configs
    assert (config.tile_q, config.tile_kv, last.kind, last.config) == (128, KEPT_TILE, "dq_kept", "dq_config")
    assert last.shared == (config.stages * (KEPT_TILE * 64 * 2 + KEPT_BYTES) + 1536,)


GPU = {"kept_room()": lambda: MOST_KEPT, "multiprocessors()": lambda: 132}


@pytest.mark.parametrize("block", [128, 384])
def test_rounds_have_all_heads_once(block: int) -> None:
    """With ds of each entry of a list, as many K/V heads at once as there is room for."""
    rounds = backward(f"listed(idx, rows = 128, keys = {block})").rounds
    assert rounds is not None
    call = {"B": 2, "M": 8192, "N": 40768, "Hkv": 5, "G": 3, "H": 15, "S": 100}
    names: dict[str, Any] = {**call, "list_blocks": -(-call["N"] // block), "dkdv_config": Config(), **GPU}
    for name, text in rounds.sizes.items():
        names[name] = evaluate(text, names)
    assert names["HEAD_BYTES"] == 3 * 64 * 100 * (block // 128) * KEPT_BYTES
    assert names["KEPT_HEADS"] == count_kept(names["HEAD_BYTES"], 10, MOST_KEPT) < 10
    heads: list[int] = []
    for number in range(names["ROUNDS"]):
        found: dict[str, Any] = {**names, "ROUND": number}
        for name, text in rounds.of_round.items():
            found[name] = evaluate(text, found)
        heads += range(found["FIRST_HEAD"], found["FIRST_HEAD"] + found["ROUND_HEADS"])
        assert found["ROUND_WALKS"] * 3 == -(-40768 // 128) * found["ROUND_HEADS"]
    assert heads == list(range(30))
    (memory,) = rounds.workspaces.values()
    assert evaluate(memory.partition("[")[2].rstrip("]"), names) == (names["KEPT_HEADS"], names["HEAD_BYTES"])


def test_without_room_all_heads_run_in_two_passes() -> None:
    rounds = backward().rounds
    assert rounds is not None
    names: dict[str, Any] = {"B": 1, "M": 1 << 20, "N": 1 << 20, "Hkv": 2, "G": 1, "H": 2, "S": 8192}
    names |= {"list_blocks": 8192, "dkdv_config": Config(), "ROUND": 0, **GPU}
    for name, text in {**rounds.sizes, **rounds.of_round}.items():
        names[name] = evaluate(text, names)
    assert (names["KEPT_HEADS"], names["ROUNDS"], names["ROUND_HEADS"]) == (0, 1, 2)
    run = {kernel for kernel, forms in rounds.forms.items() for _, when in forms if evaluate(when, names)}
    assert run == set(rounds.forms) - {"a_backward_dq_kept"}
