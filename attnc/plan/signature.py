"""The callable's arguments: which tensor is passed for a q, k, v or o, which axis binds which size, which
strides a kernel takes.

dense    row i of sequence b is row i of batch entry b.
ragged   the sequences follow each other; row i of sequence b is row cu_seqlens[b] + i.
paged    the tensor passed holds pages: its batch axis counts pages, its key axis the rows of a page, whatever
         the order of the axes. Declared as k: [B, N, Hkv, D], it is [pages, page, Hkv, D]; declared as
         [B, Hkv, N, D], it is [pages, Hkv, page, D]. Row j of sequence b is row j % page of page
         block_table[b, j // page]; N is the number of table columns times the page size.
prefix   v is the first columns of k: no argument, no memory of its own.

Every stride is free but that of the features, so any view of a cache that an engine hands over will do.

The number of query heads is always the size H in a kernel, however the spec spells it (`H`, `Hkv * G`, or
`G` over one KV head); G is then H // Hkv. `normalise` rewrites the attention's expressions accordingly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from attnc.effort import memo_by_object
from attnc.expr.nodes import Binary, Const, Dim, Expr, Index, InList, walk
from attnc.expr.simplify import substitute
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.names import DIMS
from attnc.model.tensors import Paged, Prefix, Role, Tensor, group_size, same_size, size_loads
from attnc.plan.ir import Arg, Bind, Let
from attnc.plan.ir.kernel import DotPart
from attnc.plan.names import own_sizes
from attnc.plan.width import bound_places, saturate_far

# --- arguments


H, HKV = Dim("H"), Dim("Hkv")


@memo_by_object
def normalise(attention: Attention) -> Attention:
    """Rewrites an attention so that its query-head count is spelled H everywhere, and that of k and v H, 1 or
    Hkv; sizes whose names generated code has other uses for are called otherwise.
    """
    heads, kv = _heads(attention.q), _heads(attention.k)
    kv_heads = H if same_size(heads, kv) else kv if kv == Const(1) else HKV
    # A number stays a number in expressions: it may stand for something else there.
    mapping: dict[Expr, Expr] = {} if isinstance(heads, Const) else {heads: H}
    if any(isinstance(node, InList) for node in walk(attention.mask)):
        mapping |= group_in_words(attention)
    chosen = {name: None for name in size_names(attention) if name not in DIMS}
    own = own_sizes(tuple(chosen), tuple(tensor.name for tensor in attention.inputs))
    mapping |= {Dim(name): Dim(other) for name, other in own.items()}
    dtypes = {tensor.name: DType(tensor.dtype) for tensor in attention.inputs}

    def fix(expr: Expr) -> Expr:
        return bound_places(size_loads(substitute(expr, mapping), dtypes))

    def fix_size(tensor: Tensor, axis: int) -> Expr:
        size = tensor.shape[axis]
        if tensor.roles and tensor.roles[axis] is Role.HEAD:
            return kv_heads if tensor.name in ("k", "v") else H
        return H if not isinstance(heads, Const) and same_size(size, heads) else fix(size)

    def fix_tensor(tensor: Tensor) -> Tensor:
        return replace(tensor, shape=tuple(fix_size(tensor, axis) for axis in range(len(tensor.shape))))

    made = attention.rewrite(fix, fix_tensor)
    return replace(made, mask=replace(saturate_far(made.mask), span=made.mask.span))


def group_in_words(attention: Attention) -> dict[Expr, Expr]:
    """Returns how the K/V head of a query head is spelled where the heads of a group are a number: 'h // G',
    which lists of K/V heads are known by.
    """
    kv = _heads(attention.k)
    match group_size(_heads(attention.q), kv):
        case Const(value=int() as group) if group > 1 and kv != Const(1):
            return {Binary("//", Index("h"), Const(group)): Binary("//", Index("h"), Dim("G"))}
        case _:
            return {}


def size_names(attention: Attention) -> Iterator[str]:
    """Yields the names of sizes of the inputs, in order of appearance."""
    for tensor in attention.inputs:
        for size in tensor.shape:
            yield from (node.name for node in walk(size) if isinstance(node, Dim))


def kv_heads(attention: Attention) -> Expr:
    """Returns the number of KV heads of a normalised attention: H (no sharing), Const(1), or Dim('Hkv')."""
    return _heads(attention.k)


def _heads(tensor: Tensor) -> Expr:
    axis = tensor.axis(Role.HEAD)
    if axis is None:
        raise ValueError(f"{tensor.name} has no head axis")
    return tensor.shape[axis]


def arguments(declared: Attention) -> tuple[Arg, ...]:
    """Returns inputs in declaration order; the first axis that mentions a size alone binds it, every later
    one must agree. q, k and v come first, since other sizes follow from theirs; G is computed from H and Hkv.
    """
    attention = normalise(declared)
    bound = {"G", *(size.name for size in capacity(attention))}
    fixed = {
        name: size
        for name, size in (("H", _heads(declared.q)), ("Hkv", _heads(declared.k)))
        if isinstance(size, Const)
    }
    passed = [found for t in attention.inputs if (found := memory(t)) is not None]
    made = {t.name: _argument(t, bound, fixed) for t in sorted(passed, key=lambda t: not t.roles)}
    return tuple(made[t.name] for t in passed)


def results(attention: Attention) -> tuple[Arg, ...]:
    """Returns outputs in declaration order; every size is bound by then."""
    everything = {
        node.name
        for t in attention.inputs
        for size in t.shape
        for node in walk(size)
        if isinstance(node, Dim)
    }
    return tuple(_argument(tensor, set(everything) | {"H"}, {}) for tensor in attention.outputs)


def kept_for_gradients(attention: Attention) -> tuple[Arg, ...]:
    """Returns the tensors that a forward writes for a backward besides its outputs: lse, from which the
    backward recomputes the probabilities, and the attention before an epilogue, like o.
    """
    return (*_keep_lse(attention), *_keep_attention(attention))


def _keep_attention(attention: Attention) -> tuple[Arg, ...]:
    if attention.epilogue is None:
        return ()
    made = replace(attention, outputs=(replace(attention.o, name="attention"),))
    return results(made)


def _keep_lse(attention: Attention) -> tuple[Arg, ...]:
    """Returns lse as f32[B, H, M], of packed sequences f32[H, rows], where it is not an output already."""
    if attention.lse is not None or not attention.normalises:
        return ()
    roles = tuple(role for role in (Role.BATCH, Role.HEAD, Role.QUERY) if role in attention.q.roles)
    sizes = {Role.BATCH: Dim("B"), Role.HEAD: H, Role.QUERY: attention.q.size(Role.QUERY)}
    lse = Tensor(name="lse", dtype=DType.F32, shape=tuple(sizes[role] for role in roles), roles=roles)
    known = {size.name for size in sizes.values() if isinstance(size, Dim)}
    return (_argument(lse, known, {}),)


def _argument(tensor: Tensor, bound: set[str], fixed: Mapping[str, Expr]) -> Arg:
    binds = []
    for size in tensor.shape:
        match size:
            case Dim() if size == PAGES:
                binds.append(Bind())
            case Dim(name=name) if name not in bound:
                bound.add(name)
                binds.append(Bind(name=name, expected=fixed.get(name)))
            case Binary(op="+", left=Dim(name=name), right=Const(value=int() as plus)) if name not in bound:
                bound.add(name)
                binds.append(Bind(name=name, plus=plus))
            case _:
                binds.append(Bind(expected=size))
    return Arg(
        tensor=tensor,
        axes=tuple(binds),
        strides=tuple(stride_name(tensor, axis) for axis in range(len(tensor.shape))),
    )


_LETTER = {Role.BATCH: "b", Role.HEAD: "h", Role.QUERY: "m", Role.KEY: "n", Role.FEATURE: ""}


def stride_name(tensor: Tensor, axis: int) -> str:
    """Returns the name of the kernel argument with the axis's stride; "" for the feature axis, which is
    contiguous.
    """
    if not tensor.roles:
        return f"stride_{tensor.name}_{axis}"
    role = tensor.roles[axis]
    letter = "p" if role is Role.BATCH and tensor.storage.is_paged else _LETTER[role]
    return "" if role is Role.FEATURE else f"stride_{tensor.name}{letter}"


#: The index along an axis, and the name of the axis's stride.
Term: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowZero:
    """Where row 0 of the sequence and head at hand lies in a tensor; of rows in pages, where the head lies in
    a page.

    head: the index of the head, "" where all heads have the same rows; first: the number of the sequence's
    first row, None where sequences have a batch entry each.
    """

    tensor: Tensor
    head: str
    first: str | None

    @property
    def rows(self) -> Role:
        return Role.QUERY if self.tensor.axis(Role.KEY) is None else Role.KEY

    @property
    def indices(self) -> dict[Role, str]:
        found = {Role.BATCH: "b"} if self.first is None else {self.rows: self.first}
        found = {} if self.tensor.storage.is_paged else found
        found |= {Role.HEAD: self.head} if self.head else {}
        return {role: index for role, index in found.items() if self.tensor.axis(role) is not None}

    @property
    def terms(self) -> tuple[Term, ...]:
        axes = ((index, self.tensor.axis(role)) for role, index in self.indices.items())
        return tuple((index, stride_name(self.tensor, axis)) for index, axis in axes if axis is not None)


def find_unbound(args: tuple[Arg, ...]) -> frozenset[str]:
    """Returns sizes that appear only inside products or sums, so that no axis can bind them (G is derived
    from H and Hkv).
    """
    bound = {bind.name for arg in args for bind in arg.axes if bind.name}
    used = {
        node.name
        for arg in args
        for bind in arg.axes
        if bind.expected is not None
        for node in walk(bind.expected)
        if isinstance(node, Dim)
    }
    return frozenset(used - bound - {"G"})


# --- what tensor is passed


def feature(tensor: Tensor) -> int:
    """Returns D of q or k, Dv of v or o: a constant in a variant."""
    axis = tensor.axis(Role.FEATURE)
    size = None if axis is None else tensor.shape[axis]
    if not (isinstance(size, Const) and isinstance(size.value, int)):
        raise ValueError(f"the feature axis of {tensor.name} is not a constant: {size}")
    return size.value


def block(size: int) -> int:
    """Returns how many columns a Triton tile has that holds so many: a power of two, and the 16 that a dot
    needs at least.
    """
    return max(16, 1 << (size - 1).bit_length())


#: Bytes of a row of a tile in shared memory, of which matrix descriptors have one form if there are as many.
_LINE = 128


def value_columns(attention: Attention) -> int:
    """Returns how many columns a tile of v has in a Triton kernel that makes o: those of `block`, and no
    fewer than the tile of k, up to a line.

    Tensor cores of Hopper read both in shared memory, and narrower rows are swizzled otherwise. Where tensors
    are not aligned, ptxas of CUDA 12.8, which Triton 3.6 to 3.7 have, adds the second form to a register that
    nothing wrote, and the product is of whatever is there (`tests/sass.py` looks for such reads).
    """
    d, dv = block(feature(attention.q)), block(feature(attention.v))
    if attention.v.storage.is_part:
        return dv  # some of the columns of k
    return max(dv, min(d, _LINE // DType(attention.q.dtype).bytes))


def has_wide_values(attention: Attention) -> bool:
    """Returns whether a tile of v has more columns than `block` gives it, and the copy engine moves."""
    return value_columns(attention) > block(feature(attention.v))


def are_wide(d: int, dv: int) -> bool:
    """Returns whether the accumulators of dk and dv cannot share a kernel: then each gets its own, at the
    price of one more dot (on an H200 1.3 to 1.5 times faster at 256 columns than small tiles).
    """
    return d + dv > 256


PAGES = Dim("pages")


def memory(tensor: Tensor) -> Tensor | None:
    """Returns the tensor as it is passed, None for one that has no memory of its own."""
    match tensor.storage:
        case Prefix():
            return None
        case Paged(page=page):
            size: dict[Role, Expr] = {Role.BATCH: PAGES, Role.KEY: Const(page)}
            pairs = zip(tensor.roles, tensor.shape, strict=True)
            return replace(tensor, shape=tuple(size.get(role, axis) for role, axis in pairs))
        case _:
            return tensor


def is_plain(attention: Attention) -> bool:
    """Returns whether q, k and v are ordinary tensors, whose sequences all have M and N rows of memory, or v
    is columns of such a k.
    """
    tensors = (attention.q, attention.k, attention.v)
    return all(t.storage.is_plain or t.storage.is_part for t in tensors)


def has_descriptors(attention: Attention) -> bool:
    """Returns whether tiles of q, k and v may come through tensor descriptors: of ordinary tensors, but for
    f32, and for values whose tile has more columns than the copy engine moves.

    Of f32, tensor cores multiply tiles in two parts. What a descriptor brought Triton parts in registers. A
    tile that stays from turn to turn of a loop, such as that of q, then spills at 128 columns, and at 64
    ptxas (of CUDA 12.8 to 13.0) may give its registers to p within the loop, without a word: the second turn
    multiplies p by k. What pointers brought Triton parts in shared memory, where `wgmma` reads it.
    """
    if DType(attention.q.dtype) is DType.F32:
        return False
    has_v = not attention.v.storage.is_part
    return is_plain(attention) and has_v and not has_wide_values(attention)


def capacity(attention: Attention) -> tuple[Let, ...]:
    """Returns sizes that the host computes from the others: N of paged keys."""
    match attention.k.storage:
        case Paged(block_table=table, page=page):
            columns = attention.tensor(table).shape[1]
            return (Let(name="N", value=Binary("*", columns, Const(page))),)
        case _:
            return ()


def longest(attention: Attention, role: Role) -> Expr:
    """Returns the most rows that a sequence can have: M or N, or all rows of a ragged tensor, as generated
    code calls them.
    """
    normal = normalise(attention)
    tensor = normal.q if role is Role.QUERY else normal.k
    return tensor.size(role) if tensor.storage.is_packed else Dim("M" if role is Role.QUERY else "N")


def parts(attention: Attention) -> tuple[DotPart, ...]:
    """Returns the parts of the columns of q and k: one, unless v is a prefix of k that ends at a power of
    two: then its columns are a part.
    """
    d, dv = feature(attention.q), feature(attention.v)
    rest = d - dv
    is_tile = attention.v.storage.is_part and dv >= 16 and dv & (dv - 1) == 0
    if is_tile and rest >= 16 and rest & (rest - 1) == 0:
        return (DotPart(first=0, width=dv), DotPart(first=dv, width=rest))
    return (DotPart(first=0, width=d),)


def several_parts(attention: Attention) -> tuple[DotPart, ...]:
    """Returns the parts of the columns of q and k where they are several; () where they are one."""
    found = parts(attention)
    return found if len(found) > 1 else ()


def key_bytes(attention: Attention) -> int:
    """Returns bytes of a key of one head in memory: of its row of k, and of v where that has its own."""
    stored = (t for t in (attention.k, attention.v) if not t.storage.is_part)
    behind = feature(attention.q) - feature(attention.k)  # columns of another input, of the type of q
    own = sum(feature(tensor) * DType(tensor.dtype).bytes for tensor in stored)
    return own + behind * DType(attention.q.dtype).bytes


def tile_columns(attention: Attention) -> int:
    """Returns the columns of a tile of q or k, those of all parts."""
    return sum(block(part.width) for part in parts(attention))
