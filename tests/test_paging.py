"""The page manager against lists of tokens: a sequence always reads back what was written."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from attnc.paging import Layout, OutOfPages, OutOfRows, PagedCache, Spread, Step

HEADS, SIZES = 2, (3, 2)


def rows(tokens: list[int], layer: int, part: int) -> torch.Tensor:
    """The keys (part 0) or values (part 1) of tokens: a function of the token, layer, head and feature."""
    size = SIZES[part]
    feature = torch.arange(HEADS * size, dtype=torch.float32).reshape(HEADS, size)
    token = torch.tensor(tokens, dtype=torch.float32).reshape(-1, 1, 1)
    return token * 100 + feature + 0.25 * layer + 0.5 * part


def small(layout: Layout = "NHD", pages: int = 6, page: int = 4) -> PagedCache:
    return PagedCache(
        pages=pages,
        page=page,
        kv_heads=HEADS,
        head_dim=SIZES[0],
        v_head_dim=SIZES[1],
        sequences=4,
        max_length=20,
        layers=2,
        layout=layout,
        dtype=torch.float32,
    )


def write(cache: PagedCache, step: Step, tokens: list[int]) -> None:
    for layer in range(2):
        cache.write(step.slots, rows(tokens, layer, 0), rows(tokens, layer, 1), layer)


class Manager(RuleBasedStateMachine):
    """The model of a sequence is its list of tokens."""

    sequences: Bundle[int] = Bundle("sequences")

    @initialize(
        layout=st.sampled_from(["NHD", "HND"]), page=st.sampled_from([1, 2, 3, 4]), pages=st.integers(1, 12)
    )
    def make(self, layout: Layout, page: int, pages: int) -> None:
        self.cache = small(layout, pages=pages, page=page)
        self.model: dict[int, list[int]] = {}
        self.fresh = 0

    def tokens(self, count: int) -> list[int]:
        self.fresh += count
        return list(range(self.fresh - count, self.fresh))

    def grow(self, chosen: list[int], counts: list[int]) -> Step | OutOfPages:
        try:
            return self.cache.append(chosen, counts)
        except OutOfPages as full:
            return full

    @rule(target=sequences)
    def allocate(self) -> int:
        if len(self.model) == 4:
            with pytest.raises(OutOfRows, match="all 4 rows"):
                self.cache.allocate()
            return next(iter(self.model))
        sequence = self.cache.allocate()
        assert sequence not in self.model
        self.model[sequence] = []
        return sequence

    @rule(chosen=st.lists(sequences, min_size=1, max_size=4, unique=True), data=st.data())
    def append(self, chosen: list[int], data: st.DataObject) -> None:
        chosen = [sequence for sequence in chosen if sequence in self.model]
        counts = [data.draw(st.integers(0, min(6, 20 - len(self.model[s])))) for s in chosen]
        free = self.cache.statistics().free
        step = self.grow(chosen, counts)
        if isinstance(step, OutOfPages):
            assert step.free == free < step.needed
            return  # the invariants see that nothing was lost
        new = [self.tokens(count) for count in counts]
        write(self.cache, step, [token for tokens in new for token in tokens])
        for sequence, tokens in zip(chosen, new, strict=True):
            self.model[sequence] += tokens
        assert step.kv_len.tolist() == [len(self.model[sequence]) for sequence in chosen]
        assert step.cu_q.diff().tolist() == counts

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: int) -> int | MultipleResults[int]:
        if sequence not in self.model or len(self.model) == 4:
            return multiple()
        child = self.cache.fork(sequence)
        self.model[child] = list(self.model[sequence])
        return child

    @rule(sequence=sequences, data=st.data())
    def truncate(self, sequence: int, data: st.DataObject) -> None:
        if sequence in self.model:
            length = data.draw(st.integers(0, len(self.model[sequence])))
            self.cache.truncate(sequence, length)
            del self.model[sequence][length:]

    @rule(sequence=consumes(sequences))
    def free(self, sequence: int) -> None:
        if self.model.pop(sequence, None) is not None:
            self.cache.free(sequence)
        with pytest.raises(ValueError, match="was freed or never allocated"):
            self.cache.free(sequence)

    @invariant()
    def every_sequence_reads_back(self) -> None:
        for sequence, tokens in self.model.items():
            assert self.cache.length(sequence) == len(tokens)
            for layer in range(2):
                for part, found in enumerate(self.cache.read(sequence, layer)):
                    assert torch.equal(found, rows(tokens, layer, part))

    @invariant()
    def pages_are_counted(self) -> None:
        """Those in use and those free are all there are; a page has as many sharers as tables name it."""
        cache, page = self.cache, self.cache.page
        named = {
            sequence: cache.block_table[cache.row(sequence), : -(-len(tokens) // page)].tolist()
            for sequence, tokens in self.model.items()
        }
        sharers = Counter(number for numbers in named.values() for number in numbers)
        for sequence, numbers in named.items():
            assert cache.sharers(sequence) == tuple(sharers[number] for number in numbers)
        found = cache.statistics()
        assert found.held == len(sharers)
        assert found.tokens == sum(map(len, self.model.values()))
        assert found.alone == sum(sharers.values())
        assert found.stored <= found.held * page
        assert 0 <= found.waste < 1
        assert 0 <= found.saved < 1

    @invariant()
    def rows_without_a_sequence_are_empty(self) -> None:
        rows = {self.cache.row(sequence): len(tokens) for sequence, tokens in self.model.items()}
        assert self.cache.kv_len.tolist() == [rows.get(row, 0) for row in range(4)]

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.free(*self.model)
            assert self.cache.statistics().free == self.cache.pages


TestManager = Manager.TestCase
TestManager.settings = settings(max_examples=60, stateful_step_count=30)


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


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="page: expected at least 1, got 0"):
        small(page=0)
    with pytest.raises(ValueError, match="layout: expected 'NHD' or 'HND', got 'DHN'"):
        small("DHN")  # type: ignore[arg-type]  # what a program without types might say
    with pytest.raises(ValueError, match="expected blocks that divide pages of 1 rows"):
        PagedCache(
            pages=1,
            page=1,
            kv_heads=1,
            head_dim=1,
            sequences=1,
            max_length=1,
            spread=Spread(ranks=1, block=0),
        )
    cache = small()
    sequence = cache.allocate()
    step = cache.append([sequence], 3)
    for wrong, said in (
        (lambda: cache.append([sequence, sequence]), "expected each once"),
        (lambda: cache.append([sequence], -1), "expected no negative number, got -1"),
        (lambda: cache.append([sequence], 18), "expected at most 17 for sequence 0, got 18"),
        (lambda: cache.append([sequence], [1, 1]), "expected one for each of 1 sequences, got 2"),
        (lambda: cache.append([7]), "sequence 7 was freed or never allocated"),
        (lambda: cache.truncate(sequence, 4), "expected 0 .. 3, got 4"),
        (lambda: cache.free(sequence, sequence), "expected each once"),
        (lambda: cache.write(step.slots, rows([0, 1, 2], 0, 0)), "v: expected a tensor"),
        (
            lambda: cache.write(step.slots, rows([0, 1], 0, 0), rows([0, 1, 2], 0, 1)),
            r"k: expected shape \[3, 2, 3\], got \[2, 2, 3\]",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()
    untyped: Any = cache.append
    sizes: dict[str, Any] = {
        "pages": 1,
        "page": 1,
        "kv_heads": 1,
        "head_dim": 1,
        "sequences": 1,
        "max_length": 1,
    }
    for mistyped, told in (
        (
            lambda: cache.write(step.slots, rows([0, 1, 2], 0, 0).half(), rows([0, 1, 2], 0, 1)),
            r"k: expected dtype torch.float32, got torch.float16",
        ),
        (
            lambda: cache.write(step.slots.int(), rows([0, 1, 2], 0, 0), rows([0, 1, 2], 0, 1)),
            r"slots: expected dtype torch.int64, got torch.int32",
        ),
        (lambda: untyped([sequence], [1.5]), r"counts: expected integers, got \[1.5\]"),
        (lambda: untyped(sequence), "sequences: expected integers, got 0"),
        (lambda: PagedCache(**sizes | {"pages": 2.5}), "pages: expected an integer, got 2.5"),
    ):
        with pytest.raises(TypeError, match=told):
            mistyped()
    assert cache.length(sequence) == 3


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
