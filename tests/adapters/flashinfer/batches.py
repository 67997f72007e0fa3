"""Batches as FlashInfer's wrappers take them, and what must come out."""

from __future__ import annotations

import math
from typing import Any

import torch

HEADS, GROUP, SIZE, PAGE = 2, 2, 16, 4
SIZES: dict[str, Any] = {
    "num_qo_heads": HEADS * GROUP,
    "num_kv_heads": HEADS,
    "page_size": PAGE,
    "q_data_type": torch.float32,
}


def csr(lengths: list[int], table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indptr, indices, last_page_len) of a dense table."""
    counts = torch.tensor([-(-length // PAGE) for length in lengths])
    indices = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    last = torch.tensor([(length - 1) % PAGE + 1 for length in lengths])
    return torch.cat([torch.zeros(1).long(), counts.cumsum(0)]).int(), indices, last.int()


def stored(k: torch.Tensor, v: torch.Tensor, form: str) -> Any:
    """The pools in a form that FlashInfer takes: layout, and apart or together."""
    layout, kind = form.split("-")
    pair = (k, v) if layout == "NHD" else (k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous())
    return pair if kind == "apart" else torch.stack(pair, 1)


def compare(o: torch.Tensor, lse: torch.Tensor | None, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Holds o, and lse in base 2, to float64, whose lse is in base e. Products are of three tf32 on a GPU."""
    tolerance = 1e-4 if o.is_cuda else 1e-5
    torch.testing.assert_close(o.double(), expected[0], rtol=tolerance, atol=tolerance)
    if lse is not None:
        torch.testing.assert_close(lse.double(), expected[1] / math.log(2), rtol=tolerance, atol=tolerance)


def workspace() -> torch.Tensor:
    """Of which only the device is used: that of the tests."""
    return torch.empty(0)
