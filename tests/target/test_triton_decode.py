"""Which rows a program of a decode kernel computes: the same by Triton and by CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attnc.model.resolve import resolve
from attnc.model.variants import variants
from attnc.plan.ir import Decode, Module
from attnc.plan.lower import plan
from attnc.plan.sm80 import layout_of
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.target.sm80.kernel import CudaDecodeText
from attnc.target.sm80.printer import settle
from attnc.target.triton.decode import DecodeText
from tests.target.walks import Place, as_python

DECODING = """attention steps {{
  input q: bf16[B, {h}, M, 64]
  input k, v: bf16[B, {kv}, N, 64]
  score = dot(q, k) / sqrt(D)
  mask = causal
  normalize = softmax
  output o: bf16[B, {h}, M, 64]
}}
schedule steps for {target} {{
  loops = [kv], tile.q = 16, tile.kv = 64, split.kv = auto{more}
}}
"""


@pytest.mark.parametrize(
    ("h", "kv", "pack"),
    [("H", "H", ""), ("Hkv * G", "Hkv", ""), ("Hkv * G", "Hkv", ", pack = gqa"), ("H", 1, ", pack = gqa")],
    ids=["a head", "a head of a group", "groups", "all heads"],
)
def test_each_row_of_a_decode_kernel_is_in_one_tile(h: str, kv: str | int, pack: str) -> None:
    sizes = {"B": 2, "H": 6, "Hkv": 3 if kv == "Hkv" else 1, "M": 5, "BLOCK_M": 4}
    sizes["G"] = sizes["H"] // sizes["Hkv"]
    found = []
    for target, more in (("triton", ""), ("cuda.sm_80", ", warp_split = kv")):
        text = DECODING.format(h=h, kv=kv, target=target, more=pack + more)
        program = resolve(parse(Source("steps.attn", text)), prelude())
        (variant,) = variants(program, program.attentions[0])
        module = plan(variant, program.schedules[0])
        assert isinstance(module.kernel, Decode)
        found.append(_rows_of(module, module.kernel, sizes))
    places = [(b, h, q) for b in range(2) for h in range(6) for q in range(5)]
    assert sorted(row for tile in found[0] for row in tile) == places
    assert found[0] == found[1]


def _rows_of(module: Module, kernel: Decode, sizes: dict[str, int]) -> list[list[Place]]:
    """Batch entry, head and query of every row, tile by tile, as the text of a target says it."""
    triton = module.target == "triton"
    text = DecodeText(module, kernel) if triton else CudaDecodeText(module, kernel, layout_of(kernel))
    rows = text.all_rows if isinstance(text, DecodeText) else text.pack.all_rows("M")
    tl = SimpleNamespace(minimum=min)
    count = eval(rows, dict(sizes))
    row_tiles = -(-count // sizes["BLOCK_M"])
    heads = kernel.walk.heads if kernel.walk.head else ""
    found = []
    for tile in range(sizes["B"] * sizes.get(heads, 1) * row_tiles):
        row_lo = tile % row_tiles * sizes["BLOCK_M"]
        names = {**sizes, "tl": tl, "min": min, "row_tiles": row_tiles, "row_lo": row_lo, "tile": tile}
        if isinstance(text, DecodeText):
            lines = text.heads
        else:
            block = [*text.pack.place, text.pack.last_query, "use(b, h, h_kv, q_lo, q_hi);"]
            printed = settle("{\n" + "\n".join(block) + "\n}").splitlines()[1:-2]
            lines = [as_python(line) for line in printed]
        values: dict[str, Any] = dict(names)
        exec("\n".join(lines), values)  # lines that this compiler printed
        own: list[Place] = []
        for row in range(row_lo, min(row_lo + sizes["BLOCK_M"], count)):
            if isinstance(text, DecodeText):
                values["tl"] = SimpleNamespace(arange=lambda first, stop, at=row - row_lo: first + at)
                exec("\n".join(line for line in text.rows_of_tile if "exists" not in line), values)
            else:
                values["row"] = row
                values["q_idx"] = eval(text.pack.query_of("row").replace("/", "//"), values)
                values["h"] = eval(text.pack.head_of("row").replace("/", "//"), values)
            own.append((values["b"], values["h"], values["q_idx"]))
        found.append(own)
    return found
