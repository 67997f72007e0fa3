"""The reference over packed sequences, pages and prefixes: what it says of the same rows one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from attnc.expr.nodes import Binary, Const, Dim, Index, Load
from attnc.model.tensors import DType, Paged, Prefix, Ragged, Tensor
from attnc.reference import reference
from tests.specimens import CAUSAL, HEADS, attention, tensor
from tests.test_reference import B, Hkv, data


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
