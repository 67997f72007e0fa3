"""What the assembly of Triton kernels computes: the instructions of PTX that generated kernels have, for all
of a tile at once, on NumPy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnc.reference import f32_to_bf16

#: Registers of 32 bits and narrower ones are words, of which those have the low bits.
Words: TypeAlias = npt.NDArray[np.uint32]
_Array: TypeAlias = npt.NDArray[Any]

_OF_E4M3 = torch.from_numpy(np.arange(256, dtype=np.uint8)).view(torch.float8_e4m3fn).to(torch.float16)
_F16_OF_E4M3 = _OF_E4M3.view(torch.int16).numpy().view(np.uint16)
_STATEMENT = re.compile(r"([a-z][\w.]*)\s+(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|[^,\s][^,]*")


def run(text: str, operands: Sequence[_Array], results: Sequence[np.dtype[Any]], pack: int) -> list[_Array]:
    """Runs an assembly on tensors of one shape, element by element, `pack` of them at a time; returns as many
    tensors as it has results, of these types.

    LookupError names an instruction that is not known.
    """
    shape = operands[0].shape
    registers: dict[str, Words] = {}
    number = sum(_registers(dtype, pack) for dtype in results)
    for operand in operands:
        for word in _pack(operand, pack):
            registers[f"${number}"] = word
            number += 1
    for name, into, sources in _statements(text):
        _execute(name, into, sources, registers)
    made, number = [], 0
    for dtype in results:
        words = [registers[f"${number + i}"] for i in range(_registers(dtype, pack))]
        number += len(words)
        values = np.ascontiguousarray(np.stack(words, axis=-1)).view(dtype)
        made.append(values.reshape(-1)[: int(np.prod(shape))].reshape(shape))
    return made


def _registers(dtype: np.dtype[Any], pack: int) -> int:
    return max(1, pack * dtype.itemsize // 4)


def _pack(values: _Array, pack: int) -> list[Words]:
    flat = np.ascontiguousarray(values).reshape(-1)
    rest = np.zeros(-len(flat) % pack, flat.dtype)
    words = np.concatenate((flat, rest)).reshape(-1, pack).view(np.uint32)
    return [*words.T]


@lru_cache(maxsize=64)
def _statements(text: str) -> list[tuple[str, str, list[str]]]:
    """Returns each instruction of an assembly with what it writes and what it reads."""
    found = []
    lines = (part.strip() for part in re.sub(r"//.*", "", text).strip("{} \n").split(";"))
    for line in filter(None, lines):
        if line.startswith(".reg"):
            continue
        parts = _STATEMENT.fullmatch(line)
        if parts is None or parts[1] not in _INSTRUCTIONS:
            raise LookupError(f"the interpreter does not know the assembly {line!r}")
        into, *sources = (operand.strip() for operand in _OPERAND.findall(parts[2]))
        found.append((parts[1], into, sources))
    return found


def _execute(name: str, into: str, sources: Sequence[str], registers: dict[str, Words]) -> None:
    result = _INSTRUCTIONS[name](*(_value(operand, registers) for operand in sources))
    if into.startswith("{"):  # its halves
        for place, half in enumerate(into.strip("{}").split(",")):
            registers[half.strip()] = result >> np.uint32(16 * place) & np.uint32(0xFFFF)
    else:
        registers[into] = result


def _value(operand: str, registers: Mapping[str, Words]) -> Words:
    return registers[operand] if operand in registers else np.array([int(operand, 0)], np.uint32)


def _prmt(a: Words, b: Words, order: Words) -> Words:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    made = np.zeros(both.shape, np.uint64)
    for place in range(4):
        at = int(order[0]) >> 4 * place & 0xF
        assert at < 8, "no sign is spread"
        made |= (both >> np.uint64(8 * at) & np.uint64(0xFF)) << np.uint64(8 * place)
    return made.astype(np.uint32)


def _lift_halves(function: Callable[..., _Array]) -> Callable[..., Words]:
    def on_pairs(*operands: Words) -> Words:
        pairs = np.broadcast_arrays(*operands)
        halves = (np.ascontiguousarray(words).view(np.float16) for words in pairs)
        made: Words = function(*halves).astype(np.float16).view(np.uint32)
        return made

    return on_pairs


def _lift_floats(function: Callable[..., _Array]) -> Callable[..., Words]:
    def on_floats(*operands: Words) -> Words:
        values = (np.ascontiguousarray(words).view(np.float32) for words in operands)
        made: Words = function(*values).astype(np.float32).view(np.uint32)
        return made

    return on_floats


def _from_e4m3(codes: Words) -> Words:
    low, high = (
        _F16_OF_E4M3[codes >> np.uint32(shift) & np.uint32(0xFF)].astype(np.uint32) for shift in (0, 8)
    )
    both: Words = low | high << np.uint32(16)
    return both


def _from_f16(half: Words) -> Words:
    value: _Array = half.astype(np.uint16).view(np.float16).astype(np.float32)
    return value.view(np.uint32)


def _to_bf16(high: Words, low: Words) -> Words:
    first, second = (f32_to_bf16(words.view(np.float32)).astype(np.uint32) for words in (low, high))
    return first | second << np.uint32(16)


_INSTRUCTIONS: Mapping[str, Callable[..., Words]] = {
    "mov.b32": lambda x: x,
    "xor.b32": np.bitwise_xor,
    "prmt.b32": _prmt,
    "sub.f16x2": _lift_halves(np.subtract),
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
    "cvt.f32.f16": _from_f16,
    "cvt.rn.bf16x2.f32": _to_bf16,
    "tanh.approx.f32": _lift_floats(np.tanh),
    "ex2.approx.ftz.f32": _lift_floats(np.exp2),
    "ex2.approx.f32": _lift_floats(np.exp2),
    "lg2.approx.f32": _lift_floats(np.log2),
}
