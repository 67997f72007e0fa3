"""What an attention declares: `param`s and their choices, sizes, and inputs and outputs with their element
types, shapes, facts, and the role of each axis.

A size is a product or sum of dimensions, params and integers, e.g. `Hkv * G` or `B + 1`. A name that is
not reserved and not declared is a dimension of its own, known at run time from the tensors that have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from attnc.diagnostics import Label, Reporter, did_you_mean
from attnc.expr.nodes import Binary, Const, Dim, Expr, show, walk
from attnc.expr.nodes import Param as ParamNode
from attnc.expr.simplify import make
from attnc.model.attention import Param
from attnc.model.axes import infer_roles
from attnc.model.dtypes import DType
from attnc.model.names import DIMS, OUTPUTS, PARAM_DIMS, RESERVED, type_here
from attnc.model.scope import WRONG, Scope, Wrong, joins_keys
from attnc.model.tensors import Role, Tensor, group_size, same_size
from attnc.syntax import ast

DEFAULT_HEAD_DIMS = (64, 128)
MAX_HEAD_DIM = 1024


def resolve_param(tree: ast.Param, report: Reporter) -> Param | Wrong:
    """Returns the param with its choices, which are all element types, all numbers, or all true or false."""
    name, before = tree.name.id, report.errors
    choices: dict[tuple[str, DType | bool | int | float], DType | bool | int | float] = {}
    for choice in tree.choices:
        value = _choice(choice)
        if value is None:
            label = "a number, an element type, true or false"
            report.error("E0307", "not a choice of a param", choice.span, f"must be {label}")
        elif (_kind(value), value) in choices:
            report.error("E0307", f"'{choice.span.text}' is listed twice", choice.span, "second time")
        else:
            choices[_kind(value), value] = value
    values = tuple(choices.values())
    if len({kind for kind, _ in choices}) > 1:
        report.error("E0307", f"choices of param '{name}' are of different kinds", tree.span, "mixed")
    elif len({value.is_float for value in values if isinstance(value, DType) and not value.is_narrow}) > 1:
        report.error("E0307", f"choices of param '{name}' mix floats and integers", tree.span, "mixed")
    elif name in DIMS and not all(type(value) is int and value > 0 for value in values):
        report.error("E0307", f"'{name}' is a size", tree.span, "its choices must be positive integers")
    return WRONG if report.errors > before else Param(name=name, choices=values, span=tree.span)


def _choice(tree: ast.Expr) -> DType | bool | int | float | None:
    match tree:
        case ast.Bool(value=value):
            return value
        case ast.Number(value=value) if abs(value) < 2**63:
            return value
        case ast.UnaryOp(operand=ast.Number(value=value)) if abs(value) < 2**63:
            return -value
        case ast.Name(id=name) if name in list(DType):
            return DType(name)
        case _:
            return None


def _kind(value: DType | bool | int | float) -> str:
    return "number" if type(value) in (int, float) else type(value).__name__


def raw_dims(attention: ast.Attention, params: dict[str, Param | Wrong]) -> dict[str, Expr]:
    """Returns the sizes that the reserved dimensions stand for in the shapes of q, k and v. D is the last
    axis of q and Dv that of v, whatever is written there; those that the spec leaves open become params,
    added to `params`. The others are params if declared so, else run-time sizes.
    """
    shapes = {
        name.id: item.shape for item in attention.items if isinstance(item, ast.Input) for name in item.names
    }
    dims: dict[str, Expr] = {}
    for name in DIMS:
        if name not in params and name not in ("D", "Dv"):
            dims[name] = Dim(name)
        elif isinstance(params.get(name), Param) and name in PARAM_DIMS:
            dims[name] = ParamNode(name, "int")
    for name, tensor in (("D", "q"), ("Dv", "v")):
        last = shapes[tensor][-1] if shapes.get(tensor) else None
        if name in params:
            continue
        fixed = _stated_size(last, dims, params)
        if fixed is None and (name == "D" or (isinstance(last, ast.Name) and last.id == "Dv")):
            params[name] = Param(name=name, choices=DEFAULT_HEAD_DIMS)
            fixed = ParamNode(name, "int")
        dims[name] = fixed or dims.get("D", Dim("D"))
    return dims


def _stated_size(
    tree: ast.Expr | None, dims: dict[str, Expr], params: dict[str, Param | Wrong]
) -> Expr | None:
    match tree:
        case ast.Number(value=int() as value):
            return Const(value)
        case ast.Name(id=name) if isinstance(params.get(name), Param):
            return ParamNode(name, "int")
        case ast.Name(id="D") if "D" in dims:
            return dims["D"]
        case _:
            return None


@dataclass(slots=True)
class DeclaredSizes:
    """Makes the sizes of one attention; adds the free dimensions that it meets to the scope."""

    scope: Scope
    report: Reporter
    #: Other names of the attention and what they are, for the message when one is used as a size.
    declared: Mapping[str, str]

    def size(self, tree: ast.Expr) -> Expr | None:
        """Returns the size, or None after reporting what is wrong with it."""
        match tree:
            case ast.Name():
                return self._name(tree)
            case ast.Number(value=int() as value) if 1 <= value < 2**31:
                return Const(value, span=tree.span)
            case ast.BinaryOp(op="+" | "-" | "*" | "//" as op):
                left, right = self.size(tree.left), self.size(tree.right)
                if left is None or right is None:
                    return None
                return make(Binary(op, left, right, span=tree.span), (left, right))
        self.report.error(
            "E0308", "not a size", tree.span, "an axis is a name, a positive integer, or + - * // of these"
        )
        return None

    def _name(self, tree: ast.Name) -> Expr | None:
        name, scope = tree.id, self.scope
        if name in scope.dims:
            return replace(scope.dims[name], span=tree.span)
        param = scope.params.get(name)
        if isinstance(param, Wrong):
            return None
        if isinstance(param, Param):
            if all(type(choice) is int for choice in param.choices):
                return ParamNode(name, "int", span=tree.span)
            self.report.error(
                "E0308", f"param '{name}' is not a size", tree.span, "its choices are not integers"
            )
            return None
        what = self.declared.get(name) or RESERVED.get(name)
        if what is not None:
            self.report.error(
                "E0308", f"'{name}' is not a size", tree.span, f"{what}", hints=did_you_mean(name, DIMS)
            )
            return None
        scope.dims[name] = Dim(name)
        return Dim(name, span=tree.span)


#: Facts, what they are of, and what they are about.
FACTS = {
    "sorted": ("integer", "ascending along the last axis"),
    "distinct": ("integer", "along the last axis"),
    "descending": ("f32", "never ascending along the last axis"),
}
_QKV = ("q", "k", "v")
#: What q, k and v are called elsewhere.
_CALLED = {"q": ("query", "queries"), "k": ("key", "keys"), "v": ("value", "values")}
#: What to write where an integer or a float of 8 bits cannot be.
_INSTEAD_OF_INTEGER = "write 'u8' or 'i32', or 'bool' for a flag"
_INSTEAD_OF_FLOAT = "write 'bf16' or 'f16', and convert before the call"
_HEADS = {"H": "the heads of q", "Hkv": "the heads of k", "G": "the heads of q over those of k"}


@dataclass(slots=True)
class Declarations:
    """Resolves the inputs and outputs of one attention into its scope."""

    tree: ast.Attention
    scope: Scope
    sizes: DeclaredSizes
    report: Reporter

    def inputs(self) -> None:
        """Declares inputs, q, k and v first: they say what the dimensions in other shapes are."""
        trees = [item for item in self.tree.items if isinstance(item, ast.Input)]
        order = {name.id: WRONG for tree in trees for name in tree.names}
        self.scope.tensors.update(order)
        for tree in trees:
            self._inputs(tree, [name for name in tree.names if name.id in _QKV])
        self._check_qkv()
        for tree in trees:
            self._inputs(tree, [name for name in tree.names if name.id not in _QKV])

    def outputs(self) -> tuple[Tensor, ...]:
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
        facts = self._facts(tree, dtype, shape)
        for name in names:
            if dtype is None or shape is None:
                continue
            roles: tuple[Role, ...] | None = ()
            if name.id in _QKV:
                roles = infer_roles(name, shape, tree.shape, ragged=self._is_ragged(tree), report=self.report)
            if not self._fits(name.id, dtype, tree.dtype):
                continue
            if roles is not None:
                self.scope.tensors[name.id] = Tensor(
                    name=name.id,
                    dtype=dtype,
                    shape=shape,
                    roles=roles,
                    is_sorted="sorted" in facts,
                    is_distinct="distinct" in facts,
                    is_descending="descending" in facts,
                    span=tree.span,
                )

    def _fits(self, name: str, dtype: DType | str, tree: ast.Name) -> bool:
        """Returns whether an input may have this type; reports why not. tree: the type as it is written."""
        choices = self._choices(dtype)
        narrow = next((choice for choice in choices if choice.is_narrow), None)
        if narrow is not None and name not in ("k", "v"):
            self.report.error(
                "E0313",
                f"'{name}' cannot be of type {narrow}",
                tree.span,
                "k and v alone are stored in 8 bits",
                hints=(_INSTEAD_OF_INTEGER if narrow.is_narrow_integer else _INSTEAD_OF_FLOAT,),
            )
            return False
        if name in _QKV and not all(choice.is_float or choice.is_narrow for choice in choices):
            label = f"this is {tree.id}"
            self.report.error("E0313", f"{name} must be of a float type", tree.span, label)
            return False
        return True

    def _choices(self, dtype: DType | str) -> tuple[DType, ...]:
        if isinstance(dtype, DType):
            return (dtype,)
        param = self.scope.params[dtype]
        assert isinstance(param, Param), "a tensor whose dtype param is wrong is wrong itself"
        return tuple(DType(str(choice)) for choice in param.choices)

    def _dtype(self, tree: ast.Name) -> DType | str | None:
        param = self.scope.params.get(tree.id)
        if param is None and tree.id in list(DType):
            return DType(tree.id)
        if isinstance(param, Param) and isinstance(param.choices[0], DType):
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

    def _facts(self, tree: ast.Input, dtype: DType | str | None, shape: tuple[Expr, ...] | None) -> set[str]:
        for fact in tree.facts:
            if fact.id not in FACTS:
                self.report.error(
                    "E0212",
                    f"unknown fact '{fact.id}'",
                    fact.span,
                    f"the facts are {', '.join(FACTS)}",
                    hints=did_you_mean(fact.id, FACTS),
                )
                continue
            of, label = FACTS[fact.id]
            role = next((name.id for name in tree.names if name.id in _QKV), None)
            if role is not None:
                self.report.error("E0315", f"{role} cannot be {fact.id}", fact.span, "a fact of other inputs")
            elif (dtype is not None and not self._are(dtype, of)) or shape == ():
                self.report.error("E0315", f"only {of} tensors can be {fact.id}", fact.span, label)
        return {fact.id for fact in tree.facts}

    def _are(self, dtype: DType | str, of: str) -> bool:
        if of == "f32":
            return self._choices(dtype) == (DType.F32,)
        return not self._is_float(dtype)

    def _is_float(self, dtype: DType | str) -> bool:
        return all(choice.is_float for choice in self._choices(dtype))

    def _is_ragged(self, tree: ast.Input) -> bool:
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
                near = next((x for x in self.scope.tensors if _is_near(x, name)), None)
                self.report.error(
                    "E0301",
                    f"attention without input '{name}'",
                    self.tree.name.span,
                    f"{name} is required",
                    hints=(f"write '{name}' in place of '{near}'" if near else f"add 'input {name}: ...'",),
                )
        q, k, v = (self._find_tensor(name) for name in _QKV)
        for other in (k, v):
            first = q or k
            if first and other and first is not other and not self._goes_with(other, first):
                self._report_pair(
                    "E0313",
                    f"{first.name} and {other.name} differ in element type",
                    other,
                    first,
                    hints=self._narrow_hints(other),
                    labels=(f"{other.name} is {other.dtype}", f"{first.name} is {first.dtype}"),
                )
        if q and k and not same_size(q.shape[-1], k.shape[-1]) and not joins_keys(self.tree, self.scope):
            of_k, of_q = (f"the last axis of {x.name} is {show(x.shape[-1])}" for x in (k, q))
            hint = "give q and k one head dimension; that of v may be another: declare 'input v' apart"
            message = "q and k differ in head dimension"
            self._report_pair("E0311", message, k, q, hints=(hint,), labels=(of_k, of_q))
            self.scope.tensors["v"] = WRONG
        if k and v and not same_size(k.size(Role.HEAD), v.size(Role.HEAD)):
            self._report_pair("E0312", "k and v differ in heads", v, k)
        if q and k:
            self._bind_heads(q, k)
        for tensor, dim in ((q, "D"), (v, "Dv")):
            fixed = self.scope.dims.get(dim)
            if tensor and isinstance(fixed, ParamNode) and not same_size(fixed, tensor.shape[-1]):
                self.report.error(
                    "E0311",
                    f"param {dim} is not the head dimension of {tensor.name}",
                    tensor.shape[-1].span or self.tree.span,
                    f"{dim} always means this size",
                    hints=(f"write '{dim}' here, or give the param another name",),
                )

    def _goes_with(self, other: Tensor, first: Tensor) -> bool:
        """Returns whether k or v is of the type of q, which then has 16 bits, wherever it is not of 8."""
        if other.dtype == first.dtype:
            return True
        choices, of_q = self._choices(other.dtype), self._choices(first.dtype)
        if first.name != "q":  # without q, which has been reported
            return any(choice.is_narrow for choice in (*choices, *of_q))
        is_narrow = any(choice.is_narrow for choice in choices)
        wide = {choice for choice in choices if not choice.is_narrow}
        return is_narrow and DType.F32 not in of_q and (not wide or wide == set(of_q) == {of_q[0]})

    def _narrow_hints(self, tensor: Tensor) -> tuple[str, ...]:
        if not any(choice.is_narrow for choice in self._choices(tensor.dtype)):
            return ()
        name = tensor.name
        hint = f"q is of f16 or bf16 beside {name} of 8 bits; types of {name} that are not are that of q"
        return (hint,)

    def _find_tensor(self, name: str) -> Tensor | None:
        tensor = self.scope.tensors.get(name)
        return tensor if isinstance(tensor, Tensor) else None

    def _bind_heads(self, q: Tensor, k: Tensor) -> None:
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
        self,
        code: str,
        message: str,
        tensor: Tensor,
        other: Tensor,
        hints: tuple[str, ...] = (),
        labels: tuple[str, str] | None = None,
    ) -> None:
        """labels: what is said of the two; by default where they are declared."""
        place, related = tensor.span or self.tree.span, other.span
        of_tensor, of_other = labels or (f"{tensor.name} is declared here", f"{other.name} is declared here")
        self.scope.tensors[tensor.name] = WRONG
        self.report.error(
            code,
            message,
            place,
            of_tensor,
            related=(Label(related, of_other),) if related and related != place else (),
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
        q, v = self._find_tensor("q"), self._find_tensor("v")
        dtype, shape = self._dtype(tree.dtype), self._shape(tree.shape)
        if dtype is None or shape is None or q is None or v is None:
            return None
        if not self._is_float(dtype) or (name.id == "lse" and dtype is not DType.F32):
            label = "lse is always f32" if name.id == "lse" else "o is of f16, bf16 or f32"
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
                    hints=(f"write '{show(model.shape[axis])}'",),
                )
                return False
        return True


def _is_dtype_param(param: Param | Wrong) -> bool:
    return isinstance(param, Param) and isinstance(param.choices[0], DType)


def _is_near(tensor: str, name: str) -> bool:
    """Returns whether a tensor is called so in place of q, k or v."""
    return tensor.lower() in (name, *_CALLED[name]) or (len(tensor) == 2 and name in tensor)
