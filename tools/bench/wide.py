"""Heads of 512 columns: TFLOP/s of forward and gradients beside Triton and PyTorch, as a table.

    python -m tools.bench.wide [--rounds 5] [--alone]

The kernels are those of `wide` in specs/wide.attn. No fused kernel of cuDNN or FlashAttention takes 512
columns; the peer is the memory-efficient kernel of PyTorch's `scaled_dot_product_attention`. With `--alone`
Hopper's kernels are timed without peers, which take several times as long.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnc
from attnc.runtime.timing import Launch, interleave

SPEC = Path(__file__).parents[2] / "specs" / "wide.attn"
TARGETS = ("cuda.sm_90a", "triton")
WIDTH = 512
#: Above this length Triton and PyTorch take seconds.
_LONGEST_OF_PEERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A self-attention: sequences, query heads, KV heads, length."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    causal: bool

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"b{self.batch} h{self.heads}/{self.kv_heads} n{self.length} {mask}"

    def flops(self, products: int) -> float:
        """FLOPs of so many products, of the elements that the mask keeps: 2 forward, 5 backward."""
        elements = self.batch * self.heads * self.length**2 / (2 if self.causal else 1)
        return products * 2 * elements * WIDTH


CELLS = tuple(
    Cell(batch=batch, heads=16, kv_heads=kv_heads, length=length, causal=causal)
    for causal in (False, True)
    for batch, kv_heads, length in ((1, 16, 4096), (4, 16, 4096), (1, 2, 4096), (1, 16, 16384), (1, 2, 16384))
)


def kernel_text(causal: bool) -> str:
    """Returns specs/wide.attn, with every key kept unless causal."""
    text = SPEC.read_text(encoding="utf-8")
    return text if causal else text.replace("mask = causal", "mask = true")


def compile_kernels(causal: bool, targets: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Returns attention `wide` for each target."""
    text = kernel_text(causal)
    return {target: attnc.compile(text, attention="wide", target=target) for target in targets}


def efficient(causal: bool) -> Callable[..., torch.Tensor]:
    """Returns the memory-efficient kernel of `scaled_dot_product_attention`, for q, k and v [B, N, H, D]."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
            ).transpose(1, 2)

    return call


def candidates(cell: Cell, kernels: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Returns whose forward is timed in a cell: with one kernel, that one alone."""
    if cell.length > _LONGEST_OF_PEERS or len(kernels) == 1:
        return {"cuda.sm_90a": kernels["cuda.sm_90a"]}
    shared = {"PyTorch": efficient(cell.causal)} if cell.heads == cell.kv_heads else {}
    return {**kernels, **shared}


def launches(cell: Cell, functions: dict[str, Callable[..., Any]]) -> dict[int, dict[str, Launch]]:
    """Returns launches of each function by the number of products: the forward, and the backward of one
    forward that is kept.
    """
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, do = (torch.randn(cell.batch, cell.length, cell.heads, WIDTH, **made) for _ in range(2))
    k, v = (torch.randn(cell.batch, cell.length, cell.kv_heads, WIDTH, **made) for _ in range(2))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    forward: dict[str, Launch] = {}
    backward: dict[str, Launch] = {}
    for name, function in functions.items():
        found = function(*leaves)
        o = found if isinstance(found, torch.Tensor) else found[0]
        forward[name] = partial(function, q.detach(), k.detach(), v.detach())
        backward[name] = partial(torch.autograd.grad, o, leaves, do, retain_graph=True)
    return {2: forward, 5: backward}


def matmul_speed(rounds: int) -> float:
    """Returns TFLOP/s of an 8192 x 8192 x 8192 product in bf16: what the chip, and others on it, leave."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / interleave({"matmul": lambda: a @ b}, rounds)["matmul"].median / 1e9


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="leave out Triton and PyTorch")
    arguments = parser.parse_args()
    rounds, targets = arguments.rounds, TARGETS[:1] if arguments.alone else TARGETS
    columns = (*TARGETS, "PyTorch")
    print(f"{torch.cuda.get_device_name()}, TFLOP/s; matmul {matmul_speed(rounds):.0f}\n")
    print("| cell | phase | " + " | ".join(columns) + " | to the best peer |")
    print("| --- " * (len(columns) + 3) + "|")
    for causal in (False, True):
        kernels = compile_kernels(causal, targets)
        for cell in (cell for cell in CELLS if cell.causal == causal):
            for products, found in launches(cell, candidates(cell, kernels)).items():
                times = interleave(found, rounds)
                speeds = {name: cell.flops(products) / t.median / 1e9 for name, t in times.items()}
                print(row(cell, "forward" if products == 2 else "gradients", speeds, columns), flush=True)
            torch.cuda.empty_cache()


def row(cell: Cell, phase: str, speeds: dict[str, float], columns: tuple[str, ...]) -> str:
    """Returns a row of the table; n/a stands for who was not timed."""
    ours = speeds["cuda.sm_90a"]
    best = max((speed for name, speed in speeds.items() if name != "cuda.sm_90a"), default=None)
    shown = [f"{speeds[name]:.0f}" if name in speeds else "n/a" for name in columns]
    ratio = f"{int(ours / best * 10) / 10}x" if best else "n/a"
    return f"| {cell} | {phase} | {' | '.join(shown)} | {ratio} |"


if __name__ == "__main__":
    main()
