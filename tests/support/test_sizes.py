"""Sizes as text, and the arguments that bind them."""

from __future__ import annotations

import ast
import heapq
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import assume, settings
from hypothesis import given as drawn_by
from hypothesis import strategies as st

from attnc.support.arguments import Sizes, Tensor
from attnc.support.devices import MOST_KEPT
from attnc.support.sizes import (
    MOST_SPANNED,
    cdiv,
    count_kept,
    count_parts,
    count_parts_in_turns,
    count_spans,
    evaluate,
    joined_section,
    list_names,
    next_power_of_2,
    parse_beside_threads,
    whole_tiles,
)


def test_a_size_is_evaluated() -> None:
    names = {"M": 70, "B": 2, "config": Tensor("x", "f32[]"), "twice()": lambda x: 2 * x}
    assert evaluate("cdiv(M, 32) * B - 1", names) == 5
    assert evaluate("(-M // 32, M % 32)", names) == (-3, 6)
    assert evaluate("max(whole_tiles(M, 16, 64), twice(B))", names) == 128
    assert evaluate("config.name", names) == "x"
    assert list_names("cdiv(M, config.BLOCK_M) + 3") >= {"M", "config"}


def test_a_syntax_tree_is_made_again_where_another_thread_makes_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parse = ast.parse
    failures = [
        SystemError("AST constructor recursion depth mismatch (before=63, after=48)"),
        SystemError("AST constructor recursion depth mismatch (before=48, after=63)"),
    ]

    def meet_another(text: str, mode: str) -> ast.AST:
        if failures:
            raise failures.pop()
        return parse(text, mode=mode)

    monkeypatch.setattr(ast, "parse", meet_another)
    assert evaluate("M + 12345", {"M": 1}) == 12346
    assert not failures


def test_other_errors_of_python_are_raised_at_once() -> None:
    calls = []

    def fail(text: str) -> None:
        calls.append(text)
        raise SystemError(text)

    with pytest.raises(SystemError, match="bad call"):
        parse_beside_threads(fail, "bad call")
    with pytest.raises(SystemError, match="recursion depth"):
        parse_beside_threads(fail, "recursion depth mismatch")
    assert calls == ["bad call", *["recursion depth mismatch"] * 100]


def test_a_comparison_is_one_or_zero() -> None:
    assert [evaluate(f"8 * (M {op} 3)", {"M": 3}) for op in ("==", ">")] == [8, 0]
    with pytest.raises(ValueError, match="not a size"):
        evaluate("1 < M < 3", {"M": 2})


@pytest.mark.parametrize("text", ["M if B else 1", "[M]", "M ** 2", "M.x.y", "'M'()"])
def test_other_python_is_no_size(text: str) -> None:
    with pytest.raises((ValueError, KeyError, AttributeError)):
        evaluate(text, {"M": 1, "B": 1})


def test_functions_of_sizes() -> None:
    assert [cdiv(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_2(x) for x in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert whole_tiles(65, 64, 32) == 128


def test_a_tensor_knows_its_axes() -> None:
    q = Tensor("q", "bf16[B, M, H=8, 128]", "bmh")
    assert q.dtype is torch.bfloat16
    assert q.shape == ("B", "M", "H=8", "128")
    assert q.known_shape == (None, None, 8, 128)
    assert q.has_rows
    assert q.stride_names == ("stride_qb", "stride_qm", "stride_qh")
    assert q.rename("dq", "f32[B, M, H, 128]").stride_names[0] == "stride_dqb"
    bias = Tensor("bias", "f32[H, cdiv(M, 4)]")
    assert bias.shape == ("H", "cdiv(M, 4)")
    assert not bias.has_rows
    assert bias.stride_names == ("stride_bias_0", "stride_bias_1")
    assert Tensor("p", "f32").is_scalar


INPUTS = (
    Tensor("q", "f32[T, H, 8]", "mh"),
    Tensor("k", "f32[pages, 4, Hkv, 8]", "pnh"),
    Tensor("v", "f32[pages, 4, Hkv, 8]", "pnh"),
    Tensor("bias", "f32[H, N]"),
    Tensor("table", "i32[B, P]"),
    Tensor("ends", "i32[B + 1]"),
)


def given(**changed: torch.Tensor) -> list[torch.Tensor]:
    tensors = {
        "q": torch.zeros(5, 6, 8),
        "k": torch.zeros(7, 4, 3, 8),
        "v": torch.zeros(7, 4, 3, 8),
        "bias": torch.zeros(6, 8),
        "table": torch.zeros(2, 2, dtype=torch.int32),
        "ends": torch.zeros(3, dtype=torch.int32),
    }
    return list((tensors | changed).values())


def checked(**changed: torch.Tensor) -> Sizes:
    sizes = Sizes("q", {"N": "P * 4"}, 0)
    sizes.check(INPUTS, given(**changed))
    return sizes


def test_sizes_are_bound_and_computed() -> None:
    expected = {"T": 5, "H": 6, "pages": 7, "Hkv": 3, "G": 2, "B": 2, "P": 2, "N": 8}
    assert checked() == expected
    again = Sizes("q", {"N": "P * 4"}, 0)
    again.bind(INPUTS, given())
    assert again == expected


def test_what_has_a_computed_size_may_come_before_what_that_is_computed_from() -> None:
    sizes = Sizes("q", {"N": "P * 4"}, None)
    types = {"q": "f32[T, 8]", "bias": "f32[B, N, X]", "half": "f32[X // 2]", "table": "f32[B, P]"}
    tensors = [Tensor(name, text, "t" if name == "q" else "") for name, text in types.items()]
    sizes.check(tensors, [torch.zeros(*shape) for shape in ((3, 8), (2, 12, 6), (3,), (2, 3))])
    assert sizes == {"T": 3, "B": 2, "P": 3, "N": 12, "X": 6}


WRONG = [
    ({"v": torch.zeros(6, 4, 3, 8)}, r"v: expected shape \[7, 4, 3, 8\], got \[6, 4, 3, 8\]"),
    ({"q": torch.zeros(5, 7, 8)}, "q has 7 heads: expected a multiple of the 3 heads of k"),
    ({"k": torch.zeros(7, 4, 0, 8), "v": torch.zeros(7, 4, 0, 8)}, "k has no heads: expected at least one"),
    ({"bias": torch.zeros(6, 9)}, r"bias: expected shape \[6, 8\], got \[6, 9\]"),
    ({"ends": torch.zeros(4, dtype=torch.int32)}, r"ends: expected shape \[3\], got \[4\]"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_fit_is_refused(changed: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(**changed)


def test_a_size_that_is_fixed_and_one_more_than_a_size() -> None:
    sizes = Sizes("q", {}, None)
    x = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"q: expected shape \[any, 4\], got \[3, 2\]"):
        sizes.check((Tensor("q", "f32[B, H=4]"),), [x])
    with pytest.raises(ValueError, match=r"ends: expected shape \[B \+ 1\], got \[0\]"):
        Sizes("q", {}, None).check((Tensor("ends", "f32[B + 1]"),), [torch.zeros(0)])
    with pytest.raises(ValueError, match=r"x: expected shape \[n, n\], got \[3, 2\]"):
        Sizes("x", {}, None).check((Tensor("x", "f32[n, n]"),), [x])


@pytest.mark.parametrize(
    ("text", "heads"),
    [
        ("section(32, 100, 1000)", 10),
        ("section(8, 100, 1000)", 8),
        ("section(32, 10000, 1000)", 1),
        ("section(32, 10000, 1000, 4, 16)", 4),
        ("section(32, 1, 1000, 4, 16)", 16),
        ("section(2, 0, 1000, 4, 16)", 2),
    ],
)
def test_how_many_heads_are_worked_at_together(text: str, heads: int) -> None:
    assert evaluate(text, {}) == heads


# --- parts of walks over queries


def shares_of(parts: int, heads: int, tiles: int) -> list[tuple[range, range]]:
    """Heads and tiles of each part, as kernels compute them (`templates/sm90/_backward_tiles.cu.jinja`)."""
    heads_of_part, parts_of_head = cdiv(heads, parts), max(parts // heads, 1)
    shares = []
    for part in range(parts):
        first, share = part // parts_of_head * heads_of_part, part % parts_of_head
        ends = (tiles * number // parts_of_head for number in (share, share + 1))
        shares.append((range(first, min(first + heads_of_part, heads)), range(*ends)))
    return shares


@drawn_by(
    walks=st.integers(0, 600),
    heads=st.integers(1, 130),
    tiles=st.integers(0, 40),
    enough=st.integers(1, 1200),
    wanted=st.integers(1, 1200),
    few=st.integers(0, 200),
    chosen=st.sampled_from((0, 0, 1, 2, 3, 7)),
)
def test_parts_have_every_tile_of_every_head_once(
    walks: int, heads: int, tiles: int, enough: int, wanted: int, few: int, chosen: int
) -> None:
    by_turns = count_parts_in_turns(walks, heads, tiles, tiles, few + 1, chosen)
    for parts in {count_parts(walks, heads, tiles, enough, wanted, few, chosen), by_turns}:
        shares = shares_of(parts, heads, tiles)
        visited = [(h, tile) for of_heads, of_tiles in shares for h in of_heads for tile in of_tiles]
        assert sorted(visited) == [(h, tile) for h in range(heads) for tile in range(tiles)]
        assert all(of_heads for of_heads, _ in shares)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ((396, 4, 64, 396, 792, 132), 1),  # enough walks as they are
        ((395, 4, 64, 396, 792, 132), 2),
        ((64, 48, 64, 396, 792, 132), 12),  # four heads each
        ((64, 71, 16, 396, 792, 132), 12),  # six each, the last of them five
        ((128, 8, 64, 396, 792, 132), 4),  # the group is divided, ...
        ((128, 4, 64, 1056, 1056, 132), 4),  # ... and no head
        ((8, 1, 16, 396, 792, 132), 8),  # but where too few are at work: two tiles of it each
        ((32, 4, 64, 396, 792, 132), 8),  # two of each head
        ((48, 1, 32, 396, 792, 132, 0, 264), 4),  # causal: all have work, and the longest walk is short
        ((48, 1, 32, 396, 792, 66, 0, 264), 2),  # alike: one round
        ((32, 1, 16, 396, 792, 132, 0, 264), 4),
        ((64, 1, 128, 396, 792, 132, 0, 264), 4),
        ((120, 1, 47, 396, 792, 132, 0, 264), 2),
        ((8, 8, 16, 792, 792, 132, 0, 264), 16),
        ((47, 3, 94, 396, 792, 132, 0, 264), 6),  # 141 heads would take as long as the longest
        ((47, 3, 94, 396, 792, 66, 0, 264), 15),  # and leave much of a second round idle
        ((256, 1, 32, 396, 792, 132, 0, 264), 1),
        ((128, 1, 256, 396, 792, 66, 0, 264), 1),
        ((32, 1, 64, 1056, 1056, 132, 0, 0, 32), 8),  # in turns, each behind the one before
        ((20, 1, 64, 1056, 1056, 132, 0, 0, 1), 6),
        ((48, 1, 8, 1056, 1056, 132, 0, 0, 4), 2),
        ((500, 4, 10, 1056, 1056, 0, 0, 0, 0, 40), 1),  # packed, in turns: parts of forty tiles at least, ...
        ((500, 4, 24, 1056, 1056, 0, 0, 0, 0, 40), 2),
        ((100, 4, 10, 1056, 1056, 0, 0, 0, 0, 40), 2),  # ... unless multiprocessors would be idle
        ((500, 4, 10, 1056, 1056, 0, 3, 0, 0, 40), 2),
        ((32, 4, 64, 396, 792, 0), 4),
        ((1, 4, 1, 396, 792, 132), 4),  # no tile is divided
        ((0, 4, 1, 396, 792, 132), 4),
        (
            (512, 4, 64, 396, 792, 132, 3),
            2,
        ),  # as a config says: two heads each, for three parts cannot be alike
        ((4, 4, 64, 396, 792, 132, 1), 1),
        ((64, 16, 64, 792, 792, 132, 0, 264), 4),  # two for each multiprocessor, but for eight
        ((64, 15, 64, 792, 792, 132, 0, 264), 4),  # nearly alike
        ((64, 48, 64, 792, 792, 132, 0, 264), 12),  # parts of twelve heads are long
        ((128, 8, 64, 792, 792, 132, 0, 264), 2),
        ((128, 7, 64, 792, 792, 132, 0, 264), 7),  # four heads and three are not alike
        ((96, 16, 64, 792, 792, 132, 0, 264), 8),  # two parts each leave a quarter idle
        ((256, 5, 64, 396, 792, 132, 0, 264), 3),  # whole walks are cut, though they fill them
        ((64, 16, 64, 792, 792, 132, 6, 264), 6),
    ],
)
def test_how_many_parts_walks_have(given: tuple[int, ...], parts: int) -> None:
    assert count_parts(*given) == parts


#: A sum of dq of a head of 128 columns and 8k tokens.
SUM = 4 << 20


@pytest.mark.parametrize(
    ("given", "sums", "found"),
    [
        ((64, 1, 128, 64), SUM, (8, 4)),  # one head of 8k tokens: 142 us, and 220 with one span
        ((128, 1, 256, 128), 2 * SUM, (16, 2)),
        ((256, 1, 512, 256), 4 * SUM, (16, 1)),
        ((256, 1, 128, 64), 4 * SUM, (8, 1)),  # walks that are long, but many
        ((256, 1, 256, 128), 4 * SUM, (16, 1)),
        ((96, 4, 192, 96), 6 * SUM, (8, 4)),  # whole heads
        ((512, 1, 128, 64), 8 * SUM, (8, 1)),
        ((128, 8, 64, 32), 16 * SUM, (4, 8)),
        ((32, 1, 32, 16), SUM // 2, (8, 5)),
        ((2048, 1, 16, 8), 32 * SUM, (1, 1)),  # sums take longer to read than the end of the launch
        ((2048, 1, 256, 128), 32 * SUM, (2, 1)),  # as many as there is room for
        ((512, 8, 128, 64), 64 * SUM, (2, 4)),
        ((8192, 1, 256, 128), 128 * SUM, (1, 1)),  # no room
        ((0, 4, 1, 1), 0, (1, 4)),
    ],
)
def test_walks_in_turns_have_the_spans_and_parts_that_were_fastest(
    given: tuple[int, int, int, int], sums: int, found: tuple[int, int]
) -> None:
    spans = count_spans(*given, 132, sums)
    assert (spans, count_parts_in_turns(*given, 132, 0, spans)) == found


def test_spans_and_parts_are_as_a_config_says() -> None:
    assert [count_spans(64, 1, 128, 64, 132, SUM, chosen) for chosen in (1, 3, 99)] == [1, 3, 32]
    assert count_spans(4, 1, 8, 4, 132, SUM, 99) == 4
    assert count_parts_in_turns(512, 4, 64, 32, 132, 3) == 2
    assert count_parts_in_turns(512, 1, 64, 32, 132, 5) == 5


def test_walks_that_are_alike_have_one_span_where_they_are_enough() -> None:
    assert [count_spans(walks, 1, 64, 32, 132, SUM, 0, 528) for walks in (527, 528)] == [4, 1]
    assert count_spans(528, 1, 64, 32, 132, SUM, 2, 528) == 2


def test_two_spans_may_have_twice_the_room() -> None:
    sums = [SUM, MOST_SPANNED // 2, MOST_SPANNED, MOST_SPANNED + 1]
    assert [count_spans(2048, 1, 256, 128, 132, size) for size in sums] == [4, 2, 2, 1]


def test_all_heads_are_one_section_where_there_is_room() -> None:
    assert [joined_section(8, 10, 20, room) for room in (80, 79, 0)] == [8, 2, 2]
    assert joined_section(0, 10, 20, 80) == 1


#: Of an H200. Of a part of a walk, in tiles of queries: what it takes besides, and to add its sums up.
MULTIPROCESSORS, BESIDE, JOINED = 132, 0.35, 0.6


def model_time(walks: int, heads: int, tiles: int, parts: int, *, causal: bool) -> float:
    """What gradients of keys take, in tiles of queries: the longest part first, each to the multiprocessor
    that is free. Of causal walks, each sees two tiles fewer than the one before.
    """
    shares = shares_of(parts, heads, tiles)
    works = []
    for walk in range(walks):
        hidden = 2 * (walk % max(1, tiles // 2)) if causal else 0
        for of_heads, of_tiles in shares:
            works.append(len(of_heads) * max(0, of_tiles.stop - max(of_tiles.start, hidden)) + BESIDE)
    free = [0.0] * MULTIPROCESSORS
    for work in sorted(works, reverse=True):
        heapq.heapreplace(free, free[0] + work)
    return max(free) + (JOINED * walks * parts / MULTIPROCESSORS if parts > 1 else 0.0)


def chosen_parts(walks: int, heads: int, tiles: int, *, causal: bool) -> int:
    """As declarations of `plan.sm90.backward` ask for gradients whose sums come in any order."""
    enough = (6 if heads >= 8 else 3) * MULTIPROCESSORS
    few = MULTIPROCESSORS if causal else MULTIPROCESSORS // 2
    return count_parts(walks, heads, tiles, enough, 6 * MULTIPROCESSORS, few, room=2 * MULTIPROCESSORS)


@drawn_by(
    sequences=st.integers(1, 16),
    kv_heads=st.sampled_from((1, 2, 4, 8)),
    heads=st.sampled_from((1, 2, 3, 4, 5, 7, 8, 16, 32)),
    length=st.integers(1024, 8192),
    causal=st.booleans(),
)
def test_parts_of_like_sizes_are_not_much_faster(
    sequences: int, kv_heads: int, heads: int, length: int, causal: bool
) -> None:
    """The choice has steps, and none of them loses more than a second round of parts takes."""
    tiles = cdiv(length, 64)
    walks = cdiv(length, 128) * sequences * kv_heads
    assume(walks <= 1200)
    own = model_time(walks, heads, tiles, chosen_parts(walks, heads, tiles, causal=causal), causal=causal)
    for other in (walks // 2, walks * 3 // 4, walks - 1, walks + 1, walks * 5 // 4, walks * 2):
        parts = chosen_parts(other, heads, tiles, causal=causal)
        assert own <= 2 * model_time(walks, heads, tiles, parts, causal=causal)


@settings(max_examples=60)
@drawn_by(st.data())
def test_a_text_means_what_python_says(data: st.DataObject) -> None:
    """Of every sign of the language, on positive and negative numbers."""
    names = {"M": data.draw(st.integers(-9, 99)), "B": data.draw(st.integers(1, 7))}
    text = data.draw(_EXPRESSIONS)
    try:
        expected = int(eval(text, {"max": max, "min": min}, {**names}))
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            evaluate(text, names)
        return
    assert evaluate(text, names) == expected


_EXPRESSIONS = st.recursive(
    st.sampled_from(("M", "B", "0", "1", "5", "16")),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(("+", "-", "*", "//", "%", "==", ">")), inner),
        st.builds("-{}".format, inner),
        st.builds("{}({}, {})".format, st.sampled_from(("max", "min")), inner, inner),
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("group", [0, 2])
def test_heads_of_keys_have_so_many_of_queries(group: int) -> None:
    """Which what follows k may have an axis of; 1 where there are none."""
    tensors = (Tensor("q", "f32[H, 8]", "h"), Tensor("k", "f32[Hkv, 8]", "h"), Tensor("bias", "f32[G]"))
    for heads, shared in ((6, 3), (3, 3), (8, 1), (0, 0), (0, 2), (5, 2), (4, 2), (3, 0)):
        fits = heads == group * shared if group else heads % shared == 0 if shared else heads == 0
        own = heads // shared if shared else 1
        sizes, given = Sizes("q", {}, group), [torch.zeros(heads, 8), torch.zeros(shared, 8)]
        if not fits:
            with pytest.raises(ValueError, match="heads"):
                sizes.check(tensors, [*given, torch.zeros(own)])
            continue
        sizes.check(tensors, [*given, torch.zeros(own)])
        assert sizes["G"] * shared == heads
        with pytest.raises(ValueError, match=rf"^bias: expected shape \[{own}\]"):
            Sizes("q", {}, group).check(tensors, [*given, torch.zeros(own + 1)])


def test_walks_are_cut_as_before(golden: Callable[[Path, str], None]) -> None:
    """On an H200, for rows of walks of so many heads and tiles: parts by the number of walks."""
    walks, lines = (0, 1, 2, 8, 20, 48, 96, 130, 264), []
    for (few, room, turns), chosen in product(
        ((132, 0, 0), (132, 264, 0), (66, 264, 0), (66, 264, 1), (132, 0, 4), (132, 0, 64), (0, 264, 0)),
        (0, 3),
    ):
        lines.append(f"few {few}, room {room}, turns {turns}, chosen {chosen}: of {walks} walks")
        for heads, tiles in product((1, 3, 8, 264), (1, 4, 16, 64, 300)):
            found = [count_parts(n, heads, tiles, 396, 792, few, chosen, room, turns) for n in walks]
            lines.append(f"  {heads} heads, {tiles} tiles: {', '.join(map(str, found))}")
    golden(Path(__file__).parents[1] / "golden" / "choices" / "parts.txt", "\n".join(lines) + "\n")


@drawn_by(st.integers(0, 3 * MOST_KEPT), st.integers(1, 300), st.sampled_from((0, 0, -1, 1, 7)))
def test_ds_is_kept_of_as_many_heads_as_there_is_room_for(size: int, heads: int, chosen: int) -> None:
    """In rounds that are as few, and of about as many."""
    found = count_kept(size, heads, MOST_KEPT, chosen)
    if chosen < 0 or (chosen == 0 and size > MOST_KEPT):
        assert found == 0
        return
    assert 1 <= found <= heads
    most = chosen or max(MOST_KEPT // max(1, size), 1)
    assert found <= most
    assert cdiv(heads, found) == cdiv(heads, min(most, heads))


def test_ds_is_kept_where_rounds_have_walks_for_all_processors() -> None:
    """Of all heads in one round even where these have few walks, as in two passes."""
    found = [count_kept(MOST_KEPT // n, 8, MOST_KEPT, 0, 128, 264) for n in (1, 2, 3, 8)]
    assert found == [0, 0, 3, 8]
    assert count_kept(MOST_KEPT, 8, MOST_KEPT, 1, 128, 264) == 1  # as the config says
    assert count_kept(1, 8, 0) == 0  # without room
