"""Plans of a plain attention for CUDA targets."""

from __future__ import annotations

from attnc.model.resolve import resolve
from attnc.model.variants import variants
from attnc.plan import ir
from attnc.plan.lower import plan
from attnc.source import Source
from attnc.syntax.parser import parse, prelude

SPEC = """
attention plain {{
  param D in {{{d}}}
  input q: {dtype}[B, M, H, D]
  input k, v: {dtype}[B, N, H, D]
  score = dot(q, k) / sqrt(D)
  normalize = softmax
  output o: {dtype}[B, M, H, D]
}}
schedule plain for {target} {{
  {knobs}
}}
"""


def planned(knobs: str, *, d: int = 64, dtype: str = "bf16", target: str = "cuda.sm_80") -> ir.Module:
    source = Source("plain.attn", SPEC.format(knobs=knobs, d=d, dtype=dtype, target=target))
    program = resolve(parse(source), prelude())
    (variant,) = variants(program, program.attentions[0])
    return plan(variant, program.schedules[0])
