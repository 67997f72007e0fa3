"""Which configs of a schedule are kept, whatever the target: those that some GPU of the target can run; and
what a schedule is chosen by for an attention that has none.

Where a schedule says nothing of tiles, a target has groups of them, which take their turns. Schedules of
attentions that have none are each target's own (`Target.default_schedule`): what is fastest on an H200
first, then less and less shared memory, for the first that fits the device is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import gcd
from typing import Any, Literal, Self, TypeAlias, TypeVar

from attnc.diagnostics import Diagnostic, DiagnosticError, error
from attnc.expr.nodes import TRUE, Call, Const, Index, walk
from attnc.expr.solve import solve
from attnc.model.attention import Attention, Form, Softmax
from attnc.model.dtypes import DType
from attnc.model.schedule import (
    Choice,
    ForwardConfig,
    Knob,
    Phase,
    Schedule,
    TileConfig,
    Value,
    field_of,
    key_of,
)
from attnc.plan.layout import KernelName, Which
from attnc.source import Span

#: Columns of q or v beyond which every target has other loops or tiles.
WIDE = 256

C = TypeVar("C", bound=TileConfig)
#: Why no GPU of the target can run a config; None if one can.
Misfit: TypeAlias = Callable[[C], object | None]


@dataclass(frozen=True, slots=True)
class Tiles:
    """The sizes that decide what a config needs; None: as the schedule says."""

    tile_q: int | None = None
    tile_kv: int | None = None
    warps: int | None = None
    stages: int | None = None

    @classmethod
    def from_keys(cls, sizes: Mapping[str, int]) -> Self:
        return cls(**{field_of(key): size for key, size in sizes.items()})

    def list_given(self) -> dict[str, int]:
        values = {field: getattr(self, field) for field in self.__slots__}
        return {field: value for field, value in values.items() if value is not None}

    def by_key(self) -> dict[str, int]:
        return {key_of(field): value for field, value in self.list_given().items()}

    def without(self, keys: Iterable[str]) -> Self:
        held = set(keys)
        left: dict[str, Any] = {f: size for f, size in self.list_given().items() if key_of(f) not in held}
        return type(self)(**left)

    def of(self, config: C) -> C:
        changes: dict[str, Any] = self.list_given()
        return replace(config, **changes) if changes else config


#: The keys of a schedule that set them.
SIZES = tuple(map(key_of, Tiles.__slots__))


def first_fitting(
    found: Sequence[C],
    groups: Iterable[Iterable[Tiles]],
    misfit: Misfit[C],
    adapted: Callable[[C], C] = lambda config: config,
) -> tuple[C, ...]:
    """Returns each config with each of the tiles of a group: of the first group by which one comes to fit.
    The configs as they are where there is no such group. adapted: with what follows from others.
    """
    for group in groups:
        tried = tuple(adapted(tiles.of(config)) for tiles in group for config in found)
        if any(misfit(config) is None for config in tried):
            return tried
    return tuple(map(adapted, found))


def keys_of_split(config: ForwardConfig) -> int:
    """Returns how many keys a split has, if the config fixes them; 0 if splits are counted instead."""
    match config.split_kv:
        case Choice(args={"size": int() as size}):
            return size
        case _:
            return 0


def phase_of(kernel: Which) -> Phase:
    """Returns the phase of a schedule that sets the kernel's keys."""
    return "forward" if kernel == "forward" else backward_phase_of(kernel)


def backward_phase_of(kernel: KernelName) -> Literal["dq", "dkdv"]:
    """Returns the phase of a schedule that sets the keys of a kernel of a backward."""
    return "dq" if kernel in ("dq", "rows") else "dkdv"


def remedy(
    config: C,
    changes: Mapping[str, Sequence[Value]],
    misfit: Misfit[C],
    *,
    completed: Callable[[C], C] = lambda config: config,
    said: Iterable[str] = (),
) -> tuple[str, ...]:
    """Returns a hint that changes as few keys as possible, or none.

    changes: what to try, the likeliest first; completed: with the values that follow from others, which the
    hint names where the schedule has `said` them.
    """
    for count in range(len(changes) + 1):
        for keys in combinations(changes, count):
            for values in product(*(changes[key] for key in keys)):
                tried = dict(zip(keys, values, strict=True))
                found = completed(config.with_keys(tried))
                if misfit(found) is None:
                    follows = {key: found.value(key) for key in said if key not in tried}
                    tried |= {key: value for key, value in follows.items() if value != config.value(key)}
                    return (f"'{', '.join(f'{key} = {value}' for key, value in tried.items())}' fits",)
    return ()


def nothing_fits(
    schedule: Schedule,
    kernel: Which,
    reason: str,
    *,
    where: str,
    notes: Sequence[str] = (),
    hints: Sequence[str],
) -> DiagnosticError:
    """Returns E0601 at the sizes that the schedule names, else at the schedule. where: what they do not
    fit.
    """
    knobs = schedule.phases[phase_of(kernel)]
    spans = [span for key in SIZES if key in knobs and (span := knobs[key].span) is not None]
    if not spans and schedule.span is not None:
        spans = [schedule.span]
    if not spans:
        raise ValueError(f"no span for: {reason}")
    spans.sort(key=lambda span: span.start)
    what = "" if kernel == "forward" else f" for {kernel}"
    message = f"no config of schedule '{schedule.name}'{what} fits {where}"
    span = spans[0].to(spans[-1]) if spans[0].line == spans[-1].line else spans[0]
    if not hints and where == schedule.target:  # one of those whose rows are bounded by registers
        hints = (f"'schedule {schedule.name} for triton' compiles kernels whose rows are as wide",)
    return DiagnosticError([error("E0601", message, span, reason, notes=notes, hints=hints)])


def unsupported(message: str, span: Span | None, label: str, *hints: str) -> Diagnostic:
    """Returns E0602, at the knob or statement that asks for it; raises ValueError where the spec has no such
    place.
    """
    if span is None:
        raise ValueError(f"no span for: {message}")
    return error("E0602", message, span, label, hints=hints)


def several_values(knob: Knob) -> Diagnostic:
    """Returns E0602 at a knob with several values that decides what is in a CUDA kernel."""
    message = f"'{knob.key}' shapes the text of a CUDA kernel"
    label, hint = "has one value in a schedule", "write a second attention to compare"
    return unsupported(message, knob.span, label, hint)


# --- of attentions that have no schedule


@dataclass(frozen=True, slots=True)
class TileShape:
    """What the choice depends on. dtype: of q, as a spec spells it; width: of its rows, the larger of D and
    Dv; gradients: whether there is a backward; masked: whether some keys are left out; latent: whether v is
    columns of k; form: of `normalize =`; wanted: sizes of the forward that a caller asks for; listed: queries
    and keys of the blocks that the mask lists, if it does: tiles divide them. packed: whether sequences of
    queries follow each other. segment: keys that tiles divide under `order = absolute(...)`, of which all
    schedules have the same; 0: there are none. is_one_segment: of all variants. shares_sums: there are
    gradients beside a forward that decodes (`Target.refuse_wide_gradients`). unites: neighbouring queries can
    share tiles over the union of their lists. drifts: scores depend on where a key is, and may grow from tile
    to tile. group: query heads of a K/V head, 0 where they are no number. packs_all: keys are packed as
    queries are, and all scores are scaled products, under a causal mask at most.
    """

    dtype: str
    width: int
    gradients: bool
    masked: bool
    latent: bool = False
    form: Form = "softmax"
    wanted: Tiles = field(default_factory=Tiles)
    listed: tuple[int, int] | None = None
    packed: bool = False
    segment: int = 0
    is_one_segment: bool = True
    shares_sums: bool = False
    narrow_cache: bool = False
    unites: bool = False
    drifts: bool = False
    group: int = 0
    packs_all: bool = False

    @property
    def lists_blocks_of_queries(self) -> bool:
        return self.listed is not None and self.listed[0] == 1 < self.listed[1] and not self.packed

    @property
    def splits_unions(self) -> bool:
        """Whether queries walk together over blocks that they list, of rows that one warpgroup multiplies."""
        return self.unites and self.listed != (1, 1) and not self.latent and self.width <= WIDE

    def divide(self, tiles: Tiles) -> Tiles:
        if self.segment and tiles.tile_kv is not None:
            tiles = replace(tiles, tile_kv=gcd(tiles.tile_kv, self.segment))
        if self.listed is None or tiles.tile_q is None or tiles.tile_kv is None:
            return tiles
        rows, keys = self.listed
        return replace(tiles, tile_q=gcd(tiles.tile_q, rows), tile_kv=gcd(tiles.tile_kv, keys))


def shape_of(attention: Attention) -> TileShape:
    """Returns the facts on which the choice depends, of an attention of a spec."""
    sizes = [tensor.shape[-1] for tensor in (attention.q, attention.v)]
    widths = [int(size.value) for size in sizes if isinstance(size, Const)]
    return TileShape(
        dtype=str(attention.q.dtype),
        width=max(widths, default=128),
        gradients=bool(attention.grads) and (attention.v.storage.is_plain or attention.v.storage.is_part),
        masked=attention.mask != TRUE,
        latent=attention.v.storage.is_part,
        form=attention.softmax.form,
        packed=attention.q.storage.is_packed,
        segment=_count_segment(attention),
        narrow_cache=_has_narrow_cache(attention),
        drifts=any(node == Index("kv_idx") for node in walk(attention.score)),
        group=_count_group(attention),
        packs_all=_packs_all(attention),
    )


def _packs_all(attention: Attention) -> bool:
    softmax, ranges = attention.softmax, solve(attention.mask)
    is_usual = softmax == Softmax() and attention.epilogue is None and not attention.lengths
    is_usual = is_usual and attention.segment is None
    if not is_usual or not (attention.q.storage.is_packed and attention.k.storage.is_packed):
        return False
    if ranges.may_lo is not None or ranges.tile_may is not None:
        return False
    nodes = [*walk(attention.score)]
    functions = {node.function for node in nodes if isinstance(node, Call)}
    return functions <= {"sqrt"} and not any(isinstance(node, Index) for node in nodes)


def _count_group(attention: Attention) -> int:
    match attention.group:
        case Const(value=int() as heads):
            return heads
        case _:
            return 0


def decode_tiles(shape: TileShape) -> str:
    """Returns how many keys a tile of a decode kernel tries to have, as a schedule lists them."""
    return "64, 32, 16" if shape.dtype == "f32" else "128, 64, 32, 16"


def _has_narrow_cache(attention: Attention) -> bool:
    is_cache = attention.k.storage.is_paged or "N" in attention.lengths
    is_narrow = {attention.k.dtype, attention.v.dtype} & {dtype for dtype in DType if dtype.is_narrow}
    is_scaled = bool(attention.column_scales)  # which only a conversion before multiplies
    return is_cache and bool(is_narrow) and not is_scaled and not attention.q.storage.is_packed


def _count_segment(attention: Attention) -> int:
    match attention.segment:
        case None:
            return 0
        case Const(value=int() as value):
            return value
        case size:
            chosen = next(param.choices for param in attention.params if param.name == str(size))
            return gcd(*(int(choice) for choice in chosen if isinstance(choice, int)))


def choices(first: Tiles, wanted: Tiles | None = None, *, one_shape: bool = False) -> list[str]:
    """Returns statements of a phase: the first choice and what needs less; values that are wanted, alone.
    one_shape: of tiles, so that all configs make the same sums.
    """
    sets = {
        key: [value] if one_shape and key != "stages" else _smaller(key, value)
        for key, value in first.by_key().items()
    }
    sets |= {key: [value] for key, value in (wanted or Tiles()).by_key().items()}
    texts = [
        f"{key} = {values[0]}" if len(values) == 1 else f"{key} in {{{', '.join(map(str, values))}}}"
        for key, values in sets.items()
    ]
    return [", ".join(texts[:2]), ", ".join(texts[2:])]


def _smaller(key: str, value: int) -> list[int]:
    match key:
        case "warps":
            return [value]
        case "stages":
            return list(range(value, 0, -1))
        case _:
            return [value // step for step in (1, 2, 4) if value // step >= 16]
