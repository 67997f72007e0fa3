"""What mods do -> compiled kernels: one for each tape and layout, and for the first few sets of numbers.
Whose kernels these are, and which tiles torch's kernel_options ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from attnc.api.compile import SpecError, compile_family, making, need_of, warn_of_dense_mask
from attnc.api.family import Family
from attnc.api.fastest import (
    HOPPER,
    TRITON,
    are_few,
    count_sharing,
    rank_for_lists,
    targets_of_call,
    targets_of_few,
    warn_of_loss,
)
from attnc.diagnostics.attempts import first_made
from attnc.diagnostics.shown import show_value
from attnc.flex.spec import CONVERTED, CallLayout, Spec, write_spec
from attnc.flex.tape import element_of
from attnc.flex.trace import Trace
from attnc.model.knobs import what_is_allowed

_KEYS = {"BLOCK_M": "tile.q", "BLOCK_N": "tile.kv", "num_warps": "warps", "num_stages": "stages"}
#: Options of torch's kernels that change no result and mean nothing here: how masks and scales are computed,
#: which of its kernels runs, and tiles of its backward.
_WITHOUT_EFFECT = frozenset((
    "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "OUTPUT_LOGSUMEXP",
    "FORCE_USE_FLEX_ATTENTION", "FORCE_FLEX_ATTENTION", "USE_TMA", "BACKEND", "IS_DIVISIBLE",
    "SAFE_M_BOUNDARY", "SAFE_N_BOUNDARY", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2",
    "kpack", "matrix_instr_nonkdim", "waves_per_eu", "SM_SCALE", "GQA_SHARED_HEADS",
))  # fmt: skip


_BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")


def read_options(options: Mapping[str, Any] | None) -> tuple[tuple[str, int], ...]:
    """Returns (schedule key, value) of the options that choose tiles, in the order of `_KEYS`. Raises
    ValueError for one, or a value, that torch does not have, RuntimeError for two that exclude each other,
    TypeError for no dict.
    """
    if options is None:
        return ()
    if not hasattr(options, "items"):
        raise TypeError(f"kernel_options: expected a dict, got {type(options).__name__}")
    wanted = {}
    for name, value in options.items():
        plain = name.removeprefix("fwd_")
        if plain in _KEYS:
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"kernel_options: {name}: expected an integer, got {show_value(value)}")
            if allowed := what_is_allowed(_KEYS[plain], value):
                raise ValueError(f"kernel_options: {name}: expected {allowed}, got {value}")
            wanted[_KEYS[plain]] = value
        elif plain.removeprefix("bwd_") not in (*_WITHOUT_EFFECT, *_KEYS):
            raise ValueError(f"kernel_options: {name}: expected one of {', '.join(_KEYS)}, got {name}")
    if "BACKEND" in options and options.get("FORCE_USE_FLEX_ATTENTION"):
        raise RuntimeError("kernel_options: BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION")
    if options.get("BACKEND", "AUTO") not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise ValueError(
            f"kernel_options: Invalid BACKEND value {options['BACKEND']!r}: expected one of {known}"
        )
    return tuple((key, wanted[key]) for key in _KEYS.values() if key in wanted)


def targets_of(
    target: str | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    wanted: tuple[tuple[str, int], ...],
    *,
    gradients: bool,
) -> tuple[str, str]:
    """Returns (the target, what takes its place where it has no kernel for the mods, or "" where nothing
    may).

    target: the caller's choice, None or "" for none: the fastest, or Triton's where tiles are wanted, as
    torch's options name those of Triton's kernels, and beside keys of 8 bits, for which the others have none.
    gradients: whether some are wanted.
    """
    if target:
        return target, ""
    if wanted or key.dtype != query.dtype:
        return TRITON, ""
    first, *others = targets_of_call(_FUNCTION, query, key, value, gradients=gradients)
    return first, "".join(others[:1])


def targets_of_steps(
    target: str | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[str, ...]:
    """Returns the targets whose kernels for few queries a call may run on, the fastest first; none where it
    has more of them. Sizes are numbers. target: the caller's choice, None or "" for none.
    """
    if not are_few(query.shape[2]):
        return ()
    if target:
        return (target,)
    if key.dtype != query.dtype:
        return (TRITON,)
    sharing = count_sharing(query.shape[2], query.shape[1], key.shape[1])
    return targets_of_few(_FUNCTION, query, key, value, sharing=sharing, length=key.shape[2])


Mods = tuple[Callable[..., Any] | None, ...]
#: What callers are told that they called.
_FUNCTION = "flex_attention"

#: Sets of numbers that get a kernel of their own, before those that differ become arguments of one kernel.
_SPECIAL = 4


@dataclass(frozen=True, slots=True)
class FlexKernel:
    """A compiled family with its function, and what that takes after q, k and v: captures and numbers by
    position.

    learned: captures whose gradients follow those of q, k and v in what `gradients` gives, which is
    (do, dlse, inputs, o, lse, configs) -> gradients, where a spec has some and an lse.
    """

    family: Family
    function: Callable[..., Any]
    gradients: Callable[..., tuple[torch.Tensor, ...]] | None
    captures: tuple[int, ...]
    numbers: tuple[int, ...]
    learned: tuple[int, ...]

    def arguments(self, traced: Trace) -> list[Any]:
        captures, numbers = traced.tape.captures, traced.tape.numbers
        return [
            *(convert_tensor(captures[at].tensor) for at in self.captures),
            *(numbers[at] for at in self.numbers),
        ]


@dataclass(slots=True)
class _ProgramFamily:
    """Mods that differ in numbers alone. kernels: by the numbers that they have built in; varying: positions
    of numbers that are arguments.
    """

    kernels: dict[tuple[Any, ...], FlexKernel] = field(default_factory=dict)
    varying: frozenset[int] = frozenset()

    def kernel(self, traced: Trace, layout: CallLayout, mods: Mods) -> FlexKernel:
        numbers = traced.tape.numbers
        found = self.kernels.get(self._built_in(numbers))
        if found is None:
            with making():  # or a kernel of one number is left where all look, once they are arguments
                found = self.kernels.get(self._built_in(numbers))
                if found is None:
                    if len(self.kernels) >= _SPECIAL:
                        self._generalise(numbers)
                    found = self.kernels[self._built_in(numbers)] = self._choose_kernel(traced, layout, mods)
        return found

    def _choose_kernel(self, traced: Trace, layout: CallLayout, mods: Mods) -> FlexKernel:
        spec = write_spec(traced, layout, mods=mods, numbers=self.varying, scheduled=False)
        targets = [layout.target, *([layout.otherwise] if layout.otherwise else [])]

        def make_kernel(target: str, splits: int | None = None) -> FlexKernel:
            return _compile_kernel(spec, target, splits)

        if layout.steps and not spec.listed and not spec.learned:
            with suppress(SpecError):  # of what has no kernel for few queries
                return first_made(layout.steps, partial(make_kernel, splits=0))[0]
        if spec.listed:
            targets = rank_for_lists(targets)
        kernel, failure = first_made(targets, make_kernel)
        if failure and targets[0] == HOPPER:
            warn_of_loss(_FUNCTION, need_of(failure))
        return kernel

    def _built_in(self, numbers: list[int | float]) -> tuple[Any, ...]:
        return tuple(None if at in self.varying else value for at, value in enumerate(numbers))

    def _generalise(self, numbers: list[int | float]) -> None:
        columns = zip(*self.kernels, self._built_in(numbers), strict=True)
        self.varying |= {at for at, values in enumerate(columns) if len(set(values)) > 1}
        self.kernels.clear()


_PROGRAMS: dict[Any, _ProgramFamily] = {}


def kernel_of(traced: Trace, layout: CallLayout, mods: Mods = ()) -> FlexKernel:
    """Returns the kernel of what mods did. mods: for names, and for places of errors. Compiled once, whatever
    lengths and data are.
    """
    identity = (traced.tape.key, traced.score, traced.mask, traced.listed, layout)
    program = _PROGRAMS.get(identity)
    if program is None:
        program = _PROGRAMS[identity] = _ProgramFamily()
    try:
        return program.kernel(traced, layout, mods)
    except SpecError as failure:
        if not mods:  # known by what they did alone
            raise
        from attnc.flex.places import place_error

        raise place_error(failure, traced, layout, mods) from None


def _compile_kernel(spec: Spec, target: str, splits: int | None) -> FlexKernel:
    family = compile_family(spec.text, target=target, warn=False, splits=splits)
    warn_of_dense_mask(_FUNCTION, family)
    call = family.module.default.CALL
    gradients = None if call.backward is None else call.gradients
    return FlexKernel(family, family.function, gradients, spec.captures, spec.numbers, spec.learned)


def as_tensor(argument: Any, like: torch.Tensor) -> torch.Tensor:
    """Returns an argument as a tensor: a number on the device of another, without waiting for it."""
    if isinstance(argument, torch.Tensor):
        return argument
    dtype = {"i32": torch.int32, "i64": torch.int64, "f32": torch.float32}[element_of(argument)]
    return torch.full((), argument, dtype=dtype, device=like.device)


def convert_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a captured tensor as kernels take it."""
    dtype = CONVERTED.get(tensor.dtype)
    return tensor if dtype is None else tensor.to(dtype)
