"""What decode kernels have besides: packed query heads, splits of the keys, parts of the columns."""

from __future__ import annotations

from dataclasses import dataclass

from attnc.expr.nodes import Expr
from attnc.model.schedule import Knob, Schedule, knobs_of

#: How much faster a multiprocessor reads while others idle, and where rows lie in pages; measured on an H200.
IDLE_GAIN, PAGED_IDLE_GAIN = 1.3, 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """The query heads of a KV head fill the rows of a tile: row = q_idx * group + h - h_kv * group."""

    group: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Flash-Decoding: programs share the keys lo .. hi - 1 that a row tile visits, whole tiles each.

    The bounds are found on the device, so the number of programs, which is all that a launch fixes, does not
    depend on any length. A split may be empty.

    in_turn: a split that is counted, and not of a fixed size, has every so many-th tile, so that its first
    tile is known before any length is; else its tiles follow each other.

    max_visible_keys: the most keys that one row visits, where the mask limits them to a window; None: as many
    as there are. staged: bytes of shared memory that a block of each config takes where tensor cores read
    tiles there, 0 if no more than elsewhere (`Target.staged`); staging: major capabilities of such devices,
    none if no config takes more.

    Into how many splits keys are cut follows from a model of time (`support.splits.count_splits`): idle_gain
    is how much faster a multiprocessor reads while others idle, most the splits that are considered. few:
    where a call has fewer tiles of keys for each multiprocessor, blocks share the columns of o; 0: never.
    """

    lo: Expr
    hi: Expr
    in_turn: bool
    max_visible_keys: int | None
    staged: tuple[int, ...]
    staging: tuple[int, ...]
    idle_gain: float
    most: int
    few: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Columns first .. first + width - 1 of q and k: dot(q, k) is the sum over parts.

    A head dimension far from a power of two would otherwise fill tiles with zeros.
    """

    first: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnifiedMax:
    """FlashDecoding++: every row subtracts `phi` in place of its maximum.

    low, high: where the row's largest exponent s - phi may lie; fallback: it may lie elsewhere, and the split
    is then computed again with a running maximum. All in base-2 units.
    """

    phi: float
    low: float
    high: float
    fallback: bool


def is_decode(schedule: Schedule) -> bool:
    """Whether a schedule asks for what only the decode kernel does."""
    return bool(decode_knobs(schedule))


def decode_knobs(schedule: Schedule) -> tuple[Knob, ...]:
    """The keys by which it asks for it."""
    knobs = knobs_of(schedule, "forward")
    loops, pack, split = (knobs.get(key) for key in ("loops", "pack", "split.kv"))
    asking = (
        loops if loops and ("kv",) in loops.choices else None,
        pack if pack and "gqa" in pack.choices else None,
        split if split and any(choice != 1 for choice in split.choices) else None,
    )
    return tuple(knob for knob in asking if knob)
