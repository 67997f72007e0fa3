"""Machine code beside a module: a process in which nothing compiles launches it, and gets the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnc.build import digest, front, plan_program
from attnc.output import write_folder
from attnc.runtime.loader import load_file
from attnc.runtime.toolchains import build_cubins
from attnc.target.files import render_files

#: One config each, since all are compiled, each for aligned rows and for any.
_SPEC = """
attention rows {
  input q: bf16[B, M, Hkv * G, 64]
  input k, v: bf16[B, N, Hkv, 64]
  score = dot(q, k) / 8
  mask = causal
  normalize = softmax
  output o: bf16[B, M, Hkv * G, 64]
}

schedule rows for cuda.sm_80 { tile.q = 64, tile.kv = 64, warps = 4, stages = 2 }
schedule rows for cuda.sm_90a { consumers = 2, tile.kv = 128, stages = 2 }

attention token {
  input q: bf16[B, M, Hkv * G, 64]
  input k, v: bf16[B, N, Hkv, 64]
  input kv_len: i32[B]
  length N = kv_len[b]
  score = dot(q, k) / 8
  mask = causal
  normalize = softmax
  output o: bf16[B, M, Hkv * G, 64]
}

schedule token for cuda.sm_80 {
  loops = [kv], pack = gqa, split.kv = auto
  tile.q = 16, tile.kv = 64, warps = 4, stages = 2, warp_split = kv
}
schedule token for cuda.sm_90a {
  loops = [kv], pack = gqa, split.kv = auto
  tile.kv = 64, stages = 2
}
"""
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
@pytest.mark.parametrize("name", ["rows", "token"])
def test_shipped_machine_code_needs_no_compiler(name: str, target: str, tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="CUDA kernels are launched through CuPy")
    capability = torch.cuda.get_device_capability()
    if target == "cuda.sm_90a" and capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    spec = tmp_path / "spec.attn"
    spec.write_text(_SPEC, encoding="utf-8")
    (planned,) = (
        module
        for module in plan_program(front(spec)).modules
        if module.target == target and module.variant.attention.name == name
    )
    for file, text in render_files(planned, path=spec.name, sha256=digest(planned.variant.source)).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    (module,) = tmp_path.glob("*.py")
    write_folder(build_cubins(module, ["sm_{}{}".format(*capability)]), "cubin", tmp_path, beside=True)

    q = torch.randn(2, 300 if name == "rows" else 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 300, 2, 64, device="cuda", dtype=torch.bfloat16)
    more = (torch.tensor([300, 77], device="cuda", dtype=torch.int32),) if name == "token" else ()
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
    (found,) = torch.load(tmp_path / "results")
    assert torch.equal(found, expected)
