"""The sign of a zero under an order of sums: a sum may be rounded to -0, and a segment in which a row sees no
key adds 0 to it.
"""

from __future__ import annotations

import pytest
import torch

from attnc.verify.subject import subject_of
from tests.targets import needs_gxx
from tests.verify.judging import modules_of

STATEMENTS = """attention spec {
  input q: bf16[B, M, Hkv * G, 64]
  input k, v: bf16[B, N, Hkv, 64]
  score = dot(q, k) / 8
  mask = window(20, 0)
  normalize = softmax
  order = absolute(32)
  output o: bf16[B, M, Hkv * G, 64]
}
"""
SCHEDULES = {
    "triton": ("loops = [q, kv], tile.q = 64, tile.kv = 32", "tile.q = 64, tile.kv = 32"),
    "cuda.sm_90a": ("tile.kv = 32", "tile.kv = 32"),
}
KEYS = 192


@pytest.mark.one_in(2)
@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("target", SCHEDULES)
@pytest.mark.parametrize("tiny_first", [False, True])
def test_a_sum_that_is_rounded_to_zero_has_no_sign(target: str, *, tiny_first: bool) -> None:
    prompt, step = SCHEDULES[target]
    text = f"{STATEMENTS}schedule spec for {target} as prompt {{\n  {prompt}\n}}\n"
    step = f"loops = [kv], pack = gqa, split.kv = fixed(32), {step}"
    text += f"schedule spec for {target} as step {{\n  {step}\n}}\n"
    whole, one = (subject_of(module) for module in modules_of(text))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, KEYS, 1, 64, generator=generator).bfloat16() for _ in range(3))
    # Values of every other segment are tiny and negative, and outweighed by those between, which are 0.
    tiny = torch.arange(KEYS) // 32 % 2 == (0 if tiny_first else 1)
    v[..., :8] = torch.where(tiny, -1e-40, 0.0)[None, :, None, None].bfloat16()
    q[..., 0], k[0, :, 0, 0] = 30.0, torch.where(tiny, -4.0, 4.0).bfloat16()
    rows = torch.full((1, KEYS, 1, 64), float("nan")).bfloat16()
    whole.run({"q": q, "k": k, "v": v}, {"o": rows}, 0)
    for at in (68, 101, 130, 135, 165, 170):
        o = torch.full((1, 1, 1, 64), float("nan")).bfloat16()
        given = {"q": q[:, at : at + 1], "k": k[:, : at + 1], "v": v[:, : at + 1]}
        one.run({name: x.contiguous() for name, x in given.items()}, {"o": o}, 0)
        assert torch.equal(o[0, 0].view(torch.int16), rows[0, at].view(torch.int16)), at
