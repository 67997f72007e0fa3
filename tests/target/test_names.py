"""Every name that generated code uses for itself is known to `plan.names`, so that no input takes it."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnc.expr.nodes import INDICES, Dim, walk
from attnc.model.names import DIMS, INPUTS, OUTPUTS, SOFT
from attnc.plan import ir
from attnc.plan.names import (
    CPP,
    CUDA,
    CUDA_BACKWARD,
    CUDA_KERNEL,
    CUDA_MODULE,
    KERNEL,
    MODULE,
    TRITON,
    own_name,
    own_sizes,
)
from attnc.runtime.loader import load_module, program_of
from attnc.runtime.nvrtc import compile_cubin
from attnc.target.files import render_files
from tests.plan.planning import planned
from tests.targets import TARGETS

GENERATED = Path(__file__).parents[2] / "generated"

GRADIENTS = {
    "score": "softcap(dot(q, k), 30) + under_test_row[h, q_idx] + under_test_key[b, kv_idx]"
    " + under_test_pair[b, h, q_idx, kv_idx]",
    "inputs": (
        "under_test_row: f32[H, M]",
        "under_test_key: f32[B, N]",
        "under_test_pair: bf16[B, H, M, N]",
        "under_test_sink: f32[H]",
    ),
    "softmax": "softmax(sink = under_test_sink[h])",
    "grads": "q, k, v, under_test_row, under_test_key, under_test_pair, under_test_sink",
    "d": 72,
}
DROPPED = {
    "inputs": ("under_test_rate: f32[]", "under_test_start: i64[]"),
    "softmax": "softmax(dropout = under_test_rate, seed = under_test_start)",
    "grads": "q, k, v",
    "d": 128,
}
SPECS = {
    "plain": {},
    "outside_in": {"schedule": "  loops = [kv, q]\n  softmax = online(rescale = every_step)"},
    "two_pass": {"schedule": "  loops = [q, kv]\n  softmax = two_pass\n  persistent = true"},
    "lazy": {"mask": "causal", "schedule": "  loops = [q, kv]\n  softmax = online(rescale = lazy(8))"},
    "softcap": {"score": "softcap(dot(q, k), 30)", "mask": "window(64, 0)", "d": 80},
    "split": {"schedule": "  loops = [kv]\n  split.kv = 4", "softmax": "softmax"},
    "gradients": GRADIENTS,
    "dropped": DROPPED,
    "atomic": {"grads": "q, k, v", "schedule": "  backward {\n    accumulate.dq = atomic\n  }"},
}


CUDA_SPECS = {
    "plain": {},
    "outside_in": {
        "schedule": "  loops = [kv, q], warp_split = kv\n  softmax = online(rescale = every_step)",
        "score": "softcap(dot(q, k), 30)",
        "d": 72,
    },
    "split": {"mask": "causal", "schedule": "  warp_split = kv\n  persistent = true"},
    "functions": {
        "score": "sigmoid(dot(q, k)) + exp2(-dot(q, k)) + log2(N) + erf(dot(q, k)) + clamp(kv_idx, -inf, 9)"
    },
    "lazy": {"mask": "window(64, 0)", "schedule": "  softmax = online(rescale = lazy(8))"},
    "decode": {
        "schedule": "  loops = [kv], tile.q = 16, tile.kv = 64, warp_split = kv, split.kv = auto\n"
        "  softmax = unified_max(phi = 0, bounds = [-60, 60])"
    },
    "atomic": {
        "mask": "causal",
        "grads": "q\n  grad k, v: f32",
        "schedule": "  tile.q = 64\n  backward {\n    accumulate.dq = atomic, warp_split = kv\n  }",
    },
    "gradients": GRADIENTS,
    "dropped": DROPPED,
    "single": {
        "dtype": "f32",
        "d": 72,
        "mask": "causal",
        "grads": "q, k, v",
        "schedule": "  warp_split = kv\n  backward {\n    accumulate.dq = atomic, warp_split = q\n  }",
    },
    "wide": {
        "d": 512,
        "schedule": "  loops = [kv], tile.q = 16, stages = 1, warp_split = kv, split.kv = 4",
    },
}


def names(module: ir.Module) -> Iterator[str]:
    """Names in the functions where the spec's names live too, and at the top of the module."""
    attention = module.variant.attention.name
    yield from names_in("".join(render_files(module, path="under_test.attn", sha256="0").values()))
    yield attention


def names_in(text: str) -> Iterator[str]:
    """Those of a Python module."""
    tree = ast.parse(text)
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


@pytest.mark.parametrize("name", SPECS)
def test_every_name_is_known(name: str) -> None:
    module = planned(**SPECS[name])  # type: ignore[arg-type]  # keywords of one call each
    attention = module.variant.attention
    known = KERNEL | MODULE | {*DIMS, *INDICES, *INPUTS, *OUTPUTS, *vars(builtins)}
    known |= {"t"}  # of softcap's tanh, and called otherwise where something else is called so
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
        and not name.startswith(("_", "stride_"))
        and attention.name not in name
        and not name.endswith("_ptr")
    }
    assert unknown == set(), "add them to attnc/plan/names.py"


def test_builtins_that_callables_use_are_known() -> None:
    used = set(names(planned())) & vars(builtins).keys()
    assert used <= MODULE | KERNEL


@pytest.mark.parametrize("name", CUDA_SPECS)
def test_every_name_of_a_cuda_module_is_known(name: str) -> None:
    module = planned(target="cuda.sm_80", **CUDA_SPECS[name])  # type: ignore[arg-type]  # keywords of one call each
    files = render_files(module, path="under_test.attn", sha256="0")
    used = set(names_in(files[f"{module.variant.name}.py"]))
    for source in (text for file, text in files.items() if file.endswith(".cu")):
        code = re.sub(r'//.*|"(?:\\.|[^"\\])*"|#.*', "", source)
        used |= set(re.findall(r"(?<![\w.])[A-Za-z]\w*", code))
    known = (
        KERNEL
        | MODULE
        | CUDA_KERNEL
        | CUDA_BACKWARD
        | CUDA_MODULE
        | CPP
        | {*DIMS, *INDICES, *INPUTS, *OUTPUTS, *vars(builtins)}
    )
    unknown = {
        name
        for name in used - known
        if not name.startswith(("_", "stride_")) and "under_test" not in name and not name.endswith("_ptr")
    }
    assert unknown == set(), "add them to attnc/plan/names.py"


def test_words_of_cpp_can_name_inputs() -> None:
    words = ("int", "threadIdx", "scores", "multiply_qk", "warp", "sigmoid_", *sorted(SOFT))
    module = planned(
        score=f"dot(q, k) + {' + '.join(f'{word}[h]' for word in words)} + unsigned[b, kv_idx]",
        mask="kv_idx < new[b]",
        inputs=(*(f"{word}: f32[H]" for word in words), "unsigned: f32[B, N]", "new: i32[B]"),
        target="cuda.sm_80",
    )
    loaded = load_module(module)
    program = program_of(loaded)
    source = program.source(module.kernels[0].name)
    assert compile_cubin(source, program.options(loaded.CONFIGS[0], True, "sm_80")).image


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("grads", ["", "q, k, v"])
def test_no_name_of_a_module_is_defined_twice(target: str, grads: str) -> None:
    """Where an input is called like the attention, the callable goes by another name inside of the module."""
    module = planned(
        score="dot(q, k) + under_test[h]", inputs=("under_test: f32[H]",), grads=grads, target=target
    )
    tree = ast.parse(render_files(module, path="under_test.attn", sha256="0")[f"{module.variant.name}.py"])
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    assert sorted(names) == sorted(set(names))


def test_clashing_names() -> None:
    assert own_name("doc") == "doc"
    assert own_name("tile") == "tile_value"
    assert own_name("doc_ptr") == "doc_ptr_value"
    assert TRITON.clashes("lambda")
    assert TRITON.clashes("_rows")
    assert not TRITON.clashes("tile")
    assert own_name("unsigned") == "unsigned_value"
    assert CUDA.clashes("gpu")
    assert not TRITON.clashes("gpu")


@pytest.mark.parametrize("name", ["causal_gqa", "local_sink", "extend"])
def test_every_name_of_the_function_that_picks_a_module_is_known(name: str) -> None:
    """Of variants by types and sizes, by a keyword, and of several schedules."""
    text = (GENERATED / name / "triton" / "__init__.py").read_text(encoding="utf-8")
    (function,) = (x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef) and x.name == name)
    # types are looked up before there are arguments
    used = {node.id for line in function.body for node in ast.walk(line) if isinstance(node, ast.Name)}
    used |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    assert "key" in used
    own = {*INPUTS, "sink", "kv_len", "W"}  # of the specs
    assert [x for x in used - own if not x.startswith("_") and not TRITON.clashes_as_input(x, name)] == []


SIZES = ("t", "w", "half", "K", "tile", "stride_q", "lse_ptr", "dbias", "dbias_tile", "namespace", "t_size")


def test_sizes_have_any_name() -> None:
    renamed = own_sizes(SIZES, ("bias",))
    assert set(renamed) == set(SIZES) - {"t_size"}
    assert renamed["t"] == "t_size_2"
    assert len({*renamed.values(), "t_size"}) == len(SIZES)
    assert own_sizes(("T", "pages_of", "bias"), ("doc",)) == {}


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_read_sizes_of_any_name(target: str) -> None:
    module = planned(
        score="dot(q, k) + " + " + ".join(f"x{i}[h % {size}]" for i, size in enumerate(SIZES)),
        inputs=tuple(f"x{i}: f32[{size}]" for i, size in enumerate(SIZES)),
        target=target,
    )
    files = render_files(module, path="under_test.attn", sha256="0")
    kernels = "".join(text for file, text in files.items() if file.endswith(".cu") or target == "triton")
    for size in SIZES:
        own = own_sizes(SIZES, ("x0",)).get(size, size)
        assert re.search(rf"floor_mod\w*\(h, {own}\)|h % {own}\b", kernels), size
    load_module(module)
