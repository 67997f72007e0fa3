"""What the plan says of each role of a Hopper forward kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnc.plan.ir import Forward
from attnc.plan.sm90 import layout_of, roles_of
from attnc.plan.sm90.roles import ALL_SEE, SEARCHED_AHEAD, Claims, Sm90Roles
from tests.plans import module_of, plans_of
from tests.verify.judging import modules_of

SPECS = sorted(path.stem for path in (Path(__file__).parents[2] / "specs").glob("*.attn"))


def roles(spec: str, variant: str) -> Sm90Roles:
    kernel = module_of(spec, "cuda.sm_90a", variant).kernel
    assert isinstance(kernel, Forward)
    return roles_of(kernel)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", SPECS)
def test_shared_memory_has_room_for_what_roles_exchange(spec: str) -> None:
    """The layout counts on the spec what roles find in the kernel."""
    for module in plans_of(spec).modules:
        kernel = module.kernel
        if module.target != "cuda.sm_90a" or not isinstance(kernel, Forward):
            continue
        layout, softmax = layout_of(kernel), roles_of(kernel).softmax
        assert len(softmax.vectors) <= layout.vectors
        assert len(softmax.columns) == layout.columns
        assert sum(column.of_key is not None for column in softmax.columns) == layout.key_columns
        assert (softmax.pair is not None) == (layout.pair_stages > 0)
        assert (softmax.cap is not None) <= layout.capped


@pytest.mark.parametrize(("o", "is_alone"), [("pairs[q_idx, N] * attention", False), ("attention", True)])
def test_pairs_that_an_epilogue_reads_too_have_a_pointer(o: str, *, is_alone: bool) -> None:
    """TMA copies those of the scores, which takes a map alone."""
    text = f"""attention spec {{
      input q: bf16[B, M, H, 64]
      input k, v: bf16[B, N, H, 64]
      input pairs: bf16[M, N]
      score = dot(q, k) + pairs[q_idx, kv_idx]
      normalize = softmax
      output o: bf16[B, M, H, 64] = {o}
    }}
    schedule spec for cuda.sm_90a {{ loops = [q, kv] }}
    """
    (module,) = modules_of(text)
    assert isinstance(module.kernel, Forward)
    found = roles_of(module.kernel)
    assert "pairs" in found.boxes
    assert ("pairs" in found.boxes_alone) == is_alone


def test_the_longest_tiles_are_claimed_late() -> None:
    """So that they go to the block that is free first; a search for bounds takes time before that."""
    assert roles("causal_gqa", "bf16_d128").claims == Claims(late=True, ahead=1, last_rounds=2)
    assert roles("document", "d128").claims.ahead == SEARCHED_AHEAD
    assert roles("varlen", "d128").claims == Claims(late=False, ahead=1, last_rounds=0)


def test_bounds_of_each_consumer_are_published_where_they_may_differ() -> None:
    window, causal = roles("window", "d128"), roles("causal_gqa", "bf16_d128")
    assert window.own_ranges
    assert window.work.own == ("lo", "full_lo", "full_hi")
    assert not causal.own_ranges  # a tile of keys is as tall as one of queries
    assert causal.work.own == ()
    assert causal.work.published == ("h", "b", "full_hi", ALL_SEE)


def test_lengths_of_sequences_are_published() -> None:
    packed = roles("varlen", "d128")
    assert {"M", "N", "q_first", "q_rows"} <= set(packed.work.published)
    assert packed.work.sizes == ("M", "N")
    assert packed.clears_values


def test_each_role_computes_what_it_reads_alone() -> None:
    """The scheduler finds integers; a consumer also what is not published: floats, and pointers of a head."""
    work = roles("alibi", "d64").work
    assert [item.name for item in work.consumed]
    assert work.produced == ()
    assert not {item.name for item in work.consumed} & set(work.published)
    assert roles("causal_gqa", "bf16_d128").work.consumed == ()


def test_every_warp_that_reads_a_work_tile_is_counted() -> None:
    """The producer, a warp that loads values of keys, one that copies pairs, and four that draw."""
    assert roles("causal_gqa", "bf16_d128").work.readers == 1
    assert roles("dropout", "d64").work.readers == 5
