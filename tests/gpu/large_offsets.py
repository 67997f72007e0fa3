"""One case of `test_large_offsets`: python -m tests.gpu.large_offsets KIND TARGET TENSOR AXIS.

Prints what is wrong and exits with 1, or with 77 where the case cannot be made.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from attnc.runtime.loader import load_module
from tests.plans import module_of

#: Elements between neighbours on the axis at hand: more than 32 bits hold, signed or not.
FAR = (1 << 32) + (1 << 12)
SKIPPED = 77


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Interface:
    """What torch takes a tensor from: `__cuda_array_interface__`."""

    def __init__(self, address: int, count: int, kind: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": kind, "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sparse:
    """A range of addresses, of which pieces are memory."""

    base: int
    granularity: int
    driver: ctypes.CDLL
    properties: _Properties

    @staticmethod
    def of(size: int) -> Sparse:
        """A range of so many bytes, none of them memory yet."""
        torch.zeros(1, device="cuda")  # torch's context is the current one
        driver = ctypes.CDLL("libcuda.so.1")
        properties = _Properties(type=1, location=_Location(type=1, id=torch.cuda.current_device()))
        granularity = ctypes.c_size_t()
        check(driver.cuMemGetAllocationGranularity(ctypes.byref(granularity), ctypes.byref(properties), 0))
        base, step = ctypes.c_uint64(), granularity.value
        whole = -(-size // step) * step
        check(
            driver.cuMemAddressReserve(
                ctypes.byref(base),
                ctypes.c_size_t(whole),
                ctypes.c_size_t(0),
                ctypes.c_uint64(0),
                ctypes.c_uint64(0),
            )
        )
        return Sparse(base.value, step, driver, properties)

    def back(self, pieces: Iterable[int]) -> None:
        """Gives memory to the pieces of these numbers, each as large as the granularity."""
        access = _Access(location=_Location(type=1, id=self.properties.location.id), flags=3)
        for piece in sorted(set(pieces)):
            handle = ctypes.c_uint64()
            at, size = (
                ctypes.c_uint64(self.base + piece * self.granularity),
                ctypes.c_size_t(self.granularity),
            )
            check(
                self.driver.cuMemCreate(
                    ctypes.byref(handle), size, ctypes.byref(self.properties), ctypes.c_uint64(0)
                )
            )
            check(self.driver.cuMemMap(at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0)))
            check(self.driver.cuMemSetAccess(at, size, ctypes.byref(access), ctypes.c_size_t(1)))


def check(code: int) -> None:
    if code == 801:  # CUDA_ERROR_NOT_SUPPORTED
        print("this device has no virtual memory management")
        sys.exit(SKIPPED)
    if code:
        raise RuntimeError(f"CUDA driver error {code}")


def spread(value: torch.Tensor, axis: int) -> torch.Tensor:
    """The same values with FAR elements from one position of the axis to the next, in a range that is memory
    where they lie and nowhere else.
    """
    shape, size = value.shape, value.element_size()
    strides = list(value.contiguous().stride())
    strides[axis] = FAR
    inner = sum(
        (n - 1) * stride for i, (n, stride) in enumerate(zip(shape, strides, strict=True)) if i != axis
    )
    reach = (shape[axis] - 1) * FAR + inner + 1
    sparse = Sparse.of(reach * size + (1 << 21))
    step = sparse.granularity
    pieces: list[int] = []
    for i in range(shape[axis]):
        first, last = i * FAR * size, (i * FAR + inner) * size + size - 1
        pieces += range(first // step, last // step + 1)
    sparse.back(pieces)
    kind = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}[size]
    flat = torch.as_tensor(_Interface(sparse.base, reach, kind), device="cuda").view(value.dtype)
    made = flat.as_strided(shape, strides)
    made.copy_(value)
    return made


AXES = {
    "local_sink": {"batch": 0, "row": 1, "head": 2},
    "lse": {"batch": 0, "head": 1},
    "block_table": {"batch": 0, "row": 1},
    "pair": {"head": 0, "row": 1},
    "sink": {"head": 0},
    "kv_len": {"batch": 0},
    "pool": {"page": 0},
}


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def training(target: str, name: str, axis: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs and gradients of `local_sink` with one tensor far apart, and as they should be."""
    module: Any = load_module(module_of("local_sink", target))
    q, k, v = normal(2, 40, 4, 64), normal(2, 40, 2, 64), normal(2, 40, 2, 64)
    sink = normal(4, dtype=torch.float32)
    plain = {"q": q, "k": k, "v": v, "sink": sink}
    cotangents = {"do": normal(2, 40, 4, 64), "dlse": normal(2, 4, 40, dtype=torch.float32)}
    place = AXES["sink" if name == "sink" else "lse" if "lse" in name else "local_sink"][axis]
    if name in ("o", "lse"):
        expected = module.local_sink(*plain.values())
        made = {"o": expected[0], "lse": expected[1]}
        far = {**made, name: spread(torch.full_like(made[name], torch.nan), place)}
        module.local_sink(*plain.values(), out=(far["o"].clone() if name == "lse" else far["o"], far["lse"]))
        return [(far[name], made[name])]
    results = []
    for moved in (False, True):
        inputs = {key: value.clone() for key, value in plain.items()}
        given = dict(cotangents)
        if moved and name in inputs:
            inputs[name] = spread(inputs[name], place)
        elif moved:
            given[name] = spread(given[name], place)
        leaves = [value.requires_grad_() for value in inputs.values()]
        o, lse = module.local_sink(*leaves)
        gradients = torch.autograd.grad((o, lse), leaves, (given["do"], given["dlse"]))
        results.append((o.detach(), lse.detach(), *gradients))
    return list(zip(results[1], results[0], strict=True))


def paged(target: str, name: str, axis: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    module: Any = load_module(module_of("paged_decode", target))
    q, pools = normal(2, 1, 4, 128), [normal(8, 16, 2, 128) for _ in "kv"]
    table = torch.randperm(8, device="cuda").to(torch.int32).reshape(2, 4)
    lengths = torch.tensor([50, 64], dtype=torch.int32, device="cuda")
    inputs = {"q": q, "k": pools[0], "v": pools[1], "block_table": table, "kv_len": lengths}
    place = AXES["pool" if axis == "page" else name][axis]
    expected = module.paged_decode(*inputs.values())
    far = {**inputs, name: spread(inputs[name], place)}
    return list(zip(module.paged_decode(*far.values()), expected, strict=True))


def bias(target: str, name: str, axis: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    module: Any = load_module(module_of("bias", target))
    q, k, v = normal(2, 20, 2, 64), normal(2, 24, 2, 64), normal(2, 24, 2, 64)
    pair, key_bias = normal(2, 20, 24), normal(2, 24, dtype=torch.float32)
    expected = module.bias(q, k, v, pair, key_bias)
    found = module.bias(q, k, v, spread(pair, AXES[name][axis]), key_bias)
    whole = [x if isinstance(x, tuple) else (x,) for x in (found, expected)]
    return list(zip(*whole, strict=True))


def main(kind: str, target: str, name: str, axis: str) -> int:
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        print("needs a GPU")
        return SKIPPED
    kinds = {"training": training, "paged": paged, "bias": bias}
    pairs = kinds[kind](target, name, axis)
    torch.cuda.synchronize()
    wrong = [i for i, (found, expected) in enumerate(pairs) if not torch.equal(found, expected)]
    if wrong:
        print(f"results {wrong} depend on where '{name}' lies")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
