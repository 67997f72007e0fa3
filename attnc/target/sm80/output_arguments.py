"""The struct of arguments of the kernels that compute o, as C++ declares it and Python packs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnc.model.dtypes import DType
from attnc.plan.ir import Arg, Module
from attnc.target.sm80.printer import stored_type


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputArguments:
    """Pointers, strides and sizes, in the order of the struct. tensors: those that are passed by address,
    with their strides; maps: those that TMA copies, whose maps come first; workspaces, more_strides:
    declarations of other pointers, and their strides; sizes: known at run time.
    """

    module: Module
    dtypes: dict[str, DType]
    tensors: Sequence[Arg]
    strides: Sequence[Sequence[str]]
    sizes: Sequence[str]
    maps: Sequence[str] = ()
    workspaces: Sequence[str] = ()
    more_strides: Sequence[Sequence[str]] = ()

    @property
    def names(self) -> list[str]:
        return [arg.tensor.name for arg in self.tensors]

    @property
    def fields(self) -> Iterator[str]:
        if self.maps:
            yield f"TensorMap {', '.join(f'{name}_map' for name in self.maps)};"
        for arg in self.tensors:
            const = "const " if arg in self.module.taken else ""
            stored = stored_type(self.dtypes[arg.tensor.name], self.module.variant)
            yield f"{const}{stored}* {arg.tensor.name}_ptr;"
        yield from self.workspaces
        yield from (
            f"long long {', '.join(names)};" for names in (*self.strides, *self.more_strides) if names
        )
        yield f"int {', '.join(self.sizes)};"
