"""The page manager against lists of tokens: a sequence always reads back what was written."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attnc.paging import Layout, OutOfPages, PagedCache, Spread
from tests.paging.calls import Calls, counting, everything, failing_at, rows, small, write


def run_all(first: int = 0, last: int = 40) -> None:
    for seed in range(first, last):
        Calls(seed).run(40)


def test_any_calls() -> None:
    run_all()


@pytest.mark.nightly
def test_any_calls_at_length() -> None:
    """By day: the first seeds."""
    run_all(40, 3000)


def test_rows_of_a_shared_page_are_those_of_whoever_has_most() -> None:
    cache = small()
    parent = cache.allocate()
    write(cache, cache.append([parent], 6), list(range(6)))
    child = cache.fork(parent)
    for shorter, stored in ((child, 6), (parent, 5)):
        cache.truncate(shorter, 5)
        assert cache.statistics().stored == stored


def test_forks_copy_only_a_page_that_is_shared() -> None:
    cache = small()
    parent = cache.allocate()
    write(cache, cache.append([parent], 6), list(range(6)))
    child = cache.fork(parent)
    assert cache.sharers(parent) == (2, 2)
    before = cache.statistics()
    assert (before.held, before.alone, before.saved) == (2, 4, 0.5)
    step = cache.append([parent, child])
    write(cache, step, [100, 200])
    assert cache.sharers(parent) == (2, 1)
    assert cache.statistics().held == 3  # of two that wrote to one page, one took a copy
    assert torch.equal(cache.read(parent)[0], rows([*range(6), 100], 0, 0))
    assert torch.equal(cache.read(child)[0], rows([*range(6), 200], 0, 0))


def test_a_full_page_is_shared_without_a_copy() -> None:
    cache = small()
    parent = cache.allocate()
    cache.append([parent], 4)
    cache.append([cache.fork(parent), parent])
    assert cache.sharers(parent) == (2, 1)
    assert cache.statistics().held == 3


def test_what_does_not_fit_changes_nothing() -> None:
    cache = small(pages=3)
    first, second = cache.allocate(), cache.allocate()
    write(cache, cache.append([first, second], [4, 3]), list(range(7)))
    table, before = cache.block_table.clone(), cache.statistics()
    with pytest.raises(OutOfPages, match="2 pages are needed and 1 are free; nothing was changed"):
        cache.append([first, second], [1, 2])
    assert torch.equal(cache.block_table, table)
    assert cache.statistics() == before
    cache.free(first)
    assert cache.append([second], 5).kv_len.tolist() == [8]


def test_the_slots_of_the_last_tokens_follow_from_the_tables() -> None:
    cache = small()
    sequences = [cache.allocate() for _ in range(3)]
    step = cache.append(sequences, [1, 4, 6])
    cache.free(sequences[1])
    slots = cache.last_slots().tolist()
    assert slots[cache.row(sequences[0])] == step.slots[0]
    assert slots[cache.row(sequences[2])] == step.slots[-1]
    spare = range(cache.pages * cache.page, (cache.pages + 1) * cache.page)
    assert slots[1] in spare
    assert slots[3] in spare
    assert cache.k().shape[0] == cache.pages + 1


def test_tables_stay_where_they_are() -> None:
    """A captured graph reads them at their addresses."""
    cache = small()
    places = (cache.block_table.data_ptr(), cache.kv_len.data_ptr(), cache.k(1).data_ptr())
    sequence = cache.allocate()
    cache.append([sequence], 9)
    cache.truncate(sequence, 5)
    cache.append([cache.fork(sequence)], 2)
    cache.free(sequence)
    assert places == (cache.block_table.data_ptr(), cache.kv_len.data_ptr(), cache.k(1).data_ptr())


def test_keys_alone() -> None:
    cache = PagedCache(
        pages=2,
        page=64,
        kv_heads=1,
        head_dim=8,
        v_head_dim=0,
        sequences=1,
        max_length=99,
        dtype=torch.float16,
    )
    sequence = cache.allocate()
    keys = torch.randn(70, 1, 8).half()
    cache.write(cache.append([sequence], 70).slots, keys)
    (found,) = cache.read(sequence)
    assert torch.equal(found, keys)
    with pytest.raises(ValueError, match="no V"):
        cache.v()
    with pytest.raises(ValueError, match="v: expected None"):
        cache.write(cache.view([sequence]).slots, keys, keys)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_pools_of_8_bits_keep_what_is_written(layout: Layout, dtype: torch.dtype) -> None:
    cache = PagedCache(
        pages=6, page=4, kv_heads=2, head_dim=8, sequences=3, max_length=12, layout=layout, dtype=dtype
    )
    assert cache.k().dtype == dtype
    codes = torch.arange(2 * 9 * 16).to(torch.uint8).view(2, 9, 2, 8).view(dtype)  # NaN and infinities too
    parent = cache.allocate()
    cache.write(cache.append([parent], 7).slots, *codes[:, :7])
    child = cache.fork(parent)
    cache.write(cache.append([child], 2).slots, *codes[:, 7:])  # copies the page that both have
    for sequence, count in ((parent, 7), (child, 9)):
        for found, written in zip(cache.read(sequence), codes, strict=True):
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), written[:count].view(torch.uint8))
    with pytest.raises(TypeError, match=f"k: expected dtype {dtype}, got torch.bfloat16"):
        cache.write(cache.append([child], 1).slots, *torch.zeros(2, 1, 2, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"page": 0}, ValueError, "page: expected at least 1, got 0"),
        ({"pages": -1}, ValueError, "pages: expected at least 1, got -1"),
        ({"pages": 2.0}, TypeError, "pages: expected an integer, got 2.0"),
        ({"max_length": math.nan}, TypeError, "max_length: expected an integer, got nan"),
        ({"max_length": 1 << 31}, ValueError, "max_length: expected at most 1073741824, got 2147483648"),
        ({"layers": True}, TypeError, "layers: expected an integer, got True"),
        ({"layers": torch.tensor(True)}, TypeError, "layers: expected an integer"),
        ({"v_head_dim": -1}, ValueError, "v_head_dim: expected at least 0, got -1"),
        ({"layout": "DHN"}, ValueError, "layout: expected 'NHD' or 'HND', got 'DHN'"),
        ({"dtype": "float16"}, TypeError, "dtype: expected a torch.dtype, got 'float16'"),
        ({"dtype": torch.int64}, TypeError, "dtype: expected one of torch.bfloat16, .*, got torch.int64"),
        ({"layers": torch.ones(3, 2)}, TypeError, r"layers: expected an integer, got a tensor \[3, 2\]"),
        ({"pages": "8" * 999}, TypeError, r"pages: expected an integer, got '8{79}\.\.\.$"),
        ({"spread": (2, 1)}, TypeError, r"spread: expected a Spread or None, got \(2, 1\)"),
        ({"spread": Spread(2, 3)}, ValueError, "expected blocks that divide pages of 4 rows"),
        ({"rank": 1}, ValueError, "expected .* ranks beyond 1"),
        ({"rank": 0.0}, TypeError, "rank: expected an integer, got 0.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_caches_that_cannot_be_are_refused(changed: Any, error: type[Exception], said: str) -> None:
    sizes: dict[str, Any] = {"pages": 2, "page": 4, "kv_heads": 1, "head_dim": 1}
    sizes |= {"sequences": 2, "max_length": 8, **changed}
    with pytest.raises(error, match=said):
        PagedCache(**sizes)


@pytest.mark.parametrize(("ranks", "block"), [(0, 1), (1, 0), (-1, 4), (2, 1.0), (True, 4)])
def test_spreads_have_sizes(ranks: Any, block: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"ranks: expected|block: expected"):
        Spread(ranks, block)


NO_INTEGERS: list[Any] = [0.0, True, False, np.bool_(False), math.nan, None, "0", torch.tensor(0.0)]
NO_INTEGERS += [torch.tensor(False), torch.zeros(2, dtype=torch.int64), np.float64(0), [0]]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("number", NO_INTEGERS, ids=repr)
def test_numbers_are_integers(layout: Layout, number: Any) -> None:
    """`free(0.0)` would have freed sequence 0, and layer False been layer 0."""
    cache: Any = small(layout)
    sequence = cache.allocate()
    step = cache.append([sequence], 3)
    given = (rows([0, 1, 2], 0, 0), rows([0, 1, 2], 0, 1))
    cache.write(step.slots, *given)
    before = everything(cache)
    calls = [
        ("sequence", [cache.length, cache.row, cache.fork, cache.sharers, cache.read, cache.free]),
        (
            "sequence",
            [lambda x: cache.append([x]), lambda x: cache.view([x]), lambda x: cache.truncate(x, 1)],
        ),
        ("layer", [cache.k, cache.v, lambda x: cache.read(sequence, x)]),
        ("layer", [lambda x: cache.write(step.slots, *given, x)]),
        ("length", [lambda x: cache.truncate(sequence, x)]),
        ("counts", [lambda x: cache.append([sequence], [x])]),
    ]
    for name, functions in calls:
        for function in functions:
            with pytest.raises(TypeError, match=f"{name}.*: expected an integer, got "):
                function(number)
    assert everything(cache) == before


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("number", [-1, 2, 1 << 40, np.int64(-1)])
def test_layers_and_sequences_that_there_are_not(layout: Layout, number: Any) -> None:
    cache = small(layout)
    sequence = cache.allocate()
    step = cache.append([sequence], 1)
    given = (rows([0], 0, 0), rows([0], 0, 1))
    before = everything(cache)
    for of_layer in (cache.k, cache.v, lambda x: cache.read(sequence, x)):
        with pytest.raises(ValueError, match=f"layer: expected 0 .. 1, got {number}"):
            of_layer(number)
    with pytest.raises(ValueError, match=f"layer: expected 0 .. 1, got {number}"):
        cache.write(step.slots, *given, number)
    for of_sequence in (cache.free, cache.fork, cache.length, cache.row, cache.read, cache.sharers):
        with pytest.raises(ValueError, match=f"sequence {number} was freed or never allocated"):
            of_sequence(number)
    assert everything(cache) == before


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_slot_of_minus_one_is_nowhere(layout: Layout) -> None:
    cache = small(layout)
    sequence = cache.allocate()
    write(cache, cache.append([sequence], 20), list(range(20)))
    before, pools = everything(cache), [cache.k().clone(), cache.v().clone()]
    cache.write(torch.tensor([-1, -1]), rows([7, 8], 0, 0), rows([7, 8], 0, 1))
    assert everything(cache) == before
    for pool, old in zip((cache.k(), cache.v()), pools, strict=True):
        assert torch.equal(pool[: cache.pages], old[: cache.pages])
    cache.write(torch.tensor([27, 27]), rows([7, 8], 0, 0), rows([7, 8], 0, 1))  # the same by its number
    for slots, wrong in (
        ([0, -2], -2),
        ([28, 0], 28),
        ([-(1 << 40), 1], -(1 << 40)),
        ([1 << 40, 1], 1 << 40),
    ):
        with pytest.raises(ValueError, match=rf"slots: expected -1 .. 27, got {wrong}$"):
            cache.write(torch.tensor(slots), rows([7, 8], 0, 0), rows([7, 8], 0, 1))
    assert everything(cache) == before


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"slots": [0, 1, 2]}, TypeError, "slots: expected a tensor, got list"),
        ({"slots": torch.arange(3).int()}, TypeError, "slots: expected dtype torch.int64, got torch.int32"),
        ({"slots": torch.arange(3).view(3, 1)}, ValueError, r"slots: expected shape \[T\], got \[3, 1\]"),
        ({"slots": torch.tensor(0)}, ValueError, r"slots: expected shape \[T\], got \[\]"),
        (
            {"slots": torch.arange(3, device="meta")},
            ValueError,
            "slots: expected a tensor on cpu, got one on",
        ),
        ({"k": rows([0, 1], 0, 0)}, ValueError, r"k: expected shape \[3, 2, 3\], got \[2, 2, 3\]"),
        (
            {"k": rows([0, 1, 2], 0, 0).half()},
            TypeError,
            "k: expected dtype torch.float32, got torch.float16",
        ),
        ({"v": None}, ValueError, "v: expected a tensor"),
        ({"v": [1.0]}, TypeError, "v: expected a tensor, got list"),
        ({"v": rows([0, 1, 2], 0, 0)}, ValueError, r"v: expected shape \[3, 2, 2\], got \[3, 2, 3\]"),
        ({"v": rows([0, 1, 2], 0, 1).double()}, TypeError, "v: expected dtype torch.float32, got"),
        (
            {"v": torch.empty(3, 2, 2, device="meta")},
            ValueError,
            "v: expected a tensor on cpu, got one on meta",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_rows_that_do_not_fit_are_written_nowhere(
    layout: Layout, changed: Any, error: type[Exception], said: str
) -> None:
    cache = small(layout)
    step = cache.append([cache.allocate()], 3)
    given: dict[str, Any] = {"slots": step.slots, "k": rows([0, 1, 2], 0, 0), "v": rows([0, 1, 2], 0, 1)}
    before = everything(cache)
    with pytest.raises(error, match=said):
        cache.write(**given | changed)
    assert everything(cache) == before


def test_mistakes_are_named() -> None:
    cache = small()
    sequence = cache.allocate()
    cache.append([sequence], 3)
    before = everything(cache)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: cache.append([sequence, sequence]), "expected each once"),
        (lambda: cache.append([sequence], -1), "expected no negative number, got -1"),
        (lambda: cache.append([sequence], 18), "expected at most 17 for sequence 0, got 18"),
        (lambda: cache.append([sequence], [1, 1]), "expected one for each of 1 sequences, got 2"),
        (lambda: cache.append([7]), "sequence 7 was freed or never allocated"),
        (lambda: cache.append([sequence, 7]), "sequence 7 was freed or never allocated"),
        (lambda: cache.truncate(sequence, 4), "expected 0 .. 3, got 4"),
        (lambda: cache.truncate(sequence, -1), "expected 0 .. 3, got -1"),
        (lambda: cache.free(sequence, sequence), "expected each once"),
        (lambda: cache.free(sequence, 7), "sequence 7 was freed or never allocated"),
    ]
    for call, said in wrong:
        with pytest.raises(ValueError, match=said):
            call()
    untyped: Any = cache.append
    mistyped: list[tuple[Callable[[], object], str]] = [
        (lambda: untyped([sequence], [1.5]), "counts: expected an integer, got 1.5"),
        (lambda: untyped([sequence], None), "counts: expected an integer, got None"),
        (lambda: untyped(sequence), "sequences: expected integers, got 0"),
        (lambda: untyped(torch.tensor(0)), "sequences: expected integers"),
    ]
    for call, told in mistyped:
        with pytest.raises(TypeError, match=told):
            call()
    assert everything(cache) == before


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("call", ["append", "write", "fork", "truncate", "keep", "free"])
def test_each_operation_of_a_call_may_fail(layout: Layout, call: str) -> None:
    """One after the other, until the call has no more: an append that copies two pages and takes four."""
    cache = small(layout, pages=12)
    first = cache.allocate()
    write(cache, cache.append([first], 6), list(range(6)))
    second, third = cache.fork(first), cache.fork(first)
    fourth = cache.allocate()
    step = cache.append([fourth], 5)
    write(cache, step, [*range(10, 15)])  # moves show where what they overwrote was another token
    slots = step.slots
    calls: dict[str, Callable[[], object]] = {
        "append": lambda: cache.append([third, first, second], [9, 1, 3]),
        "write": lambda: cache.write(slots, rows([*range(5)], 1, 0), rows([*range(5)], 1, 1), 1),
        "fork": lambda: cache.fork(second) if len(cache) < 4 else None,
        "truncate": lambda: cache.truncate(third, 3),
        "keep": lambda: cache.keep([fourth, third], [0, 2], [[1, 3, 4], []]),
        "free": lambda: cache.free(first, third),
    }
    if call == "fork":
        cache.free(third)
    before = everything(cache)
    for at in range(100):
        try:
            with failing_at(at):
                calls[call]()
            break
        except torch.OutOfMemoryError:
            assert everything(cache) == before
    assert 1 <= at < 99
    assert everything(cache) != before


def test_appends_over_pages_and_of_nothing() -> None:
    cache = small(pages=8)
    one, two = cache.allocate(), cache.allocate()
    step = cache.append([one, two], [14, 0])  # 4 pages, the last with 2 tokens
    write(cache, step, list(range(14)))
    assert (step.kv_len.tolist(), step.cu_q.tolist()) == ([14, 0], [0, 14, 14])
    assert len({slot // 4 for slot in step.slots.tolist()}) == 4
    nothing = cache.append([one, two], 0)
    assert (nothing.slots.tolist(), nothing.cu_q.tolist()) == ([], [0, 0, 0])
    assert cache.append([]).block_table.shape == (0, 5)
    child = cache.fork(one)
    cache.append([child], 0)  # writes nothing, so it copies nothing
    assert cache.sharers(child) == (2, 2, 2, 2)


@pytest.mark.parametrize("length", [0, 3, 4, 5, 8, 9])
def test_pages_of_shared_sequences_after_truncation(length: int) -> None:
    """Whoever grows again does so in pages of its own; what the other reads stays."""
    cache = small(pages=8)
    parent = cache.allocate()
    write(cache, cache.append([parent], 9), list(range(9)))
    child = cache.fork(parent)
    cache.truncate(child, length)
    kept = -(-length // 4)
    assert cache.sharers(parent) == (2,) * kept + (1,) * (3 - kept)
    write(cache, cache.append([child], 7), list(range(100, 107)))
    assert torch.equal(cache.read(parent)[0], rows(list(range(9)), 0, 0))
    assert torch.equal(cache.read(child)[1], rows([*range(length), *range(100, 107)], 0, 1))
    cache.free(parent)
    assert torch.equal(cache.read(child, 1)[0], rows([*range(length), *range(100, 107)], 1, 0))
    cache.free(child)
    assert cache.statistics().held == 0


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_is_written_brings_no_graph_of_autograd(layout: Layout) -> None:
    """The pool would hold what every step was computed from."""
    cache = small(layout)
    step = cache.append([cache.allocate()], 3)
    k, v = (rows([1, 2, 3], 0, part).requires_grad_() for part in (0, 1))
    cache.write(step.slots, k * 1, v * 1)
    assert not cache.k().requires_grad
    assert not cache.v().requires_grad


def test_numbers_of_tensors_are_those_of_one_sequence() -> None:
    """A tensor that is added to in place would have been the length of a fork as well."""
    cache = small()
    first = cache.allocate()
    untyped: Any = cache  # as programs without types have it
    untyped.append(torch.tensor([first]), torch.tensor([3]))
    second = cache.fork(first)
    untyped.append([second], torch.tensor([1]))
    untyped.append([second], np.int64(1))
    assert (cache.length(first), cache.length(second)) == (3, 5)
    untyped.truncate(second, torch.tensor(4))
    assert [type(cache.length(one)) for one in (first, second)] == [int, int]
    assert cache.kv_len[[cache.row(first), cache.row(second)]].tolist() == [3, 4]


def decoding(sequences: int) -> tuple[PagedCache, list[int]]:
    """A cache of sequences whose next token needs no page."""
    cache = PagedCache(
        pages=2 * sequences, page=16, kv_heads=1, head_dim=8, sequences=sequences, max_length=32
    )
    numbers = [cache.allocate() for _ in range(sequences)]
    cache.append(numbers, 3)
    return cache, numbers


@pytest.mark.parametrize("sequences", [1, 48])
def test_a_decoded_token_takes_few_operations_of_torch(sequences: int) -> None:
    """After the copy to it: one to i32, one of rows of the table, one that publishes. The rest are views."""
    cache, numbers = decoding(sequences)
    with counting() as names:
        cache.append(numbers)
    views = {"aten.lift_fresh.default", "aten.split_with_sizes.default"}
    on_the_device = ["aten._to_copy.default", "aten.index_select.default", "aten.index_copy_.default"]
    assert [name for name in names if name not in views] == on_the_device


def test_a_decoded_token_takes_few_calls_of_python() -> None:
    """Of functions, Python's own and C's, for each further sequence."""

    def calls(sequences: int) -> int:
        cache, numbers = decoding(sequences)
        found = 0

        def seen(frame: Any, event: str, argument: Any) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        sys.setprofile(seen)
        try:
            cache.append(numbers)
        finally:
            sys.setprofile(None)
        return found

    assert calls(48) - calls(16) <= 32 * 9


def test_numbers_of_a_step_are_as_aligned_as_tensors_of_their_own() -> None:
    cache, numbers = decoding(3)
    for count in (1, 5, 0):
        step = cache.append(numbers, count)
        for x in (step.block_table, step.kv_len, step.cu_q, step.slots):
            assert x.data_ptr() % 16 == 0
    for sequences in range(1, 6):  # lengths lie behind a table of any size
        assert decoding(sequences)[0].kv_len.data_ptr() % 16 == 0


@pytest.mark.parametrize(
    ("lengths", "places", "told"),
    [
        ([7], [[]], "lengths: expected 0 .. 6 for sequence 0, got 7"),
        ([-1], [[]], "lengths: expected 0 .. 6 for sequence 0, got -1"),
        ([2], [[1, 1]], r"places: expected ascending numbers of 0 .. 3 for sequence 0, got \[1, 1\]"),
        ([2], [[-1, 1]], "places: expected ascending numbers of 0 .. 3"),
        ([2], [[0, 4]], "places: expected ascending numbers of 0 .. 3"),
        ([2], [], "expected lengths and places of 1 sequences, got 1 and 0"),
    ],
)
def test_places_that_cannot_be_kept(lengths: list[int], places: list[list[int]], told: str) -> None:
    cache = small()
    sequence = cache.allocate()
    write(cache, cache.append([sequence], 6), list(range(6)))
    before = everything(cache)
    with pytest.raises(ValueError, match=told):
        cache.keep([sequence], lengths, places)
    assert everything(cache) == before


def test_kept_tokens_of_8_bits_move_as_they_are() -> None:
    made: dict[str, Any] = {"kv_heads": 1, "head_dim": 16, "sequences": 1, "max_length": 16}
    cache = PagedCache(pages=4, page=4, **made, dtype=torch.float8_e4m3fn)
    sequence = cache.allocate()
    k, v = (torch.randn(2, 9, 1, 16) / 8).to(torch.float8_e4m3fn)
    cache.write(cache.append([sequence], 9).slots, k, v)
    cache.keep([sequence], [2], [[1, 2, 6]])
    for found, given in zip(cache.read(sequence), (k, v), strict=True):
        assert torch.equal(found.view(torch.uint8), given[[0, 1, 3, 4, 8]].view(torch.uint8))


def test_ranks_that_share_keys_keep_no_places() -> None:
    made: dict[str, Any] = {"kv_heads": 1, "head_dim": 16, "sequences": 1, "max_length": 16}
    cache = PagedCache(pages=4, page=4, **made, spread=Spread(2, 4))
    sequence = cache.allocate()
    cache.append([sequence], 3)
    with pytest.raises(ValueError, match="keep: expected a cache of one rank, got one of 2"):
        cache.keep([sequence], [1], [[1]])
