"""Element types as torch calls them."""

from __future__ import annotations

from attnc.model.tensors import DType

TORCH_DTYPES = {
    DType.F16: "torch.float16",
    DType.BF16: "torch.bfloat16",
    DType.F32: "torch.float32",
    DType.I32: "torch.int32",
    DType.I64: "torch.int64",
    DType.BOOL: "torch.bool",
}
