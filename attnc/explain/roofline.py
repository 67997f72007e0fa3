"""How fast a launch could be at most: its work at an example shape over the ceilings of the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attnc.model.tensors import DType
from attnc.plan.device import Device
from attnc.plan.picture import Picture


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
    d: int, device: Device, p: Picture, *, dtype: DType, columns: int, moved: float, of: str = "heads"
) -> Roofline:
    """dtype: of q, k and v; columns: multiply-adds for each score; moved: bytes of one head; of: what heads
    they are.
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
        exponentials=elements,
        tflops=tflops,
        tensor_us=flops / (tflops * 1e12) * 1e6,
        memory_us=moved / (device.bandwidth_gbs * 1e9) * 1e6,
        exp2_us=elements / device.exp2_per_second * 1e6,
    )


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
    """Work and time of each unit, and which one bounds the launch."""
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
