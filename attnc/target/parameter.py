"""Parameters of generated functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parameter:
    """Text of one. default: None where it must be given."""

    name: str
    type: str = "torch.Tensor"
    default: str | None = None

    @property
    def bare(self) -> str:
        """Without the default."""
        return f"{self.name}: {self.type}"

    def __str__(self) -> str:
        return self.bare if self.default is None else f"{self.bare} = {self.default}"


def optional(name: str) -> Parameter:
    """A tensor or None, which is the default."""
    return Parameter(name, "torch.Tensor | None", "None")


def names(parameters: Iterable[Parameter]) -> str:
    """As arguments."""
    return ", ".join(parameter.name for parameter in parameters)
