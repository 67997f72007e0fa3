"""Random calls of the page manager, with operations that fail, beside lists of tokens as their model.

They are drawn evenly from a seed: Hypothesis varies few of its draws at a time, and hardly met a page that
is shared and half full.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnc.paging import Layout, OutOfPages, OutOfRows, PagedCache, Step

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


_Result = TypeVar("_Result")


_Mode: Any = TorchDispatchMode  # has no types


class _Fault(_Mode):  # type: ignore[misc]  # for which reason nothing is known of its base
    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == -1:
            raise torch.OutOfMemoryError(f"planted at {function}")
        return function(*args, **(kwargs or {}))


def failing_at(operation: int) -> AbstractContextManager[object]:
    """Has one operation of a block run out of memory: an allocation, a transfer, a copy, a write."""
    return _Fault(operation)


class _Count(_Mode):  # type: ignore[misc]  # likewise
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[list[str]]:
    """Lists the operations of torch in a block, by name."""
    names: list[str] = []
    with _Count(names):
        yield names


def everything(cache: PagedCache) -> dict[str, Any]:
    """All that callers and kernels can see of a cache, and the lists behind it."""
    lists = cache._allocator
    holdings = {number: (x.row, x.length, list(x.pages)) for number, x in lists._holdings.items()}
    held = sorted({page for _, _, pages in holdings.values() for page in pages})
    columns = [(row, column) for row, _, pages in holdings.values() for column in range(len(pages))]
    return {
        "holdings": holdings,
        "free": list(lists._free),
        "sharers": list(lists._sharers),
        "rows": list(lists._rows),
        "next": lists._next,
        "kv_len": cache.kv_len.tolist(),
        "table": [int(cache.block_table[at]) for at in columns],
        "pools": [cache._pools[part][:, held].tolist() for part in range(2)],
    }


class Calls:
    """A cache, and the model of it: the list of tokens of each sequence. Everything follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        layout: Layout = self.random.choice(["NHD", "HND"])
        self.cache = small(layout, pages=self.random.randint(2, 20), page=self.random.randint(1, 4))
        self.model: dict[int, list[int]] = {}
        self.fresh = 0
        #: What was called, for whoever reads a failure.
        self.trace: list[str] = []

    def run(self, steps: int) -> None:
        """Makes so many calls, and checks all after each. AssertionError says after which."""
        rules = [self.append] * 6 + [self.fork] * 2 + [self.truncate] * 2 + [self.rewrite] * 2
        rules += [self.allocate, self.free, self.keep]
        try:
            for _ in range(steps):
                self.random.choice(rules if self.model else [self.allocate])()
                self.check()
            self.cache.free(*self.model)
            assert self.cache.statistics().free == self.cache.pages
        except BaseException as failure:
            failure.add_note("after " + ", ".join(self.trace))
            raise

    def check(self) -> None:
        self.every_sequence_reads_back()
        self.tables_are_those_of_the_lists()
        self.pages_are_counted()
        self.rows_without_a_sequence_are_empty()

    def tokens(self, count: int) -> list[int]:
        self.fresh += count
        return list(range(self.fresh - count, self.fresh))

    def chosen(self) -> int:
        return self.random.choice(sorted(self.model))

    def attempt(self, call: Callable[..., _Result], *arguments: Any) -> list[_Result]:
        """Returns what a call returns; nothing where it failed as planted, as two in five may, having
        changed nothing.
        """
        fault = self.random.randrange(24) if self.random.random() < 0.4 else None
        self.trace.append(
            f"{call.__name__}{arguments[:2]}" + ("" if fault is None else f" failing at {fault}")
        )
        if fault is None:
            return [call(*arguments)]
        before = everything(self.cache)
        try:
            with failing_at(fault):
                return [call(*arguments)]
        except torch.OutOfMemoryError:
            assert everything(self.cache) == before
            return []

    def allocate(self) -> None:
        if len(self.model) == 4:
            with pytest.raises(OutOfRows, match="all 4 rows"):
                self.cache.allocate()
            return
        (sequence,) = self.attempt(self.cache.allocate)
        assert sequence not in self.model
        self.model[sequence] = []

    def append(self) -> None:
        """Appends nothing, a token, a page, or more than three to several sequences, and writes all that is
        new in two layers.
        """
        chosen = self.random.sample(sorted(self.model), self.random.randint(1, len(self.model)))
        counts = [
            min(self.random.choice([0, 1, 1, 1, 2, 3, 4, 6, 13]), 20 - len(self.model[one])) for one in chosen
        ]
        needed, held = (
            self.pages_needed(chosen, counts),
            {page for one in self.model for page in self.pages(one)},
        )
        idle = [one for one, count in zip(chosen, counts, strict=True) if not count]
        kept = [self.pages(one) for one in idle]
        try:
            done = self.attempt(self.cache.append, chosen, counts)
        except OutOfPages as full:
            self.is_full(full, needed)
            return  # what follows sees that nothing was lost
        for step in done:
            assert [self.pages(one) for one in idle] == kept
            found = {page for row in self.cache._allocator._holdings.values() for page in row.pages}
            assert len(found - held) == needed
            new = [self.tokens(count) for count in counts]
            self.write(step, [token for tokens in new for token in tokens])
            for sequence, tokens in zip(chosen, new, strict=True):
                self.model[sequence] += tokens
            rows = [self.cache.row(sequence) for sequence in chosen]
            assert step.kv_len.tolist() == [len(self.model[sequence]) for sequence in chosen]
            assert step.cu_q.diff().tolist() == counts
            assert step.block_table.tolist() == [self.cache.block_table[row].tolist() for row in rows]

    def pages(self, sequence: int) -> list[int]:
        row = self.cache.block_table[self.cache.row(sequence)].tolist()
        return row[: -(-len(self.model[sequence]) // self.cache.page)]

    def pages_needed(self, chosen: list[int], counts: list[int]) -> int:
        """Counts new pages, and copies of shared last ones: where all that share one grow, one keeps it."""
        new, copied = 0, Counter[tuple[int, int]]()
        for sequence, count in zip(chosen, counts, strict=True):
            length, page = len(self.model[sequence]), self.cache.page
            new += -(-(length + count) // page) - -(-length // page)
            if count and length % page:
                copied[self.pages(sequence)[-1], self.cache.sharers(sequence)[-1]] += 1
        return new + sum(min(count, sharers - 1) for (_, sharers), count in copied.items())

    def is_full(self, full: OutOfPages, needed: int) -> None:
        assert full.free == self.cache.statistics().free < full.needed == needed

    def write(self, step: Step, tokens: list[int]) -> None:
        """Writes both layers; what failed once is written again."""
        for layer in range(2):
            given = (step.slots, rows(tokens, layer, 0), rows(tokens, layer, 1), layer)
            if not self.attempt(self.cache.write, *given):
                self.cache.write(*given)

    def rewrite(self) -> None:
        """Writes a token anew in a page that nobody shares, and one that goes nowhere."""
        sequence = self.chosen()
        tokens = self.model[sequence]
        at = self.random.randrange(20) % max(len(tokens), 1)
        column, row = divmod(at, self.cache.page)
        if tokens and self.cache.sharers(sequence)[column] == 1:
            page = int(self.cache.block_table[self.cache.row(sequence), column])
            slots, (token,) = torch.tensor([page * self.cache.page + row, -1]), self.tokens(1)
            self.write(replace(self.cache.view([sequence]), slots=slots), [token, 0])
            tokens[at] = token

    def fork(self) -> None:
        if len(self.model) < 4:
            sequence = self.chosen()
            for child in self.attempt(self.cache.fork, sequence):
                assert child not in self.model
                self.model[child] = list(self.model[sequence])

    def truncate(self) -> None:
        sequence = self.chosen()
        length = self.random.randint(0, len(self.model[sequence]))
        if self.attempt(self.cache.truncate, sequence, length):
            del self.model[sequence][length:]

    def keep(self) -> None:
        """Keeps some of the last tokens of one or two sequences, or is told that others share them."""
        chosen = self.random.sample(sorted(self.model), min(self.random.randint(1, 2), len(self.model)))
        lengths = [self.random.randint(0, len(self.model[sequence])) for sequence in chosen]
        places = [
            [at for at in range(len(self.model[sequence]) - start) if self.random.random() < 0.5]
            for sequence, start in zip(chosen, lengths, strict=True)
        ]
        sharers = {
            self.cache.sharers(sequence)[(start + at) // self.cache.page]
            for sequence, start, kept in zip(chosen, lengths, places, strict=True)
            for at, place in enumerate(kept)
            if at != place
        }
        if max(sharers, default=1) > 1:
            before = everything(self.cache)
            with pytest.raises(ValueError, match="in pages that others share"):
                self.cache.keep(chosen, lengths, places)
            assert everything(self.cache) == before
        elif self.attempt(self.cache.keep, chosen, lengths, places):
            for sequence, start, kept in zip(chosen, lengths, places, strict=True):
                tokens = self.model[sequence]
                self.model[sequence] = tokens[:start] + [tokens[start + place] for place in kept]

    def free(self) -> None:
        chosen = self.random.sample(sorted(self.model), min(self.random.randint(1, 2), len(self.model)))
        if self.attempt(self.cache.free, *chosen):
            for sequence in chosen:
                del self.model[sequence]
            before = everything(self.cache)
            with pytest.raises(ValueError, match="was freed or never allocated"):
                self.cache.free(*self.model, chosen[0])
            assert everything(self.cache) == before

    def every_sequence_reads_back(self) -> None:
        """By `read`, and from the pools by the block table, as kernels do."""
        cache, page = self.cache, self.cache.page
        for sequence, tokens in self.model.items():
            assert cache.length(sequence) == len(tokens)
            pages = cache.block_table[cache.row(sequence), : -(-len(tokens) // page)].long()
            for layer in range(2):
                pools = (cache.k(layer), cache.v(layer))
                for part, (pool, found) in enumerate(zip(pools, cache.read(sequence, layer), strict=True)):
                    assert torch.equal(found, rows(tokens, layer, part))
                    by_page = pool[pages] if cache.layout == "NHD" else pool[pages].movedim(2, 1)
                    assert torch.equal(by_page.flatten(0, 1)[: len(tokens)], found)

    def tables_are_those_of_the_lists(self) -> None:
        lists, page = self.cache._allocator, self.cache.page
        assert lists._holdings.keys() == self.model.keys()
        for holding in lists._holdings.values():
            assert len(holding.pages) == -(-holding.length // page)
            assert self.cache.block_table[holding.row, : len(holding.pages)].tolist() == holding.pages
            assert int(self.cache.kv_len[holding.row]) == holding.length
        held = {number for holding in lists._holdings.values() for number in holding.pages}
        assert sorted([*held, *lists._free]) == list(range(self.cache.pages))
        rows = [holding.row for holding in lists._holdings.values()]
        assert sorted([*rows, *lists._rows]) == list(range(4))

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

    def rows_without_a_sequence_are_empty(self) -> None:
        rows = {self.cache.row(sequence): len(tokens) for sequence, tokens in self.model.items()}
        assert self.cache.kv_len.tolist() == [rows.get(row, 0) for row in range(4)]
