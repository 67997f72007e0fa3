"""The declaration of a launch of a Triton kernel, as a module has it."""

from __future__ import annotations

import ast
from typing import Any

from attnc.target.declaration import print_value
from attnc.target.triton.launch import triton_kernel


def fields_of(*given: str, **named: Any) -> dict[str, str]:
    """What the printed call says, by its names, as Python's own parser reads it."""
    call = ast.parse("\n".join(print_value(triton_kernel(*given, **named)))).body[0]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    assert not call.value.args
    return {str(field.arg): ast.unparse(field.value) for field in call.value.keywords}


def test_a_launch_says_only_what_differs_from_the_defaults() -> None:
    assert fields_of("_kernel", "cdiv(M, 16)") == {"function": "_kernel", "grid": "'cdiv(M, 16)'"}


def test_a_launch_says_all_that_it_is_given() -> None:
    found = fields_of(
        *("_kernel", "B"),
        tiles=("q", "k"),
        pointers=("lse",),
        config="dq_config",
        sizes={"ROWS": "M * G"},
        warps=8,
        joins=True,
        contracts=False,
        rounds="H",
    )
    assert {name: text for name, text in found.items() if name not in ("tiles", "pointers", "sizes")} == {
        "function": "_kernel",
        "grid": "'B'",
        "config": "'dq'",
        "warps": "8",
        "joins": "True",
        "contracts": "False",
        "rounds": "'H'",
    }
    assert "q k" in found["tiles"]
    assert "lse" in found["pointers"]
    assert all(part in found["sizes"] for part in ("ROWS", "M * G"))
