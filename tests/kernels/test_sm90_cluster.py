"""Two blocks that share tiles of K and V, on the CPU: what either sees, sizes with a block of no rows, the
lazy maximum, and what goes wrong between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from attnc.verify.case import Case
from attnc.verify.check import check
from attnc.verify.subject import Subject
from tests.by_day import some_by_day
from tests.targets import needs_gxx
from tests.verify.judging import spec, subject_with_changes

pytestmark = [needs_gxx, pytest.mark.slow]

LAZY = "softmax = online(maximum = lazy(20)), consumers = 2, tile.kv = 32, cluster = 2"
LATE = f"{LAZY}, order = longest_first"


def text_of(
    mask: str = "",
    *,
    more: Sequence[str] = (),
    score: str = "",
    normalize: str = "softmax",
    schedule: str = LAZY,
    d: int = 32,
    group: int = 1,
) -> str:
    heads = f"Hkv * {group}" if group > 1 else "Hkv"
    lines = [
        f"input q: bf16[B, M, {heads}, {d}]",
        f"input k, v: bf16[B, N, Hkv, {d}]",
        *more,
        f"score = dot(q, k) / sqrt({d}){score}",
        *([f"mask = {mask}"] if mask else []),
        f"normalize = {normalize}",
        f"output o: bf16[B, M, {heads}, {d}]",
        f"output lse: f32[B, {heads}, M]",
    ]
    return spec(lines, schedule, target="cuda.sm_90a")


KINDS = {
    "no_mask": text_of(schedule=LAZY.replace("maximum = lazy(20)", "rescale = deferred")),
    "causal_of_three_heads": text_of("causal", group=3, schedule=LATE),
    "windows_that_end_inside": text_of(
        "window(40, 3)", schedule=LATE.replace("consumers = 2", "consumers = 3")
    ),
    "prefix_and_alibi": text_of("causal or kv_idx < 70", score=" + 0.25 * (kv_idx - q_pos)"),
    "tiles_left_out": text_of("kv_idx < 4 or (kv_idx <= q_idx and q_idx - kv_idx <= 20)"),
    "tiles_left_out_by_64_bits": text_of(
        "kv_idx < 4 or part[b, q_idx] == part[b, kv_idx]", more=("input part: i64[B, M] is sorted",)
    ),
    "through_values": text_of("causal", d=256, schedule=LATE.replace("tile.kv = 32", "tile.kv = 80")),
    "of_keys": text_of(
        "causal and doc[b, q_pos] == doc[b, kv_idx]",
        more=(
            "input doc: i32[B, N] is sorted",
            "input bias: f32[B, N]",
            "input p: f32[]",
            "input seed: i64[]",
        ),
        score=" + bias[b, kv_idx]",
        normalize="softmax(dropout = p, seed = seed)",
    ),
    "either": text_of(
        "causal", schedule=f"{LATE.replace('cluster = 2', 'cluster in {1, 2}')}, pingpong in {{false, true}}"
    ),
}
#: An even and an odd number of query tiles, a block without rows, more tiles than blocks, one key.
SIZES = ((300, 200), (130, 300), (1, 1), (513, 40))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", some_by_day(KINDS, of=3))
def test_blocks_that_share_tiles_are_right(kind: str) -> None:
    made = subject_with_changes(KINDS[kind])
    for seed, (m, n) in enumerate(SIZES):
        case = Case(dims={"B": 1, "Hkv": 2, "M": m, "N": n}, seed=seed, config=seed % len(made.configs))
        found = check(made, case, fills=("nan",))
        assert found.ok, (m, n, found.message)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lengths", ["drawn", "one"])
def test_lengths_are_those_of_both_blocks(lengths: str) -> None:
    """Sequences without keys among them, and more of them than blocks."""
    made = subject_with_changes(text_of("causal", more=("input lens: i32[B]", "length N = lens[b]")))
    for b, m, n in ((37, 1, 3), (4, 140, 60)):
        found = check(made, Case(dims={"B": b, "Hkv": 1, "M": m, "N": n}, lengths=lengths), fills=("nan",))
        assert found.ok, found.message


def far_rows(made: Subject, first: int) -> float:
    """The worst error of o where the scores of rows from `first` on jump by more than 2^100."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, rows, 1, 32, generator=generator).bfloat16() for rows in (256, 200, 200))
    jump = torch.zeros(256, 200)
    jump[first : first + 40, 30:60] = 200.0
    # New memory may have the results of the last call.
    o, lse = torch.full_like(q, torch.nan), torch.full((1, 1, 256), torch.nan)
    getattr(made.module, made.variant.attention.name)(q, k, v, jump, out=(o, lse))
    s = torch.einsum("bmhd,bnhd->bhmn", q.float(), k.float()) / 32**0.5 + jump
    right = torch.einsum("bhmn,bnhd->bmhd", s.softmax(-1), v.float())
    return float((o.float() - right).abs().nan_to_num(torch.inf).max())


JUMPING = text_of(more=("input jump: f32[M, N]",), score=" + jump[q_idx, kv_idx]")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", [0, 110, 200], ids=["first_block", "both", "second_block"])
def test_both_compute_their_tiles_again_where_one_has_to(first: int) -> None:
    assert far_rows(subject_with_changes(JUMPING), first) < 0.05


def test_a_block_that_is_not_heard_shows() -> None:
    assert (
        not far_rows(subject_with_changes(JUMPING, ("recompute |= receive() != 0", "receive()")), 200) < 0.5
    )


K_EMPTY, O_EMPTY = (f"barrier_of(base, {name}_EMPTY, " for name in "KO")
#: By name: the kernel, what is changed in its text, and what shows.
BUGS: Mapping[str, tuple[str, tuple[tuple[str, str], ...], str]] = {
    "no_arrival_at_the_other": (
        "causal_of_three_heads",
        (
            (f"cluster_arrive_if({K_EMPTY}", f"mbarrier_arrive_if({K_EMPTY}"),
            (f"mbarrier_init({K_EMPTY}i), CLUSTER * ", f"mbarrier_init({K_EMPTY}i), "),
        ),
        "a wgmma of warp|has not arrived yet",
    ),
    "its_arrival_is_not_counted": (
        "causal_of_three_heads",
        ((f"mbarrier_init({K_EMPTY}i), CLUSTER * ", f"mbarrier_init({K_EMPTY}i), "),),
        "a wgmma of warp|has not arrived yet|more than 8 arrivals",
    ),
    "o_has_not_left_the_other": (
        "through_values",
        (
            (f"cluster_arrive_if({O_EMPTY}", f"mbarrier_arrive_if({O_EMPTY}"),
            (f"mbarrier_init({O_EMPTY}0), CLUSTER * ", f"mbarrier_init({O_EMPTY}0), "),
        ),
        "which an asynchronous store of warp",
    ),
    "half_of_the_bytes": (
        "causal_of_three_heads",
        (("K_FULL, k.index), K_BYTES)", "K_FULL, k.index), K_BYTES / 2)"),),
        "a wgmma of warp|too few bytes|has not arrived yet|off",
    ),
    "half_of_other_keys": (
        "causal_of_three_heads",
        (("v_lo + own_keys", "v_lo"),),
        "elements are off",
    ),
    "one_half_twice": (
        "causal_of_three_heads",
        (("(panel * BLOCK_N + own_keys) * 128, args.v_map", "panel * BLOCK_N * 128, args.v_map"),),
        "where a copy has not arrived yet",
    ),
    "no_meeting_before": (
        "causal_of_three_heads",
        (("cluster_sync();  // before", "__syncthreads();  // before"),),
        "mbarrier of another block",
    ),
    "no_meeting_behind": (
        "causal_of_three_heads",
        (("cluster_sync();  // shared memory stays", ";  // shared memory stays"),),
        "ends where warp|of the cluster has ended",
    ),
    "gaps_of_ones_own": (
        "tiles_left_out",
        (("const int q_lo = cluster_lo;", ""),),
        "a deadlock|has not arrived yet|may still read|elements are off|ends where",
    ),
    "rows_of_ones_own": (
        "tiles_left_out_by_64_bits",
        (("part_row[cluster_lo *", "part_row[q_lo *"),),
        "a deadlock|has not arrived yet|may still read|elements are off|ends where",
    ),
    "keys_of_the_first_block": (
        "causal_of_three_heads",
        (("min(q_lo + CLUSTER_M, M)", "min(q_lo + BLOCK_M, M)"),),
        "elements are off",
    ),
    "a_word_to_the_wrong_block": (
        "causal_of_three_heads",
        (("MESSAGE_FULL, 0), 1 - block, word", "MESSAGE_FULL, 0), block, word"),),
        "a deadlock|copies under way",
    ),
    "tiles_of_ones_own": (
        "causal_of_three_heads",
        (("found = receive();", "{ receive(); found = answer(recompute); }"),),
        "a deadlock|elements are off",
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bug", BUGS)
def test_what_is_wrong_between_blocks_shows(bug: str) -> None:
    kind, changes, told = BUGS[bug]
    made = subject_with_changes(KINDS[kind], *changes)
    found = check(made, Case(dims={"B": 1, "Hkv": 3, "M": 300, "N": 200}), fills=("nan",))
    assert not found.ok
    assert any(part in found.message for part in told.split("|")), found.message
