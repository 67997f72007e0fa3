"""A kernel that is on disk is found by another process, which does not load the compiler for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnc.flex import programs
from attnc.flex.programs import FlexKernel, kernel_of
from attnc.flex.spec import CallLayout, write_spec
from attnc.flex.trace import Trace, trace

#: The parser, the planner and what renders kernels.
COMPILER = ("lark", "jinja2", "attnc.build", "attnc.plan.targets", "attnc.target.files")


def causal(b: object, h: object, q: int, kv: int) -> bool:
    return q >= kv


LAYOUT = CallLayout(
    dtype="bf16", head_dim=16, value_dim=16, scaled=False, grouped=False, lse=False, differentiable=False
)


def traced() -> Trace:
    return trace(None, causal, sizes={"B": 1, "H": 1, "M": 16, "N": 16}, device=torch.device("cpu"))


def found() -> FlexKernel:
    return kernel_of(traced(), LAYOUT, (None, causal))


def test_a_kept_kernel_is_found_without_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    kernel = found()
    assert kernel.family.spec == write_spec(traced(), LAYOUT, mods=(None, causal)).text  # with its schedule
    command = [sys.executable, "-m", "tests.flex.test_kept_kernels"]
    folder = Path(__file__).parents[2]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    where, *modules = done.stdout.split()
    assert where == str(kernel.family.folder)
    assert not {*COMPILER} & {*modules}


if __name__ == "__main__":
    torch.cuda.is_available = lambda: True  # kernels are imported as they are, not made ready for the CPU
    print(found().family.folder, *sys.modules)
