"""What sums in memory take where queries select single keys, and which columns a product has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from attnc.plan.layout import KernelName
from attnc.support.sizes import evaluate
from attnc.target.triton.render import text_of
from attnc.target.triton.selected import SelectedText
from attnc.target.triton.tokens import TokenSumText, TokenText
from tests.plan.test_selected import ATOMIC, planned
from tests.target.test_triton_selected import LATENT
from tests.verify.judging import modules_of

#: Latent attention whose sums are added to as queries come.
ADDED = LATENT.replace("backward { ", "backward { accumulate.dk = atomic, ")
SIZES = {"B": 2, "M": 100, "N": 500, "Hkv": 3, "G": 2, "H": 6, "S": 10}


def token_text(keys: int = 1) -> TokenText:
    module = planned(keys=keys, ways=ATOMIC)
    text = text_of(module, module.backward_kernels["dq"])
    assert isinstance(text, TokenText)
    return text


def sum_text(keys: int = 1) -> TokenSumText:
    text = token_text(keys)
    return TokenSumText(text.module, text)


def sizes_of(text: TokenSumText, warps: int = 8, **sizes: int) -> dict[str, int]:
    made = planned().lists
    assert made is not None
    config = SimpleNamespace(BLOCK_M=16, BLOCK_N=64, num_warps=warps)
    names: dict[str, object] = {**SIZES, **sizes, "dq_config": config}
    found = text.memory_sizes(made.extents[-1])
    for name, value in found.items():
        names[name] = evaluate(value.replace("multiprocessors()", "132"), names)
    return {name: int(str(names[name])) for name in found}


@pytest.mark.parametrize(
    ("warps", "queries", "programs"), [(8, 100, 132), (4, 100, 264), (16, 100, 132), (8, 1, 6), (4, 0, 0)]
)
def test_there_are_as_many_programs_as_run_at_a_time(warps: int, queries: int, programs: int) -> None:
    """Or as lists, of all sequences and K/V heads."""
    assert sizes_of(sum_text(), warps, M=queries)["programs"] == programs


@pytest.mark.parametrize(
    ("keys", "entries", "wide"), [(1, 0, 0), (1, 256, 256), (1, 257, 512), (9, 100, 1024)]
)
def test_a_program_keeps_weights_of_all_keys_of_a_list(keys: int, entries: int, wide: int) -> None:
    """p and ds of each head, heads in whole tiles of 16."""
    found = sizes_of(sum_text(keys), S=entries, G=17)
    assert found["weights"] == found["programs"] * 2 * 32 * wide


@pytest.mark.parametrize("empty", [{"N": 0}, {"S": 0}, {"M": 0}])
def test_there_is_memory_where_there_are_no_keys_or_entries(empty: dict[str, int]) -> None:
    """A tensor without elements is passed as None, which compilers take no address of."""
    text = sum_text()
    names = {**SIZES, **empty, **sizes_of(text, **empty)}
    for made in text.list_allocations():
        assert made.values == ['"_weights"'] or (made.fields or {})["zero"] == "True"
        shape = str((made.fields or {})["type"])
        numbers = shape.strip('"').partition("[")[2].removesuffix("]")
        assert evaluate(numbers, names) > 0


def test_there_is_one_sum_of_each_key_and_column() -> None:
    text = sum_text()
    sums, *_ = text.list_allocations()
    shape = str((sums.fields or {})["type"]).strip('"').removeprefix("f32[").removesuffix("]")
    assert evaluate(shape, {**SIZES, **sizes_of(text)}) == 2 * 3 * 500 * 128
    assert sizes_of(text)["copies"] == 1


def latent_text(d: int, v: int) -> TokenText:
    (module,) = modules_of(ADDED.replace("D]", f"{d}]").replace("V]", f"{v}]"))
    text = text_of(module, module.backward_kernels["dq"])
    assert isinstance(text, TokenText)
    return text


@pytest.mark.parametrize(
    ("d", "v", "columns", "of_q"),
    [
        (576, 512, [0, 128, 256, 384, 512], 1),
        (320, 256, [0, 128, 256], 1),
        (80, 64, [0, 64], 1),
        (200, 100, [0, 100], 1),
        (64, 64, [0], 0),
    ],
)
def test_products_are_of_do_and_q_up_to_where_values_end(
    d: int, v: int, columns: list[int], of_q: int
) -> None:
    """Rows of do have no columns behind those of v."""
    text = latent_text(d, v)
    assert [product.column for product in text.products] == columns
    later = [f"sums + {first}" for first in columns[1:]]
    assert [product.at for product in text.products] == ["sums", *later]
    both = len(columns) - of_q
    sides = [(product.side, product.sides) for product in text.products]
    assert sides == [(0, 2)] * both + [(1, 1)] * of_q


def test_products_of_dv_lie_behind_those_of_dk() -> None:
    products = token_text().products
    assert [(product.side, product.sides, product.column, product.at) for product in products] == [
        (1, 1, 0, "sums"),
        (0, 1, 0, "sums + 64"),
    ]


def test_rows_of_two_types_are_two_operands() -> None:
    text = ADDED.replace("D]", "80]").replace("output o: bf16[B, M, G, V]", "output o: f32[B, M, G, 64]")
    (module,) = modules_of(text.replace("V]", "64]"))
    kernel = module.backward_kernels["dq"]
    assert kernel.joined == ()
    found = text_of(module, kernel)
    assert isinstance(found, TokenText)
    assert [(product.side, product.sides) for product in found.products] == [(0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("spec", "kernel", "apart"), [(LATENT, "dq", -8), (LATENT, "dk", -1), (ADDED, "dq", -8)]
)
def test_both_rows_of_a_head_are_neighbours_or_lie_eight_apart(
    spec: str, kernel: KernelName, apart: int
) -> None:
    """In a product of 16 rows a thread has rows eight apart, of which weights are kept."""
    (module,) = modules_of(spec.replace("D]", "576]").replace("V]", "512]"))
    text = text_of(module, module.backward_kernels[kernel])
    assert isinstance(text, SelectedText)
    rules = (text.head_of_both, text.side_of_both)
    found = [tuple(eval(rule, {"both": number}) for rule in rules) for number in range(32)]
    assert sorted(found) == [(head, side) for head in range(16) for side in (0, 1)]
    assert {found.index((head, 0)) - found.index((head, 1)) for head in range(16)} == {apart}
