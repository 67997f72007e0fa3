"""Which rows of an epilogue are copied ahead, and what is computed of them before o is there."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import Index, Ref, show, walk
from attnc.model.dtypes import DType
from attnc.plan.epilogue import list_lengths
from attnc.plan.ir import Decode, Fetch, Forward, statement_expressions
from attnc.plan.sm90 import roles_of
from attnc.plan.sm90.finishing import Finishing, pair_rows
from tests.verify.judging import modules_of, spec


def finishing(epilogue: str, d: int = 64, **inputs: str) -> Finishing | None:
    declared = {"gate": f"bf16[B, M, H, {d}]", **inputs}
    lines = (
        f"input q: bf16[B, M, H, {d}]",
        f"input k, v: bf16[B, N, H, {d}]",
        *(f"input {name}: {kind}" for name, kind in declared.items() if name in epilogue),
        "score = dot(q, k)",
        "normalize = softmax",
        f"output o: bf16[B, M, H, {d}] = {epilogue}",
    )
    (module,) = modules_of(spec(lines, "loops = [q, kv]", target="cuda.sm_90a"))
    assert isinstance(module.kernel, Forward)
    return roles_of(module.kernel).finishing


@pytest.mark.parametrize(
    ("epilogue", "ahead", "value"),
    [
        ("sigmoid(gate[b, q_idx, h, d]) * attention", "sigmoid(gate_tile)", "gate_tile_ahead * attention"),
        ("gate[b, q_idx, h, d] + attention", "gate_tile", "gate_tile_ahead + attention"),
        ("2 * tanh(gate[b, q_idx, h, d]) * attention", "2 * tanh(gate_tile)", "gate_tile_ahead * attention"),
        (
            "sigmoid(gate[b, q_idx, h, d]) * attention + gate[b, q_idx, h, d]",
            "gate_tile",
            "sigmoid(gate_tile_ahead) * attention + gate_tile_ahead",
        ),
        (
            "sigmoid(gate[b, q_idx, h, d] * attention)",
            "gate_tile",
            "sigmoid(gate_tile_ahead * attention)",
        ),
        (
            "sigmoid(gate[b, q_idx, h, d]) * attention + s * sigmoid(gate[b, q_idx, h, d])",
            "sigmoid(gate_tile)",
            "gate_tile_ahead * attention + s_value * gate_tile_ahead",
        ),
    ],
)
def test_what_is_of_the_row_alone_is_computed_ahead(epilogue: str, ahead: str, value: str) -> None:
    found = finishing(epilogue, s="f32[]")
    assert found is not None
    assert found.staged is not None
    assert (show(found.staged.ahead), show(found.staged.value)) == (ahead, value)
    assert found.staged.in_pairs == ahead.startswith("sigmoid")
    assert found.staged.is_factor == (value == "gate_tile_ahead * attention")


def test_o_may_stand_first_in_a_product() -> None:
    found = finishing("attention * sigmoid(gate[b, q_idx, h, d])")
    assert found is not None
    assert found.staged is not None
    assert found.staged.is_factor


def test_one_row_has_the_tile_of_o() -> None:
    found = finishing("gate[b, q_idx, h, d] * attention + other[b, q_idx, h, d]", other="f16[B, M, H, 64]")
    assert found is not None
    assert found.staged is not None
    assert found.staged.fetch.load.tensor == "gate"
    assert [fetch.load.tensor for fetch in found.paired] == ["other"]


@pytest.mark.parametrize(
    ("row", "kind", "axis"),
    [
        ("gate[b, q_idx, h, d]", "bf16[B, M, H, 64]", 1),
        ("gate[b, h, q_idx, d]", "bf16[B, H, M, 64]", 2),
        ("gate[q_idx, d]", "bf16[M, 64]", 0),
        ("gate[b, q_idx, h // 2, d]", "bf16[B, M, Hgate, 64]", 1),
        ("gate[b, q_idx - 1, h, d]", "bf16[B, M, H, 64]", None),  # begins outside of its tile
        ("gate[b, q_idx, h, d]", "bf16[B, L, H, 64]", 1),
        ("gate[b, q_idx, q_idx, d]", "bf16[B, M, R, 64]", None),
        ("gate[b, q_idx, 0, h, d]", "bf16[B, M, 2, H, 64]", None),  # five axes
        ("gate[places[b], q_idx, h, d]", "bf16[R, M, H, 64]", None),
        ("gate[h, d]", "bf16[H, 64]", None),
    ],
)
def test_tma_copies_rows_that_are_rows_of_a_box(row: str, kind: str, axis: int | None) -> None:
    found = finishing(f"{row} * attention", gate=kind, places="i32[B]")
    assert found is not None
    assert found.staged is not None
    assert found.staged.rows_axis == axis


def test_a_box_has_the_tile_of_o_before_other_rows() -> None:
    other = "bf16[B, R, H, 64]"
    found = finishing("other[b, q_idx - 1, h, d] + gate[b, q_idx, h, d] * attention", other=other)
    assert found is not None
    assert found.staged is not None
    assert (found.staged.fetch.load.tensor, found.staged.rows_axis) == ("gate", 1)
    assert [show(x) for x in found.staged.beside] == ["h", "b"]
    assert [fetch.load.tensor for fetch in found.paired] == ["other"]


def test_without_a_tile_of_o_rows_are_loaded_in_pairs() -> None:
    found = finishing("gate[b, q_idx, h, d] * attention", d=256)
    assert found is not None
    assert (found.staged, [fetch.load.tensor for fetch in found.paired]) == (None, ["gate"])


@pytest.mark.parametrize("epilogue", ["attention", "2 * attention", "gate[b, q_idx, h, d // 2] * attention"])
def test_no_row_is_loaded_in_its_order(epilogue: str) -> None:
    assert finishing(epilogue) is None


@pytest.mark.parametrize("split", ["", ", split.kv = auto"])
def test_splits_load_rows_of_as_many_columns_as_o_in_pairs(split: str) -> None:
    lines = (
        "input q: bf16[B, M, H, 64]",
        "input k, v: bf16[B, N, H, 64]",
        "input gate: bf16[B, M, H, 64]",
        "input w: f32[64]",
        "input half: bf16[H, 32]",
        "score = dot(q, k)",
        "normalize = softmax",
        "output o: bf16[B, M, H, 64] = (gate[b, q_idx, h, d] + w[d] + half[h, d // 2]) * attention",
    )
    (module,) = modules_of(spec(lines, f"loops = [kv], pack = gqa{split}", target="cuda.sm_90a"))
    assert isinstance(module.kernel, Decode)
    dtypes = {tensor.name: DType(tensor.dtype) for tensor in module.variant.attention.inputs}
    found = pair_rows(module.kernel, dtypes)
    assert [fetch.load.tensor for fetch in found.paired] == ["gate"]  # w is of 32 bits


@pytest.mark.parametrize("target", ["triton", "cuda.sm_80", "cuda.sm_90a"])
def test_what_joins_splits_finds_the_lengths_that_it_reads(target: str) -> None:
    """In the order in which one follows from the other, wherever a tile begins."""
    lines = (
        "input q: bf16[B, M, H, 64]",
        "input k, v: bf16[B, N, H, 64]",
        "input gate: f32[B, M]",
        "input lens: i32[B]",
        "input more: i32[B]",
        "length N = lens[more[b]] + 1",
        "score = dot(q, k)",
        "normalize = softmax",
        "output o: bf16[B, M, H, 64] = (gate[b, q_idx] + q_pos) * attention",
    )
    (module,) = modules_of(spec(lines, "loops = [kv], pack = gqa, split.kv = auto", target=target))
    assert isinstance(module.kernel, Decode)
    found = list_lengths(module.kernel)
    known = {"b", "h", "B", "H", "M_total", "N_total"}
    for item in found:
        nodes = [node for expr in statement_expressions(item) for node in walk(expr)]
        assert Index("q_lo") not in nodes
        assert {node.name for node in nodes if isinstance(node, Ref)} <= known, item.name
        known.add(item.name)
    assert "N" in known
    assert {"lens", "more"} <= {item.load.tensor for item in found if isinstance(item, Fetch)}
