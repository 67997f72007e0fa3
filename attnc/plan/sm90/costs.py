"""What waves of tiles take under each config of a forward kernel, as text over the sizes of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnc.expr.nodes import show
from attnc.model.attention import Attention
from attnc.model.schedule import HopperConfig
from attnc.model.tensors import Role
from attnc.plan.signature import feature, longest
from attnc.plan.sm80.layout import MMA
from attnc.plan.sm90.configs import STAGES_OF_FEW, hides_last_keys
from attnc.plan.sm90.layout import PIECE, Sm90Layout

#: What a tile of queries takes on an H200 by (consumers, blocks, keys of a tile): once, and for each key, in
#: tenths of a nanosecond. Heads of 64 columns, no mask.
_TIMES: Mapping[tuple[int, int, int], tuple[int, int]] = {
    (2, 1, 128): (12500, 81),
    (4, 1, 64): (15000, 153),
    (2, 2, 64): (12000, 168),
}


#: What as many rows take under a causal mask by tiles of three warpgroups and of two; the same where rows
#: begin within sectors of 32 bytes; keys in whose time a tile of two begins and ends, beyond one of three.
_TIMES_OF_ROWS, _TIMES_OF_SECTORS, _BEGUN = (97, 100), (100, 115), 300


def costs_of(attention: Attention, layout: Sm90Layout, configs: Sequence[HopperConfig]) -> tuple[str, ...]:
    """Returns the time of waves of tiles under each config, as texts over the sizes of a call; nothing if
    times are not known, or if the host does not know the lengths.
    """
    if [config.consumers for config in configs] == [3, 2] and hides_last_keys(attention):
        are_whole = not any(feature(x) % MMA for x in (attention.q, attention.v))
        rows = zip(configs, _TIMES_OF_ROWS if are_whole else _TIMES_OF_SECTORS, (0, _BEGUN), strict=True)
        return tuple(
            f"{time} * (N + {begun}) * max({2 * config.tile_q} * multiprocessors(),"
            f" M * B * H + {config.tile_q // 2} * multiprocessors())"
            for config, time, begun in rows
        )
    if attention.q.storage.is_packed and attention.k.storage.is_packed:
        return _costs_of_packed(attention, configs)
    times = [_TIMES.get((config.consumers, config.blocks, config.tile_kv)) for config in configs]
    more = layout.pair or layout.vectors or layout.columns or layout.draws or layout.capped or layout.narrow
    plain = attention.q.storage.is_plain and attention.k.storage.is_plain
    if not layout.shares or len(configs) < 2 or None in times or more or not plain:
        return ()
    return tuple(
        f"cdiv(cdiv(M, {config.tile_q}) * B * H, {config.blocks} * multiprocessors())"
        f" * ({_start_of(config, start)} + {rate * config.tile_kv} * cdiv(N, {config.tile_kv}))"
        for config, (start, rate) in zip(configs, filter(None, times), strict=True)
    )


#: Tokens of a packed sequence, on average, up to which a call takes the second of two configs, with two
#: blocks on a multiprocessor: half as many rows, or keys, of a tile lie beyond the end of a sequence. Of
#: heads of 128 columns under a causal mask and without one, of narrower heads, and of those of 64 columns,
#: which take it for longer ones too where each multiprocessor has so many tiles. Measured on an H200.
_SHORT, _SHORT_OF_ALL, _SHORT_OF_NARROW, _SHORT_OF_64, _MANY = 640, 256, 192, 256, 4
#: Columns up to which two blocks of a warpgroup each share a multiprocessor.
WIDEST_OF_TWO = 128


def _costs_of_packed(attention: Attention, configs: Sequence[HopperConfig]) -> tuple[str, ...]:
    if [config.blocks for config in configs] != [1, 2]:
        return ()
    width, tokens = max(feature(attention.q), feature(attention.v)), show(longest(attention, Role.QUERY))
    if width <= PIECE:
        few = f"(({tokens} // {configs[0].tile_q} + B) * H <= {_MANY} * multiprocessors())"
        return f"1 - ({tokens} > {_SHORT_OF_64} * B) * {few}", f"({tokens} > {_SHORT_OF_64} * B) * {few}"
    of_widest = _SHORT if hides_last_keys(attention) else _SHORT_OF_ALL
    most = of_widest if width == WIDEST_OF_TWO else _SHORT_OF_NARROW
    return f"{tokens} <= {most} * B", f"{tokens} > {most} * B"


#: What two stages in place of four take off the start of a tile in blocks that share a multiprocessor, and
#: put on where there are more than two tiles of keys: 2 to 4 % each way on an H200.
_SAVED, _ADDED = 700, 2000


def _start_of(config: HopperConfig, start: int) -> str:
    if config.blocks == 1 or config.stages != STAGES_OF_FEW:
        return str(start)
    return f"{start - _SAVED} + {_ADDED} * (N > {STAGES_OF_FEW * config.tile_kv})"
