"""What a config of a Triton kernel takes from a multiprocessor, estimated without a compiler, and
which configs therefore go.

Shared memory: the pipeliner gives K and V one buffer for each stage, and one more tile each where a load is
in flight while wgmma still reads the last one; operands of the tensor cores that do not come from registers
lie there too. Registers: the accumulator, the scores and the probabilities live through every step. Both are
lower bounds that ptxas may exceed (spills show in `attnc explain`), so a config is rejected only when it
cannot work. Non-goal: ranking the configs that fit; that is measured (`attnc tune`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from attnc.diagnostics import Diagnostic, DiagnosticError, error
from attnc.expr.nodes import Const
from attnc.model.attention import Variant
from attnc.model.configs import configs
from attnc.model.schedule import Config, Phase, Schedule, Value, knobs_of
from attnc.model.tensors import DType, Paged, Role, Tensor
from attnc.plan.device import DEVICES, Device
from attnc.plan.ir_backward import KernelName
from attnc.plan.storage import parts

#: The kernel that an estimate is of.
Which: TypeAlias = Literal["forward"] | KernelName

_THREADS_PER_WARP = 32
#: Addresses, loop counters, row statistics: what every kernel needs besides its tiles.
_BASE_REGISTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A piece of shared memory: `shape` is for the reader, e.g. "2 x 64x128"."""

    name: str
    shape: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one block of a config needs on one device: shared memory by buffer, registers of a thread by
    value.
    """

    buffers: tuple[Buffer, ...]
    registers: Mapping[str, int]

    @property
    def shared(self) -> int:
        return sum(buffer.bytes for buffer in self.buffers)

    @property
    def registers_per_thread(self) -> int:
        return sum(self.registers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A config that cannot run on a device: it needs `needs` of what the device has `limit` of."""

    config: Config
    what: str
    needs: int
    limit: int
    unit: str

    @property
    def excess(self) -> float:
        return self.needs / self.limit

    def __str__(self) -> str:
        return f"needs {self.needs} {self.unit} of {self.what}; the limit is {self.limit} {self.unit}"


def estimate(config: Config, variant: Variant, device: Device, kernel: Which = "forward") -> Estimate:
    """The needs of the forward kernel of this variant on the device, or of one of the backward."""
    tile_q, tile_kv = _integer(config, "tile.q", 64), _integer(config, "tile.kv", 64)
    stages, warps = _integer(config, "stages", 2), _integer(config, "warps", 4)
    columns = parts(variant.attention)
    d, dv = sum(tile_width(part.width) for part in columns), tile_width(features(variant.attention.v))
    size = _dtype(variant.attention.q).bytes
    threads = warps * _THREADS_PER_WARP
    if kernel != "forward":
        tiles = (tile_q, tile_kv)
        return _estimate_backward(kernel, *tiles, max(1, stages), threads, d, dv, size)
    depth = _depth(stages, tile_q, config, variant)
    loaded_v = dv if len(columns) == 1 else 0  # else v is the first part of k
    q = _held("q", tile_q, d, size)
    buffers = [
        # A single stage still passes through shared memory, since the operands change layout on the way.
        Buffer(name="k", shape=f"{depth} x {tile_kv}x{d}", bytes=depth * tile_kv * d * size),
        Buffer(name="v", shape=f"{depth} x {tile_kv}x{loaded_v}", bytes=depth * tile_kv * loaded_v * size),
    ]
    registers = {
        "acc": tile_q * dv // threads,
        "s": tile_q * tile_kv // threads,
        "p": tile_q * tile_kv * size // 4 // threads,
        "other": _BASE_REGISTERS,
    }
    if device.has_wgmma:
        buffers.insert(0, q)  # wgmma reads its operands from shared memory
    else:
        registers["q"] = tile_q * d * size // 4 // threads
    return Estimate(buffers=tuple(buffers), registers=registers)


def _depth(stages: int, tile_q: int, config: Config, variant: Variant) -> int:
    """Tiles of k, and of v, that lie in shared memory at a time.

    A tile whose address comes from a block table waits for two loads, one after the other, and so takes two
    stages; the decode kernel looks pages up itself, a tile ahead. Tiles of fewer than 64 rows are not
    wgmma's: their operands leave shared memory at once.
    """
    knobs = config.values
    decodes = knobs.get("loops") == ("kv",) or knobs.get("pack") == "gqa" or knobs.get("split.kv", 1) != 1
    waits = isinstance(variant.attention.k.storage, Paged) and not decodes
    turns = (stages + 1) // 2 if waits else stages
    return max(1, turns if tile_q >= 64 else turns - 1)


def are_wide(d: int, dv: int) -> bool:
    """Whether the accumulators of dk and dv cannot share a kernel: then each gets its own, at the price of
    one more dot (on an H200 1.3 to 1.5 times faster at 256 columns than small tiles).
    """
    return d + dv > 256


def _estimate_backward(
    kernel: KernelName, tile_q: int, tile_kv: int, stages: int, threads: int, d: int, dv: int, size: int
) -> Estimate:
    """Over q tiles: q and do stay, k and v are streamed; over kv tiles the other way round."""
    widths = {"q": (tile_q, d), "do": (tile_q, dv), "k": (tile_kv, d), "v": (tile_kv, dv)}
    over_q = kernel in ("dq", "rows")
    staying = ("q", "do") if over_q else ("k",) if kernel == "dv" else ("k", "v")
    streamed = ("k", "v") if over_q else ("q", "do")
    buffers = [_held(name, *widths[name], size) for name in staying]
    buffers += [
        Buffer(name=name, shape=f"{stages} x {rows}x{width}", bytes=stages * rows * width * size)
        for name, (rows, width) in ((name, widths[name]) for name in streamed)
    ]
    accumulated = {
        "dq": tile_q * d,
        "rows": 0,
        "dkdv": tile_kv * (d + dv),
        "dk": tile_kv * d,
        "dv": tile_kv * dv,
    }
    scores = tile_q * tile_kv // threads
    registers = {"acc": accumulated[kernel] // threads, "s": scores}
    if kernel != "dv":
        registers["dp"] = scores
    registers |= {"p": tile_q * tile_kv * size // 4 // threads, "other": _BASE_REGISTERS}
    return Estimate(buffers=tuple(buffers), registers=registers)


def _held(name: str, rows: int, width: int, size: int) -> Buffer:
    """A tile that stays for the whole loop. One of f32 is split, once, into two numbers of 11 bits for each
    element, which the tensor cores multiply one after the other (3xTF32).
    """
    parts = 2 if size == 4 else 1
    shape = f"{parts} x {rows}x{width}" if parts > 1 else f"{rows}x{width}"
    return Buffer(name=name, shape=shape, bytes=parts * rows * width * size)


def misfit(config: Config, variant: Variant, device: Device, kernel: Which = "forward") -> Rejection | None:
    """Why the config cannot run on the device; None if it can."""
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


def prune(
    configs: Iterable[Config], variant: Variant, device: Device
) -> tuple[tuple[Config, ...], tuple[Rejection, ...]]:
    """The configs that can run on the device, in their order, and the others with reasons."""
    kept: list[Config] = []
    rejected: list[Rejection] = []
    for config in configs:
        rejection = misfit(config, variant, device)
        if rejection is None:
            kept.append(config)
        else:
            rejected.append(rejection)
    return tuple(kept), tuple(rejected)


def portable(
    configs: Iterable[Config],
    variant: Variant,
    schedule: Schedule,
    devices: Iterable[Device] | None = None,
    kernel: Which = "forward",
) -> tuple[Config, ...]:
    """The configs that run on at least one of the devices (default: all that are supported), in their order.

    Raises DiagnosticError (E0601) when there is none.
    """
    candidates = tuple(configs)
    targets = tuple(DEVICES.values() if devices is None else devices)
    kept = tuple(
        config
        for config in candidates
        if any(misfit(config, variant, device, kernel) is None for device in targets)
    )
    if not kept:
        largest = max(targets, key=lambda device: device.shared_per_block)
        raise DiagnosticError([_nothing_fits(candidates, variant, schedule, largest, kernel)])
    return kept


def backward_configs(variant: Variant, schedule: Schedule, kernel: KernelName) -> tuple[Config, ...]:
    """The configs of one kernel of the backward that run on some device. Where the schedule names no tiles
    and the usual ones are too large, smaller ones. Raises DiagnosticError (E0601) when there is none.
    """
    phase = phase_of(kernel)
    found = configs(schedule, phase, variant)
    if not {"tile.q", "tile.kv", "stages"} & knobs_of(schedule, phase).keys():
        for smaller in _SMALLER:
            tried = tuple(Config(values={**config.values, **smaller}) for config in found)
            if any(misfit(tried[0], variant, device, kernel) is None for device in DEVICES.values()):
                return portable(tried, variant, schedule, kernel=kernel)
    return portable(found, variant, schedule, kernel=kernel)


#: What is tried in place of the defaults, in this order.
_SMALLER: tuple[Mapping[str, Value], ...] = (
    {},
    {"stages": 1},
    {"tile.q": 32, "tile.kv": 32},
    {"tile.q": 32, "tile.kv": 32, "stages": 1},
    {"tile.q": 16, "tile.kv": 16, "stages": 1},
)


def phase_of(kernel: Which) -> Phase:
    """The phase of a schedule that sets the kernel's keys."""
    match kernel:
        case "forward":
            return "forward"
        case "dq" | "rows":
            return "dq"
        case _:
            return "dkdv"


def shared_memory(config: Config, variant: Variant, kernel: Which = "forward") -> int:
    """Bytes of shared memory of one block, the largest over the supported devices: what a launcher compares
    with its device's limit.
    """
    return max(estimate(config, variant, device, kernel).shared for device in DEVICES.values())


def tile_width(features: int) -> int:
    """The width of a tile: Triton's tiles are powers of two, and tensor cores want at least 16."""
    return max(16, 1 << (features - 1).bit_length())


def features(tensor: Tensor) -> int:
    """The head dimension of q, k or v, a constant in every variant."""
    axis = tensor.axis(Role.FEATURE)
    size = tensor.shape[axis] if axis is not None else None
    if not isinstance(size, Const):
        raise ValueError(f"the head dimension of {tensor.name} is not a constant")
    return int(size.value)


def _nothing_fits(
    configs: tuple[Config, ...], variant: Variant, schedule: Schedule, device: Device, kernel: Which
) -> Diagnostic:
    rejections = [r for config in configs if (r := misfit(config, variant, device, kernel)) is not None]
    best = min(rejections, key=lambda rejection: rejection.excess)
    needs = estimate(best.config, variant, device, kernel)
    parts = " + ".join(f"{buffer.name} {buffer.shape}" for buffer in needs.buffers)
    knobs = knobs_of(schedule, phase_of(kernel))
    spans = [span for key in _KNOBS if key in knobs and (span := knobs[key].span) is not None]
    if not spans and schedule.span is not None:
        spans = [schedule.span]
    span = spans[0].to(spans[-1]) if spans[0].line == spans[-1].line else spans[0]
    what = "" if kernel == "forward" else f" for {kernel}"
    where = "any GPU" if schedule.target == "triton" else device.arch
    return error(
        "E0601",
        f"no config of schedule '{schedule.attention}'{what} fits {where}",
        span,
        str(best),
        notes=[f"{parts}, {_dtype(variant.attention.q)}, {variant.name}"],
        hints=_nearest(best.config, variant, device, kernel),
    )


_KNOBS = ("tile.q", "tile.kv", "stages", "warps")


def _nearest(config: Config, variant: Variant, device: Device, kernel: Which) -> list[str]:
    """The change of one knob, else of several, that makes the config fit, with what it then needs."""
    fitting = []
    for key, values in _CHANGES.items():
        for value in values:
            if key not in config.values or not _is_smaller(key, value, config):
                continue
            changed = Config(values={**config.values, key: value})
            if misfit(changed, variant, device, kernel) is None:
                fitting.append((key, value, changed))
                break
    if not fitting:
        small = Config(values={**config.values, "tile.q": 16, "tile.kv": 16, "stages": 1})
        return (
            ["'tile.q = 16, tile.kv = 16, stages = 1' fits"]
            if misfit(small, variant, device, kernel) is None
            else []
        )
    key, value, changed = max(fitting, key=lambda entry: estimate(entry[2], variant, device, kernel).shared)
    needs = estimate(changed, variant, device, kernel)
    return [f"'{key} = {value}' needs {needs.shared} B and about {needs.registers_per_thread} registers"]


#: Tried in this order, the smallest change of each knob first.
_CHANGES: Mapping[str, tuple[int, ...]] = {
    "tile.kv": (128, 64, 32, 16),
    "stages": (4, 3, 2, 1),
    "tile.q": (128, 64, 32, 16),
    "warps": (8, 16),
}


def _is_smaller(key: str, value: int, config: Config) -> bool:
    """Whether the change lowers the needs: more warps, less of everything else."""
    now = _integer(config, key, 1)
    return value > now if key == "warps" else value < now


def _integer(config: Config, key: str, default: int) -> int:
    value = config.values.get(key, default)
    if not isinstance(value, int):
        raise ValueError(f"{key} = {value!r} is not a number")
    return value


def _dtype(tensor: Tensor) -> DType:
    return DType(tensor.dtype)
