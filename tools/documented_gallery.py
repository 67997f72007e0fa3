"""The page docs/gallery.md: masks, the tiles that their kernels visit, their loops, and their speed."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from attnc.build import front, plan_program
from attnc.explain.forward import tiles_of
from attnc.model.resolve import resolve
from attnc.model.variants import add_label, variants
from attnc.plan import ir
from attnc.plan.lower import plan
from attnc.plan.picture import FULL, PARTIAL, SKIP, picture
from attnc.source import Source
from attnc.syntax import ast
from attnc.syntax.parser import load, parse, prelude
from attnc.target.files import render_files
from tools import documented_flex
from tools.documentation import ROOT, blocks

#: spec, attention, title, and the program of docs/figures/flex_h200.json that is such a mask
SHOWN = (
    ("causal_gqa", "causal_gqa", "Causal", "causal"),
    ("window", "window", "A sliding window", "window"),
    ("prefix_lm", "prefix_lm", "A prefix, then causal", "prefix"),
    ("document", "document", "Packed documents", "documents"),
    ("chunked", "chunked", "Chunks", "chunks"),
    ("neighborhood", "neighborhood", "A neighbourhood in an image", "neighbourhood"),
    ("head_mask", "head_mask", "A rule for each head", "heads"),
    ("padding", "padding", "Padding", "padding"),
    ("softcap", "softcap", "Causal, scores capped", "softcap"),
    ("alibi", "alibi", "Causal, a slope for each head", "alibi"),
)
_BLOCKS = str.maketrans({SKIP: "·", PARTIAL: "▒", FULL: "█"})
_HEAD = """\
# Gallery

Each section shows a mask, the tiles that its kernel visits, and the loop of that kernel. In the pictures,
rows are tiles of queries and columns are tiles of keys: `·` is skipped, `▒` is partial and runs mask code,
`█` is full and runs none. The pictures are computed from the bounds of the loop below them; nothing else
decides which tiles are visited.

Times are milliseconds of the forward pass of a FlexAttention program with such a mask, in bf16 on one H200,
run by attnc and by PyTorch ([how they were measured](flex.md#how-fast)). The last column is how many times as
fast attnc is.

This page is written by `pytest tests/test_docs.py --update-golden`.
"""


def gallery() -> str:
    """All of docs/gallery.md."""
    return _HEAD + "".join(
        part for spec, attention, title, program in SHOWN for part in _entry(spec, attention, title, program)
    )


def _entry(spec: str, attention: str, title: str, program_of_flex: str) -> Iterator[str]:
    path = ROOT / "specs" / f"{spec}.attn"
    program = front(path)
    schedule = next(s for s in program.schedules if (s.name, s.target) == (attention, "triton"))
    first = variants(program, program.attention(attention))[0]
    module = plan(add_label(first, schedule.label), schedule)
    yield f"\n## {title}\n\n[`specs/{spec}.attn`](../specs/{spec}.attn)\n"
    yield f"\n```attn\n{_declared(load(path), attention)}```\n"
    kernel = module.kernel
    tile_q, tile_kv = tiles_of(kernel.configs[0])
    length = 16 * max(tile_q, tile_kv) * (2 if spec == "window" else 1)  # a window is 1023 keys
    drawn = picture(kernel, length, length, tile_q, tile_kv)
    note = f" ({drawn.note})" if drawn.note else ""
    yield (
        f"\n{drawn.count(SKIP)} of {drawn.tiles} tiles of {drawn.tile_q} x {drawn.tile_kv} are skipped,"
        f" {drawn.count(PARTIAL)} partial, {drawn.count(FULL)} full at M = N = {length}{note}:\n"
    )
    rows = "\n".join(row.translate(_BLOCKS) for row in drawn.rows)
    yield f"\n```text\n{rows}\n```\n\n```text\n{_loops(module)}```\n"
    if program_of_flex in documented_flex.results():
        yield "\n| kernels | attnc | on Triton | FlexAttention | speed |\n| --- | --- | --- | --- | --- |\n"
        yield documented_flex.row(program_of_flex)


def _declared(source: Source, name: str) -> str:
    """The attention as the file has it, without what the gallery is not about."""
    item = next(i for i in parse(source).items if isinstance(i, ast.Attention) and i.name.id == name)
    return source.text[item.span.start : item.span.end].rstrip() + "\n"


def _loops(module: ir.Module) -> str:
    """The loops of the forward kernel with their bounds, as generated."""
    files = render_files(module, path="", sha256="")
    (text,) = (text for name, text in files.items() if name.endswith(".py"))
    body = text[text.index("_forward(\n") :]
    found = re.search(r"( {4}# [^\n]*: which kv tiles .*?)\n\n(?! {4}for )", body, re.DOTALL)
    assert found is not None, "the kernel has no such comment any more"
    return textwrap.dedent(found[1]) + "\n"


def kernel() -> str:
    """The loop of the last variant of the README's spec."""
    spec = next(block for block in blocks(ROOT / "README.md") if block.language == "attn")
    *_, module = plan_program(resolve(parse(Source("README.md", spec.text)), prelude())).modules
    return f"```text\n{_loops(module)}```\n"


#: spec and its attention, title, and the program of docs/figures/flex_h200.json that is such a mask
FIRST = (
    ("causal_gqa", "causal", "causal"),
    ("window", "sliding window", "window"),
    ("document", "documents", "documents"),
    ("prefix_lm", "prefix", "prefix"),
)


def masks() -> str:
    """Tiles of a few masks beside each other, and how fast their kernels are beside FlexAttention's."""
    columns = []
    for spec, title, name in FIRST:
        program = front(ROOT / "specs" / f"{spec}.attn")
        schedule = next(s for s in program.schedules if (s.name, s.target) == (spec, "triton"))
        kernel = plan(
            add_label(variants(program, program.attention(spec))[0], schedule.label), schedule
        ).kernel
        drawn = picture(kernel, 2560, 2560, 256, 256)
        rows = ["".join(2 * tile for tile in row).translate(_BLOCKS) for row in drawn.rows]
        columns.append([f"{title:20}", *rows, f"{f'{_ratio(name)} FlexAttention':20}"])
    lines = ("   ".join(line).rstrip() for line in zip(*columns, strict=True))
    return "```text\n" + "\n".join(lines) + "\n```\n"


def _ratio(name: str) -> str:
    return documented_flex.ratio(documented_flex.results()[name]["forward"])


PAGE = Path("docs") / "gallery.md"
