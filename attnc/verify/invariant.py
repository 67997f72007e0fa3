"""Whether rows keep their bits: what `order = absolute(...)` promises, by running calls.

A *corpus* is some sequences with all of their queries, keys and values. A *call* hands some rows of some of
them to one module, in its storage: a prompt, a chunk of it, the row of a decode step or a few drafts, alone
or in a batch, whose pages lie anywhere. Every call of every module, with every config, has to give each row
the bits that the first call gave it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn import functional as F

from attnc.expr.affine import Q_HI, at_least
from attnc.expr.construct import add, sub
from attnc.expr.nodes import Binary, Const, Dim, Expr, Index, Load, children, show, walk
from attnc.expr.solve import solve
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.tensors import Role, Tensor
from attnc.plan import ir
from attnc.plan.order import promise_of
from attnc.reference import Array
from attnc.support.arguments import DTYPES
from attnc.verify.case import Case
from attnc.verify.check import same_bits
from attnc.verify.data import DenseSizes, draw_qkv
from attnc.verify.problem import Value, draw_extras
from attnc.verify.storage import Lengths, convert, unused_value
from attnc.verify.strategies import all_dims, free_dims, size
from attnc.verify.subject import Subject

_CANONICAL = (Role.BATCH, Role.QUERY, Role.HEAD, Role.FEATURE)
#: Sequences of a corpus.
_COUNT = 3
#: Keys beyond which such a corpus has one segment and a little.
_MANY = 512
#: Numbers that a sum may meet; see `data`.
_STYLES = (("random", "random"), ("rising", "random"), ("falling", "random"), ("huge", "one_hot"))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows first .. last - 1 of a sequence, and its first `keys` keys."""

    sequence: int
    first: int
    last: int
    keys: int

    @property
    def rows(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Call:
    """What one call of a function computes. name: for a reader; room: keys that a cache has place for beyond
    the longest sequence's.
    """

    name: str
    parts: tuple[Stretch, ...]
    seed: int
    room: int = 0

    def __str__(self) -> str:
        return f"{self.name} of {', '.join(f'{part.rows} rows at {part.first}' for part in self.parts)}"


@dataclass(slots=True)
class Corpus:
    """Sequences, and the bits that their rows were given first. lengths: keys of each; data: every input of
    the spec as a dense tensor of all sequences, rows and keys; most: rows of a prompt, where whole ones would
    take too long; None: all.
    """

    attention: Attention
    lengths: tuple[int, ...]
    data: Mapping[str, torch.Tensor]
    most: int | None
    known: dict[tuple[int, str], Known] = field(default_factory=dict)


@dataclass(slots=True)
class Known:
    """What rows of a sequence were given first, and which of `calls` gave it: -1 for none."""

    rows: torch.Tensor
    first: torch.Tensor
    calls: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Agreement:
    """What was found. calls, rows: how many were compared; broken: rows with other bits, a line each."""

    calls: int = 0
    rows: int = 0
    broken: list[str] = field(default_factory=list)


# --- which calls may be compared ----------------------------------------------------------------------------


def list_groups(modules: Sequence[ir.Module]) -> list[list[ir.Module]]:
    """Returns the modules with an order, those together that promise each other the same bits."""
    groups: dict[tuple[str, ...], list[ir.Module]] = {}
    for module in modules:
        if promise := promise_of(module):
            groups.setdefault(promise, []).append(module)
    return list(groups.values())


def looks_back(attention: Attention) -> bool:
    """Returns whether no row sees a key behind its own position, so that a call may end with it."""
    end = solve(attention.mask, var="kv_idx").may_hi
    own = add(sub(add(Q_HI, Dim("N")), Dim("M")), Const(1))
    return end is not None and at_least(own, end)


def counts_from_itself(attention: Attention) -> bool:
    """Returns whether a row's score and mask depend on positions from the sequence's beginning, and not on
    which rows a call has: it reads inputs of its own row and position alone.
    """
    if attention.softmax.dropout is not None:
        return False
    at_home = {(Index("q_idx"), Dim("M")), (Index("q_pos"), Dim("N")), (Index("kv_idx"), Dim("N"))}
    sizes: set[Expr] = {Dim("M"), Dim("N")}
    for expr in attention.expressions:
        if any(name == "q_idx" for name in _positions(expr)) or sizes & set(_outside_loads(expr)):
            return False
        for node in walk(expr):
            if isinstance(node, Load):
                addressed = zip(node.indices, node.extents, strict=True)
                if any(at not in at_home and at[1] in sizes for at in addressed):
                    return False
    return True


def _positions(expr: Expr) -> Iterator[str]:
    return (node.name for node in _outside_loads(expr) if isinstance(node, Index))


def _outside_loads(expr: Expr) -> Iterator[Expr]:
    yield expr
    if not isinstance(expr, Load):
        for child in children(expr):
            yield from _outside_loads(child)


def has_lengths(attention: Attention) -> bool:
    """Returns whether sequences of one call may have different numbers of keys."""
    return "N" in attention.lengths or attention.k.storage.is_packed


def list_paged(attention: Attention) -> tuple[str, ...]:
    """Returns the inputs that lie in pages beside those of k, which the same table finds, such as scales."""
    table, page = attention.k.storage.table, Const(attention.k.storage.rows_of_page)
    key = Index("kv_idx")
    said = (attention.score, attention.mask, *attention.softmax.expressions, attention.k_scale)
    found: dict[str, None] = {}
    for node in (node for expr in said if expr is not None for node in walk(expr)):
        match node:
            case Load(tensor=name, indices=(Load(tensor=found_by, indices=(_, entry)), row, *_)) if table:
                if (found_by, entry, row) == (table, Binary("//", key, page), Binary("%", key, page)):
                    found[name] = None
    return tuple(found)


# --- the calls ----------------------------------------------------------------------------------------------


def make_corpus(attention: Attention, seed: int, *, varies: bool, most: int | None) -> Corpus:
    """Draws a corpus of sequences around the ends of segments. varies: in length; most: rows of a prompt,
    None: all.
    """
    segment, few = attention.segment_keys, most is not None
    several = 2 * segment + segment // 2 + 5
    longest = segment + 37 if few and several > _MANY else several
    lengths = (longest, segment - 3, 43) if varies else (longest,) * _COUNT
    logits, values = _STYLES[seed % len(_STYLES)]
    few_dims = {"B": _COUNT, "M": longest, "N": longest, "H": 2, "Hkv": 1 if few else 2, "G": 2 if few else 4}
    dims = {name: few_dims.get(name, 16) for name in free_dims(attention)}
    dims = {**all_dims(attention, dims), "M": longest, "N": longest, "B": _COUNT}
    at = DenseSizes(
        B=_COUNT,
        M=longest,
        N=longest,
        H=dims["H"],
        Hkv=size(attention.heads_kv, dims),
        D=size(attention.q.shape[-1], dims),
        Dv=size(attention.v.shape[-1], dims),
    )
    paged = list_paged(attention)
    if paged:  # of each sequence as many pages as its longest has
        count = _COUNT * -(-longest // attention.k.storage.rows_of_page)
        numbered = {show(attention.tensor(name).shape[0]) for name in paged}
        dims |= dict.fromkeys(numbered & dims.keys(), count)
    case = Case(dims=dims, seed=seed)
    own = {attention.k.storage.table, *_length_inputs(attention).values()}
    own |= {tensor.storage.ends for tensor in (attention.q, attention.k)}
    names = [tensor.name for tensor in attention.extras if tensor.name not in own]
    drawn: dict[str, Array] = dict(
        draw_extras(attention, case, dims, Lengths(rows={}, tail=0), at, names) if names else {}
    )
    drawn |= draw_qkv(at, dtype=attention.element, seed=seed, logits=logits, values=values)
    data = {
        name: convert(torch.from_numpy(np.array(value)), DType(attention.tensor(name).dtype))
        for name, value in drawn.items()
    }
    data |= {name: data[name].reshape(_COUNT, -1, *data[name].shape[2:]) for name in paged}
    return Corpus(attention, lengths, data, most)


def list_calls(corpus: Corpus) -> Iterator[Call]:
    """Yields calls of the corpus, the one that others are compared with first."""
    attention, lengths, most = corpus.attention, corpus.lengths, corpus.most
    whole = [Stretch(i, 0, n, n) for i, n in enumerate(lengths)]
    if not counts_from_itself(attention):
        same = [part for part in whole if part.last == lengths[0]]
        if attention.softmax.dropout is None:  # which keys it drops follows from the row's place in the call
            same.reverse()
        yield Call("prompt", (whole[0],), 0)
        yield Call("prompts", tuple(same), 1)
        return
    back = looks_back(attention)
    first = [_tail(part, part.rows if most is None else most) for part in whole]
    yield from (Call("prompt", (part,), i) for i, part in enumerate(first))
    for rows in (1, 4):
        yield Call("decoding" if rows == 1 else "drafts", tuple(_tail(part, rows) for part in whole), rows)
        yield Call("decoding alone", (_tail(whole[0], rows),), rows + 10, room=37)
    shortest = min(part.rows for part in first)
    batch = tuple(_tail(part, shortest) for part in whole)
    yield Call("prompts in a batch", tuple(reversed(batch)), 20)
    yield Call("a mixed batch", (first[1], _tail(whole[0], 1), *first[2:]), 21)
    yield Call("whole prompts", tuple(whole if most is None else whole[2:]), 22)
    if back:
        end = lengths[0]
        for last, rows in ((end - 9, 31), (end - 1, 17), (end - end // 3, 1)):
            chunk = Stretch(0, last - rows, last, last)
            yield Call("chunk", (chunk,), 30 + rows, room=5)
            if most is not None and last - rows < end - most:
                yield Call("longer chunk", (Stretch(0, last - rows - 20, last + 2, last + 2),), 50 + rows)


def _tail(part: Stretch, rows: int) -> Stretch:
    return replace(part, first=max(part.last - rows, part.first))


# --- a call's tensors ---------------------------------------------------------------------------------------


def fits(attention: Attention, call: Call) -> bool:
    """Returns whether the storage of q, k and v can hold such a call."""
    rows, keys = {part.rows for part in call.parts}, {part.keys for part in call.parts}
    if attention.k.storage.is_packed and attention.k.storage.ends == attention.q.storage.ends:
        return all(part.rows == part.keys for part in call.parts)
    can_cut_rows = attention.q.storage.is_packed or "M" in attention.lengths
    return (len(rows) == 1 or can_cut_rows) and (len(keys) == 1 or has_lengths(attention))


def inputs_of(attention: Attention, corpus: Corpus, call: Call, device: str) -> dict[str, Value]:
    """Returns the arguments of a call, in the storage that the attention's spec says."""
    rows = max(part.rows for part in call.parts)
    keys = max(part.keys for part in call.parts)
    if has_lengths(attention) and not attention.k.storage.is_packed:
        keys += call.room
    counts = {
        "M": torch.tensor([part.rows for part in call.parts]),
        "N": torch.tensor([part.keys for part in call.parts]),
    }
    values = {name: counts[axis] for axis, name in _length_inputs(attention).items()}
    for tensor, axis in ((attention.q, "M"), (attention.k, "N")):
        if tensor.storage.ends:
            values[tensor.storage.ends] = F.pad(counts[axis].cumsum(0), (1, 0))
    table = None
    if attention.k.storage.is_paged:
        table = draw_pages(keys, attention.k.storage.rows_of_page, counts["N"].tolist(), call.seed)
        values[attention.k.storage.table] = table
    paged = list_paged(attention)
    for tensor in attention.inputs:
        if tensor.name in corpus.data and not tensor.storage.is_part:
            in_pages = tensor.name in (*paged, attention.k.name, attention.v.name)
            pages = (table, attention.k.storage.rows_of_page) if table is not None and in_pages else None
            values[tensor.name] = _cut(tensor, corpus, call, rows, keys, pages)
    return {
        tensor.name: values[tensor.name].to(DTYPES[DType(tensor.dtype)]).contiguous().to(device)
        for tensor in attention.inputs
        if not tensor.storage.is_part
    }


def draw_pages(keys: int, page: int, counts: Sequence[int], seed: int) -> torch.Tensor:
    """Returns a block table with room for so many keys: pages anywhere, and of one sequence each. Entries
    that no sequence needs are no pages.
    """
    columns = -(-keys // page)
    order = torch.randperm(len(counts) * columns + 2, generator=torch.Generator().manual_seed(seed))
    table = order[: len(counts) * columns].view(len(counts), columns)
    needed = torch.tensor([[-(-count // page)] for count in counts])
    return torch.where(torch.arange(columns) < needed, table, -(2**31))


def _cut(
    tensor: Tensor,
    corpus: Corpus,
    call: Call,
    rows: int,
    keys: int,
    pages: tuple[torch.Tensor, int] | None,
) -> torch.Tensor:
    """Returns an input of the sequences, rows and keys of a call, as it is stored. pages: the block table and
    the rows of a page of what lies in pages.
    """
    data = corpus.data[tensor.name]
    if tensor.name not in ("q", "k", "v") and pages is None:
        return _cut_extra(tensor, data, call, rows, keys)
    is_q = tensor.name == "q"
    parts = [
        data[part.sequence, part.first : part.last] if is_q else data[part.sequence, : part.keys]
        for part in call.parts
    ]
    if pages is not None:
        return _in_pages(tensor, parts, *pages)
    order = (Role.BATCH, Role.QUERY if is_q else Role.KEY, Role.HEAD, Role.FEATURE)
    if tensor.storage.ends:
        value = torch.cat(parts)[None]
    else:
        length = rows if is_q else keys
        value = torch.stack([F.pad(part, (0, 0, 0, 0, 0, length - len(part))) for part in parts])
    missing = [axis for axis, role in enumerate(order) if role not in tensor.roles]
    for axis in reversed(missing):
        value = value.squeeze(axis)
    left = [role for role in order if role in tensor.roles]
    return value.permute([left.index(role) for role in tensor.roles])


def _in_pages(tensor: Tensor, parts: Sequence[torch.Tensor], table: torch.Tensor, page: int) -> torch.Tensor:
    shape = (table.numel() + 2, page, *parts[0].shape[1:])
    pool = convert(torch.full(shape, unused_value(tensor, "nan")), DType(tensor.dtype))
    for row, part in zip(table, parts, strict=True):
        for first in range(0, len(part), page):
            own = part[first : first + page]
            pool[int(row[first // page]), : len(own)] = own
    return pool


def _cut_extra(tensor: Tensor, data: torch.Tensor, call: Call, rows: int, keys: int) -> torch.Tensor:
    axes = [show(expr) for expr in tensor.shape]
    sizes = {"B": len(call.parts), "M": rows, "N": keys}
    shape = [sizes.get(name, n) for name, n in zip(axes, data.shape, strict=True)]
    if not sizes.keys() & set(axes):
        return data
    result = torch.zeros(shape, dtype=data.dtype)
    for b, part in enumerate(call.parts):
        to, of = [], []
        for name in axes:
            lengths = {"B": (b, 1, part.sequence), "M": (0, part.rows, part.first), "N": (0, part.keys, 0)}
            at, count, start = lengths.get(name, (0, None, 0))
            to.append(slice(at, None if count is None else at + count))
            of.append(slice(start, None if count is None else start + count))
        result[tuple(to)] = data[tuple(of)]
        if "B" not in axes:
            break
    return result


def _length_inputs(attention: Attention) -> dict[str, str]:
    found = {}
    for axis, expr in attention.lengths.items():
        if not (isinstance(expr, Load) and expr.indices == (Index("b"),)):
            raise ValueError(f"length {axis} = {show(expr)} is no input of its own")
        found[axis] = expr.tensor
    return found


# --- comparing ----------------------------------------------------------------------------------------------


def compare(subjects: Sequence[Subject], seeds: Sequence[int]) -> Agreement:
    """Runs the calls of a corpus for each seed on every subject and config, and compares rows. The first call
    that gives a row other bits is the last.
    """
    found = Agreement()
    attention = subjects[0].variant.attention
    tile = max(config.BLOCK_M for subject in subjects for config in subject.module.CONFIGS)
    most = tile + 6 if subjects[0].device == "cpu" else None
    for seed in seeds:
        varies = any(has_lengths(subject.variant.attention) for subject in subjects)
        corpus = make_corpus(attention, seed, varies=varies, most=most)
        for call in list_calls(corpus):
            for subject in subjects:
                if fits(subject.variant.attention, call):
                    inputs = inputs_of(subject.variant.attention, corpus, call, subject.device)
                    for config in _list_configs(subject):
                        _run(corpus, call, subject, config, inputs, found)
            if found.broken:
                return found
    return found


def _list_configs(subject: Subject) -> Iterator[int]:
    return (number for number in subject.tiles() if number in _own(subject))


def _own(subject: Subject) -> set[int]:
    own = set(subject.module.CONFIGS)
    return {number for number, config in enumerate(subject.configs) if config in own}


def _run(
    corpus: Corpus,
    call: Call,
    subject: Subject,
    config: int,
    inputs: Mapping[str, Value],
    found: Agreement,
) -> None:
    attention = subject.variant.attention
    outputs = _blank(attention, corpus, call, subject.device)
    with torch.no_grad():
        subject.run(inputs, outputs, config)
    label = f" as {subject.plan.label}" if subject.plan is not None and subject.plan.label else ""
    page = attention.k.storage.rows_of_page if attention.k.storage.is_paged else 0
    pages = f", pages of {page}" if page else ""
    where = f"{call}{label}, config {config}{pages}"
    found.calls += 1
    packed = attention.q.storage.is_packed
    for tensor in attention.outputs:
        start = 0
        rows = _canonical(tensor, outputs[tensor.name].cpu(), packed)
        for b, part in enumerate(call.parts):
            own = rows[0, start : start + part.rows] if packed else rows[b, : part.rows]
            start += part.rows
            found.rows += part.rows
            key = (part.sequence, tensor.name)
            length = corpus.lengths[part.sequence]
            if key not in corpus.known:
                shape = (length, *own.shape[1:])
                corpus.known[key] = Known(torch.zeros(shape, dtype=own.dtype), torch.full((length,), -1))
            found.broken += _compare(corpus.known[key], part, own, where, tensor.name)


def _blank(attention: Attention, corpus: Corpus, call: Call, device: str) -> dict[str, torch.Tensor]:
    rows = [part.rows for part in call.parts]
    sizes = {
        Role.BATCH: len(call.parts),
        Role.QUERY: sum(rows) if attention.q.storage.is_packed else max(rows),
        Role.HEAD: corpus.data["q"].shape[2],
        Role.FEATURE: corpus.data["v"].shape[3],
    }
    return {
        tensor.name: torch.full(
            [sizes[role] for role in tensor.roles],
            torch.nan,
            dtype=DTYPES[DType(tensor.dtype)],
            device=device,
        )
        for tensor in attention.outputs
    }


def _compare(known: Known, part: Stretch, own: torch.Tensor, where: str, name: str) -> Iterator[str]:
    first, before = known.first[part.first : part.last], known.rows[part.first : part.last]
    is_new = first < 0
    before[is_new] = own[is_new]
    first[is_new] = len(known.calls)
    known.calls.append(where)
    if same_bits(before, own):
        return
    row = next(i for i in range(part.rows) if not same_bits(before[i], own[i]))
    count = int((before[row] != own[row]).sum())
    of = f"{name} of row {part.first + row} of sequence {part.sequence}"
    yield f"{of} has {count} other numbers in {where} than in {known.calls[int(first[row])]}"


def _canonical(tensor: Tensor, value: torch.Tensor, packed: bool) -> torch.Tensor:
    roles = list(tensor.roles)
    if packed or Role.BATCH not in roles:
        value, roles = value[None], [Role.BATCH, *roles]
    order = [roles.index(role) for role in _CANONICAL if role in roles]
    return value.permute(order)
