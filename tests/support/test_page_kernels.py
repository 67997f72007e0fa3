"""Kernels that copy pages and sum their rows do what torch does, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.support.memory import memory_of
from attnc.support.pages import Pages, lay_rows
from attnc.verify.interpreter import ensure_interpreter
from tests.processes import compiling
from tests.support.in_pages import place_of

ensure_interpreter()

from attnc.support import page_kernels  # noqa: E402  # Triton's interpreter has to be chosen first
from attnc.support.page_kernels import TritonPages  # noqa: E402  # as above

#: Axes of k and v, keys of a page, pages, and heads and columns of each.
SHAPES = {
    "alike": ("pnh", "pnh", 4, 6, (2, 16), (2, 16)),
    "other widths": ("pnh", "pnh", 3, 5, (2, 24), (2, 8)),
    "heads first": ("hpn", "phn", 4, 6, (3, 8), (3, 16)),
    "of one key": ("pnh", "pnh", 1, 9, (1, 40), (1, 24)),
    "alone": ("pnh", "", 2, 3, (1, 72), (0, 0)),
    "several chunks": ("pnh", "npg".replace("g", "h"), 8, 4, (3, 24), (3, 16)),
}


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hostile_table(seed: int, B: int, P: int, count: int) -> torch.Tensor:
    """Entries that name pages, several the same, and some that name none."""
    make = torch.Generator().manual_seed(seed)
    table = torch.randint(-2, count + 2, (B, P), generator=make, dtype=torch.int32)
    table[:, 0] = table[0, 0].clamp(0, count - 1)  # shared by all
    return table


class Example:
    """Pages with NaN where no key lies, and rows of gradients."""

    def __init__(self, name: str, seed: int) -> None:
        k_axes, v_axes, self.page, self.count, *sizes = SHAPES[name]
        self.axes = {n: own.replace("p", "b") for n, own in (("k", k_axes), ("v", v_axes)) if own}
        B, P = 4, 5
        self.table = hostile_table(seed, B, P, self.count)
        self.keys = torch.tensor([P * self.page, 0, 2 * self.page - 1, 99], dtype=torch.int32)
        self.pools, self.rows = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for at, ((n, own), (heads, width)) in enumerate(zip(self.axes.items(), sizes, strict=False)):
            of_pages = [{"b": self.count, "n": self.page, "h": heads}[axis] for axis in own]
            of_rows = [{"b": B, "n": P * self.page, "h": heads}[axis] for axis in own]
            self.pools[n] = drawn(at, *of_pages, width).bfloat16()
            memory = lay_rows([*of_rows, width], own, torch.float32)
            self.rows[n] = torch.empty_strided(memory.shape, memory.strides)
            spread = torch.logspace(-3, 3, self.rows[n].numel()).view(self.rows[n].shape)
            self.rows[n].copy_(drawn(at + 9, *self.rows[n].shape) * spread)
            by_key = self.rows[n].movedim((self.axes[n].index("b"), own.index("n")), (0, 1))
            for b, keys in enumerate(self.keys.tolist()):
                by_key[b, max(keys, 0) :] = torch.nan  # which kernels of gradients leave alone
        self.pages = Pages(table="table", page=self.page, length="at(lens, b)", axes=self.axes)

    def gather(self, kernels: Any) -> list[torch.Tensor]:
        numbers, keys = (torch.full(size, -7, dtype=torch.int32) for size in (self.table.shape, (4,)))
        made = {"_pages": numbers, "_keys": keys}
        for name, own in self.axes.items():
            memory = lay_rows(self.rows[name].shape, own, torch.bfloat16)
            made[name] = torch.empty_strided(memory.shape, memory.strides, dtype=torch.bfloat16).fill_(5)
        fill = self.pages.fill(place_of((*map(self.pages.own, self.axes), "table", "lens"), made), kernels)
        for _ in range(2):
            fill([*made.values()], [*self.pools.values(), self.table, self.keys])
        return [*made.values()]

    def sum(self, numbers: torch.Tensor, keys: torch.Tensor, kernels: Any) -> tuple[torch.Tensor, ...]:
        made = {"_pages": numbers, "_keys": keys, **{f"d{name}": x for name, x in self.rows.items()}}
        wanted = [(name, memory_of(x), x.dtype) for name, x in self.pools.items()]
        found: Any = self.pages.finish(place_of((), made), {}, wanted, kernels)([*made.values()])
        return tuple(found)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_do_what_torch_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_COPIED", "_SUMMED"):
        monkeypatch.setattr(page_kernels, limit, 64)
    for seed in range(2):
        example = Example(name, seed)
        (numbers, keys, *expected), (found_numbers, found_keys, *found) = map(
            example.gather, (None, TritonPages())
        )
        assert all(map(torch.equal, (numbers, keys), (found_numbers, found_keys)))
        for n, right, rows in zip(example.axes, expected, found, strict=True):
            axis = example.axes[n].index("n")
            by_entry = [x.movedim((example.axes[n].index("b"), axis), (0, 1)) for x in (right, rows)]
            for b, own in enumerate(keys.tolist()):
                read = -(-own // example.page) * example.page
                assert torch.equal(by_entry[0][b, :read], by_entry[1][b, :read])
                assert (by_entry[1][b, read:] == 5).all()  # left alone
        sums = example.sum(numbers, keys, None)
        for few, step in ((99, 1024), (99, 4), (0, 1)):  # searched in one step and several, and sorted
            monkeypatch.setattr(page_kernels, "_FEW", few)
            monkeypatch.setattr(page_kernels, "_STEP", step)
            for right, x in zip(sums, example.sum(numbers, keys, TritonPages()), strict=True):
                assert torch.equal(right, x)
                assert right.stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_pages_of_8_bits_become_rows_of_16(dtype: torch.dtype) -> None:
    example = Example("other widths", 0)
    example.pools = {name: (20 * x.float()).to(dtype) for name, x in example.pools.items()}
    expected, found = map(example.gather, (None, TritonPages()))
    columns = example.keys.clamp(0, example.rows["k"].shape[1]).tolist()
    for right, rows in zip(expected[2:], found[2:], strict=True):
        for b, keys in enumerate(columns):
            assert torch.equal(right[b, :keys], rows[b, :keys])
    number = int(expected[0][0, 0])
    assert torch.equal(expected[2][0, : example.page], example.pools["k"][number].bfloat16())


#: Compiles both kernels for pages of these types, rows of bf16 and gradients of bf16 and f32.
_COMPILE = """
import sys
from attnc.runtime.toolchains import TritonKernel
from attnc.support.page_kernels import gather_pages, sum_pages

PAGES = {"PAGE": 16, "K_HEADS": 2, "K_WIDTH": 64, "V_HEADS": 2, "V_WIDTH": 48}
ROWS = {"k_rows_ptr": "*bf16", "v_rows_ptr": "*bf16", "numbers_ptr": "*i32", "keys_ptr": "*i32"}
SUMS = {"k_rows_ptr": "*fp32", "v_rows_ptr": "*fp32", "k_ptr": "*bf16", "v_ptr": "*fp32"}
for k, v in (pair.split("+") for pair in sys.argv[1:]):
    given = {"k_ptr": k, "v_ptr": v, "table_ptr": "*i64", "lens_ptr": "*i64"}
    asked = [(gather_pages, {**ROWS, **given}, {"BLOCK": 1024})]
    for order in ("*i32", "*i64"):
        more = {"BLOCK": 1024, "STEP": 64, "SORTED": order == "*i64"}
        asked.append((sum_pages, {**ROWS, **SUMS, "order_ptr": order}, more))
    for kernel, types, constants in asked:
        constants = {**PAGES, **constants}
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
        found = TritonKernel(
            function=kernel, signature=signature, constants=constants, capability=90, warps=4, stages=3
        )
        assert found.cubin()
"""


@pytest.mark.nightly
def test_triton_compiles_them_for_tensors_of_any_types() -> None:
    compiling(_COMPILE, "*bf16+*bf16", "*fp8e4nv+*i8", "*fp32+*fp8e5")
