"""A small GPT whose server gives the log-probabilities of its trainer, bit for bit.

    python -m examples.same_bits                  # on a GPU in seconds; without one, interpreted

Reinforcement learning compares what a server said of a token with what the trainer says of it. If both come
from kernels that sum in orders of their own, the ratio of their probabilities is not 1 before a single step
is taken. Here the server takes prompts in chunks, decodes token by token in batches of changing size, and
keeps keys and values in pages; the trainer runs whole sequences. `order = absolute(32)` in same_bits.attn
makes attention give a row the same bits in both, by Hopper's kernels on a Hopper GPU and else by Triton's.
The rest of the model has to keep its own promise: products, norms and the last softmax are Triton kernels of
this file whose tiles have one shape whatever the call, so that a row follows from a row. What is left, sums
and products of two numbers, rounds the same everywhere.

Gradients are those of the kernel attnc makes, and of PyTorch for the rest: the same bits in every run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if not torch.cuda.is_available():
    from attnc.verify.interpreter import ensure_interpreter

    ensure_interpreter()

import triton
import triton.language as tl

import attnc

SPEC = Path(__file__).with_suffix(".attn")
PAGE, SYMBOLS = 8, 128
#: Tokens of a prompt that the server takes at once.
_CHUNK = 17
#: Rows and columns of a tile of a product, and how deep it is: one shape for every call.
ROWS, COLUMNS, DEPTH = 16, 64, 32


# --- kernels of one shape -----------------------------------------------------------------------------------


# Kernels have no annotations of types: Triton looks names in them up.
@triton.jit(do_not_specialize=["M"])  # type: ignore[untyped-decorator]  # of triton
def _multiply(x, w, y, M, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]  # as said
    """y = x w^T: [M, K], [N, K] -> [M, N], all contiguous, of float32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, K, DEPTH):
        k = first + tl.arange(0, DEPTH)
        left = tl.load(
            x + row[:, None] * K + k[None, :], mask=(row < M)[:, None] & (k < K)[None, :], other=0.0
        )
        right = tl.load(
            w + column[:, None] * K + k[None, :], mask=(column < N)[:, None] & (k < K)[None, :], other=0.0
        )
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    tl.store(y + row[:, None] * N + column[None, :], total, mask=(row < M)[:, None] & (column < N)[None, :])


@triton.jit  # type: ignore[untyped-decorator]  # of triton
def _normalise(x, y, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # as said
    """Divides a row by the root of its mean square."""
    at = tl.program_id(0) * N + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=tl.arange(0, BLOCK) < N, other=0.0)
    tl.store(y + at, values / tl.sqrt(tl.sum(values * values, 0) / N + 1e-6), mask=tl.arange(0, BLOCK) < N)


@triton.jit  # type: ignore[untyped-decorator]  # of triton
def _log_softmax(x, y, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # as said
    """The logarithm of the softmax of a row."""
    at = tl.program_id(0) * N + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=tl.arange(0, BLOCK) < N, other=-float("inf"))
    shifted = values - tl.max(values, 0)
    tl.store(y + at, shifted - tl.log(tl.sum(tl.exp(shifted), 0)), mask=tl.arange(0, BLOCK) < N)


def _run_product(x: Tensor, w: Tensor) -> Tensor:
    (M, K), N = x.shape, w.shape[0]
    y = x.new_empty(M, N)
    grid = (triton.cdiv(M, ROWS), triton.cdiv(N, COLUMNS))
    _multiply[grid](x.contiguous(), w, y, M, N, K, ROWS, COLUMNS, DEPTH, num_warps=4, enable_fp_fusion=False)
    return y


def _run_rows(kernel: Any) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        x, y = x.contiguous(), torch.empty_like(x)
        kernel[(x.shape[0],)](
            x, y, x.shape[1], triton.next_power_of_2(x.shape[1]), num_warps=4, enable_fp_fusion=False
        )
        return y

    return run


class _OfOneShape(torch.autograd.Function):
    """A kernel of this file, with the gradients of what PyTorch says it is."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], meant: Callable[..., Tensor], *given: Tensor) -> Tensor:
        ctx.meant = meant
        ctx.save_for_backward(*given)
        return run(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            found = torch.autograd.grad(ctx.meant(*given), given, grads[0])
        return None, None, *found


def _apply(run: Callable[..., Tensor], meant: Callable[..., Tensor], *given: Tensor) -> Tensor:
    found: Tensor = _OfOneShape.apply(run, meant, *given)  # type: ignore[no-untyped-call]  # of torch
    return found


def product(x: Tensor, w: Tensor) -> Tensor:
    """Returns x w^T: [M, K], [N, K] -> [M, N]."""
    return _apply(_run_product, F.linear, x, w)


def normalise(x: Tensor) -> Tensor:
    """Returns the rows of x, [M, N], divided by the roots of their mean squares."""
    return _apply(_run_rows(_normalise), lambda x: F.rms_norm(x, x.shape[1:], eps=1e-6), x)


def log_softmax(x: Tensor) -> Tensor:
    """Returns the logarithms of the softmax of the rows of x, [M, N]."""
    return _apply(_run_rows(_log_softmax), lambda x: F.log_softmax(x, 1), x)


# --- the model ----------------------------------------------------------------------------------------------


#: q [B, M, H, 64], k and v [B, M, Hkv, 64] of M new tokens, and the layer -> o [B, M, H, 64]
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class Model(nn.Module):
    """A GPT of float32 weights, whose attention is in bfloat16."""

    def __init__(self, layers: int, heads: int, kv_heads: int, context: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, heads * 64
        rows = (heads + 2 * kv_heads) * 64

        def weights(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)

        self.symbols, self.places = weights(SYMBOLS, self.width), weights(context, self.width)
        self.qkv = nn.ParameterList(weights(rows, self.width) for _ in range(layers))
        self.out = nn.ParameterList(weights(self.width, self.width) for _ in range(layers))
        self.up = nn.ParameterList(weights(2 * self.width, self.width) for _ in range(layers))
        self.down = nn.ParameterList(weights(self.width, 2 * self.width) for _ in range(layers))

    def forward(self, tokens: Tensor, places: Tensor, attend: Attend) -> Tensor:
        """Returns log-probabilities of what follows each token, [B, M, symbols]. places: of the tokens."""
        batch, count = tokens.shape
        x = (self.symbols[tokens] + self.places[places]).view(-1, self.width)
        for layer, (qkv, out, up, down) in enumerate(
            zip(self.qkv, self.out, self.up, self.down, strict=True)
        ):
            rows = product(normalise(x), qkv).view(batch, count, -1, 64).to(torch.bfloat16)
            q, k, v = torch.split(rows, [self.heads, self.kv_heads, self.kv_heads], 2)
            o = attend(q.contiguous(), k.contiguous(), v.contiguous(), layer)
            x = x + product(o.reshape(-1, self.width).float(), out)
            x = x + product(product(normalise(x), up).relu().square(), down)
        return log_softmax(product(normalise(x), self.symbols)).view(batch, count, SYMBOLS)


# --- the trainer --------------------------------------------------------------------------------------------


def attend_whole(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    """Attends to whole sequences: the trainer's attention."""
    found: Tensor = attnc.compile(SPEC, attention="trained")(q, k, v)[0]
    return found


def forward_whole(model: Model, tokens: Tensor) -> Tensor:
    """Returns log-probabilities of what follows each token of whole sequences."""
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    found: Tensor = model(tokens, places, attend_whole)
    return found


def train(model: Model, tokens: Tensor, steps: int) -> list[float]:
    """Fits the model to sequences, and returns the losses."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for _ in range(steps):
        known = forward_whole(model, tokens[:, :-1]).flatten(0, 1)
        loss = F.nll_loss(known, tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        optimiser.step()
        losses.append(loss.item())
    return losses


# --- the server ---------------------------------------------------------------------------------------------


@dataclass
class Request:
    """A sequence that is being served. known: log-probabilities of its tokens but the first."""

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    kept: int = 0
    known: list[Tensor] = field(default_factory=list)


class Server:
    """Serves requests from one pool of pages, as many at once as a step names."""

    def __init__(self, model: Model, pages: int, device: torch.device) -> None:
        self.model, self.device = model, device
        shape = (len(model.qkv), 2, pages, PAGE, model.kv_heads, 64)
        self.pool = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
        self.free = torch.randperm(pages).tolist()
        self.attention = attnc.compile(SPEC, attention="served")

    @torch.no_grad()
    def step(self, requests: Sequence[Request], count: int) -> None:
        """Runs the next `count` tokens of each request, and keeps what follows each of them."""
        for request in requests:
            while len(request.pages) * PAGE < request.kept + count:
                request.pages.append(self.free.pop())
        most = max(len(request.pages) for request in requests)
        table = torch.tensor(
            [r.pages + [0] * (most - len(r.pages)) for r in requests], device=self.device
        ).int()
        ends = torch.tensor([request.kept + count for request in requests], device=self.device).int()
        places = ends[:, None].long() - count + torch.arange(count, device=self.device)
        slots = table.gather(1, places // PAGE).long() * PAGE + places % PAGE

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            for pages, rows in zip(self.pool[layer], (k, v), strict=True):
                pages.view(-1, *pages.shape[2:])[slots] = rows
            found: Tensor = self.attention(q, *self.pool[layer], table, ends)
            return found

        given = [request.tokens[request.kept : request.kept + count] for request in requests]
        known: Tensor = self.model(torch.tensor(given, device=self.device), places, attend)
        for request, own in zip(requests, known, strict=True):
            request.known += [*own]
            request.kept += count

    def generate(self, requests: Sequence[Request], length: int) -> None:
        """Takes the prompts in chunks, each alone, then samples until every request has so many tokens, in
        batches of requests that have joined and not yet left.
        """
        waiting, running = list(requests), list[Request]()
        while waiting or running:
            if waiting:
                request = waiting.pop()
                while left := len(request.tokens) - request.kept:
                    self.step([request], min(_CHUNK, left))
                running.append(request)
            for request in running:
                drawn = torch.multinomial(request.known[-1].double().exp(), 1)
                request.tokens.append(int(drawn))
            running = [request for request in running if len(request.tokens) < length]
            if running:
                self.step(running, 1)


# --- both ---------------------------------------------------------------------------------------------------


def compare(model: Model, requests: Sequence[Request], device: torch.device) -> tuple[int, int]:
    """Returns how many log-probabilities the trainer computes as the server did, bit for bit, and of how
    many.
    """
    same = count = 0
    for request in requests:
        tokens = torch.tensor([request.tokens[: request.kept]], device=device)
        with torch.no_grad():
            known = forward_whole(model, tokens)[0]
        served = torch.stack(request.known[: request.kept])
        same += int((known.view(torch.int32) == served.view(torch.int32)).sum())
        count += known.numel()
    return same, count


def main(argv: Sequence[str] | None = None) -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--length", type=int, default=200 if on_gpu else 45, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=100 if on_gpu else 2, help="steps of training")
    parser.add_argument("--requests", type=int, default=8 if on_gpu else 2, help="sequences that are served")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model")
    given = parser.parse_args(argv)
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.use_deterministic_algorithms(True, warn_only=True)
    text = SPEC.read_bytes()
    data = torch.tensor([*text[: 4 * (given.length // 2)]], device=device).view(4, -1) % SYMBOLS

    models, losses = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model(given.layers, 4, 2, given.length).to(device))
        losses.append(train(models[-1], data, given.steps))
    weights = [torch.cat([x.detach().flatten() for x in model.parameters()]) for model in models]
    repeats = losses[0] == losses[1] and torch.equal(*weights)
    told = "the same bits" if repeats else "OTHER bits"
    print(f"losses {losses[0][0]:.4f} to {losses[0][-1]:.4f}; trained again: {told}")

    prompts = [data[i % 4, : 20 - 3 * (i % 4)].tolist() for i in range(given.requests)]
    requests = [Request([int(token) for token in prompt]) for prompt in prompts]
    Server(models[0], given.requests * (given.length // PAGE + 2), device).generate(requests, given.length)
    same, count = compare(models[0], requests, device)
    print(f"{len(requests)} sequences served: {same} of {count} log-probabilities have the trainer's bits")
    return 0 if repeats and same == count else 1


if __name__ == "__main__":
    raise SystemExit(main())
