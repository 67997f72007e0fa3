"""Gradients of listed blocks with five products in place of seven, and the same bits as in two passes.

The kernel for dk and dv has ds of each tile in registers, rounded. It leaves them in memory, and a kernel
that comes after it multiplies them by K: no score is computed twice, and sums of dq have the order of the
list. A list says how many tiles a block of queries has at most, and the rank of a block in it is the place of
its tile: 32 KB for each entry of a list and query head. All at once may be more than there is room for, so
both kernels run in rounds of some heads (`support.sizes.count_kept`). Where not even one K/V head fits, two
passes remain.

ds of a pair that the mask hides is never read: the kernel for dq tests the mask again where a tile is
partial. So the two may walk over different tiles at the edges of a mask.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from attnc.expr.nodes import Load, show, walk
from attnc.model.attention import Attention, Variant
from attnc.model.tensors import Role
from attnc.plan.decay import decay_of
from attnc.plan.ir.backward import Backward, BackwardKernel, Rounds
from attnc.plan.layout import KernelName
from attnc.plan.lists import Listing, listing_of
from attnc.plan.regions import kept_by_some
from attnc.plan.signature import normalise
from attnc.plan.sm90.layout import WGMMA_ROWS

#: Queries and keys of a tile of ds, which both warpgroups share, and its bytes; tiles of K and ds that are on
#: their way.
KEPT_TILE, KEPT_STAGES = 2 * WGMMA_ROWS, 3
KEPT_BYTES = 2 * KEPT_TILE * KEPT_TILE
#: Walks over queries that a round of some heads has for each multiprocessor, at least. With fewer it lasts as
#: long as its longest, and two passes take as long, or less (one H200, 10 to 25 % of all blocks).
LEAST_WALKS = 4


def can_keep_ds(variant: Variant, by_wgmma: Collection[KernelName]) -> bool:
    """Returns whether these are gradients in two passes, of listed blocks of whole tiles, beside a mask that
    positions alone decide. by_wgmma: the kernels that wgmma makes.
    """
    attention, listing = normalise(variant.attention), listing_of(variant.attention)
    if listing is None or listing.knows_full or not {"dq", "dkdv"} <= {*by_wgmma}:
        return False
    if not listing.rows or listing.rows % KEPT_TILE or listing.keys % KEPT_TILE:
        return False
    tensors = (attention.q, attention.k, attention.v)
    if attention.lengths or not all(x.storage.is_plain for x in tensors):
        return False
    if decay_of(attention, "kv") is not None:  # which leaves tiles out that the mask keeps
        return False
    return kept_by_some(listing.rest) is None and not any(isinstance(x, Load) for x in walk(listing.rest))


def take_ds(dq: BackwardKernel) -> BackwardKernel:
    """Returns the kernel that makes dq of what is kept, in place of this one, but for its roles."""
    configs = tuple(replace(x, tile_kv=KEPT_TILE, stages=KEPT_STAGES) for x in dq.configs[:1])
    return replace(dq, name=f"{dq.name}_kept", configs=configs, takes_ds=True)


#: Whether ds is kept, and whether a round is the first or the last, as sizes say it.
_KEPT, _NOT_KEPT, _FIRST, _LAST = "KEPT_HEADS > 0", "KEPT_HEADS == 0", "ROUND == 0", "ROUND == ROUNDS - 1"


def plan_rounds(backward: Backward, last: BackwardKernel, attention: Attention, listing: Listing) -> Rounds:
    """Returns the rounds in which kernels of a backward run that keeps ds. last: the kernel that takes it;
    listing: the blocks that the mask lists.

    LIST_TILES: of keys, that a list has at most; HEAD_BYTES: of ds of a K/V head; KEPT_HEADS: K/V heads whose
    ds is kept at once, 0 for none; HEADS_AT_ONCE: K/V heads of a round; ROUND_WALKS: over queries.
    """
    assert backward.preprocess is not None
    dq, dkdv = (planned.name for planned in backward.kernels)
    kv_heads, join = show(attention.k.size(Role.HEAD)), f"{attention.name}_backward_join"
    shares_keys, heads, tiles = kv_heads != "H", f"B * {kv_heads}", listing.keys // KEPT_TILE
    list_tiles = f"min({show(listing.condition.extents[-1])}, list_blocks)"
    at_once = "HEADS_AT_ONCE * G" if shares_keys else "HEADS_AT_ONCE"
    round_heads = "ROUND_HEADS // G" if shares_keys else "ROUND_HEADS"
    walks, config = "cdiv(N, dkdv_config.BLOCK_N)", last.configs[0]
    own = {"BLOCK_N": config.tile_kv, "STAGES": config.stages, "shared": last.shared[0]}
    return Rounds(
        sizes={
            "LIST_TILES": f"{list_tiles} * {tiles}" if tiles > 1 else list_tiles,
            "HEAD_BYTES": f"{'G * ' if shares_keys else ''}cdiv(M, {KEPT_TILE}) * LIST_TILES * {KEPT_BYTES}",
            "KEPT_HEADS": (
                f"count_kept(HEAD_BYTES, {heads}, kept_room(), dkdv_config.kept, {walks}, "
                f"{LEAST_WALKS} * multiprocessors())"
            ),
            "HEADS_AT_ONCE": f"KEPT_HEADS + {heads} * ({_NOT_KEPT})",
            "ROUNDS": f"cdiv({heads}, HEADS_AT_ONCE)",
        },
        of_round={
            "FIRST_HEAD": f"ROUND * {at_once}",
            "ROUND_HEADS": f"min({at_once}, B * H - FIRST_HEAD)",
            "ROUND_WALKS": f"{walks} * {round_heads}",
        },
        passed=("LIST_TILES", "FIRST_HEAD", "ROUND_HEADS"),
        heads=("ROUND_HEADS", round_heads),
        workspaces={"_ds": "u8[KEPT_HEADS, HEAD_BYTES]"},
        forms={
            backward.preprocess.name: (({}, _FIRST),),
            dq: (({}, _NOT_KEPT),),
            dkdv: (({"kept": "0"}, _NOT_KEPT), ({"kept": "1"}, _KEPT)),
            last.name: (({name: str(size) for name, size in own.items()}, _KEPT),),
            join: (({}, _LAST),),
        },
    )
