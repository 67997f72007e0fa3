"""Proves of the text of a Triton module that no address is computed in 32 bits where it may not fit.

Element offsets may pass 2^31 wherever a stride is a factor, which no sampling of small tensors shows. The
proof is a little abstract interpretation of the module's syntax tree: of every value whether it has 64 bits,
and else how large it may be. A product or sum of 32 bits that may pass 2^31 is a finding if it reaches an
address: the pointer of a load, store or atomic addition, or an argument of another kernel function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

#: Positions, lengths and sizes of sequences (as `plan.width` has it), and what 32 bits hold.
POSITIONS = (1 << 24) - 1
LIMIT = 1 << 31
#: Elements of a tile's row or column, threads of a block, keys of a page.
TILE = 1 << 10

#: How large parameters of kernels and of their functions may be. Every other is only known to fit 32 bits.
_BOUNDS: Mapping[str, int] = {
    **dict.fromkeys(("M", "N", "M_all", "N_all", "start", "stop", "length", "kv_lo", "q_lo"), POSITIONS),
    **dict.fromkeys(("kv_hi", "q_hi", "kv_idx", "q_idx", "q_pos", "split_lo", "split_hi", "size"), POSITIONS),
    **dict.fromkeys(("M_padded", "q_first", "k_first", "q_rows", "k_rows", "rows", "lo", "hi"), POSITIONS),
    **dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_S", "BLOCK_D", "ROWS", "PAGE", "D", "SIZE"), TILE),
    **dict.fromkeys(("BLOCK_K", "SPLITS", "G", "split"), TILE),
    "run": POSITIONS // 128 + 1,  # of a search, whose rounds look at the ends of 128 runs
}
#: Functions of floats, or that make them: what is no integer cannot overflow.
_FLOATS = frozenset({"dot", "zeros", "full", "exp2", "log2", "exp", "log", "sqrt", "zeros_like"})
_FLOAT_NAMES = frozenset({"SCALE", "LOG2E", "LN2", "TWO_LOG2E", "PHI", "LAZY", "HIGH", "LOW"})
#: Functions whose result is no larger than one of their arguments, and that have its width.
_CHOICES = frozenset({"minimum", "maximum", "where", "reshape", "broadcast_to", "max", "min", "abs"})
_ADDRESSES = frozenset({"load", "store", "atomic_add"})


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of an integer: has it 64 bits, else its bound; and operations that may have overflowed on
    the way to it, as (line, text).
    """

    wide: bool = False
    bound: int = LIMIT - 1
    lost: frozenset[tuple[int, str]] = frozenset()

    def or_(self, other: Value) -> Value:
        """Either of two."""
        return Value(self.wide and other.wide, max(self.bound, other.bound), self.lost | other.lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An operation of 32 bits that may overflow and reaches an address."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text} has 32 bits"


@dataclass(slots=True)
class _Function:
    """A kernel function: what its callers give it, and what it returns."""

    tree: ast.FunctionDef
    given: dict[str, Value] = field(default_factory=dict)
    returns: tuple[Value, ...] = ()


def findings(text: str) -> tuple[Finding, ...]:
    """Lists the addresses of a Triton module's text that are not proved, line by line."""
    tree = ast.parse(text)
    functions = {
        node.name: _Function(node)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
    }
    blocks = _listed_blocks(tree)
    found: set[tuple[int, str]] = set()
    for _ in range(4):  # what callers give, and callees return, comes to rest after a few rounds
        given: dict[str, dict[str, Value]] = {name: {} for name in functions}
        found = set()
        for function in functions.values():
            scope = _Scope(functions, given, dict(function.given), blocks)
            scope.run(function.tree.body)
            scope.run(function.tree.body)  # loops carry values round
            function.returns = scope.returns
            found |= scope.found
        for name, values in given.items():
            functions[name].given = values
    return tuple(Finding(line=line, text=text) for line, text in sorted(found))


def _listed_blocks(tree: ast.Module) -> frozenset[int]:
    """The sizes of blocks whose number the host finds of the length of sequences, rounded up."""
    sizes = {
        str(key.value): ast.unparse(value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant)
    }
    counted = _BLOCKS.findall(sizes.get("list_blocks", "") + sizes.get("list_rows", ""))
    return frozenset(int(block) for last, block in counted if int(last) == int(block) - 1)


@dataclass(slots=True)
class _Scope:
    """The values of one function's names, as far as its statements have been walked over."""

    functions: Mapping[str, _Function]
    given: dict[str, dict[str, Value]]
    values: dict[str, Value]
    blocks: frozenset[int] = frozenset()  # sizes of listed blocks
    returns: tuple[Value, ...] = ()
    found: set[tuple[int, str]] = field(default_factory=set)

    def run(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            match statement:
                case ast.Assign(targets=[target], value=value):
                    self._assign(target, value)
                case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                    self.values[name] = self._combined(op, self._named(name), self.of(value), statement)
                case ast.For(target=ast.Name(id=name), iter=ast.Call(func=of, args=args), body=inner):
                    ends = [self.of(arg) for arg in args][:2]
                    self.values[name] = _known(name, _between(ends) if _is_range(of) else Value())
                    self.run(inner)
                case ast.If(test=test, body=then, orelse=other):
                    self.of(test)
                    before = dict(self.values)
                    self.run(then)
                    after, self.values = self.values, before
                    self.run(other)
                    for name in after.keys() | self.values.keys():
                        mine, theirs = self.values.get(name), after.get(name)
                        both = mine.or_(theirs) if mine and theirs else mine or theirs
                        assert both is not None
                        self.values[name] = both
                case ast.While(test=test, body=inner):
                    self.of(test)
                    self.run(inner)
                case ast.Return(value=value) if value is not None:
                    parts = value.elts if isinstance(value, ast.Tuple) else [value]
                    self.returns = tuple(self.of(part) for part in parts)
                case ast.Expr(value=value):
                    self.of(value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else None
            called = None if parts else self._call(value) if isinstance(value, ast.Call) else None
            for i, name in enumerate(target.elts):
                if isinstance(name, ast.Name):
                    one = self.of(parts[i]) if parts else called[i] if called and i < len(called) else Value()
                    self.values[name.id] = one
        elif isinstance(target, ast.Name):
            self.values[target.id] = _known(target.id, self.of(value))

    def _named(self, name: str) -> Value:
        known = self.values.get(name)
        return Value(bound=_BOUNDS.get(name, LIMIT - 1)) if known is None else known

    def of(self, node: ast.expr) -> Value:
        """What is known of an expression."""
        match node:
            case ast.Constant(value=bool() | int() as value):
                return Value(bound=abs(value))
            case ast.Constant(value=float()):
                return FLOAT
            case ast.Name(id=name):
                return FLOAT if name in _FLOAT_NAMES else self._named(name)
            case ast.Subscript(value=value):
                return self.of(value)
            case ast.Attribute(value=value):
                return self.of(value)
            case ast.UnaryOp(operand=operand):
                return self.of(operand)
            case ast.BinOp(op=ast.Sub(), right=right) if floor := _remainder(node):
                self.of(right)  # gives the function of its call what it is called with
                x, size = map(self.of, floor)
                return Value(x.wide or size.wide, LIMIT - 1, x.lost | size.lost)
            case ast.BinOp(left=left, op=op, right=right):
                return self._combined(op, self.of(left), self.of(right), node)
            case ast.IfExp(test=test, body=then, orelse=other):
                self.of(test)
                return self.of(then).or_(self.of(other))
            case ast.Call():
                returned = self._call(node)
                return returned[0] if returned else Value()
            case _:
                values = [
                    self.of(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)
                ]
                return Value(lost=frozenset(one for value in values for one in value.lost))

    def _combined(self, op: ast.operator, left: Value, right: Value, node: ast.AST) -> Value:
        lost = left.lost | right.lost
        wide = left.wide or right.wide
        match op:
            case ast.Add() | ast.Sub():
                bound = left.bound + right.bound
            case ast.Mult():
                bound = left.bound * right.bound
            case ast.Mod():
                return Value(wide, min(left.bound, max(right.bound - 1, 0)), lost)
            case ast.FloorDiv():
                return Value(wide, left.bound // _divisor(node), lost)
            case ast.Div():
                return FLOAT
            case ast.BitAnd() | ast.RShift():
                return Value(wide, left.bound, lost)
            case _:
                return Value(wide, LIMIT - 1, lost)
        if wide or bound < LIMIT:
            return Value(wide, bound, lost)
        if isinstance(op, ast.Mult):
            text = ast.unparse(node)
            if text in _COUNTED or self._is_listed(text):
                return Value(False, LIMIT >> 2, lost)
            if isinstance(node, ast.BinOp) and (rounded := _rounded(node)) is not None:
                return Value(False, min(self.of(rounded).bound, LIMIT >> 2), lost)
            if floor := _floored(node):
                x, size = map(self.of, floor)
                if x.bound + size.bound <= LIMIT:
                    return Value(False, max(x.bound, x.bound + size.bound - 1), lost)
            lost |= {(getattr(node, "lineno", 0), text)}
        return Value(False, LIMIT - 1, lost)

    def _is_listed(self, text: str) -> bool:
        """Whether it is the first position of a listed block, or how many positions all of them have: blocks
        are as large as the host says.
        """
        found = _LISTED.fullmatch(text)
        return found is not None and int(found[1] or found[2]) in self.blocks

    def _call(self, node: ast.Call) -> tuple[Value, ...]:
        values = [self.of(arg) for arg in node.args]
        keywords = {keyword.arg: self.of(keyword.value) for keyword in node.keywords if keyword.arg}
        match node.func:
            case ast.Attribute(value=value, attr="to"):
                own = self.of(value)
                kind = ast.unparse(node.args[0])
                if kind == "tl.int32" and own.wide:  # a number of lists: fewer than 2^31 exist
                    return (Value(False, min(own.bound, LIMIT - 1), own.lost),)
                is_wide = "int64" in kind or "float" in kind or "dtype" in kind
                return (replace(own, wide=is_wide or own.wide),)
            case ast.Attribute(value=ast.Name(id="tl"), attr="cast"):
                return (replace(values[0], wide="int64" in ast.unparse(node.args[1])),)
            case ast.Attribute(value=ast.Name(id="tl"), attr=name) if name in _FLOATS:
                return (FLOAT,)
            case ast.Attribute(value=ast.Name(id="tl"), attr="sum"):
                return (replace(values[0], bound=min(values[0].bound, TILE)),)
            case ast.Attribute(value=ast.Name(id="tl"), attr="arange"):
                return (Value(bound=values[1].bound),)
            case ast.Attribute(value=ast.Name(id="tl"), attr=name) if name in _ADDRESSES:
                self.found |= values[0].lost
                return (Value(),)
            case ast.Attribute(attr="inline_asm_elementwise"):
                self.found |= {one for arg in node.args for one in self.of(arg).lost}
                return (Value(),)
            case ast.Attribute(value=ast.Name(id="tl"), attr=name) if name in _CHOICES:
                several = values[1:] if name == "where" else values[:1] if name == "reshape" else values
                if name in ("minimum", "min") and len(several) > 1 and not any(v.wide for v in several):
                    least = min(value.bound for value in several)
                    return (Value(False, least, frozenset(x for v in several for x in v.lost)),)
                first, *rest = several
                for other in rest:
                    first = first.or_(other)
                return (replace(first, wide=any(value.wide for value in several)),)  # Triton promotes
            case ast.Attribute(value=ast.Name(id="tl"), attr="cdiv"):
                return (replace(values[0], bound=values[0].bound // _size(node.args[1]) + 1),)
            case ast.Attribute(attr="reshape", value=value):
                return (self.of(value),)
            case ast.Name(id=name) if name in self.functions:
                return self._enter(name, node, values, keywords)
            case _:
                return (Value(lost=frozenset(x for value in values for x in value.lost)),)

    def _enter(
        self, name: str, node: ast.Call, values: list[Value], keywords: Mapping[str, Value]
    ) -> tuple[Value, ...]:
        """A call of another function of the module."""
        function = self.functions[name]
        parameters = [arg.arg for arg in function.tree.args.args]
        for parameter, value in (*zip(parameters, values, strict=False), *keywords.items()):
            self.found |= value.lost
            bound = min(value.bound, _BOUNDS.get(parameter, LIMIT - 1))
            own = Value(value.wide, bound)
            before = self.given[name].get(parameter)
            self.given[name][parameter] = own if before is None else before.or_(own)
        return function.returns


FLOAT = Value(wide=True)


def _divisor(node: ast.AST) -> int:
    """The least that is divided by."""
    return _size(node.right) if isinstance(node, ast.BinOp) else 1


def _size(node: ast.expr) -> int:
    """The least that a positive number is."""
    match node:
        case ast.Constant(value=int(value)) if value > 0:
            return value
        case _:
            return 1


def _rounded(node: ast.BinOp) -> ast.expr | None:
    """x, of `x // (n * size) * size`, or the number of a tile, of `number * BLOCK_M`: a position."""
    match node:
        case ast.BinOp(left=ast.BinOp(left=x, op=ast.FloorDiv(), right=by), right=ast.Name(id=name)) if (
            name in {part.id for part in ast.walk(by) if isinstance(part, ast.Name)}
        ):
            return x
        case ast.BinOp(left=number, right=ast.Name(id="BLOCK_M" | "BLOCK_N" | "BLOCK_S" | "BLOCK")):
            return number
        case _:
            return None


#: Functions of kernels that divide x by a size and round down. That times size lies less than a size from x.
_FLOORS = frozenset({"_floor_div", "_floor_div_by_any"})


def _floored(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """x and size, of `_floor_div(x, size) * size`."""
    match node:
        case ast.BinOp(
            left=ast.Call(func=ast.Name(id=name), args=[x, size], keywords=[]), op=ast.Mult(), right=right
        ) if name in _FLOORS and ast.dump(size) == ast.dump(right):
            return x, size
        case _:
            return None


def _remainder(node: ast.BinOp) -> tuple[ast.expr, ast.expr] | None:
    """x and size, of `x - _floor_div(x, size) * size`, which is exact also where the product wraps."""
    floor = _floored(node.right)
    return floor if floor and ast.dump(floor[0]) == ast.dump(node.left) else None


def _is_range(function: ast.expr) -> bool:
    return ast.unparse(function) in ("range", "tl.range", "tl.static_range")


def _between(ends: Iterable[Value]) -> Value:
    """The counter of a loop: no larger than the ends of its range, whatever its step. An end that may have
    overflowed says nothing.
    """
    several = tuple(ends)
    if any(end.lost for end in several):
        return Value()
    return Value(bound=min(max(end.bound for end in several), LIMIT - 1))


#: An entry of a list is the number of a block, or twice that and a bit. Times the size of blocks, a number is
#: the position of the first key or query: the host counts the blocks of the longest sequence (`_BLOCKS`),
#: and the kernel that makes the lists keeps no entry beyond, and each once.
_LISTED = re.compile(
    r"_list_entry\([^()]*\((\d+) // BLOCK_[MN]\)\) \* \1|(?:listed|list_entry // 2) \* (\d+)"
)
_BLOCKS = re.compile(r"\(\w+ \+ (\d+)\) // (\d+)")

#: b, h and tiles number programs, of which there are fewer than 2^31. So there are of rows of q, which have
#: 16 columns or more, and of sums that are joined: memory holds them. A split lies in its sequence. Turns
#: are as many as the queries of a call need; programs of the kernel that sums over them have 64 columns. The
#: tiles of all copies of all sequences are programs of one launch, and so are the queries whose weights are
#: kept at a time. An inverted list names queries, each once, whose heads are rows of q; blocks of keys are as
#: many as the keys have.
_COUNTED = frozenset(
    {
        "b * H",
        "(b * H + h) * M",
        "(b * H + h) * q_rows",
        "split * M",
        "tl.program_id(2) * M",
        "h_kv * G",
        "head * G",
        "M * G",
        "M * H",
        "(word * 32 + part) * 128",  # the first key of a block: blocks are as many as words have bits
        "M * head_tiles",
        "(T + B + 1) * head_tiles",  # programs of a KV head, fewer than a grid has
        "split * split_size",
        "q_tiles * SECTION",
        "kv_tiles * SECTION",
        "b * Hkv",
        "turn * turn_queries",
        "tl.program_id(1) * 64",
        "B * H",
        "B * Hkv",
        "Hkv * B",
        "listed * G",
        "tile // key_tiles % list_blocks * 64",
        "copies * B",
        "copy * B",
        "turn * copies",
        "key_tiles * (copies * B * 1)",
        "q_lo % chunk * (B * 1)",
        "q_lo % chunk * (B * Hkv)",
    }
)


def _known(name: str, value: Value) -> Value:
    """A value under a name that says how large it can be."""
    bound = _BOUNDS.get(name)
    return value if bound is None or value.lost else replace(value, bound=min(value.bound, bound))
