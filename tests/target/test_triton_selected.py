"""What sums in memory take where queries select single keys, and which columns a program sums."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from attnc.plan.joined import joined_parts
from attnc.support.sizes import evaluate
from attnc.target.triton import selected
from attnc.target.triton.render import text_of
from attnc.target.triton.selected import SelectedText, SumText, TurnText
from attnc.target.triton.selected_blocks import BlockText
from tests.plan.test_selected import planned
from tests.verify.judging import modules_of

SIZES = {"B": 2, "M": 100, "N": 500, "Hkv": 3, "H": 6, "S": 10}


def sum_text(keys: int = 1) -> SumText:
    module = planned(keys=keys)
    turns = text_of(module, module.backward_kernels["dkdv"])
    assert isinstance(turns, TurnText)
    return SumText(module, turns, turns.makes, turns.selected.block)


def turn_sizes(text: SumText, **sizes: int) -> dict[str, int]:
    made = planned().lists
    assert made is not None
    names: dict[str, object] = {**SIZES, **sizes, "dkdv_config": SimpleNamespace(BLOCK_N=64)}
    found = text.memory_sizes(made.extents[-1])
    for name, value in found.items():
        names[name] = evaluate(value, names)
    return {name: int(str(names[name])) for name in found}


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_copies_have_no_more_memory_than_the_most(monkeypatch: pytest.MonkeyPatch, copies: int) -> None:
    """For each sequence, K/V head and key dk and dv."""
    numbers = 2 * 3 * 500 * 128
    monkeypatch.setattr(selected, "COPIED_FLOATS", copies * numbers + numbers - 1)
    assert turn_sizes(sum_text())["copies"] == copies


def test_sums_that_need_more_have_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected, "COPIED_FLOATS", 1)
    assert turn_sizes(sum_text())["copies"] == 1


@pytest.mark.parametrize(("queries", "copies"), [(0, 1), (1, 1), (3, 3), (9, 5)])
def test_no_copy_is_without_a_query(queries: int, copies: int) -> None:
    assert turn_sizes(sum_text(), M=queries)["copies"] == copies


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("entries", "sequences", "copies"), [(64, 2, 5), (128, 2, 2), (2048, 1, 1), (64, 1, 10), (64, 99, 1)]
)
def test_queries_with_few_tiles_have_copies(entries: int, sequences: int, copies: int) -> None:
    """So many that 32 tiles can be added at a time, of all sequences and K/V heads."""
    assert turn_sizes(sum_text(), S=entries, B=sequences)["copies"] == copies


@pytest.mark.parametrize(("keys", "entries", "tiles"), [(1, 0, 1), (1, 64, 1), (1, 65, 2), (9, 10, 2)])
def test_tiles_are_of_single_keys(keys: int, entries: int, tiles: int) -> None:
    assert turn_sizes(sum_text(keys), S=entries)["key_tiles"] == tiles


@pytest.mark.parametrize("empty", [{"N": 0}, {"S": 0}, {"M": 0}])
def test_there_is_memory_where_there_are_no_keys_or_entries(empty: dict[str, int]) -> None:
    """A tensor without elements is passed as None, which compilers take no address of."""
    text = sum_text()
    names = {**SIZES, **empty, "key_tiles": 1, "copies": 1}
    for made in text.list_allocations():
        shape = str((made.fields or {})["type"])
        assert made.values == ['"_order"'] or (made.fields or {})["zero"] == "True"
        numbers = shape.strip('"').partition("[")[2].removesuffix("]")
        assert evaluate(numbers, names) > 0


def test_every_program_has_a_turn() -> None:
    text = sum_text()
    *_, turns = text.list_allocations()
    module = planned()
    launched = text_of(module, module.backward_kernels["dkdv"]).parameters.launch
    assert str((turns.fields or {})["type"]) == f'"i32[{str((launched.fields or {})["grid"])[1:-1]} + 1]"'


LATENT = """attention a {
  input q: bf16[B, M, G, D]
  input k: bf16[B, N, 1, D]
  input v: bf16[B, N, 1, V] via prefix(k)
  input idx: i32[B, M, S]
  score = dot(q, k)
  mask = listed(idx, rows = 1, keys = 1)
  normalize = softmax
  output o: bf16[B, M, G, V]
  grad q, k
}

schedule a for triton {
  loops = [kv], pack = gqa, tile.kv = 16, stages = 1
  backward { tile.q = 16, tile.kv = 16, stages = 1 }
}
"""


@pytest.mark.parametrize(
    ("d", "v", "widths"),
    [
        (576, 512, [128, 128, 128, 128, 64]),
        (320, 256, [128, 128, 64]),
        (80, 64, [64, 16]),
        (200, 100, []),  # v ends inside of a part
    ],
)
def test_rows_of_do_and_q_are_one_operand(d: int, v: int, widths: list[int]) -> None:
    (module,) = modules_of(LATENT.replace("D]", f"{d}]").replace("V]", f"{v}]"))
    parts = joined_parts(module.variant.attention)
    assert [part.width for part in parts] == widths
    assert [part.first for part in parts] == [sum(widths[:number]) for number in range(len(widths))]
    text = text_of(module, module.backward_kernels["dk"])
    assert isinstance(text, TurnText)
    assert [(part.k, part.sum) for part in text.joined] == [
        (f"k{end}", f"dk{end}") for end in ["", *(f"_{n}" for n in range(2, 9))][: len(widths)]
    ]
    # rows of do have no columns behind those of v
    lacking = [part.first for part in parts if part.first >= v]
    assert ["both % 2 == 1" in part.load for part in text.joined] == [part.first in lacking for part in parts]


def test_rows_of_two_types_are_two_operands() -> None:
    (module,) = modules_of(
        LATENT.replace("D]", "80]")
        .replace("output o: bf16[B, M, G, V]", "output o: f32[B, M, G, 64]")
        .replace("V]", "64]")
    )
    assert module.backward_kernels["dk"].joined == ()


@pytest.mark.parametrize(("keys", "text"), [(1, TurnText), (9, TurnText), (16, BlockText), (48, BlockText)])
def test_blocks_are_summed_over_their_queries_and_single_keys_in_memory(
    keys: int, text: type[SelectedText]
) -> None:
    module = planned(keys=keys)
    assert type(text_of(module, module.backward_kernels["dkdv"])) is text
    assert type(text_of(module, module.backward_kernels["dq"])) is SelectedText
