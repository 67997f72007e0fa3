"""torch's name of every element type of the language."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attnc.model.tensors import DType

TORCH: Mapping[DType, torch.dtype] = {
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F32: torch.float32,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.BOOL: torch.bool,
}
