"""dq of ds that the kernel for dk and dv has kept, in rounds of some heads: the bits of two passes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from attnc.verify.subject import Subject
from tests.verify.judging import subject_of_text

TEXT = """attention a {
  input q: f16[B, M, Hkv * G, 64]
  input k, v: f16[B, N, Hkv, 64]
  input idx: i32[B, Hkv, R, S]
  score = dot(q, k) / 8
  mask = MASK
  normalize = softmax
  output o: f16[B, M, Hkv * G, 64]
  grad q, k, v
}

schedule a for cuda.sm_90a {
  loops = [q, kv]
}
"""


@cache
def subject(mask: str) -> Subject:
    return subject_of_text(TEXT.replace("MASK", mask))


def gradients(made: Subject, kept: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """kept: K/V heads whose ds is kept at once; below 0: none is."""
    *tensors, idx, do = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    config = made.module.BACKWARD_CONFIGS["dkdv"][0]._replace(kept=kept)
    return torch.autograd.grad(made.module.a(*leaves, idx, backward_config={"dkdv": config}), leaves, do)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mask", "block"),
    [
        ("listed(idx, rows = 128, keys = 128)", 128),
        ("listed(idx, rows = 128, keys = 128) and causal", 128),
        ("window(70, 9) and listed(idx, rows = 256, keys = 256)", 256),
    ],
)
@pytest.mark.parametrize("sizes", [(1, 150, 333, 3, 1), (2, 300, 150, 2, 2)])
def test_rounds_and_two_passes_give_the_same_bits(mask: str, block: int, sizes: tuple[int, ...]) -> None:
    """Whatever the memory of a device holds, and with keys that no list names."""
    B, M, N, heads, group = sizes
    made = subject(mask)
    q, do = torch.randn(2, B, M, heads * group, 64, device=made.device).half()
    k, v = torch.randn(2, B, N, heads, 64, device=made.device).half()
    idx = torch.randint(-1, -(-N // block) + 1, (B, heads, -(-M // block), 3), dtype=torch.int32)
    idx[0, 0, 0] = -1
    unnamed = ~(idx.unsqueeze(-1) == torch.arange(-(-N // block))).any((2, 3))  # [B, heads, blocks]
    rows = unnamed.repeat_interleave(block, -1)[..., :N].transpose(1, 2)
    k[rows.to(made.device)], v[rows.to(made.device)] = torch.nan, torch.nan
    idx = idx.to(made.device)
    expected = gradients(made, -1, q, k, v, idx, do)
    assert all(torch.isfinite(x).all() for x in expected)
    for kept in (0, 1, 2):
        assert all(map(torch.equal, gradients(made, kept, q, k, v, idx, do), expected)), kept
