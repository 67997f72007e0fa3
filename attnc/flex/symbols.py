"""The scalars that a mod is called with, and tensors that it has indexed in part.

Operators and torch functions arrive at `apply` with the name of the operation. Functions of torch that are
given a symbol find `__torch_function__`; those that are given none, such as `bias[b, q_idx]`, a subscript of
an ordinary tensor, come through `Recording`, the mode that is on while a mod runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from attnc.expr.nodes import Type
from attnc.flex.errors import refuse, refused_branch, refused_number
from attnc.flex.tape import CAPTURED, Tape
from attnc.support.arguments import kind_without_memory

#: name -> what it does with a tape and its arguments; filled by `operations`.
OPERATIONS: dict[str, Callable[..., Any]] = {}
#: Most elements of a row of a tensor that are computed with one by one.
MOST_ELEMENTS = 32
DTYPES: Mapping[Type, torch.dtype] = {"bool": torch.bool, "int": torch.int32, "float": torch.float32}
#: Types of integers that torch computes in as they are, so that results wrap around.
NARROW = frozenset((torch.uint8, torch.int8, torch.int16))


class Operand:
    """Operators and attributes that scalars and vectors share."""

    tape: Tape

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return call(function, args, kwargs or {})

    def __bool__(self) -> NoReturn:
        raise refused_branch()

    def _refuse_number(self, *_: Any, **__: Any) -> NoReturn:
        raise refused_number()

    __int__ = __float__ = __index__ = __complex__ = __len__ = __iter__ = item = tolist = _refuse_number
    __array__ = _refuse_number  # a NumPy array that is indexed asks for one

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Returns a function or operator of NumPy's, such as `np.float64(2) * score`: torch's of the same
        name.
        """
        if method != "__call__" or options:
            self._refuse_number()
        name = function.__name__
        return apply(self.tape, "pow" if name == "power" else name, inputs, {})

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: apply(self.tape, name, (self, *args), kwargs)


def _operator(name: str, *, swapped: bool = False) -> Callable[..., Any]:
    def operate(self: Operand, *others: Any) -> Any:
        return apply(self.tape, name, (*others, self) if swapped else (self, *others), {})

    return operate


for _name, _operation in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}.items():  # fmt: skip
    setattr(Operand, f"__{_name}__", _operator(_operation))
    setattr(Operand, f"__r{_name}__", _operator(_operation, swapped=True))
for _name, _operation in {"neg": "neg", "pos": "positive", "invert": "bitwise_not", "abs": "abs"}.items():
    setattr(Operand, f"__{_name}__", _operator(_operation))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Operand, f"__{_name}__", _operator(_name))


class Scalar(Operand):
    """A value of a mod: an entry of the tape.

    low, high: what an integer lies between, at the sizes of this call
    narrow: its type, where that is one of `NARROW`
    quotient: the integers that it is the quotient of, where it is one
    """

    shape = torch.Size(())
    ndim = 0

    def __init__(
        self,
        tape: Tape,
        at: int,
        low: float = -math.inf,
        high: float = math.inf,
        *,
        narrow: torch.dtype | None = None,
        quotient: tuple[Scalar, Scalar] | None = None,
    ) -> None:
        self.tape, self.at, self.low, self.high = tape, at, low, high
        self.narrow, self.quotient = narrow, quotient

    @property
    def kind(self) -> Type:
        return self.tape.types[self.at]

    @property
    def dtype(self) -> torch.dtype:
        return self.narrow or DTYPES[self.kind]

    @property
    def device(self) -> torch.device:
        return self.tape.device

    def dim(self) -> int:
        return 0

    def numel(self) -> int:
        return 1

    def size(self, *_: int) -> torch.Size:
        return self.shape

    def __repr__(self) -> str:
        return f"<{self.kind} {self.tape.show(self.at)}>"

    def __getitem__(self, index: Any) -> Scalar:
        if all(part is Ellipsis for part in _list_index(index)):
            return self
        raise refuse("E0901", "a scalar has no axes", "index, score and positions are single values")


class Vector(Operand):
    """A few scalars that a mod computes with alike: a row of a captured tensor."""

    ndim = 1

    def __init__(self, tape: Tape, elements: Iterable[Any]) -> None:
        self.tape, self.elements = tape, list(elements)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.elements),))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and len(index) == 1:  # as steps have it, and torch takes it
            (index,) = index
        if isinstance(index, int) and not isinstance(index, bool):
            return self.elements[index]
        raise refuse("E0901", "a row of values takes a number as its index", "not a number")


class Indexed(Operand):
    """A captured tensor with indices for its first axes: `bias[b, h]` of `bias[b, h, q_idx, kv_idx]`."""

    def __init__(self, tape: Tape, tensor: torch.Tensor, indices: tuple[Any, ...]) -> None:
        self.tape, self.tensor, self.indices = tape, tensor, indices

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape[len(self.indices) :]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: Any) -> Any:
        return subscript(self.tape, self.tensor, (*self.indices, *_list_index(index)))

    @property
    def vector(self) -> Vector:
        if len(self.shape) != 1 or self.shape[0] > MOST_ELEMENTS:
            raise refuse(
                "E0903",
                f"a value of shape {list(self.shape)} in a mod",
                "expected a single number",
                f"index every axis of the tensor; rows have {MOST_ELEMENTS} elements at most",
            )
        return Vector(self.tape, (self[i] for i in range(self.shape[0])))


#: Functions of torch that ask for a tensor's shape or type: attributes among them.
_ASKING = frozenset(("__get__", "size", "dim"))


class Recording(TorchFunctionMode):
    """Sees every function of torch that a mod calls."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.__getitem__ and _has_symbol(args[1]):
            return subscript(self.tape, args[0], _list_index(args[1]))
        if (
            getattr(function, "__name__", "") not in _ASKING
            and tape_of((*args, *(kwargs or {}).values())) is None
        ):
            self.tape.computes = True
        return call(function, args, kwargs or {})


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a function of torch: recorded where it has a symbol, else just called."""
    tape = tape_of(args) or tape_of(tuple(kwargs.values()))
    if tape is None:
        return function(*args, **kwargs)
    return apply(tape, getattr(function, "__name__", str(function)), args, kwargs)


def apply(tape: Tape, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the operation of this name, element by element where an argument has several."""
    plain = name.strip("_") if name.startswith("__") else name
    if plain in ("max", "min") and len(args) == 2 and not isinstance(args[1], int):  # else along an axis
        plain += "imum"
    operation = OPERATIONS.get(plain)
    if operation is None:
        hint = "a mod adds, compares and looks up numbers; what it cannot say can be looked up in a tensor"
        if (other := plain.removesuffix("_")) in OPERATIONS:
            hint = f"nothing in a mod is changed in place: write '{other}', and use what it returns"
        elif plain == "detach":
            hint = "gradients flow through all of a score: pass what has none as a tensor that requires none"
        raise refuse("E0901", f"'{plain}' cannot be written in a spec", "no spec has this operation", hint)
    named = [name for name in _OPERANDS if name in kwargs]
    args = (*args, *(kwargs[name] for name in named))
    kwargs = {name: value for name, value in kwargs.items() if name not in named}
    try:
        return _elementwise(tape, operation, args, kwargs)
    except TypeError as failure:
        try:
            signature(operation).bind(tape, *args, **kwargs)
        except TypeError as mismatch:
            raise refuse("E0901", f"'{plain}' with these arguments", str(mismatch)) from failure
        raise


#: What torch's functions call their operands, in their order.
_OPERANDS = ("condition", "input", "other")


def _elementwise(
    tape: Tape, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if getattr(operation, "takes_rows", False):
        return operation(tape, *args, **kwargs)
    args = tuple(arg.vector if isinstance(arg, Indexed) else arg for arg in args)
    lengths = {len(arg.elements) for arg in args if isinstance(arg, Vector)}
    if not lengths:
        return operation(tape, *args, **kwargs)
    if len(lengths) > 1:
        raise refuse("E0903", f"rows of {' and '.join(map(str, sorted(lengths)))} elements", "lengths differ")
    rows = (
        [arg.elements[i] if isinstance(arg, Vector) else arg for arg in args] for i in range(lengths.pop())
    )
    return Vector(tape, (operation(tape, *row, **kwargs) for row in rows))


def scalar(tape: Tape, value: Any) -> Scalar:
    """Returns an argument of an operation as a scalar: a symbol, a number, or a tensor of one."""
    match value:
        case Scalar():
            return value
        case bool() | int() | float():
            low = -math.inf if isinstance(value, float) else value
            return Scalar(tape, tape.number(value), low, -low if low == -math.inf else low)
        case torch.Tensor() if value.dim() == 0:
            if value.device.type == "cpu" and not tape.is_learned(value) and tape.device.type != "cpu":
                tape.computes = True  # a number of this call: it may be another one at the next
                return scalar(tape, value.item())
            return load(tape, value, ())
        case torch.Tensor():
            raise refuse(
                "E0903",
                f"a tensor of shape {list(value.shape)} in a mod",
                "expected a single number",
                "index it: tensor[b, h, q_idx, kv_idx], with as many indices as it has axes",
            )
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # a number of NumPy's
        return scalar(tape, value.item())
    raise refuse("E0903", f"a {type(value).__name__} in a mod", "expected a number or a tensor")


def subscript(tape: Tape, tensor: torch.Tensor, indices: tuple[Any, ...]) -> Any:
    """Returns tensor[indices], one of which is a symbol: an element, or what is left of the tensor."""
    kind = kind_without_memory(tensor)
    if kind:
        raise refuse("E0903", f"an element of {kind}", "expected a dense tensor")
    kept: list[Any] = []
    axis = 0
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dim() == 0:
            index = scalar(tape, index)
        if isinstance(index, Scalar):
            if index.kind != "int":
                raise refuse("E0903", f"an index that is a {index.kind}", "expected an integer")
            kept.append(index)
            axis += 1
        elif isinstance(index, int) and not isinstance(index, bool):
            tensor = tape.select(tensor, axis, index)
        else:
            shown = "..." if index is Ellipsis else ":" if isinstance(index, slice) else repr(index)
            raise refuse(
                "E0901",
                f"'{shown}' as an index beside a value of the mod",
                "expected an integer",
                "take views of a tensor outside of the mod",
            )
    if axis > tensor.dim():
        raise refuse("E0903", f"{axis} indices of a tensor with {tensor.dim()} axes", "too many")
    if axis < tensor.dim():
        return Indexed(tape, tensor, tuple(kept))
    return load(tape, tensor, tuple(kept))


def load(tape: Tape, tensor: torch.Tensor, indices: tuple[Scalar, ...]) -> Scalar:
    """Returns an element of a captured tensor. Negative indices count from the end, as in torch."""
    dtype = tensor.dtype
    if dtype not in CAPTURED:
        hint = f"convert it outside of the mod: {', '.join(str(known) for known in CAPTURED)} are read"
        raise refuse("E0903", f"a captured tensor of {dtype}", "not a type that mods read", hint)
    if tensor.dim() == 0 and tape.is_learned(tensor):  # scalars of a spec have no gradient, rows of one have
        tensor, indices = tape.select(tensor, 0, 0), (Scalar(tape, tape.add("int", "integer", 0), 0, 0),)
    axes = []
    for axis, index in enumerate(indices):
        size = _NAMED.get(tape.entries[index.at], "")
        if tape.infers and size:
            tape.sizes.setdefault(size, tensor.shape[axis])
        known = tape.sizes.get(size)
        axes.append(size if known is not None and known == tensor.shape[axis] else "")
    capture = tape.capture(tensor, tuple(axes))
    positions = []
    for axis, index in enumerate(indices):
        at = index.at
        if index.low < 0 and not _is_natural(tape, at):
            wrapped = tape.add("int", "+", at, tape.add("int", "size", capture, axis))
            zero = tape.add("int", "integer", 0)
            at = tape.add("int", "call", "where", tape.add("bool", "<", at, zero), wrapped, at)
        positions.append(at)
    kind: Type = "bool" if dtype is torch.bool else "float" if dtype.is_floating_point else "int"
    at = tape.add(kind, "load", capture, tuple(positions))
    if dtype not in NARROW:
        return Scalar(tape, at)
    within = torch.iinfo(dtype)
    return Scalar(tape, at, within.min, within.max, narrow=dtype)


_NAMED = {("index", "b"): "B", ("index", "h"): "H", ("index", "q_idx"): "M", ("index", "kv_idx"): "N"}


def _is_natural(tape: Tape, at: int) -> bool:
    """Returns whether a loaded index is known not to be negative, from the data."""
    entry = tape.entries[at]
    return entry[0] == "load" and tape.facts(tape.captures[entry[1]].tensor).natural


def _list_index(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _has_symbol(index: Any) -> bool:
    return any(isinstance(part, Operand) for part in _list_index(index))


def tape_of(values: Iterable[Any]) -> Tape | None:
    for value in values:
        if isinstance(value, Operand):
            return value.tape
        if isinstance(value, tuple | list) and (found := tape_of(value)) is not None:
            return found
    return None
