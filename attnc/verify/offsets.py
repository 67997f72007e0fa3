"""Offsets into tensors: they have 64 bits. Of CUDA kernels, `cuda_offsets` reads the text.

Triton passes a stride below 2^31 as a 32-bit integer, so its product with an index has 32 bits unless the
index is widened first. Cases with strides that large (`far`) show it of a caller's tensors. Results that a
module allocates are contiguous, and pass 32 bits only where they fill a GPU: so the text is read as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from attnc.runtime.loader import program_of
from attnc.verify.cuda_offsets import narrow_offsets
from attnc.verify.subject import Subject

#: Names of sizes that are multiplied with indices of rows: strides, and the rows of a workspace.
_STRIDE = re.compile(r"stride(_\w+)?$|M_padded$|SPLITS$")
#: Functions that call each other, at most.
_ROUNDS = 3


def offset_violations(subject: Subject) -> Iterator[str]:
    """Yields `offsets: ...` for each product of a stride, or of sizes, that has 32 bits."""
    if hasattr(getattr(subject.module, "CALL", None), "program"):
        program = program_of(subject.module)
        for text in dict.fromkeys(map(program.source, program.kernels)):
            for line in narrow_offsets(text):
                yield f"offsets: counted in 32 bits: {line}"
        return
    content = getattr(getattr(subject.module, "__loader__", None), "content", b"")
    for line in narrow_products(content.decode()):
        yield f"offsets: a product with a stride has 32 bits: {line}"


@lru_cache(maxsize=8)
def narrow_products(text: str) -> tuple[str, ...]:
    """Lists the products of kernels in a module's text with a stride, and no factor of 64 bits."""
    return tuple(map(ast.unparse, _JitFunctions(text).narrow_products()))


class _JitFunctions:
    """The functions of a module for Triton, and which of their names have 64 bits."""

    def __init__(self, text: str) -> None:
        found = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
        self._functions = {f.name: f for f in found if any(map(_is_jit, f.decorator_list))}
        self._nodes = {name: tuple(ast.walk(function)) for name, function in self._functions.items()}
        self._calls = self._find_calls()
        self._wide: dict[str, set[str]] = {name: set() for name in self._functions}
        self._wide_results: set[str] = set()
        for _ in range(_ROUNDS):
            for name in self._functions:
                self._read(name)
            for name, function in self._functions.items():
                self._wide[name] |= self._wide_parameters(function)

    def narrow_products(self) -> Iterator[ast.BinOp]:
        for name, nodes in self._nodes.items():
            for node in nodes:
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                    sides = (node.left, node.right)
                    is_safe = any(_is_zero_or_one(side) or self._is_wide(side, name) for side in sides)
                    if any(map(_is_stride, sides)) and not is_safe:
                        yield node

    def _find_calls(self) -> dict[str, list[tuple[str, ast.Call]]]:
        found: dict[str, list[tuple[str, ast.Call]]] = {name: [] for name in self._functions}
        for caller, nodes in self._nodes.items():
            for node in nodes:
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in found:
                    found[node.func.id].append((caller, node))
        return found

    def _read(self, function: str) -> None:
        for node in self._nodes[function]:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    if self._is_wide(value, function):
                        self._wide[function].add(name)
                case ast.Return(value=ast.expr() as value):
                    if self._is_wide(value, function):
                        self._wide_results.add(function)

    def _wide_parameters(self, function: ast.FunctionDef) -> set[str]:
        names, given = [argument.arg for argument in function.args.args], []
        for caller, node in self._calls[function.name]:
            named = [(keyword.arg or "", keyword.value) for keyword in node.keywords]
            values = [*zip(names, node.args, strict=False), *named]
            given.append({arg for arg, value in values if self._is_wide(value, caller)})
        return set.intersection(*given) if given else set()

    def _is_wide(self, node: ast.expr, function: str) -> bool:
        def is_wide(part: ast.expr) -> bool:
            return self._is_wide(part, function)

        match node:
            case ast.Name(id=name):
                return name in self._wide[function]
            case ast.Call(func=ast.Attribute(attr="to" | "cast"), args=[*_, ast.Attribute(attr=dtype)]):
                return dtype == "int64"
            case ast.Call(func=ast.Attribute(attr="load")):
                return False
            case ast.Call(func=ast.Name(id=name)) if name in self._functions:
                return name in self._wide_results
            case ast.Call(args=arguments):
                return any(map(is_wide, arguments))
            case ast.BinOp(left=left, right=right):
                return is_wide(left) or is_wide(right)
            case ast.Subscript(value=value) | ast.UnaryOp(operand=value):
                return is_wide(value)
            case ast.IfExp(body=body, orelse=other):
                return is_wide(body) and is_wide(other)
        return False


def _is_jit(decorator: ast.expr) -> bool:
    return "triton.jit" in ast.unparse(decorator)


def _is_zero_or_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (0, 1)


def _is_stride(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and _STRIDE.match(node.id) is not None
