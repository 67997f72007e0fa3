"""The Triton target: spellings of types, operators and loads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attnc.expr.construct import LEAST_NORMAL
from attnc.expr.nodes import TRUE, Const, Dot, Expr, Index, Ref, Search, walk
from attnc.model.dtypes import DType
from attnc.plan.ir import Fetch, Let, Row, Statement
from attnc.plan.signature import Term
from attnc.plan.width import is_wide
from attnc.target.printer import REVERSED, Printer, Syntax
from attnc.target.terms import plus, times

#: Parameters that are constants of a compiled kernel, by their names.
CONSTEXPRS = ("MASKED", "BLOCK_M", "BLOCK_N", "BLOCK_S", "EARLY_DP", "PDL", "SPLIT", "TMA", "ZERO_FILL")
TL_DTYPES = {dtype: f"tl.{dtype.facts.torch}" for dtype in DType if dtype.is_float}


def widening(stored: DType, element: DType) -> str:
    """Returns the name of the device function that makes a tile of k or v one of this type, of 16 bits; ""
    where it is one.
    """
    return f"_{stored}_to_{element}" if stored.is_narrow else ""


#: Python's precedences: Triton text is Python. `&` and `|` bind tighter than comparisons there, so those
#: take parentheses.
_BINDING = {
    "or": 4, "and": 6, "not": 12, "neg": 12,
    "==": 3, "!=": 3, "<": 3, "<=": 3, ">": 3, ">=": 3,
    "+": 8, "-": 8, "*": 10, "/": 10, "//": 10, "%": 10,
}  # fmt: skip


def _search(node: Search, show: Printer) -> str:
    row = address(node.row or f"{node.tensor}_ptr", node.tensor, node.prefix, show, done=node.done)
    stride, length = f"stride_{node.tensor}_{len(node.prefix)}", show(node.length)
    if node.descends:  # from its end on a row ascends
        last = f"{row} + tl.cast({length} - 1, tl.int64) * {stride}"
        return f"{length} - _{REVERSED[node.side]}_bound({last}, -{stride}, {length}, {show(node.value)})"
    return f"_{node.side}_bound({row}, {stride}, {length}, {show(node.value)})"


def _number(value: int | float) -> str:
    if isinstance(value, float) and 0 < abs(value) < LEAST_NORMAL:
        return f"tl.full([], {value!r}, tl.float32)"
    return repr(value)


#: Triton takes a constant that is added to a product for what that begins with, also where it finds that what
#: stands between them, a product with 1 or min with infinity, changes nothing. ptxas then takes elements of a
#: product by wgmma for that constant (12.8, sm_90), so constants are subtracted, which Triton leaves alone.
SYNTAX = Syntax(
    binding=_BINDING,
    spelling={"and": "&", "or": "|", "not": "~", "neg": "-"},
    functions={
        "min": "tl.minimum", "max": "tl.maximum", "tanh": "_tanh",
    },
    function="tl.{}",
    floor={"//": "_floor_div", "%": "_floor_mod"},
    floor_by_any={"//": "_floor_div_by_any", "%": "_floor_mod_by_any"},
    broadcast={"q": "[:, None]", "kv": "[None, :]"},
    true="True",
    false="False",
    infinity='float("inf")',
    keep_nan=", propagate_nan=tl.PropagateNan.ALL",
    real="{}.to(tl.float32)",
    real_constant="tl.full([], {}, tl.float32)",
    search=_search,
    number=_number,
    widen="{}.to(tl.int64)",
    widen_counter="tl.cast({}, tl.int64)",
    subtracts_from_dot=True,
)  # fmt: skip


scalar = Printer(SYNTAX)
tiled = Printer(SYNTAX, tile=True)
#: The same for tiles whose rows are keys and whose columns are queries.
transposed = Printer(replace(SYNTAX, broadcast={"q": "[None, :]", "kv": "[:, None]"}), tile=True)


def score(expr: Expr, show: Printer = tiled, read: Expr | None = None) -> str:
    """Returns the score as a tile, even where it leaves out the product of q and k, which is one. read: the
    same with values of the step in the place of their names, which have the axes of what they read.
    """
    nodes = walk(expr if read is None else read)
    is_tile = any(node == Dot() or (isinstance(node, Ref) and len(node.axes) == 2) for node in nodes)
    return show(expr) if is_tile else f"tl.zeros_like(s) + ({show(expr)})"


def offset(terms: Iterable[Term]) -> str:
    """Prints how many elements lie before a row, from the first of its tensor; empty if none do."""
    return " + ".join(f"{index}.to(tl.int64) * {stride}" for index, stride in terms)


def address(base: str, tensor: str, indices: tuple[Expr, ...], show: Printer, *, done: int = 0) -> str:
    """Returns pointer arithmetic in 64 bits, since element offsets may pass 2**31.

    The first `done` indices are in the base already.
    """
    terms = (
        times(_wide(index, show), f"stride_{tensor}_{axis}")
        for axis, index in enumerate(indices)
        if axis >= done
    )
    return plus(base, *terms)


def _wide(index: Expr, show: Printer) -> str:
    if isinstance(index, Const):
        return show(index) if index.value in (0, 1) else f"tl.cast({show(index)}, tl.int64)"
    return f"{show.operand(index)}.to(tl.int64)"


def load(fetch: Fetch, tile: Printer = tiled) -> str:
    """Returns `tl.load(...)` of a fetch; 0 where its guard is false. `tile` prints what varies along both
    axes.
    """
    show = tile if len(fetch.axes) == 2 else scalar
    tensor, row = fetch.load.tensor, fetch.row
    base, done = (f"{tensor}_ptr", 0) if row is None else (row.name, len(row.indices))
    where = address(base, tensor, fetch.load.indices, show, done=done)
    mask = "" if fetch.guard == TRUE else f", mask={show(fetch.guard)}, other=0"
    convert = ".to(tl.float32)" if fetch.load.type == "float" else ""
    if fetch.load.is_byte:  # or numbers beside it would have 8 bits too
        convert = ".to(tl.int32)"
    loaded = f"tl.load({where}{mask}){convert}"
    if fetch.load.within is None:
        return loaded
    least, most = fetch.load.within
    near = f"tl.maximum(tl.minimum({loaded}, {most}), {least})"
    return f"{near}.to(tl.int32)" if fetch.load.wide else near


def statement(item: Statement) -> str:
    match item:
        case Let(value=value) if value.type == "int" and is_wide(value):
            return f"{item.name} = {scalar.operand(value)}.to(tl.int32)"  # tiles are addressed by 32 bits
        case Let(value=value):
            return f"{item.name} = {scalar(value)}"
        case Row(tensor=tensor, indices=indices):
            return f"{item.name} = {address(f'{tensor}_ptr', tensor, indices, scalar)}"
        case Fetch():
            return f"{item.name} = {load(item)}"


def list_types(names: Iterable[str]) -> list[str]:
    return [f"{name}: tl.constexpr" if name in CONSTEXPRS else name for name in names]


def counter(number: Expr) -> str:
    """Prints a number of 32 bits."""
    return scalar(number) if isinstance(number, Index) else f"{scalar.operand(number)}.to(tl.int32)"


def under(condition: str, lines: Iterable[str]) -> list[str]:
    """Returns lines that are executed only if the condition holds."""
    return [f"if {condition}:", *(f"    {line}" for line in lines)]


def unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
