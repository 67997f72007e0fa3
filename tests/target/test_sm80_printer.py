"""Locals that are offered to CUDA text are declared where something reads them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnc.expr.nodes import Binary, Dim
from attnc.target.sm80.printer import local, settle, sizes_of_call
from attnc.target.sm80.printer import scalar as cuda_scalar

GENERATED = Path(__file__).parents[2] / "generated"


def body(*lines: str) -> str:
    return "\n".join(("{", *(f"    {line}" for line in lines), "}", ""))


def test_what_is_read_is_declared() -> None:
    offered = local("const int", H="args.H", M="args.M")
    assert settle(body(offered, "use(H * M);")) == body("const int H = args.H, M = args.M;", "use(H * M);")


@pytest.mark.parametrize(
    ("reader", "left"),
    [
        ("use(H);", "const int H = args.H;"),
        ("use(args.B, x.M);  // B", None),
        ("auto f = [&] { return M; };", "const int M = args.M;"),
        ('printf("B");', None),
    ],
)
def test_what_is_not_read_is_left_out(reader: str, left: str | None) -> None:
    offered = local("const int", H="args.H", B="args.B", M="args.M")
    assert settle(body(offered, reader)) == body(*([left] if left else []), reader)


def test_a_remark_goes_with_its_declaration() -> None:
    offered = f"{local('float* const', sums='at(1, 2)')}  // of rows"
    assert settle(body(offered, "use(1);")) == body("use(1);")
    assert "sums = at(1, 2);  // of rows" in settle(body(offered, "use(sums);"))


def test_what_only_unread_locals_read_is_left_out_too() -> None:
    lane = local("const int", lane="threadIdx.x % 32", g="lane / 4")
    other = local("const int", row="8 + g")
    assert settle(body(lane, other, "use(1);")) == body("use(1);")
    declared = ("const int lane = threadIdx.x % 32, g = lane / 4;", "const int row = 8 + g;")
    assert settle(body(lane, other, "use(row);")) == body(*declared, "use(row);")


def test_a_name_of_one_block_is_not_read_by_the_next() -> None:
    key = local("const int", key="1")
    first, second = body(key, "use(1);"), body("int key = 2;", "use(key);")
    assert settle(body(*first.splitlines(), *second.splitlines())) == body(
        *body("use(1);").splitlines(), *second.splitlines()
    )


def test_no_sizes_no_line() -> None:
    assert not list(sizes_of_call(()))


def test_committed_kernels_read_what_they_declare() -> None:
    for path in GENERATED.glob("*/cuda_*/*.cu"):
        code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        words = re.findall(r"(?<![\w.])[A-Za-z_]\w*", code)
        for line in re.findall(r"^ +const int (.*);$", code, re.M):
            for name in re.findall(r"(\w+) = ", line):
                assert words.count(name) > 1, f"{path}: {name}"


def test_sizes_of_sequences_may_be_0_as_divisors() -> None:
    """A sequence may be empty: on a CPU the processor would stop."""
    for divisor in (Dim("M"), Binary("+", Dim("N"), Dim("M"))):
        assert cuda_scalar(Binary("%", Dim("B"), divisor)).startswith("floor_mod_by_any(")
        assert cuda_scalar(Binary("//", Dim("B"), divisor)).startswith("floor_div_by_any(")
    assert cuda_scalar(Binary("%", Dim("B"), Dim("H"))) == "B % H"
