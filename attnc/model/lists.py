"""`listed(idx, rows = 64, keys = 128, count = cnt)`: a condition that holds where a list of blocks of keys,
which is data, names the block of the key.

The last axis of `idx` is the list. Its other axes have indices, as in `listed(idx[b, h // G, q_idx // 64],
keys = 128)`; where the bare name stands, by what they are: sequences, heads, K/V heads, blocks of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from attnc.expr.nodes import Binary, Const, Dim, Expr, Index, InList, Load, Param, walk
from attnc.model.scope import WRONG, Context, Wrong
from attnc.model.tensors import Ragged, Role, Tensor, same_size
from attnc.source import Span
from attnc.syntax import ast

#: Makes the expression of a tree; None where it reported a mistake.
Elaborate: TypeAlias = Callable[[ast.Expr, Context], Expr | None]

MAX_BLOCK = 1 << 20
USAGE = "listed(idx, rows = 64, keys = 64)"
_WHOLE = "listed(idx[b, h // G, q_idx // 64], keys = 64)"
_OPTIONS = ("rows", "keys", "count")


def elaborate_listed(tree: ast.Call, at: Context, elaborate: Elaborate) -> Expr | None:
    """Returns the condition of a call of `listed`, or None after reporting what is wrong (E0334)."""
    maker = _Reader(tree, at, elaborate)
    return maker.listed()


@dataclass(frozen=True, slots=True)
class _Reader:
    tree: ast.Call
    at: Context
    elaborate: Elaborate

    def listed(self) -> Expr | None:
        options = self._options()
        if options is None:
            return None
        given = self.tree.args[0]
        keys = self._block("keys", options["keys"])
        rows = self._block("rows", options["rows"]) if "rows" in options else None
        if keys is None or ("rows" in options and rows is None):
            return None
        if isinstance(given, ast.Subscript) and rows is not None:
            span = options["rows"].span
            self._wrong("'rows' beside indices", span, "the index of the list says it", f"write '{_WHOLE}'")
            return None
        found = self._row(given, rows)
        if found is None:
            return None
        tensor, indices = found
        limit = None
        if "count" in options:
            limit = self._count(options["count"], indices)
            if limit is None:
                return None
        entry = Binary("//", Index("kv_idx"), keys)
        return InList(tensor.name, indices, tensor.shape, entry, limit, span=self.at.span(self.tree))

    def _wrong(self, message: str, span: Span, label: str, *hints: str) -> None:
        self.at.error("E0334", message, span, label, hints=hints)

    def _options(self) -> Mapping[str, ast.Expr] | None:
        if len(self.tree.args) != 1:
            label = f"{len(self.tree.args)} given"
            self._wrong("'listed' takes one list", self.tree.span, label, f"write '{USAGE}'")
            return None
        options: dict[str, ast.Expr] = {}
        for keyword in self.tree.kwargs:
            name = keyword.name.id
            if name not in _OPTIONS or name in options:
                label = "given twice" if name in options else f"the arguments are {', '.join(_OPTIONS)}"
                self._wrong(
                    f"'listed' has no argument '{name}' here", keyword.span, label, f"write '{USAGE}'"
                )
                return None
            options[name] = keyword.value
        if "keys" not in options:
            label = "how many keys does an entry name?"
            self._wrong("'listed' without 'keys'", self.tree.span, label, f"write '{USAGE}'")
            return None
        return options

    def _block(self, name: str, tree: ast.Expr) -> Expr | None:
        made = self.elaborate(tree, self.at)
        if made is None:
            return None
        choices: tuple[object, ...] = (made.value,) if isinstance(made, Const) else ()
        if isinstance(made, Param):
            param = self.at.scope.params[made.name]
            choices = () if isinstance(param, Wrong) else param.choices
        if choices and all(type(value) is int and 1 <= value <= MAX_BLOCK for value in choices):
            return made
        label = f"must be 1 to {MAX_BLOCK:,}, and known when the spec is compiled"
        self._wrong(f"'{name}' is not the size of a block", tree.span, label)
        return None

    def _tensor(self, tree: ast.Expr) -> Tensor | None:
        if isinstance(tree, ast.Name):
            meaning = self.at.meaning(tree.id)
            if meaning is WRONG:
                return None
            if isinstance(meaning, Tensor) and meaning.name not in ("q", "k", "v") and meaning.shape:
                if self.at.scope.element_type(meaning) == "int":
                    return meaning
                span = tree.span
                self._wrong(
                    f"'{tree.id}' is no list of blocks", span, f"of {meaning.dtype}", "declare it i32 or i64"
                )
                return None
        self._wrong("a list is an input of integers", tree.span, "is none", f"write '{USAGE}' or '{_WHOLE}'")
        return None

    def _row(self, tree: ast.Expr, rows: Expr | None) -> tuple[Tensor, tuple[Expr, ...]] | None:
        tensor = self._tensor(tree.tensor if isinstance(tree, ast.Subscript) else tree)
        if tensor is None:
            return None
        if not isinstance(tree, ast.Subscript):
            indices = self._indices(tensor, tree, rows)
            return None if indices is None else (tensor, indices)
        if len(tree.indices) != len(tensor.shape) - 1:
            label = f"'{tensor.name}' has {len(tensor.shape)} axes, the last of which is the list"
            hint = "leave out the index of the last axis alone"
            self._wrong(f"{len(tree.indices)} indices of a list", tree.span, label, hint)
            return None
        made = [self.elaborate(index, self.at) for index in tree.indices]
        if any(index is None for index in made):
            return None
        for index, place in zip(made, tree.indices, strict=True):
            assert index is not None
            if index.type != "int":
                self._wrong("an index of a list needs integers", place.span, "this is none")
                return None
            if Index("kv_idx") in _indices_of(index):
                self._wrong("a list that differs from key to key", place.span, "reads 'kv_idx'")
                return None
        return tensor, tuple(index for index in made if index is not None)

    def _count(self, tree: ast.Expr, indices: tuple[Expr, ...]) -> Expr | None:
        if (
            isinstance(tree, ast.Name)
            and isinstance(meaning := self.at.meaning(tree.id), Tensor)
            and meaning.shape
        ):
            tensor = self._tensor(tree)
            if tensor is None:
                return None
            if len(tensor.shape) == len(indices):
                return Load(tensor.name, indices, tensor.shape, "int", span=tree.span)
            label = f"has {len(tensor.shape)} axes, and the lists {len(indices)} without their own"
            self._wrong("a count for each list", tree.span, label)
            return None
        made = self.elaborate(tree, self.at)
        if made is not None and made.type == "int" and Index("kv_idx") not in _indices_of(made):
            return made
        if made is not None:
            self._wrong("'count' is how many entries of a list count", tree.span, "no integer of a query")
        return None

    def _indices(self, tensor: Tensor, tree: ast.Expr, rows: Expr | None) -> tuple[Expr, ...] | None:
        if not all(isinstance(self.at.scope.tensors.get(name), Tensor) for name in ("q", "k")):
            return None  # reported; their heads say what an axis is
        made: list[Expr] = []
        for size in tensor.shape[:-1]:
            index = self._index_along(size)
            if index is None:
                if rows is None or any(Index("q_idx") in _indices_of(other) for other in made):
                    label = (
                        "which axis counts blocks of queries?"
                        if rows
                        else "give 'rows', the queries of a block"
                    )
                    self._wrong(
                        f"axes of '{tensor.name}' without a meaning", tree.span, label, f"write '{_WHOLE}'"
                    )
                    return None
                index = self._row_of(size, rows)
            made.append(index)
        if rows is not None and not any(Index("q_idx") in _indices_of(index) for index in made):
            label = "its axes are sequences and heads"
            self._wrong(
                f"'{tensor.name}' has no axis of blocks of queries", tree.span, label, "leave 'rows' out"
            )
            return None
        return tuple(made)

    def _index_along(self, size: Expr) -> Expr | None:
        scope = self.at.scope
        q, k = scope.tensors.get("q"), scope.tensors.get("k")
        if size == Const(1):
            return Const(0)
        if size == Dim("B"):
            return Index("b")
        if isinstance(q, Tensor) and (size == Dim("H") or _is_size(size, q, Role.HEAD)):
            return Index("h")
        if isinstance(k, Tensor) and (size == Dim("Hkv") or _is_size(size, k, Role.HEAD)):
            group = self.at.meaning("G")
            return Binary(
                "//", Index("h"), group if isinstance(group, Binary | Const | Dim | Param) else Dim("G")
            )
        return None

    def _row_of(self, size: Expr, rows: Expr) -> Expr:
        q = self.at.scope.tensors.get("q")
        if isinstance(q, Tensor) and isinstance(q.storage, Ragged) and _is_size(size, q, Role.QUERY):
            first = Load(q.storage.cu_seqlens, (Index("b"),), (Binary("+", Dim("B"), Const(1)),), "int")
            return Binary("//", Binary("+", first, Index("q_idx")), rows)
        return Binary("//", Index("q_idx"), rows)


def _is_size(size: Expr, tensor: Tensor, role: Role) -> bool:
    return tensor.axis(role) is not None and same_size(size, tensor.size(role))


def _indices_of(expr: Expr) -> set[Index]:
    return {node for node in walk(expr) if isinstance(node, Index)}
