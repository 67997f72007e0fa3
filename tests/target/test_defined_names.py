"""Kernels read no name before the line that makes it, and compile: the interpreter forgives what it does not
run, and Python's numbers where Triton wants tensors; compilers do not.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from attnc.plan.device import DEVICES
from attnc.runtime.toolchains import usage_of
from attnc.target.files import render_files
from tests.compiled import refusals
from tests.processes import compiling
from tests.profiles import is_night
from tests.targets import TARGETS, small_tiles
from tests.verify.judging import examples, modules_of, spec
from tests.verify.random_specs import EVERY_TARGET, HOPPER, specs

#: What once used a name outside its scope, by what it was; statements of a spec and its schedule.
FOUND = Path(__file__).parent.parent / "gpu/found_specs"
TRITON = {
    "a load of one head, before the head": (
        [
            "input q: bf16[B, 2 * Hkv, M, 32]",
            "input k: bf16[Hkv, S, 32] via ragged(k_ends)",
            "input v: bf16[Hkv, S, 8] via ragged(k_ends)",
            "input k_ends: i32[B + 1]",
            "input end: i64[]",
            "input bias: f32[2 * Hkv, X]",
            "score = dot(q, k) + bias[h, kv_idx]",
            "mask = kv_idx < end",
            "normalize = softmax",
            "output o: bf16[B, 2 * Hkv, M, 8]",
            "grad bias, q, k, v",
        ],
        "tile.q = 32, tile.kv = 16",
    ),
    "a mask that keeps everything": (
        [
            "input q: bf16[B, 4, M, 16]",
            "input k, v: bf16[B, 2, N, 16]",
            "score = dot(q, k)",
            "mask = kv_idx + 17 != -5",
            "normalize = softmax",
            "output o: bf16[B, 4, M, 16]",
            "grad q, k, v",
        ],
        "tile.q = 16, tile.kv = 16",
    ),
    "a gradient of an input that is called like a pointer": (
        [
            "input q: bf16[B, M, 2 * Hkv, 16]",
            "input k, v: bf16[B, N, Hkv, 16]",
            "input q_ptr: f32[B, 2 * Hkv]",
            "score = dot(q, k) + q_ptr[b, h]",
            "normalize = softmax",
            "output o: bf16[B, M, 2 * Hkv, 16]",
            "grad q, q_ptr",
        ],
        "tile.q = 16, tile.kv = 16\n  backward { accumulate.dq = sequential }",
    ),
    "a gradient of pairs that the kernel for keys adds, of positions that need no length": (
        [
            "input q: bf16[B, M, 4, 16]",
            "input k, v: bf16[B, N, 4, 16]",
            "input table: f32[4, W]",
            "score = dot(q, k) + table[h, q_idx - kv_idx + 20]",
            "normalize = softmax",
            "output o: bf16[B, M, 4, 16]",
            "grad k, v, table",
        ],
        "tile.q = 16, tile.kv = 16",
    ),
    "a gradient of what is never inside its tensor": (
        [
            "input q: bf16[B, M, 4, 16]",
            "input k, v: bf16[B, N, 4, 16]",
            "input x: f32[4, N]",
            "score = dot(q, k) + x[h, N]",
            "normalize = softmax",
            "output o: bf16[B, M, 4, 16]",
            "grad x",
        ],
        "tile.q = 16, tile.kv = 16",
    ),
}
#: The same for Hopper: inputs, mask and more.
HOPPERS = {
    "a length that is read through 64 bits": (
        "input count: i64[B, N]",
        "input at: i32[N]",
        "length N = count[b, at[M]]",
    ),
    "a bound of a float": ("input last: f32[H]", "mask = kv_idx < 5 or last[h] < 2"),
    "a bound behind 64 bits": ("input at: i64[B]", "input last: i32[N]", "mask = kv_idx < last[at[b]]"),
    "a column that says where another is": (
        "input at: i64[N]",
        "input kind: i32[N]",
        "mask = causal or kind[at[kv_idx]] == 16",
        "grad q, k, v",
    ),
    "tiles to skip by rows of 64 bits": (
        "input last: i64[B, M] is sorted",
        "mask = kv_idx == 5 or last[b, q_idx] > h",
        "grad q, k, v",
    ),
    "no keys": ("mask = kv_idx > 60 and kv_idx < 4", "grad q, k, v"),
    "tiles to skip by a float": ("input last: f32[H]", "mask = kv_idx == 5 or last[h] < 2"),
}
#: Scores with constants, their own or of a derivative, that are none of the normal numbers of float32.
SMALL_AND_LARGE = (
    "max(dot(q, k) * 1e-38, 1e-60) + 1e-40 * kv_idx",
    "min(dot(q, k), 3e38) + 3e38",
    "1e-38 * tanh(dot(q, k) * 1e-20)",
    "where(kv_idx < 3, -3.4028234663852886e+38, exp(1e-40 * q_idx) * 1e-60)",
)
#: Gives the kernels of the specs that it reads to the front ends of their compilers, for these architectures;
#: prints how many modules that were, and what is refused.
PROGRAM = """
import json, sys
from tests.compiled import refusals
from tests.verify.judging import modules_of
modules = [module for text in json.load(sys.stdin) for module in modules_of(text)]
refused = [refusals(module, archs=sys.argv[1:]) for module in modules]
print(json.dumps([len(modules), [one for one in refused if one]]))
"""


def compiled(texts: list[str], *archs: str) -> tuple[int, list[dict[str, str]]]:
    """How many modules the specs have, and what compilers refuse of them."""
    count, refused = json.loads(compiling(PROGRAM, *archs, stdin=json.dumps(texts)).stdout)
    return count, refused


def undefined(text: str) -> Iterator[str]:
    """`line 7: name` of each name in a kernel that no line up to it gives a value."""
    tree = ast.parse(text)
    everywhere = {name for node in tree.body for name in _made(node)} | set(dir(builtins))
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or not any(map(_compiles, function.decorator_list)):
            continue
        first: dict[str, int] = {}
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
            first[argument.arg] = 0
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        for node in names:
            if isinstance(node.ctx, ast.Store):
                first[node.id] = min(node.lineno, first.get(node.id, node.lineno))
        for node in names:
            known = node.id in everywhere and node.id not in first
            if isinstance(node.ctx, ast.Load) and not known and first.get(node.id, 10**9) > node.lineno:
                yield f"line {node.lineno}: {node.id}"


def _compiles(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith("triton.jit")


def _made(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in names)
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case _:
            yield from (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))


def findings(text: str) -> list[str]:
    """In the specs of a file."""
    modules = (module for module in modules_of(text) if module.target == "triton")
    texts = (render_files(module, path="a.attn", sha256="0" * 64) for module in modules)
    return [one for files in texts for text in files.values() for one in undefined(text)]


@pytest.mark.parametrize("name", TRITON)
def test_every_name_is_made_before_it_is_read(name: str) -> None:
    assert not findings(spec(*TRITON[name]))


@pytest.mark.parametrize("grads", ["k", "k, v"])
def test_gradients_of_selected_keys_without_those_of_queries_read_no_length(grads: str) -> None:
    """A kernel for the rows alone takes none."""
    text = (FOUND.parents[1] / "telling_specs" / "selected_holes.attn").read_text(encoding="utf-8")
    assert "grad q, k, v" in text
    assert not findings(text.replace("grad q, k, v", f"grad {grads}"))


@settings(max_examples=20)
@given(specs())
def test_every_name_of_random_specs_is(text: str) -> None:
    assert not findings(text)


def test_one_that_is_not_is_found() -> None:
    text = "import triton\nX = 1\n@triton.jit\ndef f(a):\n    b = a + X + c\n    c = d\n    return c\n"
    assert sorted(undefined(text)) == ["line 5: c", "line 6: d"]


@pytest.mark.slow
def test_what_did_not_compile_and_random_specs_compile_without_a_gpu() -> None:
    drawn: list[str] = []
    nightly = is_night()

    @settings(max_examples=examples(1))
    @given(specs(targets=EVERY_TARGET))
    def draw(text: str) -> None:
        drawn.append(text)

    draw()
    pattern = "*.attn" if nightly else "dropout_without_*.attn"
    found = [path.read_text(encoding="utf-8") for path in sorted(FOUND.glob(pattern))]
    kinds = [*TRITON.values()] if nightly else [*TRITON.values()][::16]
    texts = [*(spec(*parts) for parts in kinds), *drawn, *found]
    count, refused = compiled(texts, "sm_90", "sm_80")
    assert refused == []
    assert count >= len(kinds) + 2 * len(drawn) + len(found)
    assert found


@pytest.mark.slow
def test_constants_that_float32_does_not_hold_compile() -> None:
    """By day a sixteenth of them: scores for one target, not for all."""
    nightly, texts = is_night(), []
    for number, target in enumerate(EVERY_TARGET):
        tiles = "consumers = 2, tile.kv = 32" if target == HOPPER else small_tiles(target)
        scores = SMALL_AND_LARGE if nightly else SMALL_AND_LARGE[number :: len(EVERY_TARGET)]
        texts += [spec(_lines(score, "grad q, k, v"), tiles, target=target) for score in scores]
        for key in ("rescale", "maximum") if target == HOPPER else ("rescale",):
            lazy = f"{tiles}, softmax = online({key} = lazy({{}}))"
            texts += [
                spec(_lines("dot(q, k)"), lazy.format(most), target=target) for most in ("1e-60", "1e60")
            ]
    for target in TARGETS:
        unified = "loops = [kv], softmax = unified_max(phi = {}, bounds = [-4, 1e-60], fallback = online)"
        texts += [spec(_lines("dot(q, k)"), unified.format(phi), target=target) for phi in ("1e-60", "-1e60")]
    texts = texts if nightly else texts[::16]
    count, refused = compiled(texts, "sm_90")
    assert refused == []
    assert count == len(texts)


@pytest.mark.slow
def test_masks_of_one_axis_beside_weights_compile() -> None:
    """Where a tile may be whole, its mask has the shape that a partial tile's has."""
    masks = ("h <= kv_idx - B or N >= 7", "q_idx <= N and bit(3, H % 64)")
    texts = [
        spec(
            [*_lines("dot(q, k)", f"mask = {mask}", "weight = sigmoid(score)", "grad q, k, v")],
            target="triton",
        )
        for mask in masks
    ]
    texts = [text.replace("normalize = softmax", "normalize = none") for text in texts]
    assert compiled(texts, "sm_90") == (len(texts), [])


def _lines(score: str, *more: str) -> list[str]:
    return [
        "input q: bf16[B, M, H, 16]",
        "input k, v: bf16[B, N, H, 16]",
        f"score = {score}",
        "normalize = softmax",
        "output o: bf16[B, M, H, 16]",
        *more,
    ]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", HOPPERS)
def test_what_did_not_compile_for_hopper_does(name: str) -> None:
    lines = _lines("dot(q, k)", *HOPPERS[name])
    (module,) = modules_of(spec(lines, "consumers = 2, tile.kv = 32", target=HOPPER))
    assert refusals(module) == {}


@pytest.mark.slow
def test_where_a_gradient_along_keys_goes_can_be_loaded_on_cuda() -> None:
    lines = [
        "input q: f16[B, H, M, 16]",
        "input k, v: f16[B, H, N, 16]",
        "input at: i64[N]",
        "input bias: f32[X, N]",
        "score = dot(q, k) + bias[at[kv_idx], kv_idx]",
        "normalize = softmax",
        "output o: f16[B, H, M, 16]",
        "grad bias, k, v",
    ]
    schedule = "tile.q = 32, tile.kv = 32, warps = 2"
    (module,) = modules_of(spec(lines, schedule, target="cuda.sm_80"))
    usage_of(module, 0, DEVICES["sm_90"], "dkdv")
