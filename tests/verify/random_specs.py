"""Whole random specs, valid by construction: layouts, storage, heads, inputs, masks, scores, lengths,
gradients and schedules.

Everything is drawn as text, so that what users write is what is tested, from the parser to the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import assume
from hypothesis import strategies as st

from attnc.build import plan_program
from attnc.diagnostics import DiagnosticError
from attnc.model.resolve import resolve
from attnc.plan.sm90.layout import FEWEST_REGISTERS, entry_registers, registers_left
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from tests.targets import TARGETS
from tests.verify.random_forms import draw_forms
from tests.verify.random_words import Extra, Words

#: The target whose kernels not every spec has.
HOPPER = "cuda.sm_90a"
EVERY_TARGET = (*TARGETS, HOPPER)

#: Names that kernels, or the host code around them, might use for themselves.
NAMES = (
    "acc_2", "alpha", "args", "BLOCK_M", "cap", "d", "device", "doc", "doc_q", "first", "first_pos",
    "float16", "full", "full_hi", "full_lo", "h_kv", "head", "heads", "hi", "K", "k_first", "keep",
    "kv_len", "l_new", "last_pos", "lo", "m_new", "m_tile", "MASKED", "n", "O", "p", "page", "partial",
    "Q", "q_ptr", "q_rows", "q_tiles", "rank", "row", "s", "scale", "seed", "shift", "size", "slope",
    "spec", "stride_qb", "t", "tile", "TMA", "V", "x", "x_ptr", "x_row", "zero",
)  # fmt: skip
#: Shapes of the other inputs; HEADS stands for the number of query heads.
_SHAPES = (
    (), ("B",), ("HEADS",), ("N",), ("M",), ("B", "N"), ("B", "M"), ("HEADS", "N"), ("B", "HEADS"),
    ("M", "N"), ("B", "HEADS", "M", "N"), ("1", "HEADS", "1", "N"), ("X",), ("HEADS", "X"), ("4", "M"),
)  # fmt: skip
HEADS = (("H", "H"), ("Hkv * G", "Hkv"), ("G", "1"), ("2", "2"), ("4", "2"), ("2 * Hkv", "Hkv"))
#: Rows of CUDA kernels are copied in pieces of 8 elements; products of wgmma are 16 deep.
_WIDTHS, _CUDA_WIDTHS, _WIDE = (8, 16, 20, 32), (8, 16, 24, 32), (40, 64, 72, 96, 128)
_HOPPER_WIDTHS = (16, 16, 32, 64, 80, 128, 192, 256, 8, 24, 40, 72, 72, 88, 136, 200, 248)
_HOPPER_VALUES = (16, 32, 64, 128, 208, 256, 8, 40, 72, 72, 120, 136, 200)
#: Heads whose columns of o two warpgroups of Hopper share.
_SHARED_WIDTHS = (264, 272, 288, 320, 448, 512)
_EVERYWHERE, _LAUNCH = frozenset({"b", "h", "q_idx", "kv_idx"}), frozenset({"b"})
_OF_A_HEAD, _OF_A_KEY = frozenset({"b", "h"}), frozenset({"b", "h", "kv_idx"})
#: Forms of `normalize =` without arguments; those whose schedules say how maxima are found.
FORMS = ("softpick", "stick_breaking")
_WITH_SOFTMAX = ("softmax", "softpick")
_UNIFIED = "unified_max(phi = 0.5, bounds = [-4, 4], fallback = online)"
_BOTTOM_UP = "online(rescale = every_step)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where the rows of q, and those of k and v, lie."""

    q: str = "dense"
    kv: str = "dense"
    prefix: bool = False

    @property
    def plain(self) -> bool:
        return self == Storage()

    def q_axes(self, heads: str) -> tuple[str, ...]:
        return ("B", "M", heads) if self.q == "dense" else ("T", heads)

    def kv_axes(self, heads: str) -> tuple[str, ...]:
        return ("S", heads) if self.kv == "ragged" else ("B", "N", heads)

    @property
    def q_via(self) -> str:
        return "" if self.q == "dense" else " via ragged(q_ends)"

    def kv_via(self, page: int) -> str:
        return {"dense": "", "ragged": " via ragged(k_ends)", "paged": f" via paged(slots, page = {page})"}[
            self.kv
        ]

    @property
    def inputs(self) -> Iterator[str]:
        if self.q == "ragged":
            yield "input q_ends: i32[B + 1]"
        if self.kv == "ragged":
            yield "input k_ends: i32[B + 1]"
        if self.kv == "paged":
            yield "input slots: i32[B, P]"


_STORAGES = (
    *[Storage()] * 5,
    Storage(q="ragged"),
    Storage(q="ragged", kv="ragged"),
    Storage(q="ragged", kv="paged"),
    Storage(kv="paged"),
    Storage(kv="paged", prefix=True),
    Storage(prefix=True),
    Storage(kv="ragged"),
    Storage(q="ragged", kv="ragged", prefix=True),
    Storage(q="ragged", kv="paged", prefix=True),
)


@st.composite
def specs(
    draw: st.DrawFn,
    depth: int = 2,
    *,
    targets: Sequence[str] = ("triton",),
    wide: bool = False,
    widest: int = 128,
    with_gradients: bool = False,
    everywhere: bool = False,
) -> str:
    """The text of a file with one attention and its schedule for each of the targets; for `HOPPER` where it
    lowers the attention, and of what has keys or values of 8 bits, or a scale of v, for Triton alone.

    wide: heads and tiles as large as those of models, for a GPU; widest: columns of a head of Hopper's;
    beyond 256, some specs are for it alone, whose warpgroups share columns; with_gradients: of whatever has
    some; everywhere: only what each of the targets lowers, under a plain schedule where it does not under the
    drawn one.
    """
    on_cuda = any(target != "triton" for target in targets)
    hopper = HOPPER in targets and (everywhere or draw(st.integers(0, 4)) > 0)
    dtype = draw(st.sampled_from(("bf16", "f16") if hopper else ("bf16", "f16", "f32")))
    heads, kv_heads = draw(st.sampled_from(HEADS))
    storage = draw(st.sampled_from(_STORAGES))
    never_decodes = with_gradients or storage.q != "dense"
    decodes = not never_decodes and draw(st.integers(0, 4)) == 0
    may_share = hopper and widest > 256 and not (storage.prefix or everywhere or wide)
    shared = may_share and draw(st.integers(0, 7)) == 0
    usual = _HOPPER_WIDTHS if hopper else _CUDA_WIDTHS if on_cuda else _WIDTHS
    widths: tuple[int, ...] = _SHARED_WIDTHS if shared else _WIDE if wide else usual
    d = draw(st.sampled_from([n for n in widths if n <= widest]))
    values: tuple[int, ...] = (64, 72, 96, 128) if wide else _HOPPER_VALUES if hopper else (8, 16, 24)
    values = _SHARED_WIDTHS if shared else values
    most = d if storage.prefix else widest
    if storage.prefix and on_cuda and with_gradients:  # which takes 16 of them at once
        values = tuple(n for n in values if n % 16 == 0)
    dv = draw(st.sampled_from([n for n in values if n <= most] or [d]))
    extras = _extras(draw, heads, on_cuda)
    words = Words(draw, extras, heads)
    kv_axes = draw(st.permutations(storage.kv_axes(kv_heads)))
    v_axes = kv_axes if storage.prefix else draw(st.permutations(kv_axes))
    via = storage.kv_via(draw(st.sampled_from((1, 3, 16, 40))))
    score, softmax = words.float_expr(depth, _EVERYWHERE, dot=True), _softmax(words, dropout=not decodes)
    of_k = of_v = dtype
    may_be_narrow = "triton" in targets and not (with_gradients or shared)
    if may_be_narrow and dtype != "f32" and draw(st.integers(0, 5)) == 0:
        of_k, of_v = (draw(st.sampled_from(("e4m3", "e5m2", "i8", dtype))) for _ in "kv")
        of_v = of_k if storage.prefix else of_v
    scales_keys = False
    if not everywhere and draw(st.integers(0, 9)) == 0:
        softmax = draw(st.sampled_from(FORMS))
    elif may_be_narrow and draw(st.integers(0, 7)) == 0:
        scales_keys = draw(st.booleans())
        softmax = _scaled(softmax, words.float_expr(1, _OF_A_KEY if scales_keys else _OF_A_HEAD, dot=False))
    o_axes = _drawn(draw, storage.q_axes(heads))
    forms = draw_forms(words, storage.q_axes(heads), dtype, dv)
    weight, epilogue, score = forms.weight, forms.epilogue, score + forms.term
    extras += forms.extras
    softmax = "none" if weight else softmax
    form = softmax.split("(")[0]
    has_narrow = {of_k, of_v} != {dtype} or "v_scale" in softmax
    lines = [
        f"input q: {dtype}[{_drawn(draw, storage.q_axes(heads))}, {d}]{storage.q_via}",
        f"input k: {of_k}[{', '.join(kv_axes)}, {d}]{via}",
        f"input v: {of_v}[{', '.join(v_axes)}, {dv}]{' via prefix(k)' if storage.prefix else via}",
        *storage.inputs,
        *(extra.declaration for extra in extras),
        *(f"input {name}" for name in ("rate: f32[]", "draws: i64[]") if "rate" in softmax),
        f"score = {score}",
        *([f"weight = {weight}"] if weight else []),
        f"output o: {dtype}[{o_axes}, {dv}]{epilogue}",
    ]
    mask = [words.bool_expr(depth, _EVERYWHERE)] if draw(st.integers(0, 3)) else []
    if mask or forms.tree:
        lines.append(f"mask = {' and '.join([*mask, *([forms.tree] if forms.tree else [])])}")
    lengths = draw(st.sampled_from(((), (), (), ("N",), ("M",), ("M", "N"))))
    if storage.kv == "paged":
        lengths = ("N",)
    if "ragged" in (storage.q, storage.kv):
        lengths = tuple(name for name in lengths if storage.kv == "paged")
    for name in lengths:
        if draw(st.booleans()):
            lines += [f"input lens_{name}: i32[B]", f"length {name} = lens_{name}[b]"]
        else:
            lines.append(f"length {name} = {words.int_expr(1, _LAUNCH)}")
    if draw(st.booleans()) and form != "none":
        lines.append(f"output lse: f32[{_drawn(draw, storage.q_axes(heads))}]")
    lines.append(f"normalize = {softmax}")
    may_grad = not decodes and (with_gradients or draw(st.booleans())) and not has_narrow
    own = ("q", "k") if storage.prefix else ("q", "k", "v")
    grads = _grads(draw, words, score + weight + epilogue + softmax, own) if may_grad else []
    if grads:
        lines.append(f"grad {', '.join(grads)}")
    statements = "\n  ".join(lines)
    text = f"attention spec {{\n  {statements}\n}}\n"
    joins_bytes = "rate" in softmax and any(extra.dtype in ("bool", "u8") for extra in extras)
    schedules = {}
    for target in ("triton",) if has_narrow else (HOPPER,) if shared else targets:
        shape = Shape(
            target=target,
            storage=storage,
            decodes=decodes,
            wide=wide,
            sums_dq="q" in grads and not storage.prefix,
            joins_bytes=joins_bytes,
            unifies=not scales_keys,
            form=form,
            shares=shared,
        )
        schedules[target] = f"schedule spec for {target} {{\n  {draw_schedule(draw, shape)}\n}}\n"
        if everywhere and not is_lowered(text + schedules[target]):
            schedules[target] = f"schedule spec for {target} {{ loops = [q, kv] }}\n"
            assume(is_lowered(text + schedules[target]))
    if HOPPER in schedules and not is_lowered(text + schedules[HOPPER]):
        del schedules[HOPPER]
    assume(schedules)
    if (
        form != "softmax" or epilogue
    ):  # some keys of schedules are those of a softmax, and of rows that one thread has
        schedules = {target: x for target, x in schedules.items() if is_lowered(text + x)}
        schedules = schedules or {"triton": "schedule spec for triton {\n  tile.q = 16, tile.kv = 32\n}\n"}
    return text + "".join(schedules.values())


def is_lowered(text: str) -> bool:
    """Whether the compiler takes a spec. What a target has no kernels for is a diagnostic."""
    try:
        plan_program(resolve(parse(Source("a.attn", text)), prelude()))
    except DiagnosticError:
        return False
    return True


def _drawn(draw: st.DrawFn, axes: Sequence[str]) -> str:
    return ", ".join(draw(st.permutations(axes)))


def _extras(draw: st.DrawFn, heads: str, on_cuda: bool) -> list[Extra]:
    found = []
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True)):
        match draw(st.integers(0, 4)):
            case 0:  # documents, or whatever ascends
                shape = draw(st.sampled_from((("B", "N"), ("N",), ("B", "M"), (heads, "N"))))
                found.append(Extra(name, draw(st.sampled_from(("i32", "i64"))), shape, fact="sorted"))
            case 1:  # widths and limits
                shape = draw(st.sampled_from(((), (), ("B",), (heads,))))
                found.append(Extra(name, draw(st.sampled_from(("i32", "i32", "i64"))), shape))
            case _:
                dtype = draw(st.sampled_from(("u8", "i32", "i64", "bool", "f32", "bf16")))
                found.append(Extra(name, dtype, _shape(draw, heads)))
    return found


def _shape(draw: st.DrawFn, heads: str) -> tuple[str, ...]:
    return tuple(heads if size == "HEADS" else size for size in draw(st.sampled_from(_SHAPES)))


def _softmax(words: Words, *, dropout: bool) -> str:
    sinks = [e for e in words.extras if e.dtype == "f32" and e.shape in ((), (words.heads,))]
    arguments = []
    has_sink: bool = words.draw(st.booleans())
    if sinks and has_sink:
        sink = words.draw(st.sampled_from(sinks))
        arguments.append(f"sink = {sink.name}{'[h]' if sink.shape else ''}")
    if dropout and words.draw(st.integers(0, 7)) == 0:
        arguments += ["dropout = rate", "seed = draws"]
    return f"softmax({', '.join(arguments)})" if arguments else "softmax"


def _scaled(softmax: str, factor: str) -> str:
    """The softmax with a scale of v."""
    return f"{softmax[:-1]}, v_scale = {factor})" if softmax.endswith(")") else f"softmax(v_scale = {factor})"


def _grads(draw: st.DrawFn, words: Words, text: str, own: Sequence[str]) -> list[str]:
    """Some of what can be differentiated by."""
    used = [e for e in words.extras if re.search(rf"\b{e.name}\b(?! = )", text)]  # not 'seed = draws'
    floats = [e.name for e in used if e.type == "float"]
    return draw(st.lists(st.sampled_from((*own, *floats)), min_size=1, unique=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a schedule has to suit."""

    target: str
    storage: Storage
    decodes: bool
    wide: bool
    sums_dq: bool
    joins_bytes: bool
    unifies: bool = True
    form: str = "softmax"
    shares: bool = False


def draw_schedule(draw: st.DrawFn, shape: Shape) -> str:
    if shape.target == HOPPER and shape.shares:
        splits = "" if shape.storage.q != "dense" else f", split.kv {_or(draw(st.integers(1, 3)), 1)}"
        return f"loops = [kv], pack = gqa{splits}"
    if shape.target == HOPPER:
        return (_hopper_decoding if shape.decodes else _hopper_schedule)(draw, shape)
    on_cuda = shape.target != "triton"
    may_split = on_cuda and shape.form != "stick_breaking"
    split = draw(st.sampled_from(("q", "kv"))) if may_split else "q"
    tiles = _tiles(draw, shape, split) + (f", warp_split = {split}" if on_cuda else "")
    if shape.decodes:
        pack = draw(st.sampled_from(("gqa", "none")))
        splits = draw(st.sampled_from(("1", "3", "auto", "fixed(64)")))
        softmaxes = ["online", "online", _UNIFIED if shape.unifies and shape.form == "softmax" else "online"]
        softmax = f", softmax = {draw(st.sampled_from(softmaxes))}" if shape.form in _WITH_SOFTMAX else ""
        return f"loops = [kv], pack = {pack}\n  {tiles}\n  split.kv = {splits}{softmax}"
    lines = [tiles]
    if shape.form == "softmax" and shape.storage.plain and draw(st.integers(0, 4)) == 0:
        lines += ["loops = [kv, q]", f"softmax = {_BOTTOM_UP}"]
    else:
        softmaxes = ["online", _BOTTOM_UP, "online(rescale = lazy(8))"] + ["two_pass"] * (split == "q")
        lines += ["loops = [q, kv]"]
        lines += [f"softmax = {draw(st.sampled_from(softmaxes))}"] if shape.form in _WITH_SOFTMAX else []
        lines += draw(st.sampled_from(([], ["persistent = true"], ["order = longest_first"])))
    if shape.sums_dq and shape.storage.plain and draw(st.booleans()):
        lines.append(f"backward {{ accumulate.dq = {draw(st.sampled_from(('atomic', 'sequential')))} }}")
    return "\n  ".join(lines)


def _tiles(draw: st.DrawFn, shape: Shape, split: str) -> str:
    if shape.wide:
        if shape.target == "triton":
            rows = 16 if shape.decodes else draw(st.sampled_from((64, 128)))
            keys, warps = draw(st.sampled_from((32, 64))), draw(st.sampled_from((4, 8)))
        else:  # each of 4 warps has 16 rows or keys
            rows = 16 if shape.decodes and split == "kv" else draw(st.sampled_from((64, 64, 128)))
            warps = draw(st.sampled_from((4, 4, 8))) if split == "kv" else 4
            rows = min(rows, 256 // warps) if split == "kv" else rows
            keys = 16 * warps
        return (
            f"tile.q = {rows}, tile.kv = {keys}, warps = {warps}, stages = {draw(st.sampled_from((1, 2, 3)))}"
        )
    if shape.target == "triton":
        least = 32 if shape.joins_bytes else 16  # dropout beside 8 bits takes no 16
        return f"tile.q = {draw(st.sampled_from((16, 32)))}, tile.kv = {draw(st.sampled_from((least, 32)))}"
    return f"tile.q = 32, tile.kv = 32, warps = 2, stages = {draw(st.sampled_from((1, 2, 3)))}"


def _hopper_schedule(draw: st.DrawFn, shape: Shape) -> str:
    """Warpgroups, tiles and registers that a launch holds; of large tiles that do not fit, a small one is
    left.
    """
    consumers = draw(st.sampled_from((2, 2, 2, 3, 4)))
    keys = draw(st.sampled_from((16, 48, 64, 80, 128, 176, 256)))
    lines = [
        f"consumers = {consumers}, tile.kv in {{{keys}, 32}}, stages {_or(draw(st.integers(2, 4)), 2)}",
        f"overlap = {draw(st.sampled_from(('true', 'true', 'false')))}",
        f"pingpong = {draw(st.sampled_from(('false', 'true')))}",
    ]
    legal = [
        count
        for count in range(64, 241, 8)
        if count >= entry_registers(consumers) and registers_left(consumers, count) >= FEWEST_REGISTERS
    ]
    if draw(st.booleans()):
        lines.append(f"registers {_or(draw(st.sampled_from(legal)), legal[-1])}")
    softmaxes = ("online", "online(rescale = lazy(8))", "online(maximum = lazy(20))")
    lines += [f"softmax = {draw(st.sampled_from(softmaxes))}"] if shape.form in _WITH_SOFTMAX else []
    lines += draw(st.sampled_from(([], ["order = longest_first"])))
    if shape.storage.plain:
        lines += draw(st.sampled_from(([], [], ["cluster = 2"], ["cluster in {2, 1}"])))
    if shape.sums_dq and draw(st.booleans()):
        ways = ("atomic", "two_pass", "ordered", "sequential") if shape.storage.plain else ("two_pass",)
        lines.append(f"backward {{ accumulate.dq = {draw(st.sampled_from(ways))} }}")
    return "\n  ".join(lines)


def _hopper_decoding(draw: st.DrawFn, shape: Shape) -> str:
    """One warpgroup that multiplies, or two that share the columns of values which are in the keys."""
    keys, stages = draw(st.sampled_from((16, 32, 48, 64, 128))), _or(draw(st.integers(2, 4)), 2)
    splits = draw(st.sampled_from(("1", "3", "auto", f"fixed({2 * keys})")))
    lines = [f"loops = [kv], pack = gqa, tile.kv {_or(keys, 16)}, stages {stages}, split.kv = {splits}"]
    if shape.storage.prefix and shape.form in _WITH_SOFTMAX and draw(st.booleans()):
        lines.append("consumers = 2")
    return "\n  ".join(lines)


def _or(size: int, other: int) -> str:
    """That a key has this size, or the other where it does not fit."""
    return f"= {size}" if size == other else f"in {{{size}, {other}}}"
