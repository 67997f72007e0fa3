"""The plan in words and figures: what is computed where, what it takes, how fast it could be, how wrong it
may be.

Nothing is run and no GPU is needed. Every figure follows from the plan and the device table; what only a
compiler knows (registers, spills) is passed in by the caller, who may ask Triton for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from attnc.expr.nodes import TRUE
from attnc.expr.show import show
from attnc.model.schedule import Schedule
from attnc.model.tensors import DType, Prefix
from attnc.plan import ir
from attnc.plan.cuda import cuda_estimate
from attnc.plan.device import Device
from attnc.plan.ir_decode import UnifiedMax
from attnc.plan.mask_findings import mask_notes
from attnc.plan.picture import FULL, PARTIAL, SKIP, Picture, picture
from attnc.plan.resources import Estimate, estimate, features
from attnc.plan.roofline import Roofline, roofline_dict, roofline_lines, roofline_of
from attnc.plan.traffic import DeviceMemory, Traffic, device_memory, traffic
from attnc.plan.tuned import as_knobs
from attnc.source import Span

_U = 2.0**-24
#: (M, N) of the pictures, and N of the roofline.
_SHAPES, _DECODE_SHAPES = ((512, 512), (192, 576)), ((1, 512), (8, 512))
_LENGTH, _DECODE_LENGTH = 4096, 8192


class Usage(Protocol):
    """What a compiler says of one kernel: registers of a thread, bytes of stack (spills), bytes of shared
    memory.
    """

    @property
    def registers(self) -> int: ...
    @property
    def stack(self) -> int: ...
    @property
    def shared(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One kernel of one module under one config, on one device."""

    module: ir.Module
    schedule: Schedule
    position: int
    device: Device
    pictures: tuple[Picture, ...]
    roofline: Roofline
    usage: Usage | None = None

    @property
    def kernel(self) -> ir.Kernel:
        return self.module.kernels[0]


def explain(
    module: ir.Module,
    schedule: Schedule,
    device: Device,
    position: int = 0,
    shapes: Sequence[tuple[int, int]] | None = None,
    length: int | None = None,
    usage: Usage | None = None,
) -> Explanation:
    """Explains the config at `position`; pictures at (M, N) `shapes`, the roofline at N = `length`. What is
    left out is taken from a prompt, or from a decode step where the kernel is for those.
    """
    tiles = _tiles(module, position)
    kernel = module.kernels[0]
    decodes = kernel.structure == "decode"
    if shapes is None:
        shapes = _DECODE_SHAPES if decodes else _SHAPES
    if length is None:
        length = _DECODE_LENGTH if decodes else _LENGTH
    return Explanation(
        module=module,
        schedule=schedule,
        position=position,
        device=device,
        pictures=tuple(picture(kernel, m, n, *tiles) for m, n in shapes),
        roofline=_roofline(module, device, picture(kernel, 1 if decodes else length, length, *tiles)),
        usage=usage,
    )


def as_text(e: Explanation) -> str:
    """The explanation for a reader, in sections."""
    sections = (_head, _structure, _mask, _resources, _speed, _accuracy, _because)
    return "\n\n".join("\n".join(section(e)) for section in sections) + "\n"


def as_dict(e: Explanation) -> dict[str, Any]:
    """The explanation for a program."""
    needs = _needs(e)
    bound = e.kernel.bound
    return {
        "attention": e.module.variant.attention.name,
        "variant": e.module.variant.name,
        "target": e.module.target,
        "device": e.device.arch,
        "config": as_knobs(_config(e)),
        "structure": e.kernel.structure,
        "mask": show(e.module.variant.attention.mask),
        "bounds": [{"name": name, "value": value} for name, value in bounds_of(e.kernel)],
        "loops": [
            {
                "start": show(loop.start),
                "stop": show(loop.stop),
                "masked": _masked(loop),
                "guard": _guard(loop),
            }
            for loop in e.kernel.regions.loops
        ],
        "pictures": [{"M": p.queries, "N": p.keys, "rows": list(p.rows), "note": p.note} for p in e.pictures],
        "shared_memory": {
            "total": needs.shared,
            "limit": e.device.shared_per_block,
            "buffers": {buffer.name: buffer.bytes for buffer in needs.buffers},
        },
        "registers": {"estimate": dict(needs.registers), "limit": e.device.registers_per_thread},
        "compiled": usage_dict(e.usage),
        "roofline": roofline_dict(e.roofline),
        "traffic": None
        if (moved := _traffic(e)) is None
        else asdict(moved[0]) | {"device_memory": asdict(moved[1])},
        "error_bound": {
            "p_roundoff": bound.p_dtype.unit_roundoff,
            "o_roundoff": bound.o_dtype.unit_roundoff,
            "sum_terms": _sum_terms(bound, 4096),
        },
        "because": [{"decision": what, "spec": where} for what, where in _decisions(e)],
    }


def usage_dict(usage: Usage | None) -> dict[str, int] | None:
    if usage is None:
        return None
    return {"registers": usage.registers, "stack": usage.stack, "shared": usage.shared}


def _head(e: Explanation) -> Iterator[str]:
    variant, device = e.module.variant, e.device
    yield f"{variant.attention.name} {variant.name} for {e.module.target}, on {device.arch} ({device.part})"
    written = e.schedule.knobs.get("forward", {})
    knobs = ", ".join(f"{key} = {value}" for key, value in as_knobs(_config(e)).items() if key in written)
    yield f"config {e.position} of {len(e.kernel.configs)}: {knobs}"


def _structure(e: Explanation) -> Iterator[str]:
    grid = e.kernel.grid
    tile_q, tile_kv = _tiles(e.module, e.position)
    yield "grid and loops"
    if e.kernel.structure == "decode":
        rows, heads = ("M", "H") if e.kernel.pack is None else (f"M * {show(e.kernel.pack.group)}", "Hkv")
        yield f"  a program for each tile of {tile_q} of {rows} rows, {heads} and batch"
        if e.kernel.split is not None:
            yield "  and for each share of the keys that the tile visits, joined by the combine kernel"
    else:
        yield f"  {grid_line(e.kernel, tile_q, tile_kv)}"
    if grid.persistent:
        yield f"  persistent: one program per SM ({e.device.sms} here) walks over the tiles"
    if grid.longest_first:
        yield "  longest first: the last rows, which see most keys, start first"
    yield from loop_lines(e.kernel, tile_q, tile_kv)


def grid_line(kernel: ir.Kernel, tile_q: int, tile_kv: int) -> str:
    """Which tiles have a program, and how many are launched. In a backward over keys one serves all
    query heads of a KV head; tiles of packed sequences are counted from the shapes alone (`Sequences`).
    """
    heads = "Hkv" if kernel.structure == "backward_dkdv" and "Hkv" in kernel.dims else "H"
    head = "KV head" if kernel.structure == "backward_dkdv" else "head"
    over, sequences = kernel.grid.over, kernel.grid.sequences
    if over == "head":
        turn = ", kv tile after kv tile" if kernel.structure == "backward_dkdv" else ""
        return f"a program for each {head} and batch{turn}: B * {heads}"
    tile, rows, length = (tile_q, "rows", "M") if over == "q" else (tile_kv, "keys", "N")
    if sequences is not None:
        count = f"({show(sequences.rows)} // {tile} + B + 1) * {heads}, of which a few find nothing to do"
        return f"a program for each {over} tile of {tile} {rows} of a sequence, and {head}: {count}"
    count = f"ceil({length} / {tile}) * B * {heads}"
    return f"a program for each {over} tile of {tile} {rows}, {head} and batch: {count}"


def loop_lines(kernel: ir.Kernel, tile_q: int, tile_kv: int) -> Iterator[str]:
    """The bounds of a program, and its loops."""
    axis = kernel.regions.axis
    for name, value in bounds_of(kernel):
        yield f"  {name} = {value}"
    step = tile_kv if axis == "kv" else tile_q
    for loop in kernel.regions.loops:
        kind = _KINDS[loop.masked] if isinstance(loop.masked, bool) else f"partial where {_masked(loop)}"
        guard = f", where {show(loop.guard)}" if loop.guard is not None else ""
        yield f"  for {axis} in {show(loop.start)} .. {show(loop.stop)} step {step}: {kind}{guard}"


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
    yield from resource_lines(_needs(e), e.device, e.usage)


def resource_lines(needs: Estimate, device: Device, usage: Usage | None) -> Iterator[str]:
    """What a block is estimated to take, and what the compiler says."""
    yield f"shared memory: {needs.shared} B of {device.shared_per_block} B a block (estimate)"
    yield from (f"  {b.name:4} {b.bytes:8} B  {b.shape}" for b in needs.buffers)
    registers = ", ".join(f"{name} {count}" for name, count in needs.registers.items())
    limit = device.registers_per_thread
    yield f"registers: {needs.registers_per_thread} a thread of {limit} (estimate: {registers})"
    if usage is not None:
        spills = f"{usage.stack} B spilled a thread" if usage.stack else "no spills"
        yield f"compiled: {usage.registers} registers, {spills}, {usage.shared} B of shared memory"


def _speed(e: Explanation) -> Iterator[str]:
    yield from roofline_lines(e.roofline, e.device)
    moved = _traffic(e)
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
    sums = _sum_terms(bound, 4096)
    yield "error bound, first order (Blanchard, Higham, Higham; arXiv 1909.03469), per element"
    yield "  |o - exact| <= sum_j P_ij (e_ij + sum_j P_ij e_ij + sums + u_p) |v_j| + u_o |o|"
    yield f"  u_p = {bound.p_dtype.unit_roundoff:.2g} ({bound.p_dtype}: p is rounded before it meets v)"
    yield f"  u_o = {bound.o_dtype.unit_roundoff:.2g} ({bound.o_dtype}: the result is rounded once)"
    yield f"  sums = {sums:.2g} at N = 4096 (f32, {bound.tile_kv} keys a partial sum, {bound.splits} split)"
    per_score = bound.dot_error(bound.head_dim)
    yield f"  e_ij <= {per_score:.2g} |q_i||k_j| scale + {_U:.2g} (2 (m_i - s_ij) + 2 |m_i| + 4)"
    total = bound.p_dtype.unit_roundoff + sums + bound.o_dtype.unit_roundoff
    yield f"  for scores of moderate size: about {total:.2g} of the largest |v|"


def _because(e: Explanation) -> Iterator[str]:
    yield "because"
    width = max(len(where) for _, where in _decisions(e))
    yield from (f"  {where:{width}}  {what}" for what, where in _decisions(e))
    for note in mask_notes(e.module.variant):
        yield f"  {_place(note.primary.span):{width}}  {note.message}"


_ORDERS = {
    "forward_q_kv": "FlashAttention-2 loop order",
    "forward_kv_q": "FlashAttention-1 loop order",
    "decode": "Flash-Decoding: rows of all heads of a group, shares of the keys",
}


def _decisions(e: Explanation) -> list[tuple[str, str]]:
    """What was decided, and the spec line that it follows from."""
    attention = e.module.variant.attention
    order = _ORDERS[e.kernel.structure]
    knobs = e.schedule.knobs.get("forward", {})
    loops = knobs["loops"].span if "loops" in knobs else e.schedule.span
    masked = sum(loop.masked is not False for loop in e.kernel.regions.loops)
    found = [(order, _place(loops))]
    if attention.mask != TRUE:
        count = len(e.kernel.regions.loops)
        found.append(
            (f"{count} loop{'s' * (count > 1)}, {masked} with mask code", _place(attention.mask.span))
        )
    found.append((_scale(e.kernel), _place(attention.score.span)))
    if e.kernel.unified is not None:
        found.append((_unified(e.kernel.unified), _place(knobs["softmax"].span)))
    if e.kernel.softmax.sink is not None:
        found.append(("the sink joins the denominator", _place(attention.softmax.span)))
    knob_lines = {
        key: _place(knobs[key].span) for key in ("tile.q", "tile.kv", "warps", "stages") if key in knobs
    }
    for key, where in knob_lines.items():
        choices = len(knobs[key].choices)
        found.append((f"{key} = {as_knobs(_config(e))[key]}{f', one of {choices}' * (choices > 1)}", where))
    return found


def _scale(kernel: ir.Kernel) -> str:
    if kernel.softmax.scale is None:
        return "the score is evaluated in base-2 units, element by element"
    scale, largest = f"{kernel.softmax.scale:.6g}", "m" if kernel.unified is None else "phi"
    return f"exp2(scale * s - {largest}) with scale = {scale}: one fused multiply-add per element"


def _unified(unified: UnifiedMax) -> str:
    if not unified.fallback:
        return "one maximum for all rows, without a fallback: no score can leave the bounds"
    return "one maximum for all rows; a share with a row outside of the bounds is computed again"


def _roofline(module: ir.Module, device: Device, p: Picture) -> Roofline:
    """Work of one head times enough heads and sequences for 16k tokens at hidden size 2048; where query heads
    share a tile, of K and V.
    """
    attention, kernel = module.variant.attention, module.kernels[0]
    d, dv = features(attention.q), features(attention.v)
    dtype = DType(attention.q.dtype)
    of_key = d if isinstance(attention.v.storage, Prefix) else d + dv
    moved = float(dtype.bytes * (p.queries * (d + dv) + p.keys * of_key))
    heads = "heads" if kernel.pack is None else "K/V heads"
    return roofline_of(d, device, p, dtype=dtype, columns=d + dv, moved=moved, of=heads)


def _sum_terms(bound: ir.ErrorBound, keys: int) -> float:
    """2 u (keys of a partial sum + partial sums + 2 splits + 8): rounding of the f32 sums over the keys."""
    tiles = math.ceil(keys / bound.min_tile_kv)
    return 2 * _U * (bound.tile_kv + tiles + 2 * bound.splits + 8)


def bounds_of(kernel: ir.Kernel) -> list[tuple[str, str]]:
    """Names and values of the scalars of a program."""
    found = []
    for statement in (*kernel.program, *kernel.regions.bounds):
        match statement:
            case ir.Let(name=name, value=value) | ir.Fetch(name=name, load=value):
                found.append((name, show(value)))
    return found


_KINDS = {True: "partial tiles, mask evaluated", False: "full tiles, no mask code"}


def _masked(loop: ir.Loop) -> bool | str:
    """Whether its tiles are partial, or the condition under which one is."""
    return loop.masked if isinstance(loop.masked, bool) else show(loop.masked)


def _guard(loop: ir.Loop) -> str | None:
    return None if loop.guard is None else show(loop.guard)


def _place(span: Span | None) -> str:
    return "-" if span is None else f"{span.source.path}:{span.line}"


def _needs(e: Explanation) -> Estimate:
    config, layout = _config(e), e.kernel.cuda
    return estimate(config, e.module.variant, e.device) if layout is None else cuda_estimate(layout, config)


def _traffic(e: Explanation) -> tuple[Traffic, DeviceMemory] | None:
    """Of all heads of the roofline's shape; None where the plan does not lay out shared memory."""
    layout, tiles, heads = e.kernel.cuda, e.roofline.picture, e.roofline.heads
    if layout is None or e.kernel.structure not in ("forward_q_kv", "forward_kv_q"):
        return None
    one = traffic(e.kernel, layout, _config(e), tiles)
    return one.times(heads), device_memory(e.kernel, layout, _config(e), tiles, heads, e.device)


def _config(e: Explanation) -> Any:
    return e.kernel.configs[e.position]


def _tiles(module: ir.Module, position: int) -> tuple[int, int]:
    config = module.kernels[0].configs[position]
    tile_q, tile_kv = config["tile.q"], config["tile.kv"]
    if not (isinstance(tile_q, int) and isinstance(tile_kv, int)):
        raise ValueError("tile sizes are numbers")
    return tile_q, tile_kv
