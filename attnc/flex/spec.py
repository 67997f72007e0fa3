"""Trace -> typed expressions -> spec text. What is minus infinity moves from the score to the mask."""

from __future__ import annotations

import functools
import keyword
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnc.expr.nodes import (
    FALSE,
    TRUE,
    And,
    Binary,
    Call,
    Compare,
    Const,
    Dim,
    Dot,
    Expr,
    Index,
    InList,
    Load,
    Neg,
    Not,
    Or,
    Ref,
    children,
    rebuild,
    show,
    walk,
)
from attnc.expr.simplify import substitute
from attnc.flex.errors import refuse
from attnc.flex.tape import CAPTURED, Capture, Tape, element_of, operands
from attnc.flex.trace import Trace
from attnc.model.names import INTERFACE, LISTED, RESERVED
from attnc.plan.mask_findings import dense_conditions

#: What attnc.model expands an expression to at most.
_MOST = 4096
_DEEPEST = 128
#: Most operations of an entry that an error is looked for in.
_SHORT = 40


class Expressions:
    """The expressions of a tape's entries.

    score: of the product that a score_mod is given; names: of captures; sizes: of their axes; scalars: names
    of the numbers, by position, that are arguments of the kernel.
    """

    def __init__(
        self,
        tape: Tape,
        score: Expr,
        names: Sequence[str],
        sizes: Sequence[Sequence[str]],
        scalars: Mapping[int, str],
    ) -> None:
        self._tape, self._score, self._names, self._sizes = tape, score, names, sizes
        self._scalars = scalars
        self._made: dict[int, Expr] = {}
        self._counts, self._depths = list[int](), list[int]()
        for entry in tape.entries:
            self._counts.append(1 + sum(self._counts[at] for at in operands(entry)))
            self._depths.append(1 + max((self._depths[at] for at in operands(entry)), default=0))

    def of(self, at: int) -> Expr:
        """Returns the expression of an entry. FlexError for one that is too large."""
        count, depth = self._counts[at], self._depths[at]
        if count > _MOST:
            raise refuse("E0903", f"the mod is an expression of {count} operations", f"at most {_MOST}")
        if depth > _DEEPEST:
            raise refuse("E0903", f"operations nested {depth} deep", f"at most {_DEEPEST}")
        for position in range(at + 1):
            if position not in self._made and self._counts[position] <= _MOST:
                self._made[position] = self._expression(position)
        return self._made[at]

    def is_short(self, at: int) -> bool:
        return self._counts[at] <= _SHORT

    def _expression(self, at: int) -> Expr:
        entry = self._tape.entries[at]
        made = self._made
        match entry:
            case ("index", name):
                return Index(name)
            case ("score",):
                return self._score
            case ("integer", value):
                return Const(value)
            case ("constant", value):
                return Const(value if isinstance(value, bool) else float(value))
            case ("number", slot, _):
                if slot in self._scalars:
                    return Load(self._scalars[slot], (), (), self._tape.types[at])
                return Const(self._tape.numbers[slot])
            case ("size", capture, axis):
                return Dim(self._sizes[capture][axis])
            case ("load", capture, indices):
                extents = tuple(map(Dim, self._sizes[capture]))
                loaded = tuple(made[index] for index in indices)
                return Load(self._names[capture], loaded, extents, self._tape.types[at])
            case ("listed", capture, indices, keys):
                extents = tuple(map(Dim, self._sizes[capture]))
                of_row = tuple(made[index] for index in indices)
                block = Binary("//", Index("kv_idx"), Const(keys))
                return InList(self._names[capture], of_row, extents, block)
            case ("real", operand):
                return made[operand]
            case ("neg", operand):
                found = made[operand]
                return Const(-found.value) if isinstance(found, Const) else Neg(found)
            case ("not", operand):
                return Not(made[operand])
            case ("and", left, right):
                return And((*_operands_of(And, made[left]), *_operands_of(And, made[right])))
            case ("or", left, right):
                return Or((*_operands_of(Or, made[left]), *_operands_of(Or, made[right])))
            case ("call", name, *arguments):
                return Call(name, tuple(made[argument] for argument in arguments))
            case (("==" | "!=" | "<" | "<=" | ">" | ">=") as symbol, left, right):
                return Compare(symbol, made[left], made[right])
            case (symbol, left, right):
                return Binary(symbol, made[left], made[right])
        raise AssertionError(f"no such entry: {entry}")


def _operands_of(kind: Any, expr: Expr) -> tuple[Expr, ...]:
    return expr.operands if isinstance(expr, kind) else (expr,)


def split(score: Expr) -> tuple[Expr, Expr]:
    """Returns a score, and the condition under which it is that of a key that is kept. The score is never
    minus infinity but where that depends on the product of q and k, which no mask does.

    FlexError where minus infinity is computed with.
    """
    finite, kept = _split(score)
    return (Const(0.0) if finite is None else finite), kept


def _split(expr: Expr) -> tuple[Expr | None, Expr]:
    if not any(_is_infinite(node) for node in walk(expr)):
        return expr, TRUE
    match expr:
        case Const(value=value) if value == -math.inf:
            return None, FALSE
        case Call(function="where", args=(condition, then, other)):
            return _split_choice(condition, _split(then), _split(other))
        case Binary(op="+", left=left, right=right) | Call(function="min", args=(left, right)):
            first, first_kept = _split(left)
            second, second_kept = _split(right)
            if first is None or second is None:
                return None, FALSE
            whole = Binary("+", first, second) if isinstance(expr, Binary) else Call("min", (first, second))
            return whole, conjunction(first_kept, second_kept)
        case Binary(op="-", left=left, right=right) if not any(map(_is_infinite, walk(right))):
            first, kept = _split(left)
            return (None if first is None else Binary("-", first, right)), kept
        case Binary(op=("*" | "/") as op, left=left, right=Const(value=factor) as right) if factor > 0:
            first, kept = _split(left)
            return (None if first is None else Binary(op, first, right)), kept
        case Call(function="max", args=(left, right)):
            return _split_larger(_split(left), _split(right))
    nan = any(isinstance(node, Const) and node.value != node.value for node in walk(expr))
    failure = refuse(
        "E0901",
        "a value that is NaN" if nan else "an infinite value that is computed with",
        "only a score can be minus infinity",
        "use -inf as the score of a key that is to be left out: torch.where(condition, score, -inf)",
    )
    failure.shown = show(expr)
    raise failure


def _visits_too_much(mask: Expr, tape: Tape, names: Sequence[str]) -> bool:
    """Returns whether a kernel would visit all tiles for a condition that is read from data."""
    ascending = {name for name, capture in zip(names, tape.captures, strict=True) if capture.is_sorted}
    loads = {node for node in walk(mask) if isinstance(node, Load) and node.tensor in ascending}
    sorted_loads: dict[Expr, Expr] = {load: replace(load, is_sorted=True) for load in loads}
    return next(dense_conditions(substitute(mask, sorted_loads)), None) is not None


def _split_choice(
    condition: Expr, then: tuple[Expr | None, Expr], other: tuple[Expr | None, Expr]
) -> tuple[Expr | None, Expr]:
    (first, first_kept), (second, second_kept) = then, other
    if first is None and second is None:
        return None, FALSE
    if first is None:
        return _kept_where(Not(condition), second, second_kept)
    if second is None:
        return _kept_where(condition, first, first_kept)
    chosen = Call("where", (condition, first, second))
    if first_kept == second_kept == TRUE:
        return chosen, TRUE
    either = Or((conjunction(condition, first_kept), conjunction(Not(condition), second_kept)))
    return _kept_where(either, chosen, TRUE)


def _split_larger(one: tuple[Expr | None, Expr], other: tuple[Expr | None, Expr]) -> tuple[Expr | None, Expr]:
    """Splits the larger of two numbers that are split: the other one where one is minus infinity."""
    (first, first_kept), (second, second_kept) = one, other
    if first is None or second is None:
        return other if first is None else one
    larger: Expr = Call("max", (first, second))
    if second_kept != TRUE:
        larger = Call("where", (second_kept, larger, first))
    if first_kept != TRUE:
        larger = Call("where", (first_kept, larger, second))
    if TRUE in (first_kept, second_kept):
        return larger, TRUE
    return larger, Or((*_operands_of(Or, first_kept), *_operands_of(Or, second_kept)))


def _kept_where(condition: Expr, score: Expr | None, kept: Expr) -> tuple[Expr | None, Expr]:
    """Returns a score that is minus infinity where a condition fails, split. A condition on the product stays
    in the score.
    """
    if score is not None and any(isinstance(node, Dot) for node in walk(condition)):
        return Call("where", (condition, score, Const(-math.inf))), kept
    return score, conjunction(condition, kept)


def _is_infinite(expr: Expr) -> bool:
    return isinstance(expr, Const) and isinstance(expr.value, float) and not math.isfinite(expr.value)


def conjunction(first: Expr, second: Expr) -> Expr:
    """Returns `first and second`."""
    if first == TRUE:
        return second
    if second == TRUE:
        return first
    return FALSE if FALSE in (first, second) else And((*_operands_of(And, first), *_operands_of(And, second)))


#: Element types of q, k and v.
DTYPES: Mapping[torch.dtype, str] = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
#: Element types that k and v may have beside q of 16 bits, as quantised caches do.
NARROW: Mapping[torch.dtype, str] = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
#: What captured tensors of types that specs do not have are converted to when a kernel is called.
CONVERTED: Mapping[torch.dtype, torch.dtype] = {
    torch.float64: torch.float32, torch.int16: torch.int32, torch.int8: torch.int32, torch.uint8: torch.int32,
}  # fmt: skip
_LONG = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLayout:
    """What the spec depends on besides the mods.

    dtype: of q and o, as specs spell it, and of k and v where kept_as does not say theirs
    head_dim, value_dim: their last axes, None for a param D
    grouped: whether K/V heads are shared; order: of o's axes but the last
    scaled: whether the caller gives a scale, the first number of the tape
    lse: whether it is a result; differentiable: whether gradients are wanted; grad: of which of q, k, v
    target: whose kernels; otherwise: another's where that one has none for the mods, "" for none
    steps: whose kernels for few queries are tried before these, the fastest first; none for prompts
    wanted: values of schedule keys
    """

    dtype: str
    kept_as: str = ""
    head_dim: int | None
    value_dim: int | None
    grouped: bool
    order: str = "BHM"
    scaled: bool
    lse: bool
    differentiable: bool
    grad: tuple[str, ...] = ()
    target: str = "triton"
    otherwise: str = ""
    steps: tuple[str, ...] = ()
    wanted: tuple[tuple[str, int], ...] = ()

    @property
    def rows(self) -> tuple[str, str]:
        return str(self.head_dim or "D"), str(self.value_dim or self.head_dim or "D")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The text, the name of its attention, and what its function takes after q, k and v: captures and
    numbers by their positions on the tape. learned: captures whose gradients follow those of q, k and v.
    listed: whether queries visit the blocks of a list.
    """

    text: str
    name: str
    captures: tuple[int, ...]
    numbers: tuple[int, ...]
    learned: tuple[int, ...]
    listed: bool


def write_spec(
    traced: Trace,
    layout: CallLayout,
    *,
    mods: Sequence[Callable[..., Any] | None] = (),
    numbers: Collection[int] = (),
    name: str = "",
    scheduled: bool = True,
) -> Spec:
    """Returns the spec of a trace. mods: for names; numbers: which of the tape's are arguments of the
    function; scheduled: whether it has the schedule that it would get anyhow, where no values are wanted.
    """
    tape = traced.tape
    names = _Names()
    inputs, axes = _inputs(tape, mods, names)
    scalars = {slot: names.new("", "constant") for slot in sorted(numbers)}
    expressions = Expressions(tape, _product(layout, scalars, tape.numbers), inputs, axes, scalars)
    score, kept = split(expressions.of(traced.score))
    mask = conjunction(expressions.of(traced.mask), kept)
    if traced.listed is not None and _visits_too_much(mask, tape, inputs):
        mask = conjunction(expressions.of(traced.listed), mask)
    in_score = {node.tensor for node in walk(score) if isinstance(node, Load)}
    loaded = in_score | {node.tensor for node in walk(mask) if isinstance(node, Load | InList)}
    used = [at for at, input_ in enumerate(inputs) if input_ in loaded]
    passed = [slot for slot, scalar in scalars.items() if scalar in loaded]
    learned = [at for at in used if tape.captures[at].learned and inputs[at] in in_score]
    if not layout.differentiable:
        learned = []
    grads = (*layout.grad, *(inputs[at] for at in learned)) if layout.differentiable else ()
    heads, kv_heads = ("Hkv * G", "Hkv") if layout.grouped else ("H", "H")
    axes_of_o = ", ".join({"H": heads}.get(axis, axis) for axis in layout.order)
    width, value_width = layout.rows
    lets, (score, mask) = _name_shared((score, mask), names)
    title = name or _title(mods)
    lines = [
        f"input q: {layout.dtype}[B, {heads}, M, {width}]",
        *_keys(layout, kv_heads),
        *(_declare(tape.captures[at], inputs[at], axes[at]) for at in used),
        *(f"input {scalars[slot]}: {element_of(tape.numbers[slot])}[]" for slot in passed),
        *(f"let {let} = {show(value)}" for let, value in lets),
        f"score = {show(score)}",
        *([] if mask == TRUE else [f"mask = {show(mask)}"]),
        "normalize = softmax",
        f"output o: {layout.dtype}[{axes_of_o}, {value_width}]",
        *([f"output lse: f32[B, {heads}, M]"] if layout.lse else []),
        *([f"grad {', '.join(grads)}"] if grads else []),
    ]
    body = "\n  ".join(_fold_line(line) for line in lines)
    text = f"attention {title} {{\n  {body}\n}}\n"
    if scheduled or layout.wanted:
        text += f"\n{_schedule(text, title, layout)}"
    return Spec(
        text=text,
        name=title,
        captures=tuple(used),
        numbers=tuple(passed),
        learned=tuple(learned),
        listed=any(isinstance(node, InList) for node in walk(mask)),
    )


def shown_entries(
    traced: Trace, layout: CallLayout, mods: Sequence[Callable[..., Any] | None], entries: Iterable[int]
) -> dict[int, str]:
    """Returns entries of a tape as a spec with these names has them; without long ones."""
    tape = traced.tape
    inputs, axes = _inputs(tape, mods, _Names())
    expressions = Expressions(tape, _product(layout, {}, tape.numbers), inputs, axes, {})
    return {at: show(expressions.of(at)) for at in entries if expressions.is_short(at)}


def _inputs(
    tape: Tape, mods: Sequence[Callable[..., Any] | None], names: _Names
) -> tuple[list[str], list[list[str]]]:
    known = {**tape.named, **_names_of(mods)}
    inputs = [names.new(known.get(id(capture.tensor), ""), "captured") for capture in tape.captures]
    axes = [
        [size or names.new(f"{input_}_{axis}", "size") for axis, size in enumerate(capture.axes)]
        for input_, capture in zip(inputs, tape.captures, strict=True)
    ]
    return inputs, axes


def _schedule(text: str, title: str, layout: CallLayout) -> str:
    from attnc.model.resolve import resolve
    from attnc.plan.fitting import Tiles
    from attnc.plan.targets import schedule_for
    from attnc.source import Source
    from attnc.syntax.parser import parse, prelude

    program = resolve(parse(Source(f"{title}.attn", text)), prelude())
    return schedule_for(program, title, layout.target, wanted=Tiles.from_keys(dict(layout.wanted)))


def _product(layout: CallLayout, scalars: Mapping[int, str], numbers: Sequence[int | float]) -> Expr:
    if layout.scaled:
        factor: Expr = Load(scalars[0], (), (), "float") if 0 in scalars else Const(float(numbers[0]))
        return Binary("*", Dot(), factor)
    width = Dim("D") if layout.head_dim is None else Const(layout.head_dim)
    return Binary("/", Dot(), Call("sqrt", (width,)))


def _keys(layout: CallLayout, heads: str) -> Iterator[str]:
    width, value_width = layout.rows
    dtype = layout.kept_as or layout.dtype
    if width == value_width:
        yield f"input k, v: {dtype}[B, {heads}, N, {width}]"
    else:
        yield f"input k: {dtype}[B, {heads}, N, {width}]"
        yield f"input v: {dtype}[B, {heads}, N, {value_width}]"


def _declare(capture: Capture, name: str, axes: Sequence[str]) -> str:
    fact = " is sorted" if capture.is_sorted else ""
    return f"input {name}: {CAPTURED[capture.tensor.dtype]}[{', '.join(axes)}]{fact}"


def _fold_line(line: str, width: int = 100) -> str:
    if len(line) <= width or not line.startswith(("let", "score", "mask")):
        return line
    head, _, value = line.partition(" = ")
    words, rows = re.split(r"(?<=,) | (?=and |or |\+ )", value), [""]
    for word in words:
        if rows[-1] and len(rows[-1]) + len(word) > width - 8:
            rows.append("")
        rows[-1] += f" {word}" if rows[-1] else word
    return f"{head} = (\n    " + "\n    ".join(rows) + "\n  )"


class _Names:
    """Names of inputs, sizes and lets: the user's own where they are free."""

    def __init__(self) -> None:
        self._taken = {"q", "k", "v", "o", "lse", LISTED}

    def new(self, wanted: str, otherwise: str) -> str:
        plain = re.sub(r"\W", "_", wanted).strip("_")[:40]
        if not plain or not plain.isascii() or plain[0].isdigit() or plain[0] == "_":
            plain = otherwise
        name, count = plain, 0
        while name in self._taken or not _is_free(name):
            name, count = f"{plain}_{count}", count + 1
        self._taken.add(name)
        return name


def _is_free(name: str) -> bool:
    return not (
        name in RESERVED or keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in INTERFACE
    )


def _title(mods: Sequence[Callable[..., Any] | None]) -> str:
    names = (getattr(mod, "__name__", "") for mod in mods if mod is not None)
    plain = [re.sub(r"\W", "_", name, flags=re.ASCII).strip("_") for name in names if name[:1] != "<"]
    return "_".join(dict.fromkeys(("flex", *filter(None, plain))))[:48]  # no reserved name begins so


def _names_of(mods: Sequence[Callable[..., Any] | None]) -> dict[int, str]:
    """Returns names of the tensors that mods see, by identity: variables that they close over, keywords of
    partials, attributes of the objects that they are methods of, globals.
    """
    found: dict[int, str] = {}
    left: list[Any] = [mod for mod in mods if mod is not None]
    seen: set[int] = set()
    while left:
        mod = left.pop()
        if id(mod) in seen:
            continue
        seen.add(id(mod))
        for name, value in _visible(mod):
            if isinstance(value, torch.Tensor):
                found.setdefault(id(value), name)
            elif isinstance(value, tuple | list):
                left += [item for item in value if callable(item)]
            elif callable(value) and not isinstance(value, type):
                left.append(value)
    return found


def _visible(mod: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(mod, functools.partial):
        yield "", mod.func
        yield from mod.keywords.items()
        yield from (("", argument) for argument in mod.args)
    code = getattr(mod, "__code__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, mod.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        yield from ((name, mod.__globals__[name]) for name in code.co_names if name in mod.__globals__)
    owner = getattr(mod, "__self__", None)
    holder = owner if owner is not None else (mod if code is None else None)
    if holder is not None:
        yield from vars(holder).items() if hasattr(holder, "__dict__") else ()
        if isinstance(holder, torch.nn.Module):
            yield from (*holder.named_parameters(), *holder.named_buffers())
        if owner is None and callable(holder):
            yield "", type(holder).__call__


def _name_shared(exprs: Sequence[Expr], names: _Names) -> tuple[list[tuple[str, Expr]], list[Expr]]:
    counts = Counter(node for expr in exprs for node in walk(expr) if children(node))
    chosen: dict[Expr, str] = {}
    repeated = sorted(
        (node for node, count in counts.items() if count > 1 and len(show(node)) >= _LONG),
        key=lambda node: len(show(node)),
    )
    lets: list[tuple[str, Expr]] = []
    for node in repeated:
        within = any(
            counts[other] == counts[node] and other != node and any(part == node for part in walk(other))
            for other in repeated
        )
        if not within:
            name = names.new("", "term")
            lets.append((name, _name_parts(node, chosen)))
            chosen[node] = name
    return lets, [_name_parts(expr, chosen) for expr in exprs]


def _name_parts(expr: Expr, names: Mapping[Expr, str]) -> Expr:
    if expr in names:
        return Ref(names[expr], expr.type)
    return rebuild(expr, tuple(_name_parts(child, names) for child in children(expr)))
