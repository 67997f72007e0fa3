"""Margins of scores that forget, by the norms of q and k."""

from __future__ import annotations

import math

import pytest
import torch

from attnc.support.margins import margins

SHARE = 2.0**-11


def margin(q: torch.Tensor, k: torch.Tensor, q_axes: str = "bmh", k_axes: str = "bnh") -> torch.Tensor:
    found = margins(q, k, q_axes, k_axes, slope=0.125, share=SHARE)
    assert found is not None
    return found


def test_keys_beyond_the_margin_weigh_less_than_the_share() -> None:
    """However far apart scores are: the query's own key is opposite to it, forgotten keys are parallel."""
    direction = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for size in (0.1, 1.0, 2.0):
        n = 1000
        q = (size * direction).to(torch.bfloat16).expand(1, 1, 1, 64)
        k = q.expand(1, n, 1, 64).clone()
        k[:, -1] *= -1
        found = float(margin(q, k))
        scores = 0.125 * (k[0, :, 0].double() @ q[0, 0, 0].double())
        scores[:-1] -= found
        weights = scores.softmax(0)
        assert 0.5 * SHARE < float(weights[:-1].sum()) <= SHARE


def test_each_sequence_and_head_has_its_own() -> None:
    q, k = torch.zeros(2, 3, 4, 16), torch.zeros(2, 5, 2, 16)
    q[1, 2, 3, 0], k[1, 4, 1, 0] = 2.0, 3.0
    least = math.log(5 / SHARE)
    expected = torch.full((2, 4), least)
    expected[1, 3] += 2 * 0.125 * 2 * 3
    torch.testing.assert_close(margin(q, k), expected, rtol=0.01, atol=0)
    assert (margin(q, k) >= expected).all()
    turned = margin(q.permute(0, 2, 1, 3), k.permute(1, 2, 0, 3), "bhm", "nhb")
    assert torch.equal(turned, margin(q, k))


@pytest.mark.parametrize("group", [1, 2, 3])
def test_heads_that_share_keys_have_the_margins_of_their_own_keys(group: int) -> None:
    """The norms of all heads differ, so that no other head, sequence or order of them gives the same."""
    draw = torch.Generator().manual_seed(group)
    q, k = torch.randn(2, 3, 4 * group, 16, generator=draw), torch.randn(2, 5, 4, 16, generator=draw)
    q *= 1 + torch.arange(4 * group)[:, None]
    k *= torch.tensor([5.0, 1.0, 4.0, 2.0])[:, None]
    longest = [x.norm(dim=-1).amax(1) for x in (q, k.repeat_interleave(group, dim=2))]
    expected = 2 * 0.125 * longest[0] * longest[1] + math.log(5 / SHARE)
    torch.testing.assert_close(margin(q, k), expected, rtol=0.01, atol=0)


@pytest.mark.parametrize("odd", [math.nan, math.inf, 3e38])
def test_a_norm_that_is_no_number_leaves_nothing_out(odd: float) -> None:
    q, k = torch.ones(1, 2, 1, 16), torch.ones(1, 3, 1, 16)
    k[0, 1, 0, 3] = odd
    assert margin(q, k).tolist() == [[math.inf]]


def test_empty_tensors_have_margins() -> None:
    assert margin(torch.ones(1, 0, 2, 16), torch.ones(1, 3, 2, 16)).shape == (1, 2)
    assert margin(torch.ones(1, 3, 2, 16), torch.ones(1, 0, 2, 16)).shape == (1, 2)
    assert margin(torch.ones(0, 3, 2, 16), torch.ones(0, 3, 2, 16)).shape == (0, 2)


def test_what_the_call_refuses_has_none() -> None:
    q, k = torch.ones(1, 2, 4, 16), torch.ones(1, 3, 2, 16)
    wrong = [
        (None, k),
        (q, 3),
        (q.double(), k),
        (q, k.int()),
        (q[0], k),
        (q, k.expand(2, 3, 2, 16)),
        (q[:, :, :3], k),
        (q, k[:, :, :0]),
        (q, k.to("meta")),
        (q.to_sparse(), k),
    ]
    for a, b in wrong:
        assert margins(a, b, "bmh", "bnh", slope=1.0, share=SHARE) is None


def test_margins_ask_for_no_gradient() -> None:
    q, k = torch.ones(1, 2, 1, 16, requires_grad=True), torch.ones(1, 3, 1, 16, requires_grad=True)
    assert not margin(q, k).requires_grad
