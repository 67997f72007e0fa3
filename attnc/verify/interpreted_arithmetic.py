"""Sums, products and comparisons in the interpreter, without the detour through Triton's type rules.

Most of what a kernel does is arithmetic on two operands of one type, or on a tensor and a number, and most of
the interpreter's time goes into finding out which type the result has. Where the operands leave no question,
NumPy's result is taken; everything else goes the long way. `tests/verify/test_interpreter.py` holds both to
the same results and types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

#: Methods of a tensor by the function that they come to. Quotients are of floats alone.
_ARITHMETIC: Mapping[str, Any] = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
_DIVISION: Mapping[str, Any] = {"__truediv__": np.divide}
_COMPARISONS: Mapping[str, Any] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_LOGIC: Mapping[str, Any] = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
_NUMBERS = frozenset({"int32", "int64", "fp32"})
_SHORT = range(-(2**31), 2**31)


class Arithmetic:
    """The short ways of one imported `triton.language`; handle: the interpreter's class of values."""

    def __init__(self, tl: Any, handle: Any) -> None:
        self.tl, self.handle = tl, handle
        self.tensor, self.constexpr = tl.core.tensor, tl.core.constexpr
        self.fields: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def methods(self) -> dict[str, Callable[..., Any]]:
        """The methods of a tensor as they are now, by name, with a short way in front."""
        found: dict[str, Callable[..., Any]] = {}
        for functions, types, compares in (
            (_ARITHMETIC, _NUMBERS, False),
            (_DIVISION, frozenset({"fp32"}), False),
            (_COMPARISONS, _NUMBERS, True),
            (_LOGIC, frozenset({"int1"}), False),
        ):
            for name, function in functions.items():
                found[name] = self._short(function, getattr(self.tensor, name), types, compares=compares)
        found["__add__"] = self._to_pointers(found["__add__"])
        found["to"] = self._widened(self.tensor.to)
        return found

    def _short(
        self, function: Any, long_way: Any, types: frozenset[str], *, compares: bool
    ) -> Callable[..., Any]:
        tensor, constexpr, int1 = self.tensor, self.constexpr, self.tl.int1

        def method(left: Any, right: Any, **named: Any) -> Any:
            dtype, is_block = left.dtype, left.shape
            if dtype.name not in types:
                return long_way(left, right, **named)
            if right.__class__ is tensor:
                if right.dtype is not dtype:
                    return long_way(left, right, **named)
                data = function(left.handle.data, right.handle.data)
                is_block = is_block or right.shape
            else:
                number = right.value if right.__class__ is constexpr else right
                kind, values = number.__class__, left.handle.data
                fits = kind is int and number in _SHORT and dtype is not int1
                if not fits and not (kind is float and dtype.name == "fp32"):
                    return long_way(left, right, **named)
                data = function(values, values.dtype.type(number))
            return self._made(data, int1 if compares else dtype, data.shape if is_block else ())

        return method

    def _to_pointers(self, add: Any) -> Callable[..., Any]:
        tensor, int32, int64 = self.tensor, self.tl.int32, self.tl.int64

        def method(left: Any, right: Any, **named: Any) -> Any:
            dtype = left.dtype
            if not dtype.is_ptr() or right.__class__ is not tensor or right.dtype not in (int32, int64):
                return add(left, right, **named)
            size = max(1, dtype.element_ty.primitive_bitwidth // 8)
            data = left.handle.data + size * right.handle.data.astype(np.uint64)
            return self._made(data, dtype, data.shape if left.shape or right.shape else ())

        return method

    def _widened(self, long_way: Any) -> Callable[..., Any]:
        int32, int64 = self.tl.int32, self.tl.int64

        def method(left: Any, dtype: Any, *more: Any, **named: Any) -> Any:
            if more or dtype is not int64 or left.dtype is not int32:
                return long_way(left, dtype, *more, **named)
            data = left.handle.data.astype(np.int64)
            return self._made(data, int64, data.shape if left.shape else ())

        return method

    def _made(self, data: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        """A tensor of these values; shape: () for a scalar, whose values are an array of one."""
        key = dtype.name, shape
        fields = self.fields.get(key)
        if fields is None:
            type = self.tl.block_type(dtype, list(shape)) if shape else dtype
            fields = self.fields[key] = {**vars(self.tensor(None, type))}
        handle = object.__new__(self.handle)
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        made = object.__new__(self.tensor)
        made.__dict__.update(fields, handle=handle)
        return made
