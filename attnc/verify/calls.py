"""Checks what a generated callable passes to the driver, after any earlier calls: checked without a GPU.

Launches are noted instead of made. A call must launch the same after another call as it does in a fresh
process: what is prepared for one must not serve another of other strides, types or alignment. It must use the
caller's stream, use the binary for aligned tensors only for aligned tensors, and refuse tensors that are not
as declared.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeGuard, cast
from unittest.mock import patch

import torch

from attnc.expr.nodes import Dim
from attnc.verify.case import Case
from attnc.verify.problem import build
from attnc.verify.strategies import free_dims
from attnc.verify.subject import Subject

#: The streams that are said to be current: at the call that is judged, and at those before it.
_STREAM, _BEFORE = 7, 5
Event: TypeAlias = tuple[object, ...]
Call: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """A call that differs from an ordinary one in one respect. refused: it is no call of this callable."""

    name: str
    call: Call
    refused: bool = False


def call_violations(subject: Subject) -> Iterator[str]:
    """Yields `calls: what is wrong` of the module's host code."""
    if not hasattr(subject.module, "CALL"):
        return
    calls = _Calls(subject)
    with calls.recording():
        for first, second in calls.pairs():
            if (message := calls.compare(first, second)) is not None:
                yield f"calls: {message}"


@dataclass
class _Calls:
    subject: Subject
    events: list[Event] = field(default_factory=list)
    memory: dict[object, torch.Tensor] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    made: int = 0
    stream: int = _STREAM

    @property
    def call(self) -> Any:
        return vars(self.subject.module)["CALL"]

    # --- what is called

    def pairs(self) -> Iterator[tuple[Variation, Variation]]:
        base = self.base = self._tensors()
        out = self._results(base)
        ordinary = Variation(name="itself", call=partial(self._forward, base, out))
        yield from ((ordinary, other) for other in (ordinary, *self._forwards(base, out)))
        if self.subject.gradients is not None:
            plain = Variation(name="gradients", call=partial(self._backward, base, {}))
            for other in self._backwards(base):
                yield plain, other
                if other.name == "no dlse":
                    yield other, plain

    def _forwards(self, base: Mapping[str, Any], out: Mapping[str, Any]) -> Iterator[Variation]:
        yield Variation(name="results of its own", call=partial(self._forward, base, None))
        if len(self.subject.configs) > 1:
            yield Variation(name="another config", call=partial(self._forward, base, out, config=1))
        for name, x in base.items():
            if isinstance(x, torch.Tensor):
                by_rows = name in ("q", "k", "v")
                for what, changed, refused in (
                    *_changes(x, by_rows=by_rows),
                    *_wrong(x),
                    *self._misfits(name),
                ):
                    call = partial(self._forward, {**base, name: changed}, out)
                    yield Variation(name=f"{what} of {name}", call=call, refused=refused)
        for name, x in out.items():
            shared = ("memory", x[:1].expand_as(x) if len(x) > 1 else x.unsqueeze(0), True)
            longer = ("shape", x.new_empty((*x.shape[:-1], x.shape[-1] + 1)), True)
            others = (*_changes(x, by_rows=name == "o"), *_wrong(x), shared, longer)
            for what, changed, refused in others:
                call = partial(self._forward, base, {**out, name: changed})
                yield Variation(name=f"{what} of {name}", call=call, refused=refused)

    def _misfits(self, name: str) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yields the input, one shorter on an axis as long as one of another input: the same address and
        strides.
        """
        attention = self.subject.variant.attention
        tensor = attention.tensor(name)
        if not tensor.storage.is_plain:
            return
        passed = (other for other in attention.inputs if not other.storage.is_part)
        tied = {size for other in passed if other is not tensor for size in other.shape}
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, Dim) and size in tied and self.base[name].shape[axis] > 1:
                n = self.base[name].shape[axis]
                yield f"size {size.name}", self.base[name].narrow(axis, 0, n - 1), True

    def _backwards(self, base: Mapping[str, Any]) -> Iterator[Variation]:
        results = self._results(base)
        for name, x in results.items():
            for what, changed, refused in _changes(x, by_rows=name == "o"):
                if not refused:  # rows of do that are not contiguous are copied, to another place each time
                    call = partial(self._backward, base, {name: changed})
                    yield Variation(name=f"{what} of d{name}", call=call)
        if "lse" in results:
            one = results["lse"].flatten()[0].expand_as(results["lse"])
            yield Variation(name="strides of dlse", call=partial(self._backward, base, {"lse": one}))
            yield Variation(name="no dlse", call=partial(self._backward, base, {}, without="lse"))
        for name in sorted({"q", "k", "v"} & base.keys()):
            for what, changed, refused in _changes(base[name], by_rows=True):
                if not refused:
                    call = partial(self._backward, {**base, name: changed}, {})
                    yield Variation(name=f"{what} of {name} in gradients", call=call)

    def _tensors(self) -> dict[str, Any]:
        attention = self.subject.variant.attention
        few = {"B": 2, "M": 5, "N": 7, "H": 2, "Hkv": 2, "G": 2}
        dims = {name: few.get(name, 3) for name in free_dims(attention)}
        inputs = build(attention, Case(dims=dims), device=self.subject.device).inputs
        return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}

    def _results(self, base: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        attention = self.subject.variant.attention
        made = self.subject.blank(base)
        return {tensor.name: made[tensor.name] for tensor in attention.outputs}

    def _forward(self, inputs: Mapping[str, Any], out: Mapping[str, Any] | None, config: int = 0) -> object:
        given = None if out is None else tuple(out.values())
        with torch.no_grad():
            return self.subject.function(
                *inputs.values(),
                out=given[0] if given is not None and len(given) == 1 else given,
                config=self.subject.configs[config],
            )

    def _backward(
        self, inputs: Mapping[str, Any], handed: Mapping[str, torch.Tensor], without: str = ""
    ) -> object:
        attention = self.subject.variant.attention
        leaves, given = [], []
        for tensor in attention.inputs:
            if tensor.storage.is_part:
                continue
            x = inputs[tensor.name]
            if tensor.name in attention.grads:
                x = torch.as_tensor(x).detach()
                x.requires_grad_()
                leaves.append(x)
            given.append(x)
        made = self.subject.function(*given)
        names = (tensor.name for tensor in attention.outputs)
        results = dict(zip(names, made if isinstance(made, tuple) else (made,), strict=True))
        wanted = [name for name in results if name != without]
        weights = [handed.get(name, self._weights(results[name])) for name in wanted]
        return torch.autograd.grad([results[name] for name in wanted], leaves, weights, allow_unused=True)

    def _weights(self, like: torch.Tensor) -> torch.Tensor:
        key = ("weights", tuple(like.shape), like.dtype)
        if key not in self.memory:
            self.memory[key] = torch.ones(like.shape, dtype=like.dtype, device=like.device)
        return self.memory[key]

    # --- what it launches

    def compare(self, first: Variation, second: Variation) -> str | None:
        fresh, error = self._record_launches(second)
        held_then = self._find_held()
        warm, later = self._record_launches(second, after=first)
        if second.refused:
            refused = all(isinstance(failure, TypeError | ValueError) for failure in (error, later))
            return None if refused else f"another {second.name} is taken"
        if (failure := error or later) is not None:
            return f"{second.name}: {type(failure).__name__}: {failure}"
        for event in (*fresh, *warm):
            if (message := _is_wrong(event, second.name, self._copied)) is not None:
                return f"{second.name}: {message}"
        if launches_agree(fresh, warm, held_then, self._find_held()):
            return None
        return f"{second.name}: after another call it is not launched as at first"

    @property
    def _copied(self) -> set[str]:
        """Inputs of 8 bits, and those in pages, that kernels of gradients have copies of."""
        made = () if self.call.backward is None else self.call.backward.made
        return {one.like for one in made if one.copied} | {one.name for one in made if one.axes}

    def _find_held(self) -> set[int]:
        held = (*self.memory.values(), *self.base.values())
        return {x.data_ptr() for x in held if isinstance(x, torch.Tensor)}

    def _record_launches(
        self, variation: Variation, after: Variation | None = None
    ) -> tuple[list[Event], Exception | None]:
        self.call.forget()
        for call in () if after is None else (after.call, after.call):
            self.made, self.stream = 0, _BEFORE
            call()
        try:
            # once more, for what is looked up at the first launch: another stream's must not stay
            for self.stream in (_BEFORE, _STREAM):
                self.made = 0
                self.events.clear()
                variation.call()
        except OSError:  # of the machine
            raise
        except Exception as error:
            return [], error
        return list(self.events), None

    # --- how launches are noted

    @contextmanager
    def recording(self) -> Iterator[None]:
        index = None if self.subject.device == "cpu" else torch.cuda.current_device()
        has_pages = self.call.backward is not None and self.call.backward.pages is not None
        pages = self.call.page_kernels() if has_pages else None  # imports what the patches below hide
        with ExitStack() as stack:
            stack.enter_context(patch.object(self.call, "allocate", self._allocate))
            if self.subject.target == "triton":
                stack.enter_context(
                    patch.object(self.call, "launch_type", self._triton(self.call.launch_type))
                )
            else:
                index = 0 if index is None else index
                stack.enter_context(self._cuda(index))
            if pages is not None:  # Triton's, beside kernels of any target
                names = type(pages).gather.__globals__
                recording = self._triton(names["TritonLaunch"])
                stack.enter_context(patch.dict(names, TritonLaunch=recording))
            stack.enter_context(patch.object(torch._C, "_cuda_getDevice", lambda: index, create=True))
            current = patch.object(
                torch._C, "_cuda_getCurrentRawStream", lambda index: self.stream, create=True
            )
            stack.enter_context(current)
            try:
                yield
            finally:
                self.call.forget()

    @cached_property
    def _counter(self) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.int32)

    def _copy(self, copied: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        copy = copied(x)
        return self.memory.setdefault((x.data_ptr(), copy.shape, copy.dtype), copy)

    def _allocate(self, layouts: Sequence[Any], like: torch.Tensor) -> list[torch.Tensor]:
        return [self._empty(layout, like) for layout in layouts]

    def _empty(self, layout: Any, like: torch.Tensor) -> torch.Tensor:
        self.made += 1
        key = (self.made, layout)
        if key not in self.memory:
            shape, strides, dtype = layout
            self.memory[key] = torch.empty_strided(shape, strides, dtype=dtype, device=like.device).zero_()
        return self.memory[key]

    def _triton(self, launch: type) -> type:
        """Returns a type of launches of Triton that are noted alone."""
        events = self.events

        class Recording(launch):  # type: ignore[misc]  # of the module's support package
            def __init__(self, kernel: Any, grid: Any, *rest: Any) -> None:
                super().__init__(kernel, grid, *rest)
                name = getattr(kernel, "__name__", str(kernel))

                def slow(*arguments: Any, **constants: Any) -> SimpleNamespace:
                    events.append(("slow", name, grid, *chain(*map(_plain, arguments)), *constants.items()))
                    return SimpleNamespace(start=quick)

                def quick(stream: int, arguments: list[Any]) -> None:
                    events.append(("quick", name, grid, stream, *arguments))

                self.kernel = {grid: slow}

            def map(self, made: Any, i: int, address: int, x: torch.Tensor) -> list[Any]:
                return [address, *map(str, self.boxes[i])]

            def on_device(self) -> Any:
                return nullcontext()

            def made_fast(self, binary: Any) -> Any:
                return binary.start

        return Recording

    @contextmanager
    def _cuda(self, index: int) -> Iterator[None]:
        real, events = self.call.gpu_of, self.events
        packed: dict[int, bytes] = {}  # arguments by where their address lies
        launch_type = getattr(self.call, "gpu_launch_type", self.call.launch_type)

        class Recording(launch_type):  # type: ignore[misc,valid-type]  # of the module's support package
            def launcher(self, kernel: Any, aligned: bool) -> Callable[..., None]:
                # who makes a tensor map refuses what is not aligned: there is one kernel, for aligned rows
                aligned_alone = aligned and getattr(self, "tma", None) is None

                def launch(stream: int, pointer: int, extra: int) -> None:
                    events.append(("cuda", kernel.name, stream, aligned_alone, kernel.config, kernel.blocks))

                return launch

            def keep(self, addresses: tuple[int, ...], made: Any) -> Any:
                found = super().keep(addresses, made)
                packed[found[1]] = made[1]
                return found

            def starter(self, aligned: bool) -> Callable[[int], None]:
                start = super().starter(aligned)

                def note(arguments: int) -> None:
                    args = packed[arguments]
                    words = len(args) // 8
                    events.append(
                        ("args", *struct.unpack(f"={words}Q", args[: 8 * words]), args[8 * words :])
                    )
                    start(arguments)

                return note

        driver = SimpleNamespace(ctxGetCurrent=lambda: 1)
        cuda = SimpleNamespace(driver=driver, runtime=SimpleNamespace(setDevice=lambda number: None))
        modules = {"cupy": SimpleNamespace(cuda=cuda), "cupy.cuda": cuda}
        copied: Any = getattr(self.call, "copied", None)  # of a module that copies by TMA
        with (
            patch.dict(sys.modules, modules),
            patch.object(torch.cuda, "device", _NoDevice),
            patch.object(self.call, "gpu_of", lambda number: real(number)._replace(index=index)),
            patch.object(self.call, "launch_type", Recording),
            patch.object(self.call, "counter", lambda number: self._counter, create=True),
            patch.object(self.call, "copied", partial(self._copy, copied), create=True),
        ):
            yield


class _NoDevice(nullcontext[None]):
    """Stands in for `torch.cuda.device`, as a class: torch asks whether what it is given is one."""

    def __init__(self, device: object) -> None:
        super().__init__()


def _plain(x: Any) -> tuple[object, ...]:
    if isinstance(x, torch.Tensor):
        return (x.data_ptr(),)
    base = getattr(x, "base", None)
    return (base.data_ptr(), str(x.shape), str(x.strides)) if base is not None else (x,)


def launches_agree(
    fresh: Sequence[Event], warm: Sequence[Event], held_then: Set[int], held_now: Set[int]
) -> bool:
    """Returns whether two calls launch the same, but for addresses of what a call makes for itself.

    held_then, held_now: addresses of tensors that outlive calls, after the first one and after the second. A
    tensor that has come since may lie where the first call had something of its own.
    """
    pairs = [(a, b) for x, y in zip(fresh, warm, strict=False) for a, b in zip(x, y, strict=False)]
    return list(map(len, fresh)) == list(map(len, warm)) and all(
        a == b or (_is_address(a) and _is_address(b) and a not in held_then and b not in held_now)
        for a, b in pairs
    )


def _is_address(x: object) -> TypeGuard[int]:
    """Returns whether a number is an address: no size or stride of the checks is as large. Pythons at a fixed
    place, as those of Debian and Ubuntu, have a heap below 4 GiB.
    """
    return type(x) is int and (x > 1 << 32 or x in find_heap())


def find_heap() -> range:
    """Returns the addresses of the heap that grows behind the program; none where the system does not say."""
    start = _heap_start()
    return range(start, _sbrk()(0)) if start else range(0)


@cache
def _heap_start() -> int:
    """Where the heap of this process begins, which does not move; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split("-")[0], 16) for line in lines if line.endswith("[heap]")), 0)


@cache
def _sbrk() -> Callable[[int], int]:
    found = ctypes.CDLL(None).sbrk
    found.argtypes, found.restype = [ctypes.c_ssize_t], ctypes.c_size_t
    return cast("Callable[[int], int]", found)


def _is_wrong(event: Event, what: str, copied: Collection[str]) -> str | None:
    """copied: inputs of which kernels of gradients read copies."""
    match event:
        case ("quick", name, _, stream, *arguments):
            if stream != _STREAM:
                return f"{name} is not launched on the caller's stream"
            if any(_is_address(x) and x % 16 for x in arguments):
                return f"{name} for aligned tensors is launched on others"
        case ("cuda", kernel, stream, aligned, *_):
            if stream != _STREAM:
                return f"{kernel} is not launched on the caller's stream"
            unaligned = re.match(r"(alignment|odd strides) of (d?)([qkvo])\b", what)
            others = ("_forward", "_lists") if unaligned and unaligned[2] else ("_lists",)
            reads_it = unaligned and not str(kernel).endswith(others)
            if unaligned and unaligned[3] in copied and "_backward_" in str(kernel):
                reads_it = False
            if aligned and reads_it:
                return f"{kernel} for aligned rows is launched on others"
    return None


def _changes(x: torch.Tensor, *, by_rows: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yields the same numbers elsewhere in memory, with other strides, and not at a multiple of 16 bytes,
    each with whether it is to be refused. by_rows: the last axis has to be contiguous.
    """
    yield "address", x.clone(), False
    if x.dim() and x.numel():
        yield "alignment", torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), False
    if x.dim() > 2:
        for what, gap in (("strides", 8), ("odd strides", 1)):
            wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + gap))[..., : x.shape[-1]]
            yield what, wide.copy_(x), False
    if x.dim() > 1:
        turned = x.mT.contiguous().mT
        yield "order of axes", turned, by_rows and turned.stride(-1) != 1


def _wrong(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, bool]]:
    yield "number of axes", x.unsqueeze(0), True
    other = torch.float64 if x.is_floating_point() else torch.int16
    yield "type", x.to(other), True
    if x.device.type == "cpu":
        yield "device", torch.empty_like(x, device="meta"), True
