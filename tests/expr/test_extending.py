"""The instructions of `docs/architecture.md` for a new function, followed in a copy of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import triton.language as tl

from attnc.expr.functions import REAL
from attnc.target.triton.printer import SYNTAX

ROOT = Path(__file__).parents[2]
#: What files are given, behind a line of them.
EDITS = {
    "attnc/expr/functions.py": (
        "_ROWS = (",
        """\
    RealFunction(
        name="atan",
        value=math.atan,
        slope=lambda f, x: div(_ONE, sub(_ONE, neg(mul(x, x)))),
        low=-math.pi / 2,
        high=math.pi / 2,
        absolute=2.0**-15,
        short="angle",
    ),
""",
    ),
    "attnc/target/triton/printer.py": ("    functions={", '        "atan": "_atan",\n'),
}
#: Files that are new, and what they have.
NEW = {
    "templates/triton/device/_atan.py.jinja": """\
@triton.jit
def _atan(x):
    \"\"\"Abramowitz and Stegun, 4.4.47: absolute error below 2**-16.\"\"\"
    small = tl.abs(x) <= 1.0
    t = tl.where(small, x, 1.0 / tl.where(small, 1.0, x))
    s = t * t
    p = t * (0.9998660 + s * (-0.3302995 + s * (0.1801410 + s * (-0.0851330 + s * 0.0208351))))
    return tl.where(small, p, tl.where(x > 0, 1.5707963267948966, -1.5707963267948966) - p)
"""
}
SPEC = """\
attention angles {
  input q: f32[B, M, H, 16]
  input k, v: f32[B, N, H, 16]
  input u: f32[N]
  score = dot(q, k) / sqrt(D) + atan(u[kv_idx]) * atan(dot(q, k))
  mask = causal
  normalize = softmax
  output o: f32[B, M, H, 16]
  grad q, k, v, u
}
schedule angles for triton { tile.q = 16, tile.kv = 16 }
schedule angles for cuda.sm_80 { tile.q = 64, tile.kv = 16 }
"""


@pytest.mark.parametrize("name", REAL)
def test_triton_has_every_function_that_the_target_calls_by_its_name(name: str) -> None:
    """One that it lacks, as it lacks atan, needs device code and a name in the printer."""
    spelled = SYNTAX.named(name)
    assert spelled.startswith("_") or hasattr(tl, spelled.removeprefix("tl."))


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["triton", pytest.param("cuda.sm_80", marks=pytest.mark.nightly)])
def test_a_function_that_triton_lacks_takes_the_files_that_are_named(target: str, tmp_path: Path) -> None:
    for folder in ("attnc", "templates", "grammar"):
        shutil.copytree(ROOT / folder, tmp_path / folder)  # with what is compiled of the files that stay
    for file, (line, added) in EDITS.items():
        path = tmp_path / file
        text = path.read_text()
        assert text.count(f"{line}\n") == 1
        path.write_text(text.replace(f"{line}\n", f"{line}\n{added}"))
    for file, text in NEW.items():
        (tmp_path / file).write_text(text)
    (tmp_path / "angles.attn").write_text(SPEC)
    done = subprocess.run(
        [sys.executable, "-m", "attnc", "verify", "angles.attn", "--target", target, "--count", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok    angles")
