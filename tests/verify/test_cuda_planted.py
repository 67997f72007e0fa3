"""Every bug planted in a CUDA kernel is caught on the CPU; `pytest -s` shows how soon."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from attnc.build import front, plan_program
from attnc.plan import ir
from attnc.verify.cuda_backward_bugs import CUDA_BACKWARD_BUGS
from attnc.verify.cuda_bugs import CUDA_BUGS
from attnc.verify.cuda_f32_bugs import CUDA_F32_BUGS
from attnc.verify.cuda_gradient_bugs import CUDA_GRADIENT_BUGS
from attnc.verify.cuda_serving_bugs import CUDA_SERVING_BUGS
from attnc.verify.planted import Bug, Catch, files_with, hunt, table
from attnc.verify.simt import available

PARTS = {
    "forward": CUDA_BUGS,
    "serving": CUDA_SERVING_BUGS,
    "backward": CUDA_BACKWARD_BUGS,
    "gradients": CUDA_GRADIENT_BUGS,
    "f32": CUDA_F32_BUGS,
}
SPECS = Path(__file__).parents[2] / "specs"
#: Attentions that are not in a file of their name.
FILES = dict.fromkeys(("fa1_split_k", "fa1_split_q", "fa2_split_k"), "warp_split") | {
    "decode_sink": "decode",
    "single": "f32",
}

pytestmark = pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")


@cache
def module(name: str) -> ir.Module:
    modules = plan_program(front(SPECS / f"{FILES.get(name, name)}.attn")).modules
    return next(m for m in modules if m.target == "cuda.sm_80" and m.variant.attention.name == name)


@pytest.mark.parametrize("bugs", PARTS.values(), ids=PARTS)
def test_every_bug_has_its_place(bugs: tuple[Bug, ...]) -> None:
    """Says in seconds what the searches would in minutes."""
    assert all(files_with(module(bug.spec), bug) for bug in bugs)


@pytest.mark.slow
@pytest.mark.parametrize("bugs", PARTS.values(), ids=PARTS)
def test_every_bug_is_caught(bugs: tuple[Bug, ...]) -> None:
    catches: list[Catch] = [hunt(module(bug.spec), bug, examples=60, seconds=240) for bug in bugs]
    print(f"\n{table(catches)}")
    missed = [catch.bug.name for catch in catches if not catch.caught]
    assert not missed


def test_names_are_unique() -> None:
    forward, gradients = (*CUDA_BUGS, *CUDA_SERVING_BUGS), (*CUDA_BACKWARD_BUGS, *CUDA_GRADIENT_BUGS)
    assert len({bug.name for bug in forward}) == len(forward) >= 25
    assert len({bug.name for bug in gradients}) == len(gradients) >= 45
    assert len({bug.name for bug in CUDA_F32_BUGS}) == len(CUDA_F32_BUGS) >= 12
