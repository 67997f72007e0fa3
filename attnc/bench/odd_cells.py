"""Calls of attention at sizes that no table has: odd lengths, few heads, groups and widths of every kind, and
masks, pages and packed sequences beside them. They show what the rules by which plans are chosen leave slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnc.bench.model_cells import Job, ModelCell

_BOTH: tuple[Job, ...] = ("prompt", "training")


def odd_cells() -> tuple[ModelCell, ...]:
    """Returns all cells, kind by kind."""
    return (
        *_lengths(), *_heads(), *_cross(), *_widths(), *_windows(),
        *_list_packed_cells(), *_list_cached_cells(), *_half(),
    )  # fmt: skip


def _calls(
    kind: str,
    size: tuple[int, int],
    heads: tuple[int, int],
    width: int,
    jobs: tuple[Job, ...] = _BOTH,
    **more: Any,
) -> Iterator[ModelCell]:
    """Yields a cell for each job. size: batch and length; heads: of queries and of keys."""
    batch, length = size
    of_q, of_kv = heads
    for job in jobs:
        options: dict[str, Any] = {"queries": length, "keys": length, **more}
        yield ModelCell(
            model=kind, job=job, batch=batch, heads=of_q, kv_heads=of_kv, width=width, **options
        )  # fmt: skip


def _lengths() -> Iterator[ModelCell]:
    for size, heads, width, causal in (
        ((32, 577), (12, 12), 64, False), ((8, 1000), (16, 16), 128, True), ((8, 1500), (16, 16), 64, False),
        ((4, 1500), (32, 8), 128, True), ((2, 3001), (32, 8), 128, True), ((1, 4097), (32, 8), 128, True),
        ((1, 4097), (16, 16), 128, False), ((2, 3001), (8, 4), 256, True), ((16, 333), (16, 16), 64, True),
    ):  # fmt: skip
        yield from _calls(f"h{heads[0]} d{width}", size, heads, width, causal=causal)


def _heads() -> Iterator[ModelCell]:
    for size, heads, width, causal in (
        ((1, 65536), (1, 1), 128, True), ((1, 32768), (2, 2), 64, False), ((1, 16384), (4, 4), 128, True),
        ((1, 12288), (4, 1), 128, True), ((2, 4096), (16, 1), 128, True), ((8, 1000), (8, 1), 64, True),
        ((2, 4096), (24, 8), 128, True), ((2, 2048), (20, 4), 64, True), ((2, 3072), (28, 4), 128, True),
        ((4, 2048), (12, 1), 128, True), ((1, 4096), (7, 7), 64, True), ((1, 2048), (3, 3), 128, False),
    ):  # fmt: skip
        yield from _calls(f"h{heads[0]}/{heads[1]} d{width}", size, heads, width, causal=causal)


def _cross() -> Iterator[ModelCell]:
    for (batch, queries, keys), heads, width, jobs in (
        ((2, 4096, 77), 12, 64, _BOTH), ((2, 4096, 77), 8, 40, _BOTH), ((2, 1024, 77), 8, 80, _BOTH),
        ((2, 256, 77), 8, 160, _BOTH), ((16, 1, 4096), 16, 128, ("prompt",)), ((4, 100, 4096), 16, 64, _BOTH),
        ((256, 128, 128), 12, 64, _BOTH), ((256, 197, 197), 12, 64, _BOTH), ((512, 49, 49), 8, 32, _BOTH),
        ((64, 128, 128), 16, 128, _BOTH),
    ):  # fmt: skip
        more = {"queries": queries, "causal": False}
        yield from _calls(f"h{heads} d{width} full", (batch, keys), (heads, heads), width, jobs, **more)


def _widths() -> Iterator[ModelCell]:
    for width in (32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 160, 192, 224, 256):
        yield from _calls(f"d{width}", (2, 4096), (16, 16), width)
    yield from _calls("d192/128", (2, 2048), (16, 16), 192, value=128)
    for width in (72, 96, 160):
        yield from _calls(f"d{width} full", (4, 1500), (16, 16), width, causal=False)
    for width in (80, 96, 112, 192):
        yield from _calls(f"d{width} grouped", (1, 8192), (32, 8), width)


def _windows() -> Iterator[ModelCell]:
    for window in (128, 256, 512, 1024, 2048, 4096):
        yield from _calls(f"w{window} d128", (1, 8192), (32, 8), 128, window=window - 1)
    for window in (128, 1024):
        yield from _calls(f"w{window} d64", (1, 8192), (16, 16), 64, window=window - 1)
        yield from _calls(f"w{window} d64 sink", (1, 8192), (64, 8), 64, window=window - 1, sink=True)
        yield from _calls(f"w{window} d256", (1, 8192), (8, 4), 256, window=window - 1)
    yield from _calls("softcap 30 d128", (1, 4096), (32, 8), 128, softcap=30.0)
    yield from _calls("softcap 50 w1024 d128", (1, 8192), (32, 8), 128, window=1023, softcap=50.0)
    yield from _calls("softcap 50 d64", (2, 4096), (16, 16), 64, softcap=50.0)


def _list_packed_cells() -> Iterator[ModelCell]:
    few, many = (3000, 100, 50, 2049, 513, 1, 4097), tuple(16 + at * 37 % 251 for at in range(96))
    equal, two = (77,) * 128, (4096, 2500)
    for heads, width, lengths, causal in (
        ((32, 8), 128, few, True), ((16, 16), 64, many, True), ((12, 12), 64, equal, False),
        ((16, 16), 128, two, True), ((16, 4), 96, few, True), ((8, 1), 128, many, True),
    ):  # fmt: skip
        kind = f"h{heads[0]}/{heads[1]} d{width}"
        yield from _calls(kind, (1, 0), heads, width, lengths=lengths, causal=causal)


def _list_cached_cells() -> Iterator[ModelCell]:
    decoding: tuple[Job, ...] = ("decoding",)
    for page in (1, 16, 64, 256):
        more = {"queries": 1, "page": page}
        yield from _calls(f"page {page} d128", (16, 4096), (32, 8), 128, decoding, **more)
    for size, heads, width, page in (
        ((64, 512), (32, 8), 128, 16), ((8, 16384), (8, 1), 128, 16), ((32, 2048), (64, 8), 64, 64),
        ((16, 4096), (16, 16), 128, 16), ((16, 4096), (16, 4), 96, 64), ((16, 4096), (8, 4), 256, 16),
        ((4, 3001), (32, 8), 128, 0), ((16, 4096), (32, 8), 128, 0), ((64, 1000), (12, 12), 64, 0),
    ):  # fmt: skip
        more = {"queries": 1, "page": page}
        yield from _calls(
            f"h{heads[0]}/{heads[1]} d{width} page {page}", size, heads, width, decoding, **more
        )
    for queries in (2, 3, 5, 8):
        more = {"queries": queries, "page": 16}
        yield from _calls("h32/8 d128", (16, 4096), (32, 8), 128, ("drafts",), **more)
    for size, queries, page in (((1, 8192), 512, 16), ((4, 4000), 300, 16), ((2, 9001), 1000, 1)):
        more = {"queries": queries, "page": page}
        yield from _calls(f"h32/8 d128 page {page}", size, (32, 8), 128, ("chunk",), **more)


def _half() -> Iterator[ModelCell]:
    for size, heads, width, causal in (
        ((2, 4096), (16, 16), 128, True), ((8, 1000), (16, 16), 64, False), ((2, 4096), (16, 4), 96, True)
    ):  # fmt: skip
        yield from _calls(f"f16 h{heads[0]} d{width}", size, heads, width, causal=causal, dtype="f16")
