"""The order in which targets are tried, and the names of the function that picks one."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from attnc.build import compile_program, support_outputs
from attnc.model.resolve import resolve
from attnc.output import write
from attnc.plan.targets import TARGETS
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.target.dispatch import fastest_first
from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

TEXT = """
attention {name} {{
  input q: bf16[B, M, H, 32]
  input k, v: bf16[B, N, H, 32]
  input {input}: f32[H]
  score = dot(q, k) + {input}[h]
  normalize = softmax
  output o: bf16[B, M, H, 32]
}}
schedule {name} for triton {{ loops = [q, kv], tile.q = 16, tile.kv = 16 }}
schedule {name} for cuda.sm_80 {{ loops = [q, kv], tile.q = 64, tile.kv = 64, warps = 4 }}
"""


def test_all_targets_have_a_place_in_the_order() -> None:
    assert fastest_first(TARGETS)[:2] == ["cuda.sm_90a", "triton"]
    some = ["cuda.sm_80", "cuda.sm_100", "cuda.sm_90"]
    assert fastest_first(some) == ["cuda.sm_100", "cuda.sm_90", "cuda.sm_80"]
    assert sorted(fastest_first(TARGETS)) == sorted(TARGETS)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "given"), [("CHOICE", "x"), ("picked", "CHOICE"), ("TARGETS", "function")])
def test_the_function_is_called_as_the_spec_says(
    name: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the file has names of its own for."""
    compiled = compile_program(
        resolve(parse(Source("x.attn", TEXT.format(name=name, input=given))), prelude()), "x.attn"
    )
    folder = f"named_{name}_{given}".lower()
    write((*compiled.outputs, *support_outputs()), tmp_path / folder)
    monkeypatch.syspath_prepend(tmp_path)
    function = getattr(import_module(f"{folder}.{name}"), name)
    q, k, v = (torch.randn(1, 16, 1, 32).bfloat16() for _ in range(3))
    weights = torch.softmax(q[0, :, 0].float() @ k[0, :, 0].float().T, -1)
    assert torch.allclose(
        function(q, k, v, torch.ones(1))[0, :, 0].float(), weights @ v[0, :, 0].float(), atol=0.05
    )


@pytest.mark.parametrize("name", ["paged_decode", "paged_training", "dsa_paged_training", "latent_blocks"])
def test_help_gives_the_shapes_that_a_call_takes(name: str) -> None:
    """Keys in pages are a pool; what is said of their rows names sizes of the arguments."""
    package = import_module(f"generated.{name}")
    shapes = dict(re.findall(r"^ {8}(\w+): \w+\[(.*)\]$", getattr(package, name).__doc__, re.M))
    assert shapes["k"].startswith("pages, ") == ("block_table" in shapes)
    for size in re.findall(r"rows of memory, (.*) elements", getattr(package, name).__doc__):
        assert set(re.findall("[A-Z]\\w*", size)) <= set(re.findall("[A-Z]\\w*", " ".join(shapes.values())))
