# Copied by `attnc compile`, from attnc/support. Do not edit.
"""Checks of a call's arguments: each is refused by name, with what was expected and what came."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from .memory import share_elements
from .sizes import evaluate, list_names

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "i8": torch.int8,
    "u8": torch.uint8,
}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a call, as kernels see it.

    type: `bf16[B, M, H, 128]`; a size in brackets that no tensor before has is free, `H=8` is a free size
    that must be 8, and `B + 1` is one more than a free size. axes: the letters of its strides in the
    kernels' text, `bmh` for stride_qb, stride_qm and stride_qh; "" where they are numbers, stride_bias_0.

    dtype: of its elements; shape: its sizes as text; stride_names: what kernels call its strides, axis by
    axis, without that of features.
    """

    name: str
    type: str
    axes: str = ""
    dtype: torch.dtype = field(init=False, repr=False, compare=False)
    shape: tuple[str, ...] = field(init=False, repr=False, compare=False)
    stride_names: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # now, not when they are asked for: torch.compile cannot trace what keeps them then
        element, _, inside = self.type.removesuffix("]").partition("[")
        # a comma between sizes, not one of a function's arguments
        shape = tuple(re.split(r", (?![^()]*\))", inside)) if inside else ()
        letters = self.axes or tuple(f"_{axis}" for axis in range(len(shape)))
        object.__setattr__(self, "dtype", DTYPES[element])
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "stride_names", tuple(f"stride_{self.name}{letter}" for letter in letters))

    @property
    def known_shape(self) -> tuple[int | None, ...]:
        values = (size.partition("=")[2] or size for size in self.shape)
        return tuple(int(value) if value.isdigit() else None for value in values)

    @property
    def is_scalar(self) -> bool:
        """Whether it has no axes: a call may pass a Python number."""
        return not self.shape

    @property
    def has_rows(self) -> bool:
        """Whether its last axis is that of features, which is contiguous and whose stride no kernel takes."""
        return len(self.axes) == len(self.shape) - 1 and self.axes != ""

    @property
    def is_packed(self) -> bool:
        """Whether it has the rows of all sequences end to end: kernels clear those behind the last as one."""
        return self.has_rows and "b" not in self.axes

    def rename(self, name: str, type: str | None = None) -> "Tensor":
        return replace(self, name=name, type=self.type if type is None else type)


class Sizes(dict[str, int]):
    """The sizes of a call by name, bound tensor by tensor in the order of the checks.

    computed: by name what follows from the others, `N` from the columns of a block table. group: how many
    query heads share a K/V head: a number, 0 for any, None where they do not.
    """

    def __init__(self, first: str, computed: dict[str, str], group: int | None) -> None:
        super().__init__()
        self.first, self.computed, self.group = first, computed, group
        self._is_grouped = group is None

    def check(self, tensors: Sequence[Tensor], given: Sequence[torch.Tensor]) -> None:
        """Binds the sizes of all arguments. ValueError and TypeError for what is not as declared."""
        like = given[0]
        pairs = list(zip(tensors, given, strict=True))
        for tensor, x in pairs:
            if tensor.axes:
                self.check_one(tensor, x, like)
                self._check_group()
        later = []
        missing = set(self.computed)
        for tensor, x in pairs:
            if tensor.axes:
                continue
            if any(self._waits(size, missing) for size in tensor.shape):
                missing |= {name for size in tensor.shape for name in list_names(_without_value(size))}
                later.append((tensor, x))
            else:
                self.check_one(tensor, x, like)
        self.compute()
        for tensor, x in later:
            self.check_one(tensor, x, like)

    def bind(self, tensors: Sequence[Tensor], given: Sequence[torch.Tensor]) -> None:
        for tensor, x in zip(tensors, given, strict=True):
            for text, size in zip(tensor.shape, x.shape, strict=True):
                name, plus = self._free(text)
                if name:
                    self[name] = size - plus
        self.compute()

    def compute(self) -> None:
        if "H" in self:
            self["G"] = self["H"] // max(self.setdefault("Hkv", 1), 1)
        for name, text in self.computed.items():
            self[name] = evaluate(text, self)

    def check_one(self, tensor: Tensor, x: torch.Tensor, like: torch.Tensor, name: str = "") -> None:
        """Checks one tensor, and binds the sizes that it is the first to have."""
        free = [self._free(text) for text in tensor.shape]
        wanted: list[int | None] = []
        for text, (unbound, _) in zip(tensor.shape, free, strict=True):
            _, has_value, value = text.partition("=")
            wanted.append(int(value) if has_value else None if unbound else evaluate(text, self))
        shape = check_tensor(name or tensor.name, x, tensor.dtype, tuple(wanted), like, self.first)
        for (unbound, plus), size in zip(free, shape, strict=True):
            if unbound:
                if size < plus or self.get(unbound, size - plus) != size - plus:
                    raise ValueError(
                        f"{tensor.name}: expected shape [{', '.join(tensor.shape)}], got {list(x.shape)}"
                    )
                self[unbound] = size - plus

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Returns the shape of a tensor whose sizes are all known."""
        return tuple(evaluate(_without_value(text), self) for text in tensor.shape)

    def _free(self, text: str) -> tuple[str, int]:
        """(the size that this one is the first to have, how much more than that it is); ("", 0): none."""
        name, _, plus = _without_value(text).partition(" + ")
        if name.isidentifier() and name not in self and name not in self.computed and name != "G":
            return name, int(plus or 0)
        return "", 0

    def _waits(self, text: str, missing: set[str]) -> bool:
        """Returns whether a size is not known before some of the missing ones are."""
        return not self._free(text)[0] and not missing.isdisjoint(
            list_names(_without_value(text)) - self.keys()
        )

    def _check_group(self) -> None:
        if self._is_grouped or not {"H", "Hkv"} <= self.keys():
            return
        self._is_grouped = True
        heads, shared = self["H"], self["Hkv"]
        if self.group:
            if heads != self.group * shared:
                raise ValueError(
                    f"q has {heads} heads: expected {self.group} for each of the {shared} heads of k"
                )
        elif shared == 0 and heads:
            raise ValueError(f"k has no heads: expected at least one for the {heads} heads of q")
        elif shared and heads % shared:
            raise ValueError(f"q has {heads} heads: expected a multiple of the {shared} heads of k")
        self["G"] = heads // shared if shared else 1


def _without_value(text: str) -> str:
    return text.partition("=")[0]


def check_tensor(
    name: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    sizes: tuple[int | None, ...],
    like: torch.Tensor,
    first: str = "q",
) -> torch.Size:
    """x.shape, after checking that x is what the spec says; None: any size. first: the name of `like`."""
    check_dense(name, x)
    if isinstance(x, FakeTensor) and not isinstance(like, FakeTensor):
        raise TypeError(f"{name}: expected a tensor with data, like {first}, got a FakeTensor")
    shape = x.shape
    if len(shape) != len(sizes):  # first: of another number of axes, it is another tensor than was meant
        raise _wrong_shape(name, sizes, shape)
    if x.dtype is not dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, like {first}, got {x.device}")
    check_data(name, x)
    if any(want is not None and want != got for want, got in zip(sizes, shape, strict=True)):
        raise _wrong_shape(name, sizes, shape)
    return shape


def _wrong_shape(name: str, sizes: Sequence[int | None], shape: Sequence[int]) -> ValueError:
    wanted = ", ".join("any" if size is None else str(size) for size in sizes)
    return ValueError(f"{name}: expected shape [{wanted}], got {list(shape)}")


def kind_without_memory(x: torch.Tensor) -> str:
    """Returns what a tensor is whose elements no kernel finds at its address and strides, for a message; ""
    for one whose elements are there.
    """
    if x.is_nested:
        return "a nested tensor"
    if x.layout != torch.strided:
        return f"layout {x.layout}"
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return ""  # nothing is read
    if type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return ""
    return f"{type(x).__name__}, a class that computes by itself: pass the tensor that it holds"


def check_dense(name: str, x: object) -> None:
    """TypeError for what is no tensor, or one whose elements no kernel finds at its address and strides:
    sparse, nested, or of a class that has none itself, such as a DTensor. RuntimeError while torch.jit.trace
    runs, where sizes are no numbers.
    """
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            f"{name}: torch.jit.trace cannot follow attention kernels: export the program with torch.export"
        )
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    kind = kind_without_memory(x)
    if kind:
        raise TypeError(f"{name}: expected a dense tensor, got {kind}")


def check_data(name: str, x: torch.Tensor) -> None:
    """ValueError for a tensor on the device meta."""
    if x.device.type == "meta" and not torch.compiler.is_compiling():
        raise ValueError(f"{name}: expected a tensor with data, got one on the device meta, which has none")


def check_outputs(out: object, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Returns the caller's outputs, one for each name; a single one is the tensor itself."""
    if len(names) == 1:
        return (out,)  # type: ignore[return-value]  # checked with its sizes
    if not isinstance(out, (tuple, list)) or len(out) != len(names):
        came = f"{len(out)} of them" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"out: expected a tuple of {len(names)} tensors ({', '.join(names)}), got {came}")
    return tuple(out)


def reject_overlapping_output(name: str, x: torch.Tensor) -> None:
    """ValueError for a tensor to write to whose elements share memory."""
    refuse_negated(name, x)
    if x.numel() and any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(f"{name}: expected an element of memory for each value, got strides {x.stride()}")


def refuse_shared(
    names: Sequence[str], inputs: Sequence[torch.Tensor], outputs: Sequence[str], out: Sequence[torch.Tensor]
) -> None:
    """ValueError for a tensor to write to that shares elements with an input, or with another of them."""
    storages = [x.untyped_storage().data_ptr() for x in out]
    for at, x in enumerate(inputs):
        if x.untyped_storage().data_ptr() in storages:
            _refuse_shared(outputs, out, names[at], x)
    if len(storages) > 1 and len({*storages}) < len(storages):
        for at, x in enumerate(out):
            _refuse_shared(outputs[at + 1 :], out[at + 1 :], outputs[at], x)


def _refuse_shared(outputs: Sequence[str], out: Sequence[torch.Tensor], other: str, x: torch.Tensor) -> None:
    for name, y in zip(outputs, out, strict=True):
        if share_elements(x, y):
            raise ValueError(f"{name}: expected memory of its own, got elements that are those of {other}")


def refuse_negated(name: str, x: torch.Tensor) -> None:
    """ValueError for a view whose elements torch negates when it reads them: kernels see those in memory."""
    if x.is_neg():
        raise ValueError(f"{name}: expected elements as they are in memory, got a lazily negated view")


def require_contiguous_rows(name: str, x: torch.Tensor) -> None:
    """ValueError for rows whose elements do not follow each other."""
    refuse_negated(name, x)
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name}: expected a contiguous last axis (stride 1), got strides {x.stride()}")


def plain_number(x: object, dtype: torch.dtype, like: torch.Tensor) -> object:
    """Returns what another library has for a number, such as np.float32(1), as Python's own, or, where
    torch.compile traces it as a tensor, as one of this type; anything else as it is.
    """
    if isinstance(x, (torch.Tensor, int, float)) or getattr(x, "ndim", None) != 0:
        return x
    if torch.compiler.is_dynamo_compiling():
        traced = torch.as_tensor(x, device=like.device)
        return traced.to(dtype) if dtype.is_floating_point >= traced.is_floating_point() else traced
    item = getattr(x, "item", None)
    return x if item is None else item()


#: What numbers of a type are called, where that is not what they are.
_NUMBERS = {torch.bool: "True or False"}


def scalar_tensor(name: str, x: object, dtype: torch.dtype, like: torch.Tensor, first: str) -> torch.Tensor:
    """Returns a number of Python's or of torch.export's as a 0-d tensor on the device, without waiting for
    it; a 0-d tensor as it is.
    """
    if isinstance(x, torch.Tensor):
        check_tensor(name, x, dtype, (), like, first)
        return x
    if isinstance(x, torch.SymInt) or (dtype.is_floating_point and isinstance(x, torch.SymFloat)):
        symbol: Any = x  # of torch.export: any number that it may stand for
        return torch.full((), symbol, dtype=dtype, device=like.device)
    if not isinstance(x, (int, float) if dtype.is_floating_point else int):
        kind = _NUMBERS.get(dtype, "a number" if dtype.is_floating_point else "an integer")
        raise TypeError(f"{name}: expected {kind} or a 0-d tensor, got {x!r}")
    if dtype.is_floating_point:
        fits = not torch.finfo(dtype).max < abs(x) < math.inf  # inf and nan are numbers of it
    elif dtype is torch.bool:
        fits = x in (0, 1)
    else:
        fits = torch.iinfo(dtype).min <= x <= torch.iinfo(dtype).max
    if not fits:
        # torch.compile puts no numbers into texts that it traces
        came = "" if torch.compiler.is_compiling() else f", got {x}"
        kind = _NUMBERS.get(dtype, f"a number that fits {dtype}")
        raise ValueError(f"{name}: expected {kind}{came}")
    return torch.full((), x, dtype=dtype, device=like.device)


def check_probability(name: str, x: object) -> None:
    """ValueError for a Python number that is no probability."""
    if isinstance(x, (int, float)) and not 0 <= x <= 1:
        # torch.compile puts no numbers into texts that it traces
        came = "" if torch.compiler.is_compiling() else f", got {x}"
        raise ValueError(f"{name}: expected a probability, 0 to 1{came}")


def are_transformed(inputs: Sequence[object], out: object = None) -> bool:
    """Returns whether some are tensors of a transform of torch.func, which operators see through and kernels
    do not. out: where results go, one or several.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return False
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    written = out if isinstance(out, (tuple, list)) else (out,)
    return any(is_wrapped(x) for x in (*inputs, *written) if isinstance(x, torch.Tensor))


def leaving_transforms() -> AbstractContextManager[object]:
    """Suspends transforms of torch.func, to which what is made under them belongs.

    A transform turns gradients on for its own tensors: here they are off where they are off outside of it.
    """
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return _outside_of_transforms()


@contextmanager
def _outside_of_transforms() -> Iterator[None]:
    from torch._functorch import pyfunctorch

    levels = pyfunctorch.retrieve_all_functorch_interpreters()
    modes = [level.prev_grad_mode() for level in levels if isinstance(level, pyfunctorch.GradInterpreter)]
    with (
        pyfunctorch.temporarily_clear_interpreter_stack(),
        torch.set_grad_enabled(torch.is_grad_enabled() and all(modes)),
    ):
        yield


def refuse_tangents(function: str, inputs: Sequence[object]) -> None:
    """RuntimeError for tensors of forward-mode differentiation: kernels do not see tangents. torch.compile
    does not say which have one: all of them may.
    """
    if torch.compiler.is_compiling():
        if not _has_tangents():
            return
    elif forward_ad._current_level < 0:
        return
    if torch.compiler.is_compiling() or any(
        forward_ad.unpack_dual(_below_maps(x)).tangent is not None  # type: ignore[no-untyped-call]  # torch's
        for x in inputs
        if isinstance(x, torch.Tensor)
    ):
        raise RuntimeError(
            f"{function} has no forward-mode derivative: differentiate backward, by torch.autograd.grad"
        )


def _below_maps(x: torch.Tensor) -> torch.Tensor:
    while torch._C._functorch.is_batchedtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def _is_differentiated() -> bool:
    """Returns whether a transform of torch.func at work is one that differentiates backward."""
    kind = torch._C._functorch.TransformType.Grad
    return any(transform.key() == kind for transform in torch._C._functorch.get_interpreter_stack() or ())


def is_transforming() -> bool:
    """Returns whether a transform of torch.func is at work."""
    return bool(torch._C._functorch.get_interpreter_stack())


def _has_tangents() -> bool:
    return forward_ad._current_level >= 0


# What torch.compiler.assume_constant_result does, without importing the compiler: tracing calls them for
# real, and guards transforms by itself.
for _function in (_is_differentiated, is_transforming, _has_tangents):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


def requires_gradient(x: torch.Tensor) -> bool:
    """Returns whether a tensor, or one that torch.func has put an axis to, requires a gradient. torch.compile
    does not say it of those of torch.func: where that differentiates, all numbers may require one.
    """
    if torch.compiler.is_compiling():
        return x.requires_grad or (x.is_floating_point() and _is_differentiated())
    while not x.requires_grad:
        if not torch._C._functorch.is_functorch_wrapped_tensor(x):
            return False
        x = torch._C._functorch.get_unwrapped(x)
    return True


def wants_gradient(*inputs: object) -> bool:
    """Returns whether autograd has to be told of a call with these inputs."""
    if torch.is_grad_enabled():
        for x in inputs:
            if isinstance(x, torch.Tensor) and requires_gradient(x):
                return True
    return False


def refuse_gradients(function: str, inputs: Sequence[object]) -> None:
    """RuntimeError where autograd would want gradients of a function that has none."""
    if wants_gradient(*inputs):
        raise RuntimeError(
            f"{function} has no backward: call it under torch.no_grad(), or add 'grad q, k, v' to its"
            " attention (projections and decode schedules have none)"
        )


def clear(tensors: Sequence[Tensor], given: Sequence[torch.Tensor | None]) -> None:
    """Writes what rows have that no sequence is of, where there is none at all: 0, and an lse of minus
    infinity.
    """
    for tensor, x in zip(tensors, given, strict=False):
        if x is not None:
            x.fill_(float("-inf") if tensor.name == "lse" else 0.0)


def is_batched(x: torch.Tensor | None) -> bool:
    """Returns whether a tensor has the axis of `torch.autograd.grad(is_grads_batched=True)`, which kernels do
    not see.
    """
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)


#: Calls of such a function inside of each other, at most.
_MOST_LEVELS = 64


def unbatch(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns a tensor with that axis, which becomes the first, and its level: other threads do not know it.
    RuntimeError for one that has several.
    """
    for level in range(1, _MOST_LEVELS + 1):
        found = torch._remove_batch_dim(x, level, 1, 0)
        if not is_batched(found):
            return found, level
    raise RuntimeError("gradients have at most one axis of is_grads_batched=True")
