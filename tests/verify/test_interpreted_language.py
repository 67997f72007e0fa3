"""The interpreter's short ways give the bits, types and shapes of Triton's own rules, or leave it to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from attnc.verify.interpreted_language import Language
from attnc.verify.memory import WATCH, MemoryFault

SEMANTIC = interpreter.interpreter_semantic
SHAPES: tuple[tuple[int, ...], ...] = ((), (4,), (4, 1), (1, 8), (4, 8))
TYPES = (tl.int32, tl.int64, tl.float32, tl.int1)
NUMBERS = (0, 1, -3, 7, 2**31 - 1, 2**40, 0.5, -2.0, float("inf"), True, tl.constexpr(5), tl.constexpr(0.25))
BINARY = (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
    "__floordiv__", "__mod__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__and__",
    "__or__",
)  # fmt: skip
LANGUAGE = Language(tl, interpreter)


def tensor(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Integers near the limits, floats with infinities, and nothing that is 0, by which some divide."""
    rng = np.random.default_rng([seed, len(shape)])
    values: Any = rng.integers(1, 2**31, shape or (1,)) * rng.choice([-1, 1], shape or (1,))
    if dtype is tl.float32:
        values = rng.choice([-np.inf, np.inf, np.nan, -1.5, 0.1, 3.0], shape or (1,))
    if dtype is tl.int1:
        values = rng.random(shape or (1,)) < 0.5
    data = values.astype(interpreter._get_np_dtype(dtype))
    type = tl.block_type(dtype, list(shape)) if shape else dtype
    return tl.core.tensor(interpreter.TensorHandle(data, dtype), type)


def outcome(call: Callable[..., Any], *args: Any, **named: Any) -> tuple[object, ...]:
    """All that kernels can see of a result; of a refusal, that it was one."""
    try:
        with np.errstate(all="ignore"):
            made = call(*args, **named, _semantic=SEMANTIC)
    except Exception:
        return ("refused",)
    if not isinstance(made, tl.core.tensor) or made.handle is None:
        return ("nothing",)
    data = made.handle.data
    shape = tuple(made.type.shape) if made.type.is_block() else ()
    sizes = tuple(size.value for size in made.shape)
    held = np.ascontiguousarray(data).view(np.uint8).tobytes()
    return (made.type.scalar.name, made.dtype.name, made.handle.dtype.name, shape, sizes, made.numel.value,
            data.shape, data.dtype, held)  # fmt: skip


def takes_the_short_way(short: Callable[[Any], Any], *args: Any) -> bool:
    """Whether it answers by itself."""

    def long_way(*_: Any, **__: Any) -> Any:
        raise LookupError("the long way")

    return outcome(short(long_way), *args) != ("refused",)


def operands() -> Iterator[tuple[Any, Any]]:
    for left, right in product(TYPES, TYPES):
        for one, other in product(SHAPES, SHAPES):
            yield tensor(left, one), tensor(right, other, seed=1)
    for left, one, number in product(TYPES, SHAPES, NUMBERS):
        yield tensor(left, one), number


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", BINARY)
def test_operators(name: str) -> None:
    short, long_way = dict(LANGUAGE.methods())[name], getattr(tl.core.tensor, name)
    for left, right in operands():
        assert outcome(short, left, right) == outcome(long_way, left, right), (left.type, right)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["maximum", "minimum"])
@pytest.mark.parametrize(
    "options", [{}, {"propagate_nan": tl.PropagateNan.ALL}], ids=["drops_nan", "keeps_nan"]
)
def test_larger_and_smaller(name: str, options: dict[str, Any]) -> None:
    short, long_way = dict(LANGUAGE.functions())[name], getattr(tl, name)
    for left, right in operands():
        want = outcome(long_way, left, right, **options)
        assert outcome(short, left, right, **options) == want, (left.type, right)


def test_choices() -> None:
    short, long_way = dict(LANGUAGE.functions())["where"], tl.where
    for shape, (x, y) in product(((), (4, 1)), operands()):
        condition = tensor(tl.int1, shape, seed=2)
        assert outcome(short, condition, x, y) == outcome(long_way, condition, x, y), (shape, x.type, y)
        assert outcome(short, condition, y, x) == outcome(long_way, condition, y, x), (shape, x.type, y)


def test_shapes() -> None:
    methods, functions = dict(LANGUAGE.methods()), dict(LANGUAGE.functions())
    for dtype, shape in product(TYPES, SHAPES):
        x = tensor(dtype, shape)
        for places in ((slice(None), None), (None, slice(None)), (tl.constexpr(None), slice(None)), (0,)):
            long_way = outcome(tl.core.tensor.__getitem__, x, places)
            assert outcome(methods["__getitem__"], x, places) == long_way
        for wanted in (tl.int64, tl.int32, tl.float32, tl.bfloat16):
            assert outcome(methods["to"], x, wanted) == outcome(tl.core.tensor.to, x, wanted)
    for ends in ((0, 16), (8, 16), (0, 1), (0, 12), (4, 4), (tl.constexpr(0), tl.constexpr(8))):
        assert outcome(functions["arange"], *ends) == outcome(tl.arange, *ends)
    for sizes, value in product(([4], [4, 8], [3], [tl.constexpr(2), 2]), (0, 1.5, -1, 2**31)):
        for dtype in (*TYPES, tl.bfloat16):
            assert outcome(functions["full"], sizes, value, dtype) == outcome(tl.full, sizes, value, dtype)


@pytest.fixture
def nothing_watched() -> Iterator[None]:
    yield
    WATCH.allocations.clear()


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("nothing_watched")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool]
)
def test_memory(dtype: torch.dtype) -> None:
    functions = dict(LANGUAGE.functions())
    x = torch.arange(64).to(dtype)
    WATCH.register("x", x)
    element = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
               torch.int32: tl.int32, torch.int64: tl.int64, torch.bool: tl.int1}[dtype]  # fmt: skip
    base = interpreter.TensorHandle(np.array([x.data_ptr()], np.uint64), tl.pointer_type(element))
    pointer = tl.core.tensor(base, tl.pointer_type(element))
    for shape, mask_shape in product(SHAPES, SHAPES):
        count = int(np.prod(shape))
        at = tl.core.tensor(
            interpreter.TensorHandle(np.arange(count, dtype=np.int32).reshape(shape or (1,)), tl.int32),
            tl.block_type(tl.int32, list(shape)) if shape else tl.int32,
        )
        short, long_way = dict(LANGUAGE.methods())["__add__"], tl.core.tensor.__add__
        assert outcome(short, pointer, at) == outcome(long_way, pointer, at)
        place = long_way(pointer, at, _semantic=SEMANTIC)
        for mask, other in product((None, tensor(tl.int1, mask_shape), False), (None, 0, 0.0, 2.5)):
            want = outcome(tl.load, place, mask, other)
            assert outcome(functions["load"], place, mask, other) == want, (shape, mask_shape, other)
        values = tl.load(place, _semantic=SEMANTIC)
        for mask in (None, tensor(tl.int1, mask_shape)):
            written = []
            for store in (functions["store"], tl.store):
                x.zero_()
                written.append((outcome(store, place, values, mask), x.clone()))
                x.copy_(torch.arange(64))
            assert written[0][0] == written[1][0]
            assert torch.equal(written[0][1], written[1][1])


@pytest.mark.parametrize("compares", [False, True])
def test_they_are_short_ways(compares: bool) -> None:
    """Of what kernels do all the time, nothing is left to the long way."""
    f, i, long = tensor(tl.float32, (4, 8)), tensor(tl.int32, (4, 1)), tensor(tl.int64, ())
    function, types = (np.less if compares else np.add), frozenset({"int32", "int64", "fp32"})
    binary = partial(LANGUAGE.binary, function, types=types, compares=compares)
    for x, y in ((f, f), (f, 0.5), (f, 2), (i, 3), (i, i), (i, long), (long, tl.constexpr(4))):
        assert takes_the_short_way(binary, x, y)
    assert takes_the_short_way(LANGUAGE.where, tensor(tl.int1, (4, 8)), f, 0.0)
    assert takes_the_short_way(LANGUAGE.expand, tensor(tl.int32, (4,)), (slice(None), None))
    assert takes_the_short_way(LANGUAGE.arange, 0, tl.constexpr(16))


def test_stray_addresses_are_faults_on_the_short_way_too() -> None:
    base = interpreter.TensorHandle(np.array([1 << 20], np.uint64), tl.pointer_type(tl.float32))
    pointer = tl.core.tensor(base, tl.pointer_type(tl.float32))
    assert not WATCH.allocations
    load, store = LANGUAGE.load(tl.load), LANGUAGE.store(tl.store)
    with pytest.raises(MemoryFault):
        load(pointer)
    with pytest.raises(MemoryFault):
        store(pointer, tensor(tl.float32, ()))
