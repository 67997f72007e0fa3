"""Walks over a head that are cut at the same queries, where blocks take turns at adding to dq on Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.targets import needs_gxx
from tests.verify.judging import spec, subject_of_text

pytestmark = [pytest.mark.slow, pytest.mark.nightly, needs_gxx]

_SPEC = spec(
    [
        "input q: bf16[B, M, H, 32]",
        "input k, v: bf16[B, N, H, 32]",
        "score = dot(q, k) / sqrt(32)",
        "mask = causal",
        "normalize = softmax",
        "output o: bf16[B, M, H, 32]",
        "grad q, k, v",
    ],
    "softmax = online(maximum = lazy(20))\n  backward { accumulate.dq = ordered }",
    target="cuda.sm_90a",
)


def test_parts_add_to_dq_in_the_order_of_whole_walks() -> None:
    """So its bits are the same with any number of them; those of keys that no query of a part sees add 0."""
    made: Any = subject_of_text(_SPEC).module
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 290, 1, 32).bfloat16().requires_grad_() for _ in range(3))
    (config,) = made.BACKWARD_CONFIGS["dkdv"][:1]
    found = []
    for parts in (1, 2, 5):
        o = made.spec(q, k, v, backward_config={"dkdv": config._replace(parts=parts)})
        found.append(torch.autograd.grad(o.float().sum(), (q, k, v)))
    for dq, dk, dv in found[1:]:
        assert torch.equal(dq, found[0][0])
        torch.testing.assert_close(dk, found[0][1], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(dv, found[0][2], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("m", "n"), [(390, 390), (100, 390), (390, 100)])
def test_spans_of_keys_have_sums_of_dq_that_are_added_in_their_order(m: int, n: int) -> None:
    """Keys that see no query, and queries that see no key of a span, too."""
    made: Any = subject_of_text(_SPEC).module
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, size, 1, 32).bfloat16().requires_grad_() for size in (m, n, n))
    (config,) = made.BACKWARD_CONFIGS["dkdv"][:1]

    def gradients(**chosen: int) -> tuple[torch.Tensor, ...]:
        o = made.spec(q, k, v, backward_config={"dkdv": config._replace(**chosen)})
        return torch.autograd.grad((o.float() * torch.arange(32)).sum(), (q, k, v))

    one = gradients(parts=1, spans=1)
    for spans in (2, 3, 99):
        found = gradients(parts=1, spans=spans)
        for mine, other in zip(found, one, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2)
        assert torch.equal(found[1], one[1])
        assert torch.equal(found[2], one[2])
        assert torch.equal(gradients(parts=2, spans=spans)[0], found[0])
