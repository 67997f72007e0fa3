"""Expressions as written -> typed expressions: names looked up, lets and defs inlined, sugar removed.

None stands for an expression in which a mistake has been reported. What contains it is None too,
silently: one mistake is one diagnostic. Nodes carry spans of the attention's own text; a node from the
body of a def has the span of the call. What lets and defs expand to is limited, and all that a file costs
(`Expansion`): a short hostile spec must not make a long or deep expression, nor much work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from attnc.diagnostics import LIFT, DiagnosticError, Label, Reporter, did_you_mean, error
from attnc.effort import MAX_STEPS, STEPS_PER_PIECE, Exhausted, at_most, limit_piece, spend
from attnc.expr.construct import number
from attnc.expr.nodes import (
    MAX_INTEGER,
    And,
    Binary,
    Call,
    Compare,
    Const,
    Dot,
    Expr,
    Load,
    Neg,
    Not,
    Or,
    Param,
    Type,
    children,
    show,
)
from attnc.model import attention
from attnc.model.columns import (
    COLUMN_HINT,
    COLUMN_LABEL,
    COLUMNS,
    REST_HINT,
    REST_LABEL,
    Keys,
    find_column_mistake,
    find_rest_mistake,
)
from attnc.model.dtypes import DType
from attnc.model.lists import elaborate_listed
from attnc.model.names import CALLABLE, CAT, JOINED, LISTED, OUTPUTS, RESERVED, called_here, value_here
from attnc.model.scope import WRONG, Argument, Context, Definition, Scope, Wrong, list_names
from attnc.model.tensors import Tensor
from attnc.source import Span
from attnc.syntax import ast

# --- limits on what a file expands to


MAX_NODES = 4096
#: Levels of the result, and of expressions inside of expressions on the way: far from Python's own limit.
MAX_DEPTH = 96
#: Calls of defs that one attention may expand to.
MAX_CALLS = 10_000


@dataclass(slots=True)
class Expansion:
    """What one attention has expanded to so far."""

    calls: int = 0
    level: int = 0
    #: Operations and levels of nodes by id; each entry keeps its node alive, so that ids stay unique.
    _extents: dict[int, tuple[Expr, int, int]] = field(default_factory=dict)

    def fits(self, expr: Expr) -> bool:
        size, depth = self._extent(expr)
        return size <= at_most(MAX_NODES) and depth <= MAX_DEPTH

    def _extent(self, expr: Expr) -> tuple[int, int]:
        """Operations and levels of a tree; shared parts count each time, as a walk sees them."""
        if id(expr) not in self._extents:
            parts = [self._extent(child) for child in children(expr)]
            size, depth = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
            self._extents[id(expr)] = (expr, size, depth)
        return self._extents[id(expr)][1:]


def report_expansion(tree: ast.Expr, at: Context) -> None:
    at.error(
        "E0506",
        "expression that expands too far",
        tree.span,
        "lets and defs are expanded where they are used",
        notes=(f"the limits are {MAX_NODES} operations, {MAX_DEPTH} levels and {MAX_CALLS} calls of defs",),
        hints=(f"{LIFT}, but for that of levels",),
    )


_NOTE = (
    f"an attention, and a variant of it for one target, may cost {MAX_STEPS:,} steps, each about one "
    f"operation of an expression that is looked at; a file as many, and {STEPS_PER_PIECE:,} for each variant "
    "and target after the first"
)


@contextmanager
def report_limit(what: str, span: Span) -> Iterator[None]:
    """Limits what the block costs, a piece of the file, and makes a diagnostic of it when that is spent."""
    try:
        with limit_piece():
            yield
    except Exhausted:
        raise DiagnosticError(
            [
                error(
                    "E0510",
                    "the file is too much work",
                    span,
                    f"the limit was reached in {what}",
                    notes=(_NOTE,),
                    hints=("have fewer terms, choices of keys or params", LIFT),
                )
            ]
        ) from None


_NUMBERS: tuple[Type, ...] = ("int", "float")
_A: dict[Type, str] = {"bool": "true or false", "int": "an integer", "float": "a number"}


# --- expressions


@dataclass(slots=True)
class Elaborator:
    scope: Scope
    report: Reporter
    _expansion: Expansion = field(default_factory=Expansion)

    def expr(self, tree: ast.Expr, also: Mapping[str, Expr] | None = None) -> Expr | None:
        """Returns the typed expression, or None when something in it is wrong. also: as in `Context`."""
        at = Context(scope=self.scope, report=self.report, defs=self.scope.defs, also=also or {})
        return self._expr(tree, at)

    def elaborate_typed(
        self, tree: ast.Expr, wanted: Type, what: str, also: Mapping[str, Expr] | None = None
    ) -> Expr | None:
        """Elaborates what takes one type; an int will do for a float. also: as in `Context`."""
        at = Context(scope=self.scope, report=self.report, defs=self.scope.defs, also=also or {}, kind=wanted)
        made = self._expr(tree, at)
        if made is None or made.type == wanted or (wanted == "float" and made.type == "int"):
            return made
        hints = ("compare it with something",) if wanted == "bool" else ()
        self.report.error(
            "E0304", f"{what} must be {_A[wanted]}", tree.span, f"this is {_A[made.type]}", hints=hints
        )
        return None

    def _expr(self, tree: ast.Expr, at: Context) -> Expr | None:
        spend(3)
        self._expansion.level += 1
        made = self._make_node(tree, at) if self._expansion.level <= MAX_DEPTH else None
        if self._expansion.level > MAX_DEPTH or (made is not None and not self._expansion.fits(made)):
            report_expansion(tree, at)
            made = None
        self._expansion.level -= 1
        return made

    def _make_node(self, tree: ast.Expr, at: Context) -> Expr | None:
        made: Expr | None
        match tree:
            case ast.Number(value=value) | ast.Bool(value=value):
                made = _constant(value, tree, at)
            case ast.UnaryOp(operand=ast.Number(value=value)):
                made = _constant(-value, tree, at)
            case ast.Name():
                made = self._name(tree, at)
            case ast.UnaryOp():
                operand = self._operand(tree.operand, "'-'", _NUMBERS, at)
                made = operand and Neg(operand, span=at.span(tree))
            case ast.Not():
                operand = self._operand(tree.operand, "'not'", ("bool",), at)
                made = operand and Not(operand, span=at.span(tree))
            case ast.BoolOp():
                operands = self._operands(tree.operands, f"'{tree.op}'", ("bool",), at)
                kind = And if tree.op == "and" else Or
                made = None if operands is None else kind(operands, span=at.span(tree))
            case ast.BinaryOp():
                made = self._binary(tree, at)
            case ast.Compare():
                made = self._compare(tree, at)
            case ast.Call():
                made = self._call(tree, at)
            case ast.Subscript():
                made = self._subscript(tree, at)
            case ast.ListValue():
                at.error("E0303", "a list is not a value", tree.span, "lists belong to schedules")
                return None
        return made

    # --- operators
    # -----------------------------------------------------------------------------------------------

    def _operand(self, tree: ast.Expr, what: str, wanted: tuple[Type, ...], at: Context) -> Expr | None:
        made = self._expr(tree, at)
        if made is None or made.type in wanted:
            return made
        needs = {"bool": "true or false", "int": "integers"}[wanted[0]] if len(wanted) == 1 else "numbers"
        hints = ("write 'where(condition, 1, 0)'",) if made.type == "bool" else ()
        at.error("E0303", f"{what} needs {needs}", tree.span, f"this is {_A[made.type]}", hints=hints)
        return None

    def _operands(
        self, trees: tuple[ast.Expr, ...], what: str, wanted: tuple[Type, ...], at: Context
    ) -> tuple[Expr, ...] | None:
        made: list[Expr] = []
        for tree in trees:
            operand = self._operand(tree, what, wanted, at)
            if operand is not None:
                made.append(operand)
        return tuple(made) if len(made) == len(trees) else None

    def _binary(self, tree: ast.BinaryOp, at: Context) -> Expr | None:
        wanted: tuple[Type, ...] = ("int",) if tree.op in ("//", "%") else _NUMBERS
        operands = self._operands((tree.left, tree.right), f"'{tree.op}'", wanted, at)
        if operands is None:
            return None
        if tree.op in ("/", "//", "%") and isinstance(operands[1], Const) and operands[1].value == 0:
            at.error("E0320", "division by zero", tree.right.span, "this is 0")
            return None
        return Binary(tree.op, *operands, span=at.span(tree))

    def _compare(self, tree: ast.Compare, at: Context) -> Expr | None:
        operands = self._operands(tree.operands, "a comparison", (*_NUMBERS, "bool"), at)
        if operands is None:
            return None
        bools = [operand.type == "bool" for operand in operands]
        if any(bools) and not (all(bools) and all(op in ("==", "!=") for op in tree.ops)):
            self._report_mixed(tree, operands, at)
            return None
        pairs: list[Expr] = []
        for i, op in enumerate(tree.ops):
            span = at.site or tree.operands[i].span.to(tree.operands[i + 1].span)
            pairs.append(Compare(op, operands[i], operands[i + 1], span=span))
        return And(tuple(pairs), span=at.span(tree)) if len(pairs) > 1 else pairs[0]

    def _report_mixed(self, tree: ast.Compare, operands: tuple[Expr, ...], at: Context) -> None:
        place = next(part for part, made in zip(tree.operands, operands, strict=True) if made.type == "bool")
        hints = ("true and false have no order",) if all(made.type == "bool" for made in operands) else ()
        at.error("E0303", "a comparison needs numbers", place.span, f"this is {_A['bool']}", hints=hints)

    # --- names and subscripts
    # ------------------------------------------------------------------------------------

    def _name(self, tree: ast.Name, at: Context) -> Expr | None:
        match at.meaning(tree.id):
            case Wrong():
                return None
            case Definition() as definition:
                return self._inline(definition, (), tree, at)
            case attention.Param(choices=choices) as param if not isinstance(choices[0], DType):
                types = {Const(choice).type for choice in choices if not isinstance(choice, DType)}
                return Param(param.name, "float" if "float" in types else types.pop(), span=tree.span)
            case Tensor(name=name, shape=()) as tensor if name not in ("q", "k", "v"):
                return Load(name, (), (), self.scope.element_type(tensor), span=at.span(tree))
            case None | Tensor() | attention.Param():
                report_misuse(tree, at)
                return None
            case found:
                is_leaf = tree.id not in at.arguments and tree.id not in self.scope.lets
                return replace(found, span=at.span(tree)) if is_leaf else found

    def _subscript(self, tree: ast.Subscript, at: Context) -> Expr | None:
        indices = self._operands(tree.indices, "an index", ("int",), at)
        tensor = at.meaning(tree.tensor.id)
        if tensor is WRONG:
            return None
        if not isinstance(tensor, Tensor) or tensor.name in ("q", "k", "v"):
            report_misuse(tree.tensor, at, indices=tree.indices)
            return None
        if len(tree.indices) != len(tensor.shape):
            at.error(
                "E0305",
                f"'{tensor.name}' has {_count(len(tensor.shape), 'axis', 'axes')}, not {len(tree.indices)}",
                tree.span,
                f"{_count(len(tree.indices), 'index', 'indices')} given",
                related=(Label(tensor.span, "declared here"),) if tensor.span else (),
                hints=_show_use(tensor, at),
            )
            return None
        if indices is None:
            return None
        element = self.scope.element_type(tensor)
        return Load(
            tensor.name, indices, tensor.shape, element, is_sorted=tensor.is_sorted, span=at.span(tree)
        )

    # --- calls
    # ---------------------------------------------------------------------------------------------------

    def _call(self, tree: ast.Call, at: Context) -> Expr | None:
        name = tree.function.id
        called = at.meaning(name)
        if called is None and name == LISTED:
            return elaborate_listed(tree, at, self._expr)
        if called is None and name not in CALLABLE and name != "dot":
            at.error(
                "E0204",
                f"unknown function '{name}'",
                tree.function.span,
                "not an intrinsic or a def",
                hints=called_here(name, (*CALLABLE, *at.defs, "dot", LISTED)),
            )
        elif tree.kwargs:
            at.error(
                "E0206", f"'{name}' takes no named arguments", tree.kwargs[0].span, "write the value alone"
            )
        elif name == "dot":
            return self._dot(tree, at)
        elif isinstance(called, Definition):
            return self._inline(called, tuple(self._argument(arg, at) for arg in tree.args), tree, at)
        elif called is None:
            return self._intrinsic(tree, at)
        elif called is not WRONG:
            at.error("E0207", f"'{name}' is not a function", tree.function.span, "cannot be called")
        return None

    def _dot(self, tree: ast.Call, at: Context) -> Expr | None:
        """Returns the product of q and k; of k with a scale of its columns, or columns behind them, which the
        scope keeps.
        """
        keys: Keys | None
        match tree.args:
            case (ast.Name(id="q"), ast.Call(function=called, args=(stored, rest), kwargs=())) if (
                called.id == CAT
            ):
                keys = self._keys(stored, rest, tree, at)
            case (ast.Name(id="q"), stored):
                keys = self._keys(stored, None, tree, at)
            case _:
                keys = None
                _report_product(tree, at)
        if keys is None:
            return None
        self.scope.products.append(keys)
        if any(other != keys for other in self.scope.products):
            joins = any(other.rest is not None for other in self.scope.products)
            label = "k has the same columns in all products" if joins else "k has one scale in all products"
            at.error("E0306", "two products of q and k", tree.span, label, hints=("write it as a let",))
            return None
        return Dot(span=at.span(tree))

    def _keys(self, tree: ast.Expr, rest: ast.Expr | None, product: ast.Call, at: Context) -> Keys | None:
        factor: ast.Expr | None
        match tree:
            case ast.Name(id="k"):
                factor = None
            case ast.BinaryOp(op="*", left=ast.Name(id="k"), right=factor):
                pass
            case _:
                _report_product(product, at)
                return None
        of_columns = replace(at, also={**at.also, **COLUMNS})
        scale = behind = None
        if factor is not None:
            scale = self._operand(factor, "the scale of k", ("float",), of_columns)
            if scale is None:
                return None
            if report := find_column_mistake(scale, "k"):
                at.error("E0306", report, factor.span, COLUMN_LABEL, hints=(COLUMN_HINT,))
                return None
        if rest is not None:
            behind = self._operand(rest, "what stands behind k", _NUMBERS, of_columns)
            if behind is None:
                return None
            if report := find_rest_mistake(behind):
                at.error("E0306", report, rest.span, REST_LABEL, hints=(REST_HINT,))
                return None
        assert behind is None or isinstance(behind, Load), "checked above"
        return Keys(scale, behind)

    def _intrinsic(self, tree: ast.Call, at: Context) -> Expr | None:
        name = tree.function.id
        if len(tree.args) != CALLABLE[name]:
            _report_count(tree, name, CALLABLE[name], at)
            return None
        if name != "where":
            wanted: tuple[Type, ...] = ("int",) if name == "bit" else _NUMBERS
            args = self._operands(tree.args, f"'{name}'", wanted, at)
            if args is None:
                return None
            if name == "clamp":
                x, low, high = args
                at_least = Call("max", (x, low), span=at.span(tree))
                return Call("min", (at_least, high), span=at.span(tree))
            return Call(name, args, span=at.span(tree))
        condition = self._operand(tree.args[0], "the condition of 'where'", ("bool",), at)
        then = self._expr(tree.args[1], at)
        other = self._expr(tree.args[2], at)
        if condition is None or then is None or other is None:
            return None
        if (then.type == "bool") != (other.type == "bool"):
            label = f"{_A[then.type]} here, {_A[other.type]} there"
            at.error("E0303", "the branches of 'where' differ in type", tree.span, label)
            return None
        return Call(name, (condition, then, other), span=at.span(tree))

    def _argument(self, tree: ast.Expr, at: Context) -> Argument:
        if isinstance(tree, ast.Name):
            meaning = at.meaning(tree.id)
            if isinstance(meaning, Tensor) and meaning.shape and meaning.name not in ("q", "k", "v"):
                return meaning
        return self._expr(tree, at) or WRONG

    def _inline(
        self, definition: Definition, arguments: tuple[Argument, ...], tree: ast.Name | ast.Call, at: Context
    ) -> Expr | None:
        if definition.broken:
            return None
        if len(arguments) != len(definition.params):
            _report_count(tree, definition.name, len(definition.params), at, definition)
            return None
        self._expansion.calls += 1
        if self._expansion.calls > (limit := at_most(MAX_CALLS)):
            if self._expansion.calls == limit + 1:
                report_expansion(tree, at)
            return None
        if definition.name == "window" and definition.tree.span.source is not tree.span.source:
            _check_window(arguments, tree, at)
        return self._expr(definition.tree.value, at.enter(definition, arguments, tree.span))


def _check_window(arguments: tuple[Argument, ...], tree: ast.Name | ast.Call, at: Context) -> None:
    left, right = (number(argument) if isinstance(argument, Expr) else None for argument in arguments)
    if left is None or right is None or left + right >= 0:
        return
    if left < 0 and right < 0:
        instead = "leave the window out"
    elif left < 0:
        instead = f"write '{'causal' if right == 0 else f'kv_idx <= q_pos + {right}'}'"
    else:
        instead = f"write 'kv_idx >= {f'q_pos - {left}' if left else 'q_pos'}'"
    at.error(
        "E0333",
        "window that holds no key",
        tree.span,
        f"its last key is {-left - right} before its first",
        hints=(f"where -1 means no limit, as in flash-attention, {instead}",),
    )


def _constant(value: bool | int | float, tree: ast.Expr, at: Context) -> Expr | None:
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        hints = (
            "positions stay below 2^30: 2147483647 is beyond all of them, where no limit is meant",
            "a number that loaded ones are compared with can be an input: 'input limit: i64[]'",
        )
        at.error("E0507", "integer beyond 62 bits", tree.span, "too large", hints=hints)
        return None
    return Const(value, span=at.span(tree))


def _report_count(
    tree: ast.Name | ast.Call, name: str, wanted: int, at: Context, definition: Definition | None = None
) -> None:
    given = len(tree.args) if isinstance(tree, ast.Call) else 0
    at.error(
        "E0206",
        f"'{name}' takes {_count(wanted, 'argument', 'arguments')}, not {given}",
        tree.span,
        f"{_count(given, 'argument', 'arguments')} given",
        related=(Label(definition.tree.name.span, "defined here"),) if definition else (),
        hints=(f"write '{_usage(definition)}'",) if definition else (),
    )


def _usage(definition: Definition) -> str:
    name, params = definition.tree.name.id, [param.id for param in definition.tree.params]
    return f"{name}({', '.join(params)})" if params else name


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


#: What the result that an epilogue changes is called elsewhere.
_RESULTS = {"acc", "attn", "attn_output", "out", "output", "result"}


def report_misuse(tree: ast.Name, at: Context, *, indices: tuple[ast.Expr, ...] | None = None) -> None:
    """Reports a name that is not a value (or, with indices, not a tensor) here; the last resort is "unknown
    name".
    """
    name, span, scope = tree.id, tree.span, at.scope
    meaning = at.meaning(name)
    if name in ("q", "k", "v"):
        at.error(
            "E0207", f"'{name}' is not a value", span, "a whole tensor", hints=("a score uses 'dot(q, k)'",)
        )
    elif isinstance(meaning, Tensor):
        hints = _show_use(meaning, at)
        at.error("E0207", f"'{name}' is a tensor, not a value", span, "needs a subscript", hints=hints)
    elif meaning is not None and indices is not None:
        at.error("E0207", f"'{name}' cannot be subscripted", span, "not an input")
    elif name in scope.let_places and at.site is None:
        at.error(
            "E0208",
            f"'{name}' is used before it is defined",
            span,
            "not known yet",
            related=(Label(scope.let_places[name].span, "defined here"),),
            hints=("lets are read from top to bottom: move the definition up",),
        )
    elif name in OUTPUTS:
        hints = ("write 'attention' for what o is without an epilogue",) if "attention" in at.also else ()
        at.error("E0207", f"'{name}' is an output", span, "cannot be read", hints=hints)
    elif meaning is not None or name in RESERVED or name in CALLABLE:
        kind = "an intrinsic function" if name in CALLABLE else "an element type"
        label, hints = RESERVED.get(name, kind), value_here(name)
        if "attention" in at.also and name in _RESULTS:
            hints = ("write 'attention' for the result of the attention",)
        at.error("E0207", f"'{name}' is not a value", span, label, hints=hints)
    else:
        known = (*scope.names(), *CALLABLE)
        elsewhere = value_here(name) if indices is None or name == "score" else ()
        near = elsewhere or did_you_mean(name, known)
        if "attention" in at.also and name in _RESULTS:
            near = ("write 'attention' for the result of the attention",)
        at.error(
            "E0203",
            f"unknown name '{name}'",
            span,
            "not an index, dimension, input, param, let or def",
            hints=near or (_declaration_of(name, indices, at.kind),),
        )


def _show_use(tensor: Tensor, at: Context) -> tuple[str, ...]:
    if not tensor.shape:
        return (f"write '{tensor.name}': an input without axes is used by its name",)
    other = "d" if "attention" in at.also else "..."
    axes = ", ".join(_INDICES.get(show(size), other) for size in tensor.shape)
    return (f"write '{tensor.name}[{axes}]', an index for each axis",)


#: The index that walks along an axis, by its size.
_INDICES = {"B": "b", "Hkv": "h // G", "H": "h", "Hkv * G": "h", "M": "q_idx", "N": "kv_idx"}
#: The axis that an index walks along.
_AXES = {"b": "B", "h": "H", "q_idx": "M", "q_pos": "N", "kv_idx": "N"}


def _declaration_of(name: str, indices: tuple[ast.Expr, ...] | None, kind: Type) -> str:
    """Returns the hint that declares an unknown name, with the axes that its indices suggest."""
    dtype, other = ("i32", "f32") if kind == "bool" else ("f32", "i32")  # masks compare positions
    named = f"input {name}: {dtype}"
    if indices is None:
        return f"declare it: '{named}[]' for a number, or 'param {name} in {{...}}' for constants"
    axes = ", ".join(_AXES.get(index.id, "X") if isinstance(index, ast.Name) else "X" for index in indices)
    return f"declare it, as in '{named}[{axes}]' (or {other}, bool)"


def _report_product(tree: ast.Call, at: Context) -> None:
    span, label, hints = tree.span, "write 'dot(q, k)'", _explain_product(tree)
    wrong = [(arg, name) for arg, name in zip(tree.args, ("q", "k"), strict=False) if _name_of(arg) != name]
    match wrong:
        case [(ast.Name(id=unknown) as arg, name)] if len(tree.args) == 2 and at.meaning(unknown) is None:
            span, label, hints = arg.span, f"write '{name}'", ()
    at.error("E0306", "'dot' is the product of q and k only", span, label, hints=hints)


def _name_of(tree: ast.Expr) -> str | None:
    return tree.id if isinstance(tree, ast.Name) else None


def _explain_product(tree: ast.Call) -> tuple[str, ...]:
    if len(tree.args) > 2:
        return ("a product of three tensors, as of 2-simplicial attention, is outside of the language",)
    if "q" in map(_name_of, tree.args) and any(
        name.id == CAT for arg in tree.args for name in list_names(arg)
    ):
        return (f"k comes first, and one input behind it: 'dot(q, {JOINED})'",)
    for arg in tree.args:
        match arg:
            case ast.Subscript():
                return ("a score is of one query and one key: it reads no products of other rows",)
            case ast.Call(function=function):
                return called_here(function.id, ()) or (
                    f"call {function.id} before the attention, and pass what it returns as q and k",
                )
    names = list(map(_name_of, tree.args))
    if len(set(names)) == 2 and None not in names and len({"q", "k"} & set(names)) == 1:
        return ("a sum of two products is one of longer rows: q = cat(q1, q2) and k = cat(k1, k2)",)
    return ()
