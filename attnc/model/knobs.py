"""The closed set of schedule keys: the values, phases and default of each.

Values become plain data: `online` is a Choice with its `rescale` filled in, lists are tuples, words are
strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from attnc.model.program import IMPLS
from attnc.model.schedule import PHASES, PROJECTION_PHASES, Choice, Phase, Value
from attnc.source import Source, Span
from attnc.syntax import ast

Kind: TypeAlias = Literal["number", "bool", "word", "list", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A schedule key. `read` gives the value of an expression, or None if it is not allowed; `allowed` says
    what is.

    `kind` is what a `where` may compare the key with; `words` are the names that its values use; `target`:
    the only one that has it, "" for all.
    """

    read: Callable[[ast.Expr], Value | None]
    allowed: str
    default: Value
    kind: Kind = "word"
    words: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ("forward", "backward")
    target: str = ""


def number(tree: ast.Expr) -> int | float | None:
    """Returns a number, possibly with a sign."""
    match tree:
        case ast.Number(value=value):
            return value
        case ast.UnaryOp(operand=ast.Number(value=value)):
            return -value
        case _:
            return None


def _integer(tree: ast.Expr) -> int | None:
    return tree.value if isinstance(tree, ast.Number) and isinstance(tree.value, int) else None


def _tile(tree: ast.Expr) -> Value | None:
    size = _integer(tree)
    ok = size is not None and 1 <= size <= 1024 and (size % 16 == 0 or size & (size - 1) == 0)
    return size if ok else None


def _among(*sizes: int) -> Callable[[ast.Expr], Value | None]:
    return lambda tree: size if (size := _integer(tree)) in sizes else None


def _power(low: int, high: int) -> Callable[[ast.Expr], Value | None]:
    def read(tree: ast.Expr) -> Value | None:
        size = _integer(tree)
        return size if size is not None and low <= size <= high and size & (size - 1) == 0 else None

    return read


def _word(*words: str, default: str = "", phases: tuple[Phase, ...] = ("forward", "backward")) -> Key:
    return Key(
        read=lambda tree: tree.id if isinstance(tree, ast.Name) and tree.id in words else None,
        allowed=f"{', '.join(words[:-1])} or {words[-1]}",
        default=default or words[0],
        words=words,
        phases=phases,
    )


def _number(
    read: Callable[[ast.Expr], Value | None],
    allowed: str,
    default: int,
    phases: tuple[Phase, ...],
    target: str = "",
) -> Key:
    return Key(read=read, allowed=allowed, default=default, kind="number", phases=phases, target=target)


def _bool(tree: ast.Expr) -> Value | None:
    return tree.value if isinstance(tree, ast.Bool) else None


def _loops(tree: ast.Expr) -> Value | None:
    if not isinstance(tree, ast.ListValue):
        return None
    names = tuple(item.id if isinstance(item, ast.Name) else "" for item in tree.items)
    return names if names in (("q", "kv"), ("kv", "q"), ("kv",)) else None


def _registers(tree: ast.Expr) -> Value | None:
    if isinstance(tree, ast.Name):
        return "none" if tree.id == "none" else None
    count = _integer(tree)
    return count if count is not None and 32 <= count <= 248 and count % 8 == 0 else None


def _share_of_registers(tree: ast.Expr) -> Value | None:
    count = _integer(tree)
    return count if count is not None and 64 <= count <= 240 and count % 8 == 0 else None


def _split(tree: ast.Expr) -> Value | None:
    """Returns how many programs share the keys of a sequence; fixed(size): as many as have `size`
    keys each.
    """
    match tree:
        case ast.Name(id="auto"):
            return "auto"
        case ast.Call(function=ast.Name(id="fixed"), args=(size,), kwargs=()):
            keys = _integer(size)
            ok = keys is not None and 16 <= keys <= 1 << 20 and keys % 16 == 0
            return Choice(name="fixed", args={"size": keys}) if keys is not None and ok else None
    count = _integer(tree)
    return count if count is not None and 1 <= count <= 1024 else None


ONLINE = Choice(name="online", args={"rescale": "deferred"})


def _softmax(tree: ast.Expr) -> Value | None:
    match tree:
        case ast.Name(id="online"):
            return ONLINE
        case ast.Name(id="two_pass"):
            return Choice(name="two_pass", args={})
        case ast.Call(function=ast.Name(id="online"), args=(), kwargs=kwargs) if kwargs:
            return _online({keyword.name.id: keyword.value for keyword in kwargs}, len(kwargs))
        case ast.Call(function=ast.Name(id="unified_max"), args=()):
            return _unified_max({keyword.name.id: keyword.value for keyword in tree.kwargs}, len(tree.kwargs))
        case _:
            return None


def _online(args: Mapping[str, ast.Expr], count: int) -> Value | None:
    """Reads `online(...)`. rescale: when o is; maximum = lazy(h): it is looked for only until all rows have
    one, and again when it turns out to have grown by more than h (in base-2 units).
    """
    if len(args) != count or not set(args) <= {"rescale", "maximum"}:
        return None
    rescale = _rescale(args["rescale"]) if "rescale" in args else "deferred"
    maximum = _lazy(args["maximum"]) if "maximum" in args else None
    if rescale is None or ("maximum" in args and (maximum is None or rescale == "every_step")):
        return None
    return Choice(name="online", args={"rescale": rescale} | ({"maximum": maximum} if maximum else {}))


def _rescale(tree: ast.Expr) -> Value | None:
    match tree:
        case ast.Name(id="deferred" | "every_step" as word):
            return word
        case _:
            return _lazy(tree)


def _lazy(tree: ast.Expr) -> Choice | None:
    match tree:
        case ast.Call(function=ast.Name(id="lazy"), args=(ast.Number(value=threshold),), kwargs=()) if (
            threshold > 0
        ):
            return Choice(name="lazy", args={"threshold": float(threshold)})
        case _:
            return None


def _unified_max(args: Mapping[str, ast.Expr], count: int) -> Value | None:
    """Reads `unified_max(...)`. phi: the maximum used for every row; bounds: the range of s - phi outside of
    which a row falls back.
    """
    if len(args) != count or not {"phi", "bounds"} <= set(args) <= {"phi", "bounds", "fallback"}:
        return None
    phi, bounds = number(args["phi"]), args["bounds"]
    limits = [number(item) for item in bounds.items] if isinstance(bounds, ast.ListValue) else []
    fallback = _softmax(args["fallback"]) if "fallback" in args else ONLINE
    if phi is None or len(limits) != 2 or limits[0] is None or limits[1] is None or limits[0] >= limits[1]:
        return None
    if not isinstance(fallback, Choice) or fallback.name == "unified_max":
        return None
    low, high = float(limits[0]), float(limits[1])
    return Choice(name="unified_max", args={"phi": float(phi), "bounds": (low, high), "fallback": fallback})


_SOFTMAXES = (
    "online, online(rescale = deferred), online(rescale = every_step), online(rescale = lazy(8)), two_pass, "
    "online(maximum = lazy(20)), unified_max(phi = 0, bounds = [-60, 60], fallback = online)"
)
_TILE = "a power of two or a multiple of 16, at most 1024"
_FORWARD: tuple[Phase, ...] = ("forward",)
_TILED: tuple[Phase, ...] = ("forward", "backward", "dq", "dkdv")
_HOPPER = "cuda.sm_90a"

KEYS: Mapping[str, Key] = {
    "loops": Key(
        read=_loops, allowed="[q, kv], [kv, q] or [kv]", default=("q", "kv"), kind="list", words=("q", "kv")
    ),
    "tile.q": _number(_tile, _TILE, 64, PHASES),
    "tile.kv": _number(_tile, _TILE, 64, _TILED),
    "tile.d": _number(_tile, _TILE, 0, ("forward", "backward", "combine")),
    "warps": _number(_among(1, 2, 4, 8, 12, 16), "1, 2, 4, 8, 12 or 16", 4, PHASES),
    "warp_split": _word("q", "kv"),
    "stages": _number(_among(*range(1, 9)), "1 to 8", 2, PHASES),
    "split.kv": Key(
        read=_split,
        allowed="auto, 1 to 1024 or fixed(keys), a multiple of 16",
        default=1,
        kind="any",
        words=("auto", "fixed"),
        phases=_FORWARD,
    ),
    "pack": _word("gqa", "none", default="none"),
    "softmax": Key(
        read=_softmax,
        allowed=_SOFTMAXES,
        default=ONLINE,
        words=("online", "two_pass", "unified_max", "deferred", "every_step", "lazy"),
        phases=_FORWARD,
    ),
    "persistent": Key(read=_bool, allowed="true or false", default=False, kind="bool"),
    "order": _word("default", "longest_first", phases=("forward", "backward", "dq")),
    "maxnreg": Key(
        read=_registers,
        allowed="none or a multiple of 8 from 32 to 248",
        default="none",
        kind="any",
        words=("none",),
        phases=("backward", "dq", "dkdv"),
    ),
    "consumers": _number(_among(1, 2, 3, 4), "1, 2, 3 or 4", 0, _FORWARD, _HOPPER),
    "overlap": Key(
        read=_bool, allowed="true or false", default=True, kind="bool", phases=_FORWARD, target=_HOPPER
    ),
    "cluster": _number(_among(1, 2), "1 or 2", 1, _FORWARD, _HOPPER),
    "blocks": _number(_among(1, 2), "1 or 2", 1, _FORWARD, _HOPPER),
    "pingpong": Key(
        read=_bool, allowed="true or false", default=False, kind="bool", phases=_FORWARD, target=_HOPPER
    ),
    "convert": replace(_word("auto", "before", "tiles", phases=_FORWARD), target=_HOPPER),
    "lists": replace(_word("each", "union", phases=_FORWARD), target=_HOPPER),
    "registers": _number(_share_of_registers, "a multiple of 8 from 64 to 240", 0, _FORWARD, _HOPPER),
    "dp": _word("early", "late", phases=("dkdv",)),
}

#: `accumulate.dk`: how a gradient that several tiles add to is summed.
ACCUMULATE = _word("two_pass", "atomic", phases=("backward",))
#: The same for dq, which the kernel of dk and dv meets tile by tile.
ACCUMULATE_DQ = _word("two_pass", "atomic", "ordered", "sequential", phases=("backward",))

_KERNELS: tuple[Phase, ...] = ("gemv", "flat")
#: The keys of a projection's schedule.
PROJECTION_KEYS: Mapping[str, Key] = {
    "impl": _word(*IMPLS, phases=("projection",)),
    "tile.n": _number(_power(1, 256), "a power of two, at most 256", 64, _KERNELS),
    "tile.k": _number(_power(16, 4096), "a power of two from 16 to 4096", 128, _KERNELS),
    "warps": _number(_power(1, 16), "1, 2, 4, 8 or 16", 4, _KERNELS),
    "stages": _number(_among(*range(1, 9)), "1 to 8", 4, _KERNELS),
    "split.k": _number(_among(*range(1, 65)), "1 to 64", 1, _KERNELS),
}
#: What keys are where `gemv` says nothing, and is not as `flat`.
_GEMV: Mapping[str, Value] = {"tile.n": 4, "tile.k": 512, "stages": 2}


def keys_of(phase: Phase, grads: tuple[str, ...] = ()) -> dict[str, Key]:
    """Returns the keys that a phase has, for an attention with gradients of these inputs, in a
    fixed order.
    """
    if phase in PROJECTION_PHASES:
        keys = {name: key for name, key in PROJECTION_KEYS.items() if phase in key.phases}
        own = _GEMV if phase == "gemv" else {}
        return {name: replace(key, default=own.get(name, key.default)) for name, key in keys.items()}
    keys = {name: key for name, key in KEYS.items() if phase in key.phases}
    if phase == "backward":
        keys["loops"] = replace(keys["loops"], default=("kv", "q"))
        keys |= {f"accumulate.d{name}": ACCUMULATE_DQ if name == "q" else ACCUMULATE for name in grads}
    return keys


def what_is_allowed(key: str, value: int) -> str:
    """Returns the values that a key may have, if this number is not one of them; else ""."""
    read = KEYS[key].read(ast.Number(text="", value=value, span=Span(Source("", ""), 0, 0)))
    return KEYS[key].allowed if read is None else ""
