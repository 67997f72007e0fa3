"""A CPU in place of a Hopper GPU: right kernels run right in any order, and each wrong one is found."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from attnc.verify.simt import SimtFault, available, launch, tensor_map

pytestmark = pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")

SEEDS = range(20)
#: A tensor map that no kernel uses.
NONE = bytes(128)


TEXT = (Path(__file__).parent / "hopper.cu").read_text(encoding="utf-8")
#: The ways to be wrong, numbered from 1.
BUGS = {name: n for n, name in enumerate(sorted(set(re.findall(r"bug [!=]= ([A-Z_]+)", TEXT))), 1)}
SOURCE = TEXT.replace("struct Args", f"enum {{ RIGHT, {', '.join(BUGS)} }};\n\nstruct Args", 1)


def map_of(x: torch.Tensor, box: Sequence[int], swizzle: int = 128) -> bytes:
    """Of a tensor whose last dimension is the innermost."""
    size = x.element_size()
    strides = [s * size for s in reversed(x.stride()[:-1])]
    return tensor_map(x.data_ptr(), size, list(reversed(x.shape)), strides, box, swizzle)


def run(
    kernel: str,
    *maps: bytes,
    threads: int,
    shared: int,
    into: torch.Tensor,
    take: torch.Tensor | None = None,
    n: int = 0,
    bug: str = "",
    seed: int = 0,
    blocks: int = 1,
    descriptors: tuple[int, int] = (0, 0),
) -> None:
    counter = torch.zeros(2, dtype=torch.int32)
    pointer = 0 if take is None else take.data_ptr()
    args = b"".join([*maps, *[NONE] * (3 - len(maps))])
    args += struct.pack(
        "=5Q2i", pointer, into.data_ptr(), counter.data_ptr(), *descriptors, n, BUGS[bug] if bug else 0
    )
    launch(
        SOURCE,
        {},
        args.ljust(448, b"\0"),
        blocks=blocks,
        threads=threads,
        shared=shared,
        seed=seed,
        kernel=kernel,
        folder="sm90",
    )


# ---- a ring of copies, mbarriers, wgmma of two tiles in shared memory, setmaxnreg

KEYS = 100


@cache
def queries_and_keys() -> tuple[torch.Tensor, torch.Tensor]:
    """All scores are negative, so that a key of zeros shows."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.rand(rows, 64, generator=generator).bfloat16() for rows in (128, KEYS))
    return q, -k


def ring(bug: str = "", seed: int = 0, swizzle: int = 128, *, rows: bool = False) -> float:
    """The worst error of a row's maximum. rows: keys come one by one."""
    q, k = queries_and_keys()
    out = torch.full((128,), torch.nan)
    maps = map_of(q, (64, 128)), map_of(k, (64, 32), swizzle)
    take = k if rows else None
    run("ring", *maps, threads=384, shared=24640, into=out, take=take, n=KEYS, bug=bug, seed=seed)
    return float((out - (q.float() @ k.float().T).amax(1)).abs().max())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_of_copies_is_right_in_any_order(seed: int) -> None:
    assert ring(seed=seed) < 1e-4


RING = {
    "NO_INIT_FENCE": r"without fence\.mbarrier_init or fence\.proxy\.async",
    "NO_BARRIER": "an mbarrier that warp 0 has initialised without a barrier since|no mbarrier has been init",
    "CONSUMER_PHASE": r"where a copy has not arrived yet|a deadlock|a wgmma of warp \d+ may still read",
    "PRODUCER_PHASE": "a deadlock",
    "NO_WAIT": "where a copy has not arrived yet|may still read|a deadlock",
    "EARLY_RELEASE": r"which a wgmma of warp \d+ may still read",
    "COUNT_LOW": "may still read|has not arrived yet|a deadlock",
    "COUNT_HIGH": "lacks 1 of 9 arrivals",
    "FEW_BYTES": "and -16 bytes",
    "MANY_BYTES": "and 16 bytes",
    "NO_WGMMA_FENCE": r"the first wgmma without a wgmma\.fence",
    "LATE_WAIT": r"which a wgmma of warp \d+ may still read",
    "REGISTERS": r"wait in setmaxnreg\.inc for 64 more registers per thread, of which 32 are free",
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bug", RING)
def test_what_is_wrong_with_a_ring_is_a_fault(bug: str, seed: int) -> None:
    with pytest.raises(SimtFault, match=RING[bug]):
        ring(bug, seed)


@pytest.mark.parametrize("bug", ["STRIDE", "TAIL"])
def test_what_is_wrong_with_its_numbers_is_a_wrong_result(bug: str) -> None:
    assert not ring(bug) < 0.1


@pytest.mark.parametrize("swizzle", [0, 64, 32])
def test_copies_of_another_swizzle_are_noticed(swizzle: int) -> None:
    if swizzle:
        with pytest.raises(ValueError, match="rows of a box within the swizzle"):
            ring(swizzle=swizzle)
    else:
        assert not ring(swizzle=0) < 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_of_rows_is_right_in_any_order(seed: int) -> None:
    assert ring(seed=seed, rows=True) < 1e-4


ROWS_OF_A_RING = {
    "NO_PROXY_FENCE": r"which thread \d+ copied by cp\.async, without a fence\.proxy\.async since",
    "ARRIVE_AT_ONCE": r"where a copy of thread \d+ has not arrived yet, of which no mbarrier tells",
    "ARRIVE_SOONER": r"of which no mbarrier tells|where a copy has not arrived yet",
    "NO_WAIT": "has not arrived yet|may still read|a deadlock",
    "CONSUMER_PHASE": r"has not arrived yet|a deadlock|a wgmma of warp \d+ may still read",
    "PRODUCER_PHASE": "a deadlock",
    "EARLY_RELEASE": r"a copy overwrites shared .*, which a wgmma of warp \d+ may still read",
    "COUNT_LOW": "may still read|has not arrived yet|a deadlock",
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bug", ROWS_OF_A_RING)
def test_what_is_wrong_with_a_ring_of_rows_is_a_fault(bug: str, seed: int) -> None:
    with pytest.raises(SimtFault, match=ROWS_OF_A_RING[bug]):
        ring(bug, seed, rows=True)


def test_rows_that_lie_in_another_order_than_boxes_are_noticed() -> None:
    assert not ring("PLAIN", rows=True) < 0.5


def test_a_deadlock_tells_who_waits_for_what() -> None:
    with pytest.raises(SimtFault) as caught:
        ring("COUNT_HIGH")
    first, producer, consumers = str(caught.value).splitlines()
    assert first == "block 0: a deadlock"
    assert re.fullmatch(
        r"  warp 0, lane 0, line \d+: wait for phase 0 \(parity 0\) of the mbarrier at shared \+ 24592 "
        r"\(initialised at line \d+\), which lacks 1 of 9 arrivals and 0 bytes",
        producer,
    )
    assert consumers.startswith("  warps 4-11, line ")
    assert "of the mbarrier at shared + 24576 " in consumers


# ---- wgmma with p in registers, stmatrix, stores of boxes

ROWS = 50


@cache
def probabilities_and_values() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    p = torch.rand(64, 32, generator=generator).bfloat16().float()
    return p, torch.randn(32, 128, generator=generator).bfloat16()


def values(bug: str = "", seed: int = 0) -> float:
    """The worst error of an output; rows that are not asked for must stay."""
    p, v = probabilities_and_values()
    out = torch.full((2, 64, 128), 7.0).bfloat16()
    maps = NONE, map_of(v, (64, 32)), map_of(out[:, :ROWS], (64, 16, 1))
    run("values", *maps, threads=128, shared=24584, into=p, take=p, bug=bug, seed=seed)
    right = p @ v.float()
    assert bool((out[:, ROWS:] == 7).all())
    return float((out[:, :ROWS].float() - torch.stack([right, -right])[:, :ROWS]).abs().max())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_product_from_registers_is_right_in_any_order(seed: int) -> None:
    assert values(seed=seed) < 0.05


VALUES = {
    "NO_PROXY_FENCE": r"which thread \d+ wrote without a fence\.proxy\.async",
    "NO_SYNCWARP": r"which lane \d+ wrote without a __syncwarp since",
    "OVERWRITE": r"which an asynchronous store of warp \d may still read",
    "NO_STORE_WAIT": "the thread ends while a store of its is under way",
    "NO_COMMIT": r"may still read|under way \(and not committed\)",
    "A_AFTER_FENCE": r"has written registers of operand A of a wgmma after the last wgmma\.fence",
    "A_IN_FLIGHT": "has written registers of operand A before the wait",
    "WRITE_IN_FLIGHT": "lane 0 has written accumulator 0 before the wait",
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bug", VALUES)
def test_what_is_wrong_with_a_product_is_a_fault(bug: str, seed: int) -> None:
    with pytest.raises(SimtFault, match=VALUES[bug]):
        values(bug, seed)


@pytest.mark.parametrize("bug", ["LEADING", "SWIZZLE", "READ_IN_FLIGHT"])
def test_what_is_wrong_with_a_layout_or_read_early_is_a_wrong_result(bug: str) -> None:
    assert not values(bug) < 0.5


# ---- clusters


def halves(bug: str = "", seed: int = 0) -> float:
    """The worst error of a row's maximum; each block must have heard what the other told last."""
    q, k = queries_and_keys()
    out = torch.full((130,), torch.nan)
    maps = map_of(q[None, None], (64, 64, 1, 1)), map_of(k[None, None], (64, 16, 1, 1))
    run("halves", *maps, threads=256, shared=16448, into=out, n=KEYS, bug=bug, seed=seed, blocks=2)
    assert out[128:].tolist() == [31, 20]
    return float((out[:128] - (q.float() @ k.float().T).amax(1)).abs().max())


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_that_share_tiles_are_right_in_any_order(seed: int) -> None:
    assert halves(seed=seed) < 1e-4


HALVES = {
    "NO_START": r"mbarrier of another block (that warp 0 has initialised|has been initialised)",
    "NO_END": r"ends where warp \d of block \d may still arrive|block \d of the cluster has ended",
    "COUNT_LOW": r"which a wgmma of warp \d may still read|has not arrived yet|more than 4 arrivals",
    "OWN_ARRIVALS": r"which a wgmma of warp \d may still read|has not arrived yet",
    "OWN_COUNTED": r"which lacks 4 of 8 arrivals",
    "SAME_HALF": r"where a copy has not arrived yet",
    "FEW_BYTES": "under way: too few bytes expected|may still read|has not arrived yet|and -2048 bytes",
    "ALONE": "and 2048 bytes",
    "WRONG_RANK": "a deadlock|where a copy has not arrived yet",
    "NOT_HEARD": "where a copy has not arrived yet|a word of another block overwrites|more than 1 arrivals",
    "OUT_OF_TURN": r"a word of another block overwrites|where a copy has not arrived yet",
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bug", HALVES)
def test_what_is_wrong_with_a_cluster_is_a_fault(bug: str, seed: int) -> None:
    with pytest.raises(SimtFault, match=HALVES[bug]):
        halves(bug, seed)


def test_a_grid_is_whole_clusters() -> None:
    out = torch.zeros(130)
    with pytest.raises(SimtFault, match="a launch with 3 blocks in clusters of 2"):
        run("halves", threads=256, shared=16448, into=out, blocks=3)


# ---- named barriers


def turns(bug: str = "", seed: int = 0) -> list[float]:
    out = torch.full((16,), torch.nan)
    run("turns", threads=256, shared=16, into=out, bug=bug, seed=seed)
    return out.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_warpgroups_take_turns(seed: int) -> None:
    assert turns(seed=seed) == [0.0, 1.0] * 8


def test_a_turn_that_is_not_waited_for_shows() -> None:
    assert any(turns("NO_BARRIER", seed) != [0.0, 1.0] * 8 for seed in range(5))


def test_a_turn_that_is_not_passed_on_is_a_deadlock() -> None:
    with pytest.raises(
        SimtFault, match=r"warps 0-3, line \d+: wait at barrier 1, where 128 of 256 threads are"
    ):
        turns("NO_WAIT")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("ONE_WARP", r"warps 4-7, line \d+: wait at barrier 2, where 160 of 256 threads .* \(warps 0, 4-7\)"),
        ("TWICE", r"arrives at barrier [12] once more, where \d+ of 256 threads are, and none has gone on"),
        ("ONE_TURN_MORE", r"ends with arrivals at barrier 1 that no thread has waited for, .* \(warps 4-7\)"),
    ],
)
def test_a_turn_that_is_given_otherwise_is_a_fault(bug: str, said: str, seed: int) -> None:
    with pytest.raises(SimtFault, match=said):
        turns(bug, seed)


def test_all_who_meet_agree_on_how_many_they_are() -> None:
    with pytest.raises(
        SimtFault,
        match=r"barrier \d for (128 threads, where others say 256|256 threads, where others say 128)",
    ):
        turns("COUNT_LOW")


@pytest.mark.parametrize("seed", range(5))
def test_aligned_barriers_are_one_instruction_for_all(seed: int) -> None:
    with pytest.raises(
        SimtFault, match=r"waits at barrier 3 by bar\.sync, for which others wait in line \d+"
    ):
        turns("APART", seed)


# ---- blocks beside each other, plain copies, sums in memory


def sums(bug: str = "", seed: int = 0) -> torch.Tensor:
    rows = torch.randn(7, 128, generator=torch.Generator().manual_seed(3))
    out = torch.zeros(128)
    run("sums", threads=128, shared=528, into=out, take=rows, n=7, bug=bug, seed=seed, blocks=5)
    right = torch.zeros(128)
    for row in rows:
        right += 2 * row
    return out - right


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_add_in_their_order(seed: int) -> None:
    assert not sums(seed=seed).any()


def test_without_an_order_sums_differ() -> None:
    assert any(sums("NO_ORDER", seed).any() for seed in range(5))


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("NO_WAIT", "where a copy has not arrived yet|a copy overwrites"),
        ("NO_PROXY_FENCE", r"wrote without a fence\.proxy\.async"),
        ("NO_BARRIER", r"wrote without (a barrier between them|a __syncwarp since)|may still read"),
        ("CONSUMER_PHASE", r"wait for a \d in global memory, where a 0 is"),
        ("FEW_BYTES", "a bulk copy of 504 bytes"),
    ],
)
def test_what_is_wrong_with_plain_copies_is_a_fault(bug: str, said: str) -> None:
    with pytest.raises(SimtFault, match=said):
        sums(bug)


# ---- a warp


def lanes(bug: str = "", seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, out = torch.arange(256, dtype=torch.int16), torch.zeros(160)
    run("lanes", threads=32, shared=1032, into=out, take=numbers, bug=bug, seed=seed)
    return out[:32], out[32:].view(torch.int16).view(4, 32, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_do_together_what_they_should(seed: int) -> None:
    shown, pieces = lanes(seed=seed)
    lane = torch.arange(32)
    assert torch.equal(shown, (5 + (lane ^ 3) + 100 + 1000 + 10000 * (lane == 0)).float())
    rows = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    rows[3] = 0  # copies of nothing
    assert torch.equal(pieces.permute(1, 0, 2).reshape(4, 8, 8), rows.transpose(1, 2))


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("NO_WAIT", "a load of shared .*, where a copy has not arrived yet"),
        ("DIVERGED", "lanes of a warp are at different instructions"),
        ("UNALIGNED", r"a row of ldmatrix at shared \+ 8, which is not a multiple of 16"),
    ],
)
def test_what_lanes_may_not_do_is_a_fault(bug: str, said: str) -> None:
    with pytest.raises(SimtFault, match=said):
        lanes(bug)


# ---- layouts


def swizzled(place: int, span: int) -> int:
    """The 128-byte swizzle xors bits 4-6 of an address with bits 7-9; 64 bytes: one bit less; 32: two."""
    bits = {0: 0, 32: 1, 64: 2, 128: 3}[span]
    return place ^ (((place >> 7) & ((1 << bits) - 1)) << 4)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_a_box_lies_swizzled_with_zeros_outside_and_finds_its_way_back(span: int) -> None:
    columns = (span or 48) // 2
    numbers = torch.arange(2 * 2 * 3 * 7 * columns, dtype=torch.int16).add(1).view(2, 2, 3, 7, columns)
    back = torch.zeros_like(numbers)
    box, at = (columns, 4, 2, 1, 2), (0, 5, -1, 1, 0)
    size = 4 * 2 * 2 * columns * 2
    out = torch.zeros(size // 2, dtype=torch.int16)
    maps = map_of(numbers, box, span), NONE, map_of(back, box, span)
    run("boxes", *maps, threads=32, shared=4104, into=out, take=torch.tensor(at, dtype=torch.int32), n=size)
    expected = torch.zeros(2, 1, 2, 4, columns, dtype=torch.int16)
    expected[:, 0, 1, :2] = numbers[0:2, 1, 0, 5:7]
    flat = expected.flatten().tolist()
    # shared memory begins at a multiple of 1024
    assert [int(out[swizzled(2 * i, span) // 2]) for i in range(size // 2)] == flat
    written = torch.zeros_like(numbers)
    written[:, 1, 0, 5:7] = numbers[:, 1, 0, 5:7]
    assert torch.equal(back, written)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_operands_of_every_layout_are_multiplied(span: int, transposed: bool) -> None:
    """The canonical layouts of wgmma (PTX ISA, "Matrix fragments for wgmma"), element by element."""
    generator = torch.Generator().manual_seed(span)
    a, b = (torch.randn(rows, 16, generator=generator).bfloat16() for rows in (64, 32))
    image = torch.zeros(8192, dtype=torch.bfloat16)
    stride, leading, second = 8 * (span or 16), 4096 if not span else 2048, 8192
    if (
        transposed
    ):  # 16 rows of depth; a row has the elements of a span, wider ones continue `leading` bytes on
        leading, stride = (1024, 128) if not span else (16 * span, 8 * span)
    for matrix, start in ((a, 0), (b, second)):
        for m in range(matrix.shape[0]):
            for k in range(16):
                if not span and transposed:
                    place = m // 8 * stride + k // 8 * leading + k % 8 * 16 + m % 8 * 2
                elif not span:
                    place = m // 8 * stride + k // 8 * leading + m % 8 * 16 + k % 8 * 2
                elif transposed:
                    width = span // 2
                    place = m // width * leading + k // 8 * stride + k % 8 * span + m % width * 2
                else:
                    place = m // 8 * stride + m % 8 * span + k * 2
                image[swizzled(start + place, span) // 2] = matrix[m, k]

    def descriptor(start: int) -> int:
        mode = {0: 0, 128: 1, 64: 2, 32: 3}[span]
        return (1024 + start) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62

    out = torch.full((64, 32), torch.nan)
    run(
        "operands",
        threads=128,
        shared=16392,
        into=out,
        take=image,
        n=16384,
        bug="TRANSPOSED" if transposed else "",
        descriptors=(descriptor(0), descriptor(second)),
    )
    assert torch.allclose(out, 1 + a.float() @ b.float().T, atol=1e-5)


def test_a_piece_may_be_written_any_number_of_times() -> None:
    """What is listed until a fence is pieces, not writes; behind the fence each counts anew."""
    out = torch.full((8, 32), torch.nan)
    whole = map_of(out, (32, 8), 128)
    run("rewrites", whole, threads=32, shared=1024, into=out, n=20_000)
    assert not out.isnan().all()
    with pytest.raises(SimtFault, match=r"shared \+ 16, which thread 0 wrote without a fence\.proxy\.async"):
        run("rewrites", whole, threads=32, shared=1024, into=out, n=20_000, bug="NO_PROXY_FENCE")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"pointer": 8}, "an address that is a multiple of 16"),
        ({"strides": [24]}, "strides that are multiples of 16"),
        ({"box": [64, 257]}, "boxes from 1 to 256"),
        ({"box": [4, 8]}, "rows of a box that are multiples of 16 bytes"),
        ({"box": [128, 8]}, "rows of a box within the swizzle"),
        ({"sizes": [64, 0]}, "sizes from 1"),
        ({"swizzle": 16}, "a swizzle of 0, 32, 64 or 128 bytes"),
        ({"box": [64]}, "1 to 5 dimensions"),
    ],
)
def test_a_map_that_the_driver_refuses_is_refused(change: dict[str, Any], rule: str) -> None:
    arguments: dict[str, Any] = {
        "pointer": 64,
        "element_bytes": 2,
        "sizes": [64, 9],
        "strides": [128],
        "box": [64, 8],
        "swizzle": 128,
    }
    assert len(tensor_map(**arguments)) == 128
    with pytest.raises(ValueError, match=rule):
        tensor_map(**arguments | change)
