"""What is said of a kernel of either phase: its grid and loops, the resources of a block, the compiler's
report, and the roofline of a launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from attnc.expr.nodes import Const, Index, show
from attnc.model.dtypes import DType
from attnc.plan import ir
from attnc.plan.device import Device
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.ir.kernel import Pack
from attnc.plan.layout import Estimate
from attnc.plan.picture import Picture

# --- grid, loops and resources


_KINDS = {True: "partial tiles, mask evaluated", False: "full tiles, no mask code"}


class KernelUsage(Protocol):
    """What a compiler says of one kernel: registers of a thread, bytes of stack (spills), bytes of shared
    memory.
    """

    @property
    def registers(self) -> int: ...
    @property
    def stack(self) -> int: ...
    @property
    def shared(self) -> int: ...


def grid_line(kernel: ir.Kernel, tile_q: int, tile_kv: int) -> str:
    """Returns which tiles have a program, and how many are launched. In a backward over keys one serves all
    query heads of a KV head; tiles of packed sequences are counted from the shapes alone (`Sequences`).
    """
    if isinstance(kernel, BackwardKernel) and kernel.pack is not None:
        return _selected_grid_line(kernel, kernel.pack, tile_q, tile_kv)
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


def _selected_grid_line(kernel: BackwardKernel, pack: Pack, tile_q: int, tile_kv: int) -> str:
    heads = "" if kernel.kv_head == Const(0) else " * H" if kernel.kv_head == Index("h") else " * Hkv"
    if kernel.adds:
        queries = f"M * B{heads} queries one after the other, {tile_q} heads at a time"
        return f"as many programs as run at a time take {queries}, and add to {' and '.join(kernel.adds)}"
    if kernel.over_q:
        what, count = f"{tile_q} heads of a query", f"M * B{heads} * ceil({show(pack.group)} / {tile_q})"
        count += ", which keep p and ds of each key for the next kernel" if kernel.keeps else ""
    elif kernel.selected is None:
        what, count = f"{tile_kv} keys of a block", f"blocks * ceil(keys / {tile_kv}) * B{heads}"
    else:
        what, block = f"{tile_kv} keys of the list of a query", kernel.selected.block
        keys = "entries" if block == 1 else f"entries * {block}"
        count = f"M * B{heads} * ceil({keys} / {tile_kv}), which add in the order of queries"
    return f"a program for each tile of {what}: {count}"


def loop_lines(kernel: ir.Kernel, tile_q: int, tile_kv: int) -> Iterator[str]:
    """Yields the bounds of a program, and its loops."""
    axis = kernel.regions.axis
    for name, value in bounds_of(kernel):
        yield f"  {name} = {value}"
    step = tile_kv if axis == "kv" else tile_q
    for loop in kernel.regions.loops:
        kind = _KINDS[loop.masked] if isinstance(loop.masked, bool) else f"partial where {masked_where(loop)}"
        if isinstance(kernel, BackwardKernel) and kernel.weighs:
            kind = "p and ds that the kernel before it keeps, no mask code"
        guard = f", where {show(loop.guard)}" if loop.guard is not None else ""
        guard += "".join(f", {name} = {value}" for name, value in values_of(loop.tests))
        over = f"{show(loop.start)} .. {show(loop.stop)}"
        if loop.listed is not None:
            gathered = "gathered keys of " if loop.listed.gathers else ""
            over = f"{gathered}listed blocks of {loop.listed.block} (of {over})"
        yield f"  for {axis} in {over} step {step}: {kind}{guard}"


def masked_where(loop: ir.Loop) -> bool | str:
    """Returns whether its tiles are partial, or the condition under which one is."""
    return loop.masked if isinstance(loop.masked, bool) else show(loop.masked)


def bounds_of(kernel: ir.Kernel) -> list[tuple[str, str]]:
    """Returns names and values of the scalars of a program."""
    return values_of((*kernel.program, *kernel.regions.bounds))


def values_of(statements: Iterable[ir.Statement]) -> list[tuple[str, str]]:
    """Returns names and values of those statements that are numbers."""
    found = []
    for statement in statements:
        match statement:
            case ir.Let(name=name, value=value) | ir.Fetch(name=name, load=value):
                found.append((name, show(value)))
    return found


#: Bytes of a thread that cost nothing to speak of: what a loop does not change.
_FEW_SPILLED = 64


def resource_lines(needs: Estimate, device: Device, usage: KernelUsage | None) -> Iterator[str]:
    """Yields the estimated resources of a block, and the compiler's report."""
    yield f"shared memory: {needs.shared} B of {device.shared_per_block} B a block (estimate)"
    width = max((len(buffer.name) for buffer in needs.buffers), default=0)
    yield from (f"  {b.name:{width}} {b.bytes:8} B  {b.shape}" for b in needs.buffers)
    registers = ", ".join(f"{name} {count}" for name, count in needs.registers.items())
    limit = device.registers_per_thread
    yield f"registers: {needs.registers_per_thread} a thread of {limit} (estimate: {registers})"
    if usage is not None:
        spills = f"{usage.stack} B spilled a thread" if usage.stack else "no spills"
        yield f"compiled: {usage.registers} registers, {spills}, {usage.shared} B of shared memory"
        if usage.stack > _FEW_SPILLED:
            yield "warning: spilled values pass through local memory; smaller tiles or more warps avoid that"


def resource_dict(needs: Estimate, device: Device, usage: KernelUsage | None) -> dict[str, Any]:
    """Returns the resources of a block as data, for a program."""
    return {
        "shared_memory": {
            "total": needs.shared,
            "limit": device.shared_per_block,
            "buffers": {buffer.name: buffer.bytes for buffer in needs.buffers},
        },
        "registers": {"estimate": dict(needs.registers), "limit": device.registers_per_thread},
        "compiled": None
        if usage is None
        else {"registers": usage.registers, "stack": usage.stack, "shared": usage.shared},
    }


def bounds_dict(kernel: ir.Kernel) -> list[dict[str, str]]:
    """Returns the scalars of a program, for a program."""
    return [{"name": name, "value": value} for name, value in bounds_of(kernel)]


# --- roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Lower bounds of the run time of one launch, in microseconds, and the work they come from; tflops: what
    the tensor cores do of it, TFLOP/s.
    """

    shape: str
    picture: Picture
    heads: int
    flops: float
    bytes: float
    exponentials: float
    tflops: float
    tensor_us: float
    memory_us: float
    exp2_us: float

    @property
    def bound(self) -> str:
        times = {"tensor cores": self.tensor_us, "memory": self.memory_us, "exponentials": self.exp2_us}
        return max(times, key=lambda name: times[name])

    @property
    def us(self) -> float:
        return max(self.tensor_us, self.memory_us, self.exp2_us)


#: A product of f32 is three of tf32, each at half the rate of bf16.
_F32_COST = 6


def roofline_of(
    d: int,
    device: Device,
    p: Picture,
    *,
    dtype: DType,
    columns: int,
    moved: float,
    exponentials: int,
    of: str = "heads",
) -> Roofline:
    """Returns the roofline of a kernel. dtype: of q, k and v; columns, exponentials: multiply-adds for each
    score, and exponentials; moved: bytes of one head; of: what heads they are.
    """
    heads = max(1, 2048 // d) * max(1, 16384 // p.keys)
    elements = float(p.visited * p.tile_q * p.tile_kv * heads)
    flops, moved = 2.0 * elements * columns, moved * heads
    sizes = f"M = N = {p.keys}" if p.queries == p.keys else f"M = {p.queries}, N = {p.keys}"
    tflops = device.tensor_tflops / (_F32_COST if dtype is DType.F32 else 1)
    return Roofline(
        shape=f"{sizes}, {heads} {of} in all, {p.visited} of {p.tiles} tiles visited",
        picture=p,
        heads=heads,
        flops=flops,
        bytes=moved,
        exponentials=exponentials * elements,
        tflops=tflops,
        tensor_us=flops / (tflops * 1e12) * 1e6,
        memory_us=moved / (device.bandwidth_gbs * 1e9) * 1e6,
        exp2_us=exponentials * elements / device.exp2_per_second * 1e6,
    )


def count_exponentials(kernel: ir.Kernel) -> int:
    """Returns how many exponentials a kernel takes of each score. Of a stick, what a key leaves and what it
    takes are one each; gradients need its sigmoid too, and the kernel over queries what it leaves twice.
    """
    if not kernel.softmax.breaks_sticks:
        return 1
    if not isinstance(kernel, BackwardKernel):
        return 2
    return 4 if kernel.over_q else 3


def roofline_dict(r: Roofline) -> dict[str, Any]:
    return {
        "shape": r.shape,
        "flops": r.flops,
        "bytes": r.bytes,
        "exponentials": r.exponentials,
        "tensor_us": round(r.tensor_us, 2),
        "memory_us": round(r.memory_us, 2),
        "exp2_us": round(r.exp2_us, 2),
        "bound": r.bound,
    }


def roofline_lines(r: Roofline, device: Device) -> Iterator[str]:
    """Yields work and time of each unit, and which one bounds the launch."""
    yield f"roofline at {r.shape}"
    rows = (
        ("tensor cores", r.tensor_us, f"{r.flops * 1e-9:.1f} GFLOP at {r.tflops:.0f} TFLOP/s"),
        ("memory", r.memory_us, f"{r.bytes * 1e-6:.1f} MB at {device.bandwidth_gbs:.0f} GB/s"),
        (
            "exponentials",
            r.exp2_us,
            f"{r.exponentials * 1e-9:.2f} G at {device.exp2_per_second * 1e-12:.2f} T/s",
        ),
    )
    yield from (f"  {name:12} {us:9.1f} us  {work}" for name, us, work in rows)
    yield f"  bound by {r.bound}: no launch takes less than {r.us:.1f} us"
