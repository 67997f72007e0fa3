"""What kernels do most, without the detour through Triton's type rules, for its interpreter.

Most of what a kernel does is arithmetic on two operands of one type, or on a tensor and a number, and loads;
most of the interpreter's time goes into finding out which types and shapes the results have. Where the
operands leave no question, NumPy's result is taken, which is what the long way comes to; everything else
goes that way. `tests/verify/test_interpreted_language.py` holds both to the same bits and types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from attnc.verify.memory import WATCH

Function: TypeAlias = Callable[..., Any]
Method: TypeAlias = Callable[..., Any]
Shape: TypeAlias = tuple[int, ...]


def quotient(x: Any, y: Any) -> Any:
    """Divides integers, rounding towards 0 as GPUs do."""
    return (x - np.fmod(x, y)) // y


def from_right(function: Function) -> Function:
    """Returns the function of its operands the other way round."""
    return lambda x, y: function(y, x)


_ARITHMETIC: Mapping[str, Function] = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__rsub__": from_right(np.subtract),
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
}
_OF_FLOATS: Mapping[str, Function] = {"__truediv__": np.divide, "__rtruediv__": from_right(np.divide)}
_OF_INTEGERS: Mapping[str, Function] = {"__floordiv__": quotient, "__mod__": np.fmod}
_COMPARISONS: Mapping[str, Function] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_LOGIC: Mapping[str, Function] = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
_INTEGERS = frozenset({"int32", "int64"})
_NUMBERS = _INTEGERS | {"fp32"}
_AS_BITS = frozenset({"bf16", "fp8e4nv", "fp8e5"})
_STORED = _NUMBERS | _AS_BITS | {"fp16", "int8"}
_HALVES = frozenset({"bf16", "fp16"})
#: Conversions that round to the nearest, or change no number.
_CONVERSIONS = frozenset(
    {("int32", "fp32"), *((half, "fp32") for half in _HALVES), *(("fp32", half) for half in _HALVES)}
)
SHORT = range(-(2**31), 2**31)
_ALL = slice(None)
#: Options of loads and stores that change no value.
_HINTS = frozenset({"cache_modifier", "eviction_policy", "volatile", "_semantic"})


class Language:
    """The short ways of one imported `triton.language`.

    interpreter: the module `triton.runtime.interpreter`. Each method takes what is there now, the long way,
    and gives its replacement.
    """

    def __init__(self, tl: Any, interpreter: Any) -> None:
        self.tl, self.interpreter = tl, interpreter
        self.handle, self.tensor = interpreter.TensorHandle, tl.core.tensor
        self.constexpr, self.pointer_type = tl.core.constexpr, tl.core.pointer_type
        self.types: dict[tuple[str, Shape], tuple[Any, Any, Any]] = {}

    def methods(self) -> Iterator[tuple[str, Method]]:
        for functions, types, compares in (
            (_ARITHMETIC, _NUMBERS, False),
            (_OF_FLOATS, frozenset({"fp32"}), False),
            (_OF_INTEGERS, _INTEGERS, False),
            (_COMPARISONS, _NUMBERS, True),
            (_LOGIC, frozenset({"int1"}), False),
        ):
            for name, function in functions.items():
                method = self.binary(function, getattr(self.tensor, name), types, compares=compares)
                yield name, self.to_pointers(method) if name == "__add__" else method
        yield "to", self.convert(self.tensor.to)
        yield "__getitem__", self.expand(self.tensor.__getitem__)

    def functions(self) -> Iterator[tuple[str, Method]]:
        yield "load", self.load(self.tl.load)
        yield "store", self.store(self.tl.store)
        yield "where", self.where(self.tl.where)
        yield "arange", self.arange(self.tl.arange)
        yield "full", self.full(self.tl.full)
        yield "zeros", self.zeros(self.tl.zeros)
        yield "dot", self.dot(self.tl.dot)
        for name, of_floats, of_integers in (
            ("maximum", np.fmax, np.maximum),
            ("minimum", np.fmin, np.minimum),
        ):
            yield name, self.extreme(of_floats, of_integers, getattr(self.tl, name))

    def make_tensor(self, data: Any, dtype: Any, shape: Shape) -> Any:
        """Returns a tensor of these values; shape: () for a scalar, whose values are an array of one."""
        key = dtype.name, shape
        if key not in self.types:
            type = self.tl.block_type(dtype, list(shape)) if shape else dtype
            empty = self.tensor(None, type)
            self.types[key] = type, empty.shape, empty.numel
        made = object.__new__(self.tensor)
        made.type, made.shape, made.numel = self.types[key]
        made.dtype = dtype
        made.handle = handle = object.__new__(self.handle)
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        return made

    def plain(self, value: Any) -> Any:
        return value.value if value.__class__ is self.constexpr else value

    def binary(self, function: Function, long_way: Any, types: frozenset[str], *, compares: bool) -> Method:
        """Makes the method for operands of one type, integers of two widths, or a tensor and a number; any
        others go the long way.
        """
        tensor, int1, int64 = self.tensor, self.tl.int1, self.tl.int64
        constexpr, make_tensor = self.constexpr, self.make_tensor

        def method(left: Any, right: Any, **named: Any) -> Any:
            if left.__class__ is not tensor or left.dtype.name not in types:
                return long_way(left, right, **named)
            dtype = left.dtype
            is_block = left.type is not dtype
            if right.__class__ is tensor:
                other = right.dtype
                if other is not dtype:
                    if dtype.name not in _INTEGERS or other.name not in _INTEGERS:
                        return long_way(left, right, **named)
                    dtype = int64
                data = function(left.handle.data, right.handle.data)
                is_block = is_block or right.type is not other
            else:
                number, values = right.value if right.__class__ is constexpr else right, left.handle.data
                kind = number.__class__
                fits = kind is int and number in SHORT and dtype is not int1
                if not fits and not (kind is float and dtype.name == "fp32"):
                    return long_way(left, right, **named)
                data = function(values, values.dtype.type(number))
            return make_tensor(data, int1 if compares else dtype, data.shape if is_block else ())

        return method

    def extreme(self, of_floats: Function, of_integers: Function, long_way: Any) -> Method:
        """Returns the larger or smaller of two, which drops NaN unless it is asked to keep it."""
        integers = self.binary(of_integers, long_way, _INTEGERS, compares=False)
        numbers = self.binary(of_floats, integers, frozenset({"fp32"}), compares=False)

        def function(x: Any, y: Any, **named: Any) -> Any:
            return (numbers if named.keys() <= {"_semantic"} else long_way)(x, y, **named)

        return function

    def to_pointers(self, add: Method) -> Method:
        tensor, pointer_type = self.tensor, self.pointer_type

        def method(left: Any, right: Any, **named: Any) -> Any:
            dtype = left.dtype
            is_pointer = dtype.__class__ is pointer_type and right.__class__ is tensor
            if not is_pointer or right.dtype.name not in _INTEGERS:
                return add(left, right, **named)
            steps = right.handle.data * np.int64(max(1, dtype.element_ty.primitive_bitwidth // 8))
            data = left.handle.data + steps.view(np.uint64)
            is_block = left.type is not dtype or right.type is not right.dtype
            return self.make_tensor(data, dtype, data.shape if is_block else ())

        return method

    def convert(self, long_way: Any) -> Method:
        int32, int64 = self.tl.int32, self.tl.int64

        def method(left: Any, dtype: Any, *more: Any, **named: Any) -> Any:
            source, wanted = left.dtype, self.plain(dtype)
            if more or not named.keys() <= {"_semantic"}:
                return long_way(left, dtype, *more, **named)
            if source is wanted:
                return left
            if source is int32 and wanted is int64:
                data = left.handle.data.astype(np.int64)
                return self.make_tensor(data, int64, data.shape if left.type is not source else ())
            if (source.name, getattr(wanted, "name", "")) not in _CONVERSIONS:
                return long_way(left, dtype, **named)
            handle = self.interpreter.interpreter_builder.cast_impl(left.handle, wanted)
            made = self.make_tensor(handle.data, wanted, handle.data.shape if left.type is not source else ())
            made.handle = handle  # which may say that it was rounded
            return made

        return method

    def expand(self, long_way: Any) -> Method:

        def method(left: Any, places: Any, **named: Any) -> Any:
            if left.type is left.dtype or places.__class__ is not tuple:
                return long_way(left, places, **named)
            places = tuple([self.plain(place) for place in places])
            for place in places:
                if place is not None and place != _ALL:
                    return long_way(left, places, **named)
            data = left.handle.data[places]
            return self.make_tensor(data, left.dtype, data.shape)

        return method

    def lanes(self, pointer: Any, mask: Any, named: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """Addresses and mask of an access to memory, of one shape; None where there is more to it."""
        if pointer.__class__ is not self.tensor or pointer.dtype.__class__ is not self.pointer_type:
            return None
        if pointer.dtype.element_ty.name not in _STORED or not named.keys() <= _HINTS:
            return None
        addresses, mask = pointer.handle.data, self.plain(mask)
        if mask is None:
            return addresses, np.ones(addresses.shape, np.bool_)
        if mask.__class__ is not self.tensor or mask.dtype is not self.tl.int1:
            return None
        if mask.type is not mask.dtype and pointer.type is pointer.dtype:
            return None
        values = mask.handle.data
        if values.shape != addresses.shape:
            values = values | np.zeros(addresses.shape, np.bool_)  # several times faster than to broadcast
            if values.shape != addresses.shape:
                addresses = np.broadcast_to(addresses, values.shape)
        return addresses, values

    def load(self, long_way: Any) -> Method:
        def function(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
            found, filler = self.lanes(pointer, mask, named), self.plain(other)
            alone = filler is not None and self.plain(mask) is None
            if found is None or alone or (filler is not None and filler.__class__ not in (int, float)):
                return long_way(pointer, mask, other, **named)
            element = pointer.dtype.element_ty
            if filler and element.name in _AS_BITS:
                return long_way(pointer, mask, other, **named)
            addresses, active = found
            WATCH.load(addresses, active, filler is not None)
            dtype = self.interpreter._get_np_dtype(element)
            rest = np.full(addresses.shape, filler, dtype) if filler else np.zeros(addresses.shape, dtype)
            data = self.interpreter._interpreter.load(addresses, active, rest, dtype)
            return self.make_tensor(data, element, data.shape if pointer.type is not pointer.dtype else ())

        return function

    def store(self, long_way: Any) -> Method:
        def function(pointer: Any, value: Any, mask: Any = None, **named: Any) -> Any:
            found = self.lanes(pointer, mask, named)
            if found is None or value.__class__ is not self.tensor or value.dtype.is_ptr():
                return long_way(pointer, value, mask, **named)
            widens = value.type is not value.dtype and pointer.type is pointer.dtype
            if widens or value.dtype.name != pointer.dtype.element_ty.name:
                return long_way(pointer, value, mask, **named)
            addresses, active = found
            if addresses.shape != pointer.handle.data.shape:
                return long_way(pointer, value, mask, **named)
            values = value.handle.data
            if values.shape != addresses.shape:
                values = np.broadcast_to(values, addresses.shape)
            WATCH.store(addresses, active)
            return self.interpreter._interpreter.store(addresses, values, active)

        return function

    def where(self, long_way: Any) -> Method:
        def function(condition: Any, x: Any, y: Any, **named: Any) -> Any:
            if condition.__class__ is not self.tensor or condition.dtype is not self.tl.int1:
                return long_way(condition, x, y, **named)
            tensors = [side for side in (x, y) if side.__class__ is self.tensor]
            if not tensors or any(side.dtype is not tensors[0].dtype for side in tensors):
                return long_way(condition, x, y, **named)
            dtype = tensors[0].dtype
            sides = [self.operand(side, dtype) for side in (x, y)]
            if dtype.name not in _NUMBERS or any(side is None for side in sides):
                return long_way(condition, x, y, **named)
            data = np.where(condition.handle.data, sides[0], sides[1])
            is_block = any(side.type is not side.dtype for side in (condition, *tensors))
            return self.make_tensor(data, dtype, data.shape if is_block else ())

        return function

    def operand(self, value: Any, dtype: Any) -> Any:
        """Returns the values of a tensor, or a number as one of this type; None where that is not what it
        becomes.
        """
        if value.__class__ is self.tensor:
            return value.handle.data
        number = self.plain(value)
        kind = number.__class__
        if (kind is float and dtype.name == "fp32") or (kind is int and number in SHORT):
            return self.interpreter._get_np_dtype(dtype).type(number)
        return None

    def arange(self, long_way: Any) -> Method:
        def function(start: Any, end: Any, **named: Any) -> Any:
            first, last = self.plain(start), self.plain(end)
            length = last - first
            if length < 1 or length & (length - 1):
                return long_way(start, end, **named)
            return self.make_tensor(_count(first, last), self.tl.int32, (length,))

        return function

    def full(self, long_way: Any) -> Method:
        def function(shape: Any, value: Any, dtype: Any, **named: Any) -> Any:
            sizes, kind = tuple(map(self.plain, shape)), self.plain(dtype)
            number = self.operand(value, kind) if getattr(kind, "name", "") in _NUMBERS else None
            if number is None or value.__class__ is self.tensor or any(n & (n - 1) or n < 1 for n in sizes):
                return long_way(shape, value, dtype, **named)
            return self.make_tensor(np.full(sizes, number), kind, sizes)

        return function

    def dot(self, long_way: Any) -> Method:
        """Returns the product of halves in float32, as the interpreter's builder has it, where types and
        shapes have passed the long way before.
        """
        builder, float32 = self.interpreter.interpreter_builder, self.tl.float32
        passed: set[tuple[object, ...]] = set()

        def function(left: Any, right: Any, acc: Any = None, *more: Any, **named: Any) -> Any:
            sides = [side for side in (left, right, self.plain(acc)) if side is not None]
            is_short = all(side.__class__ is self.tensor for side in sides)
            if more or not is_short or left.dtype.name not in _HALVES or not named.keys() <= {"_semantic"}:
                return long_way(left, right, acc, *more, **named)
            shapes = [side.handle.data.shape for side in sides]
            key = (*shapes, *[side.dtype.name for side in sides])
            if key not in passed:
                made = long_way(left, right, acc, **named)
                passed.add(key)
                return made
            sizes = (*shapes[0][:-1], shapes[1][-1])
            if len(sides) == 2:
                sides.append(self.make_tensor(np.zeros(sizes, np.float32), float32, sizes))
            handles = (side.handle for side in sides)
            return self.make_tensor(builder.create_dot(*handles, None, 0).data, float32, sizes)

        return function

    def zeros(self, long_way: Any) -> Method:
        full = self.full(lambda shape, value, dtype, **named: long_way(shape, dtype, **named))
        return lambda shape, dtype, **named: full(shape, 0, dtype, **named)


@cache
def _count(first: int, last: int) -> Any:
    values = np.arange(first, last, dtype=np.int32)
    values.flags.writeable = False
    return values
