"""Device functions of Triton modules: which of them a module has, and their text. Each is a template in
`templates/triton/device` that has its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import jinja2

from attnc.expr.nodes import Binary, Call, Expr, Search, children
from attnc.model.dtypes import DType
from attnc.plan.decode import decodes_packed_rows
from attnc.plan.ir import Kernel, Module
from attnc.plan.ir.kernel import expressions_within
from attnc.target.printer import REVERSED, masked_place
from attnc.target.triton.columns import widened_to
from attnc.target.triton.printer import SYNTAX, scalar, widening

#: The order in which a module has them; any other comes last.
_ORDER = (
    *("_load_rows", "_load_rows_tma", "_store_rows", "_store_rows_tma", "_find_pages", "_load_pages"),
    *("_find_sequence_of_row", "_find_sequence"),
    *(f"_{stored}_to_{element}" for stored in ("e4m3", "e5m2", "i8") for element in ("f16", "bf16")),
    *("_scale_columns", "_load_vector", "_load_vector_tma", "_tanh"),
    *("_floor_div", "_floor_mod", "_floor_div_by_any", "_floor_mod_by_any", "_lower_bound", "_upper_bound"),
    *("_join_segment", "_softplus", "_sum_keys", "_keep_dropout", "_keep_listed"),
)
#: What a function calls.
_CALLED: Mapping[str, tuple[str, ...]] = {
    "_find_pages": ("_load_pages", "_load_rows"),
    "_load_pages": ("_find_pages", "_load_rows"),
    "_floor_mod": ("_floor_div",),
    "_floor_mod_by_any": ("_floor_div_by_any",),
}
#: Names of functions that share a template, and what tells it which one it is.
_WIDENING = re.compile(r"_(?P<stored>\w+)_to_(?P<element>\w+)")
_SEARCH = re.compile(r"_(?P<side>lower|upper)_bound")
#: Those that have another text where a kernel has descriptors.
_OF_DESCRIPTORS = ("_load_rows", "_store_rows", "_load_vector")


def device_functions(module: Module) -> tuple[str, ...]:
    """Returns the names of templates, in order. What expressions call follows from the plan's; the rest from
    how rows lie in memory.
    """
    found = {*_list_called(module)} - {""}
    if module.kernel.tma:
        found = {f"{name}_tma" if name in _OF_DESCRIPTORS else name for name in found}
        found |= {"_load_rows_tma", "_store_rows_tma"}
    found |= {name for function in found for name in _CALLED.get(function, ())}
    return tuple(sorted(found, key=_place_of))


def _place_of(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER)), name


def print_functions(
    names: Iterable[str], environment: jinja2.Environment, fields: Mapping[str, object]
) -> str:
    """Returns the text of these functions. fields: what templates of kernels are given."""
    return "\n\n\n".join(_print_function(name, environment, fields) for name in names)


def _print_function(name: str, environment: jinja2.Environment, fields: Mapping[str, object]) -> str:
    template, own = name, dict[str, str]()
    if match := _WIDENING.fullmatch(name):
        template, own = "_widen", match.groupdict()
    elif match := _SEARCH.fullmatch(name):
        template, own = "_bound", match.groupdict()
    return environment.get_template(f"triton/device/{template}.py.jinja").render(fields, **own).rstrip("\n")


def _list_called(module: Module) -> Iterator[str]:
    forward, backward, kernels = module.kernel, module.backward, module.kernels.values()
    attention = module.variant.attention
    for expr in expressions_within((forward, backward, module.lists, module.listed_rows)):
        yield from _called_by(expr)
    for kernel in kernels:
        yield from _moves_rows(kernel)
    for name, tensor in (("k", attention.k), ("v", attention.v)):
        yield widening(DType(tensor.dtype), widened_to(attention, name))
    if attention.column_scales:
        yield "_scale_columns"
    if any(kernel.grid.sequences is not None for kernel in kernels):
        yield "_find_sequence_of_row" if decodes_packed_rows(module) else "_find_sequence"
    in_rows = () if backward is None else [planned for planned in backward.kernels if planned.pack is None]
    if in_rows or (backward is not None and backward.preprocess is not None):
        yield from ("_load_rows", "_store_rows")
        reads_rows = any(not kernel.over_q and not kernel.softmax.breaks_sticks for kernel in in_rows)
        if not attention.q.storage.is_packed and reads_rows:
            yield "_load_vector"  # of lse2 and delta
    if attention.segment is not None:
        yield "_join_segment"
    if any(kernel.softmax.dropout is not None for kernel in kernels):
        yield "_keep_listed" if forward.structure == "decode" else "_keep_dropout"
    if attention.softmax.form == "stick_breaking":
        yield from ("_softplus", "_sum_keys")


def _moves_rows(kernel: Kernel) -> Iterator[str]:
    """Yields what loads and stores tiles of rows; kernels that decode have functions of their own for it."""
    if kernel.structure in ("decode", "selected_dq", "selected_dkdv", "selected_turns", "selected_tokens"):
        return
    yield from ("_load_rows", "_store_rows")
    if any(rows.page for rows in kernel.rows.values()):
        yield from ("_find_pages", "_load_pages")


def _called_by(expr: Expr) -> Iterator[str]:
    own = {*SYNTAX.functions.values()} - {"tl.minimum", "tl.maximum"}
    for node in _list_computed(expr):
        match node:
            case Call(function=function) if SYNTAX.named(function) in own:
                yield SYNTAX.named(function)
            case Binary(op=op, left=left, right=right) if function := scalar.division(op, left, right):
                yield function
            case Search(side=side, descends=descends):
                yield f"_{REVERSED[side] if descends else side}_bound"


def _list_computed(expr: Expr) -> Iterator[Expr]:
    found = [expr]
    while found:
        node = found.pop()
        yield node
        match node:
            case Call(function="bit", args=(word, place)) if (masked := masked_place(place)) is not None:
                found += (word, masked[0])
            case _:
                found += children(node)
