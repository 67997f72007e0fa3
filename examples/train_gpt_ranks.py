"""Trains the small GPT of train_gpt.py on several GPUs: its rows over `cp` of them (context parallelism), its
batches over `dp`, weights and gradients over all (FSDP2). The losses are those of one GPU, within its noise.

    python examples/train_gpt_ranks.py                       # cp = 2, dp = 2: 4 GPUs
    python examples/train_gpt_ranks.py --cp 4 --dp 1 --context 65536 --batch 1 --steps 12    # one long text
    python examples/train_gpt_ranks.py --cp 2 --dp 1 --steps 8 --tiny    # two processes, interpreted
    python examples/train_gpt_ranks.py --checkpoints runs/gpt            # goes on from the newest one there
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from attnc.distributed import ContextParallel
from attnc.distributed.group import on_processes, uses_gpus

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.train_gpt import GPT, SPEC, Settings, batches, corpus, generated, half_precision

#: What interpreted kernels can be waited for.
TINY = Settings(
    layers=1, heads=2, kv_heads=1, head_dim=16, context=64, batch=2, steps=8, dtype="f32", device="cpu"
)


class RowsOfGPT(GPT):
    """The same model on some rows of each text: `rows` are their places."""

    def forward(self, text: Tensor, rows: Tensor | None = None) -> Tensor:
        if rows is None:
            return super().forward(text)
        x: Tensor = self.bytes(text) + self.places[rows]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def settings_of(steps: int, *, tiny: bool, context: int | None = None, batch: int | None = None) -> Settings:
    """Returns those of the example, where no others are given."""
    usual = replace(TINY if tiny else Settings(), steps=steps)
    return replace(usual, context=context or usual.context, batch=batch or usual.batch)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Weights and the optimizer's state after every so many steps, in folders named by the step."""

    folder: Path
    every: int

    @property
    def newest(self) -> int:
        """The step of the newest that was written to its end, 0 without one."""
        return max((int(found.parent.name) for found in self.folder.glob("*/.metadata")), default=0)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Writes each rank's share. A collective."""
        if step % self.every == 0:
            save(_state(model, optimizer), checkpoint_id=self.folder / str(step))

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Reads the newest; returns the steps that it has behind it. A collective."""
        if step := self.newest:
            state = _state(model, optimizer)
            load(state, checkpoint_id=self.folder / str(step))
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        return step


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


@dataclass(frozen=True, slots=True)
class Training:
    """Of each step the loss, in nats per byte, and the seconds that it took."""

    losses: list[float]
    seconds: list[float]

    def timed(self, steps: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yields what the steps yield; those who take it wait for the GPU."""
        begin = time.perf_counter()
        for loss in steps:
            yield loss
            self.seconds.append(time.perf_counter() - begin)
            begin = time.perf_counter()

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step, the first ones left out: they compile."""
        return 1e3 * statistics.median(self.seconds[3:] or self.seconds)

    def write(self, path: str) -> None:
        Path(path).write_text(json.dumps([self.losses, self.seconds]), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Training:
        return Training(*json.loads(path.read_text(encoding="utf-8")))


def train_on_rank(
    rank: int, cp: int, dp: int, settings: Settings, path: str, kept: Checkpoints | None = None
) -> None:
    """One rank of cp x dp; rank 0 writes the `Training` of the steps that are not behind a checkpoint."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(settings.device, (dp, cp), mesh_dim_names=("dp", "cp"))
    attention = ContextParallel(SPEC, mesh["cp"], attention="gpt")
    shape = (settings.batch // dp, settings.context)
    q = torch.empty(*shape, settings.heads, settings.head_dim, dtype=_dtype(settings), device="meta")
    k = torch.empty(*shape, settings.kv_heads, settings.head_dim, dtype=_dtype(settings), device="meta")
    attention.plan(q, k)
    rows = attention.rows().to(settings.device)
    torch.manual_seed(0)
    model = RowsOfGPT(settings, lambda q, k, v: attention(q, k, v)[0]).to(settings.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp", "cp"]._flatten("all"))  # weights belong to all ranks
    fully_shard(model, mesh=mesh["dp", "cp"]._flatten("all"))
    optimizer = _optimizer(model, settings)
    done = kept.load(model, optimizer) if kept is not None else 0
    share, training = (mesh["dp"].get_local_rank(), dp), Training([], [])
    for loss in training.timed(
        _steps(model, optimizer, settings, done, share=share, rows=rows, ranks=cp * dp)
    ):
        dist.all_reduce(loss)
        training.losses.append(float(loss) / (cp * dp))
        if kept is not None:
            kept.save(model, optimizer, done + len(training.losses))
    if rank == 0:
        training.write(path)


def train_alone(settings: Settings) -> Training:
    """The same training in this process."""
    torch.manual_seed(0)
    model, training = RowsOfGPT(settings, generated(settings)).to(settings.device), Training([], [])
    for loss in training.timed(_steps(model, _optimizer(model, settings), settings)):
        training.losses.append(float(loss))
    return training


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95))


def _steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    done: int = 0,
    share: tuple[int, int] = (0, 1),
    rows: Tensor | None = None,
    ranks: int = 1,
) -> Iterator[Tensor]:
    """Losses of this rank's rows, scaled so that the mean over ranks is the loss of the batch. done: how many
    steps are behind the model already.
    """
    text = corpus()
    total = settings.batch * settings.context
    for batch in batches(text, settings, 0, settings.steps)[done:]:
        own = batch.chunk(share[1])[share[0]]
        inputs, labels = own[:, :-1], own[:, 1:]
        if rows is not None:
            inputs, labels = inputs[:, rows], labels[:, rows]
        with half_precision(settings):
            logits = model(inputs, rows) if rows is not None else model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss * (ranks / total)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch annotates it so
        optimizer.step()
        yield loss.detach()


def _dtype(settings: Settings) -> torch.dtype:
    return torch.float32 if settings.dtype == "f32" else torch.bfloat16


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cp", type=int, default=2, help="ranks that share the rows of a text")
    parser.add_argument("--dp", type=int, default=2, help="ranks that share the texts of a batch")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context", type=int, metavar="BYTES", help="of a text")
    parser.add_argument("--batch", type=int, metavar="TEXTS", help="of a step, over all ranks")
    parser.add_argument("--tiny", action="store_true", help="a model for interpreted kernels")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="goes on from the newest there")
    parser.add_argument("--every", type=int, default=50, metavar="STEPS", help="between two checkpoints")
    options = parser.parse_args(arguments)
    ranks = options.cp * options.dp
    tiny = options.tiny or not uses_gpus(ranks)
    settings = settings_of(options.steps, tiny=tiny, context=options.context, batch=options.batch)
    kept = Checkpoints(options.checkpoints, options.every) if options.checkpoints else None
    done = kept.newest if kept is not None else 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "training.json"
        on_processes(ranks, train_on_rank, options.cp, options.dp, settings, str(path), kept)
        on_ranks = Training.read(path)
        on_processes(1, _alone, settings, str(path))
        on_one = Training.read(path)
    shared, alone = on_ranks.losses, on_one.losses
    if not shared:
        print(f"all {len(alone)} steps are behind the checkpoint in {options.checkpoints}")
        return {"alone": alone, "shared": shared}
    apart = max(abs(a - b) for a, b in zip(shared, alone[done:], strict=True))
    print(f"{'step':>5} {'one':>9} {f'cp {options.cp} dp {options.dp}':>12}")
    for step in sorted({0, len(shared) // 2, len(shared) - 1}):
        print(f"{done + step + 1:5d} {alone[done + step]:9.4f} {shared[step]:12.4f}")
    print(f"largest distance of any step: {apart:.2e} nats per byte")
    many, one = on_ranks.step_ms, on_one.step_ms
    print(f"a step: {many:.1f} ms, one GPU {one:.1f} ms, efficiency {100 * one / (ranks * many):.1f} %")
    return {"alone": alone, "shared": shared}


def _alone(rank: int, settings: Settings, path: str) -> None:
    train_alone(settings).write(path)


if __name__ == "__main__":
    main()
