"""The mask function for transformers: bands, what they keep, and how a tensor carries them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from attnc.adapters.bands import BAND, Band
from attnc.adapters.transformers import _ends_of, _run_of_ones, _values_of, mask
from tests.adapters.mask_functions import KINDS, PADDINGS, B, functions, padding_of, stand_in
from tests.profiles import is_night

__all__ = ["stand_in"]


Ends = tuple[int | None, int | None]


def keeps(ends: Ends, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """What a band keeps, [M, N]."""
    left, right = ends
    kept = torch.ones(len(q_idx), kv_idx.shape[1], dtype=torch.bool)
    kept &= True if left is None else kv_idx >= q_idx - left
    kept &= True if right is None else kv_idx <= q_idx + right
    return kept


@st.composite
def masks(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, int], tuple[int, int]]:
    """What a mask keeps, [M, N]: most are bands; then queries and keys, and where both begin."""
    lengths = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    offsets = draw(st.integers(0, 5)), draw(st.integers(0, 3))
    bound = st.none() | st.integers(-1, 6)
    kept = keeps((draw(bound), draw(bound)), *places(lengths, offsets))
    if draw(st.integers(0, 4)) == 0:
        kept[draw(st.integers(0, lengths[0] - 1)), draw(st.integers(0, lengths[1] - 1))] ^= True
    return kept, lengths, offsets


def places(lengths: tuple[int, int], offsets: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.arange(lengths[0]) + offsets[0])[:, None], (torch.arange(lengths[1]) + offsets[1])[None, :]


def list_bands(kept: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> Iterator[Ends]:
    """Yields every band around the query that keeps just this."""
    bounds = (None, *range(12))
    for ends in product(bounds, bounds):
        if torch.equal(keeps(ends, q_idx, kv_idx), kept):
            yield ends


@settings(max_examples=600 if is_night() else 200)
@given(masks())
def test_a_mask_is_a_band_where_some_band_keeps_the_same(
    drawn: tuple[torch.Tensor, tuple[int, int], tuple[int, int]],
) -> None:
    kept, lengths, offsets = drawn
    q_idx, kv_idx = places(lengths, offsets)

    def look_up(b: torch.Tensor, _h: Any, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return kept[rows - offsets[0], keys - offsets[1]].expand(len(b), 1, *lengths)

    values = _values_of(look_up, 1, lengths, offsets, "cpu")
    assert torch.equal(values[0, 0], kept)
    found = _ends_of(values, lengths, offsets, "cpu")
    distance = (kv_idx - q_idx)[kept]
    is_around = kept.any() and distance.min() <= 0 <= distance.max()  # else no query stands in it
    bands = set(list_bands(kept, q_idx, kv_idx)) if is_around else set[Ends]()
    if int(kv_idx.max()) != int(q_idx.max()):  # what the last query sees does not end with the last key
        bands = {(left, right) for left, right in bands if right == 0 or (left, right) == (None, None)}
    if not bands:
        assert found is None
        return
    assert found in bands
    left, right = found
    assert left is None or not any(other is None for other, end in bands if end == right)
    assert right in (None, 0) or not any(end is None for other, end in bands if other == left)


def seen_by(given: torch.Tensor) -> torch.Tensor:
    """Returns what each query sees, bool[B, 1, M, N], of what `mask` made; of a band by its definition."""
    band: Band | None = getattr(given, BAND, None)
    if band is None:
        return given
    assert bool((band.last <= band.stop).all())  # keys from `stop` on are not there for a kernel
    _, _, rows, keys = given.shape
    kv_idx = torch.arange(keys)[None, None]
    q_pos = torch.arange(rows)[None, :, None] + band.stop[:, None, None] - rows
    seen = (band.first[:, None, None] <= kv_idx) & (kv_idx < band.last[:, None, None])
    seen = seen.expand(len(seen), rows, keys).clone()
    seen &= True if band.left is None else kv_idx >= q_pos - band.left
    seen &= True if band.right is None else kv_idx <= q_pos + band.right
    seen = seen[:, None]
    return seen if band.keys is None else seen & band.keys[:, None, None]


#: Queries and keys, and where both begin: fewer queries than keys, more, as many; caches that hold keys
#: already, and those with room behind the last query.
PLACES = (
    *((rows, keys, 0, 0) for rows in (1, 5, 8) for keys in (1, 5, 9)),
    *((4, 7, 3, 0), (4, 7, 5, 2), (1, 9, 8, 0), (1, 9, 4, 0), (3, 9, 2, 0), (6, 6, 3, 3)),
)


@pytest.mark.filterwarnings("ignore:attnc. no tile is skipped:UserWarning")
@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_keeps_what_its_function_and_its_ones_keep(kind: str, padding: str, is_tensor: bool) -> None:
    """Beside every number of queries and keys, wherever both begin."""
    function = functions(kind)
    for rows, keys, first_q, first_k in PLACES:
        kept = padding_of(padding, first_k + keys)
        begin = torch.tensor(first_q) if is_tensor else first_q
        found = seen_by(mask(B, rows, keys, begin, first_k, function, kept))
        q_idx, kv_idx = places((rows, keys), (first_q, first_k))
        wanted = kv_idx <= q_idx if function is None else torch.as_tensor(function(0, 0, q_idx, kv_idx))
        wanted = wanted.expand(B, 1, rows, keys)
        if kept is not None:
            wanted = wanted & kept[:, None, None, first_k:].bool()
        assert torch.equal(found, wanted), (rows, keys, first_q, first_k)


def test_a_band_goes_with_what_models_do_to_a_mask_that_they_pass_on() -> None:
    kept = torch.ones(2, 9, dtype=torch.long)
    kept[1, :3] = 0
    carrier: Any = mask(2, 5, 9, 4, attention_mask=kept)
    assert carrier.shape == (2, 1, 5, 9)
    assert (carrier.dim(), carrier.size(2), len(carrier)) == (4, 5, 2)
    for made in (
        carrier[:, :, :, :9],
        carrier.to("cpu"),
        carrier.to(torch.bfloat16),
        carrier.detach().contiguous(),
        carrier.to("meta"),
    ):
        band = made.attnc_band
        assert (band.left, band.right) == (None, 0)
        assert band.first.device == made.device
    assert carrier[:, :, :, :7].attnc_band.first.tolist() == [0, 3]
    assert not carrier.is_contiguous()
    assert str(carrier)  # of whoever looks for a mistake


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_band_goes_through_a_checkpoint(reentrant: bool) -> None:
    """A reentrant one copies tensors for the second forward."""
    carrier, seen = mask(2, 5, 9, 4), list[torch.Tensor]()

    def layer(x: torch.Tensor, given: Any) -> torch.Tensor:
        seen.append(given.attnc_band.stop)
        return x * x

    x = torch.ones(3, requires_grad=True)
    made: Any = checkpoint(layer, x, carrier, use_reentrant=reentrant)
    made.sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_keys_behind_a_mask_of_ones_are_hidden() -> None:
    """A static cache has room for more keys than the mask has; one with a hole is no band."""
    kept = torch.tensor([[1, 1, 0, 1, 1]])
    with pytest.warns(UserWarning, match="no tile is skipped"):
        seen = mask(1, 5, 8, attention_mask=kept)
    wanted = torch.zeros(1, 1, 5, 8, dtype=torch.bool)
    wanted[..., :5] = torch.ones(5, 5, dtype=torch.bool).tril() & kept.bool()
    assert torch.equal(seen, wanted)


@pytest.mark.parametrize(
    "compute",
    [
        lambda scores, mask: scores + mask,
        lambda scores, mask: mask + scores,
        lambda scores, mask: scores.masked_fill(mask.bool(), 0.0),
        lambda scores, mask: torch.where(mask > 0, scores, 0.0),
        lambda scores, mask: torch.nn.functional.scaled_dot_product_attention(scores, scores, scores, mask),
        lambda scores, mask: scores[mask],
        lambda scores, mask: scores.add_(mask),
        lambda scores, mask: torch.cat((mask, scores)),
    ],
)
def test_a_model_that_computes_with_a_band_is_refused(compute: Any) -> None:
    """Models whose attention does not go through transformers' interface: numbers would be wrong."""
    with pytest.raises(RuntimeError, match="this model computes its attention by itself"):
        compute(torch.zeros(2, 1, 5, 5), mask(2, 5, 5))


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3), st.data())
def test_padding_is_a_run_of_ones_before_the_last_query(rows: list[list[bool]], data: st.DataObject) -> None:
    kept = torch.tensor(rows)
    stop = torch.tensor([data.draw(st.integers(0, 6)) for _ in rows])
    first, last, is_run = _run_of_ones(kept, stop)
    seen = [
        [i for i, one in enumerate(row[:end]) if one] for row, end in zip(rows, stop.tolist(), strict=True)
    ]
    if any(at and at != list(range(at[0], at[-1] + 1)) for at in seen):
        assert not is_run
        return
    assert is_run
    for at, begin, end in zip(seen, first.tolist(), last.tolist(), strict=True):
        assert list(range(begin, end)) == at


@pytest.mark.parametrize("count", [1, 6])
def test_ones_without_a_hole_are_a_run(count: int) -> None:
    """Up to what counts."""
    generator = torch.Generator().manual_seed(count)
    for _ in range(40):
        kept = torch.rand(3, count, generator=generator) < 0.6
        stop = torch.randint(0, count + 1, (3,), generator=generator)
        first, last, is_run = _run_of_ones(kept, stop)
        rows = [[at for at in range(int(end)) if row[at]] for row, end in zip(kept, stop, strict=True)]
        holds = all(not row or row == [*range(row[0], row[-1] + 1)] for row in rows)
        assert bool(is_run) == holds
        for b, row in enumerate(rows):
            if row and holds:
                assert (int(first[b]), int(last[b])) == (row[0], row[-1] + 1)
