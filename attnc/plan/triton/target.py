"""The target `triton`: its compiler lays out registers and shared memory, so the plan only estimates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from attnc.diagnostics import Diagnostic
from attnc.model.attention import Variant
from attnc.model.schedule import BackwardConfig, ForwardConfig, Knob, Schedule, TileConfig, knobs_of
from attnc.plan.default_schedule import Shape, choices
from attnc.plan.device import DEVICES, Device
from attnc.plan.estimate import Estimate
from attnc.plan.fitting import Tiles, unsupported
from attnc.plan.ir import Module
from attnc.plan.layout import BackwardLayout, KernelName, Layout, Which
from attnc.plan.sections import A_QUARTER, SHORT_LOOPS, Section
from attnc.plan.target import Target
from attnc.plan.triton import resources
from attnc.plan.triton.configs import triton_backward_configs, triton_configs

#: Keys that decide what the kernel looks like, rather than the sizes that it is launched with.
_STRUCTURE = ("loops", "softmax", "persistent", "order", "pack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Triton(Target):
    """Kernels in Triton, for every device."""

    family: ClassVar = "triton"
    cuts_edges: ClassVar = True
    always_fills: ClassVar = True
    has_backward: ClassVar = True
    has_f32_dq: ClassVar = True
    has_rows_kernel: ClassVar = False
    sections: ClassVar = A_QUARTER

    def backward_section(self, *, short_loops: bool) -> Section:
        return SHORT_LOOPS if short_loops else self.sections

    def splits_keys(self, layout: BackwardLayout | None, *, wide: bool) -> bool:
        return wide

    def check(self, variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
        for knob in knobs_of(schedule, "forward").values():
            yield from _knob(knob)

    def check_backward(self, knob: Knob) -> Iterator[Diagnostic]:
        yield from _knob(knob)

    def default_schedule(self, shape: Shape) -> Iterator[str]:
        yield from _default_schedule(shape)

    def configs(self, variant: Variant, schedule: Schedule) -> tuple[ForwardConfig, ...]:
        return triton_configs(variant, schedule)

    def backward_configs(
        self, variant: Variant, schedule: Schedule, kernel: KernelName, layout: BackwardLayout | None
    ) -> tuple[BackwardConfig, ...]:
        return triton_backward_configs(variant, schedule, kernel)

    def shared(
        self, variant: Variant, config: TileConfig, kernel: Which, layout: Layout | BackwardLayout | None
    ) -> int:
        return resources.room(config, variant, kernel)

    def staged(self, variant: Variant, config: TileConfig) -> int:
        return resources.staged(config, variant)

    def estimate(self, module: Module, config: TileConfig, kernel: Which, device: Device) -> Estimate:
        return resources.estimate(config, module.variant, device, kernel)


TRITON = Triton(name="triton", devices=tuple(DEVICES.values()))


def _knob(knob: Knob) -> Iterator[Diagnostic]:
    if knob.key in _STRUCTURE and len(knob.choices) > 1:
        yield unsupported(
            f"'{knob.key}' has one value in a Triton schedule",
            knob.span,
            "each value is a kernel of its own",
            f"write '{knob.key} = ...'",
        )
    for value in knob.choices:
        match knob.key, value:
            case "tile.q" | "tile.kv" | "warps", int(size) if size & (size - 1):
                yield unsupported(
                    f"Triton needs a power of two, not {size}", knob.span, f"'{knob.key}' cannot be {size}"
                )
            case "tile.kv", int(size) if size < 16:
                yield unsupported(
                    f"Triton multiplies tiles of 16 keys and more, not {size}", knob.span, "too few keys"
                )
            case "warp_split", "kv":
                yield unsupported(
                    "Triton lays out its own warps",
                    knob.span,
                    "split-K between warps cannot be asked for",
                    "use 'warp_split = q' here, or a CUDA target",
                )
            case "tile.d", _:
                yield unsupported(
                    "Triton keeps the head dimension whole", knob.span, "cannot be tiled", "remove it"
                )
            case _:
                continue
        return


def _default_schedule(shape: Shape) -> list[str]:
    wide = shape.dtype == "f32"  # twice the memory, and three products for one
    width = shape.width * (2 if wide else 1)
    if width <= 64:
        first = Tiles(64, 128, 4, 2)
    elif width <= 128:
        first = Tiles(64 if shape.masked else 128, 64, 4, 2 + shape.masked)
    elif width <= 256:
        first = Tiles(64, 32, 4, 2) if wide else Tiles(128, 64, 8, 2)
    else:
        first = Tiles(32, 32, 4, 2)
    lines = ["loops = [q, kv], order = longest_first", *choices(first, shape.wanted)]
    if shape.gradients:
        lines += ["backward {", *(f"  {line}" for line in _default_backward(width, wide)), "}"]
    return lines


def _default_backward(width: int, wide: bool) -> list[str]:
    if width <= 64:
        dq = Tiles(64, 64, 4, 3)
        dkdv = Tiles(64, 64, 4, 2)
    elif width <= 128:
        dq = Tiles(128, 64, 8, 3)
        dkdv = Tiles(64, 64, 4, 2)
    elif width <= 256 and not wide:
        dq = Tiles(128, 32, 8, 3)
        dkdv = Tiles(32, 128, 8, 3)
    else:
        dq = dkdv = Tiles(32, 32, 4, 2)
    return [
        "dq {",
        "  order = longest_first",
        *(f"  {line}" for line in choices(dq)),
        "}",
        "dkdv {",
        *(f"  {line}" for line in choices(dkdv)),
        "}",
    ]
