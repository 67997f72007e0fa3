"""The Python module beside a CUDA decode kernel: a launch over tiles and shares, and one that joins them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnc.plan.ir import Kernel, Module
from attnc.target.shares import SharesText
from attnc.target.sm80.decode import CudaDecodeText
from attnc.target.sm80.host import CudaHostText
from attnc.target.triton.decode import DecodeText
from attnc.target.triton.decode_host import DecodeHost


class CudaDecodeHost(CudaHostText):
    """Attribute by attribute what `templates/cuda/host.py.jinja` prints for decoding."""

    _text: CudaDecodeText

    def __init__(self, module: Module, kernel: Kernel, text: CudaDecodeText) -> None:
        super().__init__(module, kernel, text)
        rows = DecodeText(module, kernel)
        self.call = DecodeHost(module, kernel, rows)
        self.shares = SharesText(kernel=kernel, text=rows, longest=self.call.longest, quotient=_quotient)
        self.is_split = text.is_split
        if text.is_split:
            dv = text.layout.dv
            self.more_fields = ["lse_parts: int = 0  # where they begin in the memory for parts, in bytes"]
            self.also_kept = f", {4 * dv} * rows * splits, (((rows * splits * {dv + 1},), (1,)),)"
        self.sections = False
        self.has_fixed_shares = text.has_fixed_shares
        self.combine = text.combine_name
        self.joined_bytes = 4 * (text.layout.dv + 1)  # of shared memory, for each warp

    @property
    def workspace(self) -> Iterator[str]:
        if self.is_split:
            yield from self.shares.lines

    @property
    def scratch(self) -> list[str]:
        return ["parts"] if self.is_split else []

    @property
    def scratch_lines(self) -> Iterator[str]:
        if self.is_split:
            yield "parts = None"
            yield "if call.scratch:"
            yield "    parts = _empty(call.scratch[0], torch.float32, q)  # of o, and behind them of lse"

    @property
    def _pointer_lines(self) -> list[Sequence[str]]:
        more = [["o_parts", "lse_parts"]] if self.is_split else []
        return [*super()._pointer_lines, *more, *([["fallbacks"]] if self.call.counts_fallbacks else [])]

    def _pointer(self, name: str) -> str:
        match name:
            case "o_parts":
                return "0 if parts is None else parts.data_ptr()"
            case "lse_parts":
                return "0 if parts is None else parts.data_ptr() + call.lse_parts"
            case "fallbacks":
                return "0 if fallbacks is None else fallbacks.data_ptr()"
            case _:
                return super()._pointer(name)

    @property
    def _size_values(self) -> list[str]:
        named = {"SPLITS": "splits", "SHARE": "config.share"}
        return [named.get(name, name) for name in self._text.size_names]

    @property
    def blocks(self) -> str:
        return "tiles * splits" if self.is_split else self.shares.tiles


def _quotient(x: str, size: str) -> str:
    return f"-(-{x} // {size})"
