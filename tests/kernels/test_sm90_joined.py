"""Keys of two inputs on Hopper, thread by thread: 8 bits that are converted, and columns of 16 behind them,
in every storage, have the bits of keys that were joined before; and so have values that reach behind k.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from attnc.verify import narrow
from attnc.verify.case import Case, TensorLayout
from attnc.verify.check import check
from attnc.verify.properties import violations
from attnc.verify.subject import Subject, subject_of
from tests.by_day import some_by_day
from tests.profiles import is_night
from tests.targets import needs_gxx
from tests.verify.judging import modules_of, spec

pytestmark = [needs_gxx, pytest.mark.slow]


def text_of(
    k: str = "e4m3",
    *,
    q: str = "bf16",
    own: int = 128,
    behind: int = 64,
    page: int = 0,
    listed: str = "",
    mask: str = "causal",
    scale: str = "f32",
    knobs: str = "tile.kv = 64",
    joins: bool = True,
    values: int = 0,
    keys: int = 1,
    packed: bool = False,
) -> str:
    """Attention to latents whose last columns are another input. scale: the type of one for each 64 columns,
    "" for none; listed: who has a list, by its indices, of so many keys for each entry; values: columns of
    those that are keys as the product has them, 0: they are the first 128 of k; packed: q is.
    """
    row = f"table[b, kv_idx // {page}], kv_idx % {page}" if page else "b, kv_idx"
    axes, blocks = f"R, {page}" if page else "B, N", own // 64
    factor = {"": "", "f32": f"ks[{row}, d // 64]", "u8": f"exp2(ks[{row}, d // 64] - 127)"}[scale]
    stored = f"k * {factor}" if factor else "k"
    width = own + behind if joins else own
    of_q, of_lse, via, who = ("B, M", "B, G, M", "", f"idx[{listed}]")
    lists: tuple[str, ...] = (f"input idx: i32[B, {'M, ' if 'q_idx' in listed else ''}S]",) if listed else ()
    if packed:
        of_q, of_lse, via, who = ("T", "G, T", " via ragged(cu)", "idx, rows = 1")
        lists = ("input cu: i32[B + 1]", "input idx: i32[T, S]")
    named = f"listed({who}, keys = {keys}){f' and {mask}' if page or packed else ''}"
    lengths = () if listed and not page else ("input lens: i32[B]", "length N = lens[b]")
    lines = [
        f"input q: {q}[{of_q}, G, {width}]{via}",
        f"input k: {k}[B, N, 1, {own}]{f' via paged(table, page = {page})' if page else ''}",
        f"input v: {q if values else k}[B, N, 1, {values or 128}] via prefix(k)",
        *(["input table: i32[B, P]"] if page else []),
        *([f"input ks: {scale}[{axes}, {blocks}]"] if factor else []),
        *([f"input rope: {q}[{axes}, {behind}]"] if joins else []),
        *lists,
        *lengths,
        f"score = dot(q, {f'cat({stored}, rope[{row}, d])' if joins else stored}) / 8",
        f"mask = {named if listed or packed else mask}",
        f"normalize = softmax{f'(v_scale = {factor})' if factor and not values else ''}",
        f"output o: {q}[{of_q}, G, {values or 128}]",
        f"output lse: f32[{of_lse}]",
    ]
    schedule = "loops = [kv], pack = gqa, split.kv in {auto, 1}, consumers = 2"
    return spec(lines, f"{schedule}\n  {knobs}", target="cuda.sm_90a")


KINDS: Mapping[str, Mapping[str, Any]] = {
    "lists": {"listed": "b, q_idx"},
    "a list for all queries": {"listed": "b", "k": "i8", "q": "f16", "scale": "u8"},
    "lists without scales": {"listed": "b, q_idx", "scale": ""},
    "lists of 8 bits alone": {"listed": "b, q_idx", "joins": False},
    "lists of 8 bits without scales": {"listed": "b, q_idx", "joins": False, "scale": "", "k": "e5m2"},
    "dense": {"own": 192, "behind": 128},
    "pages": {"page": 16},
    "small pages": {"page": 4, "behind": 16, "scale": ""},
    "few columns, window": {"behind": 32, "mask": "window(40, 0)", "q": "f16", "scale": "u8"},
    "documents": {"page": 8, "mask": "causal and q_pos // 64 == kv_idx // 64"},
    "tiles of 32": {"knobs": "tile.kv = 32, stages = 3", "own": 256},
    "values behind k": {"own": 64, "page": 16, "values": 128},
    "values behind k of two blocks": {"own": 192, "values": 256, "scale": "u8", "q": "f16"},
    "values behind k and columns behind them": {"own": 64, "behind": 128, "values": 128, "scale": ""},
    "values behind k in lists": {"own": 64, "behind": 192, "values": 256, "listed": "b, q_idx"},
    "scaled values of k alone": {"page": 4, "values": 128},
    "lists in pages": {"page": 16, "listed": "b, q_idx"},
    "lists in pages, values behind k": {
        "own": 64,
        "page": 4,
        "values": 128,
        "scale": "u8",
        "listed": "b",
        "mask": "kv_idx >= 3 and causal",
    },
    "lists of blocks in pages": {"page": 32, "listed": "b, q_idx", "keys": 16, "joins": False, "k": "i8"},
    "packed lists in pages": {"own": 192, "page": 8, "values": 256, "scale": "u8", "packed": True},
    "packed lists without scales": {"packed": True, "joins": False, "scale": "", "k": "e5m2"},
}
SIZES = ((1, 5, 3, 170), (2, 3, 40, 65), (2, 1, 20, 0))


@cache
def subject(kind: str) -> Subject:
    (module,) = modules_of(text_of(**KINDS[kind]))
    return subject_of(module)


def case(made: Subject, sizes: tuple[int, int, int, int], **changes: Any) -> Case:
    b, m, g, n = sizes
    dims = {"B": b, "M": m, "G": g, "N": n, "R": 64, "S": 90}
    return Case(**{"dims": dims, "logits": "rising", "lengths": "drawn", **changes})


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "sizes"), some_by_day(KINDS, SIZES, of=9))
def test_outputs_are_within_the_bound_and_have_the_bits_of_joined_keys(
    kind: str, sizes: tuple[int, int, int, int]
) -> None:
    made = subject(kind)
    assert made.plan is not None
    assert narrow.twin_of(made, made.plan) is not None
    for config in range(0, len(made.configs), 2 if is_night() else 4):
        given = case(made, sizes, config=config, seed=config)
        found = check(made, given, fills=("nan",))
        assert found.ok, found.message
        assert list(violations(made, given, only="8 bits equal 16")) == []


LYING = {
    "rows at no multiple of 16 bytes": TensorLayout(order=(0, 1, 2), gaps=(0, 0, 3), offset=1),
    "a column between them": TensorLayout(order=(0, 1, 2), gaps=(0, 0, 0), step=2),
    "one row for all keys": TensorLayout(order=(0, 1, 2), gaps=(0, 0, 0), expanded=(1,)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("lies", list(LYING.values()), ids=list(LYING))
@pytest.mark.parametrize("kind", ["lists", pytest.param("small pages", marks=pytest.mark.nightly)])
def test_columns_behind_may_lie_anyhow(kind: str, lies: TensorLayout) -> None:
    made = subject(kind)
    found = check(made, case(made, SIZES[1], seed=1, layouts={"rope": lies}), fills=("nan",))
    assert found.ok, found.message
