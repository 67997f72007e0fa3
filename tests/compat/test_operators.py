"""Families in programs that are exported: lengths stay dynamic, and another process knows the operators."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import attnc
from tests.processes import run_program

SPEC = """\
attention exported {
  input q: f16[B, M, Hkv * G, 16]
  input k, v: f16[B, N, Hkv, 16]
  input left: i32[]
  score = dot(q, k) / sqrt(D)
  mask = window(left, 0)
  normalize = softmax
  output o: f16[B, M, Hkv * G, 16]
  output lse: f32[B, Hkv * G, M]
  grad q, k, v
}
"""
LOAD = """\
import sys
from attnc.verify.interpreter import ensure_interpreter
ensure_interpreter()
import torch, attnc
attnc.compile(open(sys.argv[1]).read()).register_operators()
program = torch.export.load(sys.argv[2])
inputs, expected = torch.load(sys.argv[3])
print(torch.equal(program.module()(*inputs), expected))
"""


class Layer(torch.nn.Module):
    def __init__(self, family: Any) -> None:
        super().__init__()
        self.family = family

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o: torch.Tensor = self.family(q, k, v, 6)[0]
        return o * 2


def inputs(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, keys, 2, 16).half()
    return torch.randn(2, rows, 4, 16).half(), k, v


@pytest.mark.slow
def test_an_exported_program_runs_at_other_lengths_in_another_process(tmp_path: Path) -> None:
    layer = Layer(attnc.compile(SPEC))
    rows, keys = (torch.export.Dim(name, min=2, max=512) for name in ("rows", "keys"))
    shapes = {"q": {1: rows}, "k": {1: keys}, "v": {1: keys}}
    program: Any = torch.export.export(layer, inputs(20, 30), dynamic_shapes=shapes)
    assert torch.equal(program.module()(*inputs(7, 50)), layer(*inputs(7, 50)))
    files = [tmp_path / name for name in ("spec.attn", "program.pt2", "data.pt")]
    files[0].write_text(SPEC)
    torch.export.save(program, files[1])
    torch.save((inputs(9, 9), layer(*inputs(9, 9))), files[2])
    done = run_program(LOAD, *files, has_attnc=True)
    assert done.stdout == "True\n", done.stderr


# Inductor copies torch's own LeafSpec.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.nightly
def test_a_package_of_aotinductor_runs_at_other_lengths(tmp_path: Path) -> None:
    package(attnc.compile(SPEC), tmp_path, torch.device("cpu"), ((20, 30), (7, 50), (100, 100)))


def package(family: Any, folder: Path, device: torch.device, lengths: Sequence[tuple[int, int]]) -> None:
    """A library of AOTInductor, made at the first lengths, computes what the family does at all of them."""
    layer = Layer(family).to(device)
    rows, keys = (torch.export.Dim(name, min=2, max=4096) for name in ("rows", "keys"))
    shapes = {"q": {1: rows}, "k": {1: keys}, "v": {1: keys}}
    made = [tuple(x.to(device) for x in inputs(*pair)) for pair in lengths]
    program = torch.export.export(layer, made[0], dynamic_shapes=shapes)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "layer.pt2"))
    loaded: Any = torch._inductor.aoti_load_package(path)
    for tensors in made:
        assert torch.equal(loaded(*tensors), layer(*tensors))


def test_a_call_beside_another_thread_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """That torch compiles something is a fact of the process: operators run all the same."""
    family = attnc.compile(SPEC)
    q, k, v = (x.requires_grad_() for x in inputs(5, 9))
    expected, _ = family(q, k, v, 6)
    right = torch.autograd.grad(expected.sum(), (q, k, v))
    for each in type(family.module.default.CALL).__mro__[:-2]:
        monkeypatch.setattr(sys.modules[each.__module__], "is_compiling", lambda: True, raising=False)
    found, _ = family(q, k, v, 6)
    assert torch.equal(found, expected)
    for ours, exact in zip(torch.autograd.grad(found.sum(), (q, k, v)), right, strict=True):
        assert torch.equal(ours, exact)


def test_operators_are_registered_once() -> None:
    family = attnc.compile(SPEC)
    family.register_operators()
    family.register_operators()
    (name,) = (name for name in dir(torch.ops.attnc) if name.startswith("exported_") and name.count("_") == 2)
    left = torch.tensor(6, dtype=torch.int32)
    o, _ = getattr(torch.ops.attnc, name)(*inputs(5, 9), left, "")
    assert torch.equal(o, family(*inputs(5, 9), 6)[0])


def test_projections_have_no_operators() -> None:
    spec = """\
projection exported_linear {
  input x: f16[M, K]
  input w: f16[N, K]
  output y: f16[M, N]
  y = dot(x, w)
}
schedule exported_linear for triton {
  impl = flat
}
"""
    with pytest.raises(ValueError, match="only attentions have operators"):
        attnc.compile(spec).register_operators()
