"""What mods give for all pairs of queries and keys, as tensors of torch's: for what is asked of the data of a
call, and no kernel says.

Queries are taken some at a time, so that memory does not grow with their number. Integers are computed in 64
bits, floats in 32.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from attnc.flex.tape import Tape, operands
from attnc.flex.trace import Trace

Tensor: TypeAlias = torch.Tensor

#: Most pairs that are computed at once.
_PAIRS = 1 << 24
_COMPARED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "==": torch.eq, "!=": torch.ne, "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge,
    "+": operator.add, "-": operator.sub, "*": operator.mul,
    "and": torch.logical_and, "or": torch.logical_or,
}  # fmt: skip
_CALLED: Mapping[str, Callable[..., Tensor]] = {"min": torch.minimum, "max": torch.maximum}


def values(tape: Tape, at: int, indices: Mapping[str, Tensor], score: Tensor | None = None) -> Tensor:
    """Returns an entry for the pairs at these indices, in the least shape that broadcasts to all of them.

    score: of the product that a score_mod is given, for entries that read it
    """
    found: dict[int, Tensor] = {}
    for position in _parts(tape, at):
        found[position] = _value(tape, position, found, indices, score)
    return found[at]


def _value(
    tape: Tape, at: int, found: Mapping[int, Tensor], indices: Mapping[str, Tensor], score: Tensor | None
) -> Tensor:
    match tape.entries[at]:
        case ("index", name):
            return indices[name]
        case ("score",):
            assert score is not None
            return score
        case ("number", slot, _):
            return _number(tape, at, tape.numbers[slot])
        case ("integer", value):
            return _number(tape, at, value)
        case ("constant", value):
            return _number(tape, at, value if isinstance(value, bool) else float(value))
        case ("size", capture, axis):
            return _number(tape, at, tape.captures[capture].tensor.shape[axis])
        case ("load", capture, positions):
            return _load(tape.captures[capture].tensor, [found[position] for position in positions])
        case ("listed", capture, positions, keys):
            lists = tape.captures[capture].tensor
            rows = [found[position] for position in positions]
            is_inside, clamped = _within(lists.shape, rows)
            named: Tensor = (lists[tuple(clamped)] == (indices["kv_idx"] // keys)[..., None]).any(-1)
            is_named: Tensor = is_inside & named
            return is_named
        case ("real", operand):
            return found[operand].float()
        case ("neg", operand):
            return -found[operand]
        case ("not", operand):
            return ~found[operand]
        case ("call", name, *arguments):
            function: Callable[..., Tensor] = _CALLED.get(name, getattr(torch, name))
            return function(*(found[argument] for argument in arguments))
        case ("/", left, right):
            return found[left].float() / found[right].float()
        case (("//" | "%") as symbol, left, right):
            return _divide(symbol, found[left], found[right])
        case (symbol, left, right):
            return _COMPARED[symbol](found[left], found[right])
    raise AssertionError(f"no such entry: {tape.entries[at]}")


def _number(tape: Tape, at: int, value: bool | int | float) -> Tensor:
    dtype = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}[tape.types[at]]
    return torch.full((), value, dtype=dtype, device=tape.device)


def _divide(symbol: str, x: Tensor, y: Tensor) -> Tensor:
    is_zero = y == 0
    divisor = torch.where(is_zero, 1, y)
    quotient = x.div(divisor, rounding_mode="floor") if symbol == "//" else x.remainder(divisor)
    return torch.where(is_zero, 0, quotient)


def _load(tensor: Tensor, positions: list[Tensor]) -> Tensor:
    tensor = tensor.detach()
    if tensor.dtype.is_floating_point:
        tensor = tensor.float()
    elif tensor.dtype != torch.bool:
        tensor = tensor.long()
    if not tensor.numel():
        return tensor.new_zeros(())
    if not positions:
        return tensor
    is_inside, clamped = _within(tensor.shape, positions)
    element = tensor[tuple(clamped)]
    return torch.where(is_inside, element, torch.zeros((), dtype=element.dtype, device=element.device))


def _within(shape: Sequence[int], positions: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns where positions are inside of the first axes of a tensor, and the nearest that are."""
    is_inside, clamped = torch.ones((), dtype=torch.bool, device=positions[0].device), []
    for position, size in zip(positions, shape, strict=False):
        is_inside = is_inside & (position >= 0) & (position < size)
        clamped.append(position.clamp(0, size - 1))
    return is_inside, clamped


def reads(tape: Tape, at: int) -> set[str]:
    """Returns the names of the indices that an entry depends on."""
    return {entry[1] for entry in (tape.entries[part] for part in _parts(tape, at)) if entry[0] == "index"}


def loads(tape: Tape, at: int) -> list[Tensor]:
    """Returns the captured tensors that an entry depends on."""
    entries = (tape.entries[part] for part in _parts(tape, at))
    return [tape.captures[entry[1]].tensor for entry in entries if entry[0] in ("load", "size", "listed")]


def _parts(tape: Tape, at: int) -> list[int]:
    found, left = set[int](), [at]
    while left:
        position = left.pop()
        if position not in found:
            found.add(position)
            left += operands(tape.entries[position])
    return sorted(found)


def rows_at_once(tape: Tape, each: int) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """Yields (first query, last query + 1, indices of the pairs of these queries and all keys), with as many
    queries at a time as there is room for. each: pairs for a query and a key.
    """
    sizes, device = tape.sizes, tape.device
    B, H, M, N = (sizes[size] for size in "BHMN")
    step = max(1, _PAIRS // max(1, each * N))
    for first in range(0, M, step):
        last = min(first + step, M)
        yield (
            first,
            last,
            {
                "b": torch.arange(B, device=device).view(B, 1, 1, 1),
                "h": torch.arange(H, device=device).view(1, H, 1, 1),
                "q_idx": torch.arange(first, last, device=device).view(1, 1, last - first, 1),
                "kv_idx": torch.arange(N, device=device).view(1, 1, 1, N),
            },
        )


def max_scores(traced: Trace, query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """Returns the largest score of each query among the keys that it sees, minus infinity where it sees none.

    query: [B, H, M, D]; key: [B, Hkv, N, D]; result: f32[B, H, M], without a gradient
    """
    tape = traced.tape
    B, H, M, D = query.shape
    group, N = H // key.shape[1], key.shape[2]
    factor = 1 / math.sqrt(D) if scale is None else scale
    largest = torch.full((B, H, M), -math.inf, dtype=torch.float32, device=query.device)
    if not N:
        return largest
    with torch.no_grad():
        keys = key.float().mT
        for first, last, indices in rows_at_once(tape, B * H):
            rows = query[:, :, first:last].float().reshape(B, -1, group * (last - first), D)
            product = (rows @ keys).view(B, H, last - first, N) * factor
            score = values(tape, traced.score, indices, product)
            kept = values(tape, traced.mask, indices, product)
            largest[:, :, first:last] = score.masked_fill(~kept, -math.inf).expand_as(product).amax(-1)
    return largest
