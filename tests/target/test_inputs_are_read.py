"""Whatever lies about a plan's tiles, a kernel's text reads all that its attention reads."""

from __future__ import annotations

import re

import pytest

from attnc.target.files import render_files
from tests.plan.planning import planned

FORMS = {
    "softmax": "softmax(sink = sink[h])",
    "dropout": "softmax(dropout = 0.1, seed = seed)",
    "softpick": "softpick",
}
INPUTS = ("gate: f32[H]", "t: f32[H]", "sink: f32[H]", "seed: i64[]", "last: i32[B]")


#: Target, columns, schedule.
KERNELS = [
    ("triton", 64, ""),
    ("triton", 512, ""),
    ("cuda.sm_80", 64, ""),
    ("cuda.sm_80", 64, "  warp_split = kv"),
    ("cuda.sm_80", 512, ""),
    ("cuda.sm_90a", 64, ""),
]
DECODES = [("cuda.sm_90a", d, "  loops = [kv], pack = gqa") for d in (64, 512)]
CASES = [
    *((form, *kernel) for form in FORMS for kernel in KERNELS),
    *((form, *kernel) for form in FORMS if form != "dropout" for kernel in DECODES),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("form", "target", "d", "schedule"), CASES)
def test_a_forward_reads_every_input(form: str, target: str, d: int, schedule: str) -> None:
    """Heads of 512 columns take kernels of their own, one of which had left an epilogue out."""
    softmax = FORMS[form]
    used = ["gate", "t", "last", *(x for x in ("sink", "seed") if x in softmax)]
    module = planned(
        "kv_idx < last[b]",
        softmax=softmax,
        score="dot(q, k) * t[h]",
        inputs=tuple(x for x in INPUTS if x.split(":")[0] in used),
        epilogue="attention * gate[h]",
        schedule=schedule,
        target=target,
        d=d,
    )
    text = "".join(render_files(module, path="a.attn", sha256="").values())
    reads = r"args\.{0}_ptr" if target != "triton" else r"tl\.load\(\s*{0}_ptr|= {0}_ptr \+"
    assert [name for name in used if not re.search(reads.format(name), text)] == []
