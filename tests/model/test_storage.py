"""Storage adjectives: pages, packed sequences, prefixes."""

from attnc.expr.nodes import show
from attnc.model.tensors import Paged, Prefix, Ragged
from tests.model.resolving import spec


def test_storage() -> None:
    varlen, paged, mla = spec("varlen"), spec("paged_decode"), spec("mla_decode")
    joined = spec("latent_types")
    assert varlen.q.storage == varlen.o.storage == Ragged(cu_seqlens="cu_q")
    assert varlen.k.storage == varlen.v.storage == Ragged(cu_seqlens="cu_k")
    assert paged.k.storage == paged.v.storage == Paged(block_table="block_table", page=16)
    assert mla.k.storage == Paged(block_table="block_table", page=64)
    assert mla.v.storage == Prefix(of="k")
    assert not mla.joins_values
    assert joined.v.storage == Prefix(of="k", joins=True)
    assert joined.joins_values
    assert list(joined.column_scales) == ["k"]
    assert {name: show(length) for name, length in paged.lengths.items()} == {"N": "kv_len[b]"}
