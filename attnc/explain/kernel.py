"""What is said of a kernel of either phase: its grid and loops, what a block takes, what a compiler says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from attnc.expr.show import show
from attnc.plan import ir
from attnc.plan.device import Device
from attnc.plan.estimate import Estimate

_KINDS = {True: "partial tiles, mask evaluated", False: "full tiles, no mask code"}


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
        kind = _KINDS[loop.masked] if isinstance(loop.masked, bool) else f"partial where {masked_where(loop)}"
        guard = f", where {show(loop.guard)}" if loop.guard is not None else ""
        guard += "".join(f", {name} = {value}" for name, value in values_of(loop.tests))
        yield f"  for {axis} in {show(loop.start)} .. {show(loop.stop)} step {step}: {kind}{guard}"


def masked_where(loop: ir.Loop) -> bool | str:
    """Whether its tiles are partial, or the condition under which one is."""
    return loop.masked if isinstance(loop.masked, bool) else show(loop.masked)


def bounds_of(kernel: ir.Kernel) -> list[tuple[str, str]]:
    """Names and values of the scalars of a program."""
    return values_of((*kernel.program, *kernel.regions.bounds))


def values_of(statements: Iterable[ir.Statement]) -> list[tuple[str, str]]:
    """Names and values of those statements that are numbers."""
    found = []
    for statement in statements:
        match statement:
            case ir.Let(name=name, value=value) | ir.Fetch(name=name, load=value):
                found.append((name, show(value)))
    return found


def resource_lines(needs: Estimate, device: Device, usage: Usage | None) -> Iterator[str]:
    """What a block is estimated to take, and what the compiler says."""
    yield f"shared memory: {needs.shared} B of {device.shared_per_block} B a block (estimate)"
    width = max((len(buffer.name) for buffer in needs.buffers), default=0)
    yield from (f"  {b.name:{width}} {b.bytes:8} B  {b.shape}" for b in needs.buffers)
    registers = ", ".join(f"{name} {count}" for name, count in needs.registers.items())
    limit = device.registers_per_thread
    yield f"registers: {needs.registers_per_thread} a thread of {limit} (estimate: {registers})"
    if usage is not None:
        spills = f"{usage.stack} B spilled a thread" if usage.stack else "no spills"
        yield f"compiled: {usage.registers} registers, {spills}, {usage.shared} B of shared memory"


def resource_dict(needs: Estimate, device: Device, usage: Usage | None) -> dict[str, Any]:
    """Returns what a block takes as data, for a program."""
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
    """The scalars of a program, for a program."""
    return [{"name": name, "value": value} for name, value in bounds_of(kernel)]
