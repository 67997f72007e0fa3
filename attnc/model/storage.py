"""Storage adjectives: `via paged(...)`, `via ragged(...)`, `via prefix(...)`.

They say where the rows of q, k or v lie in memory; the mathematics stays in logical indices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from attnc.diagnostics import Label, Reporter, did_you_mean
from attnc.expr.nodes import Binary, Const, Dim
from attnc.model.attention import Param
from attnc.model.dtypes import DType
from attnc.model.scope import Scope, joins_keys
from attnc.model.tensors import Paged, Prefix, Ragged, Role, Storage, Tensor, same_size
from attnc.syntax import ast

MAX_PAGE = 65536
_B = Dim("B")
_USAGE = {
    "paged": "paged(block_table, page = 16)",
    "ragged": "ragged(cu_seqlens)",
    "prefix": "prefix(k)",
}
#: Of what type v may be where a product has columns behind those of k.
_AS_PRODUCTS_HAVE_IT = ", or of that of q: then it has columns behind those of k, too"
#: What to write instead of storages that others have.
_INSTEAD = {
    "packed": (
        "sequences that follow each other are written 'via ragged(cu_seqlens)'",
        "rows of several types are converted before a call, as 'attnc.adapters.flash_mla' does DeepSeek's",
    ),
}


@dataclass(slots=True)
class Storages:
    """Gives q, k and v of one attention their storage, and the outputs that of q."""

    scope: Scope
    report: Reporter
    joins: bool = False  # whether a product has columns behind those of k

    def inputs(self, tree: ast.Attention) -> None:
        self.joins = joins_keys(tree, self.scope)
        for item in tree.items:
            if not isinstance(item, ast.Input) or item.storage is None:
                continue
            for name in item.names:
                tensor = self.scope.tensors.get(name.id)
                storage = self._storage(item.storage, name.id, tensor if isinstance(tensor, Tensor) else None)
                if storage is not None and isinstance(tensor, Tensor):
                    self.scope.tensors[name.id] = replace(tensor, storage=storage)
        self._check_same_rows(tree)

    def output(self, tensor: Tensor) -> Tensor:
        q = self.scope.tensors["q"]
        ragged = isinstance(q, Tensor) and q.storage.is_packed
        return replace(tensor, storage=q.storage) if ragged and isinstance(q, Tensor) else tensor

    def _storage(self, call: ast.Call, name: str, tensor: Tensor | None) -> Storage | None:
        kind = call.function.id
        make: Mapping[str, Callable[[ast.Call, str, Tensor | None], Storage | None]] = {
            "paged": self._resolve_paged,
            "ragged": self._resolve_ragged,
            "prefix": self._prefix,
        }
        if kind not in make:
            self.report.error(
                "E0212",
                f"unknown storage '{kind}'",
                call.function.span,
                f"the storages are {', '.join(make)}",
                hints=_INSTEAD.get(kind, did_you_mean(kind, make)),
            )
            return None
        wanted = {"page"} if kind == "paged" else set()
        if (
            len(call.args) != 1
            or {keyword.name.id for keyword in call.kwargs} != wanted
            or len(call.kwargs) > 1
        ):
            self._error(call, f"{kind} storage is written '{_USAGE[kind]}'", "these are not its arguments")
            return None
        return make[kind](call, name, tensor)

    def _resolve_paged(self, call: ast.Call, name: str, tensor: Tensor | None) -> Storage | None:
        tree = call.kwargs[0].value
        sizes = self._page_sizes(tree)
        if name not in ("k", "v"):
            self._error(call, "only k and v can be paged", f"{name} has no rows in pages")
        elif sizes is None or not all(type(size) is int and 1 <= size <= MAX_PAGE for size in sizes):
            label = f"rows of a page, 1 to {MAX_PAGE}"
            hint = "write a number, or a param such as 'param P in {16, 64}'"
            self._error(tree, "the page size is not a positive integer", label, hint=hint)
        elif sizes and (table := self._table(call, "i32[B, P]")) is not None:
            if len(table.shape) == 2 and table.shape[0] == _B:
                param = tree.id if isinstance(tree, ast.Name) else ""
                return Paged(block_table=table.name, page=int(sizes[0]), param=param, span=call.span)
            self._error(
                call.args[0],
                f"'{table.name}' is not a block table",
                "needs a page for each sequence and place",
                related=_label_declaration(table),
                hint=f"declare 'input {table.name}: i32[B, P]'",
            )
        return None

    def _page_sizes(self, tree: ast.Expr) -> tuple[DType | bool | int | float, ...] | None:
        """Returns the number, or the choices of the param; none of a param with a mistake, None of anything
        else.
        """
        match tree:
            case ast.Number(value=value):
                return (value,)
            case ast.Name(id=name) if name in self.scope.params:
                param = self.scope.params[name]
                return param.choices if isinstance(param, Param) else ()
            case _:
                return None

    def _resolve_ragged(self, call: ast.Call, name: str, tensor: Tensor | None) -> Storage | None:
        if name not in ("q", "k", "v"):
            self._error(
                call, "only q, k and v can be ragged", f"{name} is addressed by the expressions that load it"
            )
        elif (table := self._table(call, "i32[B + 1]")) is not None:
            if table.shape == (Binary("+", _B, Const(1)),):
                return Ragged(cu_seqlens=table.name, span=call.span)
            self._error(
                call.args[0],
                f"'{table.name}' does not hold B + 1 row numbers",
                "where each sequence begins, and where the last one ends",
                related=_label_declaration(table),
                hint=f"declare 'input {table.name}: i32[B + 1]'",
            )
        return None

    def _prefix(self, call: ast.Call, name: str, tensor: Tensor | None) -> Storage | None:
        of = call.args[0]
        k, q = self.scope.tensors.get("k"), self.scope.tensors.get("q")
        if name != "v" or not isinstance(of, ast.Name) or of.id != "k":
            self._error(
                call,
                "only v can be a prefix, and only of k",
                f"not {name} of {of.span.text}",
                hint="write 'input v: ... via prefix(k)'",
            )
        elif tensor is not None and isinstance(k, Tensor):
            rows = (tensor.roles, *tensor.shape[:-1]), (k.roles, *k.shape[:-1])
            if rows[0] != rows[1]:
                self._error(
                    call,
                    "v differs from k in more than its head dimension",
                    "a prefix has the rows of k",
                    related=_label_declaration(k),
                )
            elif tensor.dtype == k.dtype:
                return Prefix(of="k", span=call.span)
            elif self.joins and isinstance(q, Tensor) and tensor.dtype == q.dtype:
                return Prefix(of="k", joins=True, span=call.span)
            else:
                self._error(
                    call,
                    "v differs from k in its element type",
                    "a prefix has the elements of k",
                    related=_label_declaration(k),
                    hint=f"declare v of type {k.dtype}" + (_AS_PRODUCTS_HAVE_IT if self.joins else ""),
                )
        return None

    def _table(self, call: ast.Call, expected: str) -> Tensor | None:
        arg = call.args[0]
        name = arg.id if isinstance(arg, ast.Name) else None
        if name is None or name not in self.scope.tensors:
            known = tuple(n for n in self.scope.tensors if n not in ("q", "k", "v"))
            label = "not an input of this attention"
            hints = did_you_mean(name or "", known)
            if name is not None and not hints:
                hints = (f"declare 'input {name}: {expected}'",)
            self.report.error("E0209", f"unknown input '{arg.span.text}'", arg.span, label, hints=hints)
            return None
        table = self.scope.tensors[name]
        if not isinstance(table, Tensor):
            return None
        if table.dtype is DType.I32:
            return table
        self._error(
            arg,
            f"'{name}' is not of type i32",
            "holds row or page numbers",
            related=_label_declaration(table),
            hint=f"declare 'input {name}: {expected}'",
        )
        return None

    def _check_same_rows(self, tree: ast.Attention) -> None:
        k, v = self.scope.tensors.get("k"), self.scope.tensors.get("v")
        if not isinstance(k, Tensor) or not isinstance(v, Tensor) or v.storage.is_part:
            return
        if k.storage != v.storage:
            self.report.error(
                "E0316",
                "k and v are stored in different ways",
                v.storage.span or v.span or tree.span,
                "the rows of v are those of k",
                related=_label_storage(k),
                hints=("declare them together: 'input k, v: ... via ...'",),
            )
        elif k.storage.is_packed and not same_size(k.size(Role.KEY), v.size(Role.KEY)):
            self.report.error(
                "E0316",
                "k and v differ in rows",
                v.span or tree.span,
                "the rows of v are those of k",
                related=_label_declaration(k),
            )

    def _error(
        self, tree: ast.Expr, message: str, label: str, *, related: tuple[Label, ...] = (), hint: str = ""
    ) -> None:
        hints = (hint,) if hint else ()
        self.report.error("E0316", message, tree.span, label, related=related, hints=hints)


def _label_declaration(tensor: Tensor) -> tuple[Label, ...]:
    return () if tensor.span is None else (Label(tensor.span, f"'{tensor.name}' is declared here"),)


def _label_storage(tensor: Tensor) -> tuple[Label, ...]:
    span = tensor.storage.span or tensor.span
    return () if span is None else (Label(span, f"and here are those of {tensor.name}"),)
