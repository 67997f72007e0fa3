"""Processes, and a model that is trained over ranks: setups in which functions are tested, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

#: Attention of q, k and v [B, N, H, D].
Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def run_processes(
    method: str, work: Callable[..., None], calls: Sequence[tuple[Any, ...]], seconds: float
) -> None:
    """Starts a process for each call, all at once. AssertionError where one fails or takes longer.

    method: how processes start, `spawn` or `fork`.
    """
    context: Any = torch.multiprocessing.get_context(method)
    processes: list[Any] = [context.Process(target=work, args=call) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    assert [process.exitcode for process in processes] == [0] * len(calls)


class Model(torch.nn.Module):
    """A projection, attention and another. kind: of its weights, such as their dtype."""

    def __init__(self, attend: Attend, width: int, heads: int, d: int, **kind: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.shape = attend, (3, heads, d)
        self.qkv, self.out = (
            torch.nn.Linear(width, 3 * heads * d, **kind),
            torch.nn.Linear(heads * d, width, **kind),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], *self.shape).unbind(2)
        made: torch.Tensor = self.out(self.attend(q, k, v).flatten(2))
        return made


def train_over_ranks(
    rank: int,
    make: Callable[[], Model],
    data: Sequence[torch.Tensor],
    judge: Callable[[torch.Tensor, torch.Tensor], None],
    *,
    steps: int,
    backend: str = "",
    **options: Any,
) -> None:
    """Judges gradients over ranks, which are the mean of those of each rank's data, in every step.

    data: of each rank, [B, N, width]; backend: of torch.compile, "" where calls are eager; options: of
    DistributedDataParallel.
    """
    alone, model = make(), make()
    spread: Any = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
    spread = torch.compile(spread, backend=backend) if backend else spread
    for _ in range(steps):
        for one in (alone, model):
            one.zero_grad()
        spread(data[rank]).float().square().mean().backward()
        every: Any = torch.stack([alone(x).float().square().mean() for x in data])
        every.mean().backward()
        for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None
            assert right.grad is not None
            judge(mine.grad, right.grad)
