"""The callable of a decode kernel: what is prepared once for all calls alike, and the launches themselves."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.plan.decode import has_fixed_shares
from attnc.plan.ir import Kernel, Module
from attnc.target.shares import SharesText
from attnc.target.triton.combine import CombineText
from attnc.target.triton.decode import DecodeText
from attnc.target.triton.host import HostText

#: Of the second axis of a grid, along which the shares of a sequence lie.
_MOST_PROGRAMS = 65535


class DecodeHost(HostText):
    """The callable: a launch over tiles and shares, and one that joins the shares."""

    _text: DecodeText

    def __init__(self, module: Module, kernel: Kernel, text: DecodeText) -> None:
        super().__init__(module, kernel, text)
        if self.is_split:
            self.more_fields = ["combine: _Launch | None = None  # None: no sequence is shared"]
        self.sections = False
        self.begins_early = True
        self._combine = CombineText(module, kernel)
        self.shares = SharesText(
            kernel=kernel, text=text, longest=self.longest, quotient=_quotient, most=_MOST_PROGRAMS
        )

    @property
    def checks(self) -> Iterator[str]:
        yield from super().checks
        if self.counts_fallbacks:
            yield "if fallbacks is not None:"
            yield '    _sizes("fallbacks", fallbacks, torch.int32, (1,), q)'

    @property
    def is_split(self) -> bool:
        return self._kernel.split is not None

    @property
    def workspace(self) -> Iterator[str]:
        if self.is_split:
            yield from self.shares.lines

    @property
    def scratch(self) -> list[str]:
        return ["parts"] if self.is_split else []

    @property
    def scratch_layouts(self) -> str:
        return f"((rows * splits * {self.shares.part_width},), (1,)),"

    @property
    def scratch_lines(self) -> Iterator[str]:
        if self.is_split:
            yield "parts = None if call.combine is None else _empty(call.scratch[0], torch.float32, q)"

    @property
    def launches(self) -> Iterator[str]:
        yield from super().launches
        if self.is_split:
            yield "if call.combine is not None:"
            yield f"    call.combine({self.combine_tensors})"

    @property
    def grid(self) -> str:
        return "tiles, splits" if self.is_split else f"{self.shares.tiles},"

    @property
    def combine_warps(self) -> int:
        """So many that a thread holds a row of two shares at most; more only wait for each other."""
        return min(max(self._text.block_dv // 64, 2), 8)

    @property
    def combine_kernel(self) -> str:
        return self._combine.name

    @property
    def _sizes_line(self) -> str:
        named = {"SPLITS": "splits", "PARTS": "rows * splits"}
        return ", ".join(named.get(name, name) for name in self._text.sizes)

    @property
    def more_constants(self) -> str:
        split = ', "SPLIT": splits > 1' if self.is_split else ""
        return split + (', "SHARE": config.share' if has_fixed_shares(self._kernel) else "")

    @property
    def combine_tensors(self) -> str:
        tensors, *_ = self._combine.parameter_lines
        return ", ".join(name.removesuffix("_ptr").replace("O", "o") for name in tensors)

    @property
    def combine_numbers(self) -> list[str]:
        _, *strides, _, _ = self._combine.parameter_lines
        lines = []
        for arg, names in zip(self.module.outputs, strides, strict=True):
            at = dict(zip(arg.strides, range(len(arg.strides)), strict=True))
            lines.append(", ".join(f"{arg.tensor.name}.stride({at[name]})" for name in names))
        return [*lines, "H, M, splits, rows * splits"]


def _quotient(x: str, size: str) -> str:
    return f"triton.cdiv({x}, {size})"
