"""Texts of CUDA kernels that compute o, made for committed specs."""

from __future__ import annotations

from attnc.plan.ir import Decode, Forward
from attnc.plan.sm80 import layout_of
from attnc.plan.sm90 import decode_layout_of
from attnc.plan.sm90 import layout_of as hopper_layout_of
from attnc.target.sm80.kernel import CudaDecodeText, CudaText
from attnc.target.sm90.decode import Sm90DecodeText
from attnc.target.sm90.kernel import Sm90Text
from tests.plans import module_of


def text_of(spec: str, variant: str | None = None) -> CudaText:
    module = module_of(spec, "cuda.sm_80", variant)
    kernel = module.kernel
    if isinstance(kernel, Decode):
        return CudaDecodeText(module, kernel, layout_of(kernel))
    assert isinstance(kernel, Forward)
    return CudaText(module, kernel, layout_of(kernel))


def hopper_text_of(spec: str, variant: str | None = None) -> Sm90Text:
    module = module_of(spec, "cuda.sm_90a", variant)
    assert isinstance(module.kernel, Forward)
    return Sm90Text(module, module.kernel, hopper_layout_of(module.kernel))


def hopper_decode_text_of(spec: str, variant: str | None = None) -> Sm90DecodeText:
    module = module_of(spec, "cuda.sm_90a", variant)
    assert isinstance(module.kernel, Decode)
    return Sm90DecodeText(module, module.kernel, decode_layout_of(module.kernel))
