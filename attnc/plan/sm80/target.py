"""The targets `cuda.sm_80` and newer: kernels of `mma.sync`, `ldmatrix` and `cp.async`, laid out by the plan.

Each means its own architecture and everything newer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from attnc.diagnostics import Diagnostic
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import BackwardConfig, ForwardConfig, Knob, Schedule, Summation, TileConfig
from attnc.plan.access import HALF
from attnc.plan.device import DEVICES, Device, devices_from
from attnc.plan.fitting import Tiles, TileShape, choices, decode_tiles
from attnc.plan.ir import Module, OutputKernel
from attnc.plan.ir.backward import Backward
from attnc.plan.layout import BackwardLayout, DeviceMemory, Estimate, KernelName, Layout, Traffic, Which
from attnc.plan.lists import listing_of
from attnc.plan.picture import Picture
from attnc.plan.signature import feature, is_plain, normalise
from attnc.plan.sm80.backward import (
    check_cuda_backward,
    cuda_backward_estimate,
    cuda_choices,
    plan_cuda_backward,
    refuse_latent_gradients,
)
from attnc.plan.sm80.forward import check_cuda, cuda_configs, cuda_estimate, cuda_layout
from attnc.plan.sm80.layout import MMA, CudaBackwardLayout, CudaLayout, device_memory, traffic
from attnc.plan.target import Target

#: Structures whose traffic is counted.
_COUNTED = ("forward_q_kv", "forward_kv_q")
#: Columns up to which adding dq atomically was measured; and up to which warps have rows of their own.
_NARROW, _WIDEST = 128, 256
#: Columns up to which two stages of a decode kernel are faster than three, on an H200.
_SHORT_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm80(Target):
    """Kernels in CUDA C++ for one architecture and everything newer."""

    family: ClassVar = "sm80"
    cuts_edges: ClassVar = False
    always_fills: ClassVar = False
    has_backward: ClassVar = True
    lists_are_bits: ClassVar = True
    breaks_order: ClassVar = "prompts sum all keys in one chain, decode steps those of a split"
    has_rows_kernel: ClassVar = True
    sections: ClassVar = HALF

    def check(self, variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
        return check_cuda(variant, schedule)

    def check_backward(self, knob: Knob) -> Iterator[Diagnostic]:
        return check_cuda_backward(knob)

    def sum_of_dq(self, variant: Variant, *, deterministic: bool) -> Summation:
        attention = normalise(variant.attention)
        narrow = max(feature(attention.q), feature(attention.v)) <= _NARROW
        return "atomic" if not deterministic and narrow and is_plain(attention) else "two_pass"

    def refuse_latent_gradients(self, attention: Attention) -> str:
        return refuse_latent_gradients(attention)

    def instead_of_drawing(self, variant: Variant, schedule: Schedule) -> str:
        listing = listing_of(variant.attention)
        if listing is None or not (listing.rows % MMA or listing.gathers):
            return Target.instead_of_drawing(self, variant, schedule)
        return "write a schedule for the target 'triton'"  # tiles of other queries than those of a list

    def default_schedule(self, shape: TileShape) -> Iterator[str]:
        if shape.listed is not None and shape.listed[0] % MMA:
            shared = "q" if shape.form == "stick_breaking" else "kv"
            yield f"loops = [kv], pack = gqa, split.kv = auto, warp_split = {shared}, tile.q = 16"
            return
        if shape.width > _WIDEST or shape.listed is not None:  # the plan has the sizes
            yield "loops = [q, kv], order = longest_first"
            if sizes := shape.wanted.by_key():
                yield ", ".join(f"{key} = {value}" for key, value in sizes.items())
            return
        first = Tiles(128 if shape.width <= 128 else 64, 64, 4, 1)
        yield "loops = [q, kv], warp_split = q, order = longest_first"
        yield from choices(first, shape.wanted)

    def default_steps(self, shape: TileShape, splits: str = "auto") -> Iterator[str]:
        stages = "2, 3" if shape.width <= _SHORT_ROWS else "3, 2"
        yield f"loops = [kv], pack = gqa, split.kv = {splits}, warp_split = kv"
        yield f"tile.q = 16, tile.kv in {{{decode_tiles(shape)}}}, warps = 4, stages in {{{stages}}}"

    def configs(self, variant: Variant, schedule: Schedule) -> tuple[ForwardConfig, ...]:
        return cuda_configs(variant, schedule)

    def backward_configs(
        self, variant: Variant, schedule: Schedule, kernel: KernelName, layout: BackwardLayout | None
    ) -> tuple[BackwardConfig, ...]:
        return cuda_choices(_backward(layout), variant, schedule, kernel)

    def layout(self, variant: Variant, schedule: Schedule, config: TileConfig) -> CudaLayout:
        return cuda_layout(variant, config, schedule)

    def backward_layout(
        self, variant: Variant, schedule: Schedule, forward: Layout | None
    ) -> CudaBackwardLayout:
        return plan_cuda_backward(variant, schedule, _forward(forward))

    def count_shared_bytes(
        self, variant: Variant, config: TileConfig, kernel: Which, layout: Layout | BackwardLayout | None
    ) -> int:
        if kernel == "forward":
            return sum(_forward(layout).shared_memory(config).values())
        return sum(_backward(layout).shared_memory(config, kernel).values())

    def count_joined(self, configs: Iterable[TileConfig], layout: Layout | None) -> int:
        most = max(config.warps for config in configs)
        return most if _forward(layout).warp_split == "kv" else 0

    def estimate(self, module: Module, config: TileConfig, kernel: Which, device: Device) -> Estimate:
        if kernel == "forward":
            return cuda_estimate(layout_of(module.kernel), config)
        if module.backward is None:
            raise ValueError(f"'{module.variant.name}' has no backward")
        return cuda_backward_estimate(backward_layout_of(module.backward), config, kernel)

    def traffic(
        self, kernel: OutputKernel, config: TileConfig, tiles: Picture, heads: int, device: Device
    ) -> tuple[Traffic, DeviceMemory] | None:
        if kernel.structure not in _COUNTED:
            return None
        layout = layout_of(kernel)
        one = traffic(kernel, layout, config, tiles)
        return one.times(heads), device_memory(kernel, layout, config, tiles, heads, device)


SM80 = tuple(Sm80(name=f"cuda.{arch}", devices=devices_from(arch)) for arch in DEVICES)


def layout_of(kernel: OutputKernel) -> CudaLayout:
    """Returns how a kernel of these targets lies on the machine."""
    return _forward(kernel.layout)


def backward_layout_of(backward: Backward) -> CudaBackwardLayout:
    """Returns how the kernels of a backward for these targets lie on the machine."""
    return _backward(backward.layout)


def _forward(layout: object) -> CudaLayout:
    if not isinstance(layout, CudaLayout):
        raise TypeError(f"not a layout of mma.sync: {layout!r}")
    return layout


def _backward(layout: object) -> CudaBackwardLayout:
    if not isinstance(layout, CudaBackwardLayout):
        raise TypeError(f"not a layout of a backward of mma.sync: {layout!r}")
    return layout
