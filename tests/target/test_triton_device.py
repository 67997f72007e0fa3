"""Each device function of Triton modules is a template of its own, which defines what its name says."""

from __future__ import annotations

import ast

import pytest

from attnc.resources import resource
from attnc.target.triton.columns import TileColumns
from attnc.target.triton.device import _ORDER, print_functions
from attnc.target.triton.render import triton_environment

#: Of names that several functions share a template for, and of one that asks the kernel for its tiles.
OTHERS = {"_widen", "_bound", "_find_sequence"}
FILES = {path.name.partition(".")[0] for path in resource("templates").glob("triton/device/*.jinja")}


@pytest.mark.parametrize("padded", [False, True])
def test_a_template_defines_the_function_of_its_name(padded: bool) -> None:
    fields = {"columns": TileColumns(padded), "precision": ""}
    for name in sorted((FILES | {*_ORDER}) - OTHERS):
        tree = ast.parse(print_functions([name], triton_environment(), fields))
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert found[-1].name == name.removesuffix("_tma")
        takes_width = "D" in [argument.arg for argument in found[-1].args.args]
        assert takes_width == (padded and "BLOCK_D" in ast.unparse(found[-1].args))
