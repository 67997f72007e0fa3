"""Warpgroups of Hopper that take turns at issuing products, on the CPU: right in any order of warps, for any
mask and size; and what a deadlock says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.target.files import render_files
from attnc.verify.case import Case
from attnc.verify.check import check
from attnc.verify.subject import Subject, subject_of
from tests.by_day import each_by_day, some_by_day
from tests.targets import needs_gxx
from tests.verify.judging import modules_of, spec

pytestmark = [needs_gxx, pytest.mark.slow]

_LAZY = "softmax = online(maximum = lazy(20)), stages = 2, tile.kv = 32, pingpong = true"
_SCORE = "score = dot(q, k) / sqrt(32)"
_DROPOUT = ("input p: f32[]", "input seed: i64[]", "normalize = softmax(dropout = p, seed = seed)")


def text_of(
    schedule: str, *lines: str, q: str = "B, M, H, 32", kv: str = "B, N, H, 32", via: str = ""
) -> str:
    has_softmax = any(line.startswith("normalize") for line in lines)
    return spec(
        [
            f"input q: bf16[{q}]{via.replace('ends', 'q_ends')}",
            f"input k: bf16[{kv}]{via}",
            f"input v: bf16[{kv}]{via}",
            *([] if any(line.startswith("score") for line in lines) else [_SCORE]),
            *([] if has_softmax else ["normalize = softmax"]),
            *lines,
            f"output o: bf16[{q}]",
        ],
        schedule,
        target="cuda.sm_90a",
    )


#: Each in its own way: 2 to 4 warpgroups, with and without overlap; keys that not all rows see, none at all,
#: what keeps warpgroups at other barriers (values that are cleared, o that leaves through V, draws, pairs).
KINDS: Mapping[str, str] = {
    "all_of_two": text_of(f"{_LAZY}, consumers = 2"),
    "causal_of_three": text_of(f"{_LAZY}, consumers = 3", "mask = causal"),
    "causal_of_three_in_steps": text_of(f"{_LAZY}, consumers = 3, overlap = false", "mask = causal"),
    "window_of_four": text_of(f"{_LAZY}, consumers = 4", "mask = window(40, 3)"),
    "window_of_two_in_steps": text_of(f"{_LAZY}, consumers = 2, overlap = false", "mask = window(90, 0)"),
    "documents_of_four": text_of(
        f"{_LAZY}, consumers = 4, overlap = false",
        "input doc: i32[B, N] is sorted",
        "mask = causal and doc[b, q_pos] == doc[b, kv_idx]",
    ),
    "striped": text_of(f"{_LAZY}, consumers = 2", "mask = kv_idx // 32 % 3 == q_pos // 32 % 3"),
    "eager": text_of(
        "softmax = online(rescale = lazy(8)), consumers = 3, tile.kv = 48, pingpong = true", "mask = causal"
    ),
    "lengths": text_of(
        f"{_LAZY}, consumers = 2, order = longest_first",
        "input lens: i32[B]",
        "length N = lens[b]",
        "mask = causal",
    ),
    "groups": text_of(f"{_LAZY}, consumers = 2, overlap = false", q="B, M, Hkv * G, 32", kv="B, N, Hkv, 32"),
    "dropout": text_of(f"{_LAZY}, consumers = 2", *_DROPOUT, "mask = causal"),
    "pairs": text_of(
        f"{_LAZY}, consumers = 2",
        "input pairs: f32[H, M, N]",
        f"{_SCORE} + pairs[h, q_idx, kv_idx]",
        "mask = causal",
    ),
    "key_bias": text_of(
        f"{_LAZY}, consumers = 3", "input bias: f32[B, N]", f"{_SCORE} + bias[b, kv_idx]", "mask = causal"
    ),
    "packed": text_of(
        f"{_LAZY}, consumers = 2",
        "input q_ends, ends: i32[B + 1]",
        "mask = causal",
        q="T, H, 32",
        kv="S, H, 32",
        via=" via ragged(ends)",
    ),
    "through_values": text_of(
        "tile.kv = 80, pingpong = true", "mask = causal", q="B, M, H, 256", kv="B, N, H, 256"
    ),
}


@cache
def made(kind: str) -> Subject:
    (module,) = modules_of(KINDS[kind])
    assert "turn_wait();" in render_files(module, path="a.attn", sha256="")["default.cu"]
    return subject_of(module)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", some_by_day(KINDS, of=3))
@settings(max_examples=max(settings().max_examples // 25, 1))
@given(data=st.data())
def test_turns_change_no_result_and_end(kind: str, data: st.DataObject) -> None:
    """A turn that is waited for and not given, or given and not taken, is a fault of the simulator."""
    wide = kind == "through_values"
    m = data.draw(st.sampled_from((1, 63, 65, 129) if wide else (1, 2, 64, 65, 130, 200, 257, 400)))
    n = data.draw(st.sampled_from((1, 81, 170) if wide else (1, 31, 33, 64, 100, 161, 300)))
    sizes = {"Hkv": 1, "G": 2} if kind == "groups" else {"H": data.draw(st.sampled_from((1, 2)))}
    case = Case(
        dims={"B": data.draw(st.sampled_from((1, 2))), **sizes, "M": m, "N": n},
        logits=data.draw(st.sampled_from(("random", "rising", "spike", "huge"))),
        lengths=data.draw(st.sampled_from(("full", "drawn", "one"))),
        seed=data.draw(st.integers(0, 99)),
    )
    found = check(made(kind), case, fills=("nan",))
    assert found.ok, found.message


@pytest.mark.one_in(2)
@pytest.mark.parametrize("logits", each_by_day(["rising", "spike", "huge", "very_negative"], of=2))
def test_tiles_that_are_computed_again_have_as_many_turns(logits: str) -> None:
    """Warps give tiles up each for itself; all then compute them once more."""
    case = Case(dims={"B": 1, "H": 2, "M": 400, "N": 300}, logits=logits)
    found = check(made("causal_of_three"), case, fills=("nan",))
    assert found.ok, found.message


def test_configs_with_turns_and_without_are_one_text() -> None:
    """Each with ranges of its own: under turns all walk over the keys of all rows."""
    (module,) = modules_of(KINDS["window_of_four"].replace("pingpong = true", "pingpong in {true, false}"))
    subject = subject_of(module)
    for config in (0, 1):
        found = check(subject, Case(dims={"B": 1, "H": 2, "M": 300, "N": 200}, config=config), fills=("nan",))
        assert found.ok, found.message


def test_a_deadlock_says_who_waits_for_which_turn() -> None:
    """The turn of warpgroup c of three is barrier 5 + c; its warps are 4 + 4 c to 7 + 4 c."""
    (module,) = modules_of(KINDS["causal_of_three"])
    source = render_files(module, path="a.attn", sha256="")["default.cu"]
    wrong = "if (consumer == CONSUMERS - 1)\n        turn_arrive();"
    assert source.count(wrong) == 1
    broken = subject_of(module, {"default.cu": source.replace(wrong, "")})
    found = check(broken, Case(dims={"B": 1, "H": 1, "M": 100, "N": 100}), fills=("nan",))
    assert "a deadlock" in found.message
    for c in range(3):
        who, there = f"warps {4 + 4 * c}-{7 + 4 * c}, line", f"(warps {4 + 4 * c}-{7 + 4 * c})"
        (line,) = (line for line in found.message.splitlines() if who in line)
        assert line.endswith(f"wait at barrier {5 + c}, where 128 of 256 threads are {there}")
