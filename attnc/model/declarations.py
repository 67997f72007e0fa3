"""Inputs and outputs of an attention: element types, shapes, roles, facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnc.diagnostics import Label, did_you_mean
from attnc.expr.nodes import Const, Dim, Expr, Param, walk
from attnc.model import attention
from attnc.model.misuse import type_here
from attnc.model.names import OUTPUTS
from attnc.model.products import group_size, same_size
from attnc.model.report import Report
from attnc.model.roles import infer_roles
from attnc.model.scope import WRONG, Scope, Wrong
from attnc.model.sizes import Sizes
from attnc.model.tensors import DType, Role, Tensor
from attnc.syntax import ast

FACTS = ("sorted",)
_QKV = ("q", "k", "v")
_HEADS = {"H": "the heads of q", "Hkv": "the heads of k", "G": "the heads of q over those of k"}


@dataclass(slots=True)
class Declarations:
    """Resolves the inputs and outputs of one attention into its scope."""

    tree: ast.Attention
    scope: Scope
    sizes: Sizes
    report: Report

    def inputs(self) -> None:
        """q, k and v first: they say what the dimensions in other shapes are."""
        trees = [item for item in self.tree.items if isinstance(item, ast.Input)]
        order = {name.id: WRONG for tree in trees for name in tree.names}
        self.scope.tensors.update(order)
        for tree in trees:
            self._inputs(tree, [name for name in tree.names if name.id in _QKV])
        self._check_qkv()
        for tree in trees:
            self._inputs(tree, [name for name in tree.names if name.id not in _QKV])

    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs that are right."""
        trees = [item for item in self.tree.items if isinstance(item, ast.Output)]
        made = [self._output(tree) for tree in trees]
        if not any(tree.name.id == "o" for tree in trees):
            self.report.error(
                "E0301",
                "attention without output 'o'",
                self.tree.name.span,
                "o is required",
                hints=("add 'output o: ...' with the shape of q and the head dimension of v",),
            )
        return tuple(tensor for tensor in made if tensor is not None)

    # --- inputs
    # --------------------------------------------------------------------------------------------------

    def _inputs(self, tree: ast.Input, names: Sequence[ast.Name]) -> None:
        if not names:
            return
        dtype = self._dtype(tree.dtype)
        shape = self._shape(tree.shape)
        is_sorted = self._facts(tree, dtype, shape)
        for name in names:
            if dtype is None or shape is None:
                continue
            roles: tuple[Role, ...] | None = ()
            if name.id in _QKV:
                roles = infer_roles(name, shape, tree.shape, ragged=self._is_ragged(tree), report=self.report)
                if not self._is_float(dtype):
                    self.report.error(
                        "E0313",
                        f"{name.id} must be of a float type",
                        tree.dtype.span,
                        f"this is {tree.dtype.id}",
                    )
                    continue
            if roles is not None:
                self.scope.tensors[name.id] = Tensor(
                    name=name.id, dtype=dtype, shape=shape, roles=roles, is_sorted=is_sorted, span=tree.span
                )

    def _dtype(self, tree: ast.Name) -> DType | str | None:
        if tree.id in list(DType):
            return DType(tree.id)
        param = self.scope.params.get(tree.id)
        if isinstance(param, attention.Param) and isinstance(param.choices[0], DType):
            return tree.id
        if not isinstance(param, Wrong):
            types = [*DType, *(name for name, p in self.scope.params.items() if _is_dtype_param(p))]
            self.report.error(
                "E0211",
                f"'{tree.id}' is not an element type",
                tree.span,
                "not a type, nor a param over types",
                notes=(f"the types are {', '.join(DType)}",),
                hints=type_here(tree.id, types),
            )
        return None

    def _shape(self, trees: Sequence[ast.Expr]) -> tuple[Expr, ...] | None:
        sizes = [self.sizes.size(tree) for tree in trees]
        present = tuple(size for size in sizes if size is not None)
        return present if len(present) == len(sizes) else None

    def _facts(self, tree: ast.Input, dtype: DType | str | None, shape: tuple[Expr, ...] | None) -> bool:
        for fact in tree.facts:
            if fact.id not in FACTS:
                self.report.error(
                    "E0212",
                    f"unknown fact '{fact.id}'",
                    fact.span,
                    f"the facts are {', '.join(FACTS)}",
                    hints=did_you_mean(fact.id, FACTS),
                )
            elif (dtype is not None and self._is_float(dtype)) or shape == ():
                self.report.error(
                    "E0315", "only integer tensors can be sorted", fact.span, "ascending along the last axis"
                )
        return any(fact.id == "sorted" for fact in tree.facts)

    def _is_float(self, dtype: DType | str) -> bool:
        if isinstance(dtype, DType):
            return dtype.is_float
        param = self.scope.params[dtype]
        return isinstance(param, attention.Param) and DType(str(param.choices[0])).is_float

    def _is_ragged(self, tree: ast.Input) -> bool:
        """Whether the rows follow each other, directly or as the prefix of an input whose rows do."""
        call = tree.storage
        if call is None or call.function.id != "prefix":
            return call is not None and call.function.id == "ragged"
        of = call.args[0].id if call.args and isinstance(call.args[0], ast.Name) else ""
        return any(
            item.storage is not None and item.storage.function.id == "ragged"
            for item in self.tree.items
            if isinstance(item, ast.Input) and any(name.id == of for name in item.names)
        )

    # --- q, k and v together
    # -------------------------------------------------------------------------------------

    def _check_qkv(self) -> None:
        for name in _QKV:
            if name not in self.scope.tensors:
                self.report.error(
                    "E0301",
                    f"attention without input '{name}'",
                    self.tree.name.span,
                    f"{name} is required",
                    hints=(f"add 'input {name}: ...'",),
                )
        q, k, v = (self._known(name) for name in _QKV)
        for other in (k, v):
            first = q or k
            if first and other and first is not other and first.dtype != other.dtype:
                self._report_pair(
                    "E0313", f"{first.name} and {other.name} differ in element type", other, first
                )
        if q and k and not same_size(q.shape[-1], k.shape[-1]):
            self._report_pair("E0311", "q and k differ in head dimension", k, q)
            self.scope.tensors["v"] = WRONG
        if k and v and not same_size(k.size(Role.HEAD), v.size(Role.HEAD)):
            self._report_pair("E0312", "k and v differ in heads", v, k)
        if q and k:
            self._bind_heads(q, k)
        for tensor, dim in ((q, "D"), (v, "Dv")):
            fixed = self.scope.dims.get(dim)
            if tensor and isinstance(fixed, Param) and not same_size(fixed, tensor.shape[-1]):
                self.report.error(
                    "E0311",
                    f"param {dim} is not the head dimension of {tensor.name}",
                    tensor.shape[-1].span or self.tree.span,
                    f"{dim} always means this size",
                    hints=(f"write '{dim}' here, or give the param another name",),
                )

    def _known(self, name: str) -> Tensor | None:
        tensor = self.scope.tensors.get(name)
        return tensor if isinstance(tensor, Tensor) else None

    def _bind_heads(self, q: Tensor, k: Tensor) -> None:
        """From here on H, Hkv and G mean the heads of q, those of k, and their ratio."""
        group = group_size(q.size(Role.HEAD), k.size(Role.HEAD))
        if group is None:
            self._report_pair(
                "E0312",
                "heads of q are not a multiple of the heads of k",
                q,
                k,
                hints=(
                    "write 'Hkv * G' heads for q and 'Hkv' for k and v: G query heads share each K/V head",
                ),
            )
            return
        meanings = {"H": q.size(Role.HEAD), "Hkv": k.size(Role.HEAD), "G": group}
        used = {node for tensor in (q, k) for node in walk(tensor.size(Role.HEAD))}
        for name, meaning in meanings.items():
            if k.size(Role.HEAD) != Const(1) and Dim(name) in used and meaning != Dim(name):
                self._report_pair(
                    "E0312",
                    f"'{name}' in these shapes is not {_HEADS[name]}",
                    q,
                    k,
                    hints=("write 'Hkv * G' heads for q and 'Hkv' for k and v, or 'H' for all",),
                )
                return
        self.scope.dims |= meanings

    def _report_pair(
        self, code: str, message: str, tensor: Tensor, other: Tensor, hints: tuple[str, ...] = ()
    ) -> None:
        place, related = tensor.span or self.tree.span, other.span
        self.scope.tensors[tensor.name] = WRONG
        self.report.error(
            code,
            message,
            place,
            f"{tensor.name} is declared here",
            related=(Label(related, f"{other.name} is declared here"),)
            if related and related != place
            else (),
            hints=hints,
        )

    # --- outputs
    # -------------------------------------------------------------------------------------------------

    def _output(self, tree: ast.Output) -> Tensor | None:
        name = tree.name
        if name.id not in OUTPUTS:
            self.report.error(
                "E0323",
                f"unknown output '{name.id}'",
                name.span,
                "an attention has outputs 'o' and 'lse'",
                hints=did_you_mean(name.id, OUTPUTS),
            )
            return None
        q, v = self._known("q"), self._known("v")
        dtype, shape = self._dtype(tree.dtype), self._shape(tree.shape)
        if dtype is None or shape is None or q is None or v is None:
            return None
        if not self._is_float(dtype) or (name.id == "lse" and dtype is not DType.F32):
            label = "lse is always f32" if name.id == "lse" else "o must be of a float type"
            self.report.error(
                "E0313", f"'{tree.dtype.id}' is not a type for {name.id}", tree.dtype.span, label
            )
            return None
        ragged = q.axis(Role.BATCH) is None
        roles = infer_roles(name, shape, tree.shape, ragged=ragged, report=self.report)
        if roles is None:
            return None
        tensor = Tensor(name=name.id, dtype=dtype, shape=shape, roles=roles, span=tree.span)
        return tensor if self._matches(tensor, q, v) else None

    def _matches(self, tensor: Tensor, q: Tensor, v: Tensor) -> bool:
        """Whether an output has the batch, rows and heads of q and, for o, the head dimension of v."""
        for size, role in zip(tensor.shape, tensor.roles, strict=True):
            model = v if role is Role.FEATURE else q
            axis = model.axis(role)
            if axis is not None and not same_size(size, model.shape[axis]):
                words = {Role.HEAD: "heads", Role.FEATURE: "head dimension"}.get(role, "rows")
                self.report.error(
                    "E0314",
                    f"{tensor.name} and {model.name} differ in {words}",
                    size.span or self.tree.span,
                    f"{model.name} has another size",
                    related=(Label(model.span, f"{model.name} is declared here"),) if model.span else (),
                )
                return False
        return True


def _is_dtype_param(param: attention.Param | Wrong) -> bool:
    return isinstance(param, attention.Param) and isinstance(param.choices[0], DType)
