"""A projection and its schedule, read and planned."""

from attnc.model.program import Program
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import parse, prelude

LAYER = """\
projection layer {
  param T in {bf16, f16}, K in {64, 128}
  input x: T[M, K]
  input w: T[N, K]
  output y: T[M, N]
  y = dot(x, w)
}
"""

SCHEDULE = """
schedule layer for triton {
  impl in {flat, gemv}
  flat {
    tile.n in {64, 32}, tile.k = 64, stages in {2, 3}
    where tile.n == 64 or stages == 2
  }
}
"""


def program(text: str) -> Program:
    return resolve(parse(Source("layer.attn", text)), prelude())
