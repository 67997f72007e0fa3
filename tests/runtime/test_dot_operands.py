"""What Triton's compiler makes of the operands of `tl.dot`, for a GPU that is not there.

An operand of the tensor cores of Ampere lies in registers in runs of kWidth elements along the summed axis,
and four threads have a run each. Triton derives kWidth from the narrowest elements that the operand was
computed from, and halves their width at a `tl.join`. Where four runs are longer than the axis, releases up to
3.7 count some of its elements several times, and others never (triton-lang/triton, pulls 10645 and 11691).
"""

from __future__ import annotations

import json
import re

import pytest

from tests.processes import compiling
from tests.profiles import is_night

SPEC = """attention narrow {
  input q: f16[B, M, H, 16]
  input k, v: f16[B, N, H, 16]
  input flag: bool[B, N]
  input p: f32[]
  input seed: i64[]
  score = dot(q, k)
  mask = flag[b, kv_idx]
  normalize = softmax(dropout = p, seed = seed)
  output o: f16[B, M, H, 16]
  grad q, k, v
}
schedule narrow for triton {
  tile.q = 16, tile.kv = 32
  backward {
    dq { tile.q = 16, tile.kv = 32 }
    dkdv { tile.q = 32, tile.kv = 16 }
  }
}
"""
PROGRAM = """
import json, sys
import triton
from attnc.build import plan_program
from attnc.model.resolve import resolve
from attnc.plan.device import DEVICES
from attnc.runtime.toolchains import usage_of
from attnc.source import Source
from attnc.syntax.parser import parse
from attnc.syntax.parser import prelude
found, compile = [], triton.compile
def noting(*arguments, **options):
    made = compile(*arguments, **options)
    found.append([made.metadata.name, made.asm["ttgir"]])
    return made
triton.compile = noting
(module,) = plan_program(resolve(parse(Source("a.attn", sys.argv[1])), prelude())).modules
kernels = ["forward", *module.backward_kernels]
for kernel in kernels if sys.argv[2] == "night" else kernels[-1:]:
    usage_of(module, 0, DEVICES["sm_90"], kernel)
print(json.dumps(found))
"""
OPERAND = re.compile(
    r"tensor<(\d+)x(\d+)x\w+, #ttg\.dot_op<\{opIdx = ([01]), parent = #\w+, kWidth = (\d+)\}>>"
)


@pytest.mark.slow
def test_operands_have_every_element_of_the_summed_axis_once() -> None:
    """By day of the kernel that sums over queries and over columns."""
    texts = json.loads(compiling(PROGRAM, SPEC, "night" if is_night() else "day").stdout)
    assert len(texts) == (3 if is_night() else 1)
    for name, text in texts:
        for rows, columns, position, width in map(re.Match.groups, OPERAND.finditer(text)):
            summed = int(rows if position == "1" else columns)
            assert 4 * int(width) <= summed, (name, rows, columns, position, width)
