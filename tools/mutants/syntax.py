"""Syntax trees of kernels: CUDA C++ and Python, by tree-sitter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import tree_sitter_cuda
import tree_sitter_python
from tree_sitter import Language, Node, Parser

LanguageName: TypeAlias = Literal["cuda", "python"]

#: Of both grammars: a function, and what is no code of a kernel.
FUNCTIONS = ("function_definition",)
_SKIPPED = ("comment", "ERROR", "static_assert_declaration", "gnu_asm_expression", "string", "preproc_def")


@dataclass(frozen=True, slots=True)
class Site:
    """A node of a function's body. function: its name."""

    node: Node
    function: str

    @property
    def line(self) -> int:
        """The line of the file, from 1."""
        return self.node.start_point[0] + 1


@cache
def _parser(language: LanguageName) -> Parser:
    grammar = tree_sitter_cuda.language() if language == "cuda" else tree_sitter_python.language()
    return Parser(Language(grammar))


def list_sites(text: str, language: LanguageName) -> tuple[Site, ...]:
    """Lists the nodes in the bodies of a file's device functions, outermost first. What no kernel calls, as
    much of a header, is left out.
    """
    root = _parser(language).parse(text.encode()).root_node
    functions = _reached(list(_functions(root, language)))
    return tuple(site for function, name in functions for site in _below(_body_of(function), name))


def text_of(node: Node) -> str:
    """Returns the text that a node stands for."""
    assert node.text is not None
    return node.text.decode()


def _functions(node: Node, language: LanguageName) -> Iterator[tuple[Node, str]]:
    """Yields functions that run on a device, with their names."""
    for child in node.children:
        if child.type in FUNCTIONS:
            if language == "cuda" or _is_kernel(child):
                yield child, _name_of(child)
        elif child.type != "ERROR":
            yield from _functions(child, language)


def _reached(functions: list[tuple[Node, str]]) -> list[tuple[Node, str]]:
    """Selects functions that kernels call, by name; all where none is a kernel of CUDA."""
    words = [set(re.findall(r"\w+", text_of(function))) for function, _ in functions]
    reached = {at for at, named in enumerate(words) if "__global__" in named}
    if not reached:
        return functions
    waiting = list(reached)
    while waiting:
        named = words[waiting.pop()]
        found = {at for at, (_, name) in enumerate(functions) if name in named} - reached
        reached |= found
        waiting += found
    return [functions[at] for at in sorted(reached)]


def _is_kernel(function: Node) -> bool:
    """Returns whether a Python function is Triton's."""
    around = function.parent
    return around is not None and around.type == "decorated_definition" and "triton.jit" in text_of(around)


def _name_of(function: Node) -> str:
    found = function.child_by_field_name("name") or function.child_by_field_name("declarator")
    while found is not None and found.type not in ("identifier", "field_identifier", "operator_name"):
        found = found.child_by_field_name("declarator") or (found.children[0] if found.children else None)
    return "" if found is None else text_of(found)


def _body_of(function: Node) -> Node:
    body = function.child_by_field_name("body")
    return function if body is None else body


def _below(node: Node, function: str) -> Iterator[Site]:
    if node.type in _SKIPPED or node.is_missing:
        return
    yield Site(node, function)
    for child in node.children:
        yield from _below(child, function)


#: Ends a launch, in each language: a statement.
_TRAPS: Mapping[LanguageName, str] = {
    "cuda": "__trap();",
    "python": 'tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)',
}
_BLOCKS = ("compound_statement", "block")
_AROUND = ("if_statement", "else_clause", "for_statement", "while_statement")


def add_trap(text: str, file: str, at: int) -> str | None:
    """Returns the text with a statement that ends the launch before the statement at a byte; None where there
    is none.
    """
    language: LanguageName = "python" if file.endswith(".py") else "cuda"
    node = _parser(language).parse(text.encode()).root_node.descendant_for_byte_range(at, at)
    while node is not None and not _stands_alone(node):
        node = node.parent
    if node is None or node.parent is None:
        return None
    data, trap = text.encode(), _TRAPS[language]
    before, own, behind = data[: node.start_byte], text_of(node), data[node.end_byte :]
    if language == "python":
        made = f"{trap}\n{' ' * node.start_point[1]}{own}"
    else:
        made = f"{trap} {own}" if node.parent.type in _BLOCKS else f"{{ {trap} {own} }}"
    return (before + made.encode() + behind).decode()


def _stands_alone(node: Node) -> bool:
    """Returns whether a node is a statement of a block, or the only one behind a condition or a loop."""
    around = node.parent
    if around is None or around.type in _BLOCKS:
        return around is not None
    return around.type in _AROUND and node.type.endswith("_statement") and node.type not in _BLOCKS
