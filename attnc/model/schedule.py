"""A schedule: how, as the spec says it, with every key checked and every set of choices expanded to values.

Whether a target can honour it is the planner's business.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal, Self, TypeAlias, get_args

from attnc.source import Span
from attnc.syntax import ast

Phase: TypeAlias = Literal["forward", "backward", "combine", "dq", "dkdv", "projection", "gemv", "flat"]
#: Of an attention; keys outside of blocks belong to the first.
PHASES: tuple[Phase, ...] = ("forward", "backward", "combine", "dq", "dkdv")
#: Of a projection, likewise.
PROJECTION_PHASES: tuple[Phase, ...] = ("projection", "gemv", "flat")
#: The phases that a phase holds, which start from its keys: the kernels of the backward, and those of a
#: projection.
PARTS: Mapping[Phase, tuple[Phase, ...]] = {"backward": ("dq", "dkdv"), "projection": ("gemv", "flat")}


def whole_of(phase: Phase) -> Phase | None:
    """Returns the phase that holds this one; None at the top."""
    return next((whole for whole, parts in PARTS.items() if phase in parts), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A value with arguments, e.g. `lazy(8)` or `unified_max(phi = 0, bounds = [-60, 60])`."""

    name: str
    args: Mapping[str, Value]

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted((k, repr(v)) for k, v in self.args.items()))))


Value: TypeAlias = int | float | bool | str | Choice | tuple["Value", ...]


def text_of(value: Value) -> str:
    """Returns a value as a schedule spells it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        return str(value)
    args = ", ".join(f"{name} = {text_of(arg)}" for name, arg in value.args.items())
    return f"{value.name}({args})" if args else value.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """`key = value` (one choice) or `key in {a, b}`; the first choice is the default."""

    key: str
    choices: tuple[Value, ...]
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """`when D == 256 { ... }`: entries of a phase for the variants that the condition holds for.

    `knobs` stand in place of the phase's of the same keys, `listed` in place of its lists, and `where` beside
    its conditions.
    """

    condition: ast.Expr
    knobs: Mapping[str, Knob]
    where: tuple[ast.Expr, ...]
    listed: tuple[Mapping[str, Knob], ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One `schedule NAME for TARGET` block, or `schedule NAME for TARGET as LABEL`.

    name: of the attention or projection. `knobs[phase][key]`: keys written outside a phase block belong to
    "forward", or "projection". `where`: pruning conditions
    per phase, kept as syntax and evaluated over a config's knobs and the variant's params. `listed`: the
    `config` lines of a phase. `whens`: what holds for some variants only; `configs.schedule_of` puts it into
    the others.
    """

    name: str
    target: str
    knobs: Mapping[Phase, Mapping[str, Knob]]
    where: Mapping[Phase, tuple[ast.Expr, ...]]
    listed: Mapping[Phase, tuple[Mapping[str, Knob], ...]] = field(default_factory=dict)
    whens: Mapping[Phase, tuple[When, ...]] = field(default_factory=dict)
    label: str = ""
    span: Span | None = field(default=None, compare=False, repr=False)

    @cached_property
    def phases(self) -> Mapping[Phase, Mapping[str, Knob]]:
        """The keys that are set in each phase, with all their values: those of the phase around it, and its
        own instead. What `config` lines set stands in place of what is set beside them.
        """
        return {phase: _resolve(self, phase) for phase in get_args(Phase)}

    @property
    def forward(self) -> Mapping[str, Knob]:
        return self.phases["forward"]

    @cached_property
    def decode_knobs(self) -> tuple[Knob, ...]:
        loops, pack, split = (self.forward.get(key) for key in ("loops", "pack", "split.kv"))
        asking = (
            loops if loops and ("kv",) in loops.choices else None,
            pack if pack and "gqa" in pack.choices else None,
            split if split and any(choice != 1 for choice in split.choices) else None,
        )
        return tuple(knob for knob in asking if knob)

    @property
    def is_decode(self) -> bool:
        return bool(self.decode_knobs)


def _resolve(schedule: Schedule, phase: Phase) -> Mapping[str, Knob]:
    whole = whole_of(phase)
    around = {} if whole is None else schedule.knobs.get(whole, {})
    knobs = {**around, **schedule.knobs.get(phase, {})}
    listed: dict[str, Knob] = {}
    for line in listed_of(schedule, phase):
        for key, knob in line.items():
            before = listed.setdefault(key, knob)
            listed[key] = replace(before, choices=tuple(dict.fromkeys((*before.choices, *knob.choices))))
    return knobs | listed


def listed_of(schedule: Schedule, phase: Phase) -> tuple[Mapping[str, Knob], ...]:
    """Returns the `config` lines of a phase: its own, else those of the phase around it without what it sets
    itself.
    """
    if (own := schedule.listed.get(phase)) or (whole := whole_of(phase)) is None:
        return own or ()
    set_here = schedule.knobs.get(phase, {})
    return tuple(
        {key: knob for key, knob in line.items() if key not in set_here}
        for line in schedule.listed.get(whole, ())
    )


#: How the gradient of an input is summed.
Summation: TypeAlias = Literal["two_pass", "atomic", "ordered", "sequential"]
#: The word of a schedule that is None in a config.
_NONE = "none"
_ACCUMULATE = "accumulate.d"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One point of a phase's knobs: a field for each key that the phase has, of the type of its values.

    The field of `tile.q` is `tile_q`; what a schedule calls `none` is None. Only what speaks to users, in
    schedules, files and messages, has the keys themselves: `of`, `value`, `with_keys`, `texts`.
    """

    @classmethod
    def of(cls, point: Mapping[str, Value]) -> Self:
        made: dict[str, Any] = {field_of(key): _decode_none(value) for key, value in point.items()}
        return cls(**made)

    def values(self) -> dict[str, Value]:
        return {key_of(field): _encode_none(getattr(self, field)) for field in self.__dataclass_fields__}

    def value(self, key: str) -> Value:
        """Returns the value of a key. KeyError where the phase has none."""
        return self.values()[key]

    def with_keys(self, values: Mapping[str, Value]) -> Self:
        changes: dict[str, Any] = {field_of(key): _decode_none(value) for key, value in values.items()}
        return replace(self, **changes)

    def texts(self) -> dict[str, str]:
        """Returns every value by its text, keys in alphabetical order: what JSON can hold."""
        return {key: text_of(value) for key, value in sorted(self.values().items())}


@cache
def field_of(key: str) -> str:
    """Returns the field of a key: `tile_q` of `tile.q`."""
    return key.replace(".", "_")


@cache
def key_of(field: str) -> str:
    """Returns the key of a field: `tile` and `split` are the words with a dot behind them."""
    word, _, rest = field.partition("_")
    return f"{word}.{rest}" if word in ("tile", "split") and rest else field


def _decode_none(value: Value) -> Value | None:
    return None if value == _NONE else value


def _encode_none(value: Value | None) -> Value:
    return _NONE if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig(Config):
    """What the kernels of an attention have in common, forward and backward.

    loops: axes from the outermost loop to the innermost: ("q", "kv"), ("kv", "q") or ("kv",).
    """

    loops: tuple[Literal["q", "kv"], ...]
    tile_q: int
    tile_kv: int
    tile_d: int
    warps: int
    warp_split: Literal["q", "kv"]
    stages: int
    pack: Literal["gqa"] | None
    persistent: bool
    order: Literal["default", "longest_first"]

    @property
    def longest_first(self) -> bool:
        return self.order == "longest_first"

    @property
    def rows_together(self) -> int:
        return self.tile_q


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardConfig(TileConfig):
    """The knobs of a forward or decode kernel. split_kv: a number of programs, "auto", or `fixed(size =
    keys)`.
    """

    split_kv: int | str | Choice
    softmax: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperConfig(ForwardConfig):
    """The knobs of a forward or decode kernel of `cuda.sm_90a`; 0 where the planner chooses.

    consumers: warpgroups that multiply; registers: of a thread of theirs; overlap: q k^T of the next tile
    runs during the softmax of this one; cluster: blocks that share tiles of K and V; blocks: that share a
    multiprocessor; pingpong: warpgroups take turns at issuing their products; convert: when k and v of 8 bits
    become 16, "before" the kernel, in its "tiles" or, "auto", as the planner chooses; lists: "union", queries
    that share a tile have one list of keys, or "each" has a tile.
    """

    consumers: int
    overlap: bool
    cluster: int
    blocks: int
    pingpong: bool
    registers: int
    convert: str
    lists: str

    @property
    def rows_together(self) -> int:
        return self.cluster * self.tile_q


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardConfig(TileConfig):
    """The knobs of a kernel of a backward. maxnreg: the most registers of a thread; accumulates: how
    gradients are summed, by the name of the input.
    """

    maxnreg: int | None
    accumulates: tuple[tuple[str, Summation], ...] = ()

    @classmethod
    def of(cls, point: Mapping[str, Value]) -> Self:
        own = {key: value for key, value in point.items() if not key.startswith(_ACCUMULATE)}
        made: dict[str, Any] = {field_of(key): _decode_none(value) for key, value in own.items()}
        sums: Any = tuple(
            (key.removeprefix(_ACCUMULATE), value) for key, value in point.items() if key not in own
        )
        return cls(**made, accumulates=sums)

    def values(self) -> dict[str, Value]:
        own = Config.values(self)
        del own["accumulates"]
        return own | {f"{_ACCUMULATE}{name}": way for name, way in self.accumulates}

    def accumulate(self, name: str) -> Summation:
        """Returns how the gradient of this input is summed. KeyError where it is not asked for."""
        return dict(self.accumulates)[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class DkDvConfig(BackwardConfig):
    """The knobs of a backward kernel over keys. dp: whether dP = dO V^T comes before p, or after."""

    dp: Literal["early", "late"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CombineConfig(Config):
    """The knobs of the kernel that joins the splits of a sequence, which no target lets a schedule choose."""

    tile_q: int
    tile_d: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionConfig(Config):
    """The knobs of a projection: one that a library makes has nothing to choose."""

    impl: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductConfig(ProjectionConfig):
    """The knobs of a kernel of a projection, over tiles of columns of y and of x. split_k: programs that
    share K.
    """

    tile_n: int
    tile_k: int
    warps: int
    stages: int
    split_k: int


def config_type(phase: Phase, keys: Collection[str]) -> type[Config]:
    """Returns the type of the configs of a phase, for a target that has these keys of it."""
    match phase:
        case "forward":
            return HopperConfig if "consumers" in keys else ForwardConfig
        case "backward" | "dq":
            return BackwardConfig
        case "dkdv":
            return DkDvConfig
        case "combine":
            return CombineConfig
        case "projection":
            return ProjectionConfig
        case "gemv" | "flat":
            return ProductConfig
