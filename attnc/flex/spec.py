"""Trace -> spec text."""

from __future__ import annotations

import functools
import keyword
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnc.expr.nodes import (
    TRUE,
    Binary,
    Call,
    Const,
    Dim,
    Dot,
    Expr,
    Load,
    Ref,
    children,
    rebuild,
    show,
    walk,
)
from attnc.flex.expressions import Expressions, conjunction, split
from attnc.flex.tape import Capture
from attnc.flex.trace import Trace
from attnc.model.names import INTERFACE, NOT_FUNCTIONS, RESERVED

#: Element types of q, k and v.
DTYPES: Mapping[torch.dtype, str] = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
#: Element types of captured tensors. Others are converted when a kernel is called.
CAPTURED: Mapping[torch.dtype, str] = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f32",
    torch.int32: "i32", torch.int64: "i64", torch.int16: "i32", torch.int8: "i32", torch.uint8: "i32",
    torch.bool: "bool",
}  # fmt: skip
#: What those others are converted to.
CONVERTED: Mapping[torch.dtype, torch.dtype] = {
    torch.float64: torch.float32, torch.int16: torch.int32, torch.int8: torch.int32, torch.uint8: torch.int32,
}  # fmt: skip
_LONG = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the spec depends on besides the mods.

    dtype: of q, k, v and o, as specs spell it; head_dim, value_dim: their last axes, None for a param D
    grouped: whether K/V heads are shared; rows_first: whether o is laid out as [B, M, H, D]
    scaled: whether the caller gives a scale, the first number of the tape
    lse: whether it is a result; differentiable: whether gradients are wanted; grad: of which of q, k, v
    target: whose kernels; otherwise: another's where that one has none for the mods, "" for none
    wanted: values of schedule keys
    """

    dtype: str
    head_dim: int | None
    value_dim: int | None
    grouped: bool = False
    rows_first: bool = False
    scaled: bool = False
    lse: bool = False
    differentiable: bool = False
    grad: tuple[str, ...] = ()
    target: str = "triton"
    otherwise: str = ""
    wanted: tuple[tuple[str, int], ...] = ()

    @property
    def rows(self) -> tuple[str, str]:
        """The last axes of q and v, as a spec spells them."""
        return str(self.head_dim or "D"), str(self.value_dim or self.head_dim or "D")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The text, the name of its attention, and what its function takes after q, k and v: captures and
    numbers by their positions on the tape. learned: captures whose gradients follow those of q, k and v.
    """

    text: str
    name: str
    captures: tuple[int, ...]
    numbers: tuple[int, ...]
    learned: tuple[int, ...]


def write_spec(
    traced: Trace,
    layout: Layout,
    *,
    mods: Sequence[Callable[..., Any] | None] = (),
    numbers: Collection[int] = (),
    name: str = "",
    scheduled: bool = True,
) -> Spec:
    """The spec of a trace. mods: for names; numbers: which of the tape's are arguments of the function;
    scheduled: whether it has the schedule that it would get anyhow, where no values are wanted.
    """
    tape = traced.tape
    known, names = _names_of(mods), _Names()
    inputs = [names.new(known.get(id(capture.tensor), ""), "captured") for capture in tape.captures]
    axes = [
        [size or names.new(f"{input_}_{axis}", "size") for axis, size in enumerate(capture.axes)]
        for input_, capture in zip(inputs, tape.captures, strict=True)
    ]
    scalars = {slot: names.new("", "constant") for slot in sorted(numbers)}
    expressions = Expressions(tape, _product(layout, scalars, tape.numbers), inputs, axes, scalars)
    score, kept = split(expressions.of(traced.score))
    mask = conjunction(expressions.of(traced.mask), kept)
    in_score = {node.tensor for node in walk(score) if isinstance(node, Load)}
    loaded = in_score | {node.tensor for node in walk(mask) if isinstance(node, Load)}
    used = [at for at, input_ in enumerate(inputs) if input_ in loaded]
    passed = [slot for slot, scalar in scalars.items() if scalar in loaded]
    learned = [at for at in used if tape.captures[at].learned and inputs[at] in in_score]
    if not layout.differentiable:
        learned = []
    grads = (*layout.grad, *(inputs[at] for at in learned)) if layout.differentiable else ()
    heads, kv_heads = ("Hkv * G", "Hkv") if layout.grouped else ("H", "H")
    rows = f"M, {heads}" if layout.rows_first else f"{heads}, M"
    width, value_width = layout.rows
    lets, (score, mask) = _shared((score, mask), names)
    title = name or _title(mods)
    lines = [
        f"input q: {layout.dtype}[B, {heads}, M, {width}]",
        *_keys(layout, kv_heads),
        *(_declared(tape.captures[at], inputs[at], axes[at]) for at in used),
        *(f"input {scalars[slot]}: {_number_type(tape.numbers[slot])}[]" for slot in passed),
        *(f"let {let} = {show(value)}" for let, value in lets),
        f"score = {show(score)}",
        *([] if mask == TRUE else [f"mask = {show(mask)}"]),
        "normalize = softmax",
        f"output o: {layout.dtype}[B, {rows}, {value_width}]",
        *([f"output lse: f32[B, {heads}, M]"] if layout.lse else []),
        *([f"grad {', '.join(grads)}"] if grads else []),
    ]
    body = "\n  ".join(_folded(line) for line in lines)
    text = f"attention {title} {{\n  {body}\n}}\n"
    if scheduled or layout.wanted:
        text += f"\n{_schedule(title, layout, gradients=bool(grads), masked=mask != TRUE)}"
    return Spec(text=text, name=title, captures=tuple(used), numbers=tuple(passed), learned=tuple(learned))


def _schedule(title: str, layout: Layout, *, gradients: bool, masked: bool) -> str:
    """The target's own choice. The planner is loaded here: a kernel that is kept is found without it."""
    from attnc.plan.default_schedule import Shape
    from attnc.plan.fitting import Tiles
    from attnc.plan.targets import schedule_for

    shape = Shape(
        dtype=layout.dtype,
        width=max(layout.head_dim or 128, layout.value_dim or 0),
        gradients=gradients,
        masked=masked,
        wanted=Tiles.from_keys(dict(layout.wanted)),
    )
    return schedule_for(title, layout.target, shape)


def _product(layout: Layout, scalars: Mapping[int, str], numbers: Sequence[int | float]) -> Expr:
    """What a score_mod is given: the product, scaled."""
    if layout.scaled:
        factor: Expr = Load(scalars[0], (), (), "float") if 0 in scalars else Const(float(numbers[0]))
        return Binary("*", Dot(), factor)
    width = Dim("D") if layout.head_dim is None else Const(layout.head_dim)
    return Binary("/", Dot(), Call("sqrt", (width,)))


def _keys(layout: Layout, heads: str) -> Iterator[str]:
    width, value_width = layout.rows
    if width == value_width:
        yield f"input k, v: {layout.dtype}[B, {heads}, N, {width}]"
    else:
        yield f"input k: {layout.dtype}[B, {heads}, N, {width}]"
        yield f"input v: {layout.dtype}[B, {heads}, N, {value_width}]"


def _declared(capture: Capture, name: str, axes: Sequence[str]) -> str:
    fact = " is sorted" if capture.is_sorted else ""
    return f"input {name}: {CAPTURED[capture.tensor.dtype]}[{', '.join(axes)}]{fact}"


def _number_type(value: int | float) -> str:
    return "i32" if isinstance(value, int) else "f32"


def _folded(line: str, width: int = 100) -> str:
    """A long line broken after its commas, ands and ors, inside parentheses."""
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
        self._taken = {"q", "k", "v", "o", "lse"}

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
    """What the attention is called, hence its kernels in a profile."""
    names = (getattr(mod, "__name__", "") for mod in mods if mod is not None)
    plain = [re.sub(r"\W", "_", name).strip("_") for name in names if name and not name.startswith("<")]
    title = "_".join(dict.fromkeys(("flex", *plain)))[:48]
    return f"{title}_mod" if title in NOT_FUNCTIONS else title


def _names_of(mods: Sequence[Callable[..., Any] | None]) -> dict[int, str]:
    """Names of the tensors that mods see, by identity: variables that they close over, keywords of partials,
    attributes of the objects that they are methods of, globals.
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


def _shared(exprs: Sequence[Expr], names: _Names) -> tuple[list[tuple[str, Expr]], list[Expr]]:
    """Long expressions that stand in several places, named; and the expressions with their names."""
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
            lets.append((name, _named(node, chosen)))
            chosen[node] = name
    return lets, [_named(expr, chosen) for expr in exprs]


def _named(expr: Expr, names: Mapping[Expr, str]) -> Expr:
    if expr in names:
        return Ref(names[expr], expr.type)
    return rebuild(expr, tuple(_named(child, names) for child in children(expr)))
