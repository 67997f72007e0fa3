"""The plan as text, for developers of the compiler: every field of `ir`, kernels in their order.

    kernel causal_gqa_forward(B, H, M, N) forward_q_kv {
      program { ... }                               what a program computes once
      per q tile {
        load doc_q<q>: int = doc[b, q_idx] ...      once for each row
        hi = min(q_hi + 1, N)                       once for the tile
        for kv_lo in 0 .. hi step BLOCK_N: partial
      }
      step { s = ...; keep = ... }                  every tile of both axes
      ...
    }

Expressions are in a spec's notation. `load x<q>` is a value for each row of the tile, `x<kv>` for each key,
`x<q, kv>` for each score, and a plain `x` a scalar. `[let M, ...]` marks the axis that a size is read from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from textwrap import wrap
from typing import Any, cast

from attnc.expr.nodes import Expr, Load, Node, show
from attnc.model.tensors import Tensor
from attnc.plan.access import Rows, Section, Sequences
from attnc.plan.ir import (
    Arg,
    Axis,
    Bind,
    Decode,
    Epilogue,
    ErrorBound,
    Fetch,
    Forward,
    Grid,
    Kernel,
    Let,
    Loop,
    Module,
    OutputKernel,
    Probabilities,
    Row,
    Softmax,
    Statement,
    Step,
    split_of,
)
from attnc.plan.ir.backward import (
    Adjoint,
    Along,
    Backward,
    BackwardKernel,
    Chain,
    EpilogueGradient,
    Gradient,
    GradientPart,
    Preprocess,
    Prologue,
)
from attnc.plan.ir.kernel import PARTIAL_TRIPS, REST, ColumnScale
from attnc.plan.ir.list_making import KeptBlocks
from attnc.plan.ir.lists import ListWalk
from attnc.plan.ir.module import Conversion, ListedRows
from attnc.plan.layout import BackwardLayout, SharedBytes
from attnc.source import Span

_WIDTH = 110
_TILE: Mapping[Axis, str] = {"q": "BLOCK_M", "kv": "BLOCK_N"}


def module_text(module: Module) -> str:
    """Returns all kernels of a module, forward first."""
    label = f" as {module.label}" if module.label else ""
    head = f"module {module.variant.attention.name} {module.variant.name} for {module.target}{label}"
    return "\n".join(_block(head, _module(module))) + "\n"


def _module(module: Module) -> Iterator[str]:
    for word, arguments in (("input", module.args), ("output", module.outputs), ("kept", module.kept)):
        yield from (f"{word} {_argument(arg)}" for arg in arguments)
    yield from (f"size {line}" for let in module.sizes for line in _statement(let))
    if (margin := module.margin) is not None:
        yield f"margin {_argument(margin.arg)}: slope {margin.slope!r}, share {margin.share!r}"
    yield from () if module.conversion is None else _conversion(module.conversion)
    if (made := module.lists) is not None:
        told = (one.name for one in fields(made) if one.name != "kept")
        yield from _block("lists", (f"{name} = {_value(getattr(made, name))}" for name in told))
        yield from () if made.kept is None else _block("kept blocks", _kept_blocks(made.kept))
    if (rows := module.listed_rows) is not None:
        yield from _block("rows of memory", _listed_rows(rows))
    yield from _kernel(module.kernel)
    if (key_rows := module.key_rows) is not None:
        yield from (f"row {_argument(arg)}" for arg in key_rows.rows)
        yield f"{key_rows.table}, {key_rows.page}: {show(key_rows.length)}, rounded {key_rows.rounded}"
    if module.backward is not None:
        yield from _block("backward", _backward(module.backward))


def _kept_blocks(kept: KeptBlocks) -> Iterator[str]:
    yield from _statements((*kept.program, *kept.of_queries, *kept.of_keys, *kept.of_pairs))
    yield from (f"{end.name} of {end.axis} = {_value(end.value)}" for end in kept.ends)
    named = {
        "lo": kept.lo,
        "hi": kept.hi,
        "may": kept.may,
        "sure": kept.sure,
        "full": kept.full,
        "keep": kept.keep,
    }
    yield from (f"{name} = {_value(value)}" for name, value in named.items())


def _listed_rows(rows: ListedRows) -> Iterator[str]:
    yield f"lines = {_value(rows.lines)}"
    yield f"entries = {_value(rows.entries)}"
    yield from (f"of {rows.queries} queries together",) if rows.queries > 1 else ()
    yield from _statements((*rows.program, *rows.fetches, *(() if rows.page is None else (rows.page,))))
    named = {"indices": rows.indices, "is_query": rows.is_query, "exists": rows.exists, "limit": rows.limit}
    named |= {"keep": rows.keep, "first": rows.first, "page_rows": rows.page_rows}
    yield from (f"{name} = {_value(value)}" for name, value in named.items())


def _conversion(conversion: Conversion) -> Iterator[str]:
    for converted in conversion.tensors:
        yield f"convert {_argument(converted.stored)}: {_argument(converted.made)}"
        yield from () if converted.scale is None else _column_scale(converted.scale)
    if conversion.length is not None:
        yield from _block("of each sequence", _statements(conversion.fetches))
        yield f"keys = {show(conversion.length)}"


# --- arguments


def _argument(arg: Arg) -> str:
    strides = ", ".join(name or "1" for name in arg.strides)
    shape = ", ".join(map(_axis, arg.axes))
    return f"{arg.tensor.name}: {_type(arg.tensor)}[{shape}] strides [{strides}]{_storage(arg.tensor)}"


def _axis(bind: Bind) -> str:
    plus = f" + {bind.plus}" if bind.plus else ""
    expected = "" if bind.expected is None else show(bind.expected)
    if bind.name is None:
        return f"{expected or '_'}{plus}"
    return f"let {bind.name}{plus}{f' == {expected}' if expected else ''}"


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype)


def _storage(tensor: Tensor) -> str:
    kind = tensor.storage
    told = "" if kind.is_plain else f" {kind.name}({', '.join(kind.tables)})"
    return told + (" sorted" if tensor.is_sorted else " descending" if tensor.is_descending else "")


# --- kernels


def _kernel(kernel: Kernel, takes: Iterable[str] = ()) -> Iterator[str]:
    head = f"kernel {kernel.name}({', '.join(kernel.dims)}) {kernel.structure}"
    own: tuple[str, ...]
    match kernel:
        case BackwardKernel():
            own = (*_probabilities(kernel.softmax), *_after_scores(kernel), *_configs(kernel), *takes)
        case Forward():
            own = (*_softmax(kernel.softmax), *_epilogue(kernel.epilogue), *_describe_output(kernel))
        case Decode():
            unified = [] if kernel.unified is None else [_list("unified maximum", _fields(kernel.unified))]
            finish = [*_epilogue(kernel.epilogue), *_epilogue(kernel.of_tile, "epilogue of a tile")]
            own = (*_softmax(kernel.softmax), *unified, *finish, *_describe_output(kernel))
    yield from _block(head, (*_program(kernel), *own))


def _program(kernel: Kernel) -> Iterator[str]:
    yield _grid(kernel.grid)
    yield f"kv_head = {show(kernel.kv_head)}"
    if isinstance(kernel, BackwardKernel):
        yield from _selection(kernel)
    if isinstance(kernel, Decode):
        yield from _splits(kernel)
    if isinstance(kernel, OutputKernel) and (segments := kernel.segments) is not None:
        yield f"segments of {segments.size} keys, {show(segments.lo)} .. {show(segments.hi)}"
    for name, rows in kernel.rows.items():
        if rows != Rows(tensor=name):
            yield _list(f"rows of {name}", _unusual(rows))
    if not isinstance(kernel, BackwardKernel):
        yield f"rows stored = {show(kernel.stored)}"
    if kernel.tma:
        yield "tma"
    yield from _columns(kernel)
    if kernel.program:
        yield from _block("program", _statements(kernel.program))
    outer: Axis = "q" if kernel.regions.axis == "kv" else "kv"
    yield from _block(f"per {outer} tile", _tile(kernel))
    yield from _block(f"step({', '.join(kernel.step.names)})", _step(kernel.step))


def _splits(kernel: Decode) -> Iterator[str]:
    if kernel.pack is not None:
        padded = f", {kernel.pack.padded} rows a query"
        alone = padded if kernel.pack.padded else ", each query alone" if kernel.pack.alone else ""
        yield f"pack query heads, group = {show(kernel.pack.group)}{alone}"
    if kernel.split is not None:
        visible = "all" if (split := kernel.split).max_visible_keys is None else split.max_visible_keys
        told = [f"max_visible_keys = {visible}", f"at most {split.most}", f"idle_gain = {split.idle_gain}"]
        told += [f"trips = {split.trips}"] if split.trips != PARTIAL_TRIPS else []
        told += [f"block_share = {split.block_share}"] if split.block_share != 1.0 else []
        told += [f"few = {split.few}"] if split.few else []
        told += [f"fewest stages up to {split.short} tiles"] if split.short else []
        told += ["in turn"] if split.in_turn else ["by listed blocks"] if split.by_block else []
        told += [f"segments of {split.segment}"] if split.segment else []
        told += [f"staging on {list(split.staging)}"] if split.staging else []
        yield _list(f"split keys {show(split.lo)} .. {show(split.hi)}", told)


def _selection(kernel: BackwardKernel) -> Iterator[str]:
    if kernel.pack is not None:
        yield f"pack query heads, group = {show(kernel.pack.group)}, each query alone"
    if kernel.selected is not None:
        yield f"a program per tile of the keys of one list, in turn: {_show_list_walk(kernel.selected)}"
    if kernel.adds:
        yield f"programs take query after query, and add to sums in memory: {', '.join(kernel.adds)}"
    if kernel.keeps:
        yield "keeps p and ds of each head and key"
    yield from [f"keeps ds of each tile, if there is room: {kernel.kept}"] if kernel.kept else ()
    if kernel.joined:
        parts = (f"{part.first} .. {part.first + part.width}" for part in kernel.joined)
        yield f"columns of rows of do and q, joined: {', '.join(parts)}"


def _show_list_walk(listed: ListWalk) -> str:
    gathered = "gathered keys of " if listed.gathers else ""
    place = f"{listed.memory}[{show(listed.line)}: {show(listed.stride)}]"
    return f"{gathered}blocks of {listed.block} of {place}"


def _columns(kernel: Kernel) -> Iterator[str]:
    if kernel.parts:
        parts = (f"{part.first} .. {part.first + part.width}" for part in kernel.parts)
        yield f"columns of q and k: {', '.join(parts)}"
    if isinstance(kernel, BackwardKernel) and kernel.v_in_k:
        yield "v is columns of k"


def _describe_output(kernel: Forward | Decode) -> Iterator[str]:
    yield from _configs(kernel)
    if kernel.layout is not None:
        yield from _wrap(f"layout {type(kernel.layout).__name__}:", _fields(kernel.layout))
        config = kernel.configs[0]
        yield from _list_resources(kernel.layout.shared_memory(config), kernel.layout.registers(config))
    if isinstance(kernel, Forward) and kernel.roles is not None:
        yield from _block("roles", _roles(kernel.roles))
    yield from _wrap("error bound:", _format_bound(kernel.bound))


def _roles(made: Any) -> Iterator[str]:
    for field in fields(made):
        value = getattr(made, field.name)
        if value is None or value in ((), ""):
            continue
        if is_dataclass(value) and not isinstance(value, Node | Let | Fetch):
            yield from _block(field.name, _roles(value))
        elif isinstance(value, tuple) and isinstance(value[0], Let | Fetch | Row):
            yield from _block(field.name, _statements(value))
        elif isinstance(value, Fetch):
            yield from _block(field.name, _statements([value]))
        else:
            yield from _wrap(f"{field.name} =", [_value(value)])


def _tile(kernel: Kernel) -> Iterator[str]:
    yield from _statements(kernel.outer)
    yield from _statements(kernel.regions.bounds)
    for loop in kernel.regions.loops:
        yield from _loop(loop, kernel.regions.axis)


def _loop(loop: Loop, axis: Axis) -> Iterator[str]:
    kind = {True: "partial", False: "full"}.get(loop.masked) if isinstance(loop.masked, bool) else ""
    if not isinstance(loop.masked, bool):
        kind = f"partial where {show(loop.masked)}"
    guard = "" if loop.guard is None else f", visited where {show(loop.guard)}"
    fill = ", fills rows of keys that no query keeps" if loop.zero_fill else ""
    over = f"{show(loop.start)} .. {show(loop.stop)}"
    if (listed := loop.listed) is not None:
        over = _show_list_walk(listed)
    head = f"for {axis}_lo in {over} step {_TILE[axis]}: {kind}{guard}{fill}"
    yield from _block(head, _statements(loop.tests)) if loop.tests else (head,)


def _step(step: Step) -> Iterator[str]:
    yield from _statements(step.fetches)
    score = "dot(q, k)" if step.score is None else show(step.score)
    yield _line(f"s = {score}", _at(step.score_span))
    if step.uses_kv_idx:
        yield "kv_idx in full tiles too"
    if step.masked_fetches:
        yield from _block("where masked", _statements(step.masked_fetches))
    for bits in step.bits:
        found = f"{show(bits.bit)}, bit {show(bits.place)} of the row, in {show(bits.word)}"
        yield f"bits of {bits.fetch.name} for a tile of keys: {found}"
    if step.keep is not None:
        yield _line(f"keep = {show(step.keep)}", _at(step.keep_span))
    for name, expr in (("kept", step.kept), ("kept_inside", step.kept_inside)):
        if expr is not None:
            yield f"{name} = {show(expr)}"
    if step.v_scale is not None:
        yield f"p = p * {show(step.v_scale)}"
    for scale in step.scales:
        yield from _column_scale(scale)


def _column_scale(scale: ColumnScale) -> Iterator[str]:
    yield from _block(f"{scale.tensor}, of each key and column", _statements(scale.fetches))
    made = f"cat(k, {show(scale.value)})" if scale.tensor == REST else f"{scale.tensor} * {show(scale.value)}"
    yield f"{'k' if scale.tensor == REST else scale.tensor} = {made}"


def _statements(statements: Iterable[Statement]) -> Iterator[str]:
    for item in statements:
        yield from _statement(item)


def _statement(item: Statement) -> Iterator[str]:
    match item:
        case Let(name=name, value=value, comment=comment, span=span):
            yield _line(f"{name} = {show(value)}", comment, _at(span))
        case Row(name=name, tensor=tensor, indices=indices):
            yield f"row {name} = {tensor}[{_exprs(indices)}]"
        case Fetch(name=name, load=load, axes=axes, guard=guard, row=row):
            via = "" if row is None else f" via {row.name}"
            yield f"load {name}{_axes(axes)}: {_describe_type(load)} = {show(load)}{via}{_where(guard)}"


def _describe_type(load: Load) -> str:
    wide = "64" if load.wide else ""
    return f"{load.type}{wide}" if load.within is None else f"{load.type}{wide} in {list(load.within)}"


def _axes(axes: Iterable[Along]) -> str:
    told = ", ".join(axes)
    return f"<{told}>" if told else ""


def _where(guard: Expr) -> str:
    text = show(guard)
    return "" if text == "true" else f" where {text}"


def _grid(grid: Grid) -> str:
    owner = {"q": "q tile and head", "kv": "kv tile and KV head", "head": "head"}[grid.over]
    told = ["persistent"] * grid.persistent + ["longest first"] * grid.longest_first
    return _list(
        "grid", [f"a program per {owner}", *told, *_sequences(grid.sequences), *_section(grid.section)]
    )


def _section(section: Section | None) -> list[str]:
    if section is None:
        return []
    part, whole = section.cache
    count = f"{section.least} to {section.most}" if section.most else f"{section.least} or more"
    return [f"sections of {count} heads in {part}/{whole} of the L2 cache"]


def _sequences(sequences: Sequences | None) -> list[str]:
    if sequences is None:
        return []
    return [f"tiles of the sequences of {sequences.cu_seqlens} in {show(sequences.rows)} rows"]


def _softmax(softmax: Softmax) -> Iterator[str]:
    if softmax.breaks_sticks:
        yield _list(softmax.form, [_scale(softmax)])
        return
    if not softmax.normalises:
        yield "p = s, not normalised"
        yield from () if softmax.v_scale is None else (f"o = o * ({show(softmax.v_scale)})",)
        return
    told = [f"{softmax.kind}", f"rescale = {softmax.rescale}"]
    told += [f"threshold = {softmax.threshold:g}"] if softmax.threshold else []
    told += [f"headroom = {softmax.headroom:g}"] if softmax.headroom else []
    told += [_scale(softmax), *["safe everywhere"] * softmax.safe_everywhere]
    yield _list(softmax.form, told)
    if softmax.sink is not None:
        yield f"sink = {show(softmax.sink)}"
    if softmax.v_scale is not None:
        yield f"o = o * {show(softmax.v_scale)}"
    yield from _dropout(softmax)


def _epilogue(epilogue: Epilogue | None, name: str = "epilogue") -> Iterator[str]:
    if epilogue is not None:
        lines = (*_statements(epilogue.statements), f"o = {show(epilogue.value)}")
        yield from _block(name, lines)


def _probabilities(softmax: Probabilities) -> Iterator[str]:
    if softmax.breaks_sticks:
        yield _list(softmax.form, ["p = exp2(s - left - what is left behind)", _scale(softmax)])
        return
    form = "" if softmax.form in ("softmax", "none") else f"{softmax.form}: "
    yield f"{form}p = exp2(s - lse2), {_scale(softmax)}" if softmax.normalises else "p = s"
    yield from _dropout(softmax)


def _scale(softmax: Probabilities) -> str:
    return "exponents in base 2" if softmax.scale is None else f"scale = {softmax.scale!r}"


def _dropout(softmax: Probabilities) -> Iterator[str]:
    if softmax.dropout is not None:
        drawn = softmax.dropout
        yield f"dropout p = {show(drawn.p)}, seed = {show(drawn.seed)}, head = {show(drawn.head)}"


def _list_resources(buffers: Mapping[str, int], registers: Mapping[str, int]) -> Iterator[str]:
    for what, sizes in (("bytes of shared memory", buffers), ("registers of a thread", registers)):
        yield _list(what, [f"{name} {size}" for name, size in sizes.items()])


def _configs(kernel: Kernel) -> Iterator[str]:
    knobs = [config.texts() for config in kernel.configs]
    common = {key: value for key, value in knobs[0].items() if all(x.get(key) == value for x in knobs)}
    yield from _wrap("configs:", [f"{key} = {value}" for key, value in common.items()])
    for i, own in enumerate(knobs):
        told = [f"{key} = {value}" for key, value in own.items() if key not in common]
        split = split_of(kernel)
        staged = [] if split is None else [f"staged = {split.staged[i]}"]
        yield _list(f"  {i}", [*told, f"shared = {_shared(kernel.shared[i])}", *staged])


def _shared(shared: SharedBytes) -> str:
    if isinstance(shared, int):
        return str(shared)
    return f"{{{', '.join(f'{major}.x: {size}' for major, size in shared)}}}"


def _format_bound(bound: ErrorBound) -> list[str]:
    return [told for told in _unusual(bound) if not told.startswith("intrinsics")]


# --- the backward


def _backward(backward: Backward) -> Iterator[str]:
    yield from _epilogue_gradient(backward.epilogue) if backward.epilogue else ()
    yield from _preprocess(backward.preprocess) if backward.preprocess else ()
    for planned in backward.all_kernels:
        yield from _kernel(planned, _takes(planned, backward.layout))
    yield from _block("in rounds", backward.rounds.lines) if backward.rounds else ()
    yield from map(_gradient, backward.gradients)
    if backward.layout is not None:
        yield from _wrap(f"layout {type(backward.layout).__name__}:", _fields(backward.layout))
    bound = backward.bound
    told = [f"tile = {bound.tile}", f"min_tile = {bound.min_tile}", f"scale = {bound.scale!r}"]
    yield from _wrap("error bound:", [*told, *(f"forward.{line}" for line in _format_bound(bound.forward))])


def _preprocess(made: Preprocess) -> Iterator[str]:
    def parts() -> Iterator[str]:
        yield _list("grid", ["a program per q tile and head", *_sequences(made.sequences)])
        if made.program:
            yield from _block("program", _statements(made.program))
        yield from _prologue(made.prologue)

    yield from _block(f"kernel {made.name}({', '.join(made.dims)}) preprocess", parts())


def _epilogue_gradient(made: EpilogueGradient) -> Iterator[str]:
    def parts() -> Iterator[str]:
        yield _list("grid", ["a program per q tile and head", *_sequences(made.sequences)])
        if made.program:
            yield from _block("program", _statements(made.program))
        yield from _statements((*made.rows, *made.fetches))
        yield f"d attention = d o * ({show(made.slope)}), of {show(made.stored)} rows"
        yield from (_adjoint(adjoint, "d o") for adjoint in made.adjoints)

    yield from _block(f"kernel {made.name}({', '.join(made.dims)}) epilogue", parts())


def _after_scores(planned: BackwardKernel) -> Iterator[str]:
    yield from _block(f"chain rule, makes {', '.join(planned.makes) or 'no tile'}", _chain(planned.chain))
    if planned.prologue is not None:
        yield from _prologue(planned.prologue)
    if planned.roles is not None:
        yield from _block("roles", _roles(planned.roles))


def _takes(planned: BackwardKernel, layout: BackwardLayout | None) -> Iterator[str]:
    if layout is not None:
        config, name = planned.configs[0], planned.kind
        yield from _list_resources(layout.shared_memory(config, name), layout.registers(config, name))


def _chain(chain: Chain) -> Iterator[str]:
    yield from _statements(chain.shared)
    if chain.factor is not None:
        yield f"times {show(chain.factor)} at the end"
    slope = "" if chain.slope is None else f" * ({show(chain.slope)})"
    yield f"d dot = ds * {chain.scale!r}{slope}"
    if chain.adds_dq is not None:
        yield f"dq += d dot @ k, {chain.adds_dq}"
    yield from map(_adjoint, chain.adjoints)


def _prologue(prologue: Prologue) -> Iterator[str]:
    def parts() -> Iterator[str]:
        yield f"delta, lse2 {'stored' if prologue.stored else 'in registers'}"
        if prologue.sink is not None:
            yield f"sink = {show(prologue.sink)}"
        yield from map(_adjoint, prologue.adjoints)

    yield from _block("per row first", parts())


def _adjoint(adjoint: Adjoint, given: str = "ds") -> str:
    of = f"of {show(adjoint.load)}{_where(adjoint.guard)}"
    term = f"{given} * ({show(adjoint.value)}) {of}"
    return f"{adjoint.name}{_axes(adjoint.along)} += {term}, {adjoint.accumulate}"


def _gradient(gradient: Gradient) -> str:
    tensor = gradient.tensor
    made = " + ".join(map(_part, gradient.parts)) or "a kernel's result"
    return f"gradient of {tensor.name}: {_type(tensor)}[{_exprs(tensor.shape)}] = {made}"


def _part(part: GradientPart) -> str:
    places = "" if part.accumulate == "atomic" else f" at [{', '.join(map(str, part.places))}]"
    return f"{part.name}{_axes(part.along)} {part.accumulate}{places}"


# --- lines


def _block(head: str, lines: Iterable[str]) -> Iterator[str]:
    inside = tuple(lines)
    if not inside:
        yield f"{head} {{}}"
        return
    yield f"{head} {{"
    yield from (f"  {line}" for line in inside)
    yield "}"


def _list(head: str, told: Iterable[str]) -> str:
    return f"{head}: {', '.join(told)}"


def _wrap(head: str, told: Iterable[str]) -> Iterator[str]:
    text = f"{head} {', '.join(told)}"
    lines = wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    yield from (line if i == 0 else f"    {line}" for i, line in enumerate(lines))


def _line(text: str, *comments: str) -> str:
    told = ", ".join(filter(None, comments))
    return f"{text}  // {told}" if told else text


def _at(span: Span | None) -> str:
    return "" if span is None else f"line {span.line}"


def _exprs(exprs: Iterable[Expr]) -> str:
    return ", ".join(map(show, exprs))


def _fields(made: Any) -> list[str]:
    return [f"{field.name} = {_value(getattr(made, field.name))}" for field in fields(made)]


def _unusual(made: Any) -> list[str]:
    named = zip(fields(made), _fields(made), strict=True)
    return [told for field, told in named if getattr(made, field.name) != field.default]


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case Enum():
            return str(value.value)
        case Node():
            return show(cast(Expr, value))
        case tuple():
            return f"[{', '.join(map(_value, value))}]"
        case frozenset():  # whose order is another in every process
            return f"[{', '.join(sorted(map(_value, value)))}]"
        case _ if is_dataclass(value):
            return f"{type(value).__name__}({', '.join(_fields(value))})"
        case _:
            return str(value)
