"""`grad k, v: f32`: the same sums as without, not rounded."""

import torch

from attnc.api.compile import compile_family
from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

SPEC = """
attention small {
  input q: bf16[B, M, H, 16]
  input k, v: bf16[B, N, H, 16]
  input slope: bf16[H]
  score = dot(q, k) / sqrt(D) - slope[h] * abs(q_pos - kv_idx)
  mask = causal
  normalize = softmax
  output o: bf16[B, M, H, 16]
  output lse: f32[B, H, M]
  grad q, slope
  grad k, v
}
schedule small for triton {
  tile.q = 16, tile.kv = 16
}
"""


def test_gradients_are_the_same_sums_before_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, 2, 16, generator=generator).bfloat16() for _ in range(3))
    slope = torch.tensor([0.1, 0.2]).bfloat16()
    found = []
    for text in (
        SPEC,
        SPEC.replace("grad q, slope", "grad q, slope: f32").replace("grad k, v", "grad k, v: f32"),
    ):
        module = compile_family(text, warn=False).module.default
        o, lse = module.small(q, k, v, slope)
        found.append(module.CALL.gradients(torch.ones_like(o), None, q, k, v, slope, o, lse, None))
    for name, rounded, exact in zip(("dq", "dk", "dv", "dslope"), *found, strict=True):
        assert (rounded.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(exact.bfloat16(), rounded), name
        assert not torch.equal(exact, rounded.float()), name
