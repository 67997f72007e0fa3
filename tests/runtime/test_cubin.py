"""Two cubins are the same where they differ in names alone."""

from __future__ import annotations

import re

import pytest

from attnc.runtime.cubin import list_differences, list_machine_code
from attnc.runtime.nvrtc import compile_cubin

OPTIONS = ("-arch=sm_90", "-std=c++17")
SOURCE = """
constexpr int TABLE[3] = {1, 2, 3};
__device__ int sum(const int& a, const int& b) { return a + b; }
extern "C" __global__ void kernel(int* out, int n)
{
    __shared__ int tile[32];
    tile[threadIdx.x] = TABLE[n] + sum(TABLE[0], n);
    __syncthreads();
    out[threadIdx.x] = tile[31 - threadIdx.x];
}
"""


def compiled(source: str) -> bytes:
    return compile_cubin(source, OPTIONS).image


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["TABLE", "sum", "kernel", "tile", "out"])
def test_names_are_no_part_of_machine_code(name: str) -> None:
    renamed = re.sub(rf"\b{name}\b", f"another_{name}", SOURCE)
    assert list_differences(compiled(SOURCE), compiled(renamed)) == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "change",
    [
        ("{1, 2, 3}", "{1, 2, 4}"),
        ("tile[32]", "tile[64]"),
        ("31 - ", "30 - "),
        ("int n)", "int n, int unused)"),
    ],
)
def test_all_else_is(change: tuple[str, str]) -> None:
    assert list_differences(compiled(SOURCE), compiled(SOURCE.replace(*change))) != []


def test_a_constant_that_is_named_and_not_read_is_no_part_of_it() -> None:
    text = SOURCE.replace("TABLE[n]", "n").replace("TABLE[0]", "n")  # reads none
    named = text.replace("tile[threadIdx.x] = n", "tile[threadIdx.x] = (HALF > 1.0f) + n")
    named = (
        "__device__ const float& same(const float& x) { return x; }\nconstexpr float HALF = 0.5f;\n" + named
    )
    named = named.replace("(HALF > 1.0f)", "(same(HALF) > 1.0f)")
    before, after = compiled(text), compiled(named)
    assert list_machine_code(before) != list_machine_code(after)
    assert list_differences(before, after) == []


def test_a_launch_bound_shows() -> None:
    bounded = SOURCE.replace("__global__ void", "__global__ void __launch_bounds__(64)")
    assert list_differences(compiled(SOURCE), compiled(bounded)) != []


def test_instructions_are_there() -> None:
    assert ".text.0" in dict(list_machine_code(compiled(SOURCE)))


def test_another_file_is_refused() -> None:
    with pytest.raises(ValueError, match="not a cubin"):
        list_machine_code(b"\x7fELF\x01")
