"""From the number of a block's tile to its place, in the CUDA kernels of all targets and passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attnc.plan.access import Sequences, TileWalk
from attnc.target.locals import local
from attnc.target.sm80.printer import scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaWalk:
    """The walk of one kernel as text. of_call: what stands before a size that is an argument of the call, ""
    where it is a local of the same name; section: the argument with the heads of a section; last_rounds:
    the last section has so many tiles for each block at least, 0: none is larger than the others.
    """

    walk: TileWalk
    of_call: str
    section: str = "SECTION"
    last_rounds: int = 0

    @property
    def tiles(self) -> str:
        """How many tiles a head has, over all sequences if they are packed."""
        size, rows = self.walk.size, f"{self.of_call}{scalar(self.walk.rows)}"
        if self.walk.sequences is not None:
            return f"{rows} / {size} + {self.of_call}B + 1"
        return f"{rows} / {size}" if self.walk.is_padded else f"({rows} + {size} - 1) / {size}"

    @property
    def all_heads(self) -> str:
        """Heads that have tiles of their own: those of all sequences, unless they are packed."""
        return self.walk.heads if self.walk.sequences is not None else f"B * {self.walk.heads}"

    @property
    def place(self) -> Iterator[str]:
        """From `tile` to b, the head and the first row, and to the length of a packed sequence."""
        tiles, lo, size, head = self.walk.tiles, self.walk.lo, self.walk.size, self.walk.head
        section, in_section = f"args.{self.section}", f"{tiles} * args.{self.section}"
        if self.last_rounds:
            yield "// The last section is larger, so that what begins last is short, and nobody waits."
            yield f"const int last = ({self.last_rounds} * (int)gridDim.x + {tiles} - 1) / {tiles};"
            yield f"const int others = max(({self.all_heads} - last) / {section}, 1) * {section};"
            yield f"const int first_head = min(tile / ({in_section}) * {section}, others);"
            yield f"const int heads = first_head < others ? {section} : {self.all_heads} - others;"
            yield f"const int rank = tile - first_head * {tiles};"
        else:
            yield f"const int first_head = tile / ({in_section}) * {section};"
            heads = f"min({section}, {self.all_heads} - first_head)"
            yield f"const int heads = {heads}, rank = tile % ({in_section});"
        if self.walk.sequences is not None:
            yield f"const int {head} = first_head + rank % heads, number = rank / heads;"
            yield from self.of_sequence(self.walk.sequences, size)
            return
        number = "first_head + rank % heads"
        tile = f"({tiles} - 1 - rank / heads)" if self.walk.last_first else "rank / heads"
        yield f"const int {lo} = {tile} * {size};"
        yield f"const int b = ({number}) / {self.walk.heads}, {head} = ({number}) % {self.walk.heads};"

    def of_sequence(self, sequences: Sequences, size: str) -> Iterator[str]:
        """From `number` among the tiles of packed sequences, of `size` rows, to the sequence of the tile."""
        cu, count, lo = sequences.cu_seqlens, f"{self.of_call}B", self.walk.lo
        first, end = ("q_first", "q_end") if self.walk.axis == "q" else ("k_first", "k_end")
        begins = f"args.{cu}_ptr[{{}} * args.stride_{cu}_0]"
        found = f"args.{cu}_ptr, args.stride_{cu}_0, number, {count}, {size}"
        behind = f"{self.of_call}{scalar(sequences.rows)}" if self.walk.axis == "q" else first
        yield f"const int sequence = find_sequence({found});"
        yield f"const int {first} = {begins.format('sequence')};"
        yield f"const int {end} = sequence < {count} ? {begins.format('(sequence + 1)')} : {behind};"
        forwards, backwards = f"number - {first} / {size} - sequence", f"{end} / {size} + sequence - number"
        place = f"{lo} = ({backwards if self.walk.last_first else forwards}) * {size}"
        entry = local("const int", b=f"min(sequence, {count} - 1)")
        if self.walk.writes_all_rows:
            yield f"const int q_rows = {end} - {first}, {place};"
            yield "// what follows the last sequence has rows to write, but no queries"
            yield f"int M = sequence < {count} ? q_rows : 0;"
            yield entry
            return
        yield f"const int {place};"
        yield entry
        if self.walk.axis == "q":
            none = "what follows the last sequence has no queries"
            yield f"int M = sequence < {count} ? {end} - {first} : 0;  // {none}"
        else:
            yield f"int N = {end} - {first};  // what follows the last sequence has no keys"
