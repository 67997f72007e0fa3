"""The schedule of an attention that has none for a target: configs from large to small, the first that fits
the device being taken."""

from __future__ import annotations

from attnc.model.attention import Attention
from attnc.model.tensors import Dense

# Wide rows and f32 need the small tiles at the end; on an H200 those at the front are fastest.
_TRITON = """\
schedule {name} for triton {{
  loops = [q, kv], order = longest_first
  tile.q in {{128, 64, 32, 16}}, tile.kv in {{64, 32, 16}}
  warps in {{8, 4}}, stages in {{3, 2, 1}}
  where warps * 16 <= tile.q or (warps == 4 and tile.q < 64)
  where tile.q >= 32 or tile.kv < 64
{backward}}}
"""
_TRITON_BACKWARD = """\
  backward {
    dq {
      tile.q in {64, 32, 16}, tile.kv in {64, 32, 16}
      warps = 4, stages in {3, 2, 1}, order = longest_first
    }
    dkdv {
      tile.q in {64, 32, 16}, tile.kv in {64, 32, 16}
      warps = 4, stages in {2, 1}
    }
  }
"""
_CUDA = """\
schedule {name} for {target} {{
  loops = [q, kv], order = longest_first
  tile.q in {{128, 64}}, tile.kv in {{64, 48, 32, 16}}
  warps = 4, warp_split = q, stages in {{2, 1}}
{backward}}}
"""
_CUDA_BACKWARD = """\
  backward {
    loops = [kv, q]
  }
"""


def default_schedule(attention: Attention, target: str) -> str:
    """The text of a schedule that suits any attention that the target compiles."""
    if target == "triton":
        template, backward = _TRITON, _TRITON_BACKWARD
    else:
        template, backward = _CUDA, _CUDA_BACKWARD
    differentiable = bool(attention.grads) and isinstance(attention.v.storage, Dense)
    return template.format(name=attention.name, target=target, backward=backward if differentiable else "")
