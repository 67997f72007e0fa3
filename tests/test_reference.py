"""The reference against formulas written out by hand, PyTorch, and published vectors of Philox; for dense
tensors, pages and packed sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attnc.expr.nodes import And, Attended, Binary, Call, Compare, Const, Dim, Index, Load
from attnc.model.attention import Softmax
from attnc.model.dtypes import DType
from attnc.model.tensors import Paged, Prefix, Ragged, Tensor
from attnc.reference import bind, keep, philox, reference, to_arrays
from tests.specimens import CAUSAL, HEADS, SCALED, attention, tensor

B, M, N, H, Hkv, G, D, Dv = (Dim(name) for name in ("B", "M", "N", "H", "Hkv", "G", "D", "Dv"))


def data(
    b: int = 2, m: int = 5, n: int = 7, hkv: int = 2, g: int = 3, d: int = 4, dv: int = 3
) -> dict[str, Any]:
    make = torch.Generator().manual_seed(m * 1000 + n)
    shapes = {"q": (b, m, hkv * g, d), "k": (b, n, hkv, d), "v": (b, n, hkv, dv)}
    return {name: torch.randn(shape, generator=make, dtype=torch.float64) for name, shape in shapes.items()}


def loops(
    a: Mapping[str, Any], mask: Any = lambda q_pos, j: True, sink: npt.NDArray[np.float64] | None = None
) -> Any:
    """The definition, one scalar at a time."""
    q, k, v = (np.asarray(a[name], dtype=np.float64) for name in "qkv")
    o = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    group = q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(*q.shape[:3]):
        seen = [j for j in range(k.shape[1]) if mask(i + k.shape[1] - q.shape[1], j)]
        weights = [math.exp(q[b, i, h] @ k[b, j, h // group] / math.sqrt(q.shape[3])) for j in seen]
        total = sum(weights) + (0.0 if sink is None else math.exp(sink[h]))
        for j, weight in zip(seen, weights, strict=True):
            o[b, i, h] += weight / total * v[b, j, h // group]
        lse[b, h, i] = math.log(total) if total else -math.inf
    return o, lse


@pytest.mark.parametrize(("m", "n"), [(5, 7), (7, 5), (1, 1), (3, 0), (0, 3)])
def test_equals_the_definition(m: int, n: int) -> None:
    tensors = data(m=m, n=n)
    out = reference(attention(mask=CAUSAL), tensors)
    o, lse = loops(tensors, mask=lambda q_pos, j: j <= q_pos)
    np.testing.assert_allclose(out["o"], o, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(out["lse"], lse, rtol=1e-13, atol=1e-15)


def test_equals_torch() -> None:
    tensors = data(hkv=3, g=1, dv=4)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensors[name].transpose(1, 2) for name in ("q", "k", "v"))
    )
    np.testing.assert_allclose(reference(attention(), tensors)["o"], expected.transpose(1, 2), rtol=1e-12)


def test_layout_follows_the_roles() -> None:
    tensors = data()
    straight = reference(attention(mask=CAUSAL), tensors)
    turned = attention(
        mask=CAUSAL,
        inputs=(
            tensor("q", "B H M D", H=HEADS),
            tensor("k", "H D N B", H=Hkv),
            tensor("v", "Dv B N H", H=Hkv),
        ),
        outputs=(tensor("o", "B H Dv M", H=HEADS), tensor("lse", "M B H", H=HEADS)),
    )
    out = reference(
        turned,
        {
            "q": tensors["q"].permute(0, 2, 1, 3),
            "k": tensors["k"].permute(2, 3, 1, 0),
            "v": tensors["v"].permute(3, 0, 1, 2),
        },
    )
    np.testing.assert_array_equal(out["o"].transpose(0, 3, 1, 2), straight["o"])
    np.testing.assert_array_equal(out["lse"].transpose(1, 2, 0), straight["lse"])


def test_one_key_head_needs_no_axis() -> None:
    tensors = data(hkv=1, g=4)
    flat = attention(inputs=(tensor("q", "B M H D"), tensor("k", "B N D"), tensor("v", "B N Dv")),
                     outputs=(tensor("o", "B M H Dv"),))  # fmt: skip
    squeezed = {**tensors, "k": tensors["k"][:, :, 0], "v": tensors["v"][:, :, 0]}
    np.testing.assert_array_equal(reference(flat, squeezed)["o"], reference(attention(), tensors)["o"])


def test_low_precision_inputs_are_taken_exactly() -> None:
    tensors = {name: value.to(torch.bfloat16) for name, value in data().items()}
    exact = {name: value.double() for name, value in tensors.items()}
    np.testing.assert_array_equal(reference(attention(), tensors)["o"], reference(attention(), exact)["o"])


def test_lengths_end_the_sequence() -> None:
    kv_len = Tensor(name="kv_len", dtype=DType.I32, shape=(B,))
    length = Load("kv_len", (Index("b"),), (B,), "int")
    tensors = data() | {"kv_len": torch.tensor([0, 4], dtype=torch.int32)}
    out = reference(attention(mask=CAUSAL, extras=(kv_len,), lengths={"N": length}), tensors)
    short = {name: tensors[name][1:] for name in "qkv"}
    short |= {"k": short["k"][:, :4], "v": short["v"][:, :4]}
    np.testing.assert_array_equal(out["o"][1:], reference(attention(mask=CAUSAL), short)["o"])
    assert not out["o"][0].any()
    assert np.isneginf(out["lse"][0]).all()


def test_extras_are_read_by_their_expressions() -> None:
    slope = Tensor(name="slope", dtype=DType.F32, shape=(HEADS,))
    distance = Call("abs", (Binary("-", Index("q_pos"), Index("kv_idx")),))
    bias = Binary("*", Load("slope", (Index("h"),), (HEADS,), "float"), distance)
    tensors = data(b=1, m=2, n=3, hkv=1, g=2) | {"slope": torch.tensor([0.0, 0.5])}
    out = reference(attention(score=Binary("-", SCALED, bias), extras=(slope,)), tensors)
    s = tensors["q"][0, 1, 1] @ tensors["k"][0, :, 0].T / 2 - 0.5 * torch.tensor([2.0, 1.0, 0.0])
    assert out["lse"][0, 1, 1] == pytest.approx(torch.logsumexp(s, 0).item(), rel=1e-13)


def test_sink_joins_the_denominator_only() -> None:
    sink = Tensor(name="sink", dtype=DType.F32, shape=(HEADS,))
    softmax = Softmax(sink=Load("sink", (Index("h"),), (HEADS,), "float"))
    logits = np.linspace(-2.0, 3.0, 6).astype(np.float32)
    tensors = data(m=7, n=5) | {"sink": logits}
    out = reference(attention(mask=CAUSAL, softmax=softmax, extras=(sink,)), tensors)
    o, lse = loops(tensors, mask=lambda q_pos, j: j <= q_pos, sink=logits.astype(np.float64))
    np.testing.assert_allclose(out["o"], o, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(out["lse"], lse, rtol=1e-13)
    assert not out["o"][:, :2].any(), "M > N: the first rows see nothing"
    np.testing.assert_allclose(out["lse"][:, :, 0], np.broadcast_to(logits, (2, 6)))


def test_masked_keys_have_no_influence() -> None:
    tensors = data(m=4, n=4)
    clean = reference(attention(mask=CAUSAL), tensors)
    dirty = {name: value.clone() for name, value in tensors.items()}
    dirty["k"][:, 3] = math.nan
    dirty["v"][:, 3] = math.inf
    out = reference(attention(mask=CAUSAL), dirty)
    np.testing.assert_array_equal(out["o"][:, :3], clean["o"][:, :3])
    np.testing.assert_array_equal(out["lse"][:, :, :3], clean["lse"][:, :, :3])
    assert np.isnan(out["o"][:, 3]).all()
    assert np.isnan(out["lse"][:, :, 3]).all()


def test_special_values_follow_arithmetic() -> None:
    tensors = {name: torch.ones(1, 2 if name == "q" else 3, 1, 2, dtype=torch.float64) for name in "qkv"}
    tensors["v"][0, 0] = torch.tensor([math.inf, 1.0])
    tensors["v"][0, 1] = torch.tensor([-math.inf, math.nan])
    out = reference(attention(), tensors)["o"]
    assert np.isnan(out).all()
    tensors["v"][0, 1] = torch.tensor([math.inf, -math.inf])
    np.testing.assert_array_equal(reference(attention(), tensors)["o"][0, 0, 0], [math.inf, -math.inf])
    tensors["k"][0, 2] = -math.inf
    assert reference(attention(), tensors)["lse"][0, 0, 0] == pytest.approx(math.sqrt(2) + math.log(2))
    tensors["k"][0, 2] = math.inf
    assert np.isnan(reference(attention(), tensors)["lse"]).all()


def test_dropout_scales_what_it_keeps() -> None:
    softmax = Softmax(dropout=Load("p", (), (), "float"), seed=Load("seed", (), (), "int"))
    extras = (Tensor(name="p", dtype=DType.F32, shape=()), Tensor(name="seed", dtype=DType.I64, shape=()))
    tensors = data(m=6, n=6, hkv=1, g=1, dv=6)
    tensors["v"][:] = torch.eye(6)[:, None]
    spec = attention(softmax=softmax, extras=extras)
    out, full = reference(spec, tensors | {"p": 0.4, "seed": -5}), reference(attention(), tensors)
    kept = np.stack([keep(-5, b, 0, np.arange(6)[:, None], np.arange(6)[None], 0.4) for b in range(2)])
    assert 0 < kept.sum() < 72
    np.testing.assert_allclose(out["o"][:, :, 0], full["o"][:, :, 0] * kept / (1 - float(np.float32(0.4))))
    np.testing.assert_array_equal(out["lse"], full["lse"])


def test_dropout_rate() -> None:
    kept = keep(1234, 1, 2, np.arange(512)[:, None], np.arange(512)[None], 0.25)
    assert kept.mean() == pytest.approx(0.75, abs=5 * math.sqrt(0.25 * 0.75 / kept.size))
    assert keep(1234, 1, 2, np.arange(9)[:, None], np.arange(9)[None], 0.0).all()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    """The known-answer vectors that accompany Random123."""
    c0, c1, c2, c3 = (np.asarray(word) for word in counter)
    assert tuple(int(word) for word in philox(key, (c0, c1, c2, c3))) == words


def test_shapes_determine_the_dimensions() -> None:
    spec, tensors = attention(), data(b=2, m=5, n=7, hkv=2, g=3, d=4, dv=3)
    dims = bind(spec, to_arrays(spec, tensors))
    assert dims == {"B": 2, "M": 5, "N": 7, "H": 6, "Hkv": 2, "G": 3, "D": 4, "Dv": 3}
    with pytest.raises(ValueError, match="'v' has an axis of 6; other inputs make it 7"):
        reference(spec, tensors | {"v": tensors["v"][:, :6]})
    with pytest.raises(ValueError, match="no G makes an axis of size 5"):
        reference(spec, tensors | {"q": tensors["q"][:, :, :5]})
    with pytest.raises(ValueError, match="'q' has 3 axes, the spec declares 4"):
        reference(spec, tensors | {"q": tensors["q"][0]})


def test_no_heads_give_no_output() -> None:
    out = reference(attention(), data(hkv=0))
    assert out["o"].shape == (2, 5, 0, 3)
    assert out["lse"].shape == (2, 0, 5)


def test_long_sequences_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = data(m=9, n=6)
    whole = reference(attention(mask=CAUSAL), tensors)
    monkeypatch.setattr("attnc.reference.SCORES_AT_ONCE", 6 * 4)
    pieces = reference(attention(mask=CAUSAL), tensors)
    np.testing.assert_allclose(pieces["o"], whole["o"], rtol=1e-14)
    np.testing.assert_allclose(pieces["lse"], whole["lse"], rtol=1e-14)


def test_masks_compose() -> None:
    window = Compare("<=", Binary("-", Index("q_pos"), Const(1)), Index("kv_idx"))
    tensors = data()
    out = reference(attention(mask=And((window, CAUSAL))), tensors)
    np.testing.assert_allclose(
        out["o"], loops(tensors, mask=lambda q_pos, j: q_pos - 1 <= j <= q_pos)[0], rtol=1e-13
    )


# --- pages and packed sequences -----------------------------------------------------------------------------


def test_ragged_sequences_equal_one_by_one() -> None:
    cu_q, cu_k = (
        Tensor(name=name, dtype=DType.I32, shape=(Binary("+", B, Const(1)),)) for name in ("cu_q", "cu_k")
    )
    packed = attention(
        mask=CAUSAL,
        inputs=(
            replace(tensor("q", "M H D", M=Dim("T"), H=HEADS), storage=Ragged(cu_seqlens="cu_q")),
            replace(tensor("k", "N H D", N=Dim("S"), H=Hkv), storage=Ragged(cu_seqlens="cu_k")),
            replace(tensor("v", "N H Dv", N=Dim("S"), H=Hkv), storage=Ragged(cu_seqlens="cu_k")),
            cu_q,
            cu_k,
        ),
        outputs=(
            replace(tensor("o", "M H Dv", M=Dim("T"), H=HEADS), storage=Ragged(cu_seqlens="cu_q")),
            replace(tensor("lse", "H M", M=Dim("T"), H=HEADS), storage=Ragged(cu_seqlens="cu_q")),
        ),
    )
    parts = [data(b=1, m=3, n=5), data(b=1, m=0, n=2), data(b=1, m=4, n=0), data(b=1, m=2, n=7)]
    tensors = {name: torch.cat([part[name][0] for part in parts]) for name in "qkv"}
    tensors |= {"cu_q": torch.tensor([0, 3, 3, 7, 9]), "cu_k": torch.tensor([0, 5, 7, 7, 14])}
    out = reference(packed, tensors)
    for part, first, last in zip(parts, (0, 3, 3, 7), (3, 3, 7, 9), strict=True):
        alone = reference(attention(mask=CAUSAL), part)
        np.testing.assert_array_equal(out["o"][first:last], alone["o"][0])
        np.testing.assert_array_equal(out["lse"][:, first:last], alone["lse"][0])


def test_pages_equal_contiguous_rows() -> None:
    table = Tensor(name="table", dtype=DType.I32, shape=(B, Dim("P")))
    kv_len = Tensor(name="kv_len", dtype=DType.I32, shape=(B,))
    plain, pages = data(b=2, m=2, n=8, dv=4), torch.tensor([[5, 0], [2, 3]])
    pools = {name: torch.full((6, 4, 2, 4), torch.nan, dtype=torch.float64) for name in "kv"}
    for name, pool in pools.items():
        pool[pages] = plain[name].reshape(2, 2, 4, 2, 4)
    storage = Paged(block_table="table", page=4)
    inputs = (
        tensor("q", "B M H D", H=HEADS),
        replace(tensor("k", "B N H D", H=Hkv), storage=storage),
        replace(tensor("v", "B N H Dv", H=Hkv), storage=storage),
        table,
        kv_len,
    )
    spec = attention(mask=CAUSAL, inputs=inputs, lengths={"N": Load("kv_len", (Index("b"),), (B,), "int")})
    lengths = torch.tensor([7, 3])
    out = reference(spec, {"q": plain["q"], **pools, "table": pages, "kv_len": lengths})
    for b, n in enumerate(lengths.tolist()):
        alone = {name: plain[name][b : b + 1] for name in "qkv"}
        alone |= {"k": alone["k"][:, :n], "v": alone["v"][:, :n]}
        np.testing.assert_array_equal(out["o"][b], reference(attention(mask=CAUSAL), alone)["o"][0])


def test_values_may_be_the_first_columns_of_the_keys() -> None:
    tensors = data(d=4, dv=3)
    inputs = (
        tensor("q", "B M H D", H=HEADS),
        tensor("k", "B N H D", H=Hkv),
        replace(tensor("v", "B N H Dv", H=Hkv, Dv=Const(3)), storage=Prefix(of="k")),
    )
    outputs = (tensor("o", "B M H Dv", H=HEADS, Dv=Const(3)),)
    out = reference(attention(inputs=inputs, outputs=outputs), {"q": tensors["q"], "k": tensors["k"]})
    np.testing.assert_array_equal(
        out["o"], reference(attention(), tensors | {"v": tensors["k"][..., :3]})["o"]
    )


def test_an_epilogue_follows_the_sum_over_keys() -> None:
    gate = tensor("gate", "B M H Dv", H=HEADS)
    load = Load("gate", (Index("b"), Index("q_idx"), Index("h"), Index("d")), gate.shape, "float")
    value = Binary("+", Binary("*", load, Attended()), Const(0.5))
    tensors = data(m=5, n=2)
    tensors["gate"] = torch.linspace(-1, 2, 180, dtype=torch.float64).reshape(2, 5, 6, 3)
    plain = attention(mask=CAUSAL, extras=(replace(gate, roles=()),))
    o, lse = loops(tensors, mask=lambda q_pos, j: j <= q_pos)
    out = reference(replace(plain, epilogue=value), tensors)
    np.testing.assert_allclose(out["o"], tensors["gate"].numpy() * o + 0.5, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(out["lse"], lse, rtol=1e-13, atol=1e-15)
