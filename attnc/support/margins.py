"""How far behind a query keys count, where the score forgets: what the norms of q and k say of it."""

import math
from typing import TypeGuard

import torch

from .arguments import kind_without_memory

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
#: The norms are wrong by less, and so is what is made of them.
_SLACK = 1 + 2.0**-10


def margins(
    q: object, k: object, q_axes: str, k_axes: str, *, slope: float, share: float
) -> torch.Tensor | None:
    """Returns by how much the bias of a key has to be below that of a query's own key for all such keys
    together to weigh less than `share`: f32[B, H], infinite where a norm is.

    2 slope |q| |k| + log(N / share), with the largest norms of each sequence and head (arXiv 2504.06949,
    section 3.1, which takes the bound of normed q and k). slope: of the score by the product. axes: what
    those of q and k are, but for the last: b, h, m and n. None for tensors that the call refuses.
    """
    if not (_is_readable(q, len(q_axes) + 1) and _is_readable(k, len(k_axes) + 1)):
        return None
    longest_q, longest_k = _longest(q, q_axes, "m"), _longest(k, k_axes, "n")
    (batch, heads), (batch_k, heads_k) = longest_q.shape, longest_k.shape
    if q.device != k.device or batch != batch_k or (heads and (not heads_k or heads % heads_k)):
        return None
    if heads_k != heads:
        longest_k = longest_k.repeat_interleave(heads // heads_k, dim=1)
    least = math.log(max(k.shape[k_axes.index("n")], 1) / share)
    found = torch.rsub(longest_q * longest_k, _SLACK * least, alpha=-2 * slope * _SLACK**3)  # one launch
    return found.nan_to_num(nan=math.inf, posinf=math.inf)


def _is_readable(x: object, axes: int) -> TypeGuard[torch.Tensor]:
    if not isinstance(x, torch.Tensor):
        return False
    return x.dim() == axes and x.dtype in _TYPES and not kind_without_memory(x)


def _longest(x: torch.Tensor, axes: str, rows: str) -> torch.Tensor:
    """Returns the largest norm of each sequence and head, [B, H]; 0 where there are no rows."""
    norms: torch.Tensor = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float32)
    axis = axes.index(rows)
    shape = norms.shape[:axis] + norms.shape[axis + 1 :]
    largest = norms.amax(axis) if norms.shape[axis] else norms.new_zeros(shape)
    return largest if axes.index("b") < axes.index("h") else largest.mT
