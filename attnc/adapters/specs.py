"""The spec that an engine's arguments mean, and its kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, TypeAlias

import torch

from attnc.api.compile import compile_family, making, need_of, refuse_heads
from attnc.api.fastest import (
    HOPPER,
    TRITON,
    suits_tiles,
    target_of_order,
    targets_of_call,
    warn_of_loss,
)
from attnc.api.repeats import Plan
from attnc.api.tensors import to_finite
from attnc.diagnostics import DiagnosticError
from attnc.diagnostics.attempts import first_made
from attnc.diagnostics.shown import show_value
from attnc.model.dtypes import DType
from attnc.support.memory import make_picker

Kernel: TypeAlias = Callable[..., Any]

#: Of queries, in words of the language.
DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
#: Of caches, beside queries of 16 bits.
NARROW: dict[torch.dtype, DType] = {
    getattr(torch, dtype.facts.torch): dtype for dtype in DType if dtype.is_narrow
}

# f32 takes twice the shared memory, and three tf32 products for one.
_PREFILL = {
    2: "tile.q in {128, 64}, tile.kv in {64, 32}\n  warps in {8, 4}, stages in {3, 2}",
    4: "tile.q in {64, 32}, tile.kv = 32\n  warps = 4, stages = 2",
}
_DECODE_TILES = {2: (128, 64, 32, 16), 4: (64, 32, 16)}
# Beyond 256 columns, as latent attention has, shared memory holds a few tiles.
WIDE = 256
_WIDE_PREFILL = (
    "config tile.q = 64, warps = 8\n  config tile.q = 32, warps = 4\n  tile.kv in {32, 16}, stages in {2, 1}"
)
_WIDE_DECODE_TILES = {2: (64, 32, 16), 4: (16,)}
#: Of all kernels under an order of sums, whose products then have one shape.
_ORDERED = {2: "tile.kv = 64, stages in {3, 2, 1}", 4: "tile.kv = 32, stages in {2, 1}"}
_ORDERED_WIDE, _ORDERED_COLUMNS = "tile.kv = 32, stages in {2, 1}", 128
#: The same of latents, whose sums are twice in the registers of prompts.
_ORDERED_LATENT = "tile.q = 32, tile.kv = 32, stages in {2, 1}, warps = 8"
#: What Hopper's kernels do without in most tiles; and the most columns that they have under an order of sums,
#: of values and of latents.
_LAZY, _MOST_ON_HOPPER = "softmax = online(maximum = lazy(20))", (512, 576)
#: Query rows that a key of 8 bits is multiplied by from which a prompt is faster, on an H200, on keys and
#: values that were converted before its kernel than on tiles that it converts; and bytes that they may take.
ROWS_TO_CONVERT, MOST_CONVERTED = 1024, 1 << 30
#: Keys of a segment where an engine asks for rows that do not depend on the batch.
SEGMENT = 2048
#: Rows of a tile of few queries, at most; a chunk has more of them on Hopper.
_MOST_ROWS = 64
_BACKWARD = {
    2: "tile.q in {64, 32}, tile.kv in {64, 32}\n    warps = 4, stages in {2, 1}",
    4: "tile.q = 32, tile.kv = 32\n    warps = 4, stages in {2, 1}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a kernel is to compute: all that the text of its spec depends on.

    name: of the attention, hence of the kernel in a profile
    q, kv, o: shapes with storage, such as "[T, Hkv * G, D] via ragged(cu_q)"
    value: shape with storage of v where it is not that of k, "" for the same; value_dim: its Dv, 0 for D
    inputs: further declarations, one a line
    length: name of the tensor with the number of keys of a sequence, "" for all
    mask: of the language, "" for none; terms: what is added to the score
    softcap: 0 or less for none, as engines have it
    sink, slopes: names of f32[Hkv * G] inputs, "" for none; slopes as in ALiBi
    lse: shape of the lse output, "" for none
    dropout: whether weights are dropped, by inputs dropout_p: f32[] and seed: i64[]
    grad: names of inputs that get a gradient
    decode: for few queries: the heads of a group share a tile, and programs share the keys
    rows: of such a tile at most, 16, 32 or 64
    is_long: whether there is room for more than `SHORT_KEYS` keys of a sequence
    split: by the device and shapes; split_size: instead, this many keys for each, a multiple of 16
    cache: dtype of k and v where they have 8 bits, else None; k_scale, v_scale: names of f32[B, Hkv] inputs
    that they are multiplied by, "" for none
    converts: keys and values of 8 bits become 16 before Hopper's kernel (`suits_conversion`), not in it
    order: keys of a segment, so that rows have the same bits in every call; 0: sums come in any order
    unites: queries share tiles of Hopper's kernel over the union of their lists
    walks: under an order, a block of Hopper's kernel has all segments of its rows, where it can (latents)
    """

    name: str
    dtype: torch.dtype
    head_dim: int
    scale: float
    q: str
    kv: str
    o: str
    inputs: tuple[str, ...]
    length: str
    value: str = ""
    value_dim: int = 0
    mask: str = "causal"
    terms: tuple[str, ...] = ()
    softcap: float = 0.0
    sink: str = ""
    slopes: str = ""
    lse: str = ""
    dropout: bool = False
    grad: tuple[str, ...] = ()
    decode: bool = False
    rows: int = 16
    is_long: bool = False
    split: bool = True
    unites: bool = False
    split_size: int = 0
    cache: torch.dtype | None = None
    k_scale: str = ""
    v_scale: str = ""
    converts: bool = False
    order: int = 0
    walks: bool = False

    @property
    def text(self) -> str:
        return f"{self.attention}\n{self._schedule}"

    @property
    def hopper_text(self) -> str:
        """The spec for Hopper's own kernels: with no schedule, which follows from the shapes, but for few
        queries of keys of their own, which programs share, those of 8 bits among warps that have keys of
        their own; and for prompts whose keys are converted before.
        """
        if self.order:
            return f"{self.attention}\nschedule {self.name} for {HOPPER} {{\n  {self._hopper_knobs}\n}}\n"
        if self.converts and not self.decode:
            order = ", order = longest_first" if self.mask else ""
            knobs = f"{_LAZY}{order}\n  convert = before"
            return f"{self.attention}\nschedule {self.name} for {HOPPER} {{\n  {knobs}\n}}\n"
        if self.unites:
            knobs = "loops = [kv], pack = gqa, split.kv = auto, lists = union"
            return f"{self.attention}\nschedule {self.name} for {HOPPER} {{\n  {knobs}\n}}\n"
        if not self.decode or self.is_latent:
            return self.attention
        split = f"fixed({self.split_size})" if self.split_size else "auto" if self.split else "1"
        warps = ", warp_split = kv" if self.suits_warps else ""
        knobs = f"loops = [kv], pack = gqa{warps}\n  split.kv = {split}"
        if self.rows > _MOST_ROWS and self.cache is None:
            knobs += f"\n  tile.q = {self.rows}, overlap = true"
            knobs += "" if self.slopes or self.terms else f", {_LAZY}"
        return f"{self.attention}\nschedule {self.name} for {HOPPER} {{\n  {knobs}\n}}\n"

    @property
    def keeps_order_on_hopper(self) -> bool:
        columns, most = self.value_dim or self.head_dim, _MOST_ON_HOPPER
        fits = self.head_dim <= WIDE and not self.head_dim % 8 and not columns % 8
        if columns > WIDE:  # two warpgroups share them
            widest = most[1] if self.is_latent else most[0]
            fits = columns % 128 == 0 and columns <= most[0] and self.head_dim <= widest
            fits = fits and not self.head_dim % 8 and (self.is_latent or self.cache is None)
        return fits and self.dtype.itemsize == 2

    @property
    def is_latent(self) -> bool:
        """Whether values are columns of keys, which have more to multiply than to read."""
        return "prefix(" in self.value

    @property
    def decodes_packed(self) -> bool:
        """Whether queries are decoded that lie end to end: without an order, by Triton's kernels alone; under
        one by Hopper's, and on Triton as prompts are.
        """
        return self.decode and "ragged(" in self.q

    @property
    def suits_tiles(self) -> bool:
        """Whether Hopper's kernel, of tiles of 64 rows, is the fastest for few queries."""
        is_plain = self.decode and self.cache is None and not self.is_latent and not self.split_size
        keys, widest = "paged" if "paged(" in self.kv else "dense", max(self.head_dim, self.value_dim)
        suits = suits_tiles(widest, self.rows, keys, is_long=self.is_long, is_known=False)
        return is_plain and self.dtype.itemsize == 2 and suits

    @property
    def suits_warps(self) -> bool:
        """Whether it reads 8 bits for as few rows as a warp of Hopper's kernels has (`plan.sm90.warps`)."""
        is_narrow = self.decode and self.cache is not None and not self.is_latent and self.rows <= 16
        fits = all(x % 8 == 0 and x <= 128 for x in (self.head_dim, self.value_dim))
        return is_narrow and fits and self.split_size % 128 == 0

    @property
    def attention(self) -> str:
        dtype = DTYPES[self.dtype]
        cached = dtype if self.cache is None else NARROW[self.cache]
        score = f"dot(q, k) * {self.scale!r}"
        if self.k_scale:
            score += f" * {self.k_scale}[b, h // G]"
        if self.softcap > 0:
            score = f"softcap({score}, {self.softcap!r})"
        if self.slopes:
            score += f" + {self.slopes}[h] * (kv_idx - q_pos)"
        score = " + ".join((score, *self.terms))
        lines = [
            f"param D in {{{self.head_dim}}}" + (f", Dv in {{{self.value_dim}}}" if self.value_dim else ""),
            f"input q: {dtype}{self.q}",
            f"input {'k' if self.value else 'k, v'}: {cached}{self.kv}",
            *([f"input v: {cached}{self.value}"] if self.value else []),
            *(f"input {line}" for line in self.inputs),
            *(f"input {name}: f32[B, Hkv]" for name in (self.k_scale, self.v_scale) if name),
            *(f"input {name}: f32[Hkv * G]" for name in (self.slopes, self.sink) if name),
            *(["input dropout_p: f32[]", "input seed: i64[]"] if self.dropout else []),
            *([f"length N = {self.length}[b]"] if self.length else []),
            f"score = {score}",
            *([f"mask = {self.mask}"] if self.mask else []),
            f"normalize = softmax{self._normalization}",
            *([f"order = absolute({self.order})"] if self.order else []),
            f"output o: {dtype}{self.o}",
            *([f"output lse: f32{self.lse}"] if self.lse else []),
            *([f"grad {', '.join(self.grad)}"] if self.grad else []),
        ]
        body = "\n  ".join(lines)
        return f"attention {self.name} {{\n  {body}\n}}\n"

    @property
    def _schedule(self) -> str:
        knobs = self._decode_knobs if self.decode else self._prefill_knobs
        if self.order:
            knobs = self._ordered_knobs
        if self.grad:
            knobs += f"\n  backward {{\n    {_BACKWARD[self.dtype.itemsize]}\n  }}"
        return f"schedule {self.name} for triton {{\n  {knobs}\n}}\n"

    @property
    def _hopper_knobs(self) -> str:
        split, structure = f", split.kv = fixed({self.order})", "loops = [kv], pack = gqa"
        if (self.value_dim or self.head_dim) > WIDE:  # prompts have the kernel that decodes
            return structure + (split if self.decode and not self.walks else "")
        if self.decode:
            return f"{structure}{split}\n  {_LAZY}"
        return f"order = longest_first\n  {_LAZY}" + "\n  convert = before" * self.converts

    @property
    def _ordered_knobs(self) -> str:
        wide = self.head_dim > _ORDERED_COLUMNS
        tiles = f"tile.q = 64, {_ORDERED_WIDE if wide else _ORDERED[self.dtype.itemsize]}, warps = 4"
        if (self.value_dim or self.head_dim) > WIDE:
            tiles = _ORDERED_LATENT
        if self.decode and not self.decodes_packed:
            return f"loops = [kv], pack = gqa, split.kv = fixed({self.order})\n  {tiles}"
        return f"loops = [q, kv], order = longest_first\n  {tiles}"

    @property
    def _prefill_knobs(self) -> str:
        tiles = _WIDE_PREFILL if self.head_dim > WIDE else _PREFILL[self.dtype.itemsize]
        return f"loops = [q, kv], order = longest_first\n  {tiles}"

    @property
    def _decode_knobs(self) -> str:
        wide = self.head_dim > WIDE
        split = f"fixed({self.split_size})" if self.split_size else "auto" if self.split else "1"
        widths = (_WIDE_DECODE_TILES if wide else _DECODE_TILES)[self.dtype.itemsize]
        largest = 128 if self.rows == 16 else 64
        tiles = ", ".join(str(tile) for tile in widths if tile <= largest and self.split_size % tile == 0)
        q = "tile.q = 16, warps = 4"
        if self.rows > 16:
            q = "config tile.q in {32, 16}, warps = 4"
        if self.rows > 32:
            q = f"config tile.q = 64, warps = {8 if wide else 4}\n  {q}"
        return (
            f"loops = [kv], pack = gqa\n  {q}\n"
            f"  tile.kv in {{{tiles}}}, stages in {{3, 2}}\n  split.kv = {split}"
        )

    @property
    def _normalization(self) -> str:
        given = [f"sink = {self.sink}[h]"] if self.sink else []
        given += [f"v_scale = {self.v_scale}[b, h // G]"] if self.v_scale else []
        given += ["dropout = dropout_p, seed = seed"] if self.dropout else []
        return f"({', '.join(given)})" if given else ""


def tile_rows(sharing: int, *, many: bool = False) -> int:
    """Returns the rows of a tile of few queries, a power of two from 16 to 64; 128 for many, of a chunk.
    sharing: rows of a sequence that share the keys of a KV head.
    """
    return 128 if many else 16 if sharing <= 16 else 32 if sharing <= 32 else _MOST_ROWS


def suits_conversion(
    queries: int, heads: tuple[int, int], sequences: int, keys: int, columns: tuple[int, int]
) -> bool:
    """Returns whether a prompt's keys and values of 8 bits are converted before its kernel: where a key meets
    enough rows, and memory holds them. It follows from shapes, so a captured graph keeps it.

    queries: of all sequences; heads: of q, and of keys; keys: that tables have room for; columns: D and Dv.
    """
    rows = queries * heads[0] // max(heads[1] * sequences, 1)
    size = keys * heads[1] * sum(columns) * 2
    return rows >= ROWS_TO_CONVERT and size <= MOST_CONVERTED and max(columns) <= WIDE


def kernel(wanted: Wanted) -> Kernel:
    """Returns the callable of the spec, for the fastest target that takes the tensors of a call. Compiled for
    each in a few milliseconds, and cached for the process.

    ValueError where the spec is refused, such as columns of heads for which no tile fits a GPU.
    """
    return partial(run_kernel, kernel_name(wanted))


#: Functions of this process, by names that `_function_name` returns: attributes, which torch.compile follows.
FUNCTIONS = ModuleType("attnc.adapters.functions")
_WANTED: dict[str, Wanted] = {}
#: What the functions among them call, by function.
_CALLS: dict[Kernel, Any] = {}
_NAMES: dict[tuple[str, tuple[str, ...]], str] = {}


@cache  # FUNCTIONS keeps all of them
def kernel_name(wanted: Wanted) -> str:
    """Returns the name by which `run_kernel` calls the callable of a spec. ValueError if the spec is
    refused.
    """
    try:
        made = _make(wanted, TRITON)
    except DiagnosticError as refused:
        columns = wanted.head_dim, wanted.value_dim or wanted.head_dim
        raise refuse_heads(wanted.name, columns, f"{wanted.dtype}", refused) from None
    with making():
        name = f"{wanted.name}_{len(_WANTED)}"
        setattr(FUNCTIONS, f"{name}_{TRITON}", made)
        _WANTED[name] = wanted
    return name


def run_kernel(name: str, *inputs: Any, **named: Any) -> Any:
    """Calls the callable of a spec by its name: what torch.compile can follow."""
    q, k = inputs[:2] if inputs else (named["q"], named["k"])
    v = inputs[2] if len(inputs) > 2 else named.get("v")
    return getattr(FUNCTIONS, find_function(name, q, k, v))(*inputs, **named)


def find_function(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> str:
    """Returns the name in FUNCTIONS of the callable of a spec that these tensors take."""
    title, has_choice, has_values, has_gradients = _facts(name)
    targets: tuple[str, ...] = (TRITON,)
    if _is_ordered(name):
        targets = target_of_order(title, q, on_hopper=has_choice)
    elif has_choice:
        targets = targets_of_call(title, q, k, v if has_values else None, gradients=has_gradients)
    return _function_name(name, targets)


#: Makes an input of a kernel of a tensor that a call is given, or of the first, where it is given none.
Change: TypeAlias = Callable[[Any], Any]
Changes: TypeAlias = dict[str, Change]


def plan_of(
    function: str,
    names: Sequence[str],
    changes: Changes | None = None,
    finish: Callable[[Any, Sequence[Any]], Any] | None = None,
) -> Plan:
    """Returns the plan of calls of a function by its name in FUNCTIONS.

    names: what it calls the tensors that a call is given, and last "out" where that is one. changes: by name,
    what it takes in place of a tensor.
    """
    made = getattr(FUNCTIONS, function)
    call = _CALLS[made]
    wanted = call.input_names
    if not changes:
        pick = make_picker([names.index(name) for name in wanted])
        at_out = names.index("out") if "out" in names else None
        return Plan(
            made, call, lambda given: (pick(given), None if at_out is None else given[at_out]), finish
        )
    pick = make_picker([names.index(name) if name in names else 0 for name in (*wanted, "out")])
    changed = tuple((at, changes[name]) for at, name in enumerate(wanted) if name in changes)
    has_out, change_out = "out" in names, changes.get("out")

    def arrange(given: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        *taken, out = pick(given)
        for at, change in changed:
            taken[at] = change(taken[at])
        if not has_out:
            return taken, None
        return taken, out if change_out is None else change_out(out)

    return Plan(made, call, arrange, finish)


def _is_ordered(name: str) -> bool:
    return _WANTED[name].order > 0


def _facts(name: str) -> tuple[str, bool, bool, bool]:
    """Returns the name of a spec; whether other kernels may be faster than Triton's; whether v is a tensor of
    its own; and whether gradients are wanted. To decode, Triton's read memory as fast, but for caches of 8
    bits, narrow rows of pages and more rows than its tile of 16; and latent attention has more to multiply
    than to read. Of these, splits of a size are left to Triton, but for caches of 8 bits.
    """
    wanted = _WANTED[name]
    has_values = not wanted.is_latent
    if wanted.order:
        return wanted.name, wanted.keeps_order_on_hopper, has_values, bool(wanted.grad)
    is_latent = wanted.is_latent and not wanted.split_size
    has_choice = not wanted.decode or is_latent or wanted.suits_warps or wanted.suits_tiles
    has_choice = has_choice and not wanted.decodes_packed
    return wanted.name, has_choice, has_values, bool(wanted.grad)


def _function_name(name: str, targets: tuple[str, ...]) -> str:
    found = _NAMES.get((name, targets))
    if found is None:
        found = f"{name}_{'_'.join(targets)}".replace(".", "_")  # which torch.compile splits at
        wanted = _WANTED[name]
        made, failure = first_made(
            targets,
            lambda target: (
                getattr(FUNCTIONS, f"{name}_{TRITON}") if target == TRITON else _make(wanted, target)
            ),
        )
        if failure and targets[0] == HOPPER:
            warn_of_loss(wanted.name, need_of(failure))
        setattr(FUNCTIONS, found, made)
        _NAMES[name, targets] = found
    return found


# What torch.compiler.assume_constant_result does, without importing the compiler: tracing calls them for
# real.
_is_ordered._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes
_facts._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes
_function_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


def _make(wanted: Wanted, target: str) -> Kernel:
    if target != TRITON:
        return _compile(wanted.hopper_text if target == HOPPER else wanted.attention, target)
    try:
        return _make_scheduled(wanted)
    except DiagnosticError:
        if wanted.order:
            raise
        return _compile(wanted.attention, target)  # wider heads than the schedule has tiles for


def _compile(text: str, target: str) -> Kernel:
    family = compile_family(text, target=target, warn=False)
    (variant,) = (x for x in vars(family.module).values() if isinstance(x, ModuleType) and "CALL" in vars(x))
    _CALLS[family.function] = variant.CALL
    return family.function


def _make_scheduled(wanted: Wanted) -> Kernel:
    from attnc.build import plan_program
    from attnc.model.resolve import resolve
    from attnc.runtime.loader import load_module
    from attnc.source import Source
    from attnc.syntax.parser import parse, prelude

    program = resolve(parse(Source(f"{wanted.name}.attn", wanted.text)), prelude())
    (module,) = plan_program(program).modules
    if not torch.cuda.is_available():
        from attnc.verify.interpreter import ensure_interpreter

        ensure_interpreter()
    loaded = load_module(module)
    made: Kernel = getattr(loaded, wanted.name)
    _CALLS[made] = loaded.CALL
    return made


def dtype_of(name: str, x: torch.Tensor) -> torch.dtype:
    """Returns the dtype of a tensor, if kernels are made for it. TypeError naming the argument otherwise."""
    return made_for(name, x.dtype)


def made_for(name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns this dtype of q, if kernels are made for it. TypeError naming the argument otherwise."""
    if dtype not in DTYPES:
        raise TypeError(f"{name}: expected dtype {', '.join(map(str, DTYPES))}, got {dtype}")
    return dtype


def number_of(name: str, value: Any, otherwise: float | None = None) -> float:
    """Returns a number that becomes part of a kernel; `otherwise` is what None stands for.

    TypeError and ValueError (infinities, NaN) name the argument.
    """
    if value is None and otherwise is not None:
        return otherwise
    return to_finite(name, value).__float__()  # in a graph of torch.compile no symbol


def refuse(function: str, **unsupported: object) -> None:
    """Raises ValueError for the first argument that asks for something: anything but None, False, 0 and
    empty.
    """
    for name, value in unsupported.items():
        asks = value is not None and (isinstance(value, torch.Tensor) or bool(value))
        if asks:
            came = show_value(value)
            raise ValueError(f"{function}: {name}: expected None, as it is not supported, got {came}")


def expand_scales(
    name: str, x: torch.Tensor | float, shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Returns the scales of each sequence and K/V head: a view of a tensor, or a number on the device.
    TypeError for what is neither, ValueError for a tensor of another shape and numbers that are not finite.
    """
    if not isinstance(x, torch.Tensor):
        return torch.full((), number_of(name, x), dtype=torch.float32, device=device).expand(shape)
    try:
        return x.detach().expand(shape)
    except RuntimeError:
        raise ValueError(f"{name}: expected one, or shape {list(shape)}, got {list(x.shape)}") from None


def readable(cache: torch.dtype, capability: tuple[int, int]) -> str:
    """Returns why no kernel reads a cache of this dtype on a GPU of this compute capability; "" if one
    does.
    """
    needed = divmod(NARROW[cache].facts.capability, 10) if cache in NARROW else (0, 0)
    if capability >= needed:
        return ""
    first, here = (f"{major}.{minor}" for major, minor in (needed, capability))
    return f"{cache} needs compute capability {first} or newer, and this GPU has {here}"
