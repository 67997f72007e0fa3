"""Mistakes that attention over ranks has been found with, planted one at a time in attnc's own text: a place,
a piece of it that occurs there once, and what stands there instead.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tests.replacing import replaced

Shown: TypeAlias = Literal["rows", "parts", "holes", "sink gradient", "dropout", "decode", "decode sink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One mistake. place: `module.function` or `module.Class.method` in `attnc.distributed`; shown_by: which
    small case shows it, one of training over rows or of decoding; in_systems: where it was met, if it was.
    """

    name: str
    place: str
    old: str
    new: str
    shown_by: Shown = "rows"
    in_systems: str = ""


BUGS = (
    Bug(
        name="a transfer is dropped",
        place="moves.Moves.exchange",
        old="self.group.exchange(parcel.came,",
        new="self.group.exchange(parcel.came if self.rank else parcel.came.clone(),",
    ),
    Bug(
        name="an origin is off by one",
        place="stages.tables_of",
        old='"row_at": in_window(places), "_rows"',
        new='"row_at": in_window(places) + 1, "_rows"',
        in_systems="windows in zigzag order",
    ),
    Bug(
        name="a window ends a key early",
        place="plan.Plan.window",
        old="int(keys[-1]) + 1",
        new="int(keys[-1])",
    ),
    Bug(
        name="a partial gradient is added twice",
        place="moves.Moves.return_keys",
        old="collect(total, recipe, came, *mine, *first)",
        new="collect(total, recipe, 2 * came, *mine, *first)",
    ),
    Bug(
        name="gradients of keys are added in bf16",
        place="moves.Moves.return_keys",
        old="collect(total, recipe, came, *mine, *first)",
        new="collect(total, recipe, *(x.bfloat16().float() for x in (came, *mine, *first)))",
        in_systems="torch's Flex CP",
    ),
    Bug(
        name="keys of the backward are stale",
        place="stages.Stages.backward",
        old="window = part.open_keys()",
        new="window = coming[0].open_keys()",
        shown_by="parts",
        in_systems="diffusers #14265",
    ),
    Bug(
        name="parts of the heads take each other's queries",
        place="moves.Moves.heads",
        old="return first * group, count * group",
        new="return 0, count * group",
        shown_by="parts",
    ),
    Bug(
        name="holes of a window are not filled",
        place="moves.Moves.open_keys",
        old="return keys[:",
        new='return keys.masked_fill_(keys == 0, float("nan"))[:',
        shown_by="holes",
    ),
    Bug(
        name="the gradient of a sink is that of one rank",
        place="engine._ContextAttention.backward",
        old="total += part",
        new="total = part",
        shown_by="sink gradient",
    ),
    Bug(
        name="every rank drops what the first heads do",
        place="derive._Maker._dropout",
        old='self.table("head_first")',
        new="Const(0)",
        shown_by="dropout",
    ),
    Bug(
        name="the lse of partial results counts as base 2",
        place="decode.SpreadKeys._join_partial_results",
        old="    o, lse = join_ranks(every,",
        new="""    every = every.clone()
    every[..., every.shape[-1] - _PADDING] *= 0.6931
    o, lse = join_ranks(every,""",
        shown_by="decode",
        in_systems="sglang #33926",
    ),
    Bug(
        name="a partial result is joined twice",
        place="decode.SpreadKeys._join_partial_results",
        old="join_ranks(every,",
        new="join_ranks(torch.cat((every, every[1:2])),",
        shown_by="decode",
    ),
    Bug(
        name="a sink counts on every rank",
        place="decode.SpreadKeys._tables_for",
        old="math.inf if self.group.rank == 0 else -math.inf",
        new="math.inf",
        shown_by="decode sink",
        in_systems="TransformerEngine #2541 dropped it, which is the same mistake the other way round",
    ),
    Bug(
        name="blocks of keys go round the wrong way",
        place="decode.Spread.positions",
        old="+ rank * self.block +",
        new="+ (self.ranks - 1 - rank) * self.block +",
        shown_by="decode",
    ),
)


def planted(bug: Bug) -> AbstractContextManager[None]:
    """The mistake is there within the block. LookupError if its text is not there exactly once."""
    return replaced(f"attnc.distributed.{bug.place}", bug.old, bug.new)
