"""The plan of a forward kernel in figures (`explain`, `as_dict`) and in words (`as_text`): its loops and
loads, its resources, its roofline, its error bound.

Nothing is run and no GPU is needed. Every figure follows from the plan and the device table; the caller
passes in what only a compiler knows (registers, spills).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnc.explain.kernel import (
    KernelUsage,
    Roofline,
    bounds_dict,
    count_exponentials,
    grid_line,
    loop_lines,
    masked_where,
    resource_dict,
    resource_lines,
    roofline_dict,
    roofline_lines,
    roofline_of,
)
from attnc.expr.nodes import TRUE, show
from attnc.model.dtypes import DType
from attnc.model.schedule import HopperConfig, Schedule, TileConfig
from attnc.plan import ir
from attnc.plan.device import Device
from attnc.plan.ir import Decode
from attnc.plan.ir.kernel import UnifiedMax
from attnc.plan.ir.module import Conversion, ListedRows
from attnc.plan.layout import DeviceMemory, Estimate, Traffic
from attnc.plan.mask_findings import mask_notes
from attnc.plan.order import explain_order
from attnc.plan.picture import FULL, PARTIAL, SKIP, Picture, picture
from attnc.plan.signature import feature, key_bytes
from attnc.plan.targets import complete_schedule, target_of
from attnc.source import Span, visible

UNIT = 2.0**-24
#: (M, N) of the pictures, and N of the roofline.
_SHAPES, _DECODE_SHAPES = ((512, 512), (192, 576)), ((1, 512), (8, 512))
_LENGTH, _DECODE_LENGTH = 4096, 8192
_ORDERS = {
    "forward_q_kv": "FlashAttention-2 loop order",
    "forward_kv_q": "FlashAttention-1 loop order",
    "decode": "Flash-Decoding: rows of all heads of a group, splits of the keys",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One kernel of one module under one config, on one device."""

    module: ir.Module
    schedule: Schedule
    position: int
    device: Device
    pictures: tuple[Picture, ...]
    roofline: Roofline
    usage: KernelUsage | None

    @property
    def kernel(self) -> ir.Forward | ir.Decode:
        return self.module.kernel

    @property
    def config(self) -> TileConfig:
        return self.kernel.configs[self.position]

    @property
    def tiles(self) -> tuple[int, int]:
        return tiles_of(self.config)

    @property
    def needs(self) -> Estimate:
        target = target_of(self.module.target)
        return target.estimate(self.module, self.config, "forward", self.device)

    @property
    def traffic(self) -> tuple[Traffic, DeviceMemory] | None:
        """The bytes that all heads of the roofline's shape move; None where the plan does not lay out shared
        memory.
        """
        tiles, heads = self.roofline.picture, self.roofline.heads
        return target_of(self.module.target).traffic(self.kernel, self.config, tiles, heads, self.device)


def explain(
    module: ir.Module,
    schedule: Schedule,
    device: Device,
    position: int = 0,
    shapes: Sequence[tuple[int, int]] | None = None,
    length: int | None = None,
    usage: KernelUsage | None = None,
) -> Explanation:
    """Explains the config at `position`; pictures at (M, N) `shapes`, the roofline at N = `length`. Missing
    sizes are those of a prompt, or of a decode step for decode kernels.
    """
    kernel = module.kernel
    config = kernel.configs[position]
    tiles = config.rows_together, config.tile_kv
    decodes = kernel.structure == "decode"
    if shapes is None:
        shapes = _DECODE_SHAPES if decodes else _SHAPES
    if length is None:
        length = _DECODE_LENGTH if decodes else _LENGTH
    return Explanation(
        module=module,
        schedule=complete_schedule(module.variant, schedule),
        position=position,
        device=device,
        pictures=tuple(picture(kernel, m, n, *tiles) for m, n in shapes),
        roofline=_roofline(module, device, picture(kernel, 1 if decodes else length, length, *tiles)),
        usage=usage,
    )


def as_dict(e: Explanation) -> dict[str, Any]:
    bound, moved = e.kernel.bound, e.traffic
    return {
        "attention": e.module.variant.attention.name,
        "variant": e.module.variant.name,
        "target": e.module.target,
        "device": e.device.arch,
        "config": e.config.texts(),
        "structure": e.kernel.structure,
        **({"order": lines} if (lines := [*explain_order(e.module)]) else {}),
        "mask": show(e.module.variant.attention.mask),
        "bounds": bounds_dict(e.kernel),
        "loops": [
            {
                "start": show(loop.start),
                "stop": show(loop.stop),
                "masked": masked_where(loop),
                "guard": None if loop.guard is None else show(loop.guard),
                "listed": None if loop.listed is None else loop.listed.block,
            }
            for loop in e.kernel.regions.loops
        ],
        "pictures": [{"M": p.queries, "N": p.keys, "rows": list(p.rows), "note": p.note} for p in e.pictures],
        **resource_dict(e.needs, e.device, e.usage),
        "roofline": roofline_dict(e.roofline),
        "traffic": None if moved is None else asdict(moved[0]) | {"device_memory": asdict(moved[1])},
        "error_bound": {
            "p_roundoff": bound.p_dtype.unit_roundoff,
            "o_roundoff": bound.o_dtype.unit_roundoff,
            "sum_terms": sum_terms(bound, 4096),
        },
        "because": [{"decision": what, "spec": where} for what, where in decisions(e)],
    }


def decisions(e: Explanation) -> list[tuple[str, str]]:
    """Returns the decisions, each with the line of the spec that it follows from."""
    attention = e.module.variant.attention
    order = _ORDERS[e.kernel.structure]
    knobs = e.schedule.forward
    loops = knobs["loops"].span if "loops" in knobs else e.schedule.span
    masked = sum(loop.masked is not False for loop in e.kernel.regions.loops)
    found = [(order, place_of(loops))]
    if attention.mask != TRUE:
        count = len(e.kernel.regions.loops)
        found.append(
            (f"{count} loop{'s' * (count > 1)}, {masked} with mask code", place_of(attention.mask.span))
        )
    if (made := e.module.lists) is not None:
        of = f"for every {made.rows} queries" if made.rows > 1 else "for every query"
        of = of if made.rows else "for all queries"
        keys = f"the blocks of {made.keys} keys" if made.keys > 1 else "the single keys"
        gathered = f": {key_bytes(attention)} B are gathered for each" if made.keys == 1 else ""
        what = f"tiles of {keys} that '{made.tensor}' lists {of}{gathered}"
        if made.kept is not None:
            what = (
                f"tiles of {keys} in which the mask keeps a pair {of}, found on the device before each call"
            )
        if made.queries > 1:
            what = f"{what}: {made.queries} in a tile, which visits those of any"
        found.append((what, place_of(attention.mask.span)))
    if (rows := e.module.listed_rows) is not None:
        found.append((_describe_rows(rows), place_of(attention.mask.span)))
    found.append((_scale(e.kernel), place_of(attention.score.span)))
    if (unified := ir.unified_of(e.kernel)) is not None:
        found.append((_describe_unified(unified), place_of(knobs["softmax"].span)))
    if e.kernel.softmax.sink is not None:
        found.append(("the sink joins the denominator", place_of(attention.softmax.span)))
    if e.kernel.softmax.v_scale is not None:
        found.append(("v is scaled where o is: before it is rounded", place_of(attention.softmax.span)))
    if attention.softmax.scales_keys:
        what = "p is multiplied by the scale of v that each key has, before it is rounded"
        found.append((what, place_of(attention.softmax.span)))
    if attention.epilogue is not None:
        what = "rows of o go through the epilogue in registers, before they are rounded"
        found.append((what, place_of(attention.epilogue.span)))
    for tensor in (attention.k, attention.v):
        if DType(tensor.dtype).is_narrow:
            what = f"{tensor.name} of {tensor.dtype} is converted to {attention.element}, exactly"
            found.append((what, place_of(tensor.span)))
    knob_lines = {
        key: place_of(knobs[key].span) for key in ("tile.q", "tile.kv", "warps", "stages") if key in knobs
    }
    for key, where in knob_lines.items():
        choices = len(knobs[key].choices)
        found.append((f"{key} = {e.config.texts()[key]}{f', one of {choices}' * (choices > 1)}", where))
    return found


def _scale(kernel: ir.Forward | ir.Decode) -> str:
    if kernel.softmax.breaks_sticks:
        of_keys = "by tensor cores" if kernel.bound.summand_error else "among lanes"
        return f"two exp2 and a polynomial for each score, a sum over keys {of_keys}; no maximum"
    if not kernel.softmax.normalises:
        return "the weight is evaluated element by element; no maximum, no sum, no lse"
    if kernel.softmax.scale is None:
        return "the score is evaluated in base-2 units, element by element"
    scale, largest = f"{kernel.softmax.scale:.6g}", "m" if ir.unified_of(kernel) is None else "phi"
    return f"exp2(scale * s - {largest}) with scale = {scale}: one fused multiply-add per element"


def _describe_unified(unified: UnifiedMax) -> str:
    if not unified.fallback:
        return "one maximum for all rows, without a fallback: no score can leave the bounds"
    return "one maximum for all rows; a split with a row outside of the bounds is computed again"


def _roofline(module: ir.Module, device: Device, p: Picture) -> Roofline:
    """Returns the roofline of the work of one head times enough heads and sequences for 16k tokens at hidden
    size 2048; where query heads share a tile, of K and V.
    """
    attention, kernel = module.variant.attention, module.kernel
    d, dv = feature(attention.q), feature(attention.v)
    dtype = attention.element
    moved = float(dtype.bytes * p.queries * (d + dv) + p.keys_read * key_bytes(attention))
    heads = "heads" if ir.pack_of(kernel) is None else "K/V heads"
    exponentials = count_exponentials(kernel)
    return roofline_of(
        d, device, p, dtype=dtype, columns=d + dv, moved=moved, exponentials=exponentials, of=heads
    )


def sum_terms(bound: ir.ErrorBound, keys: int) -> float:
    """Returns 2 u (keys of a partial sum + partial sums + 2 splits + 8): rounding of the f32 sums over the
    keys, and what tensor cores cut off beyond that where all keys pass through one sum.
    """
    tiles = math.ceil(keys / bound.min_tile_kv)
    rounded = 2 * UNIT * (bound.tile_kv + tiles + 2 * bound.splits + bound.joining_error(keys) + 8)
    cut_off = bound.addition_error * keys - UNIT * bound.tile_kv if bound.chained else 0.0
    return rounded + max(cut_off, 0.0)


def place_of(span: Span | None) -> str:
    return "-" if span is None else visible(f"{span.source.path}:{span.line}")


def tiles_of(config: TileConfig) -> tuple[int, int]:
    """Returns how many rows and keys a tile has."""
    return config.tile_q, config.tile_kv


def as_text(e: Explanation) -> str:
    sections = (_head, _structure, _order, _mask, _resources, _speed, _accuracy, _because)
    written = ("\n".join(section(e)) for section in sections)
    return "\n\n".join(filter(None, written)) + "\n"


def _head(e: Explanation) -> Iterator[str]:
    variant, device = e.module.variant, e.device
    yield f"{variant.attention.name} {variant.name} for {e.module.target}, on {device.arch} ({device.part})"
    written = e.schedule.forward
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
            if e.kernel.split.in_turn:
                yield "  splits take tiles in turn"
    else:
        yield f"  {grid_line(e.kernel, tile_q, tile_kv)}"
    if grid.persistent:
        blocks = e.config.blocks if isinstance(e.config, HopperConfig) else 1
        programs = "one program per SM" if blocks == 1 else f"each of {blocks} programs per SM"
        yield f"  persistent: {programs} ({blocks * e.device.sms} here) walks over the tiles"
    if grid.longest_first:
        yield "  longest first: the last rows, which see most keys, start first"
    if (conversion := e.module.conversion) is not None:
        yield from conversion_lines(conversion)
    yield from loop_lines(e.kernel, tile_q, tile_kv)


def conversion_lines(conversion: Conversion) -> Iterator[str]:
    """Yields lines on the conversion of k and v before the kernel, and on the memory that the results
    take.
    """
    for made in conversion.tensors:
        stored, seen = made.stored.tensor, made.made.tensor
        scaled = ", times its scale and rounded once," if made.scale is not None else ""
        to = f"{seen.dtype}: {feature(seen) * DType(seen.dtype).bytes} B of memory a row"
        yield f"  before it, a kernel converts {stored.name} of {stored.dtype}{scaled} to {to}"


def _order(e: Explanation) -> Iterator[str]:
    lines = [*explain_order(e.module)]
    if lines:
        yield f"bits of a row depend on its own keys alone ({place_of(e.module.variant.attention.ordered)})"
        yield from (f"  {line}" for line in lines)


def _describe_rows(rows: ListedRows) -> str:
    parts = ["finds the sequence of a packed query"] if rows.packed else []
    parts += [] if rows.keep == TRUE else ["drops keys that the rest of the mask forbids"]
    parts += [] if rows.page is None else ["looks up pages"]
    if rows.queries > 1:
        parts.append(f"unites the lists of {rows.queries} queries, whose heads share a tile")
    return f"a kernel before it {', '.join((*parts, 'writes rows of memory'))}: all of a list are visited"


def _mask(e: Explanation) -> Iterator[str]:
    mask = e.module.variant.attention.mask
    yield f"mask: {'none' if mask == TRUE else show(mask)}"
    yield f"  tiles: '{SKIP}' skipped, '{PARTIAL}' partial, '{FULL}' full; q downwards, kv to the right"
    if e.module.lists is not None:
        yield "  of these a kernel visits the ones that are listed; here all are"
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
    scale = "" if e.kernel.softmax.v_scale is None else "|v_scale| "
    name = "o" if e.kernel.epilogue is None else "attention"
    if not e.kernel.softmax.normalises:
        rounded = " + u_o |o|" if name == "o" else ""
        of_weight = "" if not e.kernel.softmax.breaks_sticks else ", of those behind it too"
        yield f"  |{name} - exact| <= sum_j (e_ij + |w_ij| (sums + u_p)) |v_j|{rounded}"
        yield f"  e_ij: the running error of the weight w_ij{of_weight}; sums = {sums:.2g} at N = 4096"
        return
    rounded = " + u_o |o|" if name == "o" else ""
    of_key = "" if e.kernel.step.v_scale is None else "|v_scale_j| "
    errors = "(e_ij + sum_j P_ij e_ij + sums + u_p)"
    yield f"  |{name} - exact| <= {scale}sum_j {of_key}P_ij {errors} |v_j|{rounded}"
    yield f"  u_p = {bound.p_dtype.unit_roundoff:.2g} ({bound.p_dtype}: p is rounded before it meets v)"
    yield f"  u_o = {bound.o_dtype.unit_roundoff:.2g} ({bound.o_dtype}: the result is rounded once)"
    if name != "o":
        yield "  o has the running error of the epilogue besides, from that of the attention, and u_o |o|"
    if bound.left_out:
        yield f"  + {bound.left_out:.2g} (max_j |v_j| + |o|) at most, for keys that are left out"
    splits = f"{bound.splits} split{'s' * (bound.splits > 1)}"
    yield f"  sums = {sums:.2g} at N = 4096 (f32, {bound.tile_kv} keys a partial sum, {splits})"
    per_score = bound.dot_error(bound.head_dim)
    yield f"  e_ij <= {per_score:.2g} |q_i||k_j| scale + {UNIT:.2g} (2 (m_i - s_ij) + 2 |m_i| + 4)"
    total = bound.p_dtype.unit_roundoff + sums + bound.o_dtype.unit_roundoff
    yield f"  for scores of moderate size: about {total:.2g} of the largest {scale}|v|"


def _because(e: Explanation) -> Iterator[str]:
    yield "because"
    width = max(len(where) for _, where in decisions(e))
    yield from (f"  {where:{width}}  {what}" for what, where in decisions(e))
    for note in mask_notes(e.module.variant):
        yield f"  {place_of(note.primary.span):{width}}  {note.message}"
