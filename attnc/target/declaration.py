"""ir.Module -> what its file declares, whatever the target: the call, as `attnc.support.call.Attention` takes
it, the configs of its kernels, and the measured choices among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TypeAlias

from attnc.expr.construct import minimum, mul
from attnc.expr.nodes import Binary, Const, Expr, Load, show
from attnc.model.schedule import DkDvConfig
from attnc.model.tensors import Role, group_size, is_static
from attnc.plan.access import Section
from attnc.plan.decode import MOST_SPLITS, decodes_packed_rows, has_fixed_splits
from attnc.plan.fitting import keys_of_split
from attnc.plan.ir import Arg, Bind, Decode, Forward, Kernel, Module, unified_of
from attnc.plan.ir.backward import Adjoint, BackwardKernel, Gradient, GradientPart
from attnc.plan.ir.kernel import IDLE_GAIN, PARTIAL_TRIPS, Split
from attnc.plan.ir.module import KeyRows
from attnc.plan.signature import feature, is_plain, key_bytes, longest
from attnc.target.call_signature import axis_letters
from attnc.target.lengths import show_length
from attnc.target.quote import literal
from attnc.tuned.choices import Buckets, Tuned

# --- text of declarations


WIDTH = 110


@dataclass(frozen=True, slots=True)
class Words:
    """A string literal of words, over as many lines as it takes."""

    words: Sequence[str]


@dataclass(frozen=True, slots=True)
class Items:
    items: Sequence[Value]


@dataclass(frozen=True, slots=True)
class Table:
    items: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class CallText:
    """A call of a class: arguments by position and by name."""

    name: str
    values: Sequence[Value] = ()
    fields: Mapping[str, Value] | None = None

    @property
    def classes(self) -> set[str]:
        return set(_classes(self))


#: A plain str is code as it is.
Value: TypeAlias = str | Words | Items | Table | CallText


def print_value(value: Value, first: str = "", last: str = "", indent: int = 0) -> list[str]:
    """Returns the lines of `{first}{value}{last}`."""
    room, space = WIDTH - indent, " " * indent
    line = f"{first}{_flat(value)}{last}"
    if len(line) <= room or isinstance(value, str):
        return [f"{space}{line}"]
    if isinstance(value, Words):
        lines = wrap(" ".join(value.words), room - 7, break_long_words=False)
        inner = [f'{space}    "{text} "' for text in lines[:-1]] + [f'{space}    "{lines[-1]}"']
        return [f"{space}{first}(", *inner, f"{space}){last}"]
    opening, closing = _brackets(value)
    inner = [text for name, part in _parts(value) for text in print_value(part, name, ",", indent + 4)]
    return [f"{space}{first}{opening}", *inner, f"{space}{closing}{last}"]


def quote_word(text: str) -> str:
    """Returns a string literal of words that need no escapes."""
    return f'"{text}"'


def in_words(text: str) -> Words:
    """Returns a string literal of words with one blank between them."""
    return Words(text.split(" "))


def section(
    planned: Section | None, heads: str, rows: str, row_bytes: int, *, shared: str = "", joined: str = ""
) -> str:
    """Returns how many of the heads a section has: a size, as text. rows: of the matrices that its programs
    read of a head; shared: what divides them among heads; joined: the room in which all heads are one
    section, "" for none.
    """
    if planned is None:
        return "1"
    if planned.least == planned.most:
        return f"min({heads}, {planned.least})"
    part, whole = planned.cache
    room = f"l2() * {part} // {whole}" if part > 1 else f"l2() // {whole}"
    found = f"{heads}, {rows} * {row_bytes}{shared}, {room}"
    if joined:
        return f"joined_section({found}, {joined})"
    limits = f", {planned.least}, {planned.most}" if planned.most is not None else ""
    return f"section({found}{limits})"


def _flat(value: Value) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Words):
        return quote_word(" ".join(value.words))
    opening, closing = _brackets(value)
    parts = [f"{name}{_flat(part)}" for name, part in _parts(value)]
    comma = "," if isinstance(value, Items) and len(parts) == 1 else ""
    return f"{opening}{', '.join(parts)}{comma}{closing}"


def _brackets(value: Items | Table | CallText) -> tuple[str, str]:
    match value:
        case Items():
            return "(", ")"
        case Table():
            return "{", "}"
        case CallText(name=name):
            return f"{name}(", ")"


def _parts(value: Items | Table | CallText) -> Iterator[tuple[str, Value]]:
    match value:
        case Items(items=items):
            yield from (("", item) for item in items)
        case Table(items=items):
            yield from ((f"{quote_word(name)}: ", item) for name, item in items.items())
        case CallText(values=values, fields=fields):
            yield from (("", item) for item in values)
            yield from ((f"{name}=", item) for name, item in (fields or {}).items())


def _classes(value: Value) -> Iterator[str]:
    if isinstance(value, CallText):
        yield value.name
    if isinstance(value, Items | Table | CallText):
        for _, part in _parts(value):
            yield from _classes(part)


# --- the call


def operator_name(module: Module, code: str) -> str:
    """Returns the name by which torch knows the callable. code: the text of its kernels, without comments.

    It ends with a digest of the code. So two versions of one spec can be loaded side by side, and two modules
    that differ only in the words or the path of the spec have the same name.
    """
    digest = hashlib.sha256(code.encode()).hexdigest()[:8]
    return f"{module.variant.attention.name}_{module.variant.name}_{digest}"


def attention_fields(module: Module, kernel: Forward | Decode, operator: str) -> dict[str, Value]:
    """Fields that are alike for every target, but for launches."""
    attention = module.variant.attention
    fields: dict[str, Value] = {
        "name": quote_word(attention.name),
        "operator": quote_word(operator),
        "inputs": Items([tensor(arg) for arg in module.taken]),
        "outputs": Items([tensor(arg) for arg in module.outputs]),
    }
    if module.kept:
        fields["kept"] = Items([tensor(arg) for arg in module.kept])
    if (unified := unified_of(kernel)) is not None and unified.fallback:
        fields["counters"] = Items([CallText("Tensor", [quote_word("fallbacks"), quote_word("i32[1]")])])
    if module.sizes:
        fields["sizes"] = Table({size.name: quote_word(show(size.value)) for size in module.sizes})
    group = _group(module)
    if group is not None:
        fields["group"] = str(group)
    keys, rows = show(longest(attention, Role.KEY)), show(longest(attention, Role.QUERY))
    if keys != "N":
        fields["longest"] = quote_word(keys)
    if rows != "M":
        fields["work"] = quote_word(f"B * H * {rows}")
    match attention.softmax.dropout:
        case Load(tensor=p):
            fields["probability"] = quote_word(p)
    if kernel.grid.sequences is not None:
        fields["clears"] = "True"
    fields["configs"], fields["tuned"] = "CONFIGS", "TUNED"
    return fields


def tensor(arg: Arg) -> CallText:
    name = arg.tensor.name
    sizes = ", ".join(map(show_axis, arg.axes))
    declared = [
        quote_word(name),
        quote_word(f"{arg.tensor.dtype}[{sizes}]" if arg.axes else str(arg.tensor.dtype)),
    ]
    if arg.tensor.roles:
        declared.append(quote_word(axis_letters(arg)))
    return CallText("Tensor", declared)


def show_axis(bind: Bind) -> str:
    """Returns a size of a tensor as declarations say it: a name, with the number that it has to be."""
    if not bind.name or bind.plus or bind.expected is None:
        return show_size(bind)
    return f"{bind.name}={show(bind.expected)}"


def show_product(sizes: Iterable[Expr]) -> str:
    """Returns the product of sizes as an expression of those of a call."""
    return " * ".join(f"({show(size)})" for size in sizes) or "1"


def show_size(bind: Bind) -> str:
    """Returns a size of a tensor as an expression of the sizes of a call."""
    if bind.name:
        return f"{bind.name} + {bind.plus}" if bind.plus else bind.name
    return "pages" if bind.expected is None else show(bind.expected)


def _group(module: Module) -> int | None:
    attention = module.variant.attention
    if not {"H", "Hkv"} <= {bind.name for arg in module.args for bind in arg.axes}:
        return None
    heads, kv_heads = attention.q.size(Role.HEAD), attention.k.size(Role.HEAD)
    match group_size(heads, kv_heads):
        case Const(value=int() as group):
            return None if is_static(heads) and is_static(kv_heads) else group
        case _:
            return 0


def split_record(module: Module, kernel: Decode, split: Split, most: int | None) -> CallText:
    """Returns how the keys of a sequence are split. most: splits that a grid has room for, None:
    any number.
    """
    attention = module.variant.attention
    keys = show(longest(attention, Role.KEY))
    most_visible = split.max_visible_keys
    visited = keys if most_visible is None else f"min({keys}, {most_visible} + BLOCK_M)"
    if module.lists is not None:  # no more than a list names
        rows = module.listed_rows
        named = mul(module.lists.extents[-1], Const(module.lists.keys)) if rows is None else rows.entries
        if split.by_block:  # as many as the queries of a tile name together
            named = mul(named, minimum(kernel.walk.rows, Const(module.lists.queries)))
        visited = f"min({keys}, {show(named)})"
    dv = feature(attention.v)
    fields: dict[str, Value] = {
        "tiles": quote_word(tiles(module, kernel)),
        "key_tiles": quote_word(f"cdiv({visited}, BLOCK_N)"),
        "key_bytes": str(key_bytes(attention)),
        "width": str(width_of_split(kernel, dv)),
    }
    if keys != "N":
        fields["keys"] = quote_word(keys)
    if kernel.walk.sequences is not None:
        fields["rows"] = quote_word(f"H * {show(kernel.walk.rows)}")
    if split.idle_gain != IDLE_GAIN:  # which support counts with where nothing is said
        fields["idle_gain"] = str(split.idle_gain)
    if split.staging:
        fields["staging"] = Items([str(major) for major in split.staging])
    if most is not None and has_fixed_splits(kernel):
        fields["most"] = str(most)
    if split.trips != PARTIAL_TRIPS:
        fields["trips"] = str(split.trips)
    if split.block_share != 1.0:
        fields["block_share"] = str(split.block_share)
    if split.few:
        fields |= {"columns": str(dv), "few": str(split.few)}
    if split.short:
        fields["short"] = str(split.short)
    if split.most != MOST_SPLITS:
        fields["counted"] = str(split.most)
    if split.segment:
        fields["segment"] = str(split.segment)
    return CallText("Split", fields=fields)


def width_of_split(kernel: Decode, dv: int) -> int:
    """Returns the numbers of a row that a split hands on: o and lse, or the sums of a segment, its maximum
    and denominator; o alone where nothing is normalised.
    """
    if not kernel.softmax.has_statistics:
        return dv
    return dv + (2 if kernel.split is not None and kernel.split.segment else 1)


def size_of_sums(module: Module, blocks: str, columns: int) -> str:
    """Returns the numbers of the sums of segments that blocks keep in memory, where a row has several.
    columns: of o.
    """
    attention = module.variant.attention
    has_several = f"({show(longest(attention, Role.KEY))} > {attention.segment_keys})"
    return f"{blocks} * BLOCK_M * {columns} * {has_several}"


def add_scratch(fields: dict[str, Value], name: str, size: str) -> None:
    """Adds memory of so many numbers to what a call declares."""
    scratch = fields.get("scratch", Table({}))
    assert isinstance(scratch, Table)
    fields["scratch"] = Table({**scratch.items, name: quote_word(size)})


def tiles(module: Module, kernel: Decode) -> str:
    """Returns tiles of the rows of all K/V heads, before a length shortens them."""
    walk, kv_heads = kernel.walk, module.variant.attention.k.size(Role.HEAD)
    heads = show(kv_heads) if walk.group is not None else walk.heads
    rows = show(walk.rows)
    if walk.group is not None:
        rows = show(Binary("*", walk.rows, walk.group))
    if walk.sequences is None:
        each = f"cdiv({rows}, BLOCK_M) * B"
    elif kernel.pack is not None and decodes_packed_rows(module):
        each = f"{show(walk.rows)} * cdiv({show(kernel.pack.group)}, BLOCK_M)"
    elif kernel.pack is not None and kernel.pack.alone and not kernel.pack.padded:
        each = f"({show(walk.rows)} + B + 1) * cdiv({show(kernel.pack.group)}, BLOCK_M)"
    else:
        each = f"({rows} // BLOCK_M + B + 1)"
    return each + ("" if heads == "1" else f" * {heads}")


class BackwardDeclaration:
    """What a backward allocates, and the gradients, alike for every target."""

    def __init__(self, module: Module, makes: list[str]) -> None:
        assert module.backward is not None
        self.module, self._backward, self._makes = module, module.backward, makes
        attention = module.variant.attention
        self._shortened = bool(attention.lengths)
        self.configs = [planned.config for planned in self._backward.kernels]
        self.packs_queries = attention.q.storage.is_packed
        self.queries = show(longest(attention, Role.QUERY))
        self._adds_dq = any(planned.chain.adds_dq is not None for planned in self._backward.kernels)
        #: By input the type of its gradient.
        self._dtypes = {arg.tensor.name: str(attention.gradient_of(arg.tensor).dtype) for arg in module.args}
        self._f32 = attention.f32_grads
        self._columns = feature(attention.o)

    #: Whether a kernel of its own rounds a dq that is summed in memory.
    rounds_dq = False

    def fields(self, sizes: Mapping[str, str], launches: Items) -> CallText:
        named = Table({name: in_words(text) for name, text in sizes.items()})
        return CallText(
            "Backward",
            fields={
                "configs": "BACKWARD_CONFIGS",
                "tuned": "BACKWARD_TUNED",
                **({"sizes": named} if sizes else {}),
                **({"cotangent": quote_word("dresult")} if self._backward.epilogue else {}),
                **({} if self.module.key_rows is None else {"pages": declare_pages(self.module.key_rows)}),
                "made": Items(list(self.list_allocations())),
                "launches": launches,
                "gradients": Items([self._gradient(gradient) for gradient in self._backward.gradients]),
            },
        )

    def list_allocations(self) -> Iterator[CallText]:
        element = str(self.module.variant.attention.element)
        rows = self.module.key_rows
        yield from () if rows is None else declare_key_rows(rows)
        for name, copy in copies_of(self.module).items():
            yield declare_allocation(copy, element, like=name, copied=True)
        summed = paged_inputs(self.module)  # of rows that have keys
        for name in dict.fromkeys(self._makes):
            like = name.removeprefix("d")
            dtype = "f32" if like in self._f32 else ""
            yield declare_allocation(name, dtype, like=like, zero=self.leaves_rows and like not in summed)
        if self._adds_dq:
            yield from self.sum_of_dq()
        if self._backward.epilogue is not None:
            yield declare_allocation("do", like="o")
        if self.stores_rows:
            yield declare_allocation("lse2", f"f32[{self.row_sizes}]")
            yield declare_allocation("delta", f"f32[{self.row_sizes}]")
        in_turn = {
            x.name
            for planned in self._backward.kernels
            if planned.grid.over == "head"
            for x in planned.chain.adjoints
        }
        for adjoint, count in self._adjoints():
            yield self._workspace(adjoint, count, ends_early=adjoint.name in in_turn)

    @property
    def leaves_rows(self) -> bool:
        """Whether kernels write no gradients of some rows: of keys that a length cuts off, or of rows
        behind the last packed sequence.
        """
        return self._shortened or not is_plain(self.module.variant.attention)

    def sum_of_dq(self) -> Iterable[CallText]:
        yield declare_allocation("dq", "f32", like="q", zero=True)

    @property
    def stores_rows(self) -> bool:
        prologues = (planned.prologue for planned in self._backward.kernels)
        return self._backward.preprocess is not None or any(p is not None and p.stored for p in prologues)

    @property
    def row_sizes(self) -> str:
        return f"H, {self.queries}" if self.packs_queries else "B, H, M_padded"

    def _adjoints(self) -> Iterator[tuple[Adjoint, str]]:
        if self._backward.epilogue is not None:
            for adjoint in self._backward.epilogue.adjoints:
                yield adjoint, f"M_padded // {self.configs[0]}.BLOCK_M"
        if self._backward.preprocess is not None:
            for adjoint in self._backward.preprocess.prologue.adjoints:
                yield adjoint, f"M_padded // {self.configs[0]}.BLOCK_M"
        for planned in self._backward.kernels:
            config = planned.config
            over_q = planned.grid.over == "q"
            count = f"M_padded // {config}.BLOCK_M" if over_q else f"cdiv(N, {config}.BLOCK_N)"
            prologue = planned.prologue.adjoints if planned.prologue else ()
            yield from ((adjoint, count) for adjoint in (*planned.chain.adjoints, *prologue))

    def _workspace(self, adjoint: Adjoint, count: str, *, ends_early: bool) -> CallText:
        """Declares the parts of a gradient. ends_early: a program that takes tiles in turn ends with the last
        that its sequence has; others write zeros for each tile past it.
        """
        x = adjoint.load.tensor
        if adjoint.accumulate == "atomic":
            return declare_allocation(adjoint.name, "f32", like=x, zero=True)
        sizes = {"q": "M_padded", "kv": "N", "tile": count, "d": str(self._columns)}
        shape = ", ".join(sizes[axis] for axis in adjoint.along) or count
        part = next(p for g in self._backward.gradients for p in g.parts if p.name == adjoint.name)
        pairs = adjoint.along in (("q", "kv"), ("q", "d"))
        whole = pairs and len(part.places) == 4  # no sum: the gradient itself
        partial = adjoint.along == ("q", "kv") or (
            self._shortened and (ends_early or adjoint.along not in ((), ("tile", "d")))
        )
        dtype = self._dtypes[x] if whole and self._dtypes[x] == self._dtypes["q"] else "f32"
        return declare_allocation(adjoint.name, f"{dtype}[B, H, {shape}]", zero=partial)

    def _gradient(self, gradient: Gradient) -> CallText:
        name = gradient.tensor.name
        rows = self.module.key_rows
        is_f32 = name in self._f32 and not (rows is not None and name in rows.rounded)
        fields: dict[str, Value] = {"type": quote_word("f32")} if is_f32 else {}
        if name in (paged := paged_inputs(self.module)):
            fields["axes"] = quote_word(paged[name])
        elif gradient.parts:
            fields["parts"] = Items([_part(part) for part in gradient.parts])
        elif name not in ("q", "k", "v"):  # what only a condition reads
            fields["zeros"] = "True"
        elif name == "q" and self._adds_dq and not self.rounds_dq:
            fields["scale"] = repr(self._backward.kernels[0].chain.scale)
        return CallText("Gradient", [quote_word(name)], fields)


def paged_inputs(module: Module) -> dict[str, str]:
    """Returns, by the name of an input in pages, the axes of the rows that kernels of gradients see."""
    rows = () if module.key_rows is None else module.key_rows.rows
    return {arg.tensor.name: axis_letters(arg) for arg in rows}


def declare_pages(rows: KeyRows) -> CallText:
    fields: dict[str, Value] = {
        "table": quote_word(rows.table),
        "page": str(rows.page),
        "length": in_words(show_length(rows.length)),
        "axes": Table({arg.tensor.name: quote_word(axis_letters(arg)) for arg in rows.rows}),
    }
    return CallText("Pages", fields=fields)


def declare_key_rows(rows: KeyRows) -> Iterator[CallText]:
    """Yields what is written before kernels: the page of each entry of the table, how many keys each sequence
    has, and rows.
    """
    table = next(arg for arg in rows.args if arg.tensor.name == rows.table)
    sizes = [show_size(axis) for axis in table.axes]
    yield declare_allocation("_pages", f"i32[{', '.join(sizes)}]")
    yield declare_allocation("_keys", f"i32[{sizes[0]}]")
    for arg in rows.rows:
        shape = ", ".join(map(show_size, arg.axes))
        fields: dict[str, Value] = {"type": quote_word(f"{arg.tensor.dtype}[{shape}]")}
        fields["axes"] = quote_word(axis_letters(arg))
        yield CallText("Made", [quote_word(arg.tensor.name)], fields)


def copies_of(module: Module) -> dict[str, str]:
    """Returns, by the name of an input of 8 bits, what its copy of 16 is called, which kernels read."""
    tensors = () if module.conversion is None else module.conversion.tensors
    return {x.stored.tensor.name: f"_{x.stored.tensor.name}" for x in tensors}


def declare_allocation(
    name: str, type_: str = "", *, like: str = "", zero: bool = False, copied: bool = False
) -> CallText:
    fields: dict[str, Value] = {"like": quote_word(like)} if like else {}
    if type_:
        fields["type"] = quote_word(type_)
    if zero:
        fields["zero"] = "True"
    if copied:
        fields["copied"] = "True"
    return CallText("Made", [quote_word(name)], fields)


def _part(part: GradientPart) -> CallText:
    if part.accumulate == "atomic":
        return CallText("Part", [quote_word(part.name)], {"atomic": "True"})
    along = Items([quote_word(axis) for axis in part.along])
    places = Items([quote_word(place) if isinstance(place, str) else str(place) for place in part.places])
    return CallText("Part", [quote_word(part.name)], {"along": along, "places": places})


# --- configs, and measured choices among them


def tuning(module: Module, tuned: Tuned) -> dict[str, object]:
    """Returns the fields about tuning that templates of every target print; tuned: the choices of each
    kernel.
    """
    kernel, backward = module.kernel, module.backward_kernels
    return {
        "chosen": () if kernel.layout is None else tuple(kernel.layout.chosen(kernel.configs[0])),
        "configs": [config_text(kernel, at) for at in range(len(kernel.configs))],
        "backward": {
            name: [backward_config_text(planned, at) for at in range(len(planned.configs))]
            for name, planned in backward.items()
        },
        "table": tuned_table(tuned.get("forward", {})),
        "backward_tables": {name: tuned_table(tuned.get(name, {})) for name in backward},
    }


def config_text(kernel: Kernel, position: int) -> str:
    config, shared = kernel.configs[position], kernel.shared[position]
    values = [str(x) for x in (config.tile_q, config.tile_kv, config.warps, config.stages, shared)]
    if not isinstance(kernel, BackwardKernel) and kernel.layout is not None:
        values += map(str, kernel.layout.chosen(config).values())
    if isinstance(kernel, Decode) and kernel.split is not None:
        count = kernel.configs[position].split_kv
        values.append(str(count if isinstance(count, int) else 0))
        if has_fixed_splits(kernel):
            values.append(str(keys_of_split(kernel.configs[position])))
        if any(kernel.split.staged) and kernel.split.staged[position]:
            values.append(f"staged={kernel.split.staged[position]}")
    return ", ".join(values)


def backward_config_text(planned: BackwardKernel, position: int) -> str:
    """Returns `config_text` with what only kernels of a backward choose."""
    config, text = planned.configs[position], config_text(planned, position)
    if config.maxnreg is not None:
        text += f", maxnreg={config.maxnreg}"
    late = isinstance(config, DkDvConfig) and config.dp == "late"
    return f"{text}, early_dp=False" if planned.dp_order == "both" and late else text


def tuned_table(tuned: Mapping[str, Buckets]) -> str:
    rows = ", ".join(f"{literal(device)}: {tuned[device]!r}" for device in sorted(tuned))
    return f"{{{rows}}}"
