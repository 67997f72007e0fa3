"""The programs that FlexAttention is measured by, and how long one waits for its first result.

    python -m attnc.bench.flex_programs WHO NAME

This module loads nothing of attnc before the clock starts: what a first call loads is part of the wait.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Whose kernels: those that a call picks, ours for Triton where it picks others, and torch's.
OURS, TRITON, TORCH = "attnc.flex", "triton", "FlexAttention"
B, H, D = 2, 16, 128
LENGTH = 8192
#: In turn, in a process that has computed nothing before.
LENGTHS = (4096, 4160, 5000)
SMALL = 256

Mod = Callable[..., Any] | None
Make = Callable[[int, str], tuple[Mod, Mod]]


def _causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def _alibi(length: int, device: str) -> tuple[Mod, Mod]:
    slope = torch.exp2(-8.0 * torch.arange(1, H + 1, device=device) / H)
    return lambda score, b, h, q, kv: score - slope[h] * (q - kv), _causal


def _softcap(length: int, device: str) -> tuple[Mod, Mod]:
    return lambda score, b, h, q, kv: 30 * torch.tanh(score / 30), _causal


def _documents(length: int, device: str) -> tuple[Mod, Mod]:
    document = (torch.arange(length, device=device) // 1000).int()
    return None, lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)


def _make_learned(length: int, device: str) -> tuple[Mod, Mod]:
    bias = torch.zeros(H, 2 * 128 + 1, device=device, requires_grad=True)

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + bias[h, torch.clamp(q - kv + 128, 0, 256)]

    return mod, _causal


def _neighbourhood(length: int, device: str) -> tuple[Mod, Mod]:
    width, radius = 64, 6

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        rows = (q // width - kv // width).abs() <= radius
        return rows & ((q % width - kv % width).abs() <= radius)

    return None, near


def _heads(length: int, device: str) -> tuple[Mod, Mod]:
    reach = (128 * 2 ** (torch.arange(H, device=device) // 4)).int()  # 128 to 1024, as many heads of each
    return None, lambda b, h, q, kv: (q >= kv) & (q - kv <= reach[h])


def _padding(length: int, device: str) -> tuple[Mod, Mod]:
    lengths = length - torch.arange(B, device=device, dtype=torch.int32) * (length // 2)
    return None, lambda b, h, q, kv: kv < lengths[b]


#: By name, what makes the mods for a length and a device.
MODS: Mapping[str, Make] = {
    "full": lambda length, device: (None, None),
    "causal": lambda length, device: (None, _causal),
    "window": lambda length, device: (None, lambda b, h, q, kv: (q >= kv) & (q - kv <= 512)),
    "prefix": lambda length, device: (None, lambda b, h, q, kv: (q >= kv) | (kv < 1024)),
    "documents": _documents,
    "alibi": _alibi,
    "softcap": _softcap,
    "learned bias": _make_learned,
    "neighbourhood": _neighbourhood,
    "chunks": lambda length, device: (None, lambda b, h, q, kv: (q >= kv) & (q // 256 == kv // 256)),
    "heads": _heads,
    "padding": _padding,
}


def call(
    who: str, name: str, length: int, *, gradients: bool = False, small: bool = False
) -> Callable[[], object]:
    """Returns a call of the program, and of its gradients."""
    device = "cuda"
    batch, heads = (1, H) if small else (B, H)
    shape = (batch, heads, length, D)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_(gradients) for _ in range(3)
    )
    score_mod, mask_mod = MODS[name](length, device)
    own = (batch if name == "padding" else None, heads if name == "heads" else None)
    attention = _function(who, score_mod, mask_mod, length, own)
    if not gradients:

        def forward() -> object:
            with torch.no_grad():
                return attention(q, k, v)

        return forward
    do = torch.randn_like(q)
    return lambda: torch.autograd.grad(attention(q, k, v), (q, k, v), do)


def _function(
    who: str, score_mod: Mod, mask_mod: Mod, length: int, own: tuple[int | None, int | None]
) -> Callable[..., Any]:
    if who != TORCH:
        from attnc.flex import flex_attention

        target = None if who == OURS else who
        return lambda q, k, v: flex_attention(q, k, v, score_mod, mask_mod=mask_mod, target=target)
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as torch_flex

    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, *own, length, length, device="cuda")
    compiled: Any = torch.compile(torch_flex)
    return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=block_mask)


def print_first_results(who: str, name: str) -> None:
    """Prints what `first_results` reads; the context of the device exists before the clock starts."""
    torch.zeros((), device="cuda")
    seconds = []
    for length in LENGTHS:
        started = time.perf_counter()
        call(who, name, length)()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    print(json.dumps(seconds))


if __name__ == "__main__":
    print_first_results(*sys.argv[1:])
