"""The backward of the Hopper target by wgmma: which kernels it makes, and how they lie on the machine.

`dkdv` makes dk and dv, and with `accumulate.dq = atomic` or `ordered` dq. A block keeps 128 keys, 64 for each
of two warpgroups that multiply; a third copies K and V once, and tiles of Q and dO. S^T = K Q^T and
dP^T = V dO^T are accumulators in registers, which rounded to 16 bits are left operands of dV += P^T dO and
dK += dS^T Q. dQ = dS K sums over the keys of both warpgroups: dS goes through shared memory, and dQ is added
to f32 sums, in any order or by turns. Accumulators of dK, dV, S^T, dP^T and dQ decide the queries of a tile:
128 up to a head dimension of 64, 64 up to one of 128.

Wider ones leave no room for both dK and dV of 64 keys in a warpgroup. There a block keeps 64 keys, and each
warpgroup has one of the two for all of them: that of dV multiplies S^T, that of dK dP^T, and P goes from the
one to the other through shared memory. What dK needs of a score besides P (its slope, or what dropout keeps)
it would have to compute again: then they have a kernel each, `dv` and `dk`, of 128 keys, which both compute
S. dq is not summed in memory for any of these.

`dq`, of `accumulate.dq = two_pass`, is the same turned around: a block keeps 128 queries, keys come by, and
dS = P (dP - delta) is the left operand of dQ += dS K without leaving registers. Beside listed blocks `dkdv`
may keep dS, and `dq_kept` multiplies it (`kept`).

A kernel over keys walks over the queries of all heads that share them. Where there are few such walks, they
are cut into parts (`Sm90Backward.cuts_walks`), each the work of a block.

What these do not make the kernels of `cuda.sm_80` make, each by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from attnc.diagnostics import Diagnostic, warning
from attnc.expr.nodes import (
    TRUE,
    Dim,
    Index,
    walk,
)
from attnc.model.attention import Attention, Variant
from attnc.model.configs import configs
from attnc.model.schedule import Knob, Schedule, Summation, TileConfig
from attnc.plan.access import LastSection, Section
from attnc.plan.conversion import list_convertible
from attnc.plan.device import DEVICES
from attnc.plan.fitting import unsupported
from attnc.plan.gradients import has_constant_slope, wanted_loads
from attnc.plan.layout import KernelName
from attnc.plan.lists import listing_of, shares_ds, without_list
from attnc.plan.signature import feature, kv_heads, normalise
from attnc.plan.sm80.backward import plan_cuda_backward
from attnc.plan.sm80.layout import GRANULE, CudaBackwardLayout, CudaLayout, over_rows
from attnc.plan.sm90.kept import KEPT_BYTES, KEPT_TILE, can_keep_ds
from attnc.plan.sm90.layout import (
    PIECE,
    SYSTEM_BYTES,
    WGMMA_ROWS,
    entry_registers,
)
from attnc.plan.sm90.turns import Turns, turns_under

#: Warpgroups that multiply, but for short blocks of lists; rows of the tile that stays; tiles of K, and of
#: dS, of the kernel over keys.
CONSUMERS = 2
ROWS = CONSUMERS * WGMMA_ROWS
_K_TILES, DS_TILES, P_TILES = 2, 2, 2
#: Registers of a thread that copies, and of one that multiplies, by the number of warpgroups that do: all
#: that the launch holds, exactly.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, {1: 232, 2: 240}
assert all(
    entry_registers(consumers, 1, CONSUMERS // consumers) * (consumers + 1)
    == PRODUCER_REGISTERS + consumers * registers
    for consumers, registers in CONSUMER_REGISTERS.items()
)
#: Up to so many columns of q, dq is added from registers, faster than by bulk copies that add, which win
#: beyond (measured on an H200); queries of a tile, at most, whose p lies in registers both rounded and as a
#: factor of ds.
_ADDS_FROM_REGISTERS, _QUERIES_BESIDE_P = 96, 64
#: Registers of a thread for sums and left operands, at most, where rows of K or V are among these: with 224
#: of 240 ptxas serialises products.
_HOLDING = 216
#: Warps that round dq, each what one warp of a consumer has added; rows that a warp stores at once, and bytes
#: of those rows and 64 columns.
FINISH_WARPS, STORED_ROWS, _STAGED_PANEL = 8, 16, 2048
#: Warps of a block that adds dk and dv of parts; blocks for each multiprocessor, at most.
JOIN_WARPS, JOIN_BLOCKS = 8, 8
#: Bytes that a warp stages results in.
_STAGED = 4096
#: Floats behind the sums of a q tile of dQ, where it says whose turn it is: a line of the cache.
TURNS = 32
#: Keys of a tile of the kernel over queries, by the pieces of the wider of Q and V.
_KEYS_OF_DQ: Mapping[int, int] = {1: 128, 2: 96, 3: 80, 4: 64}
#: The same where these do not divide the blocks that a mask lists.
_LISTED_KEYS_OF_DQ = 64
STAGES = 2
#: What a section of heads has of the L2 cache: much less than all, for blocks are at several sections. (A
#: kernel that reads from memory twice is as many cycles long, but at a lower clock: power is limited.)
SECTIONS = Section(cache=(1, 8))
#: The same where blocks take turns: larger, so that fewer of them are at the same head.
SECTIONS_OF_TURNS = Section(cache=(2, 5))
#: What all heads of a call may have of the L2 cache to be one section, where keys have several spans: four of
#: 16k tokens and 128 columns take 1,180 us instead of 1,296 on an H200, all 32 of 4k tokens 779 and not 760.
_JOINED_SECTIONS = 3, 2
#: The last section, in tiles of one query head; and that of packed sequences. Where walks go through several
#: heads, the farthest come first in it: blocks are at all of its sequences then, whose q, do and dq have to
#: stay in the L2 cache. Walks over one head are short, and lose more by that than at the end of a launch.
LAST_SECTION, LAST_SECTION_OF_PACKED = LastSection(rounds=3), LastSection(rounds=6, sections=4)
#: The same where blocks take turns and spans of keys begin with the longest walks: 16 heads of 8k tokens take
#: 1,202 us in place of 1,311. With three rounds 32 heads of 4k tokens on 8 take 1,417 us, not 1,388.
LAST_SECTION_OF_SPANS = LastSection(rounds=2, before=0)
#: Walks over queries for each multiprocessor, fewer than which are cut into parts, and parts that it has
#: then: where the longest come first, and where blocks take turns. Tiles of queries that a part has at least
#: where packed sequences take turns, unless multiprocessors are idle: 20 of 577 tokens take 316 us, not 359.
_WALKS, _WALKS_IN_TURNS, _LEAST_TILES = (3, 6), (8, 8), 40
#: Walks for each multiprocessor, all alike, from which on keys are one span: with several, 16 heads of 4k
#: tokens take 628 us and not 648, but 24 of 4,608 tokens 1,189 and not 1,155.
_WALKS_OF_SPANS = 4
#: Query heads of a group, from which on walks are so long that as many are cut as there would be parts.
_LARGE_GROUP = 8
#: Bytes that may be skipped so that tiles lie right; of barriers and what is known of tiles.
_ALIGNMENT, _BARRIERS = 1024, 512
#: Columns of q, or of v, at most, of a kernel for dk and dv together; of all others.
_WIDEST, _WIDEST_OF_ALL = 128, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90Backward(CudaBackwardLayout):
    """As for `CudaBackward`; by_wgmma: the kernels that multiply by wgmma, the others are the same. turns:
    how blocks take turns at adding to dq; None: they add in any order. alike: all queries see all keys, so
    that no walk is longer than another. packed: sequences of queries, or of keys, follow each other. listed:
    queries and keys of a block that a mask lists, which tiles divide; 0: it lists none. Where a block has no
    whole tile of two warpgroups, one multiplies, and two blocks live on a multiprocessor. needs_p_alone: ds
    is p times dp - delta.
    """

    by_wgmma: frozenset[KernelName]
    turns: Turns | None
    alike: bool = False
    packed: bool = False
    listed: tuple[int, int] = (0, 0)
    needs_p_alone: bool = False

    @property
    def keeps_ds(self) -> bool:
        """Whether the kernel for dk and dv keeps ds, of which another makes dq (`kept`)."""
        return "dq_kept" in self.by_wgmma

    @property
    def shares_heads(self) -> bool:
        """Returns False: walks of these kernels are cut into parts of their own."""
        return False

    def consumers(self, kernel: KernelName) -> int:
        return 1 if self.listed[0 if over_rows(kernel) else 1] % ROWS else CONSUMERS

    def blocks(self, kernel: KernelName) -> int:
        return CONSUMERS // self.consumers(kernel)

    def room(self, kernel: KernelName) -> int:
        """Bytes of shared memory that a block can have beside those that live with it."""
        return min(_ROOM, DEVICES["sm_90"].shared_per_sm // self.blocks(kernel) - SYSTEM_BYTES)

    @property
    def pieces(self) -> int:
        """Buffers for 64 columns of what dP is multiplied from; 0: whole tiles of it come by."""
        return 0

    @property
    def gives_p(self) -> bool:
        return "dkdv" in self.by_wgmma and max(self.layout.d, self.layout.dv) > _WIDEST

    def walks_for_each(self, kernel: KernelName) -> int:
        """Returns how many walks over queries a multiprocessor has before several blocks share one: each sums
        dk and dv of its part, and a kernel adds those in order.
        """
        if over_rows(kernel) or kernel not in self.by_wgmma:
            return 0
        return self.walks[0]

    @property
    def walks(self) -> tuple[int, int]:
        """Walks over queries for each multiprocessor that are enough, and parts where they are fewer."""
        return _WALKS if self.turns is None else _WALKS_IN_TURNS

    @property
    def cuts_walks(self) -> bool:
        return any(map(self.walks_for_each, self.by_wgmma))

    @property
    def joined_rows(self) -> int:
        columns = 8 * 32 * JOIN_WARPS * JOIN_BLOCKS
        return columns // min(self.layout.d, self.layout.dv) if self.cuts_walks else 0

    @property
    def cuts_at_queries(self) -> bool:
        """Whether all walks over a head are cut at the same queries, and not in equal shares: the longest
        come last, and a part that began among the queries of one before it would wait for all of that.
        """
        return self.turns is not None and self.turns.to_last and not self.packed

    @property
    def spans_keys(self) -> bool:
        """Whether tiles of keys may be divided into spans of neighbours, of which each has a sum of dq and
        turns of its own. The spans with the longest walks come first, so a launch ends with short ones, and
        fewer blocks wait for each other. Where walks are alike, a span is every so many tiles.
        """
        return self.cuts_at_queries or (self.turns is not None and self.alike and not self.packed)

    def count_spans(self, cut: str, sum_bytes: str, chosen: str) -> str:
        """Returns the text for `support.sizes` of how many spans of keys have a sum of dq each, of so many
        bytes. cut: walks, heads, tiles and kv_tiles, as in `count_parts`. Where walks are alike, spans only
        keep waits short, and those of many walks are.
        """
        enough = f", {_WALKS_OF_SPANS} * multiprocessors()" if self.alike else ""
        return f"count_spans({cut}, multiprocessors(), {sum_bytes}, {chosen}{enough})"

    @property
    def joined_section(self) -> str:
        """The text for `support.sizes` of the room in which all heads of a call are one section, "" for none:
        if keys have several spans, so that the longest walks of all heads come first, and if blocks find most
        of what they read in the L2 cache all the same.
        """
        part, whole = _JOINED_SECTIONS
        return f"(SPANS > 1) * l2() * {part} // {whole}" if self.cuts_at_queries else ""

    def count_parts(self, walks: str, heads: str, tiles: str, kv_tiles: str, chosen: str) -> str:
        """Returns the text for `support.sizes` of how many parts each walk is cut into. heads, tiles: query
        heads that a walk goes through, and tiles of each; kv_tiles: of a head; chosen: what a config says.

        Walks over a single head are cut where they are fewer than multiprocessors; if all are as long as each
        other, than half of them, unless blocks take turns, which wait longer for whole walks than for parts;
        in turns under a mask that leaves some queries to each tile of keys, none is cut. Where blocks take no
        turns, parts that nearly fill two rounds of them are enough.
        """
        cut = f"{walks}, {heads}, {tiles}"
        if self.cuts_at_queries:
            return f"count_parts_in_turns({cut}, {kv_tiles}, multiprocessors(), {chosen}, SPANS)"
        few = "multiprocessors()" if self.alike == (self.turns is not None) else "multiprocessors() // 2"
        more = f", 0, cdiv({kv_tiles}, SPANS)" if self.spans_keys else f", 0, {kv_tiles}"
        if self.turns is None:
            more = ", 2 * multiprocessors()"
        elif not self.alike:
            few, more = "0", f", 0, 0, {_LEAST_TILES}" if self.packed else ""
        least, parts = self.walks
        enough = str(least)
        if heads != "1" and least < parts:
            enough = f"({least} + {parts - least} * ({heads} > {_LARGE_GROUP - 1}))"
        found = f"{cut}, {enough} * multiprocessors(), {parts} * multiprocessors(), {few}, {chosen}"
        return f"count_parts({found}{more})"

    @property
    def stores_boxes(self) -> bool:
        return bool({"dkdv", "dk", "dv"} & self.by_wgmma) and not self.gives_p

    def adds_by_bulk(self, kernel: KernelName) -> bool:
        """Returns whether dq is added by bulk copies, where blocks take no turns, and not from registers."""
        return bool(self.staged(kernel)) and self.layout.d > _ADDS_FROM_REGISTERS

    def holds_rows(self, kernel: KernelName) -> bool:
        """Returns whether a consumer has its rows of V in registers, or of K where others multiply V, as left
        operands. Products of 64 queries read 4 KB of shared memory for 32 cycles, as many as it delivers; so
        they read half of that.

        Not where K is one panel: dK is then a product of the shape of dP, and ptxas gives registers of V to
        dS in the loop, without a word (CUDA 13.0; `tests.sass.staying` tells).
        """
        if kernel != "dkdv" or not self.needs_p_alone or self.qk_panels < 2:
            return False
        return sum(self._list_registers(kernel).values()) + self._held <= _HOLDING

    @property
    def _held(self) -> int:
        """Registers of a thread for the rows of a left operand."""
        columns = self.layout.dv_multiplied
        return (max(columns, self.layout.d_multiplied) if self.gives_p else columns) // 4

    def stages_both(self, kernel: KernelName) -> bool:
        """Returns whether dk and dv fit beside each other where a warp stages results."""
        return (self.qk_panels + self.v_panels) * _STAGED_PANEL <= self.staged(kernel)

    def has_room_for_two_p(self, kernel: KernelName) -> bool:
        return self.tile(kernel)[0] <= _QUERIES_BESIDE_P

    @property
    def qk_panels(self) -> int:
        return -(-self.layout.d // PIECE)

    @property
    def v_panels(self) -> int:
        return -(-self.layout.dv // PIECE)

    @property
    def dq_columns(self) -> tuple[int, int]:
        """Columns of dQ that each warpgroup makes: those of a panel of K, and what is left of the other;
        where one panel has all, each makes them, of half of the queries.
        """
        d = self.layout.d_multiplied
        return (d, d) if self.qk_panels == 1 else (PIECE, d - PIECE)

    @property
    def shares_dq_evenly(self) -> bool:
        first, second = self.dq_columns
        return first == second

    @property
    def dq_warps(self) -> int:
        """Warps whose sums of dq leave in one copy: all where each fills what it stages results in."""
        return 4 * CONSUMERS if self.dq_columns == (PIECE, PIECE) else 1

    @property
    def finish_pitch(self) -> int:
        """The elements from a row of rounded dq to the next in shared memory: an odd number of chunks, so
        that the 8 rows of 4 pairs which a warp stores at once lie in all 32 banks.
        """
        return self.layout.d_multiplied + GRANULE

    def tile(self, kernel: KernelName) -> tuple[int, int]:
        """tile.q and tile.kv: what registers leave for S and dP beside the sums."""
        widest = max(self.qk_panels, self.v_panels)
        if kernel == "dq_kept":
            return KEPT_TILE, KEPT_TILE
        if kernel == "dq":
            keys = _KEYS_OF_DQ[widest]
            keys = keys if self.listed[1] % keys == 0 else _LISTED_KEYS_OF_DQ
            return WGMMA_ROWS * self.consumers(kernel), keys
        rows = 128 if widest == 1 and self.listed[0] % 128 == 0 else 64
        return rows, WGMMA_ROWS if self.gives_p else WGMMA_ROWS * self.consumers(kernel)

    @property
    def boxes(self) -> tuple[int, int]:
        """Queries, and keys, that are copied at once: one size for all kernels, which share tensor maps."""
        rows, keys = zip(*(self.tile(kernel) for kernel in self.by_wgmma), strict=True)
        return math.gcd(*rows), math.gcd(*keys)

    @property
    def dq_tiles(self) -> tuple[int, int]:
        choices, room = [(2, STAGES), (1, STAGES), (1, 1)], self.room("dq")
        return next((pair for pair in choices if sum(self._over_q(STAGES, *pair).values()) <= room), (1, 1))

    def shared_memory(self, config: TileConfig, kernel: KernelName) -> dict[str, int]:
        if kernel not in self.by_wgmma:
            return CudaBackwardLayout.shared_memory(self, config, kernel)
        stages, row = config.stages, 2 * PIECE
        if kernel == "dq_kept":
            k = stages * KEPT_TILE * self.qk_panels * row
            return {"k": k, "ds": stages * KEPT_BYTES, "barriers": _ALIGNMENT + _BARRIERS}
        if over_rows(kernel):
            return self._over_q(stages, *self.dq_tiles)
        queries, keys = self.tile(kernel)
        buffers = {
            "k": self.k_tiles(kernel) * keys * self.qk_panels * row,
            "v": keys * self.v_panels * row if kernel != "dv" else 0,
            "q": stages * queries * self.qk_panels * row,
            "do": (1 if kernel == "dk" else stages) * queries * self.v_panels * row,
            "ds": DS_TILES * queries * ROWS * 2 if self.adds_dq else 0,
            "p": P_TILES * queries * keys * 4 if self.gives_p else 0,
            "staged": 4 * self.consumers(kernel) * self.staged(kernel),
            "rows": stages * 2 * queries * 4 if self.reads_rows else 0,
            "barriers": _ALIGNMENT + _BARRIERS,
        }
        return {name: size for name, size in buffers.items() if size}

    def k_tiles(self, kernel: KernelName) -> int:
        has_room = kernel == "dkdv" and not self.gives_p and self.consumers(kernel) == CONSUMERS
        return _K_TILES if has_room else 1

    def staged(self, kernel: KernelName) -> int:
        """Bytes through which a warp's results leave; 0: they leave through its rows of K, or
        from registers.
        """
        if kernel == "dkdv":
            return 0 if self.gives_p or self.stores_registers(kernel) else _STAGED
        return 16 * 2 * PIECE * self.v_panels if kernel == "dv" and self.v_panels > self.qk_panels else 0

    def stores_registers(self, kernel: KernelName) -> bool:
        """Returns whether dk and dv leave from registers: two blocks have no other room."""
        return kernel == "dkdv" and self.consumers(kernel) < CONSUMERS

    def _over_q(self, stages: int, q_tiles: int, v_tiles: int) -> dict[str, int]:
        (rows, keys), row = self.tile("dq"), 2 * PIECE
        return {
            "q": q_tiles * rows * self.qk_panels * row,
            "do": q_tiles * rows * self.v_panels * row,
            "k": stages * keys * self.qk_panels * row,
            "v": (stages if v_tiles > 1 else 1) * keys * self.v_panels * row,
            "barriers": _ALIGNMENT + _BARRIERS,
        }

    def registers(self, config: TileConfig, kernel: KernelName) -> dict[str, int]:
        if kernel not in self.by_wgmma:
            return CudaBackwardLayout.registers(self, config, kernel)
        held = {"k or v" if self.gives_p else "v": self._held} if self.holds_rows(kernel) else {}
        return {**self._list_registers(kernel), **held}

    def _list_registers(self, kernel: KernelName) -> dict[str, int]:
        rows, keys = self.tile(kernel)
        if kernel == "dq_kept":
            return {"dq": self.layout.d_multiplied // 2, "ds": keys // 4}
        if over_rows(kernel):
            return {"dq": self.layout.d_multiplied // 2, "s": keys // 2, "dp": keys // 2}
        if self.gives_p:  # of the warpgroup with the wider sums
            widest = max(self.layout.d_multiplied, self.layout.dv_multiplied)
            return {"dk or dv": widest // 2, "p": rows // 2, "dp": rows // 2}
        registers = {
            "dk": self.layout.d_multiplied // 2 if kernel != "dv" else 0,
            "dv": self.layout.dv_multiplied // 2 if kernel != "dk" else 0,
            "s": rows // 2,
            "dp": rows // 2 if kernel != "dv" else 0,
            "dq": max(self.dq_columns) // 2 if self.adds_dq else 0,
        }
        return {name: count for name, count in registers.items() if count}


_ROOM = DEVICES["sm_90"].shared_per_block


def plan_sm90_backward(variant: Variant, schedule: Schedule, layout: CudaLayout) -> CudaBackwardLayout:
    """Returns how the kernels of a schedule lie; a `Sm90Backward` where wgmma makes some of them."""
    plan = plan_cuda_backward(variant, schedule, layout)
    by_wgmma: frozenset[KernelName] = frozenset(_by_wgmma(variant, accumulate_of_dq(variant, schedule)))
    if not by_wgmma:
        return plan
    if can_keep_ds(variant, by_wgmma):
        by_wgmma |= {"dq_kept"}
    return Sm90Backward(
        **{field.name: getattr(plan, field.name) for field in fields(plan)},
        by_wgmma=by_wgmma,
        turns=turns_under(normalise(variant.attention).mask)
        if accumulate_of_dq(variant, schedule) == "ordered"
        else None,
        alike=variant.attention.mask == TRUE,
        packed=any(t.storage.is_packed for t in (variant.attention.q, variant.attention.k)),
        needs_p_alone=is_p_enough(normalise(variant.attention)),
        listed=(0, 0) if (listing := listing_of(variant.attention)) is None else (listing.rows, listing.keys),
    )


def accumulate_of_dq(variant: Variant, schedule: Schedule) -> str | None:
    """Returns how dq is summed; None where it is not asked for."""
    wanted = "q" in variant.attention.grads
    return configs(schedule, "backward", variant)[0].accumulate("q") if wanted else None


def check_turns(variant: Variant, schedule: Schedule, knob: Knob) -> Iterator[Diagnostic]:
    """Yields why blocks cannot take turns at adding to dq, as `knob` asks for."""
    is_one = "dkdv" in _by_wgmma(variant, "ordered")
    mask = normalise(variant.attention).mask
    reason = turns_under(mask).why_not if is_one else "no kernel of wgmma makes dk, dv and dq"
    if reason:
        yield unsupported(
            "blocks cannot take turns at adding to dq here",
            knob.span,
            reason,
            "write 'accumulate.dq = two_pass', the same bits in every run as well",
        )


def adds_dq(variant: Variant, way: str) -> bool:
    """Returns whether one kernel of wgmma makes dk and dv and adds dq in memory, in this way to sum it."""
    return way in ("atomic", "ordered") and "dkdv" in _by_wgmma(variant, way)


def sum_of_dq(variant: Variant, *, deterministic: bool) -> Summation:
    """Returns the fastest way to sum dq; deterministic: of those that give the same bits in every run. Where
    wgmma makes dq, dk and dv in one kernel, no other way has as few products.
    """
    attention = normalise(variant.attention)
    if not adds_dq(variant, "atomic") or list_convertible(variant.attention):  # beside no dk and dv
        return "two_pass"
    if not deterministic:
        return "atomic"
    return "two_pass" if turns_under(attention.mask).why_not else "ordered"


#: How many times as long gradients by mma.sync take as those by wgmma, at least: at d256, in
#: `backward_cuda_h200` and `backward_hopper_h200`.
WITHOUT_WGMMA = 1.8


def check_sums(variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
    """Warns of a way to sum dq that leaves kernels to mma.sync which wgmma makes with another."""
    knob = schedule.phases["backward"].get("accumulate.dq")
    asked = accumulate_of_dq(variant, schedule)
    best = sum_of_dq(variant, deterministic=asked != "atomic")
    if knob is None or knob.span is None or asked == best:
        return
    here, there = (set(_by_wgmma(variant, way)) for way in (asked, best))
    if there <= here:
        return
    lost, which = " and ".join(sorted(there - here)), f" {variant.name}" if variant.params else ""
    yield warning(
        "W0805",
        f"'accumulate.dq = {asked}' leaves wgmma: gradients take {WITHOUT_WGMMA}x the time or more",
        knob.span,
        f"mma.sync makes those of '{variant.attention.name}'{which}",
        notes=(f"with 'accumulate.dq = {best}' wgmma makes {lost}",),
        hints=(f"write 'accumulate.dq = {best}'",),
    )


def _by_wgmma(variant: Variant, accumulate: str | None) -> Iterator[KernelName]:
    attention = without_list(normalise(variant.attention))
    grads = set(attention.grads)
    loads = [entry for entry in wanted_loads(attention) if entry.reader == "score"]
    d, dv = feature(attention.q), feature(attention.v)
    if attention.softmax.form == "stick_breaking":  # whose sums over keys are those of mma.sync's warps
        return
    if not all(t.storage.is_plain or t.storage.is_packed for t in (attention.q, attention.k, attention.v)):
        return
    if accumulate == "two_pass" and not loads and max(d, dv) <= _WIDEST_OF_ALL:
        yield "dq"
    # a kernel over queries makes other gradients, but for those of what is loaded of each key
    apart = accumulate == "two_pass" and all(x.along != ("kv",) for x in loads)
    adds_dq = accumulate in ("atomic", "ordered")
    wide = max(d, dv) > _WIDEST
    if max(d, dv) > _WIDEST_OF_ALL or (adds_dq and (wide or dv > PIECE >= d)):
        return
    if kv_heads(attention) != Dim("H") and Index("h") in walk(attention.mask):
        return
    if adds_dq and not shares_ds(variant.attention):
        return
    if ({"k", "v"} & grads or adds_dq) and (not loads or apart) and accumulate != "sequential":
        yield from ("dv", "dk") if wide and not is_p_enough(attention) else ("dkdv",)


def is_p_enough(attention: Attention) -> bool:
    """Returns whether ds = p (dp - delta) needs nothing else of the score and of what dropout keeps; ds of
    other forms is no multiple of p.
    """
    softmax = attention.softmax
    return softmax.form == "softmax" and has_constant_slope(attention) and softmax.dropout is None
