"""Greedy decoding in one captured CUDA graph: the host appends and replays, and never waits for the device.

The graph runs over all rows of the block table. It reads which pages a row has and how long it is from the
cache's own tensors, so that new pages and rows without a sequence are no reason to capture again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from examples.llama_paged import PagedDecoder, first


def greedy_graph(decoder: PagedDecoder, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    """As `greedy`; on a CPU the same steps without a graph."""
    cache = decoder.cache
    sequences, logits = decoder.prefill(prompts)
    rows = torch.tensor([cache.row(sequence) for sequence in sequences], device=cache.device)
    tokens = torch.zeros(len(cache.kv_len), dtype=torch.int64, device=cache.device)
    tokens[rows] = logits.argmax(1)
    history = [tokens.clone()]
    cache.append(sequences)
    run = captured(decoder, tokens) if cache.device.type == "cuda" else lambda: next_tokens(decoder, tokens)
    with never_waiting(cache.device):
        for index in range(steps - 1):
            if index:
                cache.append(sequences)
            run()
            history.append(tokens.clone())
    decoder.free(sequences)
    columns: list[list[int]] = torch.stack(history, 1)[rows].tolist()
    return columns


@contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """Whatever waits for the GPU inside is an error, as far as torch notices."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its check a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def next_tokens(decoder: PagedDecoder, tokens: torch.Tensor) -> None:
    """Replaces the last token of every row, i64[rows], by the likeliest one after it; without the host."""
    cache, model = decoder.cache, decoder.model
    slots = cache.last_slots()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache.write(slots, k, v, layer)
        kernel = decoder.kernels[1]
        made = kernel(q.unsqueeze(1), cache.k(layer), cache.v(layer), cache.block_table, cache.kv_len)
        return first(made).squeeze(1)

    positions = (cache.kv_len.long() - 1).clamp(min=0)
    tokens.copy_(model.logits(model.hidden(tokens, positions, attend)).argmax(1))


def captured(decoder: PagedDecoder, tokens: torch.Tensor) -> Callable[[], None]:
    """A graph of `next_tokens`. Warming up stores the keys of the last tokens; so does the first replay."""
    before = tokens.clone()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not annotate it
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            next_tokens(decoder, tokens)
            tokens.copy_(before)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        next_tokens(decoder, tokens)
    return graph.replay
