"""Mods of FlexAttention on attnc's kernels: python examples/flex_mods.py

`attnc import-flex examples/flex_mods.py:alibi examples/flex_mods.py:causal` prints the spec that two of them
mean. Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnc.flex import flex_attention

HEADS, LENGTH = 4, 96
slope = torch.exp2(-8.0 * torch.arange(1, HEADS + 1) / HEADS)
document = torch.arange(LENGTH, dtype=torch.int32) // 40
bias = torch.zeros(2 * LENGTH, requires_grad=True)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)


def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - slope[h] * (q_idx - kv_idx)


def learned(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + bias[q_idx - kv_idx + LENGTH]


def main() -> None:
    """Calls each once, and one with gradients of what it has captured."""
    global slope, document, bias
    device = "cuda" if torch.cuda.is_available() else "cpu"
    slope, document = slope.to(device), document.to(device)
    bias = bias.detach().to(device).requires_grad_()
    q, k, v = (torch.randn(2, HEADS, LENGTH, 64, device=device) for _ in range(3))
    o = q
    for score_mod, mask_mod in ((alibi, causal), (None, same_document), (learned, causal)):
        o = flex_attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)
        names = [mod.__name__ for mod in (score_mod, mask_mod) if mod is not None]
        print(f"{' and '.join(names)}: {list(o.shape)}, mean square {o.square().mean().item():.3f}")
    (gradient,) = torch.autograd.grad(o.square().sum(), bias)
    print(f"gradient of the learned bias: {gradient.norm().item():.1f}")


if __name__ == "__main__":
    main()
