"""Mask functions as models give them, and stand-ins for the two of transformers: not everybody has it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

#: What masks are, by name: what `functions` has, and how `attention_mask` is padded.
KINDS = ("usual", "all", "before", "around", "every second")
PADDINGS = ("", "left", "right", "both", "holes")
B = 2


def around(_b: Any, _h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx < 3) & (kv_idx - q_idx < 2)


def before(_b: Any, _h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx <= q_idx) & (q_idx - kv_idx < 4)


def every_second(_b: Any, _h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx - kv_idx) % 2 == 0) & (kv_idx <= q_idx)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The two functions of transformers that stand for masks, which not everybody has installed."""
    package, made = ModuleType("transformers"), ModuleType("transformers.masking_utils")

    def causal_mask_function(_b: Any, _h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= q_idx

    def bidirectional_mask_function(_b: Any, _h: Any, q_idx: Any, _kv_idx: Any) -> Any:
        return q_idx >= 0

    made.__dict__.update(
        causal_mask_function=causal_mask_function, bidirectional_mask_function=bidirectional_mask_function
    )
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", made)
    return made


def functions(name: str) -> Any:
    known = sys.modules["transformers.masking_utils"]
    return {
        "usual": None,
        "all": getattr(known, "bidirectional_mask_function", None),
        "before": before,
        "around": around,
        "every second": every_second,
    }[name]


def padding_of(name: str, keys: int) -> torch.Tensor | None:
    """[B, keys] of ones where there is a token."""
    if not name:
        return None
    kept, at = torch.ones(B, keys, dtype=torch.long), torch.arange(keys)
    if name in ("left", "both"):
        kept[1] *= at >= 2
    if name in ("right", "both"):
        kept[1] *= at < keys - 2
    if name == "holes":
        kept[1] *= at != keys // 2
    return kept
