"""What callers hand over: held to types, shapes and one device, in the words of the function they called.

`attnc export` copies this file beside kernels that run without the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnc.diagnostics.shown import show_value
from attnc.support.arguments import check_data, check_dense, requires_gradient

#: Types of the elements that kernels have queries of, of lengths and indices, and of what is converted.
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)
NUMBERS = (*FLOATS, torch.float64)
#: Columns of a head that a spec may have, which says the same; this file is exported without the compiler.
LARGEST_HEAD = 1024


class GivenTensors:
    """The tensors of a call, checked one after the other: those that follow have the sizes of those before.

    function: whose arguments they are, for messages; "" where names alone say it. source: what says so where
    no other tensor does: "as planned"
    """

    def __init__(self, function: str = "", source: str = "") -> None:
        self._function = f"{function}: " if function else ""
        self._source = f", {source}" if source else ""
        self._sizes: dict[str, int] = {}
        self._first = ""
        self._device: torch.device | None = None

    def check(
        self,
        name: str,
        x: Any,
        shape: str | Sequence[int],
        dtypes: Sequence[torch.dtype],
        why: str = "",
        *,
        anywhere: bool = False,
        has_data: bool = True,
    ) -> None:
        """Holds a tensor to a shape, one of several types and the device of the first tensor.

        shape: its sizes, or a word for each axis: `B`, which binds a size or has to equal the one that is
        bound, `B+1`, a number, or `_` for any size. why: its type is what it is, for the message: "like q".
        anywhere: on any device. has_data: it may not be on the device meta.

        Raises TypeError for what is no dense tensor or has another type, ValueError for another shape or
        device; each names the argument, what was expected and what came.
        """
        where = f"{self._function}{name}: expected"
        check_dense(f"{self._function}{name}", x)
        wanted = shape.split() if isinstance(shape, str) else shape
        if x.dim() != len(wanted):  # first: it is another tensor than was meant
            self._check_shape(where, wanted, x)
        if x.dtype not in dtypes:
            because = f", {why}" if why else self._source
            raise TypeError(f"{where} dtype {_join(dtypes)}{because}, got {x.dtype}")
        if has_data:
            check_data(f"{self._function}{name}", x)
        self._check_shape(where, wanted, x)
        if anywhere:
            return
        if self._device is None:
            self._first, self._device = name, x.device
        elif x.device != self._device:
            raise ValueError(f"{where} device {self._device}, like {self._first}, got {x.device}")

    def check_groups(self, q: str, k: str) -> None:
        """Raises ValueError where H, the heads of q, is no multiple of Hkv, those of k."""
        many, few = self._sizes["H"], self._sizes["Hkv"]
        if few == 0:
            raise ValueError(f"{self._function}{k}: expected at least one head, got none")
        if many % few:
            raise ValueError(
                f"{self._function}{q}: expected heads that are a multiple of the {few} of {k}, got {many}"
            )

    def check_rows(self, **tensors: torch.Tensor) -> None:
        """Raises ValueError for rows whose elements do not follow each other in memory."""
        for name, x in tensors.items():
            if x.stride(-1) != 1 and x.shape[-1] > 1:
                came = f"got strides {x.stride()}"
                raise ValueError(f"{self._function}{name}: expected a contiguous last axis, {came}")

    def check_pages(self, name: str, q: torch.Tensor) -> None:
        """Raises ValueError where pages, `P` of `page` rows, have none, or there are none to look into."""
        self.check_range(name, "page", 1)
        self.check_range(name, "P", 1 if q.numel() else 0)

    def check_range(self, name: str, size: str, least: int, most: int | None = None) -> None:
        """Raises ValueError where a size that a tensor has bound lies outside of least .. most."""
        found = self._sizes[size]
        if found < least or (most is not None and found > most):
            wanted = f"at least {least}" if most is None else f"{least} .. {most}"
            raise ValueError(f"{self._function}{name}: expected {size} to be {wanted}, got {found}")

    def check_columns(self, **sizes: str) -> None:
        """Raises ValueError where a size, by the tensor that has bound it, is none of a head's columns."""
        for name, size in sizes.items():
            self.check_range(name, size, 1, LARGEST_HEAD)

    def _check_shape(self, where: str, wanted: Sequence[str | int], x: torch.Tensor) -> None:
        shape, before = x.shape, self._sizes.copy()
        fits = len(shape) == len(wanted)
        for word, size in zip(wanted, shape, strict=False):
            known = self._find_known(word)
            name, _, more = str(word).partition("+") if known is None else ("", "", "")
            if known is None and size >= int(more or 0):
                self._sizes[name] = size - int(more or 0)
            elif known != size:
                fits = False
        if not fits:
            self._sizes = before
            raise ValueError(f"{where} shape {self._show(wanted)}{self._source}, got {list(shape)}")

    def _find_known(self, word: str | int) -> int | None:
        if not isinstance(word, str):
            return word
        if word.isdigit():
            return int(word)
        name, _, more = word.partition("+")
        size = None if name == "_" else self._sizes.get(name)
        return None if size is None else size + int(more or 0)

    def _show(self, wanted: Sequence[str | int]) -> str:
        shown = (self._find_known(word) for word in wanted)
        names = ("any" if word == "_" else str(word).replace("+", " + ") for word in wanted)
        sizes = (name if size is None else str(size) for name, size in zip(names, shown, strict=True))
        return f"[{', '.join(sizes)}]"


def lower_to_autocast(*tensors: Any) -> Sequence[Any]:
    """Returns tensors as PyTorch's attention takes them under torch.autocast, where rotary embeddings make
    queries and keys of 32 bits, but not values; as they are elsewhere. What is no such tensor stays.
    """
    kind = getattr(getattr(tensors[0], "device", None), "type", "meta")
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype) if getattr(x, "dtype", None) in FLOATS else x for x in tensors]


def is_hidden(value: Any) -> bool:
    """Returns whether a number is one that torch.compile traces as a tensor: NumPy's, but for np.float64,
    which is Python's too, and 0-d tensors.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        and not isinstance(value, int | float)
        and getattr(value, "ndim", None) == 0
    )


def is_unknown(value: Any) -> bool:
    """Returns whether a number is one that torch.compile has no value of: of those that are hidden,
    np.float64 has one.
    """
    if not is_hidden(value):
        return False
    return isinstance(value, torch.Tensor) or torch.as_tensor(value).dtype is not torch.float64


def is_true(name: str, value: Any) -> bool:
    """Returns a flag as Python's own. TypeError for one that torch.compile has no value of."""
    if is_unknown(value):
        raise TypeError(f"{name}: {_HIDDEN}: give bool({name.rpartition(' ')[2]})")
    return bool(value)


#: Why torch.compile refuses what kernels are chosen by.
_HIDDEN = "expected a number of Python's under torch.compile, which has no value of NumPy's and of tensors"


def to_float(name: str, value: Any) -> float:
    """Returns a number of Python's, NumPy's or torch's as Python's own. TypeError for what is none, and for
    one that torch.compile has no value of.
    """
    if is_unknown(value):
        raise TypeError(f"{name}: {_HIDDEN}: give float({name.rpartition(' ')[2]})")
    if isinstance(value, int | float) or hasattr(value, "__float__"):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # arrays, integers of 400 digits
            pass
    raise TypeError(f"{name}: expected a number, got {show_value(value)}")


def to_finite(name: str, value: Any) -> float:
    """Returns `to_float`. ValueError for what float32 does not hold, NaN too."""
    found = to_float(name, value)
    if not abs(found) <= torch.finfo(torch.float32).max:  # no global: torch.compile opens floats of those
        raise ValueError(f"{name}: expected a finite number of float32, got {show_value(value)}")
    return found


def to_dropout(name: str, value: Any) -> float:
    """Returns the probability with which a weight is dropped. TypeError and ValueError for what is none."""
    found = to_finite(name, value)
    if not 0 <= found < 1:
        raise ValueError(f"{name}: expected at least 0 and less than 1, got {show_value(value)}")
    return found


def draw_seed(device: torch.device) -> torch.Tensor:
    """Draws the seed of a call with dropout from torch's generator."""
    return torch.randint(1 << 62, (), device=device)


def refuse_gradients(function: str, **tensors: Any) -> None:
    """Raises RuntimeError for a tensor that wants a gradient of a function that has none."""
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if isinstance(x, torch.Tensor) and requires_gradient(x):
                raise RuntimeError(
                    f"{function}: {name}: expected a tensor without gradients, as there are none, got one"
                    " that requires them: call it under torch.no_grad()"
                )


def _join(dtypes: Sequence[torch.dtype]) -> str:
    *others, last = map(str, dtypes)
    return f"{', '.join(others)} or {last}" if others else last
