"""How many programs share the keys of a sequence in decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from attnc.support.configs import choose_config
from attnc.support.splits import Split, plan_splits
from tests.support.configs import CONFIGS, H200


def test_splits_fill_the_device_and_no_more() -> None:
    def count(tiles: int, key_tiles: int) -> int:
        return plan_splits(tiles, key_tiles, 64 * 512, 4 * 129 * tiles, 90000, H200, 1.2, 128)[0]

    assert count(1, 1) == 1
    assert count(10_000, 64) == 1
    assert 16 <= count(8, 1024) <= 128
    assert count(0, 8) == 1


def test_blocks_that_read_less_than_a_multiprocessor_can_come_in_pairs() -> None:
    """As those do that convert keys and values of 8 bits: with one for each multiprocessor memory idles."""

    def count(tiles: int, key_tiles: int, share: float) -> int:
        partial = 4 * 129 * 4 * tiles
        return plan_splits(tiles, key_tiles, 128 * 256, partial, 90000, H200, 1.2, 128, 3, share)[0]

    for tiles, key_tiles in ((128, 64), (8, 256), (32, 64)):
        alone, shared = (tiles * count(tiles, key_tiles, share) for share in (1.0, 0.6))
        assert alone <= H200.multiprocessors < shared <= 2 * H200.multiprocessors
    assert count(512, 64, 0.6) == count(512, 64, 1.0) == 1


def test_two_blocks_share_a_multiprocessor_where_each_reads_little() -> None:
    """Of one token beside 8 KV heads of d128, tiles of 64 keys: 4 sequences of 3008 keys take 14.5 us by a
    block for each multiprocessor, 15.5 by two; one of 8192 keys 10.5 and 10.2. Where one alone fits, there is
    one.
    """

    def count(sequences: int, keys: int, *, shared: int = 81984, columns: int = 128) -> int:
        tiles, tile_bytes = 8 * sequences, 64 * 4 * columns
        partial = 32 * sequences * 4 * (columns + 1)
        return plan_splits(tiles, -(-keys // 64), tile_bytes, partial, shared, H200, 1.3, 128)[0]

    assert [count(b, n) for b, n in ((4, 3008), (16, 8192), (8, 8192))] == [4, 1, 2]
    assert [count(b, n) for b, n in ((1, 8192), (2, 4096), (4, 2048), (8, 1024))] == [32, 16, 8, 4]
    assert [count(b, n, shared=140000) for b, n in ((1, 8192), (4, 2048))] == [16, 4]


def test_short_sequences_take_tiles_of_which_more_live_at_once() -> None:
    """Their programs begin and end often: 64 sequences of 512 keys take 36 us by tiles of 32, 44 by 128."""

    class Decoding(NamedTuple):
        BLOCK_M: int
        BLOCK_N: int
        num_stages: int
        shared: int
        splits: int = 0

    long, few_stages, short = configs = (
        Decoding(16, 128, 3, 140288), Decoding(16, 64, 2, 39168), Decoding(16, 32, 3, 38144)
    )  # fmt: skip
    split = Split("B * cdiv(H, BLOCK_M)", "cdiv(N, BLOCK_N)", 512, 129)

    def first(batch: int, keys: int, split: Split = split) -> Decoding:
        names = {"B": 8 * batch, "H": 4, "M": 1, "N": keys}
        found: Decoding = split.in_order(configs, names, H200)[0]
        return found

    assert first(64, 512) == first(64, 128) == first(64, 1024) == short
    assert first(64, 8192) == first(1, 8192) == first(16, 4096) == first(16, 512) == long
    assert first(64, 512, replace(split, segment=512)) == long
    assert first(3, 10000) == first(6, 5008) == long  # which idle multiprocessors make alike
    window = replace(split, key_tiles="cdiv(min(N, 511 + BLOCK_M), BLOCK_N)")
    assert first(64, 8192, window) == short
    assert split.in_order((long, few_stages), {"B": 512, "H": 4, "M": 1, "N": 512}, H200)[0] == long


def test_short_walks_take_few_stages() -> None:
    """Of 64 sequences of 32 queries beside 512 keys each block walks over four tiles, beside 1,024 over
    eight; one sequence of 4,096 keys has splits of few.
    """

    class Decoding(NamedTuple):
        BLOCK_M: int
        BLOCK_N: int
        STAGES: int
        shared: int
        splits: int = 0

    deep, shallow = configs = (Decoding(128, 128, 3, 229608), Decoding(128, 128, 2, 164040))
    split = Split("B * Hkv * cdiv(M * G, BLOCK_M)", "cdiv(N, BLOCK_N)", 512, 129, short=7)

    def first(batch: int, keys: int, split: Split = split) -> Decoding:
        names = {"B": batch, "H": 32, "Hkv": 8, "G": 4, "M": 32, "N": keys}
        found: Decoding = split.in_order(configs, names, H200)[0]
        return found

    assert first(64, 512) == first(64, 896) == first(1, 512) == first(1, 1) == first(2, 4096) == shallow
    assert first(64, 897) == first(64, 1024) == first(1, 32768) == deep
    assert first(64, 512, replace(split, short=3)) == first(64, 512, replace(split, short=0)) == deep
    window = replace(split, key_tiles="cdiv(min(N, 511 + BLOCK_M), BLOCK_N)")
    assert first(64, 8192, window) == shallow


def test_splits_of_a_fixed_size() -> None:
    split = Split("B", "cdiv(N, BLOCK_N)", 512, 129, most=4)
    names = {"B": 2, "H": 4, "M": 1, "N": 1000, "BLOCK_N": 64}
    assert split.sizes(names, CONFIGS[1]._replace(splits=3), H200) == {
        "tiles": 2, "rows": 8, "SPLITS": 3, "SPLIT_ROWS": 24
    }  # fmt: skip
    with pytest.raises(ValueError, match="at most 4 splits, of 250 keys at least, got 5"):
        split.sizes(names, CONFIGS[1]._replace(splits=5), H200)


class Fixed(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    splits: int
    split_size: int


@pytest.mark.parametrize(
    ("splits", "keys", "segment", "said"),
    [
        (0, 4096, 2048, "a split_size of 2048, the keys of a segment of the spec's order, got 4096"),
        (0, 1024, 2048, "a split_size of 2048, .* got 1024"),
        (4, 0, 2048, "a split_size of 2048, .* got 0"),
        (0, 2000, 0, "a split_size that is a multiple of BLOCK_N = 64, got 2000"),
        (0, 100, 0, "a split_size that is a multiple of BLOCK_N = 64, got 100"),
        (0, -64, 0, "a split_size that is a multiple of BLOCK_N = 64, got -64"),
        (-1, 0, 0, "splits of 0 or more, got -1"),
    ],
)
def test_splits_that_leave_keys_out_or_count_them_twice_are_refused(
    splits: int, keys: int, segment: int, said: str
) -> None:
    split = Split("B", "cdiv(N, BLOCK_N)", 512, 129, segment=segment)
    with pytest.raises(ValueError, match=f"^config: expected {said}"):
        split.check(Fixed(64, 64, splits, keys))


def test_splits_that_are_segments_are_taken() -> None:
    Split("B", "cdiv(N, BLOCK_N)", 512, 129, segment=2048).check(Fixed(64, 64, 0, 2048))
    Split("B", "cdiv(N, BLOCK_N)", 512, 129).check(Fixed(64, 64, 3, 0))


def test_blocks_share_the_columns_of_a_result_where_tiles_are_few() -> None:
    class Shared(NamedTuple):
        BLOCK_M: int
        BLOCK_N: int
        BLOCK_D: int
        shared: int = 230480
        splits: int = 0

    configs = whole, half = Shared(64, 64, 512), Shared(64, 64, 256)
    split = Split("cdiv(H, BLOCK_M) * B", "cdiv(N, BLOCK_N)", 1152, 513, columns=512, few=4)
    for batch, first in ((1, half), (4, whole)):
        names = {"B": batch, "H": 128, "M": 1, "N": 8192}
        assert split.in_order(configs, names, H200)[0] == first
        assert choose_config(None, H200, 8192, configs, {}, split.in_order(configs, names, H200)) == first
        assert choose_config(whole, H200, 8192, configs, {}, split.in_order(configs, names, H200)) == whole
    names = {"B": 1, "H": 128, "M": 1, "N": 8192, "BLOCK_M": 64, "BLOCK_N": 64}
    blocks = [split.sizes(names, config, H200)["SPLITS"] * 1024 // config.BLOCK_D for config in configs]
    assert all(count <= 132 for count in blocks)
    assert blocks[1] > blocks[0] / 2
    assert Split("B", "1", 512, 129).in_order(configs, names, H200) == configs


@pytest.mark.parametrize(("size", "splits"), [(64, 0), (128, 0), (0, 3), (0, 0)])
def test_splits_have_every_key_and_room_for_their_results(size: int, splits: int) -> None:
    """And none that is empty, where their size is fixed."""
    config = Sized(16, 64, 2, 40000, splits=splits, split_size=size)
    split = Split("B * cdiv(H * M, BLOCK_M)", "cdiv(N, BLOCK_N)", 512, 129)
    for batch, rows, keys in product((1, 3), (1, 2), (0, 1, 63, 64, 65, 127, 128, 129, 1000)):
        names = {"B": batch, "H": 4, "M": rows, "N": keys, "BLOCK_M": 16, "BLOCK_N": 64}
        found = split.sizes(names, config, H200)
        if size:
            assert (found["SPLITS"] - 1) * size < keys <= found["SPLITS"] * size or keys == 0
        assert found["SPLITS"] == splits or not splits
        assert found["rows"] == batch * 4 * rows
        assert found["SPLIT_ROWS"] == found["rows"] * found["SPLITS"]


class Sized(NamedTuple):
    """A config whose splits are of a size, or so many, or as many as suit."""

    BLOCK_M: int
    BLOCK_N: int
    num_stages: int
    shared: int
    splits: int = 0
    split_size: int = 0


#: What was chosen on an H200 by what was measured there: sums of other parts are other bits.
CHOICES = Path(__file__).parents[1] / "golden" / "choices"


def test_keys_are_split_as_before(golden: Callable[[Path, str], None]) -> None:
    """So many splits, for rows of tiles and columns of tiles of keys; and which config comes first."""
    key_tiles, lines = (1, 2, 3, 8, 31, 64, 512), []
    for shared, share, trips, gain in product((0, 39168, 90000, 140288), (1.0, 0.6), (1, 3), (1.0, 1.3)):
        lines.append(
            f"shared {shared}, share {share}, trips {trips}, gain {gain}: of {key_tiles} tiles of keys"
        )
        for tiles in (0, 1, 8, 32, 100, 132, 264, 1000):
            partial = 4 * 129 * 4 * tiles
            found = [
                plan_splits(tiles, count, 64 * 512, partial, shared, H200, gain, 128, trips, share)
                for count in key_tiles
            ]
            lines.append(f"  {tiles}: " + ", ".join(f"{splits} {time:.0f}" for splits, time in found))
    split = Split("B * cdiv(H, BLOCK_M)", "cdiv(N, BLOCK_N)", 512, 129, staging=(9,))
    for few, columns in ((0, 0), (4, 512)):
        told = replace(split, few=few, columns=columns)
        for batch, keys in product((1, 2, 4, 16, 64, 256), (64, 512, 1024, 8192)):
            names = {"B": batch, "H": 64, "M": 1, "N": keys}
            first = told.in_order(_SIZED, names, H200)[0]
            splits = told.sizes({**names, "BLOCK_M": 16, "BLOCK_N": 64}, _SIZED[0], H200)["SPLITS"]
            lines.append(f"few {few}, {batch} x {keys}: {first.BLOCK_N} keys first, {splits} splits")
    golden(CHOICES / "splits.txt", "\n".join(lines) + "\n")


class _Shared(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    shared: int
    BLOCK_D: int = 256
    splits: int = 0
    split_size: int = 0
    staged: int = 0


_SIZED = (
    _Shared(16, 128, 140288), _Shared(32, 64, 60000, 512, staged=70000),
    _Shared(16, 64, 39168), _Shared(16, 32, 38144),
)  # fmt: skip


def test_a_block_takes_what_is_staged_where_its_device_stages() -> None:
    split = Split("B", "cdiv(N, BLOCK_N)", 512, 129, staging=(9, 10))
    for staged, major in product((0, 70000), (8, 9)):
        config, gpu = _SIZED[0]._replace(staged=staged), H200._replace(capability=(major, 0))
        assert split.room(config, gpu) == (staged if staged and major == 9 else config.shared)
    assert split.room(CONFIGS[1], H200) == CONFIGS[1].shared  # which no kernel stages
