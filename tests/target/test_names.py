"""Every name that generated code uses for itself is known to `plan.names`, which calls the spec's otherwise,
or refuses those of the module's interface.
"""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path
from typing import Any

import pytest

from attnc.build import plan_program
from attnc.expr.functions import REAL
from attnc.expr.nodes import INDICES, Dim, walk
from attnc.model.names import DIMS, GLOBALS, INPUTS, INTERFACE, OUTPUTS, PYTHON, READ, RESERVED, SOFT
from attnc.model.resolve import resolve
from attnc.plan import ir
from attnc.plan.loads import BEHIND, LoadNames
from attnc.plan.names import (
    cannot_be_passed,
    own_name,
    own_sizes,
    words,
)
from attnc.plan.targets import schedule_for, target_of
from attnc.runtime.loader import load_module, program_of
from attnc.runtime.nvrtc import compile_cubin
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.target.files import render_files
from tests.kernels.test_selected import CASES as SELECTED
from tests.kernels.test_selected import subject as select
from tests.model.resolving import resolve_text
from tests.plan.planning import planned, resolved
from tests.targets import TARGETS
from tests.verify.judging import modules_of

GENERATED = Path(__file__).parents[2] / "generated"
SPECS_FOLDER = GENERATED.with_name("specs")

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
SPECS: dict[str, dict[str, Any]] = {
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


CUDA_SPECS: dict[str, dict[str, Any]] = {
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


def in_kernels(text: str) -> set[str]:
    """Names in the Triton kernels of a module, but for helpers, which no name of a spec comes into."""
    functions = [x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef) and x.decorator_list]
    kernels = [
        x for x in functions if not x.name.startswith("_") or x.name.startswith(("_forward", "_backward"))
    ]
    nodes = [node for kernel in kernels for node in ast.walk(kernel)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}


def at_the_top(text: str) -> set[str]:
    """Globals of a module but for its kernels."""
    found: set[str] = set()
    for item in ast.parse(text).body:
        match item:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.ClassDef(name=name):
                found.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                found |= {(alias.asname or alias.name).split(".")[0] for alias in aliases}
    return found


def read_by(text: str, name: str) -> set[str]:
    """Names in the statements of a function, but for its arguments."""
    (function,) = (x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef) and x.name == name)
    used = {node.id for line in function.body for node in ast.walk(line) if isinstance(node, ast.Name)}
    return used - {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}


def own(module: ir.Module) -> set[str]:
    """Names with a meaning in every spec, and sizes of this one."""
    sizes = (size for tensor in module.variant.attention.inputs for size in tensor.shape)
    dims = {node.name for size in sizes for node in walk(size) if isinstance(node, Dim)}
    return dims | {*DIMS, *INDICES, *INPUTS, *OUTPUTS, *vars(builtins), *PYTHON}


#: What a score and its derivatives share, like the tanh of a softcap: free where that is another name.
SHARED = {function.short for function in REAL.values()} - {""}


def is_free(name: str) -> bool:
    """Whether the rules for parameters and helpers take care of the name."""
    is_extreme = re.fullmatch(r"(least|most)_\d+", name) is not None
    return name.startswith(("_", "stride_")) or name.endswith("_ptr") or "under_test" in name or is_extreme


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SPECS)
def test_every_name_is_known(name: str) -> None:
    module = planned(**SPECS[name])
    (text,) = render_files(module, path="under_test.attn", sha256="0").values()
    known = words() | GLOBALS | own(module) | SHARED
    assert {x for x in in_kernels(text) - known if not is_free(x)} == set(), "add them to attnc/plan/names.py"
    assert {x for x in at_the_top(text) - GLOBALS - own(module) if not is_free(x)} == set()
    assert read_by(text, "under_test") <= READ


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    ["blocks", "tokens", "latent attention", "added as they come", "latent attention added as it comes"],
)
def test_every_name_of_gradients_of_selected_keys_is_known(name: str) -> None:
    """Also of what a call computes of its sizes: a caller's size of that name would be another number."""
    made = select(**SELECTED[name])
    assert made.plan is not None
    (text,) = render_files(made.plan, path="under_test.attn", sha256="0").values()
    computed = {*made.module.CALL.backward.sizes}
    used = (in_kernels(text) | computed) - GLOBALS - own(made.plan) - SHARED
    assert {x for x in used if own_name(x) == x and not is_free(x)} == set(), (
        "add them to attnc/plan/names.py"
    )
    assert set(own_sizes(computed, ())) == computed


@pytest.mark.parametrize("name", CUDA_SPECS)
def test_every_name_of_a_cuda_module_is_known(name: str) -> None:
    module = planned(target="cuda.sm_80", **CUDA_SPECS[name])
    files = render_files(module, path="under_test.attn", sha256="0")
    text = files[f"{module.variant.name}.py"]
    used: set[str] = set()
    for source in (text for file, text in files.items() if file.endswith(".cu")):
        code = re.sub(r'//.*|"(?:\\.|[^"\\])*"|#.*', "", source)
        used |= set(re.findall(r"(?<![\w.])[A-Za-z]\w*", code))
    unknown = used - words() - GLOBALS - own(module)
    assert {x for x in unknown if not is_free(x)} == set(), "add them to attnc/plan/names.py"
    assert {x for x in at_the_top(text) - GLOBALS - own(module) if not is_free(x)} == set()
    assert read_by(text, "under_test") <= READ


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "path", sorted(GENERATED.glob("*/cuda_*")), ids=lambda path: "/".join(path.parts[-2:])
)
def test_every_name_of_committed_kernels_is_known(path: Path) -> None:
    """Of the Hopper target too: what is no word of kernels comes from the names of the spec."""
    name = path.parent.name
    modules = "".join(file.read_text(encoding="utf-8") for file in path.glob("*.py"))
    tensors = set(re.findall(r'Tensor\("(\w+)"', modules))
    sizes = set(re.findall(r"[A-Za-z]\w*", " ".join(re.findall(r'Tensor\("\w+", "\w+\[(.*?)\]"', modules))))
    own = tuple(f"{d}{tensor.lstrip('_')}" for tensor in tensors - {*INPUTS, *OUTPUTS} for d in ("", "d"))
    known = words() | sizes | SHARED | {*DIMS, *INDICES, *INPUTS, *OUTPUTS, *vars(builtins), *PYTHON}
    for file in path.glob("*.cu"):
        code = re.sub(r'//.*|"(?:\\.|[^"\\])*"|#.*', "", file.read_text(encoding="utf-8"))
        unknown = set(re.findall(r"(?<![\w.])[A-Za-z]\w*", code)) - known
        assert {x for x in unknown if not is_free(x) and not x.startswith((name, *own))} == set(), file.name


#: What stands behind the name of an input in the names of its values, which `LoadNames` tells apart; its
#: address and the map of TMA, which have names that no value and no size has; and the sums of its gradient.
DERIVED = re.compile(
    rf"_value|(_value|_q|_kv|_tile|_d|_row|_first|_last|_from|_to)*(_\d)?(_({'|'.join(BEHIND)}))?|_ptr|_map"
)
SUMMED = re.compile(r"(_sum|_\d)*(_column|_total|_tile|_row)?(_ptr)?")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "path", sorted(GENERATED.glob("*/cuda_*")), ids=lambda path: "/".join(path.parts[-2:])
)
def test_every_name_that_is_made_of_an_input_is_known(path: Path) -> None:
    """So that no other input of that name becomes the same variable."""
    modules = "".join(file.read_text(encoding="utf-8") for file in path.glob("*.py"))
    tensors = set(re.findall(r'Tensor\("(\w+)"', modules)) - {*INPUTS, *OUTPUTS}
    own = {path.parent.name, *words()}
    for file in path.glob("*.cu"):
        code = re.sub(r'//.*|"(?:\\.|[^"\\])*"|#.*', "", file.read_text(encoding="utf-8"))
        for word in set(re.findall(r"(?<![\w.])[A-Za-z]\w*", code)) - own:
            if word.startswith(f"{path.parent.name}_"):
                continue
            for tensor in tensors:
                if word.startswith(f"{tensor}_"):
                    assert DERIVED.fullmatch(word, len(tensor)), f"{file.name}: {word}: add it to BEHIND"
                elif word.startswith(f"d{tensor}_"):
                    assert SUMMED.fullmatch(word, len(tensor) + 1), f"{file.name}: {word}"


def test_values_keep_apart_from_names_that_are_made_of_others() -> None:
    names = LoadNames()
    assert [names.free_name(name) for name in ("tree", "tree_bits", "x_first", "x")] == [
        "tree", "tree_bits_2", "x_first", "x_2"
    ]  # fmt: skip
    assert own_sizes(("doc_map", "doc"), ("doc",)) == {"doc_map": "doc_map_size"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("other", ["bits", "first", "word"])
def test_words_of_bits_beside_an_input_called_like_a_part_of_them(other: str) -> None:
    """On Hopper, where a decode kernel keeps the words of a row in registers."""
    text = (SPECS_FOLDER / "tree.attn").read_text(encoding="utf-8")
    made = text.replace("  length M", f"  input tree_tile_{other}: f32[B]\n  length M")
    made = made.replace("sqrt(D)", f"sqrt(D) + tree_tile_{other}[b]")
    found = []
    for source in (made, made.replace(f"tree_tile_{other}", "plain")):
        program = resolve(parse(Source("tree.attn", source)), prelude())
        (module,) = (x for x in plan_program(program).modules if x.target == "cuda.sm_90a")
        files = render_files(module, path="tree.attn", sha256="0")
        found.append("".join(text for file, text in files.items() if file.endswith(".cu")))
    assert re.search(rf"\btree_tile_{other}\b(?!_)", found[1]), "no such part"
    assert len(set(re.findall(r"\w+", found[0]))) == len(set(re.findall(r"\w+", found[1])))


def test_words_of_cpp_can_name_inputs() -> None:
    words = ("int", "threadIdx", "scores", "multiply_pv", "warp", "sigmoid_", *sorted(SOFT))
    module = planned(
        score=f"dot(q, k) + {' + '.join(f'{word}[h]' for word in words)} + unsigned[b, kv_idx]",
        mask="kv_idx < new[b]",
        inputs=(*(f"{word}: f32[H]" for word in words), "unsigned: f32[B, N]", "new: i32[B]"),
        target="cuda.sm_80",
    )
    loaded = load_module(module)
    program = program_of(loaded)
    source = program.source(module.kernel.name)
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


@pytest.mark.parametrize("name", ["causal_gqa", "local_sink", "extend"])
def test_every_name_of_the_function_that_picks_a_module_is_known(name: str) -> None:
    """Of variants by types and sizes, by a keyword, and of several schedules."""
    text = (GENERATED / name / "triton" / "__init__.py").read_text(encoding="utf-8")
    used = read_by(text, name) - {"key", "sizes", "torch"}  # variables, which no argument is called
    assert {x for x in used if not x.startswith("_")} <= INTERFACE


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_have_almost_any_name(target: str) -> None:
    words = ("key", "sizes", "grid", "gpu", "args", "launch", "x", "y", "t", "w", "half", "stride_q", "delta")
    module = planned(
        score="dot(q, k) + " + " + ".join(f"{word}[h]" for word in words),
        inputs=tuple(f"{word}: f32[H]" for word in words),
        target=target,
    )
    assert [arg.tensor.name for arg in module.args][3:] == list(words)
    load_module(module)


SIZES = ("t", "w", "half", "K", "tile", "stride_q", "lse_ptr", "dbias", "dbias_tile", "namespace", "t_size")


def test_sizes_have_any_name() -> None:
    renamed = own_sizes(SIZES, ("bias",))
    assert set(renamed) == set(SIZES) - {"t_size"}
    assert renamed["t"] == "t_size_2"
    assert len({*renamed.values(), "t_size"}) == len(SIZES)
    assert own_sizes(("T", "pages_per", "bias"), ("doc",)) == {}


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


@pytest.mark.parametrize("target", [*TARGETS, pytest.param("cuda.sm_90a", marks=pytest.mark.nightly)])
def test_rows_of_packed_sequences_have_any_name(target: str) -> None:
    text = """
attention packed {
  input q: bf16[half, H, 64] via ragged(ends)
  input k, v: bf16[wide, H, 64] via ragged(ends)
  input ends: i32[B + 1]
  score = dot(q, k) / sqrt(D)
  mask = causal
  normalize = softmax
  output o: bf16[half, H, 64]
  grad q, k, v
}
"""
    (module,) = modules_of(text + schedule_for(resolve_text(text), "packed", target))
    declared = render_files(module, path="x.attn", sha256="0")["default.py"].partition("\nCALL = ")[2]
    assert re.findall(r"\b(half|wide)\b", declared) == []
    assert 'work="B * H * half_size"' in declared


#: Inputs with a value for each row, key, pair, head and distance.
LOADED = {
    "row": ("f32[H, M]", "{}[h, q_idx]"),
    "key": ("f32[B, N]", "{}[b, kv_idx]"),
    "pair": ("bf16[B, H, M, N]", "{}[b, h, q_idx, kv_idx]"),
    "head": ("f32[H]", "{}[h]"),
    "distance": ("f32[33]", "{}[clamp(q_pos - kv_idx, 0, 32)]"),
}


def scopes(target: str, shape: str, names: list[str]) -> dict[str, list[str]]:
    """Identifiers of each kernel of a dropped attention with gradients of inputs of these names, in order."""
    kind, load = LOADED[shape]
    module = planned(
        target=target,
        score=" + ".join(["dot(q, k)", *(load.format(name) for name in names)]),
        inputs=("rate: f32[]", "start: i64[]", *(f"{name}: {kind}" for name in names)),
        softmax="softmax(dropout = rate, seed = start)",
        grads=", ".join(("q, k, v", *names)),
        schedule="",
    )
    found = {}
    for file, text in render_files(module, path="x.attn", sha256="0").items():
        if file.endswith(".cu"):
            code = re.sub(r'//.*|"(?:\\.|[^"\\])*"', "", text)
            found[file] = re.findall(r"\.?(?<!\w)[A-Za-z_]\w*", code)
        elif target == "triton":
            for function in ast.parse(text).body:
                if isinstance(function, ast.FunctionDef) and function.decorator_list:
                    nodes = list(ast.walk(function))
                    words = [node.arg for node in nodes if isinstance(node, ast.arg)]
                    found[function.name] = words + [node.id for node in nodes if isinstance(node, ast.Name)]
    return found


@pytest.mark.one_in(10)
@pytest.mark.parametrize("target", [*TARGETS, "cuda.sm_90a"])
@pytest.mark.parametrize("shape", LOADED)
def test_no_name_makes_two_things_of_a_kernel_one(target: str, shape: str) -> None:
    """`rawn`, whose gradient would be `drawn`, and all others of which kernels make names of their own."""
    plain = scopes(target, shape, ["any_name"])
    words = {word.lstrip(".") for scope in plain.values() for word in scope}
    made = {tuple(word.split("any_name")) for word in words if "any_name" in word} - {("", "")}
    names = sorted(
        {
            name
            for word in words
            for before, behind in made
            if word.startswith(before) and (name := word.removeprefix(before).removesuffix(behind))
            if f"{before}{name}{behind}" == word and name.isidentifier()
        }
    )
    variant, schedule = resolved(grads="q, k, v", target=target, schedule="")
    names = [
        name
        for name in names
        if name not in {*RESERVED, *target_of(target).own_tensors, "rate", "start"}
        and "any_name" not in name
        and not cannot_be_passed(name, variant.attention, schedule)
        and not cannot_be_passed(f"d{name}", variant.attention, schedule)
    ]
    names = sorted({*names, "rawn", "o_tile", "k_map", "elta_tile"})
    ours, theirs = (scopes(target, shape, those) for those in ([f"x{i}x" for i in range(len(names))], names))
    for place, scope in ours.items():
        found: dict[str, set[str]] = {}
        for word, other in zip(scope, theirs[place], strict=True):
            found.setdefault(other, set()).add(word)
        assert {other: words for other, words in found.items() if len(words) > 1} == {}, place
