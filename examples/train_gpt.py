"""Trains a small GPT on the text of this repository: a generated kernel against PyTorch's attention.

    python examples/train_gpt.py                      # all runs, a table; on a GPU, in about a minute
    python examples/train_gpt.py --out training       # also training.json and training.png
    python examples/train_gpt.py --runs attnc --steps 100

A training run amplifies rounding: two correct kernels part after some hundred steps. What a third one may
do is therefore measured, not assumed. `sdpa-flash`, `sdpa-efficient` and `sdpa-math` are three kernels of
PyTorch with one seed, `sdpa-seed1` and `sdpa-seed2` see other weights and other batches. Everything is asked
to be deterministic, so that `attnc` and `attnc-again` shall give the same losses, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
SPEC = ROOT / "examples" / "gpt.attn"
#: q [B, M, H, D], k and v [B, M, Hkv, D] -> o [B, M, H, D], causal
Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
#: name -> (kernel, seed)
RUNS: Mapping[str, tuple[str, int]] = {
    "sdpa-flash": ("flash", 0),
    "sdpa-efficient": ("efficient", 0),
    "sdpa-math": ("math", 0),
    "attnc": ("attnc", 0),
    "attnc-again": ("attnc", 0),
    "sdpa-seed1": ("flash", 1),
    "sdpa-seed2": ("flash", 2),
    "attnc-seed1": ("attnc", 1),
    "attnc-seed2": ("attnc", 2),
}
#: A step of interpreted kernels takes a few tenths of a second.
INTERPRETED_STEPS = 60
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the model and of its training. dtype: of q, k and v; the weights are kept in float32."""

    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    context: int = 256
    batch: int = 32
    steps: int = 500
    rate: float = 1e-3
    dtype: str = "bf16"
    device: str = "cuda"

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


# --- attention ----------------------------------------------------------------------------------------------


def generated(settings: Settings) -> Attention:
    """The kernel that attnc makes of gpt.attn for this type and head dimension."""
    from attnc.build import front, plan_program
    from attnc.runtime.loader import load_module

    name = f"{settings.dtype}_d{settings.head_dim}"
    module = next(m for m in plan_program(front(SPEC)).modules if m.variant.name == name)
    function = load_module(module).gpt

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = function(q, k, v)[0]
        return o

    return attention


def of_torch(backend: SDPBackend) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)

    return attention


def attention_of(kernel: str, settings: Settings) -> Attention:
    return generated(settings) if kernel == "attnc" else of_torch(BACKENDS[kernel])


# --- the model ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual path."""

    def __init__(self, settings: Settings, attention: Attention) -> None:
        super().__init__()
        self.settings, self.attention = settings, attention
        width = settings.width
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project = nn.Linear(
            width, (settings.heads + 2 * settings.kv_heads) * settings.head_dim, bias=False
        )
        self.out = nn.Linear(width, width, bias=False)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        s = self.settings
        packed = self.project(self.norms[0](x)).unflatten(2, (-1, s.head_dim))
        q, k, v = packed.split([s.heads, s.kv_heads, s.kv_heads], dim=2)  # views: strides are the kernel's
        x = x + self.out(self.attention(q, k, v).flatten(2))
        result: Tensor = x + self.perceptron(self.norms[1](x))
        return result


class GPT(nn.Module):
    """Bytes [B, M] -> logits [B, M, 256]."""

    def __init__(self, settings: Settings, attention: Attention) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, settings.width)
        self.places = nn.Parameter(torch.zeros(settings.context, settings.width))
        self.blocks = nn.Sequential(*(Block(settings, attention) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x: Tensor = self.bytes(text) + self.places[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def corpus() -> Tensor:
    """The documentation and the sources of attnc as bytes; the last tenth is for validation."""
    paths = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("attnc/**/*.py"))]
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


def batches(text: Tensor, settings: Settings, seed: int, count: int) -> Tensor:
    """[count, batch, context + 1] bytes, drawn by the seed alone."""
    make = torch.Generator().manual_seed(seed)
    starts = torch.randint(
        len(text) - settings.context, (count, settings.batch, 1), generator=make
    ) + torch.arange(settings.context + 1)
    return text[starts.clamp(max=len(text) - 1)].long().to(settings.device)


# --- training -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """losses: of every step, in nats per byte; validation: after the last one."""

    losses: tuple[float, ...]
    validation: float


def train(settings: Settings, attention: Attention, seed: int, text: Tensor) -> Curve:
    """One run. Weights and batches follow from the seed, whatever the attention."""
    torch.manual_seed(seed)
    model = GPT(settings, attention).to(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95))
    warm = max(1, settings.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    cut = len(text) * 9 // 10
    losses = []
    for batch in batches(text[:cut], settings, seed, settings.steps):
        loss = loss_of(model, batch, settings)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch annotates it so
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if sys.stderr.isatty():
            print(f"step {len(losses)} of {settings.steps}", end="\r", file=sys.stderr, flush=True)
    with torch.no_grad():
        held_out = [loss_of(model, batch, settings) for batch in batches(text[cut:], settings, 0, 16)]
    return Curve(
        losses=tuple(torch.stack(losses).tolist()), validation=float(torch.stack(held_out).mean().item())
    )


def loss_of(model: nn.Module, batch: Tensor, settings: Settings) -> Tensor:
    with half_precision(settings):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def half_precision(settings: Settings) -> AbstractContextManager[Any]:
    if settings.dtype == "f32":
        return nullcontext()
    return torch.autocast(settings.device, dtype=torch.bfloat16)


# --- what the curves say ------------------------------------------------------------------------------------


def smooth(losses: Sequence[float], window: int = 20) -> Tensor:
    """Means of `window` consecutive steps."""
    window = min(window, len(losses))
    return torch.tensor(losses, dtype=torch.float64).unfold(0, window, 1).mean(1)


def summary(curves: Mapping[str, Curve]) -> dict[str, float]:
    """How far apart the curves are, in nats per byte: the largest difference of the smoothed losses.

    noise: between PyTorch's kernels, one seed; attnc: between the generated kernel and the nearest of them;
    seeds: between PyTorch's runs with other seeds; attnc_seeds: between both means over the seeds;
    again: between two runs of the generated kernel, of every step.
    """
    smoothed = {name: smooth(curve.losses) for name, curve in curves.items()}
    found: dict[str, float] = {}
    same = [smoothed[name] for name in ("sdpa-flash", "sdpa-efficient", "sdpa-math") if name in smoothed]
    if len(same) > 1:
        stacked = torch.stack(same)
        found["noise"] = float((stacked.amax(0) - stacked.amin(0)).max())
        if "attnc" in smoothed:
            found["attnc"] = float((stacked - smoothed["attnc"]).abs().amin(0).max())
    seeds = [smoothed[name] for name in ("sdpa-flash", "sdpa-seed1", "sdpa-seed2") if name in smoothed]
    if len(seeds) > 1:
        stacked = torch.stack(seeds)
        found["seeds"] = float((stacked.amax(0) - stacked.amin(0)).max())
        ours = [smoothed[name] for name in ("attnc", "attnc-seed1", "attnc-seed2") if name in smoothed]
        if len(ours) == len(seeds):
            found["attnc_seeds"] = float((torch.stack(ours).mean(0) - stacked.mean(0)).abs().max())
    if {"attnc", "attnc-again"} <= curves.keys():
        pairs = zip(curves["attnc"].losses, curves["attnc-again"].losses, strict=True)
        found["again"] = max(abs(a - b) for a, b in pairs)
    return found


def draw(curves: Mapping[str, Curve], title: str, path: Path) -> None:
    """The curves above, and below them their distance from the first of PyTorch's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 6.4), height_ratios=(3, 2), sharex=True, layout="constrained"
    )
    styles = {
        "sdpa-flash": ("#1f77b4", "-"), "sdpa-efficient": ("#17becf", "-"), "sdpa-math": ("#7f7f7f", "-"),
        "attnc": ("#d62728", "--"),
    }  # fmt: skip
    base = smooth(curves["sdpa-flash"].losses)
    for name, (color, style) in styles.items():
        if name in curves:
            loss = smooth(curves[name].losses)
            top.plot(loss, style, color=color, label=name, linewidth=1.4)
            if name != "sdpa-flash":
                bottom.plot(loss - base, style, color=color, linewidth=1.4)
    for name in ("sdpa-seed1", "sdpa-seed2"):
        if name in curves:
            label = "sdpa-flash, other seeds" if name == "sdpa-seed1" else None
            top.plot(smooth(curves[name].losses), color="#1f77b4", alpha=0.3, linewidth=1, label=label)
            bottom.plot(smooth(curves[name].losses) - base, color="#1f77b4", alpha=0.3, linewidth=1)
    for name in ("attnc-seed1", "attnc-seed2"):
        if name in curves:
            label = "attnc, other seeds" if name == "attnc-seed1" else None
            top.plot(smooth(curves[name].losses), "--", color="#d62728", alpha=0.3, linewidth=1, label=label)
            bottom.plot(smooth(curves[name].losses) - base, "--", color="#d62728", alpha=0.3, linewidth=1)
    top.set(title=title, ylabel="loss [nats per byte], mean of 20 steps")
    top.legend(frameon=False)
    bottom.axhline(0, color="#1f77b4", linewidth=1)
    bottom.set(xlabel="step", ylabel="distance from sdpa-flash")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def rounded(curve: Curve) -> dict[str, Any]:
    return {
        "losses": [round(loss, 4) for loss in curve.losses],
        "first": float(smooth(curve.losses)[0]),
        "last": float(smooth(curve.losses)[-1]),
        "validation": curve.validation,
    }


def deterministic() -> None:
    """Where PyTorch can: its memory-efficient attention cannot, and would warn of it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", message=".*deterministic.*")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, help=f"{Settings().steps} on a GPU, {INTERPRETED_STEPS} without")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--out", type=Path, help="write OUT.json, and OUT.png where matplotlib is installed")
    given = parser.parse_args()
    settings = Settings(steps=given.steps or Settings().steps)
    if not torch.cuda.is_available():
        from attnc.verify.interpreter import ensure_interpreter

        ensure_interpreter()
        print("no GPU: a tiny model, its kernels interpreted")
        settings = replace(
            settings,
            device="cpu",
            steps=given.steps or INTERPRETED_STEPS,
            dtype="f32",
            head_dim=16,
            layers=1,
            heads=2,
            kv_heads=1,
            context=32,
            batch=2,
        )
    deterministic()
    text = corpus()
    curves: dict[str, Curve] = {}
    print(f"{'run':16}{'first':>10}{'last':>10}{'validation':>12}   mean of 20 steps, nats per byte")
    for name in given.runs:
        kernel, seed = RUNS[name]
        if settings.device == "cpu" and kernel in ("flash", "efficient"):
            kernel = "math"
        curves[name] = curve = train(settings, attention_of(kernel, settings), seed, text)
        ends = smooth(curve.losses)
        print(f"{name:16}{ends[0]:10.4f}{ends[-1]:10.4f}{curve.validation:12.4f}", flush=True)
    found = summary(curves)
    for what, value in found.items():
        print(f"{what:16}{value:10.2g}")
    if given.out is not None:
        device = torch.cuda.get_device_name() if settings.device == "cuda" else "CPU"
        record = {
            "device": device, "torch": torch.__version__, "settings": asdict(settings), "bytes": len(text),
            "summary": found, "runs": {name: rounded(curve) for name, curve in curves.items()},
        }  # fmt: skip
        given.out.with_suffix(".json").write_text(json.dumps(record) + "\n", encoding="utf-8")
        try:
            draw(
                curves,
                f"A small GPT, one seed, four attention kernels ({device})",
                given.out.with_suffix(".png"),
            )
        except ImportError:
            print("matplotlib is not installed: no picture")


if __name__ == "__main__":
    main()
