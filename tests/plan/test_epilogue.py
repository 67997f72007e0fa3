"""Where what an epilogue loads is loaded, and where its gradients are summed."""

from attnc.model.dtypes import DType
from attnc.plan.epilogue import is_row
from attnc.plan.ir import Module
from tests.verify.judging import modules_of, spec

LINES = (
    "input q: bf16[B, M, H, 64]",
    "input k, v: bf16[B, N, H, 64]",
    "input s: f32[]",
    "input row: f32[B, M]",
    "input w: f32[64]",
    "input half: f32[32]",
    "input gate: bf16[B, M, H, 64]",
    "score = dot(q, k)",
    "normalize = softmax",
    "let factor = s + row[b, q_idx]",
    "output o: bf16[B, M, H, 64] = (factor + w[d] + half[d // 2] + gate[b, q_idx, h, d]) * attention",
    "grad q, s, row, w, half, gate",
)


def planned() -> Module:
    (module,) = modules_of(spec(LINES, "tile.q = 64, tile.kv = 64"))
    return module


def test_loads_wait_for_the_end() -> None:
    kernel = planned().kernel
    assert kernel.epilogue is not None
    assert [fetch.name for fetch in kernel.epilogue.fetches] == ["w_d", "half_d", "gate_tile"]
    assert [fetch.name for fetch in kernel.epilogue.rows] == ["row_q"]
    assert "s_value" in {item.name for item in kernel.epilogue.program}
    assert not kernel.outer
    assert not kernel.program


def test_sums_have_places_of_their_own_where_the_index_says_which() -> None:
    backward = planned().backward
    assert backward is not None
    assert backward.epilogue is not None
    found = {a.load.tensor: (a.along, a.accumulate) for a in backward.epilogue.adjoints}
    assert found == {
        "s": ((), "two_pass"),
        "row": (("q",), "two_pass"),
        "w": (("tile", "d"), "two_pass"),
        "half": (("tile", "d"), "atomic"),
        "gate": (("q", "d"), "two_pass"),
    }


def test_a_forward_keeps_the_attention_for_its_gradients() -> None:
    assert [arg.tensor.name for arg in planned().kept] == ["lse", "attention"]


def test_a_row_that_is_chosen_by_the_column_is_no_row() -> None:
    """`w[perm[d], d]` reads another row in each column: its columns are not loaded together."""
    lines = (
        "input q: bf16[B, M, H, 64]",
        "input k, v: bf16[B, N, H, 64]",
        "input perm: i32[64]",
        "input w: bf16[R, 64]",
        "input gate: bf16[B, M, H, 64]",
        "score = dot(q, k)",
        "normalize = softmax",
        "output o: bf16[B, M, H, 64] = sigmoid(w[perm[d], d] + gate[b, q_idx, h, d]) * attention",
    )
    (module,) = modules_of(spec(lines, "tile.q = 64, tile.kv = 64"))
    assert module.kernel.epilogue is not None
    fetches = {fetch.load.tensor: fetch for fetch in module.kernel.epilogue.fetches}
    assert not is_row(fetches["w"], DType.BF16)
    assert is_row(fetches["gate"], DType.BF16)
