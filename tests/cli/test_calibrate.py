"""`attnc calibrate`: what it finds, what it writes, what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from attnc.calibrate import calibrate, choose
from attnc.model.dtypes import DType
from attnc.plan.softmax import safe_range
from tests.cli.conftest import Run

SPEC = """\
attention a {
  input q: bf16[B, M, Hkv * G, 16]
  input k, v: bf16[B, N, Hkv, 16]
  score = dot(q, k) / 4
  mask = causal
  normalize = softmax
  output o: bf16[B, M, Hkv * G, 16]
}
schedule a for triton {
  loops = [kv], pack = gqa, tile.q = 16, tile.kv = 16
  softmax = unified_max(phi = 0, bounds = [-4, 4], fallback = online)  # a guess
}
"""


@pytest.fixture
def spec(folder: Path) -> Path:
    path = folder / "specs" / "a.attn"
    path.write_text(SPEC)
    return path


def save(folder: Path, **samples: torch.Tensor) -> Path:
    path = folder / "samples.pt"
    torch.save(samples, path)
    return path


def test_the_bounds_hold_what_was_seen_and_are_safe(spec: Path, folder: Path) -> None:
    """Scores of 100 and less: 64 keys in runs of 16, of which the last alone has the largest."""
    q, k = torch.zeros(1, 1, 2, 16).bfloat16(), torch.zeros(1, 64, 2, 16).bfloat16()
    q[..., 0], k[..., 0], k[:, 60, :, 0] = 20.0, 18.0, 20.0
    (found,) = calibrate(spec, save(folder, q=q, k=k), 16)
    assert found.count == 8
    assert found.percentiles[0] == 90.0
    assert found.percentiles[-1] == 100.0
    low, high = safe_range(DType.BF16)
    assert low <= found.bounds[0] <= 90 - found.phi
    assert 100 - found.phi <= found.bounds[1] <= high
    assert found.outside == 0.0
    assert found.outside_before == 1.0


def test_scores_wider_than_any_safe_range_leave_some_outside() -> None:
    phi, bounds = choose(np.linspace(-300.0, 300.0, 601), (-80.0, 60.0))
    assert phi == 10.0
    assert bounds == (-80, 60)


def test_it_writes_the_spec_in_place(run: Run, spec: Path) -> None:
    shown = run("calibrate", str(spec), "--samples", "random")
    assert shown.code == 0
    assert spec.read_text() == SPEC
    done = run("calibrate", str(spec), "--write")
    assert done.out == shown.out
    line = next(line for line in shown.out.splitlines() if "unified_max" in line).strip()
    assert spec.read_text() == SPEC.replace(
        "softmax = unified_max(phi = 0, bounds = [-4, 4], fallback = online)", line
    )
    assert run("check", str(spec)).code == 0
    written = spec.read_text()
    spec.write_bytes(SPEC.replace("\n", "\r\n").encode())
    assert run("calibrate", str(spec), "--write").code == 0
    assert spec.read_bytes() == written.replace("\n", "\r\n").encode()


def test_what_cannot_be_calibrated_is_refused(run: Run, spec: Path, folder: Path) -> None:
    assert "nothing to calibrate" in run("calibrate", "specs/tiny.attn").err
    wrong = save(folder, q=torch.zeros(1, 1, 2, 8), k=torch.zeros(1, 4, 2, 16))
    done = run("calibrate", str(spec), "--samples", str(wrong))
    assert done.code == 2
    assert "do not fit" in done.err
    wrong.write_bytes(b"no tensors")
    assert run("calibrate", str(spec), "--samples", str(wrong)).code == 2
    assert run("calibrate", str(spec), "--samples", "absent.pt").code == 2


def test_each_schedule_is_told_by_its_target(run: Run, spec: Path) -> None:
    """One whose target makes no kernel yet has nothing to calibrate."""
    schedule = SPEC[SPEC.index("schedule ") :]
    more = (schedule.replace("triton", target) for target in ("cuda.sm_80", "cuda.sm_100a"))
    spec.write_text(SPEC + "".join(more).replace("tile.kv = 16", "tile.kv = 64, warp_split = kv"))
    done = run("calibrate", "specs/a.attn")
    assert done.code == 0
    told = [line.split(":")[0] for line in done.out.splitlines() if not line.startswith(" ")]
    assert told == ["a for triton", "a for cuda.sm_80"]
