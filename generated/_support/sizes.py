# Copied by `attnc compile`, from attnc/support. Do not edit.
"""Sizes as text: what a module declares of shapes, grids and numbers, evaluated for a call.

`B`, `M * G`, `cdiv(M, BLOCK_M) * B * H`, `dq_config.BLOCK_M`: names, their fields, integers, + - * // %,
comparisons, which are 1 or 0, and some functions. Evaluated once for all calls alike, never in the quick
path. Of tensors (`pages.count_keys`) with & and | of conditions, too.
"""

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

#: The names that a text may mention, and under `NAME()` functions besides those of every text.
Names = Mapping[str, Any]

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def cdiv(x: int, size: int) -> int:
    return -(-x // size)


def next_power_of_2(x: int) -> int:
    """Returns the least power of two that is not smaller."""
    return 1 << max(x - 1, 0).bit_length()


def whole_tiles(rows: int, *tiles: int) -> int:
    """Rows rounded up to whole tiles of every size, all powers of two."""
    most = max(tiles)
    return cdiv(rows, most) * most


def section(heads: int, size: int, room: int, least: int = 1, most: int | None = None) -> int:
    """Returns how many heads, of so many bytes each, are worked at together: as many as there is room for."""
    fitting = room // max(1, size)
    return max(1, min(heads, max(least, fitting if most is None else min(fitting, most))))


def joined_section(heads: int, size: int, room: int, joined: int) -> int:
    """Returns the same, but all heads if there is room for them in `joined` bytes."""
    return max(1, heads) if heads * size <= joined else section(heads, size, room)


#: Tiles of queries that a part of a walk has at least, where it is cut within a head; parts for each
#: multiprocessor, at most, whose sums take memory.
_LEAST_TILES, _MOST_PARTS = 2, 6
#: A share that is nearly all; tiles of queries, at most, of a part that is not long. With twice as many, two
#: parts for each multiprocessor take a third longer than six on an H200.
_NEARLY, _LONGEST = 0.9, 256
#: In tiles of queries: what a part takes besides; what its sums take, at a multiprocessor's share of the
#: memory's speed; how far a block that takes turns is behind the one before it. Measured on an H200.
_BESIDE, _JOINED, _BEHIND = 2.0, 2.0, 0.5
#: The same where blocks take turns and walks get shorter with the keys: for parts of whole heads and for
#: parts of one; how far blocks with such parts are behind; how much longer walks take because of turns, and
#: their ends; which share of the longest walk over the last span of keys is left when the others have ended;
#: what it takes to read a tile's sum of dq of one span. Tiles of such a part, at least, and parts for each
#: multiprocessor, at most. Of 49 calls on an H200 one takes 5 % longer than by the fastest spans and parts.
_OF_HEADS, _OF_TILES, _STEP_BEHIND = (0.94, 1.13), (3.02, 3.95), 0.61
_WAITED, _ENDS, _AT_THE_END, _READ = 1.06, 2.02, 0.72, 0.63
_LEAST_IN_TURNS, _MOST_IN_TURNS = 4, 16
#: Bytes of the sums of dq of all spans of keys, at most, of two spans twice that; how many spans there may
#: be, and how many are tried.
MOST_SPANNED, _MOST_SPANS, _SPANS = 256 << 20, 32, (1, 2, 4, 8, 16)


def count_parts(
    walks: int,
    heads: int,
    tiles: int,
    enough: int,
    wanted: int,
    few: int,
    chosen: int = 0,
    room: int = 0,
    turns: int = 0,
    least: int = 0,
) -> int:
    """Returns into how many parts each walk over queries is cut: one where there are `enough` walks, else so
    that there are as many parts as `wanted`; or, of each walk, about as many as a config has `chosen`.

    walks: of the call; heads, tiles: query heads that a walk goes through, and tiles of each. A part has the
    same number of whole heads as the others, but for the last one; or, where all heads are fewer than two for
    each multiprocessor, an equal share of the tiles of one: then the result is a multiple of `heads`, by a
    model of the time. few: all multiprocessors, half of them where walks are alike; 0: no head is cut.
    Where fewer parts, of alike heads and not long, nearly fill the `room` for two on each multiprocessor,
    there are no more. turns: walks over the same head that take turns. least: tiles that a part has at least,
    where all multiprocessors have some. Follows from shapes and the device alone, so that sums of parts are
    the same bits in every run.
    """
    parts = chosen or (1 if walks >= enough else cdiv(wanted, max(1, walks)))
    if room and not chosen and 0 < walks < enough:
        fewer = room // walks
        own = cdiv(heads, max(1, fewer))
        fills = walks * fewer >= _NEARLY * room and heads >= _NEARLY * fewer * own
        if 1 < fewer <= heads and fills and own * tiles <= _LONGEST:
            parts = fewer
    if least and not chosen:  # wanted: eight for each multiprocessor, which has two at least
        parts = min(parts, max(1, heads * tiles // least, cdiv(wanted, 4 * max(1, walks))))
    if parts <= heads or chosen:
        return _round_parts(parts, heads, tiles)
    processors = room // 2 or few
    if not few or walks * heads >= 2 * processors:
        return heads
    return heads * _count_shares(walks * heads, tiles, few, processors, turns)


def count_spans(
    walks: int,
    heads: int,
    tiles: int,
    turns: int,
    processors: int,
    sum_bytes: int,
    chosen: int = 0,
    enough: int = 0,
) -> int:
    """Returns into how many spans of neighbours the tiles of keys are divided, of which each has a sum of dq,
    of so many bytes, and turns of its own: as many as make the shortest time, if memory has room for them, or
    as a config has `chosen`; one where there are `enough` walks, if not 0. The others are as in
    `count_parts_in_turns`.
    """
    if chosen or 0 < enough <= walks:
        return min(chosen or 1, max(1, turns), _MOST_SPANS)

    call, choices = (walks, heads, tiles, turns, processors), _list_parts(walks, heads, tiles, processors)
    most = MOST_SPANNED // max(1, sum_bytes)
    most = max(1, min(turns, 2 if most == 1 else most))
    fitting = [spans for spans in _SPANS if spans <= most]
    return min(fitting, key=lambda spans: min(_time_in_turns(*call, spans, parts) for parts in choices))


def count_parts_in_turns(
    walks: int, heads: int, tiles: int, turns: int, processors: int, chosen: int = 0, spans: int = 1
) -> int:
    """Returns into how many parts each walk over queries is cut where blocks take turns and walks get shorter
    with the keys: the number with the shortest time, of whole heads each or of an equal share of the tiles of
    one (then a multiple of `heads`); or about as many as a config has `chosen`.

    walks: of the call; heads, tiles: query heads that a walk goes through, and tiles of each; turns: walks
    over the same head; spans: of keys, of which those with the longest walks come first. Follows from shapes
    and the device alone, as `count_parts` does.
    """
    if chosen:
        return _round_parts(chosen, heads, tiles)
    call, choices = (walks, heads, tiles, turns, processors), _list_parts(walks, heads, tiles, processors)
    return min(choices, key=lambda parts: _time_in_turns(*call, spans, parts))


def _list_parts(walks: int, heads: int, tiles: int, processors: int) -> list[int]:
    most = max(1, _MOST_IN_TURNS * processors // max(1, walks))
    of_heads = {cdiv(heads, each) for each in range(1, heads + 1)}
    of_tiles = {heads * shares for shares in range(2, tiles // _LEAST_IN_TURNS + 1)}
    return sorted(parts for parts in of_heads | of_tiles if parts <= most)


def _time_in_turns(
    walks: int, heads: int, tiles: int, turns: int, processors: int, spans: int, parts: int
) -> float:
    shares, each = max(1, parts // heads), walks * parts / processors
    longest = tiles * cdiv(heads, parts) if shares == 1 else tiles / shares
    beside, joined = _OF_HEADS if shares == 1 else _OF_TILES
    even = _WAITED * tiles * heads * walks / (2 * processors)
    works = even + _AT_THE_END * longest / spans + beside * each
    waits = longest + _ENDS + _STEP_BEHIND * cdiv(turns, spans) * (shares > 1)
    read = _READ * tiles * heads * walks / max(1, turns) / processors * (spans + 1) / 2
    return max(works, waits) + joined * each * (parts > 1) + read


def _round_parts(parts: int, heads: int, tiles: int) -> int:
    """Returns about as many parts, which have as many heads as each other, or as many tiles of one."""
    if parts <= heads:
        return cdiv(heads, cdiv(heads, parts))
    return heads * max(1, min(cdiv(parts, heads), tiles))


def _count_shares(walks: int, tiles: int, few: int, processors: int, turns: int) -> int:
    """Returns into how many parts of some tiles walks over a head are cut: the number with the shortest time.
    Walks are causal, and the longest begin first; or alike, where `few` is less than all multiprocessors or
    blocks take turns.
    """

    def time(shares: int) -> float:
        longest, parts = tiles / shares, walks * shares
        rounds = cdiv(parts, processors)
        if few < processors or turns:
            works = rounds * longest
        else:
            works = max(longest, tiles * walks / (2 * processors) + longest / 4)
        sums = _JOINED * parts / processors if shares > 1 else 0.0
        return max(works + _BESIDE * rounds, longest + _BEHIND * (turns - 1)) + sums

    most = min(tiles // _LEAST_TILES, _MOST_PARTS * processors // max(1, walks))
    return min(range(1, max(1, most) + 1), key=time)


def count_kept(
    head_bytes: int, heads: int, room: int, chosen: int = 0, walks: int = 0, least: int = 0
) -> int:
    """Returns of how many K/V heads ds is kept at once, of so many bytes each: as many as there is room for,
    in rounds of about as many; 0: not even of one, or of so few that a round has fewer than `least` walks, of
    `walks` for a head, and would wait for the longest. chosen: by a config; below 0: of none.
    """
    fitting = chosen or room // max(1, head_bytes)
    found = cdiv(heads, cdiv(heads, fitting)) if fitting > 0 else 0
    return 0 if not chosen and found < heads and found * walks < least else found


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "cdiv": cdiv,
    "count_kept": count_kept,
    "count_parts": count_parts,
    "count_parts_in_turns": count_parts_in_turns,
    "count_spans": count_spans,
    "gcd": math.gcd,
    "joined_section": joined_section,
    "max": max,
    "min": min,
    "next_power_of_2": next_power_of_2,
    "section": section,
    "whole_tiles": whole_tiles,
}


def evaluate(text: str, names: Names) -> Any:
    """Returns the value of a text: an int, or a tuple of them. KeyError for a name that is not there."""
    return _value(_parse(text), names)


def list_names(text: str) -> frozenset[str]:
    """Returns the names in a text."""
    return frozenset(node.id for node in ast.walk(_parse(text)) if isinstance(node, ast.Name))


def parse_beside_threads(parse: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """parse(...), which makes a syntax tree; again, where it fails because another thread makes one, too.

    Python before 3.11.8 and 3.12.2 counts the depth of all threads' trees as one (gh-106905), and raises
    SystemError where the count does not come out. No lock helps: libraries make trees without it.
    """
    for _ in range(99):
        try:
            return parse(*arguments, **options)
        except SystemError as failure:
            if "recursion depth" not in str(failure):
                raise
    return parse(*arguments, **options)


@functools.cache
def _parse(text: str) -> ast.expr:
    expression: ast.Expression = parse_beside_threads(ast.parse, text, mode="eval")
    return expression.body


def _value(node: ast.expr, names: Names) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.Attribute(value=ast.Name(id=name), attr=field):
            return getattr(names[name], field)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, names), _value(right, names))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            found = _COMPARISONS[type(op)](_value(left, names), _value(right, names))
            return int(found) if isinstance(found, bool) else found
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.Tuple(elts=parts):
            return tuple(_value(part, names) for part in parts)
        case ast.Call(func=ast.Name(id=name), args=args):
            function = _FUNCTIONS.get(name) or names[f"{name}()"]
            return function(*(_value(arg, names) for arg in args))
    raise ValueError(f"not a size: {ast.unparse(node)}")


def as_tuple(size: int | tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes of a shape or a grid, of which one may stand alone."""
    return size if isinstance(size, tuple) else (size,)
