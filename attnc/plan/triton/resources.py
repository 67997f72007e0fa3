"""What a config of a Triton kernel takes from a multiprocessor, estimated without a compiler.

Shared memory: the sum of its buffers, never less than the compiler asks for. Registers: the accumulator, the
scores and the probabilities live through every step, a lower bound that ptxas may exceed (spills show in
`attnc explain`). Non-goal: ranking the configs that fit; that is measured (`attnc tune`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnc.effort import spend
from attnc.expr.nodes import Load, walk
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import TileConfig
from attnc.model.tensors import DType
from attnc.plan.device import DEVICES, Device
from attnc.plan.estimate import Buffer, Estimate
from attnc.plan.fitting import phase_of
from attnc.plan.layout import Which
from attnc.plan.triton.buffers import SharedMemory

_THREADS_PER_WARP = 32
#: What an estimate costs.
_STEPS = 100
#: Addresses, loop counters, row statistics: what every kernel needs besides its tiles.
_BASE_REGISTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A config that cannot run on a device: it needs `needs` of what the device has `limit` of. because: the
    reason in other words.
    """

    config: TileConfig
    what: str
    needs: int
    limit: int
    unit: str
    because: str = ""

    @property
    def excess(self) -> float:
        return self.needs / self.limit

    def __str__(self) -> str:
        if self.because:
            return self.because
        return f"needs {self.needs} {self.unit} of {self.what}; the limit is {self.limit} {self.unit}"


def estimate(config: TileConfig, variant: Variant, device: Device, kernel: Which = "forward") -> Estimate:
    """The needs of the forward kernel of this variant on the device, or of one of the backward."""
    spend(_STEPS)
    attention = variant.attention
    tile_q, tile_kv = config.tile_q, config.tile_kv
    memory = SharedMemory(config=config, attention=attention, device=device, kernel=kernel)
    d, dv = memory.columns
    size, threads = DType(attention.q.dtype).bytes, config.warps * _THREADS_PER_WARP
    accumulated = {
        "forward": tile_q * dv,
        "dq": tile_q * d,
        "rows": 0,
        "dkdv": tile_kv * (d + dv),
        "dk": tile_kv * d,
        "dv": tile_kv * dv,
    }
    scores = tile_q * tile_kv // threads
    registers = {"acc": accumulated[kernel] // threads, "s": scores}
    if kernel not in ("forward", "dv"):
        registers["dp"] = scores
    registers |= {"p": tile_q * tile_kv * size // 4 // threads, "other": _BASE_REGISTERS}
    if kernel == "forward" and not device.has_mma_from_shared:
        registers["q"] = tile_q * d * size // 4 // threads
    buffers = [buffer for buffer in memory.buffers if buffer.bytes]
    # What is stored in the end changes its layout there, when all else has gone.
    result = accumulated[kernel] * (DType(attention.o.dtype).bytes if kernel == "forward" else size)
    beyond = result - sum(buffer.bytes for buffer in buffers)
    if beyond > 0:
        buffers.append(Buffer(name="result", shape="beyond the others", bytes=beyond))
    return Estimate(buffers=tuple(buffers), registers=registers)


def misfit(
    config: TileConfig, variant: Variant, device: Device, kernel: Which = "forward"
) -> Rejection | None:
    """Why the config cannot run on the device; None if it can."""
    if (summed := _summed(config, kernel)) < _SHORTEST and _joins_narrow_words(variant.attention):
        return Rejection(
            config=config,
            what="an operand's summed axis",
            needs=_SHORTEST,
            limit=summed,
            unit="elements",
            because=f"sums over {summed} elements: too few for Triton where bools stand beside dropout",
        )
    needs = estimate(config, variant, device, kernel)
    if needs.shared > device.shared_per_block:
        return Rejection(
            config=config, what="shared memory", needs=needs.shared, limit=device.shared_per_block, unit="B"
        )
    live = needs.registers["acc"] + needs.registers["s"]
    if live > device.registers_per_thread:
        return Rejection(
            config=config,
            what="a thread's registers for acc and s",
            needs=live,
            limit=device.registers_per_thread,
            unit="words",
        )
    return None


#: Elements that `tl.dot` sums over below which Triton lays an operand out wrongly that was computed from
#: 8-bit words and from a `tl.join`, as dropout's words are: runs of 32 bits / 8 bits * 2 for each of four
#: threads. Releases up to 3.7 count some elements twice there and others never (triton-lang/triton, pulls
#: 10645 and 11691).
_SHORTEST = 32


def _summed(config: TileConfig, kernel: Which) -> int:
    """Elements of a tile that the kernel's products of p sum over."""
    of_rows = phase_of(kernel) == "dkdv"
    return config.tile_q if of_rows else config.tile_kv


def _joins_narrow_words(attention: Attention) -> bool:
    """Whether p is computed from 8-bit words of memory and from dropout's."""
    used = (node for expr in (attention.score, attention.mask) for node in walk(expr))
    reads_bools = any(isinstance(node, Load) and node.type == "bool" for node in used)
    return attention.softmax.dropout is not None and reads_bools


def room(config: TileConfig, variant: Variant, kernel: Which = "forward") -> int:
    """Bytes of shared memory that a block must be allowed for a launcher to take the config: the fewest such
    that every supported device that allows as many has what the config needs there.
    """
    needs = {device: estimate(config, variant, device, kernel).shared for device in DEVICES.values()}
    enough = [size for device, size in needs.items() if size <= device.shared_per_block]
    too_few = [
        device.shared_per_block + 1 for device, size in needs.items() if size > device.shared_per_block
    ]
    return max(min(enough, default=0), *too_few, 0)


def staged(config: TileConfig, variant: Variant) -> int:
    """Bytes of shared memory that a block takes where tensor cores read tiles there and so more of them wait;
    0 if its tiles are too small for that.
    """

    def shared(device: Device) -> int:
        return estimate(config, variant, device).shared

    readers = [device for device in DEVICES.values() if device.has_mma_from_shared]
    more = (shared(d) for d in readers if shared(d) > shared(replace(d, has_mma_from_shared=False)))
    return max(more, default=0)
