"""Which configs of a schedule the Triton kernels can run, as far as the estimates tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from attnc.diagnostics import DiagnosticError
from attnc.model.attention import Attention, Variant
from attnc.model.configs import configs
from attnc.model.schedule import BackwardConfig, ForwardConfig, Phase, Schedule, TileConfig, knobs_of
from attnc.model.tensors import DType
from attnc.plan.device import DEVICES, Device
from attnc.plan.fitting import C, Tiles, backward_phase_of, first_fitting, nothing_fits, remedy
from attnc.plan.layout import KernelName, Which
from attnc.plan.storage import feature
from attnc.plan.triton.resources import Rejection, estimate, misfit

#: What a backward kernel tries where its schedule names none of these keys, in this order.
_SMALLER: tuple[Tiles, ...] = (
    Tiles(),
    Tiles(stages=1),
    Tiles(32, 32),
    Tiles(32, 32, stages=1),
    Tiles(16, 16, stages=1),
)
#: Columns of q or v up to which a backward kernel of f32 tries these first: tile.q, tile.kv, warps, stages;
#: the fastest on an H200 first, the last for less shared memory.
_F32_TILES: Mapping[str, Mapping[int, tuple[Tiles, ...]]] = {
    "dq": {
        64: (Tiles(128, 64, 8, 1), Tiles(64, 32, 4, 1), Tiles(16, 16, 4, 1)),
        128: (Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),
    },
    "dkdv": {
        64: (Tiles(32, 128, 8, 2), Tiles(32, 64, 4, 1), Tiles(16, 16, 4, 1)),
        128: (Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),
    },
}
_SMALLER_KEYS = {key for tiles in _SMALLER for key in tiles.by_key()}
#: Tried in this order to say what would fit, the smallest change of each knob first.
_CHANGES: Mapping[str, tuple[int, ...]] = {
    "tile.kv": (128, 64, 32, 16),
    "stages": (4, 3, 2, 1),
    "tile.q": (128, 64, 32, 16),
    "warps": (8, 16),
}


def triton_configs(variant: Variant, schedule: Schedule) -> tuple[ForwardConfig, ...]:
    """The configs of a forward or decode kernel that run on some device, in their order. Raises
    DiagnosticError (E0601) when there is none.
    """
    return portable(configs(schedule, "forward", variant), variant, schedule)


def triton_backward_configs(
    variant: Variant, schedule: Schedule, kernel: KernelName
) -> tuple[BackwardConfig, ...]:
    """The same of a kernel of a backward."""
    phase = backward_phase_of(kernel)
    found = configs(schedule, phase, variant)
    if not _SMALLER_KEYS & knobs_of(schedule, phase).keys():
        groups = (*_f32_tiles(variant.attention, phase), *((tiles,) for tiles in _SMALLER))
        found = first_fitting(found, groups, lambda config: _misfit(config, variant, kernel))
    return portable(found, variant, schedule, kernel)


def _f32_tiles(attention: Attention, phase: Phase) -> Iterator[tuple[Tiles, ...]]:
    """The group that suits the head dimension, if the backward is of f32 and there is one."""
    if DType(attention.q.dtype) is DType.F32:
        widest = max(feature(attention.q), feature(attention.v))
        groups = (group for columns, group in _F32_TILES[phase].items() if widest <= columns)
        yield from islice(groups, 1)


def portable(
    found: Iterable[C], variant: Variant, schedule: Schedule, kernel: Which = "forward"
) -> tuple[C, ...]:
    """Those of the configs that run on some device, in their order. Raises DiagnosticError (E0601) when there
    is none.
    """
    candidates = tuple(found)
    kept = tuple(config for config in candidates if _misfit(config, variant, kernel) is None)
    if not kept:
        raise _nothing_fits(candidates, variant, schedule, kernel)
    return kept


def _misfit(config: TileConfig, variant: Variant, kernel: Which) -> Rejection | None:
    """Why no device can run the config; None if one can."""
    reason: Rejection | None = None
    for device in DEVICES.values():
        reason = misfit(config, variant, device, kernel)
        if reason is None:
            break
    return reason


def _nothing_fits(
    found: Iterable[TileConfig], variant: Variant, schedule: Schedule, kernel: Which
) -> DiagnosticError:
    device = max(DEVICES.values(), key=lambda device: device.shared_per_block)
    rejections = [r for config in found if (r := misfit(config, variant, device, kernel)) is not None]
    best = min(rejections, key=lambda rejection: rejection.excess)
    needs = estimate(best.config, variant, device, kernel)
    buffers = " + ".join(f"{buffer.name} {buffer.shape}" for buffer in needs.buffers)
    return nothing_fits(
        schedule,
        kernel,
        str(best),
        where="any GPU",
        notes=[f"{buffers}, {variant.attention.q.dtype}, {variant.name}"],
        hints=_nearest(best.config, variant, device, kernel)
        or remedy(best.config, _CHANGES, lambda config: misfit(config, variant, device, kernel)),
    )


def _nearest(config: TileConfig, variant: Variant, device: Device, kernel: Which) -> list[str]:
    """The change of one knob, else of several, that makes the config fit, with what it then needs."""
    fitting = []
    for key, values in _CHANGES.items():
        for value in values:
            if not _is_smaller(key, value, config):
                continue
            changed = config.with_keys({key: value})
            if misfit(changed, variant, device, kernel) is None:
                fitting.append((key, value, changed))
                break
    if not fitting:
        small = Tiles(16, 16, stages=1).of(config)
        fits = misfit(small, variant, device, kernel) is None
        return ["'tile.q = 16, tile.kv = 16, stages = 1' fits"] if fits else []
    key, value, changed = max(fitting, key=lambda entry: estimate(entry[2], variant, device, kernel).shared)
    needs = estimate(changed, variant, device, kernel)
    return [f"'{key} = {value}' needs {needs.shared} B and about {needs.registers_per_thread} registers"]


def _is_smaller(key: str, value: int, config: TileConfig) -> bool:
    """Whether the change lowers the needs: more warps, less of everything else."""
    now = config.value(key)
    assert isinstance(now, int), "keys of numbers alone"
    return value > now if key == "warps" else value < now
