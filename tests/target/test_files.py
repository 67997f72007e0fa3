"""Files of kernels are where the support package looks for them: it knows their names by those of kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnc.build import compile_program
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.target.files import render_files
from attnc.target.support import kernel_files
from attnc.verify.case import Case
from attnc.verify.subject import subject_of
from tests.targets import skip_without_compiler
from tests.verify.judging import assert_within_bound, modules_of, spec

SCHEDULES = {
    "cuda.sm_80": "tile.q = 32, tile.kv = 32, warps = 2",
    "cuda.sm_90a": "consumers = 2, tile.kv = 64",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("target", SCHEDULES)
@pytest.mark.parametrize("grads", ["x", "q, x", "k, x", "k", "v", "q, k, v"])
def test_every_kernel_of_a_backward_has_its_file(target: str, grads: str) -> None:
    """With gradients of q, of its keys, and of rows alone, which a kernel of no other name makes."""
    skip_without_compiler(target)
    lines = (
        "input q: f16[B, M, H, 16]",
        "input k, v: f16[B, N, H, 16]",
        "input x: f32[M]",
        *("score = dot(q, k) + x[q_idx]", "normalize = softmax", "output o: f16[B, M, H, 16]"),
        f"grad {grads}",
    )
    (module,) = modules_of(spec(lines, SCHEDULES[target], target=target))
    kernels = subject_of(module).module.CALL.program.kernels.values()
    files = render_files(module, path="a.attn", sha256="")
    assert {kernel.file for kernel in kernels} == {name for name in files if name.endswith(".cu")}


TYPED = (
    "param T in {bf16, f16, f32}, D in {16, 32}",
    "input q: T[B, M, H, D]",
    "input k, v: T[B, N, H, D]",
    *("score = dot(q, k)", "mask = causal", "normalize = softmax", "output o: T[B, M, H, D]"),
    "grad q, k, v",
)


def compiled(lines: tuple[str, ...], schedule: str, target: str) -> dict[str, str]:
    """The text of each file of a spec by its name."""
    program = resolve(parse(Source("a.attn", spec(lines, schedule, target=target))), prelude())
    return {Path(output.path).name: output.text for output in compile_program(program, "a.attn").outputs}


def test_variants_that_differ_in_a_type_of_16_bits_share_their_kernels() -> None:
    files = compiled(TYPED, SCHEDULES["cuda.sm_80"], "cuda.sm_80")
    assert {name for name in files if re.fullmatch(r"\w+\d\.cu", name)} == {
        *("d16.cu", "d32.cu"),  # of bf16 and of f16
        *("f32_d16.cu", "f32_d32.cu"),  # f32 has products of its own
    }
    for name, element in (("bf16_d16.py", "bf16"), ("f16_d16.py", "f16")):
        assert kernel_files(files[name], files) == [
            *("d16.cu", "d16_backward_dkdv.cu", "d16_backward_dq.cu", "d16_backward_preprocess.cu")
        ]
        assert f'    element="{element}",\n' in files[name]
    assert "element=" not in files["f32_d16.py"]
    assert "#ifndef BLOCK_M\n#define ELEMENT bf16 " in files["d16.cu"]
    assert "\n#define ELEMENT float\n" in files["f32_d16.cu"]
    for kernel in kernel_files(files["bf16_d16.py"], files):
        code = re.sub(r"//.*|#define ELEMENT bf16", "", files[kernel])
        assert not re.search(r"\bb?f16\b", code), kernel


@pytest.mark.parametrize(
    ("schedule", "shared"),
    [
        ("when T == f16 { tile.q = 64 }", []),
        ("when T == f16 and D == 32 { warps = 4, tile.q = 64 }", ["d16.cu"]),
    ],
)
def test_types_with_other_schedules_have_kernels_of_their_own(schedule: str, shared: list[str]) -> None:
    lines = (TYPED[0].replace(", f32", ""), *TYPED[1:-1])
    files = compiled(lines, f"{SCHEDULES['cuda.sm_80']}\n  {schedule}", "cuda.sm_80")
    own = [
        f"{name}.cu" for d in ("d16", "d32") for name in (f"bf16_{d}", f"f16_{d}") if f"{d}.cu" not in shared
    ]
    assert sorted(name for name in files if name.endswith(".cu")) == sorted([*shared, *own])
    for name in own:
        assert f"\n#define ELEMENT {name.partition('_')[0]}\n" in files[name]


def test_a_type_of_another_tensor_is_no_element() -> None:
    """Where it is the same as that of q, it reads as such; where it is another, not."""
    lines = (
        "param T in {bf16, f16}, S in {bf16, f16}",
        *("input q: T[B, M, H, 16]", "input k, v: T[B, N, H, 16]", "input x: S[M]"),
        *("score = dot(q, k) + x[q_idx]", "normalize = softmax", "output o: T[B, M, H, 16]"),
    )
    files = compiled(lines, SCHEDULES["cuda.sm_80"], "cuda.sm_80")
    names = {name.removesuffix(".cu") for name in files if name.endswith(".cu")}
    assert names == {f"{t}_{s}" for t in ("bf16", "f16") for s in ("bf16", "f16")}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", SCHEDULES)
@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_shared_kernels_compute_in_the_type_of_each_variant(element: str, target: str) -> None:
    skip_without_compiler(target)
    lines = (TYPED[0].replace(", f32", "").replace(", 32", ""), *TYPED[1:])
    softmax = "softmax = online(maximum = lazy(20)), " if target == "cuda.sm_90a" else ""
    modules = modules_of(spec(lines, softmax + SCHEDULES[target], target=target))
    (module,) = (module for module in modules if module.variant.params["T"] == element)
    assert module.variant.kernels == "d16"
    assert_within_bound(subject_of(module), Case(dims={"B": 1, "H": 1, "M": 40, "N": 70}, seed=3))
