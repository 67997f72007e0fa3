"""What is verified: a generated module and the bound that its plan promises.

Memory that a module asks for can be poisoned: full of NaN before its kernels see it, so that what nobody
wrote shows. A planned module is made ready on the GPU where there is one, else as its runner does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from attnc.build import digest
from attnc.model.attention import Variant
from attnc.plan import ir
from attnc.plan.ir import split_of
from attnc.plan.ir.backward import GradientBound
from attnc.reference import empty_outputs, to_arrays
from attnc.runtime.loader import load_files
from attnc.runtime.watchdog import watch
from attnc.support.arguments import DTYPES
from attnc.support.configs import shared_on
from attnc.support.devices import Gpu
from attnc.support.memory import Layout
from attnc.target.files import render_files
from attnc.verify.boundaries import PROCESSORS
from attnc.verify.cover import Space
from attnc.verify.memory import MemoryFault, guarding
from attnc.verify.problem import Value
from attnc.verify.rounds import keep_less
from attnc.verify.runners import runner_of
from attnc.verify.strategies import Limits

#: Bytes of the L2 cache, as calls see it.
_CACHE = 1 << 18
#: Bytes on either side of what a call allocates, a multiple of what tensors are aligned to, and each of them.
_GUARD, _UNWRITTEN = 1024, 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is verified: the module of a variant, and the bound that its plan promises.

    warps_matter: configs that differ in warps or stages alone are different programs even without a GPU.
    split: programs may share the keys of a sequence, as many of them as the shapes suggest. atomic: inputs
    whose gradients are summed in the order in which programs finish. plan: what the module was printed from,
    where that is known. compared: how many configs, the last ones, the rule that configs agree compares with
    a case's own; all if None.
    """

    variant: Variant
    bound: ir.ErrorBound
    module: ModuleType
    target: str = "triton"
    device: str = "cpu"
    gradients: GradientBound | None = None
    warps_matter: bool = False
    split: bool = False
    atomic: frozenset[str] = frozenset()
    plan: ir.Module | None = None
    compared: int | None = None

    @property
    def space(self) -> Space:
        return Space(
            attention=self.variant.attention,
            configs=self.configs,
            usable=tuple(self.tiles()),
            backward=getattr(self.module, "BACKWARD_CONFIGS", {}) if self.gradients is not None else {},
            plan=self.plan,
            processors=PROCESSORS if self.device == "cpu" else self._gpu.multi_processor_count,
            call=getattr(self.module, "CALL", None),
        )

    @property
    def configs(self) -> tuple[Any, ...]:
        """CONFIGS; where programs may share keys, each is followed by the same with splits that small cases
        have too: these would suit one program, on any device. Last come the first with other numbers of
        splits, which are joined as a power of two, and with splits of two tiles. Segments of an order have
        the size that the spec says.
        """
        if not self.split or self.variant.attention.segment_keys:
            return tuple(self.module.CONFIGS)
        pairs = ((config, _split_more(config)) for config in self.module.CONFIGS)
        first, found = self.module.CONFIGS[0], [config for pair in pairs for config in pair if config]
        fixed = next((config for config in self.module.CONFIGS if getattr(config, "split_size", 0)), None)
        free = first if fixed is None else first._replace(split_size=0)
        found += [free._replace(splits=count) for count in (2, 16, 17, 65)]
        if fixed is not None:
            found.append(fixed._replace(split_size=2 * fixed.BLOCK_N))
        return tuple(found)

    def tiles(self) -> dict[int, tuple[int, int]]:
        """Returns (BLOCK_M, BLOCK_N) of `configs`, by number: on a GPU of those that fit it, or where none is
        sure to the one that calls take then, the last; elsewhere of those that differ in more than warps and
        stages.
        """
        configs = self.configs
        tiles = {n: (config.BLOCK_M, config.BLOCK_N) for n, config in enumerate(configs)}
        if self.device != "cpu":
            last = configs.index(self.module.CONFIGS[-1])
            fitting = {n: tile for n, tile in tiles.items() if self._is_sure_to_fit(configs[n])}
            return fitting or {last: tiles[last]}
        if self.warps_matter:
            return tiles
        kinds = [(*tiles[n], *_splits(config)) for n, config in enumerate(configs)]
        return {n: tile for n, tile in tiles.items() if kinds[n] not in kinds[:n]}

    @property
    def fits(self) -> bool:
        """Whether some config is sure to fit the device; where none is, a launch may be refused."""
        return self.device == "cpu" or any(map(self._is_sure_to_fit, self.configs))

    def _is_sure_to_fit(self, config: Any) -> bool:
        held: int = self._gpu.shared_memory_per_block_optin
        return shared_on(config, self._gpu.major) <= held

    @property
    def _gpu(self) -> Any:
        return torch.cuda.get_device_properties(self.device)

    def limits(self) -> Limits:
        """Returns the limits on the cost of a case here: the interpreter takes milliseconds for a tile, a GPU
        microseconds, but the reference as long on both.
        """
        if self.device == "cpu":
            joined = (n for n, config in enumerate(self.configs) if any(_splits(config)))
            return Limits(tiles=self.tiles(), joined=frozenset(joined))
        return Limits(tiles=self.tiles(), longest=2100, work=6_000, most=1 << 20)

    @property
    def function(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self.module, self.variant.attention.name)
        return found

    def blank(self, inputs: Mapping[str, Value]) -> dict[str, torch.Tensor]:
        attention = self.variant.attention
        arrays = empty_outputs(attention, to_arrays(attention, inputs))
        return {
            tensor.name: torch.full(
                arrays[tensor.name].shape, torch.nan, dtype=DTYPES[tensor.dtype], device=self.device
            )
            for tensor in attention.outputs
        }

    def name_call(self, config: int, tensors: Iterable[torch.Tensor]) -> str:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        return f"{self.variant.attention.name} for {self.target}, config {config}, of {shapes}"

    def run(
        self,
        inputs: Mapping[str, Value],
        outputs: Mapping[str, torch.Tensor],
        config: int = 0,
        call: str = "out",
    ) -> None:
        """Calls the generated function: inputs and outputs in the order of the declaration, and memory that
        it asks for full of NaN. call: as in a case. Raises ValueError for results of other shapes or types.
        """
        out = tuple(outputs.values())
        given = None if call == "new" else out[0] if len(out) == 1 else out
        tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
        with (
            guarding(*tensors),
            poison_allocations(self.module),
            watch(self.name_call(config, tensors), self.device),
        ):
            made = self.function(*inputs.values(), out=given, config=self.configs[config])
            if self.device != "cpu":
                torch.cuda.synchronize()
        if call == "new":
            for name, mine, theirs in zip(outputs, out, made if len(out) > 1 else (made,), strict=True):
                if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                    raise ValueError(f"'{name}' is {theirs.dtype}{list(theirs.shape)}, not as declared")
                mine.copy_(theirs)


def _splits(config: Any) -> tuple[int, int]:
    return getattr(config, "splits", 0), getattr(config, "split_size", 0)


def _split_more(config: Any) -> Any:
    """Changes a config to three splits in place of as many as suit, or with splits of one tile; None if their
    number is fixed.
    """
    match _splits(config):
        case 0, 0:
            return config._replace(splits=3)
        case 0, _:
            return config._replace(split_size=config.BLOCK_N)
        case _:
            return None


@contextmanager
def poison_allocations(module: ModuleType) -> Iterator[None]:
    """Makes torch.empty and what calls of the module allocate by give NaN, and integers of all bits; what the
    calls allocate lies between guards. Raises MemoryFault where one is written to.
    """
    call, guards = getattr(module, "CALL", None), Guards()
    own = nullcontext() if call is None else patch.object(call, "allocate", guards.around(call.allocate))
    with patch.object(torch, "empty", _fill_with_nan(torch.empty)), own:
        yield
    if guards.are_written():
        raise MemoryFault("memory around what a call allocates was written to")


def _fill_with_nan(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*layout: Any, **options: Any) -> torch.Tensor:
        return _nan(empty(*layout, **options))

    return make


class Guards:
    """Bytes in front of and behind what calls allocate: words of a line that is not there are among them."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def around(self, allocate: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
        """Returns a function that allocates likewise, between guards."""

        def make(layouts: Sequence[Layout], *others: Any) -> list[torch.Tensor]:
            sizes = [_bytes_of(layout) for layout in layouts]
            wide = [((_GUARD + size + _GUARD,), (1,), torch.uint8) for size in sizes]
            return [self._within(*made) for made in zip(allocate(wide, *others), sizes, layouts, strict=True)]

        return make

    def _within(self, buffer: torch.Tensor, size: int, layout: Layout) -> torch.Tensor:
        self._kept += [buffer[:_GUARD].fill_(_UNWRITTEN), buffer[_GUARD + size :].fill_(_UNWRITTEN)]
        shape, strides, dtype = layout
        inside = buffer[_GUARD : _GUARD + size].view(dtype).as_strided(shape, strides)
        return _nan(inside.detach())

    def are_written(self) -> bool:
        return bool(self._kept) and bool((torch.cat(self._kept) != _UNWRITTEN).any())


def _bytes_of(layout: Layout) -> int:
    shape, strides, dtype = layout
    reach = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    return (1 + reach) * dtype.itemsize if all(shape) else 0


def _nan(made: torch.Tensor) -> torch.Tensor:
    """Fills memory with NaN, or with all bits of integers and bools: no number that a call has written."""
    if made.dtype == torch.bool:
        return made.fill_(True)
    return made.fill_(torch.nan if made.is_floating_point() else -1 if made.dtype.is_signed else 255)


# --- planned modules on this machine ------------------------------------------------------------------------


def has_gpu() -> bool:
    """Returns whether kernels run on a GPU here, not in the interpreter."""
    return torch.cuda.is_available()


def subject_of(
    module: ir.Module, text: str | Mapping[str, str] | None = None, *, on_cpu: bool = False
) -> Subject:
    """Renders and loads the module, or loads this text of it, or these texts in place of its files of these
    names: all of them, where kernels and the Python module beside them are given. Without a GPU the first
    call decides for the whole process whether Triton interprets. on_cpu: even where there is a GPU, of a
    runner that can.
    """
    runner, source = runner_of(module.target), module.variant.source
    device = "cpu" if on_cpu else runner.device(module.target)
    if device == "cpu":
        runner.prepare()
    name = f"{module.variant.name}.py"
    files = {name: text} if isinstance(text, str) else dict(text or {})
    is_whole = name in files and (len(files) > 1 or not runner.warps_matter)
    if not is_whole:
        files = {**render_files(module, path=Path(source.path).name, sha256=digest(source)), **files}
    if on_cpu:  # equal files give the same module, which runs in one place
        files[name] += "# on the CPU\n"
    loaded = load_files(files)
    if device == "cpu":
        runner.attach(loaded)
    make_small(loaded)
    return Subject(
        variant=module.variant,
        bound=module.kernel.bound,
        module=loaded,
        target=module.target,
        device=device,
        gradients=None if module.backward is None else module.backward.bound,
        split=split_of(module.kernel) is not None,
        warps_matter=runner.warps_matter,
        atomic=atomic_inputs(module),
        plan=module,
    )


@dataclass(frozen=True, slots=True)
class _WithSmallCache:
    """Says of a device what `gpu_of` does, but for a cache so small that small cases have sections of heads
    too.
    """

    gpu_of: Callable[[int], Gpu]

    def __call__(self, index: int) -> Gpu:
        return self.gpu_of(index)._replace(l2=_CACHE)


def make_small(module: ModuleType) -> None:
    """Lets small calls of a module be in sections and rounds, as large ones are."""
    call = getattr(module, "CALL", None)
    if call is not None and not isinstance(call.gpu_of, _WithSmallCache):
        call.gpu_of = _WithSmallCache(call.gpu_of)
    keep_less(module)


def atomic_inputs(module: ir.Module) -> frozenset[str]:
    """Returns inputs whose gradients are not the same, bit for bit, in every run."""
    backward = module.backward
    if backward is None:
        return frozenset()
    found = {
        gradient.tensor.name
        for gradient in backward.gradients
        if any(part.accumulate == "atomic" for part in gradient.parts)
    }
    for kernel in backward.kernels:
        found |= {"q"} if kernel.chain.adds_dq == "atomic" else set()
        found |= {made.removeprefix("d") for made in kernel.adds}
    return frozenset(found)


def place(subject: Subject) -> str:
    return torch.cuda.get_device_name() if subject.device == "cuda" else runner_of(subject.target).without_gpu
