"""What one rank computes, as a spec: the same attention over some of the rows, at the places these have.

A rank holds some query rows, in ascending order, and a window of consecutive keys. The derived spec takes
`row_at`, the position of each query counted from the first key of the window, as a sorted input, and
`key_first`, the position of that key. Where positions are only compared, `key_first` cancels: `kv_idx <=
q_pos` becomes `kv_idx <= row_at[q_idx]`, whose tiles are found in closed form. So all that a compiler, a
verifier and the targets know of a spec holds for what a rank runs, and no template knows of ranks.

Other inputs are seen through views: axes that are indexed by a head, a key or a query alone are cut to what
the rank has, and keep their index; others stay whole, and their index is rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from attnc.diagnostics import DiagnosticError, error
from attnc.expr.affine import Affine, affine, normalize
from attnc.expr.construct import MIRRORED, add, compare, conj, maximum, minimum, sub
from attnc.expr.interval import I64, POSITION, range_of
from attnc.expr.nodes import (
    TRUE,
    Call,
    Compare,
    Const,
    Dim,
    Expr,
    Index,
    Load,
    Type,
    children,
    show,
    walk,
)
from attnc.expr.simplify import make
from attnc.model.attention import Attention, ParamValue
from attnc.model.dtypes import DType
from attnc.model.program import Program
from attnc.model.schedule import Schedule
from attnc.model.tensors import Paged, Prefix, Role, Tensor

#: What an axis of a view is: all of the tensor's, or what the rank has of the heads, keys or queries (`rows`
#: by their number, `places` by their position among the keys).
Kind: TypeAlias = Literal["whole", "heads", "keys", "rows", "places"]
#: Whose rows a rank holds: some queries against a window of keys (training, prefill), or all queries against
#: keys that lie anywhere (decoding).
Form: TypeAlias = Literal["rows", "keys"]

#: Inputs that derived specs have, and what they declare. They are in none that does not read them.
TABLES: Mapping[str, str] = {
    "row_at": "i32[M] is sorted",
    "seq_start": "i32[M] is sorted",
    "seq_stop": "i32[M] is sorted",
    "seq_id": "i32[M] is sorted",
    "seq_rows": "i32[M]",
    "key_at": "i32[N] is sorted",
    "key_count": "i32[B]",
    "key_first": "i32[]",
    "head_first": "i32[]",
    "queries_all": "i32[]",
    "keys_all": "i32[]",
    "heads_all": "i32[]",
    "kv_heads_all": "i32[]",
    "sink_most": "f32[]",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An input of the original spec as a rank has it. name: of the derived input."""

    name: str
    tensor: str
    kinds: tuple[Kind, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A derived spec. inputs: what its function takes after q, k and v, in order: a view, or one of `TABLES`;
    grads: the views that have a gradient, in the order of the inputs.
    """

    text: str
    name: str
    inputs: tuple[View | str, ...]
    grads: tuple[View, ...]


def derive(
    program: Program,
    attention: Attention,
    point: Mapping[str, ParamValue],
    target: str,
    form: Form = "rows",
    label: str | None = None,
) -> Derived:
    """Returns the spec of what a rank computes.

    attention: of the program, its params not yet fixed; point: a value for each of them. With the form
    "rows" o has its own type and the gradients of k and v are f32, since they are sums over ranks; with
    "keys" o is f32, and no sink is above `sink_most`, which is minus infinity where it does not count.
    label: of the schedule, where the target has several; None for the first that suits the form. Raises
    DiagnosticError.
    """
    maker = _Maker(attention.sized, form)
    schedule = _schedule(program, attention, target, form, label)
    return maker.make(point, schedule, target)


def keeps_order(attention: Attention) -> bool:
    """Returns whether a rank's rows may be computed against some keys of a window: whether their positions
    and its own are only compared with each other, so that it matters alone which comes first.
    """
    if attention.lengths or attention.softmax.dropout is not None:
        return False
    maker = _Maker(attention.sized, "rows")
    softmax = attention.softmax
    given = (x for x in (softmax.sink, softmax.v_scale) if x is not None)
    exprs = (_normal(maker.expr(attention.sized.score)), maker.mask(), *map(maker.expr, given))
    return all(map(_is_by_order, exprs))


def _is_by_order(expr: Expr) -> bool:
    """Returns whether keys are compared with places alone. Ends of sequences may be places of no key that is
    left, so that only what lies before and behind them is told apart.
    """
    key = Index("kv_idx")
    match expr:
        case Compare(left=left, right=Load(tensor="row_at")) if left == key:
            return True
        case Compare(op="<" | ">=", left=left, right=Load(tensor="seq_start" | "seq_stop")) if left == key:
            return True
        case Load(tensor="row_at" | "seq_start" | "seq_stop" | "key_first"):
            return False
        case Load(indices=indices):
            return all(index == key or _is_by_order(index) for index in indices)
        case _:
            return expr != key and all(map(_is_by_order, children(expr)))


@dataclass(slots=True)
class _Maker:
    attention: Attention
    form: Form
    views: dict[tuple[str, tuple[Kind, ...]], View] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        return self.attention.q.storage.is_packed

    # --- positions ----------------------------------------------------------------------------------------

    def table(self, name: str) -> Expr:
        index = {"M": (Index("q_idx"),), "N": (Index("kv_idx"),), "B": (Index("b"),), "": ()}
        axis = TABLES[name].partition("[")[2].partition("]")[0]
        extents = (Dim(axis),) if axis else ()
        kind: Type = "float" if TABLES[name].startswith("f32") else "int"
        return Load(name, index[axis], extents, kind, is_sorted="sorted" in TABLES[name])

    def length(self, name: str) -> Expr:
        if self.packed:
            if name == "N":
                return sub(self.table("seq_stop"), self.table("seq_start"))
            return self.table("seq_rows")
        whole = self.table("queries_all" if name == "M" else "keys_all")
        if self.form == "keys" and name == "M":
            whole = Dim("M")
        given = self.attention.lengths.get(name)
        if given is None:
            return whole
        return maximum(minimum(self.expr(given), whole), Const(0))

    def index(self, name: str) -> Expr:
        attention = self.attention
        match name, self.form:
            case "h", _:
                return add(Index("h"), self.table("head_first"))
            case "b", _:
                return self.table("seq_id") if self.packed else Index("b")
            case "kv_idx", "keys":
                return self.table("key_at")
            case "q_idx", "keys":
                return Index("q_idx")
            case "q_pos", "keys":
                return add(Index("q_idx"), sub(self.length("N"), self.length("M")))
        if self.packed:
            if name == "kv_idx":
                return sub(Index("kv_idx"), self.table("seq_start"))
            place = sub(self.table("row_at"), self.table("seq_start"))
            return place if name == "q_pos" else sub(place, sub(self.length("N"), self.length("M")))
        if name == "kv_idx":
            return add(Index("kv_idx"), self.table("key_first"))
        own = add(self.table("row_at"), self.table("key_first"))
        apart = sub(self.length("N"), self.length("M"))
        if attention.lengths:  # then row_at counts q_idx, since q_pos differs from sequence to sequence
            return own if name == "q_idx" else add(own, apart)
        return own if name == "q_pos" else sub(own, apart)

    # --- expressions --------------------------------------------------------------------------------------

    def expr(self, expr: Expr) -> Expr:
        match expr:
            case Index(name=name):
                return self.index(name)
            case Dim(name="M" | "N" as name):
                return self.length(name)
            case Dim(name="H"):
                return self.table("heads_all")
            case Dim(name="Hkv"):
                return self.table("kv_heads_all")
            case Load():
                return self._load(expr)
            case _:
                made = make(expr, tuple(self.expr(child) for child in children(expr)))
                return _move_key_left(made) if isinstance(made, Compare) else made

    def _load(self, load: Load) -> Expr:
        kinds = tuple(map(self._kind, load.indices, load.extents))
        view = self._view(load.tensor, kinds)
        indices = tuple(
            self._within(self.expr(index), extent)
            if kind == "whole"
            else Index({"heads": "h", "keys": "kv_idx"}.get(kind, "q_idx"))
            for index, extent, kind in zip(load.indices, load.extents, kinds, strict=True)
        )
        return replace(load, tensor=view.name, indices=indices)

    def _view(self, tensor: str, kinds: tuple[Kind, ...]) -> View:
        """Returns the part of an input that is read. It has the name of the input, unless a table, another
        input or another view has it.
        """
        view = self.views.get((tensor, kinds))
        if view is None:
            taken = {*TABLES, *(known.name for known in self.views.values())}
            taken |= {extra.name for extra in self.attention.extras} - {tensor}
            tried = (tensor, *(f"{tensor}_{number}" for number in range(2, len(taken) + 3)))
            name = next(name for name in tried if name not in taken)
            view = self.views[tensor, kinds] = View(name=name, tensor=tensor, kinds=kinds)
        return view

    def _kind(self, index: Expr, extent: Expr) -> Kind:
        """Says what a rank has of an axis: all of it, where the axis may end before what is cut would."""
        ends = self._ends(extent)
        match index:
            case Index(name="h") if not ends:
                return "heads"
            case Index(name="kv_idx") if self.form == "rows" and not self.packed and ends <= {"N"}:
                return "keys"
            case Index(name="q_idx") if self.form == "rows" and not self.packed and ends <= {"M"}:
                return "rows"
            case Index(name="q_pos") if (
                self.form == "rows" and not self.packed and not self.attention.lengths
            ):
                return "places"
            case _:
                return "whole"

    def _within(self, index: Expr, extent: Expr) -> Expr:
        """Returns an index; -1, which reads 0, where a `length` ends its axis before the tensor does."""
        for name in sorted(self._ends(extent))[:1]:
            inside = compare("<", index, self.length(name))
            return Call("where", (inside, index, Const(-1)))
        return index

    def _ends(self, extent: Expr) -> set[str]:
        names = {node.name for node in walk(extent) if isinstance(node, Dim)} & {"M", "N"}
        return names if self.packed else names & set(self.attention.lengths)

    def mask(self) -> Expr:
        attention, more = self.attention, []
        mask = self.expr(attention.mask)
        if self.packed:
            start, stop = self.table("seq_start"), self.table("seq_stop")
            more += [compare("<=", start, Index("kv_idx")), compare("<", Index("kv_idx"), stop)]
        elif self.form == "rows":
            if "N" in attention.lengths:
                end = compare("<", self.index("kv_idx"), self.length("N"))
                more.append(_move_key_left(end))
            if "M" in attention.lengths:
                more.append(_move_key_left(compare("<", self.index("q_idx"), self.length("M"))))
        return _normal(conj(*more, mask))

    # --- text ---------------------------------------------------------------------------------------------

    def make(self, point: Mapping[str, ParamValue], schedule: Schedule, target: str) -> Derived:
        attention = self.attention
        score, mask, softmax = (
            _clamp_positions(_normal(self.expr(attention.score))),
            self.mask(),
            attention.softmax,
        )
        sink = None if softmax.sink is None else self.expr(softmax.sink)
        if sink is not None and self.form == "keys":
            sink = Call("min", (sink, self.table("sink_most")))
        scale = None if softmax.v_scale is None else self.expr(softmax.v_scale)
        arguments = {"sink": sink, "v_scale": scale, **self._dropout()}
        given = {name: value for name, value in arguments.items() if value is not None}
        lengths = self._own_lengths()
        exprs = [score, mask, *given.values(), *lengths.values()]
        read = {node.tensor: None for expr in exprs for node in walk(expr) if isinstance(node, Load)}
        used = [name for name in TABLES if name in read]
        wanted = attention.grads if self.form == "rows" else ()
        views = [view for view in self.views.values() if view.tensor in wanted]
        grads = tuple(view for view in views if self._is_differentiable(view, score, sink))
        lines = [
            *(f"param {name} in {{{_spell(value)}}}" for name, value in point.items()),
            *self._matrices(),
            *(f"input {name}: {TABLES[name]}" for name in used),
            *(self._declare(view) for view in self.views.values()),
            *(f"length {name} = {show(value)}" for name, value in lengths.items()),
            f"score = {show(score)}",
            *([] if mask == TRUE else [f"mask = {show(mask)}"]),
            f"normalize = softmax{_arguments(given)}",
            *self._outputs(),
            *self._gradients(wanted, grads),
        ]
        place = schedule.span
        assert place is not None, "schedules are written in the spec"
        body = place.text.partition("{")[2]
        text = "\n  ".join([f"attention {attention.name} {{", *lines]) + "\n}\n\n"
        text += f"schedule {attention.name} for {target} {{{body}\n"
        inputs: tuple[View | str, ...] = (*used, *self.views.values())
        return Derived(text=text, name=attention.name, inputs=inputs, grads=grads)

    def _dropout(self) -> dict[str, Expr | None]:
        softmax = self.attention.softmax
        if softmax.dropout is None or softmax.seed is None:
            return {}
        first = self.table("head_first")
        if softmax.first_head is not None:
            first = add(first, self.expr(softmax.first_head))
        return {
            "dropout": self.expr(softmax.dropout), "seed": self.expr(softmax.seed), "first_head": first
        }  # fmt: skip

    def _matrices(self) -> Iterator[str]:
        for tensor in (self.attention.q, self.attention.k, self.attention.v):
            match tensor.storage:
                case Paged(block_table=table, page=page, param=param):
                    pages = self._view(table, ("whole", "whole"))
                    storage = f" via paged({pages.name}, page = {param or page})"
                case Prefix(of=of):
                    storage = f" via prefix({of})"
                case _:
                    storage = ""
            yield f"input {tensor.name}: {tensor.dtype}[{', '.join(self._axes(tensor))}]{storage}"

    def _axes(self, tensor: Tensor) -> list[str]:
        names = {Role.QUERY: "M", Role.KEY: "N"}
        axes = [names.get(role, show(size)) for role, size in zip(tensor.roles, tensor.shape, strict=True)]
        return axes if Role.BATCH in tensor.roles else ["B", *axes]

    def _declare(self, view: View) -> str:
        tensor = self.attention.tensor(view.tensor)
        sizes = (
            self._size(view, axis, kind, size)
            for axis, (kind, size) in enumerate(zip(view.kinds, tensor.shape, strict=True))
        )
        return (
            f"input {view.name}: {tensor.dtype}[{', '.join(sizes)}]{' is sorted' if tensor.is_sorted else ''}"
        )

    def _size(self, view: View, axis: int, kind: Kind, size: Expr) -> str:
        heads = (Dim("H"), self.attention.heads_q)
        match kind:
            case "keys":
                return "N"
            case "rows" | "places":
                return "M"
            case "heads" if size in heads:
                return show(self.attention.heads_q)
            case "whole" if (size == Dim("B") and not self.packed) or isinstance(size, Const):
                return show(size)
            case _:
                return f"{view.name}_size_{axis}"

    def _own_lengths(self) -> dict[str, Expr]:
        if self.form != "keys":
            return {}
        given = self.attention.lengths.get("M")
        return {**({} if given is None else {"M": self.expr(given)}), "N": self.table("key_count")}

    def _outputs(self) -> Iterator[str]:
        o = self.attention.o
        dtype = o.dtype if self.form == "rows" else DType.F32
        yield f"output o: {dtype}[{', '.join(self._axes(o))}]"
        lse = self.attention.lse or replace(o, roles=o.roles[:-1], shape=o.shape[:-1])
        yield f"output lse: f32[{', '.join(self._axes(lse))}]"

    def _gradients(self, wanted: tuple[str, ...], grads: tuple[View, ...]) -> Iterator[str]:
        own = [name for name in ("q",) if name in wanted] + [view.name for view in grads]
        if own:
            yield f"grad {', '.join(own)}"
        summed = [name for name in ("k", "v") if name in wanted]
        if summed:
            yield f"grad {', '.join(summed)}: f32"

    @staticmethod
    def _is_differentiable(view: View, score: Expr, sink: Expr | None) -> bool:
        nodes = (*walk(score), *(walk(sink) if sink is not None else ()))
        return any(isinstance(node, Load) and node.tensor == view.name for node in nodes)


def _schedule(program: Program, attention: Attention, target: str, form: Form, label: str | None) -> Schedule:
    """Returns the schedule of the spec whose kernels a rank runs. DiagnosticError where there is none, and
    where k or v have scales of their columns, or k has columns of another input behind its own, which no
    derived spec says.
    """
    name, rest = attention.name, attention.k_rest
    beside = {f"a scale of columns of {of}": scale for of, scale in attention.column_scales.items()}
    beside |= {} if rest is None else {f"'cat' of k and {rest.tensor}": rest}
    for what, read in beside.items():
        place = read.span or attention.span or program.source.span(0, 0)
        raise DiagnosticError([error("E0602", f"{what} is not shared out over ranks", place)])
    found = [s for s in program.schedules if (s.name, s.target) == (name, target)]
    found = [s for s in found if label in (None, s.label)]
    suited = [s for s in found if s.is_decode == (form == "keys")] or found
    if not suited:
        place = attention.span or program.source.span(0, 0)
        wanted = f"{target} as {label}" if label else target
        message = f"'{name}' has no schedule for {wanted}, which ranks would run"
        raise DiagnosticError(
            [error("E0602", message, place, hints=(f"write 'schedule {name} for {wanted}'",))]
        )
    return suited[0]


def _arguments(given: Mapping[str, Expr]) -> str:
    return f"({', '.join(f'{name} = {show(value)}' for name, value in given.items())})" if given else ""


def _spell(value: ParamValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _normal(expr: Expr) -> Expr:
    made = normalize(expr)

    def collect(node: Expr) -> Expr:
        again = make(node, tuple(collect(child) for child in children(node)))
        if not isinstance(again, Compare):
            return again
        again = _move_key_left(again)
        absolute = any(isinstance(part, Load) and part.tensor == "key_first" for part in walk(again))
        return _clamp_positions(again) if absolute else again

    return collect(made)


def _move_key_left(node: Expr) -> Expr:
    """Drops what both sides of a comparison of sums have, and moves the key to the left: `kv_idx <=
    row_at[...]`; not where a sum would leave 64 bits then.
    """
    if not isinstance(node, Compare) or node.left.type != "int" or node.right.type != "int":
        return node
    difference = affine(node.left) - affine(node.right)
    plus = [(atom, c) for atom, c in difference.terms if c > 0]
    minus = [(atom, -c) for atom, c in difference.terms if c < 0]
    key = Index("kv_idx")
    const = difference.const
    op, sides = node.op, (Affine(tuple(plus), max(const, 0)), Affine(tuple(minus), max(-const, 0)))
    if any(atom == key for atom, _ in minus):
        op, sides = MIRRORED.get(op, op), (sides[1], sides[0])
    if not all(range_of(side.expr).is_within(I64) for side in sides):
        return node  # what stood alone may be at the end of 64 bits
    return compare(op, *(side.expr for side in sides))


def _clamp_positions(expr: Expr) -> Expr:
    if isinstance(expr, Load) and expr.tensor in ("row_at", "key_first"):
        return Call("max", (Call("min", (expr, Const(POSITION))), Const(-POSITION)))
    if not children(expr):
        return expr
    return make(expr, tuple(_clamp_positions(child) for child in children(expr)))
