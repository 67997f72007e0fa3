"""Whole random specs, valid by construction: layouts, heads, inputs, masks, scores, lengths and schedules.

Everything is drawn as text, so that what users write is what is tested, from the parser to the kernel. Float
arithmetic in masks is left out: a rounding error there turns a key over, and no bound can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from attnc.plan.names import clashes

#: Names that kernels, or the host code around them, might use for themselves.
NAMES = (
    "acc_2", "alpha", "args", "BLOCK_M", "cap", "d", "device", "doc", "doc_q", "first", "first_pos",
    "float16", "full", "full_hi", "full_lo", "h_kv", "head", "heads", "hi", "K", "k_first", "keep",
    "kv_len", "l_new", "last_pos", "lo", "m_new", "m_tile", "MASKED", "n", "O", "p", "page", "partial",
    "Q", "q_ptr", "q_rows", "q_tiles", "rank", "row", "s", "scale", "seed", "shift", "size", "slope",
    "spec", "stride_qb", "t", "tile", "TMA", "V", "x", "x_ptr", "x_row", "zero",
)  # fmt: skip
_INTS = (0, 1, 2, 3, 5, 7, 16, 17, 33)


@dataclass(frozen=True, slots=True)
class Extra:
    """An input besides q, k and v."""

    name: str
    dtype: str
    shape: tuple[str, ...]

    @property
    def type(self) -> str:
        return {"i32": "int", "i64": "int", "bool": "bool"}.get(self.dtype, "float")

    @property
    def declaration(self) -> str:
        return f"input {self.name}: {self.dtype}[{', '.join(self.shape)}]"


_HOME = {"B": "b", "M": "q_idx", "N": "kv_idx"}
#: Shapes of the other inputs; HEADS stands for the number of query heads.
_SHAPES = (
    (), ("B",), ("HEADS",), ("N",), ("M",), ("B", "N"), ("B", "M"), ("HEADS", "N"), ("B", "HEADS"),
    ("M", "N"), ("B", "HEADS", "M", "N"), ("1", "HEADS", "1", "N"), ("X",), ("HEADS", "X"), ("4", "M"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Words:
    """Draws expressions over the inputs of one spec."""

    draw: st.DrawFn
    extras: Sequence[Extra]
    heads: str

    def one_of(self, *choices: str) -> str:
        return self.draw(st.sampled_from(choices))

    def load(self, wanted: str, places: frozenset[str], depth: int) -> str | None:
        """An element of an input of this type, or None where none is; `places`: indices that may be used."""
        fitting = [extra for extra in self.extras if extra.type == wanted]
        if not fitting:
            return None
        extra = self.draw(st.sampled_from(fitting))
        if not extra.shape:
            return extra.name
        indices = []
        for size in extra.shape:
            home = "h" if size == self.heads else _HOME.get(size)
            if home in places and self.draw(st.integers(0, 3)):
                indices.append(home)
            else:
                indices.append("0" if size == "1" else self.int_expr(depth - 1, places))
        return f"{extra.name}[{', '.join(indices)}]"

    def int_expr(self, depth: int, places: frozenset[str]) -> str:
        kind = self.draw(st.integers(0, 9 if depth > 0 else 3))
        match kind:
            case 0 | 1:
                return self.one_of(*sorted(places), *(("q_pos",) if "q_idx" in places else ()), "M", "N")
            case 2:
                return str(self.draw(st.sampled_from(_INTS)))
            case 3:
                return self.load("int", places, depth) or self.one_of("B", "H", "D")
            case 4 | 5:
                op = self.one_of("+", "-")
                return f"({self.int_expr(depth - 1, places)} {op} {self.int_expr(depth - 1, places)})"
            case 6:
                return f"({self.int_expr(depth - 1, places)} * {self.one_of('2', '-1', '3', '-3', 'H')})"
            case 7:
                divisor = self.one_of("2", "3", "8", "16", "-3", "M", "G", self.int_expr(depth - 1, places))
                return f"({self.int_expr(depth - 1, places)} {self.one_of('//', '%')} {_nonzero(divisor)})"
            case 8:
                function = self.one_of("min", "max", "abs")
                arguments = [self.int_expr(depth - 1, places) for _ in range(1 if function == "abs" else 2)]
                return f"{function}({', '.join(arguments)})"
            case _:
                branches = f"{self.int_expr(depth - 1, places)}, {self.int_expr(depth - 1, places)}"
                return f"where({self.bool_expr(depth - 1, places)}, {branches})"

    def bool_expr(self, depth: int, places: frozenset[str]) -> str:
        kind = self.draw(st.integers(0, 8 if depth > 0 else 3))
        match kind:
            case 0 | 1:
                op = self.one_of("<", "<=", ">", ">=", "==", "!=")
                return f"({self.int_expr(depth, places)} {op} {self.int_expr(depth, places)})"
            case 2:
                loaded = self.load("float", places, depth)
                return (
                    f"({loaded} {self.one_of('<', '>=')} {self.one_of('0', '0.5', '-1')})"
                    if loaded
                    else "true"
                )
            case 3:
                return self.load("bool", places, depth) or self.one_of("true", "false")
            case 4:
                bounds = [self.int_expr(depth - 1, places) for _ in range(3)]
                return f"({bounds[0]} <= {bounds[1]} {self.one_of('<', '<=')} {bounds[2]})"
            case 5 | 6:
                op = self.one_of("and", "or")
                return f"({self.bool_expr(depth - 1, places)} {op} {self.bool_expr(depth - 1, places)})"
            case 7:
                return f"(not {self.bool_expr(depth - 1, places)})"
            case _:
                branches = f"{self.bool_expr(depth - 1, places)}, {self.bool_expr(depth - 1, places)}"
                return f"where({self.bool_expr(depth - 1, places)}, {branches})"

    def float_expr(self, depth: int, places: frozenset[str], dot: bool) -> str:
        kind = self.draw(st.integers(0, 11 if depth > 0 else 3))
        match kind:
            case 0 | 1:
                return "dot(q, k)" if dot else self.one_of("0.5", "-1.25", "3", "1e-3")
            case 2:
                return self.load("float", places, depth) or self.one_of("0.25", "2")
            case 3:
                return f"({self.int_expr(0, places)} / {self.one_of('8', '-16', 'sqrt(D)', 'D', '64.0')})"
            case 4 | 5:
                op = self.one_of("+", "-")
                left, right = (self.float_expr(depth - 1, places, dot) for _ in range(2))
                return f"({left} {op} {right})"
            case 6:
                factor = self.one_of("0.5", "-2", "3", "1.5", "D")
                return f"({factor} * {self.float_expr(depth - 1, places, dot)})"
            case 7:
                return f"({self.float_expr(depth - 1, places, dot)} / {self.one_of('sqrt(D)', '-4', '2.5')})"
            case 8:
                function = self.one_of("min", "max")
                return (
                    f"{function}({self.float_expr(depth - 1, places, dot)}, {self.one_of('0', '0.5', '2')})"
                )
            case 9:
                inner = self.float_expr(depth - 1, places, dot)
                form = self.one_of(
                    "tanh({})", "abs({})", "exp(min({}, 1))", "log(abs({}) + 1)", "sqrt(abs({}))"
                )
                return form.format(inner)
            case 10:
                inner = self.int_expr(depth - 1, places)
                return self.one_of("tanh({})", "exp(min({}, 2))", "log(abs({}) + 1)", "sqrt(abs({}))").format(
                    inner
                )
            case _:
                branches = (
                    f"{self.float_expr(depth - 1, places, dot)}, {self.float_expr(depth - 1, places, dot)}"
                )
                return f"where({self.bool_expr(depth - 1, places)}, {branches})"


def _nonzero(divisor: str) -> str:
    return "4" if divisor == "0" else divisor


@st.composite
def specs(draw: st.DrawFn, depth: int = 2, *, on_cuda: bool = False) -> str:
    """The text of a file with one attention and its schedule for triton, and one for CUDA if wanted."""
    dtype = draw(st.sampled_from(("bf16", "f16", "f32")))
    heads, kv_heads = draw(
        st.sampled_from(
            (("H", "H"), ("Hkv * G", "Hkv"), ("G", "1"), ("2", "2"), ("4", "2"), ("2 * Hkv", "Hkv"))
        )
    )
    widths = (8, 16, 24 if on_cuda else 20, 32)  # rows of CUDA kernels are copied in pieces of 8 elements
    d, dv = draw(st.sampled_from(widths)), draw(st.sampled_from((8, 16, 24)))
    names = [name for name in NAMES if not (on_cuda and clashes(name, "cuda.sm_80"))]
    extras = [
        Extra(name, draw(st.sampled_from(("i32", "i64", "bool", "f32", "bf16"))), _shape(draw, heads))
        for name in draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    ]
    words = Words(draw, extras, heads)
    everywhere, launch = frozenset({"b", "h", "q_idx", "kv_idx"}), frozenset({"b"})
    kv_axes = draw(st.permutations(("B", "N", kv_heads)))
    lines = [
        f"input q: {dtype}[{', '.join(draw(st.permutations(('B', 'M', heads))))}, {d}]",
        f"input k: {dtype}[{', '.join(kv_axes)}, {d}]",
        f"input v: {dtype}[{', '.join(draw(st.permutations(kv_axes)))}, {dv}]",
        *(extra.declaration for extra in extras),
        f"score = {words.float_expr(depth, everywhere, dot=True)}",
        f"output o: {dtype}[{', '.join(draw(st.permutations(('B', 'M', heads))))}, {dv}]",
    ]
    if draw(st.integers(0, 3)):
        lines.append(f"mask = {words.bool_expr(depth, everywhere)}")
    lengths = draw(st.sampled_from(((), (), (), ("N",), ("M",), ("M", "N"))))
    lines += [f"length {name} = {words.int_expr(1, launch)}" for name in lengths]
    if draw(st.booleans()):
        lines.append(f"output lse: f32[{', '.join(draw(st.permutations(('B', 'M', heads))))}]")
    lines.append(f"normalize = {_softmax(words)}")
    statements = "\n  ".join(lines)
    schedules = f"schedule spec for triton {{\n  {_schedule(draw)}\n}}\n"
    if on_cuda:
        schedules += f"schedule spec for cuda.sm_80 {{\n  {_cuda_schedule(draw)}\n}}\n"
    return f"attention spec {{\n  {statements}\n}}\n{schedules}"


def _shape(draw: st.DrawFn, heads: str) -> tuple[str, ...]:
    return tuple(heads if size == "HEADS" else size for size in draw(st.sampled_from(_SHAPES)))


def _softmax(words: Words) -> str:
    sinks = [e for e in words.extras if e.dtype == "f32" and e.shape in ((), (words.heads,))]
    has_sink = words.draw(st.booleans())
    if sinks and has_sink:
        sink = words.draw(st.sampled_from(sinks))
        return f"softmax(sink = {sink.name}{'[h]' if sink.shape else ''})"
    return "softmax"


def _cuda_schedule(draw: st.DrawFn) -> str:
    split, stages = draw(st.sampled_from(("q", "kv"))), draw(st.sampled_from((1, 2, 3)))
    tiles = f"tile.q = 32, tile.kv = 32, warps = 2, warp_split = {split}, stages = {stages}"
    match draw(st.integers(0, 5)):
        case 0:
            return f"loops = [kv, q]\n  {tiles}\n  softmax = online(rescale = every_step)"
        case 1:
            pack, splits = draw(st.sampled_from(("gqa", "none"))), draw(st.sampled_from(("1", "3", "auto")))
            return f"loops = [kv], pack = {pack}\n  {tiles}\n  split.kv = {splits}"
    softmaxes = ["online", "online(rescale = every_step)", "online(rescale = lazy(8))"]
    softmax = draw(st.sampled_from(softmaxes + ["two_pass"] * (split == "q")))
    rest = draw(st.sampled_from(("", "\n  persistent = true", "\n  order = longest_first")))
    return f"loops = [q, kv]\n  {tiles}\n  softmax = {softmax}{rest}"


def _schedule(draw: st.DrawFn) -> str:
    tiles = f"tile.q = {draw(st.sampled_from((16, 32)))}, tile.kv = {draw(st.sampled_from((16, 32)))}"
    if draw(st.integers(0, 4)) == 0:
        return f"loops = [kv, q]\n  {tiles}\n  softmax = online(rescale = every_step)"
    softmax = draw(
        st.sampled_from(
            ("online", "two_pass", "online(rescale = every_step)", "online(rescale = lazy(8))", "online")
        )
    )
    rest = draw(st.sampled_from(("", "\n  persistent = true", "\n  order = longest_first")))
    return f"loops = [q, kv]\n  {tiles}\n  softmax = {softmax}{rest}"
