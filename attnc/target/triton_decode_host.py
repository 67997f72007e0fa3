"""The callable of a decode kernel: what is prepared once for all calls alike, and the launches themselves."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.model.tensors import DType
from attnc.plan.decode import MOST_SPLITS
from attnc.plan.ir import Kernel, Module
from attnc.target.triton_decode import DecodeText, has_fixed_shares
from attnc.target.triton_host import HostText

#: The model of time by which shares are counted. In bytes that a multiprocessor reads meanwhile: to start and
#: end a wave of programs, and to launch the kernel that joins the shares. And how much faster a
#: multiprocessor reads while others idle, rows in a tensor and rows in pages. Measured on an H200.
WAVE_BYTES, COMBINE_BYTES, IDLE_GAIN, PAGED_IDLE_GAIN = 96 << 10, 96 << 10, 1.3, 1.2
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
        self.most_splits = MOST_SPLITS
        self.wave_bytes, self.combine_bytes = WAVE_BYTES, COMBINE_BYTES
        self.idle_gain = PAGED_IDLE_GAIN if text.paged else IDLE_GAIN
        self.part_width = text.dv + 1

    @property
    def parameters(self) -> list[str]:
        counter = ["fallbacks: torch.Tensor | None = None"] if self.counts_fallbacks else []
        return [*super().parameters, *counter]

    @property
    def counts_fallbacks(self) -> bool:
        return self._kernel.unified is not None and self._kernel.unified.fallback

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
        yield f"tiles = {self._tiles}"
        if not self.is_split:
            return
        yield f"key_tiles = triton.cdiv({most_visited(self._kernel, self.longest)}, config.BLOCK_N)"
        yield "rows = B * H * M"
        size = DType(self.module.variant.attention.q.dtype).bytes
        columns = self._text.d + (0 if self._text.rows("v").tensor == "k" else self._text.dv)
        tile = f"config.BLOCK_N * {columns * size}"
        part = f"rows * {4 * self.part_width}"
        auto = f"_splits(tiles, key_tiles, {tile}, {part}, config.shared, q.device)"
        if has_fixed_shares(self._kernel):
            yield f"fixed = triton.cdiv({self.longest}, config.share) if config.share else 0"
            yield f"splits = config.splits or fixed or {auto}"
            yield f"if splits > {_MOST_PROGRAMS}:"
            yield f"    least = triton.cdiv({self.longest}, {_MOST_PROGRAMS})"
            message = "config: expected shares of at least {least} keys, got {config.share}"
            yield f'    raise ValueError(f"{message}")'
        else:
            yield f"splits = config.splits or {auto}"

    @property
    def _tiles(self) -> str:
        text = self._text
        heads = {"1": ""}.get(text.kv_heads, f" * {text.kv_heads}") if text.group is not None else " * H"
        rows = "M" if text.group is None else f"M * {text.group}"
        return f"triton.cdiv({rows}, config.BLOCK_M) * B{heads}"

    @property
    def scratch(self) -> list[str]:
        return ["parts"] if self.is_split else []

    @property
    def scratch_layouts(self) -> str:
        return f"((rows * splits * {self.part_width},), (1,)),"

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
        return "tiles, splits" if self.is_split else "tiles,"

    @property
    def combine_warps(self) -> int:
        """So many that a thread holds a row of two shares at most; more only wait for each other."""
        return min(max(self._text.block_dv // 64, 2), 8)

    @property
    def combine_kernel(self) -> str:
        return self._text.combine_name

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
        tensors, *_ = self._text.combine_lines
        return ", ".join(name.removesuffix("_ptr").replace("O", "o") for name in tensors)

    @property
    def combine_numbers(self) -> list[str]:
        _, *strides, _, _ = self._text.combine_lines
        lines = []
        for arg, names in zip(self.module.outputs, strides, strict=True):
            at = dict(zip(arg.strides, range(len(arg.strides)), strict=True))
            lines.append(", ".join(f"{arg.tensor.name}.stride({at[name]})" for name in names))
        return [*lines, "H, M, splits, rows * splits"]


def most_visited(kernel: Kernel, longest: str) -> str:
    """Keys that the rows of a tile visit at most: all that a cache has room for, or a window."""
    if kernel.split is None or kernel.split.reach is None:
        return longest
    return f"min({longest}, {kernel.split.reach} + config.BLOCK_M)"
