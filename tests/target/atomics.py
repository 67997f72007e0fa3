"""Proves of the text of a module that it adds atomically to nothing but what its plan says: such a sum is not
the same in every run, and `two_pass`, the default, promises that it is.

Sampling sees it only when programs come in another order and the sum is of numbers whose order matters. A
tensor is known by the pointer that is added to, or that such a pointer was made from.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

#: Counted in ones, not summed: integers are the same in any order.
_COUNTERS = frozenset({"fallbacks_ptr"})
#: Functions of generated Triton: one adds a tile, one waits for the turn to add it.
_ADDS, _WAITS = "_add_tile", "_await_turn"
_POINTER = re.compile(r"\b(?:args\.)?(\w+_ptr)\b")
_ADDITION = re.compile(r"\b(?<!void )(?:atomic_add|atomicAdd)\((?![^,;]*, 1\b)([^;]*);")
_LOCAL = re.compile(r"\b(?:float|int)\s*\*\s*(?:const\s+)?(\w+)\s*=\s*([^;]*);")


def undeclared_atomics(files: Mapping[str, str], atomic: Iterable[str]) -> tuple[str, ...]:
    """Pointers that a module's files add to atomically though the plan does not say so, each once.

    atomic: inputs whose gradients it says are summed so, as in `Subject.atomic`.
    """
    named = frozenset(atomic)
    declared = {f"d{name}{kind}" for name in named for kind in ("_ptr", "_sum_ptr", "_head")} | _COUNTERS
    declared |= {"_sums_ptr"} if named & {"k", "v"} else set()  # of keys that queries select
    found = dict.fromkeys(
        pointer for name, text in sorted(files.items()) for pointer in _added_to(name, text)
    )
    return tuple(pointer for pointer in found if pointer not in declared)


def _added_to(name: str, text: str) -> Iterator[str]:
    return _in_triton(text) if name.endswith(".py") else _in_cuda(text)


def _in_triton(text: str) -> Iterator[str]:
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef) or function.name == _ADDS:
            continue
        made = {
            node.targets[0].id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        turn = _lines_of_turn(calls)
        for node in calls:
            name = ast.unparse(node.func)
            in_turn = name == _ADDS and node.lineno in turn
            if (name == _ADDS and not in_turn) or (name.startswith("tl.atomic_") and not _counts(node)):
                yield _base(node.args[0], made)


def _lines_of_turn(calls: Iterable[ast.Call]) -> range:
    """The lines between the wait for a turn and the release of the next one."""
    waits = [call.lineno for call in calls if ast.unparse(call.func) == _WAITS]
    releases = [
        call.lineno
        for call in calls
        if ast.unparse(call.func) == "tl.atomic_xchg"
        and any(word.arg == "sem" and ast.unparse(word.value) == "'release'" for word in call.keywords)
    ]
    return range(min(waits), min(releases)) if waits and releases else range(0)


def _counts(atomic: ast.Call) -> bool:
    """Whether an integer is added or stored: whatever the order, numbers of ones are the same."""
    value = atomic.args[1]
    return isinstance(value, ast.Constant) and isinstance(value.value, int)


def _base(pointer: ast.expr, made: Mapping[str, ast.expr]) -> str:
    """The parameter that a pointer was made from, by whatever names: the first of each sum."""
    while isinstance(pointer, ast.BinOp):
        pointer = pointer.left
    if isinstance(pointer, ast.Name) and not pointer.id.endswith("_ptr") and pointer.id in made:
        return _base(made[pointer.id], {name: made[name] for name in made if name != pointer.id})
    return ast.unparse(pointer)


def _in_cuda(text: str) -> Iterator[str]:
    made = dict(_LOCAL.findall(text))
    for arguments in _ADDITION.findall(text):
        place, left = arguments.split(",")[0], dict(made)
        while (local := re.match(r"\s*&?\s*(\w+)", place)) is not None and local[1] in left:
            place = left.pop(local[1])
        pointer = _POINTER.search(place)
        yield place.strip() if pointer is None else pointer[1]
