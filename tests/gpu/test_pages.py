"""Pages on a GPU: kernels that copy and sum them do what torch does on a CPU, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnc.support.memory import memory_of
from attnc.support.page_kernels import TritonPages
from attnc.support.pages import PageKernels, Pages, count_keys, lay_rows
from tests.support.in_pages import place_of

#: What copies and sums them: torch, and kernels that search the table, or have it sorted.
WAYS = ("torch", "search", "sort")


class Example:
    """Sequences that share pages, entries that name none, and gradients of their rows."""

    def __init__(self, pages: int, page: int, heads: int, columns: int) -> None:
        make = torch.Generator().manual_seed(pages)
        self.table = torch.randint(-1, pages + 1, (6, 50), generator=make, dtype=torch.int32)
        self.lens = torch.tensor([50 * page, 0, 49 * page, 1, 20 * page + page // 2, 99 * page])
        self.pool = torch.randn(pages, page, heads, columns, generator=make).bfloat16()
        self.rows = torch.randn(6, 50 * page, heads, columns, generator=make)
        self.rows *= torch.logspace(-4, 4, 6).view(-1, 1, 1, 1)
        for b, keys in enumerate(self.lens.tolist()):
            self.rows[b, keys:] = torch.nan
        self.pages = Pages(table="table", page=page, length="at(lens, b)", axes={"k": "bnh"})

    def step(self, device: str, kernels: PageKernels | None) -> tuple[list[torch.Tensor], Callable[[], Any]]:
        """Returns pages, table, lengths, gradients of rows and what is made, and what writes and sums it."""
        memory = lay_rows(self.rows.shape, "bnh", torch.bfloat16)
        made = {
            name: torch.zeros(shape, dtype=torch.int32, device=device)
            for name, shape in (("_pages", self.table.shape), ("_keys", (6,)))
        }
        made["k"] = torch.empty_strided(memory.shape, memory.strides, dtype=torch.bfloat16, device=device)
        made["dk"] = self.rows.to(device)
        given = [x.to(device) for x in (self.pool, self.table, self.lens)]
        place = place_of(("k in pages", "table", "lens"), made)
        fill = self.pages.fill(place, kernels)
        finish = self.pages.finish(place, {}, [("k", memory_of(self.pool), torch.float32)], kernels)

        def step() -> Any:
            fill([*made.values()], given)
            return finish([*made.values()])[0]

        return [*given, *made.values()], step

    def run(self, device: str, kernels: PageKernels | None) -> list[torch.Tensor]:
        """Returns page numbers, keys, rows that have keys, and gradients."""
        (*_, numbers, keys, rows, _), step = self.step(device, kernels)
        found = [step() for _ in range(3)]  # through Triton, then past it
        kept = [x[:count].cpu() for x, count in zip(rows, self.lens.tolist(), strict=True)]
        return [numbers.cpu(), keys.cpu(), *kept, *(x.cpu() for x in found)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pages", [1, 7, 300])
@pytest.mark.parametrize("inner", [(1, 1, 16), (16, 2, 64), (64, 1, 576), (16, 8, 128)], ids=str)
def test_pages_are_those_of_a_cpu(
    inner: tuple[int, int, int], pages: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnc.support.page_kernels._FEW", 0 if way == "sort" else 4096)
    example = Example(pages, *inner)
    kernels = None if way == "torch" else TritonPages()
    assert all(map(torch.equal, example.run("cpu", None), example.run("cuda", kernels)))


@pytest.mark.parametrize("way", WAYS)
def test_pages_are_copied_and_summed_in_a_graph(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is read by the host."""
    monkeypatch.setattr("attnc.support.page_kernels._FEW", 0 if way == "sort" else 4096)
    example = Example(7, 16, 2, 64)
    (_, table, lens, *_, rows), step = example.step("cuda", None if way == "torch" else TritonPages())
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    rows.nan_to_num_()
    for turn in (0, 1):
        table.copy_(example.table.roll(turn, 1))
        lens.copy_(example.lens.clamp(max=500 + 100 * turn))
        graph.replay()
        assert torch.equal(captured, step())


def test_lengths_are_counted_in_a_graph() -> None:
    """Nothing is copied from the host, or to it."""
    lens = torch.tensor([3, 20, -4], dtype=torch.int32, device="cuda")
    text = (
        "where((at(lens, b) > 2) | (at(lens, 1) == M), least(quotient(at(lens, b), 2), 7), remainder(M, 3))"
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = count_keys(text, {"lens": lens}, {"B": 3, "M": 5, "N": 8})
        five = count_keys("5", {"lens": lens}, {"B": 3, "M": 5, "N": 8})
    for values, expected in (((3, 20, -4), [1, 7, 2]), ((0, 5, 6), [0, 2, 3])):
        lens.copy_(torch.tensor(values))
        graph.replay()
        assert found.tolist() == expected
        assert five.tolist() == [5] * 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_pages_of_8_bits_become_rows_of_16(dtype: torch.dtype) -> None:
    example = Example(7, 16, 2, 64)
    example.pool = (20 * example.pool.float()).to(dtype)
    (*_, rows, _), step = example.step("cuda", TritonPages())
    step()
    (*_, right, _), step = example.step("cpu", None)
    step()
    for b, keys in enumerate(example.lens.clamp(max=right.shape[1]).tolist()):
        assert torch.equal(rows[b, :keys].cpu(), right[b, :keys])
