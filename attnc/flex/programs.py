"""What mods do -> compiled kernels: one for each tape and layout, and for the first few sets of numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attnc.api.compile import SpecError, compile_family, making
from attnc.api.family import Family
from attnc.flex.spec import CONVERTED, Layout, write_spec
from attnc.flex.trace import Trace

Mods = tuple[Callable[..., Any] | None, ...]

#: Sets of numbers that get a kernel of their own, before those that differ become arguments of one kernel.
_SPECIAL = 4


@dataclass(frozen=True, slots=True)
class Kernel:
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
            *(_converted(captures[at].tensor) for at in self.captures),
            *(numbers[at] for at in self.numbers),
        ]


@dataclass(slots=True)
class _Program:
    """Mods that differ in numbers alone. kernels: by the numbers that they have built in; varying: positions
    of numbers that are arguments.
    """

    kernels: dict[tuple[Any, ...], Kernel] = field(default_factory=dict)
    varying: frozenset[int] = frozenset()

    def kernel(self, traced: Trace, layout: Layout, mods: Mods) -> Kernel:
        """The kernel for the numbers of a trace."""
        numbers = traced.tape.numbers
        found = self.kernels.get(self._built_in(numbers))
        if found is None:
            with making():  # or a kernel of one number is left where all look, once they are arguments
                found = self.kernels.get(self._built_in(numbers))
                if found is None:
                    if len(self.kernels) >= _SPECIAL and not self.varying:
                        self._generalise(numbers)
                    found = self.kernels[self._built_in(numbers)] = self._chosen(traced, layout, mods)
        return found

    def _chosen(self, traced: Trace, layout: Layout, mods: Mods) -> Kernel:
        """A kernel of the layout's target, or of the other where that one has none."""
        try:
            return _compiled(traced, layout, mods, self.varying)
        except SpecError:
            if not layout.otherwise:
                raise
            other = replace(layout, target=layout.otherwise, otherwise="")
            return _compiled(traced, other, mods, self.varying)

    def _built_in(self, numbers: list[int | float]) -> tuple[Any, ...]:
        return tuple(None if at in self.varying else value for at, value in enumerate(numbers))

    def _generalise(self, numbers: list[int | float]) -> None:
        """Makes arguments of the numbers that have differed."""
        columns = zip(*(known for known in self.kernels), numbers, strict=True)
        self.varying = frozenset(at for at, values in enumerate(columns) if len(set(values)) > 1)
        self.kernels.clear()


_PROGRAMS: dict[Any, _Program] = {}


def kernel_of(traced: Trace, layout: Layout, mods: Mods = ()) -> Kernel:
    """The kernel of what mods did. mods: for names. Compiled once, whatever lengths and data are."""
    identity = (traced.tape.key, traced.score, traced.mask, layout)
    program = _PROGRAMS.get(identity)
    if program is None:
        program = _PROGRAMS[identity] = _Program()
    return program.kernel(traced, layout, mods)


def _compiled(traced: Trace, layout: Layout, mods: Mods, numbers: Collection[int]) -> Kernel:
    """A kernel of the layout's target. numbers: those that are arguments."""
    spec = write_spec(traced, layout, mods=mods, numbers=numbers, scheduled=False)
    family = compile_family(spec.text, target=layout.target, warn=False)
    call = family.module.default.CALL
    gradients = None if call.backward is None else call.gradients
    return Kernel(family, family.function, gradients, spec.captures, spec.numbers, spec.learned)


def _converted(tensor: torch.Tensor) -> torch.Tensor:
    """In an element type that specs have."""
    dtype = CONVERTED.get(tensor.dtype)
    return tensor if dtype is None else tensor.to(dtype)
