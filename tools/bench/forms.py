"""Figures of forms that have no table of `attnc bench`: gates, HSTU, gradients of latent attention.

    python -m tools.bench.forms [gate] [hstu] [latent] [--target cuda.sm_90a] [--rounds 9]

gate: a forward of specs/gated.attn beside the same attention without its gate, and `torch.mul` of o alone.
hstu: specs/hstu.attn, whose sequences have from half of the longest one's length on. latent: `mla_training`
of specs/mla_training.attn, whose FLOPs are those of two products forward and five backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import attnc
from attnc.runtime.timing import Launch, interleave

SPECS = Path(__file__).parents[2] / "specs"
MADE: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
#: Columns, sequences, tokens and the mask, of 16 query heads on 2.
GATES = tuple(
    (width, batch, length, mask)
    for width in (64, 128)
    for batch, length in ((8, 1024), (2, 4096), (1, 16384))
    for mask in ("causal", "true")
)
#: Sequences, and the longest one, of 4 heads of 128 columns.
JAGGED = ((64, 1024), (16, 4096), (4, 16384))
#: Query heads and tokens.
LATENT = ((128, 4096), (128, 8192), (16, 8192))
_CANDIDATES = 20
#: Columns of the keys of a latent attention, and of these its values; five products to two.
_KEYS, _VALUES = 576, 512
_BACKWARD = (3 * _KEYS + 2 * _VALUES) / (_KEYS + _VALUES)


def gate_texts(width: int, mask: str) -> dict[str, str]:
    """Returns specs/gated.attn for one width and mask, and the same without its gate."""
    text = (SPECS / "gated.attn").read_text(encoding="utf-8")
    text = text.replace("param D in {128, 256}", f"param D in {{{width}}}")
    text = text.replace("mask = causal", f"mask = {mask}")
    bare = text.replace(" = sigmoid(gate[b, q_idx, h, d]) * attention", "").replace(", gate\n", "\n")
    lines = (line for line in bare.splitlines() if "input gate" not in line)
    return {"without": "\n".join(lines) + "\n", "with a gate": text}


def gates(target: str) -> Iterator[tuple[str, dict[str, Launch], float]]:
    """Yields cells: what they are called, launches, and no FLOPs."""
    for width, batch, length, mask in GATES:
        functions = {
            name: attnc.compile(text, attention="gated", target=target)
            for name, text in gate_texts(width, mask).items()
        }
        q, gate = torch.randn(2, batch, length, 16, width, **MADE)
        k, v = torch.randn(2, batch, length, 2, width, **MADE)
        out, share = torch.empty_like(q), torch.rand_like(q)
        found: dict[str, Launch] = {
            "without": partial(functions["without"], q, k, v, out=out),
            "with a gate": partial(functions["with a gate"], q, k, v, gate, out=out),
            "torch.mul": partial(torch.mul, out, share, out=out),
        }
        yield f"d{width} b{batch} n{length} {'full' if mask == 'true' else mask}", found, 0.0


def both_ways(
    function: Callable[..., Any], leaves: list[torch.Tensor], others: list[torch.Tensor]
) -> dict[str, Launch]:
    """Returns launches of a forward, and of the gradients of one that is kept."""
    kept = [leaf.detach().requires_grad_() for leaf in leaves]
    found = function(*kept, *others)
    o = found if isinstance(found, torch.Tensor) else found[0]
    gradients = partial(torch.autograd.grad, o, kept, torch.randn_like(o), retain_graph=True)
    return {"forward": partial(function, *leaves, *others), "gradients": gradients}


def jagged(target: str) -> Iterator[tuple[str, dict[str, Launch], float]]:
    """Yields cells of HSTU."""
    text = (SPECS / "hstu.attn").read_text(encoding="utf-8").replace("{128, 64}", "{128}")
    function = attnc.compile(text.replace("GROUP in {1, 4}", "GROUP in {1}"), attention="hstu", target=target)
    for batch, longest in JAGGED:
        lengths = torch.linspace(longest // 2, longest, batch).int()
        ends = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
        targets, context = torch.full((batch,), _CANDIDATES), torch.zeros(batch)
        q, k, v = torch.randn(3, int(ends[-1]), 4, 128, **MADE)
        others = [x.int().cuda() for x in (ends, targets, context)]
        yield f"b{batch} n{longest}", both_ways(function, [q, k, v], others), 0.0


def latent(target: str) -> Iterator[tuple[str, dict[str, Launch], float]]:
    """Yields cells of latent attention, with the FLOPs of its forward, in tera."""
    text = (SPECS / "mla_training.attn").read_text(encoding="utf-8")
    function = attnc.compile(text, attention="mla_training", target=target)
    for heads, length in LATENT:
        q = torch.randn(1, length, heads, _KEYS, **MADE)
        k = torch.randn(1, length, 1, _KEYS, **MADE)
        yield (
            f"h{heads} n{length}",
            both_ways(function, [q, k], []),
            heads * length**2 * (_KEYS + _VALUES) / 1e12,
        )


SECTIONS = {"gate": gates, "hstu": jagged, "latent": latent}


def shown(name: str, microseconds: dict[str, float], products: float) -> str:
    """Returns a row: times; of a gate what it adds; TFLOP/s where FLOPs are known."""
    row = [name, *(f"{time:,.1f}" for time in microseconds.values())]
    if "without" in microseconds:
        row.append(f"{100 * (microseconds['with a gate'] / microseconds['without'] - 1):+.1f} %")
    if products:
        row.append(f"{products / microseconds['forward'] * 1e6:.0f}")
        row.append(f"{products * _BACKWARD / microseconds['gradients'] * 1e6:.0f}")
    return f"| {' | '.join(row)} |"


def main() -> None:
    """Prints a table for each section."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--target", default="cuda.sm_90a")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    for section in asked.sections or SECTIONS:
        print(f"\n{section}, {asked.target} on {torch.cuda.get_device_name()}, microseconds\n")
        for number, (name, launches, products) in enumerate(SECTIONS[section](asked.target)):
            if not number:
                heads = [*launches, *(["the gate adds"] if section == "gate" else [])]
                heads += ["forward, TFLOP/s", "gradients, TFLOP/s"] if products else []
                print(f"| cell | {' | '.join(heads)} |\n{'| --- ' * (len(heads) + 1)}|")
            times = interleave(launches, asked.rounds)
            print(shown(name, {key: 1e3 * t.median for key, t in times.items()}, products), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
