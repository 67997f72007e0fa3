"""Kernels that start while the one before them still runs: each waits before it touches memory.

What such a kernel reads was mostly written long before, and a CPU runs one kernel after the other. So no run
shows that a wait is missing, or stands too late, and the text is read instead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from attnc.runtime.loader import program_of
from attnc.verify.cuda_offsets import list_tokens
from attnc.verify.cuda_waits import body_at
from attnc.verify.subject import Subject

#: What a kernel for Triton is started with to say so, and what waits.
_EARLY, _WAIT = "PDL", "tl.extra.cuda.gdc_wait()"
#: Functions of Triton that touch memory.
_TOUCHES = ("load", "store", "gather", "scatter")
#: What waits in a CUDA kernel, as a statement of its own.
_CUDA_WAIT = ("wait_for_launch", "(", ")", ";")


def early_violations(subject: Subject) -> Iterator[str]:
    """Yields `waits: ...` for each kernel of a module that is started early and touches memory before it
    waits, or waits only under a condition.
    """
    for line in _list_lines(subject):
        yield f"waits: {line}"


def _list_lines(subject: Subject) -> Iterator[str]:
    call: Any = getattr(subject.module, "CALL", None)
    if not hasattr(call, "program"):
        content = getattr(getattr(subject.module, "__loader__", None), "content", b"")
        yield from list_early(content.decode())
        return
    program = program_of(subject.module)
    launches = [*call.launches, *(call.backward.launches if call.backward else ())]
    early = (launch for launch in launches if getattr(launch, "waits", False))
    for name in sorted({kernel.name for launch in early for kernel in launch.kernels}):
        if line := find_early(program.source(name), name):
            yield line


@lru_cache(maxsize=64)
def find_early(text: str, kernel: str) -> str:
    """Says what is wrong with the wait of a CUDA kernel of this text; "" for nothing."""
    tokens = list_tokens(text)
    bodies = (body_at(tokens, at) for at, token in enumerate(tokens) if token == kernel)
    for body in bodies:
        if body is not None:
            at = _wait_of(body)
            if at is None:
                return f"{kernel} does not wait for the kernel before it in every program"
            if any(_reads(body, place) for place in range(at)):
                return f"{kernel} touches memory before it waits for the kernel before it"
    return ""


def _wait_of(body: Sequence[str]) -> int | None:
    depth = 0
    for at, token in enumerate(body):
        depth += {"{": 1, "}": -1}.get(token, 0)
        is_statement = at > 0 and body[at - 1] in (";", "{", "}")
        if depth == 1 and is_statement and tuple(body[at : at + len(_CUDA_WAIT)]) == _CUDA_WAIT:
            return at
    return None


def _reads(body: Sequence[str], at: int) -> bool:
    return body[at].endswith("_ptr") and body[at + 1] == "["


@lru_cache(maxsize=8)
def list_early(text: str) -> tuple[str, ...]:
    """Lists mistakes in the waits of a module's kernels for Triton."""
    functions = {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    found = []
    for name, function in functions.items():
        if not any(argument.arg == _EARLY for argument in function.args.args):
            continue
        before = _before_wait(function.body)
        if before is None:
            found.append(f"{name} does not wait for the kernel before it in every program")
        elif any(_touches(node, functions) for node in before):
            found.append(f"{name} touches memory before it waits for the kernel before it")
    return tuple(found)


def _before_wait(body: Sequence[ast.stmt]) -> Sequence[ast.stmt] | None:
    """Returns the statements before the wait of a kernel that is started early; None: it does not wait in
    every program.
    """
    for at, node in enumerate(body):
        if isinstance(node, ast.If) and ast.unparse(node.test) == _EARLY:
            texts = [ast.unparse(part) for part in node.body]
            if _WAIT in texts:
                return [*body[:at], *node.body[: texts.index(_WAIT)]]
    return None


def _touches(node: ast.AST, functions: Mapping[str, ast.FunctionDef]) -> bool:
    for part in ast.walk(node):
        match part:
            case ast.Call(func=ast.Attribute(attr=name)) if name in _TOUCHES or name.startswith("atomic_"):
                return True
            case ast.Call(func=ast.Name(id=name)) if name in functions:
                if _touches(functions[name], functions):
                    return True
    return False
