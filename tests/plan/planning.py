"""Plans of small specs written in a test."""

from __future__ import annotations

from typing import Any

from attnc.model.attention import Variant
from attnc.model.resolve import resolve
from attnc.model.schedule import Schedule
from attnc.model.variants import variants
from attnc.plan.ir import Module
from attnc.plan.lower import plan
from attnc.source import Source
from attnc.syntax.parser import parse, prelude

FRAME = """attention under_test {{
  input q: {dtype}[B, H, M, {d}]
  input k: {dtype}[B, H, N, {d}]
  input v: {dtype}[B, H, N, {dv}]
{inputs}
  score = {score}
  mask = {mask}
  normalize = {softmax}
  output o: {dtype}[B, H, M, {dv}]{epilogue}
  output lse: f32[B, H, M]
{grads}
}}
schedule under_test for {target} {{
{schedule}
}}
"""


def resolved(
    mask: str = "true",
    *,
    score: str = "dot(q, k) / sqrt(D)",
    inputs: tuple[str, ...] = (),
    schedule: str = "  loops = [q, kv]",
    softmax: str = "softmax",
    dtype: str = "bf16",
    d: int = 64,
    dv: int | None = None,
    target: str = "triton",
    grads: str = "",
    epilogue: str = "",
) -> tuple[Variant, Schedule]:
    """One attention with this mask, score and schedule; dv: columns of v, if they are not those of k."""
    lines = "\n".join(f"  input {line}" for line in inputs)
    text = FRAME.format(
        mask=mask,
        score=score,
        inputs=lines,
        schedule=schedule,
        softmax=softmax,
        dtype=dtype,
        d=d,
        dv=d if dv is None else dv,
        target=target,
        epilogue=f" = {epilogue}" if epilogue else "",
        grads=f"  grad {grads}" if grads else "",
    )
    program = resolve(parse(Source("under_test.attn", text)), prelude())
    (variant,) = variants(program, program.attentions[0])
    return variant, program.schedules[0]


def planned(mask: str = "true", **words: Any) -> Module:
    """The module of such an attention: arguments of `resolved`."""
    return plan(*resolved(mask, **words))
