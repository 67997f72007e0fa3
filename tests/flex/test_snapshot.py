"""What a mod depends on: whether it can be told, and what makes two mods the same."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask

from attnc.flex.snapshot import Snapshot, find_token, keep_token, snapshot

TABLE = torch.arange(4)
COUNT = 0
#: What a mod reads that has other values elsewhere.
KNOWN: Any = None


def of(mod: Any) -> Snapshot | None:
    return snapshot((mod, None), None)


def half(x: Any) -> Any:
    return x / 2


def closing(value: Any) -> Callable[..., Any]:
    """A mod that closes over a value."""
    return lambda score, b, h, q, kv: (score, value)


def having_a_default(value: Any) -> Callable[..., Any]:
    return lambda score, b, h, q, kv, known=value: (score, known)


def reading_a_global(value: Any) -> Callable[..., Any]:
    return FunctionType((lambda score, b, h, q, kv: (score, KNOWN)).__code__, {"KNOWN": value})


def nested(depth: int) -> Callable[..., Any]:
    """A mod that reaches a function that reaches another, and so on."""
    found: Callable[..., Any] = half
    for _ in range(depth):
        found = (lambda inner: lambda *given: inner(*given))(found)
    return found


def recursive(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return recursive(score, b, h, q, kv)


def writes_a_global(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    global COUNT
    COUNT += 1
    return score


def keeps_a_number(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    kept = 0

    def inside() -> Any:
        nonlocal kept
        kept = score
        return kept

    return inside()


def counting(*, inside: bool) -> Callable[..., Any]:
    """A mod that counts its calls, or has a function inside that does."""
    calls = 0

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        nonlocal calls
        calls += 1
        return score

    def around(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        def count() -> None:
            nonlocal calls
            calls += 1

        count()
        return score

    return around if inside else mod


def imports(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    import math

    return score * math.pi


def has_a_class(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    class Inside:
        value = score

    return Inside.value


def sets_an_attribute(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    TABLE.shape = score
    return score


def keyword_only(score: Any, b: Any, h: Any, q: Any, kv: Any, *, factor: float = 2.0) -> Any:
    return score * factor


CLEAR: dict[str, Any] = {
    "numbers": lambda score, b, h, q, kv: score * 2 - 0.5,
    "operations of torch": lambda score, b, h, q, kv: torch.tanh(score) + torch.nn.functional.gelu(h),
    "of a module by its name": lambda score, b, h, q, kv: F.silu(score) + torch.special.expm1(h),
    "methods": lambda score, b, h, q, kv: score.abs().clamp(min=1).float() * q.ndim + score.dim(),
    "numbers of math": lambda score, b, h, q, kv: math.sqrt(2) * math.tau + math.isqrt(9) + math.inf,
    "of operator": lambda score, b, h, q, kv: operator.add(score, 1),
    "functions of Python": lambda score, b, h, q, kv: sum((score, abs(q), max(1, 2), len((1,)), int(2.5))),
    "a tensor": lambda score, b, h, q, kv: score + TABLE[kv],
    "types and devices": lambda score, b, h, q, kv: score.to(torch.float32).new_zeros(()).to(score.device),
    "a number that is kept in a call": keeps_a_number,
    "another function": lambda score, b, h, q, kv: half(score),
    "a function inside": lambda score, b, h, q, kv: (lambda x: half(x))(score),
    "eight functions": nested(8),
    **{f"closing over {value!r}": closing(value) for value in (1, True, "a", None, 0.5, (1, (2, None)))},
    **{f"closing over {value!r}": closing(value) for value in (torch.int32, torch.device("cpu"))},
    "closing over a module": closing(math),
    "closing over a function": closing(half),
    "closing over an operation": closing(torch.tanh),
    "closing over a type": closing(int),
    "a default": lambda score, b, h, q, kv, more=(1, half): score,
}  # fmt: skip
UNCLEAR: dict[str, Any] = {
    "nine functions": nested(9),
    "itself": recursive,
    "a name that has no value": FunctionType(closing(1).__code__, {}, closure=(CellType(),)),
    "writing": writes_a_global,
    "counting calls": counting(inside=False),
    "counting calls inside": counting(inside=True),
    "importing": imports,
    "a class": has_a_class,
    "an attribute that is set": sets_an_attribute,
    "a keyword": keyword_only,
    "an attribute": lambda score, b, h, q, kv: score * TABLE.grad,
    "a function of torch with a state": lambda score, b, h, q, kv: score * torch.rand(()),
    "a function of Python's that asks more": lambda score, b, h, q, kv: score * id(score),
    "a list": closing([1]),
    "a dict": closing({}),
    "an object": closing(object()),
    "a module of others": closing(pytest),
    "a type of others": closing(Snapshot),
    "a function of others": closing(print),
    "a partial function": functools.partial(half),
    "no function": "half",
}


@pytest.mark.parametrize("name", [*CLEAR, *UNCLEAR])
def test_what_a_mod_depends_on_can_be_told_or_not(name: str) -> None:
    taken = of({**CLEAR, **UNCLEAR}[name])
    assert (taken is not None) == (name in CLEAR)


def test_integers_of_inference_mode_cannot_be_told() -> None:
    with torch.inference_mode():
        integers, floats = torch.arange(3), torch.ones(3)
    assert of(closing(integers)) is None  # changes are not counted
    assert of(closing(floats)) is not None  # data of floats is not looked at


VALUES = [
    0, 1, 2, True, False, 0.0, -0.0, 1.0, float("nan"), "1", None, (1,), (1, 2), (1, (2,)), (True,),
    torch.int32, torch.int64, torch.device("cpu"), torch.device("meta"), math, torch, int, float, torch.tanh,
    torch.exp, half, functools.wraps(half)(lambda x: x),
]  # fmt: skip


#: Ways in which a mod reaches a value.
WAYS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "closure": closing,
    "default": having_a_default,
    "global": reading_a_global,
    "default of a function": lambda value: closing(having_a_default(value)),
}


@pytest.mark.parametrize("way", WAYS)
def test_mods_are_the_same_where_all_that_they_reach_is(way: str) -> None:
    keys = []
    for value in VALUES:
        taken, again = of(WAYS[way](value)), of(WAYS[way](value))
        assert taken is not None
        assert again is not None
        assert taken.key == again.key, value
        keys.append(taken.key)
    assert len({*keys}) == len(VALUES)


def test_a_mod_of_scores_is_none_of_masks() -> None:
    first, second = (snapshot(mods, None) for mods in ((half, None), (None, half)))
    assert first is not None
    assert second is not None
    assert first.key != second.key


def test_tensors_are_the_same_by_place_and_integers_by_data_too() -> None:
    a, b = torch.ones(3), torch.ones(3)
    keys = [taken.key for x in ((a, a), (b, b), (a, b), (b, a)) if (taken := of(closing(x))) is not None]
    assert keys[0] == keys[1]
    assert keys[2] == keys[3]
    assert keys[0] != keys[2]
    integers = torch.arange(3)
    before = of(closing((a, integers)))
    assert before is not None
    assert [x is y for x, y in zip(before.tensors, (a, integers), strict=True)] == [True] * 2
    assert [x is integers for x in before.looked_at] == [True]
    a.zero_()
    same = of(closing((a, integers)))
    assert same is not None
    assert same.key == before.key
    integers[0] = 7
    for x in (integers, integers.clone()):
        after = of(closing((a, x)))
        assert after is not None
        assert after.key != before.key


def test_block_masks_are_the_same_where_all_that_they_hold_is() -> None:
    """Their lists by identity and version, however alike: their data is looked at."""
    counts, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    made: dict[str, Any] = {
        "kv_num_blocks": counts, "kv_indices": indices, "full_kv_num_blocks": counts,
        "full_kv_indices": indices, "BLOCK_SIZE": 16, "mask_mod": half, "seq_lengths": (32, 32),
    }  # fmt: skip
    others = made | {
        "kv_num_blocks": counts.clone(), "kv_indices": indices.clone(), "full_kv_num_blocks": counts.clone(),
        "full_kv_indices": indices.clone(), "BLOCK_SIZE": (16, 32), "mask_mod": closing(1),
        "seq_lengths": (31, 32),
    }  # fmt: skip
    masks = [made, made, *(made | {name: others[name]} for name in made)]
    taken = [snapshot((half,), BlockMask.from_kv_blocks(**mask)) for mask in masks]
    keys = [each.key for each in taken if each is not None]
    assert keys[0] == keys[1]
    assert len({*keys[1:]}) == len(keys[1:]) == len(made) + 1
    assert taken[0] is not None
    assert len({id(x) for x in taken[0].looked_at} & {id(counts), id(indices)}) == 2
    without = snapshot((half,), None)
    assert without is not None
    assert without.key not in keys
    counts.zero_()
    after = snapshot((half,), BlockMask.from_kv_blocks(**made))
    assert after is not None
    assert after.key != keys[0]


def test_a_token_stands_for_a_snapshot_while_its_tensors_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnc.flex.snapshot._TOKENS", {})
    integers = torch.arange(3)
    taken, other = of(closing(integers)), of(closing(2))
    assert taken is not None
    assert other is not None
    assert find_token(taken) is None
    for each in (taken, other):
        keep_token(each)
    token = find_token(taken)
    assert token is not None
    keep_token(taken)
    assert find_token(taken) is token
    assert find_token(other) not in (None, token)
    del integers, taken.tensors[:], taken.looked_at[:]
    assert find_token(taken) is None
    assert find_token(other) is not None
