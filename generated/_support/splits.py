# Copied by `attnc compile`, from attnc/support. Do not edit.
"""How many programs share the keys of a sequence in decoding."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .configs import shared_on
from .devices import Gpu
from .sizes import Names, evaluate

#: Bytes that a multiprocessor reads while a wave of programs starts and ends, and while the kernel that joins
#: the splits is launched; measured on an H200.
_WAVE_BYTES, _COMBINE_BYTES = 96 << 10, 96 << 10
#: Of two programs on a multiprocessor: how many times as long reading takes them as one alone, and bytes that
#: one alone could read while it starts and ends, which nothing hides; measured on an H200.
_IN_PAIRS, _ALONE_BYTES = 1.1, 24 << 10
#: The share of a call's time that is clearly less of it; how many times as long is nearly as fast; tiles of a
#: short sequence, at most.
_CLEARLY, _ABOUT, _SHORT = 0.92, 1.02, 8


@dataclass(frozen=True)
class Split:
    """How the keys of a sequence are split. tiles, key_tiles: of a call, and of a sequence; key_bytes: of a
    key and its value; width: numbers that the result of a split row has; keys: of the longest sequence.

    idle_gain: how much faster a multiprocessor reads while others idle; staging: major capabilities on
    which a block takes `config.staged` bytes of shared memory; most: splits that a grid has room for;
    counted: that are considered.

    rows: of a call that splits find something of.

    trips: what a byte of a partial result costs, which is written and read again, in bytes of keys; measured
    on an H200.

    block_share: of what a multiprocessor can read, what a block does alone.

    columns: of a result, of which a block has `config.BLOCK_D`, 0: all; few: fewer tiles of keys for each
    multiprocessor than which are for blocks that share them.

    segment: keys of a split whose sums are joined in the order of a spec; 0: splits may be of any size.

    short: tiles of keys that a block walks over, up to which the config of the fewest stages comes first.
    """

    tiles: str
    key_tiles: str
    key_bytes: int
    width: int
    keys: str = "N"
    idle_gain: float = 1.3
    staging: tuple[int, ...] = ()
    most: int | None = None
    counted: int = 128
    trips: int = 3
    columns: int = 0
    few: int = 0
    block_share: float = 1.0
    segment: int = 0
    short: int = 0
    rows: str = "B * H * M"

    def check(self, config: Any) -> None:
        """ValueError for a caller's config under which keys would be left out, or counted twice."""
        keys, tile = getattr(config, "split_size", 0), config.BLOCK_N
        if config.splits < 0:
            raise ValueError(f"config: expected splits of 0 or more, got {config.splits}")
        # longer ones lose keys, others change what is added to what
        if self.segment and keys != self.segment:
            raise ValueError(
                f"config: expected a split_size of {self.segment}, the keys of a segment of the spec's order,"
                f" got {keys}"
            )
        if keys < 0 or keys % tile:
            raise ValueError(
                f"config: expected a split_size that is a multiple of BLOCK_N = {tile}, got {keys}"
            )

    def in_order(self, configs: Sequence[Any], names: Names, gpu: Gpu) -> Sequence[Any]:
        """Returns the configs, those first whose blocks suit the number of tiles of a call."""
        if self.short:
            return self._shallow_first(configs, names, gpu)
        if not self.few:
            return self._least_first(configs, names, gpu)
        sizes = _with_tiles(names, configs[0])
        keys = evaluate(self.tiles, sizes) * evaluate(self.key_tiles, sizes)
        is_few = keys < self.few * gpu.multiprocessors
        return sorted(configs, key=lambda config: (self.columns > config.BLOCK_D) != is_few)

    def _shallow_first(self, configs: Sequence[Any], names: Names, gpu: Gpu) -> Sequence[Any]:
        """Returns the configs, that of the fewest stages first where walks over keys are short."""
        first = configs[0]
        splits = first.splits or self._plan(names, first, gpu)[0]
        walked = -(-evaluate(self.key_tiles, _with_tiles(names, first)) // splits)
        return sorted(configs, key=lambda config: int(config.STAGES)) if walked <= self.short else configs

    def _least_first(self, configs: Sequence[Any], names: Names, gpu: Gpu) -> Sequence[Any]:
        """Returns the configs, that of tiles of fewer keys first where more programs live on a multiprocessor
        at once and a call takes clearly less by that: of short sequences, whose programs start and end often.
        """
        first = configs[0]
        alike = [x for x in configs if _is_alike(x, first) and self.room(x, gpu) <= gpu.shared]
        if self.segment or self.columns or len(alike) < 2:
            return configs
        if evaluate(self.key_tiles, _with_tiles(names, first)) > _SHORT:
            return configs
        costs = [self._plan(names, x, gpu)[1] for x in alike]
        most = min(costs) * _ABOUT  # of tiles that are as fast the largest
        chosen = next(x for x, cost in zip(alike, costs, strict=True) if cost <= most)
        return (chosen, *configs) if min(costs) < _CLEARLY * costs[0] else configs

    def _plan(self, names: Names, config: Any, gpu: Gpu) -> tuple[int, float]:
        sizes = _with_tiles(names, config)
        return plan_splits(
            evaluate(self.tiles, sizes) * (self.columns // config.BLOCK_D if self.columns else 1),
            evaluate(self.key_tiles, sizes),
            config.BLOCK_N * self.key_bytes,
            evaluate(self.rows, sizes) * 4 * self.width,
            self.room(config, gpu),
            gpu,
            self.idle_gain,
            self.counted,
            self.trips,
            self.block_share,
        )

    def sizes(self, names: Names, config: Any, gpu: Gpu) -> dict[str, int]:
        """tiles, rows, SPLITS and SPLIT_ROWS (rows * SPLITS) of a call. ValueError for too many splits."""
        tiles, rows = evaluate(self.tiles, names), evaluate(self.rows, names)
        split_size = getattr(config, "split_size", 0)
        keys = evaluate(self.keys, names)
        fixed = -(-keys // split_size) if split_size else 0
        splits = fixed or config.splits or self._plan(names, config, gpu)[0]
        if self.most is not None and splits > self.most:
            least = -(-keys // self.most)
            raise ValueError(
                f"config: expected at most {self.most} splits, of {least} keys at least, got {splits}"
            )
        return {"tiles": tiles, "rows": rows, "SPLITS": splits, "SPLIT_ROWS": rows * splits}

    def room(self, config: Any, gpu: Gpu) -> int:
        """Bytes of shared memory that a block takes; 0: a caller's config does not say."""
        major = gpu.capability[0]
        staged = getattr(config, "staged", 0) if major in self.staging else 0
        return int(staged or shared_on(config, major))


def _with_tiles(names: Names, config: Any) -> Names:
    """Returns the sizes of a call and those of a config's tiles."""
    return {**names, "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N}


def _is_alike(config: Any, first: Any) -> bool:
    changed = config._replace(BLOCK_N=first.BLOCK_N, shared=first.shared)
    return bool(changed == first) and not config.splits and not getattr(config, "split_size", 0)


@functools.lru_cache(maxsize=1024)
def plan_splits(
    tiles: int,
    key_tiles: int,
    tile_bytes: int,
    partial_bytes: int,
    shared: int,
    gpu: Gpu,
    idle_gain: float,
    most: int,
    trips: int = 3,
    block_share: float = 1.0,
) -> tuple[int, float]:
    """Returns the number of splits with the shortest time, and that time in bytes that a multiprocessor
    reads, by a model of a kernel bound by memory.

    A wave of programs, as many as fit on the device, takes its bytes at the memory's speed, and as long as
    a hundred kB more to start and to end; where it leaves multiprocessors idle, the others run at most
    `idle_gain` times faster, and no block faster than its share of a multiprocessor's speed. Where two fit
    on a multiprocessor, they hide each other's start, and read more slowly together than one alone. Joining
    the splits costs a launch and the way to memory and back. Follows from shapes and the device alone, so
    that a captured CUDA graph serves sequences of any length.
    """
    processors, resident = gpu.multiprocessors, 2
    if gpu.shared_in_all and shared > 0:
        resident = max(1, min(gpu.shared_in_all // shared, 4))
    # what reads less than a multiprocessor is meant to have company
    is_pair = resident == 2 and block_share == 1

    def cost(n: int) -> float:
        split_bytes = -(-key_tiles // n) * tile_bytes
        waves, rest = divmod(tiles * n, processors * resident)
        beside = _IN_PAIRS if is_pair else 1.0
        time: float = waves * (max(resident, 1 / block_share) * split_bytes * beside + _WAVE_BYTES)
        if rest:
            deepest = -(-rest // processors)
            reads = max(rest / processors, deepest / idle_gain, 1 / block_share) * split_bytes
            time += reads * (beside if deepest > 1 else 1.0) + _WAVE_BYTES
            time += _ALONE_BYTES if is_pair and deepest == 1 and not waves else 0
        return time if n == 1 else time + _COMBINE_BYTES + trips * n * partial_bytes / processors

    best = min(range(1, max(1, min(key_tiles, most)) + 1), key=cost)
    return best, cost(best)
