"""Gradients that somebody asks for, where a backward could make more: the gradient of q alone, as where keys
are frozen, takes none of the kernels that are for keys.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from .repeat import Repeated

Item = TypeVar("Item")


class AsksForLess:
    """A call whose gradients may be asked for one by one. wanted: positions of inputs that may have one."""

    backward: Any
    input_names: tuple[str, ...]
    wanted: tuple[int, ...]
    prepared_gradients: dict[Any, Any]
    repeated_gradients: defaultdict[Any, Repeated[Any]]

    @cached_property
    def alone(self) -> Any | None:
        """The call with the gradient of q and no other; None where that has all kernels, too."""
        shorter = None if self.backward is None else end_behind_q(self.backward, self.input_names[0])
        if shorter is None:
            return None
        made = copy.copy(self)
        made.backward, made.wanted = shorter, (0,)
        made.prepared_gradients = {}
        made.repeated_gradients = defaultdict(lambda: Repeated(gradients=True))
        made.alone = None
        return made

    def choose(self, asked: Sequence[bool]) -> Any:
        """Returns the call to make these gradients by, which are in the order of `wanted`."""
        alone = self.alone
        asks_for_q = all(wants is (at == 0) for at, wants in zip(self.wanted, asked, strict=True))
        return self if alone is None or not asks_for_q else alone


def end_behind_q(backward: Any, q: str) -> Any | None:
    """Returns the backward of the gradient of q alone, None where that has all kernels, too.

    Kernels run one after the other, and those configured as "dq" leave the gradient of q, so what comes
    behind the last of these is for others. Nothing is allocated for gradients of rows that lie in pages.
    """
    gradients = tuple([gradient for gradient in backward.gradients if gradient.name == q])
    launches = _end_behind(backward.launches, lambda launch: any(map(_makes_q, _kernels_of(launch))))
    if not gradients or not launches:
        return None
    if hasattr(last := launches[-1], "kernels"):
        launches = (*launches[:-1], replace(last, kernels=_end_behind(last.kernels, _makes_q)))
    if launches == backward.launches:
        return None
    in_pages = () if backward.pages is None else backward.pages.axes
    left_out = tuple([f"d{name}" for name in in_pages])
    return replace(backward, launches=launches, gradients=gradients, left_out=left_out)


def _end_behind(items: Sequence[Item], holds: Callable[[Item], bool]) -> tuple[Item, ...]:
    """Returns what comes up to the last one for which that holds."""
    return tuple(items[: max((at + 1 for at, item in enumerate(items) if holds(item)), default=0)])


def _kernels_of(launch: Any) -> Sequence[Any]:
    kernels: Sequence[Any] = getattr(launch, "kernels", (launch,))
    return kernels


def _makes_q(kernel: Any) -> bool:
    return bool(kernel.config == "dq")
