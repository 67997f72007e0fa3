"""Machine code beside a module: a process in which nothing compiles launches it, and gets the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnc.build import digest, front, plan_program
from attnc.plan.signature import feature
from attnc.runtime.loader import load_file
from attnc.runtime.toolchains import build_cubins
from attnc.target.files import render_files
from tests.plans import SPECS

_PROGRAM = """
import sys
from pathlib import Path

import torch
from cupy.cuda import nvrtc

from attnc.runtime.loader import load_file


def refused(*arguments):
    raise AssertionError("compiled at run time")


nvrtc.createProgram = refused
module, name, inputs, results = sys.argv[1:]
found = getattr(load_file(Path(module)), name)(*torch.load(inputs))
torch.save(found if isinstance(found, tuple) else (found,), results)
"""


@pytest.mark.parametrize("target", ["cuda.sm_80", "cuda.sm_90a"])
@pytest.mark.parametrize("name", ["causal_gqa", "decode"])
def test_shipped_machine_code_needs_no_compiler(name: str, target: str, tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="CUDA kernels are launched through CuPy")
    capability = torch.cuda.get_device_capability()
    if target == "cuda.sm_90a" and capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    planned = next(m for m in plan_program(front(SPECS / f"{name}.attn")).modules if m.target == target)
    source = planned.variant.source
    for file, text in render_files(planned, path=f"{name}.attn", sha256=digest(source)).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    (module,) = tmp_path.glob("*.py")
    build_cubins(module, ["sm_{}{}".format(*capability)])

    width = feature(planned.variant.attention.q)
    rows = 300 if name == "causal_gqa" else 1
    dtype = torch.bfloat16 if planned.variant.attention.q.dtype == "bf16" else torch.float16
    q = torch.randn(2, rows, 8, width, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 2, 300, 2, width, device="cuda", dtype=dtype)
    more = (torch.tensor([300, 77], device="cuda", dtype=torch.int32),) if name == "decode" else ()
    expected = getattr(load_file(module), name)(q, k, v, *more)
    torch.save((q, k, v, *more), tmp_path / "inputs")
    (tmp_path / "program.py").write_text(_PROGRAM, encoding="utf-8")
    empty = {"ATTNC_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [tmp_path / "program.py", module, name, tmp_path / "inputs", tmp_path / "results"]
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env={**os.environ, **empty}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "cache").glob("*.cubin"))
    for x, y in zip(torch.load(tmp_path / "results"), expected, strict=True):
        assert torch.equal(x, y)
