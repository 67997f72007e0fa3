"""The CUDA target: spellings of types, operators, loads and statements in C++."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from attnc.expr.nodes import TRUE, Const, Expr, Search
from attnc.model.tensors import DType
from attnc.plan.ir import Fetch, Let, Row, Statement
from attnc.plan.signature import Term
from attnc.target.locals import local
from attnc.target.printer import Printer, Syntax

#: How elements lie in memory. 16-bit floats are bit patterns: arithmetic on them happens in float.
STORED = {
    DType.F16: "f16",
    DType.BF16: "bf16",
    DType.F32: "float",
    DType.I32: "int",
    DType.I64: "long long",
    DType.BOOL: "bool",
}

#: C++ precedences, all comparisons alike: mixing them takes parentheses.
_BINDING = {
    "or": 1, "and": 2,
    "==": 4, "!=": 4, "<": 4, "<=": 4, ">": 4, ">=": 4,
    "+": 8, "-": 8, "*": 10, "/": 10, "//": 10, "%": 10,
    "not": 12, "neg": 12,
}  # fmt: skip


def _search(node: Search, show: Callable[[Expr], str]) -> str:
    row = node.row or f"args.{node.tensor}_ptr"
    stride = f"args.stride_{node.tensor}_{len(node.prefix)}"
    kind = "_real" if node.value.type == "float" else ""  # an integer would cut off its fraction
    return f"{node.side}_bound{kind}({row}, {stride}, {show(node.extents[-1])}, {show(node.value)})"


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
    floor_by_any={"//": "floor_div", "%": "floor_mod"},
    broadcast={"q": "[r]", "kv": ""},
    true="true",
    false="false",
    infinity="INF",
    search=_search,
    number=_number,
    to_float="(float)",
    widen="(long long){}",
    alike="(long long)({})",
)  # fmt: skip

#: Scalars, and values at row r of a tile.
scalar = Printer(SYNTAX)
at_row = Printer(SYNTAX, tile=True)
#: The same where the rows of a tile are keys.
at_key = Printer(replace(SYNTAX, broadcast={"q": "", "kv": "[r]"}), tile=True)


def offset(terms: Iterable[Term]) -> str:
    """A place in memory, from the first element of a tensor."""
    return " + ".join(f"{index} * args.{stride}" for index, stride in terms) or "0"


def address(base: str, tensor: str, indices: tuple[Expr, ...], show: Printer, *, done: int = 0) -> str:
    """An element offset in 64 bits: strides are `long long`, so that every product is.

    The first `done` indices are in the base already.
    """
    terms = [
        f"{_factor(show(index), index)} * args.stride_{tensor}_{axis}"
        for axis, index in enumerate(indices)
        if axis >= done
    ]
    return f"{base}[{' + '.join(terms) or '0'}]"


def _factor(text: str, index: Expr) -> str:
    is_name = re.fullmatch(r"\w+(\[\w+\])?", text) is not None
    return text if is_name or isinstance(index, Const) else f"({text})"


def load(fetch: Fetch, dtype: DType, show: Printer = at_row) -> str:
    """The element of a fetch, 0 where its guard is false; floats as float."""
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
    """The C++ type of a loaded value."""
    if fetch.load.within is not None:
        return "int"
    return "float" if dtype.is_float else STORED[dtype]


def statement(
    item: Statement, dtypes: dict[str, DType], sizes: tuple[str, ...], show: Printer = at_row
) -> str:
    """A declaration of the value, if something reads it; a length that shortens a size is an assignment."""
    match item:
        case Let(name=name, value=value) if name in sizes:
            return f"{name} = {scalar(value)};"
        case Let(value=value):
            kind = {"float": "float", "bool": "bool"}.get(value.type, "int")
            return local(f"const {kind}", {item.name: scalar(value)})
        case Row(tensor=tensor, indices=indices):
            place = address(f"args.{tensor}_ptr", tensor, indices, scalar)
            return local(f"const {STORED[dtypes[tensor]]}* const", {item.name: f"&{place}"})
        case Fetch():
            dtype = dtypes[item.load.tensor]
            return local(f"const {value_type(item, dtype)}", {item.name: load(item, dtype, show)})
