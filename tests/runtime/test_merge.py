"""States merged by their lse: equal to one call over all keys, safe where there are none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnc.verify.interpreter import ensure_interpreter
from attnc.verify.subject import subject_of
from attnc.verify.tolerance import expect, to_float64
from tests.plans import plans_of
from tests.targets import TARGETS

ensure_interpreter()

from attnc.runtime.merge import join_ranks, merge_states  # noqa: E402  # once Triton interprets

SPEC = Path(__file__).parents[2] / "specs" / "shared_prefix.attn"
EMPTY = float("-inf")


def state(values: list[float], lse: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(values)[:, None].expand(-1, 4).clone(), torch.tensor(lse)


def test_merging_two_empty_states_is_empty() -> None:
    o, lse = merge_states(*state([0.0, math.nan], [EMPTY] * 2), *state([0.0, math.inf], [EMPTY] * 2))
    assert o.tolist() == [[0.0] * 4] * 2
    assert lse.tolist() == [EMPTY] * 2


def test_an_empty_state_changes_no_bit() -> None:
    full, empty = state([3.0, -7.0], [100.25, -200.5]), state([math.nan, 0.0], [EMPTY, EMPTY])
    for merged in (merge_states(*full, *empty), merge_states(*empty, *full)):
        assert torch.equal(merged[0], full[0])
        assert torch.equal(merged[1], full[1])


def test_equal_shares_are_averaged_however_large_their_lse() -> None:
    o, lse = merge_states(*state([1.0, 1.0], [9e4, -9e4]), *state([3.0, 3.0], [9e4, -9e4]))
    assert torch.allclose(o, torch.full((2, 4), 2.0))
    assert torch.allclose(lse, torch.tensor([9e4, -9e4]) + math.log(2))


def test_a_nan_stays_a_nan() -> None:
    o, lse = merge_states(*state([1.0], [math.nan]), *state([1.0], [2.0]))
    assert o.isnan().all()
    assert lse.isnan().all()


def test_wrong_arguments_are_named() -> None:
    o, lse = state([1.0], [0.0])
    with pytest.raises(ValueError, match="other_o: expected shape"):
        merge_states(o, lse, o[:, :2], lse)
    with pytest.raises(TypeError, match="lse: expected dtype"):
        merge_states(o, lse.double(), o, lse)
    with pytest.raises(ValueError, match="other_lse: expected shape"):
        merge_states(o, lse, o, lse[None])
    with pytest.raises(TypeError, match="other_o: expected dtype"):
        merge_states(o, lse, o.half(), lse)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shared", [0, 40])
@pytest.mark.parametrize("target", TARGETS)
def test_a_shared_prefix_and_own_suffixes_equal_one_call(target: str, rows: int, shared: int) -> None:
    """Within twice the bound that the plan proves for one call over the whole sequences."""
    prefix_plan, suffix_plan = (m for m in plans_of(SPEC).modules if m.target == target)
    prefix: Any = subject_of(prefix_plan).module
    subject = subject_of(suffix_plan)
    suffix: Any = subject.module
    generator = torch.Generator().manual_seed(rows + shared)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    own = torch.tensor([37, rows, 50], dtype=torch.int32)
    q, k, v = normal(3, rows, 4, 128), normal(12, 16, 2, 128), normal(12, 16, 2, 128)
    common, table = (
        torch.tensor([[3, 7, 1]], dtype=torch.int32),
        torch.tensor([[0, 2, 4, 5], [6, 8, 9, 10], [11, 2, 0, 6]], dtype=torch.int32),
    )
    flat = q.reshape(1, -1, 4, 128)
    first, first_lse = prefix.shared_prefix(flat, k, v, common, torch.tensor([shared], dtype=torch.int32))
    second, second_lse = suffix.own_suffix(q, k, v, table, own)
    o, lse = merge_states(first.view_as(second), first_lse.view_as(second_lse), second, second_lse)

    def rows_of(pool: torch.Tensor, pages: torch.Tensor, count: int) -> torch.Tensor:
        return pool[pages.long()].reshape(-1, 2, 128)[:count]

    for b in range(3):
        length = shared + int(own[b])
        pages = -(-length // 16)
        whole = {}
        for name, pool in (("k", k), ("v", v)):
            keys = torch.cat([rows_of(pool, common[0], shared), rows_of(pool, table[b], int(own[b]))])
            whole[name] = torch.nn.functional.pad(keys, (0, 0, 0, 0, 0, pages * 16 - length)).reshape(
                pages, 16, 2, 128
            )
        tensors = {
            "q": q[b : b + 1],
            **whole,
            "block_table": torch.arange(pages, dtype=torch.int32)[None],
            "kv_len": torch.tensor([length], dtype=torch.int32),
        }
        expected = expect(subject.variant.attention, tensors, subject.bound)
        for name, got in (("o", o[b : b + 1]), ("lse", lse[b : b + 1])):
            want = expected[name]
            assert (np.abs(to_float64(got) - want.value) <= 2 * want.allowed + 1e-12).all(), name


# --- results of several ranks by one kernel -----------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "width"), [(1, 16), (2, 20), (5, 7)])
def test_joining_is_merging_one_after_the_other(ranks: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    every = torch.randn(ranks, 3, 2, width + 4, generator=generator)
    every[..., width] *= 40
    every[-1, 0, 0, width] = -math.inf  # a rank without a key, of which nothing is looked at
    every[-1, 0, 0, :width] = math.nan
    o, lse = every[0, ..., :width], every[0, ..., width]
    for other in every[1:]:
        o, lse = merge_states(o, lse, other[..., :width], other[..., width])
    found, found_lse = join_ranks(every, width, torch.float32)
    if ranks > 1:
        torch.testing.assert_close(found, o, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found_lse, lse)
    assert join_ranks(every, width, torch.bfloat16)[0].dtype is torch.bfloat16


def test_rows_without_keys_are_empty() -> None:
    every = torch.full((3, 2, 12), math.nan)
    every[..., 8] = -math.inf
    o, lse = join_ranks(every, 8, torch.float32)
    assert o.tolist() == [[0.0] * 8] * 2
    assert lse.tolist() == [-math.inf] * 2
    assert join_ranks(every[:, :0], 8, torch.float32)[0].shape == (0, 8)
