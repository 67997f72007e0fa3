"""The explanation of a forward kernel for a reader, in sections."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.explain.figures import UNIT, Explanation, decisions, place_of, sum_terms
from attnc.explain.kernel import grid_line, loop_lines, resource_lines
from attnc.explain.roofline import roofline_lines
from attnc.expr.nodes import TRUE
from attnc.expr.show import show
from attnc.model.schedule import knobs_of
from attnc.plan.ir import Decode
from attnc.plan.mask_findings import mask_notes
from attnc.plan.picture import FULL, PARTIAL, SKIP
from attnc.plan.targets import target_of


def as_text(e: Explanation) -> str:
    """The explanation for a reader, in sections."""
    sections = (_head, _structure, _mask, _resources, _speed, _accuracy, _because)
    return "\n\n".join("\n".join(section(e)) for section in sections) + "\n"


def _head(e: Explanation) -> Iterator[str]:
    variant, device = e.module.variant, e.device
    yield f"{variant.attention.name} {variant.name} for {e.module.target}, on {device.arch} ({device.part})"
    written = knobs_of(e.schedule, "forward")
    knobs = ", ".join(f"{key} = {value}" for key, value in e.config.texts().items() if key in written)
    yield f"config {e.position} of {len(e.kernel.configs)}: {knobs}"


def _structure(e: Explanation) -> Iterator[str]:
    grid = e.kernel.grid
    tile_q, tile_kv = e.tiles
    yield "grid and loops"
    if isinstance(e.kernel, Decode):
        rows, heads = ("M", "H") if e.kernel.pack is None else (f"M * {show(e.kernel.pack.group)}", "Hkv")
        yield f"  a program for each tile of {tile_q} of {rows} rows, {heads} and batch"
        if e.kernel.split is not None:
            yield "  and for each split of the keys that the tile visits, joined by the combine kernel"
    else:
        yield f"  {grid_line(e.kernel, tile_q, tile_kv)}"
    if grid.persistent:
        yield f"  persistent: one program per SM ({e.device.sms} here) walks over the tiles"
    if grid.longest_first:
        yield "  longest first: the last rows, which see most keys, start first"
    yield from loop_lines(e.kernel, tile_q, tile_kv)


def _mask(e: Explanation) -> Iterator[str]:
    mask = e.module.variant.attention.mask
    yield f"mask: {'none' if mask == TRUE else show(mask)}"
    yield f"  tiles: '{SKIP}' skipped, '{PARTIAL}' partial, '{FULL}' full; q downwards, kv to the right"
    for p in e.pictures:
        note = f" ({p.note})" if p.note else ""
        yield (
            f"  M = {p.queries}, N = {p.keys}{note}: "
            f"{p.count(SKIP)} skipped, {p.count(PARTIAL)} partial, {p.count(FULL)} full of {p.tiles}"
        )
        yield from (f"    {row}" for row in p.rows)


def _resources(e: Explanation) -> Iterator[str]:
    yield from resource_lines(e.needs, e.device, e.usage)
    yield from target_of(e.module.target).roles(e.kernel, e.config)


def _speed(e: Explanation) -> Iterator[str]:
    yield from roofline_lines(e.roofline, e.device)
    moved = e.traffic
    if moved is not None:
        asked, memory = moved
        yield f"bytes at {e.roofline.shape}"
        yield _bytes("asked of global memory", asked.global_read, asked.global_written)
        why = "o, l and m outgrow the L2 cache" if memory.spills else "each tensor once, at least"
        yield f"{_bytes('of those in device memory', memory.read, memory.written)} ({why})"
        yield _bytes("through shared memory", asked.shared_read, asked.shared_written)


def _bytes(what: str, read: int, written: int) -> str:
    return f"  {what:25} {read * 1e-6:9.1f} MB read {written * 1e-6:9.1f} MB written"


def _accuracy(e: Explanation) -> Iterator[str]:
    bound = e.kernel.bound
    sums = sum_terms(bound, 4096)
    yield "error bound, first order (Blanchard, Higham, Higham; arXiv 1909.03469), per element"
    yield "  |o - exact| <= sum_j P_ij (e_ij + sum_j P_ij e_ij + sums + u_p) |v_j| + u_o |o|"
    yield f"  u_p = {bound.p_dtype.unit_roundoff:.2g} ({bound.p_dtype}: p is rounded before it meets v)"
    yield f"  u_o = {bound.o_dtype.unit_roundoff:.2g} ({bound.o_dtype}: the result is rounded once)"
    splits = f"{bound.splits} split{'s' * (bound.splits > 1)}"
    yield f"  sums = {sums:.2g} at N = 4096 (f32, {bound.tile_kv} keys a partial sum, {splits})"
    per_score = bound.dot_error(bound.head_dim)
    yield f"  e_ij <= {per_score:.2g} |q_i||k_j| scale + {UNIT:.2g} (2 (m_i - s_ij) + 2 |m_i| + 4)"
    total = bound.p_dtype.unit_roundoff + sums + bound.o_dtype.unit_roundoff
    yield f"  for scores of moderate size: about {total:.2g} of the largest |v|"


def _because(e: Explanation) -> Iterator[str]:
    yield "because"
    width = max(len(where) for _, where in decisions(e))
    yield from (f"  {where:{width}}  {what}" for what, where in decisions(e))
    for note in mask_notes(e.module.variant):
        yield f"  {place_of(note.primary.span):{width}}  {note.message}"
