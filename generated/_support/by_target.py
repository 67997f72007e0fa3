# Copied by `attnc compile`, from attnc/support. Do not edit.
"""The targets of an attention: which of them run on a device, and who is called for which sizes."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .devices import gpu_of

is_compiling = torch.compiler.is_compiling
#: The largest sizes that a row admits (None: any), and the target that it picks.
Row = tuple[tuple[int | None, ...], str]


class Needs(NamedTuple):
    """What the kernels of a target need: the package that launches them, the compute capabilities (90 for
    9.0; the last None for any beyond). interprets: the package runs them on the CPU too.
    """

    package: str
    least: int
    most: int | None
    interprets: bool


@functools.cache
def runs(needs: Needs, index: int) -> bool:
    """Returns whether kernels can be launched on the device of this number; -1 is the CPU."""
    if index < 0:
        return needs.interprets
    if importlib.util.find_spec(needs.package) is None:
        return False
    if torch.version.hip is not None:
        return needs.interprets
    major, minor = gpu_of(index).capability
    capability = 10 * major + minor
    return needs.least <= capability and (needs.most is None or capability <= needs.most)


class ByTarget:
    """Picks the function of an attention: that of the target which a measured table names for the sizes, or
    of the first that runs on the device.

    package, name: where the folders of the targets are, and the function in them; targets: what each needs,
    as `Needs` has it; variants: those that have a variant, the first without a measurement; tuned: by
    device and variant the rows of its table, of which the first that admits the sizes decides.
    """

    def __init__(
        self,
        package: str,
        name: str,
        targets: Mapping[str, tuple[str, int, int | None, bool]],
        variants: Mapping[tuple[Any, ...], tuple[str, ...]],
        tuned: Mapping[tuple[str, tuple[Any, ...]], Sequence[Row]],
    ) -> None:
        self.package, self.name, self.variants, self.tuned = package, name, variants, tuned
        self.needs = {target: Needs(*needs) for target, needs in targets.items()}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._rows: dict[tuple[Any, ...], list[tuple[tuple[int | None, ...], Callable[..., Any]]]] = {}
        self._only: dict[tuple[Any, ...], Callable[..., Any] | None] = {}

    def only(self, device: torch.device, key: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Returns the function for a variant on a device whatever the sizes are; None where they decide."""
        if is_compiling():  # sizes that are any may be among its parts, and this is none of them
            key = next(known for known in self.variants if known == key)
            self._decide(device, key)
        place = device, key
        if not is_compiling() and place not in self._only:
            self._decide(device, key)
        return self._only[place]

    def _decide(self, device: torch.device, key: tuple[Any, ...]) -> bool:
        index = device.index if device.type == "cuda" else -1
        rows = [(limits, self.function(target)) for limits, target in self.rows(index, key)]
        self._rows[device, key] = rows
        self._only[device, key] = rows[0][1] if all(found == rows[0][1] for _, found in rows) else None
        return True

    def fastest(
        self, device: torch.device, key: tuple[Any, ...], sizes: tuple[int, ...]
    ) -> Callable[..., Any]:
        """Returns the function for sizes, where they decide."""
        for limits, function in self._rows[device, key]:
            for size, limit in zip(sizes, limits):  # noqa: B905  # the last row has none
                if limit is not None and size > limit:
                    break
            else:
                return function
        raise AssertionError("the last row admits all sizes")

    def rows(self, index: int, key: tuple[Any, ...]) -> list[Row]:
        """Returns what is measured for a variant on a device, as far as that runs, and what is taken
        otherwise.
        """
        variants = self.variants[key]
        able = [target for target in variants if runs(self.needs[target], index)] or variants[:1]
        measured = self.tuned.get((gpu_of(index).name, key), ())
        return [*(row for row in measured if row[1] in able), ((), able[0])]

    def named(self, target: str, key: tuple[Any, ...]) -> Callable[..., Any]:
        """Returns the function of a target. ValueError where it has not the variant."""
        if target not in self.variants[key]:
            raise ValueError(f"target: expected one of {list(self.variants[key])}, got {target!r}")
        return self.function(target)

    def function(self, target: str) -> Callable[..., Any]:
        """Returns the function of a target, whose folder is imported with the first call."""
        if is_compiling() or target not in self._functions:
            self._import(target)
        return self._functions[target]

    def _import(self, target: str) -> bool:
        folder = target.replace(".", "_")
        self._functions[target] = getattr(importlib.import_module(f".{folder}", self.package), self.name)
        return True

    # What torch.compiler.assume_constant_result does, without importing the compiler: tracing calls them for
    # real, before it looks at what they have found.
    _decide._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes
    _import._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes

    def any(self) -> Callable[..., Any]:
        index = torch.cuda.current_device() if torch.cuda.is_available() else -1
        key = next(iter(self.variants))
        return self.function(self.rows(index, key)[-1][1])
