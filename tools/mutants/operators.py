"""The kinds of changes that make a mutant of a kernel, for CUDA C++ and Triton alike.

Each operator yields replacements of a node's text. What comes out may fail to compile: then it is no mutant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from tree_sitter import Node

from tools.mutants.syntax import LanguageName, Site, list_sites, text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A change of a file. operator: its kind; function, line: where; start, stop: the bytes of the file that
    `new` replaces.
    """

    operator: str
    file: str
    function: str
    line: int
    start: int
    stop: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Returns the file's text with the change. ValueError for another text."""
        data = text.encode()
        if data[self.start : self.stop].decode() != self.old:
            raise ValueError(f"{self.file} is not what the mutant was drawn from")
        return (data[: self.start] + self.new.encode() + data[self.stop :]).decode()


@dataclass(frozen=True, slots=True)
class Context:
    """What an operator may ask: the language, and the identifiers of each function."""

    language: LanguageName
    names: Mapping[str, frozenset[str]]


#: A node's replacements; the node itself, or one below it, is replaced.
Edits: TypeAlias = Iterator[tuple[Node, str]]
Operator: TypeAlias = Callable[[Site, Context], Edits]

_COMPARISONS: Mapping[str, tuple[str, ...]] = {
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
}
_ARITHMETIC: Mapping[str, str] = {
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "//": "*",
    "%": "/",
    "<<": ">>",
    ">>": "<<",
    "&": "|",
    "|": "&",
    "^": "|",
    "+=": "-=",
    "-=": "+=",
    "*=": "+=",
}
_LOGIC: Mapping[str, str] = {"&&": "||", "||": "&&", "and": "or", "or": "and"}
_OPERATIONS = ("binary_expression", "binary_operator", "comparison_operator", "boolean_operator")
_ASSIGNMENTS = ("assignment_expression", "assignment", "augmented_assignment")
_CALLS = ("call_expression", "call")
#: What each part of a name may be mistaken for.
_PARTNERS: Mapping[str, tuple[str, ...]] = {
    "q": ("k",),
    "k": ("v", "q"),
    "v": ("k",),
    "o": ("q",),
    "do": ("q", "o"),
    "dk": ("dv",),
    "dv": ("dk",),
    "lo": ("hi",),
    "hi": ("lo",),
    "M": ("N",),
    "N": ("M",),
    "m": ("n", "l"),
    "n": ("m",),
    "l": ("m",),
    "b": ("h",),
    "h": ("b",),
    "H": ("G",),
    "G": ("H",),
    "row": ("col", "column"),
    "col": ("row",),
    "full": ("empty",),
    "FULL": ("EMPTY",),
    "EMPTY": ("FULL",),
    "K": ("V", "Q"),
    "V": ("K",),
    "Q": ("K",),
    "D": ("DV",),
    "DV": ("D",),
    "kv": ("q",),
    "idx": ("pos",),
    "pos": ("idx",),
    "first": ("last",),
    "last": ("first",),
    "delta": ("lse2",),
    "lse2": ("delta",),
}
_STRIDE = re.compile(r"stride_(\w+)(\w)$")
_NUMBER = re.compile(r"(0x[\da-fA-F]+|\d+)([uUlL]*)$")
_FLOAT = re.compile(r"(\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+)([fF]?)$")
#: Kinds of statements, by the names that they call.
_SYNCHRONISES = re.compile(
    r"wait|fence|sync|arrive|commit|expect|barrier|warpgroups_meet|pin|acquire|release", re.I
)
_STORES = re.compile(r"store|atomic|copy|reduce_add|red_add", re.I)
_RESETS = re.compile(r"^\s*[\w.\[\]]+\s*=\s*(0|0\.0f?|\{\}|-INF\w*|-float\(.*\)|tl\.(zeros|full)\(.*)\s*;?$")
_PHASES = re.compile(r"parity|phase", re.I)


def _operator_of(node: Node) -> Node | None:
    """Returns the sign between two operands."""
    found = node.child_by_field_name("operator")
    if found is not None:
        return found
    return next((child for child in node.children if text_of(child) in _COMPARISONS), None)


def _sides(node: Node) -> tuple[Node, Node] | None:
    left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
    if left is None or right is None:
        named = node.named_children
        if len(named) != 2:
            return None
        left, right = named
    return left, right


def compare(site: Site, context: Context) -> Edits:
    """Moves a comparison by one, or turns it round."""
    if site.node.type in _OPERATIONS and (sign := _operator_of(site.node)) is not None:
        for other in _COMPARISONS.get(text_of(sign), ()):
            yield sign, other


def bound(site: Site, context: Context) -> Edits:
    """Moves by one what is compared with, an end of a range, an operand of a minimum or maximum."""
    node = site.node
    found: list[Node] = []
    sign = _operator_of(node) if node.type in _OPERATIONS else None
    if sign is not None and text_of(sign) in ("<", "<=", ">", ">=") and (sides := _sides(node)) is not None:
        found = [sides[1]]
    elif node.type in _CALLS and _called(node) in ("range", "min", "max", "minimum", "maximum", "cdiv"):
        found = _arguments(node)
    for end in found:
        if "float" in text_of(end) or _FLOAT.match(text_of(end)):
            continue
        yield end, f"({text_of(end)} + 1)"
        yield end, f"({text_of(end)} - 1)"


def constant(site: Site, context: Context) -> Edits:
    """Changes a number: plus and minus one, doubled; 0 becomes 1."""
    node, text = site.node, text_of(site.node)
    if node.type not in ("number_literal", "integer", "float"):
        return
    if (whole := _NUMBER.match(text)) is not None:
        value, suffix = int(whole[1], 0), whole[2]
        for other in dict.fromkeys((value + 1, value - 1, 2 * value)):
            if other not in (value, -1):
                yield node, f"{other}{suffix}"
    elif (real := _FLOAT.match(text)) is not None:
        number, suffix = float(real[1]), real[2]
        for changed in dict.fromkeys((number + 1.0, 2.0 * number, 1.001 * number)):
            if changed != number:
                yield node, f"{changed!r}{suffix}"


def arithmetic(site: Site, context: Context) -> Edits:
    """Takes another operation."""
    if site.node.type in (*_OPERATIONS, *_ASSIGNMENTS) and (sign := _operator_of(site.node)) is not None:
        text = text_of(sign)
        if text in _ARITHMETIC:
            yield sign, _ARITHMETIC[text]
        if text in _LOGIC:
            yield sign, _LOGIC[text]
    if site.node.type in ("unary_expression", "unary_operator") and text_of(site.node).startswith("-"):
        yield site.node, text_of(site.node)[1:]


def exchange(site: Site, context: Context) -> Edits:
    """Exchanges two operands, or two arguments that stand beside each other."""
    node = site.node
    if node.type in _OPERATIONS and (sign := _operator_of(node)) is not None:
        sides = _sides(node)
        if sides is not None and text_of(sign) in ("-", "/", "//", "%", "<<", ">>"):
            yield node, f"({text_of(sides[1])} {text_of(sign)} {text_of(sides[0])})"
    if node.type in _CALLS and _called(node) not in ("min", "max", "minimum", "maximum"):
        found = _arguments(node)
        for one, other in pairwise(found):
            if one.type == other.type == "identifier":
                both = _between(node, one, other)
                yield node, both


def index(site: Site, context: Context) -> Edits:
    """Takes another name of the function that reads alike: the other tensor, axis, end or head."""
    node = site.node
    if node.type not in ("identifier", "field_identifier") or _is_assigned(node):
        return
    name, known = text_of(node), context.names[site.function]
    if _STRIDE.search(name):
        return
    parts = name.split("_")
    for at, part in enumerate(parts):
        for other in _PARTNERS.get(part, ()):
            candidate = "_".join([*parts[:at], other, *parts[at + 1 :]])
            if candidate in known and candidate != name:
                yield node, candidate


def stride(site: Site, context: Context) -> Edits:
    """Takes the stride of another tensor, or of another axis of the tensor."""
    node = site.node
    if node.type not in ("identifier", "field_identifier"):
        return
    name = text_of(node)
    if (own := _STRIDE.search(name)) is None:
        return
    for other in sorted(context.names[site.function]):
        there = _STRIDE.search(other)
        if there is not None and other != name and (there[1] == own[1]) != (there[2] == own[2]):
            yield node, other


def drop(site: Site, context: Context) -> Edits:
    """Leaves a statement out: an update of something that has a value."""
    if _is_statement(site.node) and not _is_kind(site.node, _SYNCHRONISES, _STORES, _RESETS):
        yield from _without(site.node, context)


def drop_synchronisation(site: Site, context: Context) -> Edits:
    """Leaves a wait, a fence, an arrival or a barrier out."""
    if _is_statement(site.node) and _is_kind(site.node, _SYNCHRONISES):
        yield from _without(site.node, context)


def drop_store(site: Site, context: Context) -> Edits:
    """Leaves a store or a copy out."""
    if _is_statement(site.node) and _is_kind(site.node, _STORES):
        yield from _without(site.node, context)


def drop_reset(site: Site, context: Context) -> Edits:
    """Leaves out that something begins at zero, or at minus infinity."""
    if _is_statement(site.node) and _RESETS.match(text_of(site.node)):
        yield from _without(site.node, context)


def condition(site: Site, context: Context) -> Edits:
    """Negates a condition, takes it for true or false, or one value of a choice for both."""
    node, is_cuda = site.node, context.language == "cuda"
    yes, no = ("true", "false") if is_cuda else ("True", "False")
    if node.type == "if_statement" and (test := node.child_by_field_name("condition")) is not None:
        inner = text_of(test)
        inner = inner[1:-1] if is_cuda else inner
        for changed in (f"!({inner})" if is_cuda else f"not ({inner})", yes, no):
            yield test, f"({changed})" if is_cuda else changed
    if node.type in ("conditional_expression", "ternary_expression"):
        for side in ("consequence", "alternative"):
            if (value := node.child_by_field_name(side)) is not None:
                yield node, f"({text_of(value)})"
    if node.type == "call" and _called(node) == "where" and len(found := _arguments(node)) == 3:
        yield node, text_of(found[1])
        yield node, text_of(found[2])
        yield found[0], f"(({text_of(found[0])}) == 0)"
    if node.type == "keyword_argument" and (value := node.child_by_field_name("value")) is not None:
        name = node.child_by_field_name("name")
        if name is not None and text_of(name) == "mask":
            yield value, "True"
        elif name is not None and text_of(name) == "other":
            yield value, "1.0"
    sign = _operator_of(node) if node.type in ("binary_operator", "binary_expression") else None
    if sign is not None and text_of(sign) in (("&&", "||") if is_cuda else ("&",)):
        for operand in _sides(node) or ():
            yield node, f"({text_of(operand)})"


def leave(site: Site, context: Context) -> Edits:
    """Leaves a loop or a function early, or goes on where it was left; runs the first, or all but the first,
    of a loop.
    """
    node, is_cuda = site.node, context.language == "cuda"
    if node.type in ("continue_statement", "break_statement"):
        text = text_of(node)
        yield (
            node,
            text.replace("continue", "break") if "continue" in text else text.replace("break", "continue"),
        )
        yield node, ";" if is_cuda else "pass"
    if node.type == "for_statement" and (body := node.child_by_field_name("body")) is not None:
        if is_cuda:
            yield body, f"{{ {text_of(body)} break; }}"
            update = node.child_by_field_name("update")
            start = node.child_by_field_name("initializer")
            if update is not None and start is not None and text_of(update).startswith("++"):
                yield start, re.sub(r"=\s*([^;,]+)", r"= 1 + (\1)", text_of(start), count=1)
        elif (right := node.child_by_field_name("right")) is not None and _called(right) == "range":
            found = [text_of(argument) for argument in _arguments(right)]
            if len(found) == 3:
                low, high, step = found
                yield right, f"range({low}, min({high}, {low} + {step}), {step})"
                yield right, f"range({low} + {step}, {high}, {step})"
                yield right, f"range({low}, {high} - {step}, {step})"


def phase(site: Site, context: Context) -> Edits:
    """Waits for the other phase of a barrier."""
    node = site.node
    if node.type == "field_expression" and _PHASES.search(text_of(node)) and not _is_assigned(node):
        yield node, f"({text_of(node)} ^ 1)"


def narrow_integer(site: Site, context: Context) -> Edits:
    """Counts in 32 bits what was counted in 64."""
    node, text = site.node, text_of(site.node)
    if node.type in ("sized_type_specifier", "type_descriptor") and text in ("long long", "const long long"):
        yield node, text.replace("long long", "int")
    if node.type == "number_literal" and text.endswith("ll"):
        yield node, text[:-2]
    if node.type == "call" and text.endswith(".to(tl.int64)"):
        yield node, text.removesuffix(".to(tl.int64)")


def narrow_float(site: Site, context: Context) -> Edits:
    """Rounds a value of 32 bits to 16 on its way."""
    node = site.node
    right = node.child_by_field_name("right") or node.child_by_field_name("value")
    if node.type not in (*_ASSIGNMENTS, "init_declarator") or right is None:
        return
    text = text_of(right)
    if context.language == "python":
        if re.search(r"tl\.(exp2|dot|sum|max|log2)|alpha|\* SCALE|delta|lse", text) and not text.startswith(
            "_"
        ):
            yield right, f"({text}).to(tl.bfloat16).to(tl.float32)"
    elif re.search(r"exp2|log2|\bfma|\* scale|0\.0f|1\.0f|alpha|\bsum", text, re.I) and "{" not in text:
        yield right, f"__uint_as_float(__float_as_uint({text}) & 0xffff0000u)"


def lane(site: Site, context: Context) -> Edits:
    """Leaves a statement out in one lane, in one warp, or in all lanes but the first of a warp."""
    node = site.node
    if context.language != "cuda" or not _is_statement(node) or _is_kind(node, _SYNCHRONISES):
        return
    text = text_of(node)
    if re.search(r"wgmma|multiply|mma|shuffle|shfl|ballot|uniform|ldmatrix|add_product", text):
        return  # all lanes take part
    for excluded in ("threadIdx.x % 32 == 5", "threadIdx.x / 32 % 4 == 2", "threadIdx.x % 32 > 27"):
        yield node, f"if (!({excluded})) {{ {text} }}"


def row(site: Site, context: Context) -> Edits:
    """Makes one row of a vector something else."""
    node = site.node
    if context.language != "python" or node.type != "assignment":
        return
    left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
    if left is None or right is None or left.type != "identifier":
        return
    name = text_of(left)
    for size in ("BLOCK_M", "BLOCK_N"):
        if (
            name in ("m", "l", "m_new", "l_new", "alpha", "shift", "delta", "lse2")
            and size in context.names[site.function]
        ):
            yield right, f"tl.where(tl.arange(0, {size}) == 11, 0.0, {text_of(right)})"


OPERATORS: Mapping[str, Operator] = {
    "compare": compare,
    "bound": bound,
    "constant": constant,
    "arithmetic": arithmetic,
    "exchange": exchange,
    "index": index,
    "stride": stride,
    "drop": drop,
    "drop synchronisation": drop_synchronisation,
    "drop store": drop_store,
    "drop reset": drop_reset,
    "condition": condition,
    "leave": leave,
    "phase": phase,
    "narrow integer": narrow_integer,
    "narrow float": narrow_float,
    "lane": lane,
    "row": row,
}


def list_mutants(file: str, text: str) -> tuple[Mutant, ...]:
    """Lists all mutants of a file, in the order of their places. file: its name, which says the language."""
    language: LanguageName = "python" if file.endswith(".py") else "cuda"
    sites = list_sites(text, language)
    names: dict[str, set[str]] = {}
    for site in sites:
        if site.node.type in ("identifier", "field_identifier"):
            names.setdefault(site.function, set()).add(text_of(site.node))
    context = Context(language, {site.function: frozenset(names.get(site.function, ())) for site in sites})
    found: dict[tuple[int, int, str], Mutant] = {}
    for site in sites:
        for name, operator in OPERATORS.items():
            for node, new in operator(site, context):
                mutant = Mutant(
                    operator=name,
                    file=file,
                    function=site.function,
                    line=node.start_point[0] + 1,
                    start=node.start_byte,
                    stop=node.end_byte,
                    old=text_of(node),
                    new=new,
                )
                if mutant.new != mutant.old:
                    found.setdefault((mutant.start, mutant.stop, new), mutant)
    return tuple(sorted(found.values(), key=lambda mutant: (mutant.start, mutant.stop, mutant.new)))


# --- nodes --------------------------------------------------------------------------------------------------


def _called(node: Node) -> str:
    """Returns the last part of the name that a call calls; "" for another node."""
    function = node.child_by_field_name("function")
    return "" if function is None else re.split(r"[.:]", re.sub(r"<.*", "", text_of(function)))[-1]


def _arguments(node: Node) -> list[Node]:
    found = node.child_by_field_name("arguments")
    named = [] if found is None else found.named_children
    return [child for child in named if child.type not in ("comment", "keyword_argument")]


def _between(call: Node, one: Node, other: Node) -> str:
    """Returns a call's text with two arguments exchanged."""
    data, start = text_of(call).encode(), call.start_byte
    pieces = (
        data[: one.start_byte - start],
        data[other.start_byte - start : other.end_byte - start],
        data[one.end_byte - start : other.start_byte - start],
        data[one.start_byte - start : one.end_byte - start],
        data[other.end_byte - start :],
    )
    return b"".join(pieces).decode()


def _is_assigned(node: Node) -> bool:
    """Returns whether the name is what a statement declares or writes."""
    around = node.parent
    if around is None:
        return False
    if around.type in (*_ASSIGNMENTS, "init_declarator"):
        target = around.child_by_field_name("left") or around.child_by_field_name("declarator")
        return target == node
    return around.type in (
        "parameters",
        "parameter_declaration",
        "declaration",
        "pattern_list",
        "keyword_argument",
    )


def _is_statement(node: Node) -> bool:
    """Returns whether the node is a statement that declares nothing, so that the rest stands without it."""
    return (
        node.type == "expression_statement"
        and bool(node.named_children)
        and node.named_children[0].type != "string"
    )


def _is_kind(node: Node, *kinds: re.Pattern[str]) -> bool:
    text = text_of(node)
    called = text.split("(")[0] if "(" in text else ""
    return any(kind.match(text) if kind is _RESETS else kind.search(called) for kind in kinds)


def _without(node: Node, context: Context) -> Edits:
    """Replaces a statement by nothing. A Python name keeps the value that it has, if it has one."""
    if context.language == "cuda":
        yield node, ";"
        return
    inner = node.named_children[0]
    if inner.type == "assignment":
        left = inner.child_by_field_name("left")
        if left is None or not _is_known_before(node, text_of(left)):
            return
    yield node, "pass"


def _is_known_before(node: Node, name: str) -> bool:
    """Returns whether a Python name has a value in front of a statement: of its own function's text."""
    function = node.parent
    while function is not None and function.type != "function_definition":
        function = function.parent
    if function is None:
        return False
    before = text_of(function).encode()[: node.start_byte - function.start_byte].decode()
    names = [part.strip() for part in name.split(",")]
    return all(re.search(rf"\b{re.escape(part)}\b", before) for part in names)
