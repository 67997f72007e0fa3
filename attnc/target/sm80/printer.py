"""The CUDA targets: spellings of types, operators, loads, statements, locals and sums in C++, and the way
from the number of a block's tile to its place.

What is known of a tile, and how many rows, heads and sequences there are, is offered to kernels of all
kinds by the same text. `local` prints an offer; `settle` keeps of each the names that the rest of its
block reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import ClassVar

from attnc.expr.construct import ZERO, conj
from attnc.expr.nodes import TRUE, Expr, Index, Search
from attnc.model.attention import Variant
from attnc.model.dtypes import DType
from attnc.plan.access import ALIKE, LastSection, Sequences, TileWalk
from attnc.plan.ir import Fetch, Let, Row, Statement
from attnc.plan.ir.backward import Adjoint
from attnc.plan.signature import RowZero
from attnc.plan.steps import fetches_for
from attnc.target.printer import IN_KEYS, IN_ROWS, REVERSED, AdjointText, Printer, Syntax
from attnc.target.terms import factor, plus

#: What stands around an offer, and between its type, names and values: characters that no text has.
_START, _BETWEEN, _END = "\ue000", "\ue001", "\ue002"
#: Words, braces, and what is no code: comments, strings, numbers, and fields with their dot.
_TOKEN = re.compile(r"[A-Za-z_]\w*|[{}]|[.0-9][\w.]*|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"")
_BRACES = frozenset("{}")


def local(kind: str, values: Mapping[str, object] | None = None, /, **named: object) -> str:
    """Returns `const int x = ..., y = ...;`, as far as it is read. Values have no effects, and may read names
    before them.
    """
    parts = (str(part) for pair in {**(values or {}), **named}.items() for part in pair)
    return f"{_START}{_BETWEEN.join((kind, *parts))}{_END}"


def sizes_of_call(names: Iterable[str], kind: str = "const int") -> Iterator[str]:
    """Yields `const int M = args.M;`: sizes by their names, as far as they are read."""
    if values := {name: f"args.{name}" for name in names}:
        yield local(kind, values)


def settle(text: str) -> str:
    """Declares of every offer what is read of it, and drops the line where nothing is.

    Who reads a local is known to the text alone: the plan's statements, which printers print, and what
    templates say in C++ of their own, of which neither the plan nor Jinja knows the names. To write each use
    as `[[ ... ]]` would let Jinja record it, and nobody could read the kernels in the templates any more. So
    the words of the printed block are looked at: as many as a C++ compiler would for its warning about unused
    variables, and by its rules (a name is read until its block ends; fields, comments and strings are not).
    """
    read: list[set[str]] = [set()]  # by open block, innermost last: what is read between here and its end
    settled: list[str] = []
    end = len(text)
    while True:  # from the end, so that what only unread locals read goes too
        offer = text.rfind(_END, 0, end)
        _note_words(text[offer + 1 : end], read)
        settled.append(text[offer + 1 : end])
        if offer < 0:
            return "".join(reversed(settled))
        end = text.rindex(_START, 0, offer)
        declaration = _declare(text[end + 1 : offer], read[-1])
        if declaration:
            _note_words(declaration, read)
            settled.append(declaration)
        else:
            end = text.rfind("\n", 0, end) + 1
            settled[-1] = settled[-1].partition("\n")[2]


def _note_words(text: str, read: list[set[str]]) -> None:
    tokens = _TOKEN.findall(text)
    end = len(tokens)
    for at in reversed([at for at, token in enumerate(tokens) if token in _BRACES]):
        read[-1].update(tokens[at + 1 : end])
        end = at
        if tokens[at] == "}":
            read.append(set())
        elif len(read) > 1:
            inner = read.pop()
            read[-1] |= inner
    read[-1].update(tokens[:end])


def _declare(offer: str, read: Set[str]) -> str:
    kind, *parts = offer.split(_BETWEEN)
    words, kept = set(read), list[str]()
    for name, value in reversed(list(zip(parts[::2], parts[1::2], strict=True))):
        if name in words:
            kept.insert(0, f"{name} = {value}")
            words.update(_TOKEN.findall(value))
    return f"{kind} {', '.join(kept)};" if kept else ""


#: How elements lie in memory. 16-bit floats are bit patterns: arithmetic on them happens in float.
STORED = {dtype: dtype.facts.cuda for dtype in DType if dtype.facts.cuda}


def stored_type(dtype: DType, variant: Variant) -> str:
    """Returns the C++ type of what a tensor has: `element` where that may be another in another variant."""
    return "element" if variant.element_param and dtype is variant.attention.element else STORED[dtype]


_SHORT_TAIL = "the tiles that start last are short, and so is the tail of the grid."
#: C++ precedences, all comparisons alike: mixing them takes parentheses.
_BINDING = {
    "or": 1, "and": 2,
    "==": 4, "!=": 4, "<": 4, "<=": 4, ">": 4, ">=": 4,
    "+": 8, "-": 8, "*": 10, "/": 10, "//": 10, "%": 10,
    "not": 12, "neg": 12,
}  # fmt: skip


def _search(node: Search, show: Printer) -> str:
    row = node.row or f"args.{node.tensor}_ptr"
    if node.done < len(node.prefix):
        row = f"&{address(row, node.tensor, node.prefix, show, done=node.done)}"
    stride, length = f"args.stride_{node.tensor}_{len(node.prefix)}", show(node.length)
    kind = "_real" if node.value.type == "float" else ""  # an integer would cut off its fraction
    if node.descends:  # from its end on a row ascends
        side = REVERSED[node.side]
        ends = f"{row} + ({length} - 1LL) * {stride}, -{stride}"
        return f"{length} - {side}_bound{kind}({ends}, {length}, {show(node.value)})"
    return f"{node.side}_bound{kind}({row}, {stride}, {length}, {show(node.value)})"


def _number(value: int | float) -> str:
    if isinstance(value, int):
        return f"{value}LL" if abs(value) >= 2**31 else str(value)
    return f"{value!r}f"


SYNTAX = Syntax(
    binding=_BINDING,
    spelling={"and": "&&", "or": "||", "not": "!", "neg": "-", "//": "/"},
    functions={
        "abs:int": "abs", "abs:wide": "abs", "abs": "fabsf",
        "min:int": "min", "min:wide": "min", "min": "min_",
        "max:int": "max", "max:wide": "max", "max": "max_",
        "tanh": "tanh_", "sigmoid": "sigmoid_",
        "where:int": "where<int>", "where:wide": "where<long long>", "where:float": "where<float>",
        "where": "where<bool>",
    },
    function="{}f",
    floor={"//": "floor_div", "%": "floor_mod"},
    floor_by_any={"//": "floor_div_by_any", "%": "floor_mod_by_any"},
    broadcast={"q": "[r]", "kv": ""},
    true="true",
    false="false",
    infinity="INF",
    search=_search,
    number=_number,
    to_float="(float)",
    widen="(long long){}",
    alike="(long long)({})",
    or_nan="where<float>({0} != {0}, {0}, {1})",
)  # fmt: skip

#: Scalars, and values at row r of a tile.
scalar = Printer(SYNTAX)
at_row = Printer(SYNTAX, tile=True)
#: The same where the rows of a tile are keys.
at_key = Printer(replace(SYNTAX, broadcast={"q": "", "kv": "[r]"}), tile=True)


def offset(place: RowZero) -> str:
    """Prints how many elements lie before a row, from the first of its tensor."""
    return " + ".join(f"{index} * args.{stride}" for index, stride in place.terms) or "0"


def address(base: str, tensor: str, indices: tuple[Expr, ...], show: Printer, *, done: int = 0) -> str:
    """Returns an element offset in 64 bits: strides are `long long`, so that every product is.

    The first `done` indices are in the base already.
    """
    terms = [
        f"{factor(show(index))} * args.stride_{tensor}_{axis}"
        for axis, index in enumerate(indices)
        if axis >= done and index != ZERO
    ]
    return f"{base}[{plus(*terms)}]"


def load(fetch: Fetch, dtype: DType, show: Printer = at_row) -> str:
    """Returns the element of a fetch, 0 where its guard is false; floats as float."""
    tensor, row = fetch.load.tensor, fetch.row
    base, done = (f"args.{tensor}_ptr", 0) if row is None else (row.name, len(row.indices))
    element = address(base, tensor, fetch.load.indices, show, done=done)
    if dtype in (DType.F16, DType.BF16):
        element = f"to_float({element})"
    zero = {"float": "0.0f", "bool": "false"}.get(fetch.load.type, "0")
    loaded = element if fetch.guard == TRUE else f"{show(fetch.guard)} ? {element} : {zero}"
    if fetch.load.within is None:
        return loaded
    if dtype is DType.I64:
        least, most = (f"{end}LL" for end in fetch.load.within)
        return f"(int)max(min({loaded}, {most}), {least})"
    least, most = (str(end) for end in fetch.load.within)
    return f"max(min({loaded}, {most}), {least})"


def value_type(fetch: Fetch, dtype: DType) -> str:
    """Returns the C++ type of a loaded value."""
    if fetch.load.within is not None:
        return "int"
    return "float" if dtype.is_float else "int" if dtype is DType.U8 else STORED[dtype]


def statement(
    item: Statement, dtypes: dict[str, DType], sizes: tuple[str, ...], show: Printer = at_row
) -> str:
    """Returns a declaration of the value, if something reads it; a length that shortens a size is an
    assignment.
    """
    match item:
        case Let(name=name, value=value) if name in sizes:
            return f"{name} = {scalar(value)};"
        case Let(value=value):
            kind = {"float": "float", "bool": "bool"}.get(value.type, "int")
            return local(f"const {kind}", {item.name: scalar(value)})
        case Row(tensor=tensor, indices=indices):
            place = address(f"args.{tensor}_ptr", tensor, indices, scalar)
            # 16 bits may be the element type, which variants that share the kernel have each their own of
            kind = "auto" if dtypes[tensor].bytes == 2 else STORED[dtypes[tensor]]
            return local(f"const {kind}* const", {item.name: f"&{place}"})
        case Fetch():
            dtype = dtypes[item.load.tensor]
            return local(f"const {value_type(item, dtype)}", {item.name: load(item, dtype, show)})


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaWalk:
    """The walk of one kernel as text. of_call: what stands before a size that is an argument of the call, ""
    where it is a local of the same name; section: the argument with the heads of a section, "" where heads
    come one after the other; last: the last section. blocks: how many take tiles; size: the rows of a tile,
    where it is not that of one block; parts: the local that says how many tiles share a place, and count as
    heads, "" for one; heads_of_part: that says how many query heads each has, "" for one; farthest_first: how
    far tiles of packed sequences walk, "shrink" or "whole", where the last section begins with those that
    walk farthest; spans: the argument that says into how many spans tiles are divided, which come one after
    the other, the last rows of each first; in_rounds: of a launch for some heads, what makes heads of the
    walk of query heads.
    """

    walk: TileWalk
    of_call: str
    section: str = "SECTION"
    last: LastSection = ALIKE
    blocks: str = "(int)gridDim.x"
    size: str = ""
    parts: str = ""
    heads_of_part: str = ""
    farthest_first: str = ""
    spans: str = ""
    in_rounds: str | None = None

    @property
    def tiles(self) -> str:
        size, rows = self.size or self.walk.size, f"{self.of_call}{scalar(self.walk.rows)}"
        if self.walk.sequences is not None:
            return f"{rows} / {size} + {self.of_call}B + 1"
        return f"{rows} / {size}" if self.walk.is_padded else f"({rows} + {size} - 1) / {size}"

    @property
    def all_heads(self) -> str:
        heads = self.walk.heads if self.walk.sequences is not None else f"B * {self.walk.heads}"
        heads = heads if self.in_rounds is None else f"args.ROUND_HEADS{self.in_rounds}"
        return f"{heads} * {self.parts}" if self.parts else heads

    @property
    def place(self) -> Iterator[str]:
        """From `tile` to b, the head and the first row, and to the length of a packed sequence."""
        tiles, lo, size, head = self.walk.tiles, self.walk.lo, self.size or self.walk.size, self.walk.head
        yield from self._sections
        number, in_head = self._head_and_tile
        if self.parts:
            yield f"const int in_turn = {number};  // a head, and a part of it"
            number = f"in_turn / {self.parts}"
        if self.in_rounds is not None:
            first = f"args.FIRST_HEAD{self.in_rounds}"
            yield f"const int in_call = {first} + {number};  // the head, of all rounds"
            number = "in_call"
        if self.walk.sequences is not None:
            if not self.farthest_first:
                yield f"const int {head} = {number}, number = {in_head};"
            else:
                cu, shrinks = self.walk.sequences.cu_seqlens, str(self.farthest_first == "shrink").lower()
                given = f"args.{cu}_ptr, args.stride_{cu}_0, in_order, {self.of_call}B, {size}"
                yield f"const int {head} = {number}, in_order = {in_head};"
                yield "int number = in_order;  // in the last section, the farthest of long walks come first"
                yield f"if (first_head + heads == {self.all_heads} && {self.heads_of_part} > 1)"
                yield f"    number = find_longest<{shrinks}>({given});"
            yield from self.find_sequence(self.walk.sequences, size)
            return
        tile = f"({tiles} - 1 - {in_head})" if self.walk.last_first else in_head
        if self.spans:
            spans = f"{self.of_call}{self.spans}"
            yield f"const int number = {in_head}, span = ((number + 1) * {spans} - 1) / {tiles};"
            first, end = f"{tiles} * span / {spans}", f"{tiles} * (span + 1) / {spans}"
            yield f"const int span_first = {first}, span_end = {end};"
            tile = "(span_first + span_end - 1 - number)"
        yield f"const int {lo} = {tile} * {size};"
        number = f"({number})" if " + " in number else number
        yield f"const int b = {number} / {self.walk.heads}, {head} = {number} % {self.walk.heads};"

    @property
    def _sections(self) -> Iterator[str]:
        """From `tile` to its section: the first head, how many there are, and the rank among their tiles."""
        tiles, section = self.walk.tiles, f"args.{self.section}"
        if not self._has_sections:
            return
        if not self.section:
            yield f"// The last heads are one section: {_SHORT_TAIL}"
            yield f"const int last = ({self.last.rounds} * {self.blocks} + {tiles} - 1) / {tiles};"
            others = f"max({self.all_heads} - last, 0)"
            yield f"const int others = {others}, first_head = min(tile / {tiles}, others);"
            yield f"const int heads = first_head < others ? 1 : {self.all_heads} - others;"
            yield f"const int rank = tile - first_head * {tiles};"
        elif self.last.rounds:
            yield f"// The last section has more heads: {_SHORT_TAIL}"
            work = f"{tiles} * {self.heads_of_part}" if self.heads_of_part else tiles
            divisor = f"({work})" if self.heads_of_part else work
            last = f"({self.last.rounds} * {self.blocks} + {work} - 1) / {divisor}"
            last = f"min({last}, {self.last.sections} * {section})" if self.last.sections else last
            yield f"const int last = {last};"
            others = f"max(({self.all_heads} - last) / {section}, {self.last.before})"
            yield f"const int others = {others} * {section};"
            yield f"const int first_head = min(tile / ({tiles} * {section}) * {section}, others);"
            yield f"const int heads = first_head < others ? {section} : {self.all_heads} - others;"
            yield f"const int rank = tile - first_head * {tiles};"
        else:
            yield f"const int first_head = tile / ({tiles} * {section}) * {section};"
            heads = f"min({section}, {self.all_heads} - first_head)"
            yield f"const int heads = {heads}, rank = tile % ({tiles} * {section});"

    @property
    def _has_sections(self) -> bool:
        return bool(self.section) or (self.last.rounds > 0 and self.walk.sequences is None)

    @property
    def _head_and_tile(self) -> tuple[str, str]:
        """The head of `tile`, among all of them, and its number among the tiles of that."""
        if self._has_sections:
            return "first_head + rank % heads", "rank / heads"
        if self.walk.sequences is not None:  # blocks are at all heads of a few sequences
            heads = factor(self.all_heads)
            return f"tile % {heads}", f"tile / {heads}"
        return f"tile / {self.walk.tiles}", f"tile % {self.walk.tiles}"

    def find_sequence(self, sequences: Sequences, size: str) -> Iterator[str]:
        """Yields the way from `number` among the tiles of packed sequences, of `size` rows, to the tile's
        sequence.
        """
        cu, count, lo = sequences.cu_seqlens, f"{self.of_call}B", self.walk.lo
        first, end = ("q_first", "q_end") if self.walk.axis == "q" else ("k_first", "k_end")
        begins = f"args.{cu}_ptr[{{}} * args.stride_{cu}_0]"
        found = f"args.{cu}_ptr, args.stride_{cu}_0, number, {count}, {size}"
        behind = f"{self.of_call}{scalar(sequences.rows)}" if self.walk.axis == "q" else first
        yield f"const int sequence = find_sequence({found});"
        yield f"const int {first} = {begins.format('sequence')};"
        yield f"const int {end} = sequence < {count} ? {begins.format('(sequence + 1)')} : {behind};"
        forwards, backwards = f"number - {first} / {size} - sequence", f"{end} / {size} + sequence - number"
        if self.walk.axis == "kv":  # of what follows the last sequence no tile begins before its first row
            backwards = f"max({backwards}, 0)"
        place = f"{lo} = ({backwards if self.walk.last_first else forwards}) * {size}"
        entry = local("const int", b=f"min(sequence, {count} - 1)")
        if self.walk.writes_all_rows:
            yield f"const int q_rows = {end} - {first}, {place};"
            yield "// what follows the last sequence has rows to write, but no queries"
            yield f"int M = sequence < {count} ? q_rows : 0;"
            yield entry
            return
        yield f"const int {place};"
        yield entry
        if self.walk.axis == "q":
            none = "what follows the last sequence has no queries"
            yield f"int M = sequence < {count} ? {end} - {first} : 0;  // {none}"
        else:
            yield f"int N = {end} - {first};  // what follows the last sequence has no keys"


@dataclass(frozen=True, slots=True, kw_only=True)
class SumEnd:
    """Where a sum that each thread has for its rows goes once its tile is done: for `cuda/_sums.cu.jinja`.

    kind: "total" of the tile, of "rows" or of "keys"; condition: under which, "" for always; place: in
    memory; adds: atomically, or is all that there is; loads: statements that the place of a key reads.
    """

    name: str
    kind: str
    condition: str
    place: str
    adds: bool
    loads: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSums(AdjointText):
    """The adjoints of one kernel as text.

    An adjoint that varies along the rows at most is a sum for each row of a thread; one that varies along the
    columns alone is summed column by column and added atomically; any other is written element by element.
    """

    kept: ClassVar[str] = "(p == 0.0f ? 0.0f : {})"

    #: Values along the keys, and the types of what is loaded.
    of_keys: tuple[Fetch, ...]
    dtypes: dict[str, DType]

    def _is_column(self, adjoint: Adjoint) -> bool:
        return not self.is_vector(adjoint) and adjoint.along != ("q", "kv")

    @property
    def has_totals(self) -> bool:
        return any(not adjoint.along for adjoint in self.adjoints)

    @property
    def column_sums(self) -> list[str]:
        return [f"{adjoint.name}_column" for adjoint in self.adjoints if self._is_column(adjoint)]

    @property
    def starts(self) -> Iterator[str]:
        for adjoint in self.adjoints:
            if self.is_vector(adjoint):
                yield f"float {adjoint.name}[ROWS] = {{}};"
            elif adjoint.accumulate == "two_pass":
                yield f"auto* const {adjoint.name}_tile = args.{adjoint.name}_ptr + first_row * args.N;"

    @property
    def steps(self) -> Iterator[str]:
        inside = scalar_in_tile(self.show, IN_ROWS, IN_KEYS)
        for adjoint in self.adjoints:
            sign, term = self.split_sign(adjoint)
            value = term if sign == "+" else f"-({term})" if " " in term else f"-{term}"
            if self.is_vector(adjoint):
                yield f"{adjoint.name}[r] {sign}= {term};"
            elif self._is_column(adjoint):
                yield f"{adjoint.name}_column {sign}= {term};"
            elif adjoint.accumulate == "two_pass":
                row = self.show(Index("q_idx"))
                at = f"{adjoint.name}_tile[(long long){row} * args.N + {self.show(Index('kv_idx'))}]"
                yield f"if ({inside})"
                yield f"    round_to({at}, {value});"
            else:
                guard = "" if adjoint.guard == TRUE else f" && {_and(self.show(adjoint.guard))}"
                yield f"if ({inside}{guard})"
                yield f"    atomic_add(&{self._at(adjoint, self.show)}, {value});"

    @property
    def column_ends(self) -> Iterator[str]:
        for adjoint in self.adjoints:
            if self._is_column(adjoint):
                name = f"{adjoint.name}_column"
                yield f"{name} = column_sum({name});"
                yield f"if (g == 0 && {_and(self.show(conj(IN_ROWS, adjoint.guard)))})"
                yield f"    atomic_add(&{self._at(adjoint, self.show)}, {name});"

    @property
    def ends(self) -> Iterator[SumEnd]:
        for adjoint in self.adjoints:
            if self.is_vector(adjoint):
                yield self._end(adjoint)

    def _end(self, adjoint: Adjoint) -> SumEnd:
        name, whole = adjoint.name, adjoint.accumulate == "two_pass"
        inside: Expr
        if not adjoint.along:
            kind, show, inside = "total", scalar, TRUE
            tile = "q_tiles + q_lo / BLOCK_M" if self.over_q else "kv_tiles + kv_lo / BLOCK_N"
            place = f"(long long)(b * H + h) * {tile}"
        elif self.over_q:
            kind, show, inside, place = "rows", self.show, IN_ROWS, "first_row + q_idx[r]"
        else:
            kind, show, inside, place = "keys", scalar, IN_KEYS, "(long long)(b * H + h) * args.N + kv_idx"
        condition = inside if whole else conj(inside, adjoint.guard)
        loads = fetches_for(self.of_keys, *adjoint.load.indices, adjoint.guard)
        return SumEnd(
            name=name,
            kind=kind,
            condition="" if condition == TRUE else _and(show(condition)),
            place=f"args.{name}_ptr[{place}]" if whole else self._at(adjoint, show),
            adds=not whole,
            loads=() if whole else tuple(statement(fetch, self.dtypes, (), scalar) for fetch in loads),
        )

    def _at(self, adjoint: Adjoint, show: Printer) -> str:
        return address(f"args.{adjoint.name}_ptr", adjoint.name, adjoint.load.indices, show)


class CudaSumsOfWeights(CudaSums):
    """The same where nothing is normalised, and a weight may be 0 whose derivative is not."""

    kept: ClassVar[str] = "(ds == 0.0f ? 0.0f : {})"


def scalar_in_tile(show: Printer, *conditions: Expr) -> str:
    return " && ".join(show(condition) for condition in conditions)


def _and(text: str) -> str:
    return f"({text})" if " || " in text else text
