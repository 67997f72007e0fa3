"""What a mod computed, operation by operation.

Equal operations are one entry, so a tape shows what is shared. Numbers are not on it: an entry refers to them
by their position (a slot), so that mods that differ in numbers alone have equal tapes. A tape is a tuple of
tuples: cheap to make at every call, and the key by which a kernel is found.

A tape also says what is true of the integers in a captured tensor, looked at once while the tensor stays as
it is. That a tensor ascends lets kernels find the keys of a document by binary search instead of comparing
all, and that its values are not negative spares indices the test for counting from the end. Finding out waits
for the device; what was found is remembered with the tensor and its version, so layers that share a tensor,
and calls that change nothing, do not wait again.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from attnc.expr.nodes import Type
from attnc.flex.errors import span_of
from attnc.source import Span
from attnc.support.arguments import are_transformed, requires_gradient

# --- what is true of captured integers ----------------------------------------------------------------------


class ValueFacts(NamedTuple):
    """is_sorted: ascending along the last axis; natural: no value is negative."""

    is_sorted: bool = False
    natural: bool = False


NOTHING = ValueFacts()
T = TypeVar("T")
_KNOWN: dict[tuple[object, ...], tuple[list[weakref.ref[torch.Tensor]], list[int], Any]] = {}


def facts_of(tensor: torch.Tensor) -> ValueFacts:
    """Facts of an integer tensor; none where it cannot be looked at: without data, in a captured graph."""
    return remember([tensor], "facts", lambda: _looked_at(tensor.detach()), NOTHING)


def remember(tensors: Sequence[torch.Tensor], what: object, look: Callable[[], T], unseen: T) -> T:
    """Returns the result of a look at the data of some tensors, or that of an earlier call as long as the
    tensors have not changed. what: names the question, hashable; unseen: the answer if nothing can be looked
    at.
    """
    if any(x.is_meta or isinstance(x, FakeTensor) for x in tensors) or are_transformed(tensors):
        return unseen
    is_seen = not (any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing())
    if any(x.is_inference() for x in tensors):  # changes are not counted: nothing can be remembered
        return look() if is_seen else unseen
    owners = [x if x._base is None else x._base for x in tensors]  # views are made anew
    versions = [x._version for x in tensors]
    shown = ((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in tensors)
    key = (what, *map(id, owners), *shown)
    known = _KNOWN.get(key)
    if known is not None and known[1] == versions and all(map(is_, (ref() for ref in known[0]), owners)):
        found: T = known[2]
        return found
    if not is_seen:
        return unseen
    found = look()
    _KNOWN[key] = ([weakref.ref(x, lambda _: _KNOWN.pop(key, None)) for x in owners], versions, found)
    return found


def _looked_at(tensor: torch.Tensor) -> ValueFacts:
    if tensor.numel() == 0:
        return ValueFacts(True, True)
    ascends = (
        (tensor[..., 1:] >= tensor[..., :-1]).all() if tensor.dim() else torch.ones((), dtype=torch.bool)
    )
    is_sorted, natural = torch.stack([ascends.to(tensor.device), (tensor >= 0).all()]).tolist()
    return ValueFacts(bool(is_sorted), bool(natural))


# --- the tape -----------------------------------------------------------------------------------------------


#: Element types of captured tensors, as specs spell them.
CAPTURED: Mapping[torch.dtype, str] = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f32",
    torch.int32: "i32", torch.int64: "i64", torch.int16: "i32", torch.int8: "i32", torch.uint8: "i32",
    torch.bool: "bool",
}  # fmt: skip


def element_of(number: int | float) -> str:
    """Returns the element type that holds a number, as specs spell it."""
    if isinstance(number, float):
        return "f32"
    return "i32" if -(1 << 31) <= number < 1 << 31 else "i64"


Entry: TypeAlias = tuple[Any, ...]
Sizes: TypeAlias = dict[str, int]
View: TypeAlias = tuple[torch.Tensor, int, int, torch.Tensor]


@dataclass(slots=True)
class Capture:
    """A tensor that a mod reads. axes: for each the size B, H, M or N that it is, or "" for its own;
    learned: whether it gets a gradient.
    """

    tensor: torch.Tensor
    axes: tuple[str, ...]
    learned: bool
    is_sorted: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.tensor.dtype, self.axes, self.is_sorted, self.learned)


@dataclass(slots=True)
class Tape:
    """sizes: B, H, M, N of the call as far as they are known; device: of the call's tensors; infers: whether
    a size that is not known is that of an axis that is indexed so; compared: captures whose elements are
    compared; learned: tensors that get gradients, by identity, where torch does not know: inside of an
    operator; gradients: whether the score gets one; views: (tensor, axis, index, view) of the learned, by the
    identity of the view; named: names of tensors of ours, by identity; computes: whether torch computed
    something beside symbols, from data; places: where the user's file has each entry, if that is asked for,
    which takes time.
    """

    sizes: Sizes
    device: torch.device
    infers: bool
    entries: list[Entry] = field(default_factory=list)
    types: list[Type] = field(default_factory=list)
    numbers: list[int | float] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    compared: set[int] = field(default_factory=set)
    learned: set[int] = field(default_factory=set)
    gradients: bool = False
    views: dict[int, View] = field(default_factory=dict)
    named: dict[int, str] = field(default_factory=dict)
    computes: bool = False
    places: dict[int, Span] | None = None
    _known: dict[Entry, int] = field(default_factory=dict)
    _captured: dict[tuple[int, tuple[str, ...]], int] = field(default_factory=dict)
    _derived: list[bool] = field(default_factory=list)

    def add(self, type: Type, *entry: Any) -> int:
        """Returns the position of an operation: its name, then positions of operands or what else it has."""
        found = self._known.get(entry)
        if found is None:
            found = self._known[entry] = len(self.entries)
            self.entries.append(entry)
            self.types.append(type)
            if self.places is not None:
                self.places[found] = span_of(sys._getframe(1))
        return found

    def number(self, value: bool | int | float) -> int:
        """Returns a number of the mod's. Those that are part of a mod's structure are entries: true, false,
        what is not finite.
        """
        if isinstance(value, bool):
            return self.add("bool", "constant", value)
        value = int(value) if isinstance(value, int) else float(value)  # of a class of their own: np.float64
        if isinstance(value, float) and not math.isfinite(value):
            return self.add("float", "constant", repr(value))
        self.numbers.append(value)
        type: Type = "int" if isinstance(value, int) else "float"
        return self.add(type, "number", len(self.numbers) - 1, element_of(value))

    def capture(self, tensor: torch.Tensor, axes: tuple[str, ...]) -> int:
        key = (id(tensor), axes)
        if key not in self._captured:
            self._captured[key] = len(self.captures)
            self.captures.append(Capture(tensor, axes, self.is_learned(tensor)))
        return self._captured[key]

    def is_learned(self, tensor: torch.Tensor) -> bool:
        return requires_gradient(tensor) or id(tensor) in self.learned

    def select(self, tensor: torch.Tensor, axis: int, index: int) -> torch.Tensor:
        """Returns the part of a tensor at an index of an axis; of one without axes, with one."""
        view = tensor.select(axis, index) if tensor.dim() else tensor.view(1)
        if id(tensor) in self.learned:
            self.learned.add(id(view))
            self.views[id(view)] = (tensor, axis, index, view)
        return view

    def has_derivative(self, at: int) -> bool:
        """Returns whether an entry depends on what gets a gradient."""
        for entry in self.entries[len(self._derived) : at + 1]:  # operands come before what is made of them
            is_leaf = entry[0] == "score" and self.gradients
            is_leaf = is_leaf or (entry[0] == "load" and self.captures[entry[1]].learned)
            self._derived.append(is_leaf or any(self._derived[operand] for operand in operands(entry)))
        return self._derived[at]

    def may_be_infinite(self, at: int) -> bool:
        """Returns whether an infinity that a mod writes is part of an entry."""
        todo, seen = [at], set[int]()
        while todo:
            seen.add(at := todo.pop())
            if self.constant(at) in (math.inf, -math.inf):
                return True
            todo += [operand for operand in operands(self.entries[at]) if operand not in seen]
        return False

    def constant(self, at: int) -> bool | float | None:
        """Returns the value of an entry that is part of the structure; None for others."""
        entry = self.entries[at]
        if entry[0] != "constant":
            return None
        return entry[1] if isinstance(entry[1], bool) else float(entry[1])

    def show(self, at: int, depth: int = 4) -> str:
        entry = self.entries[at]
        match entry:
            case ("index", name):
                return str(name)
            case ("number", slot, _):
                return str(self.numbers[slot])
            case ("constant", value):
                return str(value)
            case ("call", name, *_) | (name, *_):
                inner = [self.show(part, depth - 1) if depth else "..." for part in operands(entry)]
                return f"{name}({', '.join(inner)})" if inner else str(name)
        raise AssertionError(entry)

    def facts(self, tensor: torch.Tensor) -> ValueFacts:
        return facts_of(tensor)

    def look_at_order(self) -> None:
        """Notes which of the captures that are compared, position by position, ascend."""
        for at in self.compared:
            capture = self.captures[at]
            is_row = capture.axes[-1:] in (("M",), ("N",)) and not {"M", "N"} <= {*capture.axes}
            if is_row and not capture.tensor.dtype.is_floating_point and capture.tensor.dtype != torch.bool:
                capture.is_sorted = self.facts(capture.tensor).is_sorted

    @property
    def key(self) -> tuple[Any, ...]:
        """What two calls must share to share a kernel, but for numbers."""
        return (tuple(self.entries), tuple(capture.key for capture in self.captures))


def operands(entry: Entry) -> Iterator[int]:
    match entry:
        case ("load", _, indices) | ("listed", _, indices, _):
            yield from indices
        case ("call", _, *arguments):
            yield from arguments
        case ("index" | "size" | "number" | "integer" | "constant" | "score", *_):
            return
        case (_, *arguments):
            yield from arguments
