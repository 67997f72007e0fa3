"""Every name that generated code uses for itself is known to `plan.names`, so that no input takes it."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnc.expr.nodes import INDICES, Dim, walk
from attnc.model.names import DIMS, INPUTS, OUTPUTS
from attnc.plan import ir
from attnc.plan.names import KERNEL, MODULE, clashes, own_name
from attnc.target.render import render
from tests.plan.planning import planned

REPOSITORY = Path(__file__).parents[2]
SPECS = {
    "plain": {},
    "outside_in": {"schedule": "  loops = [kv, q]\n  softmax = online(rescale = every_step)"},
    "two_pass": {"schedule": "  loops = [q, kv]\n  softmax = two_pass\n  persistent = true"},
    "lazy": {"mask": "causal", "schedule": "  loops = [q, kv]\n  softmax = online(rescale = lazy(8))"},
    "softcap": {"score": "softcap(dot(q, k), 30)", "mask": "window(64, 0)", "d": 80},
    "split": {"schedule": "  loops = [kv]\n  split.kv = 4", "softmax": "softmax"},
}


def names(module: ir.Module) -> Iterator[str]:
    """Names in the functions where the spec's names live too, and at the top of the module."""
    attention = module.variant.attention.name
    tree = ast.parse(render(module, path="under_test.attn", sha256="0"))
    for item in tree.body:
        match item:
            case ast.FunctionDef(name=name) if name.startswith("_") and not name.startswith(
                ("_forward", "_backward")
            ):
                continue
            case ast.FunctionDef():
                yield from (node.id for node in ast.walk(item) if isinstance(node, ast.Name))
                yield from (node.arg for node in ast.walk(item) if isinstance(node, ast.arg))
            case (
                ast.Assign(targets=[ast.Name(id=name)])
                | ast.AnnAssign(target=ast.Name(id=name))
                | ast.ClassDef(name=name)
            ):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((alias.asname or alias.name).split(".")[0] for alias in aliases)
    yield attention


@pytest.mark.parametrize("name", SPECS)
def test_every_name_is_known(name: str) -> None:
    module = planned(**SPECS[name])  # type: ignore[arg-type]  # keywords of one call each
    attention = module.variant.attention
    known = KERNEL | MODULE | {*DIMS, *INDICES, *INPUTS, *OUTPUTS, *vars(builtins)}
    known |= {
        node.name
        for t in attention.inputs
        for size in t.shape
        for node in walk(size)
        if isinstance(node, Dim)
    }
    unknown = {
        name
        for name in names(module)
        if name not in known
        and not name.startswith(("_", "stride_", attention.name))
        and not name.endswith("_ptr")
    }
    assert unknown == set(), "add them to attnc/plan/names.py"


def test_builtins_that_callables_use_are_known() -> None:
    used = set(names(planned())) & vars(builtins).keys()
    assert used <= MODULE | KERNEL


def test_clashing_names() -> None:
    assert own_name("doc") == "doc"
    assert own_name("tile") == "tile_value"
    assert own_name("doc_ptr") == "doc_ptr_value"
    assert clashes("lambda")
    assert clashes("_rows")
    assert not clashes("tile")
