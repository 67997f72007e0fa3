"""What the results of a mod depend on, without calling it: its code and what that reaches.

A mod is read at every call, as it may look at anything. Of most it is plain what they look at: positions,
numbers, tensors, functions like them, and operations of torch. A snapshot holds that; two calls with equal
ones do the same, whatever the data of tensors of floats. Of tensors of integers it holds the version, as
their data is looked at. There is none of a mod that could do more: of objects, attributes, and names that are
written.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from attnc.flex.symbols import OPERATIONS

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_MODULES = (torch, math, operator, torch.nn, torch.nn.functional, torch.special)
_PURE = frozenset((
    "abs", "all", "any", "bool", "divmod", "enumerate", "float", "int", "isinstance", "len", "max", "min",
    "pow", "range", "reversed", "round", "sum", "tuple", "zip",
))  # fmt: skip
#: What may be asked of modules, tensors and symbols.
_ATTRIBUTES = frozenset((
    "nn", "functional", "special", "shape", "dtype", "device", "ndim", "dim", "size", "inf", "pi", "e",
    "bool", "int", "long", "float", "float32", "float16", "bfloat16", "int32", "int64", "ones_like",
    "new_ones", "zeros_like", "full_like", "new_zeros",
    *(name for name in dir(math) if not name.startswith("_")),
))  # fmt: skip
_WRITING = frozenset((
    "IMPORT_NAME", "IMPORT_FROM", "STORE_GLOBAL", "DELETE_GLOBAL", "DELETE_DEREF", "STORE_ATTR",
    "DELETE_ATTR", "STORE_NAME", "LOAD_BUILD_CLASS", "LOAD_NAME",
))  # fmt: skip
#: Functions within functions that are followed.
_DEEPEST = 8


class _Unclear(Exception):
    """What a mod depends on cannot be told."""


class Snapshot:
    """key: equal where mods do the same; tensors: those that they reach, in an order that the key fixes;
    looked_at: those among them whose data may be, with the lists of blocks.
    """

    __slots__ = ("key", "looked_at", "tensors")

    def __init__(self) -> None:
        self.key: tuple[Any, ...] = ()
        self.tensors: list[torch.Tensor] = []
        self.looked_at: list[torch.Tensor] = []


def snapshot(mods: Sequence[Callable[..., Any] | None], block_mask: BlockMask | None) -> Snapshot | None:
    """Returns the things on which the results of mods and of a BlockMask depend; None if they cannot be
    told.
    """
    taken = Snapshot()
    try:
        parts = [None if mod is None else _function(mod, taken, 0) for mod in mods]
        if block_mask is not None:
            parts.append(_blocks(block_mask, taken))
    except (_Unclear, AttributeError, TypeError, ValueError):  # an empty cell is a ValueError
        return None
    taken.key = tuple(parts)
    return taken


def _blocks(block_mask: BlockMask, taken: Snapshot) -> tuple[Any, ...]:
    lists = (
        block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )  # fmt: skip
    seen = tuple(None if x is None else _read_version(x, taken) for x in lists)
    return (*seen, block_mask.BLOCK_SIZE, block_mask.seq_lengths, _function(block_mask.mask_mod, taken, 0))


def _function(mod: Any, taken: Snapshot, depth: int) -> tuple[Any, ...]:
    if type(mod) is not FunctionType or depth > _DEEPEST:
        raise _Unclear
    code, known = mod.__code__, mod.__globals__
    names = _names_of(code)
    if names is None or mod.__kwdefaults__:
        raise _Unclear
    cells = mod.__closure__ or ()
    return (
        code,
        tuple([_value(cell.cell_contents, taken, depth) for cell in cells]),
        tuple([_value(known[name], taken, depth) if name in known else _built_in(name) for name in names]),
        None if mod.__defaults__ is None else _value(mod.__defaults__, taken, depth),
    )


def _built_in(name: str) -> str:
    if name not in _PURE:
        raise _Unclear
    return name


def _value(value: Any, taken: Snapshot, depth: int) -> Any:
    kind = type(value)
    if kind is int or kind is bool or kind is str or value is None:
        return kind, value
    if kind is float:
        return kind, value.hex()  # 0.0 is not -0.0
    if isinstance(value, torch.Tensor):
        return _tensor(value, taken)
    if kind is tuple:
        return tuple([_value(part, taken, depth) for part in value])
    if kind is FunctionType:
        return _function(value, taken, depth + 1)
    if value in _MODULES if kind is ModuleType else kind is torch.dtype or kind is torch.device:
        return value
    name = getattr(value, "__name__", "")
    if kind is BuiltinFunctionType and name in OPERATIONS:
        return value
    if kind is type and getattr(builtins, name, None) is value:
        return _built_in(name)
    raise _Unclear


def _tensor(x: torch.Tensor, taken: Snapshot) -> tuple[Any, ...]:
    at = next((i for i, other in enumerate(taken.tensors) if other is x), len(taken.tensors))
    taken.tensors.append(x)
    return ("tensor", at) if x.dtype.is_floating_point else ("tensor", at, _read_version(x, taken))


def _read_version(x: torch.Tensor, taken: Snapshot) -> tuple[int, int]:
    if x.is_inference():  # changes are not counted
        raise _Unclear
    taken.looked_at.append(x)
    return id(x), x._version


@functools.cache
def _names_of(code: CodeType) -> tuple[str, ...] | None:
    """Returns the global names that code reads, that of functions within it too; None for code that writes
    some, or asks for attributes that could be anything.
    """
    names: dict[str, None] = {}
    for step in _steps(code):
        if step.opname in _WRITING or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars):
            return None
        if step.opname == "LOAD_GLOBAL":
            names[step.argval] = None
        asks = step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
        if asks and step.argval not in _ATTRIBUTES and step.argval not in OPERATIONS:
            return None
    return tuple(names)


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _steps(constant)


class Token:
    """Stands for snapshots that are equal, in the facts of a call."""

    __slots__ = ()


_TOKENS: dict[tuple[Any, ...], tuple[Token, list[weakref.ref[torch.Tensor]]]] = {}
_MOST_TOKENS = 1024


def find_token(taken: Snapshot) -> Token | None:
    """Returns the token of a snapshot that was kept, while the tensors live whose data was looked at."""
    found = _TOKENS.get(taken.key)
    return None if found is None else found[0]


def keep_token(taken: Snapshot) -> None:
    """Gives a snapshot a token, which is kept until one of the tensors is gone that it names by identity."""
    if taken.key not in _TOKENS:
        if len(_TOKENS) >= _MOST_TOKENS:
            _TOKENS.clear()
        key = taken.key
        refs = [weakref.ref(x, lambda _: _TOKENS.pop(key, None)) for x in taken.looked_at]
        _TOKENS[key] = Token(), refs
