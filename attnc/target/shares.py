"""How a decode call is shared out between programs: text of its preparation, alike for every target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from attnc.model.tensors import DType
from attnc.plan.decode import MOST_SPLITS, has_fixed_shares
from attnc.plan.device import DEVICES
from attnc.plan.ir import Kernel
from attnc.target.triton.decode import DecodeText

#: Prints a quotient, rounded up.
Quotient: TypeAlias = Callable[[str, str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesText:
    """Text of the tiles and shares of one call, and the numbers that `templates/_splits.py.jinja` prints.

    longest: the most keys of a sequence; most: shares that a grid has room for, None: any number.
    """

    kernel: Kernel
    text: DecodeText
    longest: str
    quotient: Quotient
    most: int | None = None
    #: The model of time by which shares are counted, in bytes that a multiprocessor reads meanwhile: to start
    #: and end a wave of programs, and to launch the kernel that joins the shares. Measured on an H200, like
    #: `idle_gain`.
    wave_bytes: ClassVar[int] = 96 << 10
    combine_bytes: ClassVar[int] = 96 << 10
    most_counted: ClassVar[int] = MOST_SPLITS

    @property
    def tiles(self) -> str:
        """Tiles of the rows of all K/V heads."""
        heads = self.text.kv_heads if self.text.group is not None else "H"
        each = self.quotient(self.text.all_rows, "config.BLOCK_M")
        return f"{each} * B" + ("" if heads == "1" else f" * {heads}")

    @property
    def lines(self) -> Iterator[str]:
        """To `splits`, the number of shares, over `tiles` and `rows`."""
        yield f"tiles = {self.tiles}"
        yield f"key_tiles = {self.quotient(self._visited, 'config.BLOCK_N')}"
        yield "rows = B * H * M"
        sizes = f"config.BLOCK_N * {self._key_bytes}, rows * {4 * self.part_width}"
        counted = f"_splits(tiles, key_tiles, {sizes}, config, q.device)"
        if not has_fixed_shares(self.kernel):
            yield f"splits = config.splits or {counted}"
            return
        yield f"fixed = {self.quotient(self.longest, 'config.share')} if config.share else 0"
        yield f"splits = fixed or config.splits or {counted}"
        if self.most is not None:
            yield f"if splits > {self.most}:"
            yield f"    least = {self.quotient(self.longest, str(self.most))}"
            message = (
                f"config: expected at most {self.most} shares, of {{least}} keys at least, got {{splits}}"
            )
            yield f'    raise ValueError(f"{message}")'

    @property
    def part_width(self) -> int:
        """Numbers that the result of a row's share consists of: o and lse."""
        return self.text.dv + 1

    @property
    def _visited(self) -> str:
        """Keys that the rows of a tile visit at most: all that a cache has room for, or a window."""
        split = self.kernel.split
        if split is None or split.reach is None:
            return self.longest
        return f"min({self.longest}, {split.reach} + config.BLOCK_M)"

    @property
    def _key_bytes(self) -> int:
        """Of a key and its value, as far as that is not in the key."""
        columns = self.text.d + (0 if self.text.rows("v").tensor == "k" else self.text.dv)
        return columns * DType(self.text.module.variant.attention.q.dtype).bytes

    @property
    def idle_gain(self) -> float:
        """How much faster a multiprocessor reads while others idle."""
        return 1.2 if self.text.pages else 1.3

    @property
    def staging(self) -> str:
        """Major capabilities of devices where some config takes more shared memory; empty: there are none."""
        if self.kernel.split is None or not any(self.kernel.split.staged):
            return ""
        readers = {device.capability // 10 for device in DEVICES.values() if device.has_mma_from_shared}
        return ", ".join(map(str, sorted(readers)))
