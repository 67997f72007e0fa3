"""A Triton module defines the device functions that its kernels call, and no others. That none is missing in
random specs either is what `test_defined_names` holds.
"""

from __future__ import annotations

import ast

from attnc.target.files import render_files
from attnc.target.triton.device import device_functions
from tests.plans import plans_of

#: Of each kind one, by what it adds: pages, a search, packed rows, tanh, dropout, descriptors.
TELLING = ("paged_decode", "chunked_prefill", "document", "varlen", "softcap", "dropout", "alibi", "full")
#: What comes in pairs, although a kernel may call one alone.
ROWS = {"_load_rows", "_store_rows"}


def test_what_is_called_is_defined_and_nothing_else() -> None:
    seen: set[str] = set()
    for name in TELLING:
        for module in plans_of(name).modules:
            if module.target == "triton":
                found = {name.removesuffix("_tma") for name in device_functions(module)}
                (text,) = render_files(module, path="a.attn", sha256="0" * 64).values()
                tree = ast.parse(text)
                calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
                called = {func.id for func in calls if isinstance(func, ast.Name)}
                defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
                assert found <= defined
                assert found - ROWS <= called
                assert not {name for name in called - defined if name.startswith("_")}
                seen |= found
    assert seen >= {"_find_pages", "_upper_bound", "_find_sequence", "_tanh", "_keep_dropout", "_load_vector"}
