"""vLLM's backend of latent attention over selected tokens: it fits the published wheel, attends to rows."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.adapters import vllm as plugin
from attnc.adapters.latent_rows import FORMATS
from tests.adapters.contract import mismatches
from tests.adapters.engines import engine
from tests.adapters.oracle import attend
from tests.adapters.test_vllm_mla import BASE, READ, Member, Names, merged

HEADS, RANK, ROPE, PAGE = 4, 32, 8, 16
SPARSE = READ["vllm.model_executor.layers.attention.sparse_mla_attention"]
NAME = "attnc.adapters.vllm.sparse"


def flat_kv_row_view(kv_cache: torch.Tensor, block_size: int) -> tuple[torch.Tensor, int]:
    """As vLLM's: rows from the first one of the cache on, and how many blocks are apart."""
    columns = kv_cache.shape[-1]
    apart = kv_cache.stride(0) // columns
    rows = (len(kv_cache) - 1) * apart + block_size
    return kv_cache.as_strided((rows, columns), (columns, 1)), apart


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with engine("vllm", NAME) as module:
        monkeypatch.setattr(module, "flat_kv_row_view", flat_kv_row_view)
        yield module


def test_signatures_are_those_of_the_wheel(backend: ModuleType) -> None:
    theirs = {
        "AttncSparseMLABackend": merged(BASE["AttentionBackend"], made=True),
        "AttncSparseMLAMetadataBuilder": merged(
            BASE["AttentionMetadataBuilder"], SPARSE["SparseMLACommonMetadataBuilder"], made=True
        ),
        "AttncSparseMLAImpl": merged(BASE["MLAAttentionImpl"], SPARSE["SparseMLACommonImpl"]),
    }
    for name, members in theirs.items():
        assert mismatches(getattr(backend, name), members, f"vllm's base of {name}") == []


def impl_of(backend: ModuleType, **changed: Any) -> Any:
    given: dict[str, Any] = {
        "num_heads": HEADS,
        "head_size": RANK + ROPE,
        "scale": 0.3,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": 24,
        "v_head_dim": 16,
        "kv_b_proj": None,
        "indexer": None,
        "topk_indices_buffer": None,
    }
    ranks = changed.pop("dcp_world_size", 1)
    made = type("Impl", (backend.AttncSparseMLAImpl,), {"dcp_world_size": ranks})
    return made(**given | changed)


def draw_lists(tokens: int, blocks: int, apart: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of blocks that lie so far apart, -1 for none among them; how many each token has, of one none."""
    slots = torch.cat([torch.arange(PAGE) + apart * block for block in range(blocks)])
    lists = torch.stack([slots[torch.randperm(len(slots))[:size]] for _ in range(tokens)]).int()
    counts = torch.randint(1, size + 1, (tokens,), dtype=torch.int32)
    counts[-1] = 0
    lists[torch.arange(size) >= counts[:, None]] = -1
    return lists[:, torch.randperm(size)], counts


@pytest.mark.parametrize("gap", [0, 16])
@pytest.mark.parametrize("tokens", [1, 7])
def test_tokens_attend_to_the_rows_of_their_lists(backend: ModuleType, tokens: int, gap: int) -> None:
    """Of blocks one behind the other, or with those of other layers between; queries in one part or two."""
    torch.manual_seed(0)
    impl, apart = impl_of(backend), PAGE + gap
    pool = torch.full((6 * apart, RANK + ROPE), torch.nan, dtype=torch.bfloat16)
    cache = pool.as_strided((6, PAGE, RANK + ROPE), (apart * (RANK + ROPE), RANK + ROPE, 1))
    cache.copy_(torch.randn(cache.shape))
    q = torch.randn(tokens + 1, HEADS, RANK + ROPE).bfloat16()
    lists, counts = draw_lists(tokens + 1, 6, apart, 20)
    given = {"layer": None, "block_size": PAGE, "is_decode": True}
    whole, lse = impl._forward_mqa_kernel(q, cache, lists, counts, **given)
    parts, _ = impl._forward_mqa_kernel(torch.split(q, [RANK, ROPE], -1), cache, lists, counts, **given)
    assert lse is None
    assert torch.equal(whole, parts)
    for own, named, count, o in zip(q, lists, counts.tolist(), whole, strict=True):
        rows = pool[named[named >= 0].long()][:, None]
        if not count:
            assert not o.any()
            continue
        expected, _ = attend(own[None], rows, rows[..., :RANK], scale=0.3)
        torch.testing.assert_close(o[None].double(), expected, rtol=2e-2, atol=2e-2)


def test_rows_of_656_bytes_are_those_of_16_bits(backend: ModuleType) -> None:
    torch.manual_seed(0)
    form, blocks, page = FORMATS[656], 2, 64
    sizes = {"head_size": 576, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    packed = torch.zeros(blocks, page, 656, dtype=torch.uint8)
    numbers = torch.randn(blocks, page, 512).to(torch.float8_e4m3fn)
    scales = torch.rand(blocks, page, 4) + 0.5
    rope = torch.randn(blocks, page, 64).bfloat16()
    packed[..., :512] = numbers.view(torch.uint8)
    packed[..., 512:528] = scales.view(torch.uint8)
    packed[..., 528:] = rope.view(torch.uint8)
    plain = torch.cat([(numbers.float() * scales.repeat_interleave(128, -1)).bfloat16(), rope], -1)
    assert form.columns == plain.shape[-1]
    q = torch.randn(3, HEADS, 576).bfloat16()
    lists = torch.stack([torch.randperm(blocks * page)[:24] for _ in range(3)]).int()
    lists[1, 9:] = -1
    counts = (lists >= 0).sum(-1, dtype=torch.int32)
    given = {"layer": None, "block_size": page, "is_decode": True}
    found, _ = impl_of(backend, kv_cache_dtype="fp8_ds_mla", **sizes)._forward_mqa_kernel(
        q, packed, lists, counts, **given
    )
    same, _ = impl_of(backend, **sizes)._forward_mqa_kernel(q, plain, lists, counts, **given)
    torch.testing.assert_close(found, same, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: expected one of auto, .*, fp8_ds_mla, got 'fp8'"),
        ({"attn_type": "encoder"}, "attn_type: expected a decoder's self-attention, got 'encoder'"),
        ({"sliding_window": 8}, "sliding_window: expected None, as it is not supported, got 8"),
        ({"dcp_world_size": 2}, "dcp_world_size: expected 1, as context parallelism is not supported"),
    ],
)
def test_what_a_layer_cannot_have_is_refused_by_name(
    backend: ModuleType, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        impl_of(backend, **changed)


def test_what_vllm_asks_of_the_backend(backend: ModuleType) -> None:
    ours = backend.AttncSparseMLABackend
    assert f"{NAME}.{ours.__name__}" == plugin.SPARSE_BACKEND
    assert ours.get_name() == "ATTNC_MLA_SPARSE"
    assert ours.get_impl_cls() is backend.AttncSparseMLAImpl
    assert ours.get_builder_cls() is backend.AttncSparseMLAMetadataBuilder
    assert [size.base for size in ours.get_supported_kernel_block_sizes()] == [64]
    assert ours.is_mla()
    assert ours.is_sparse()
    assert [ours.supports_head_size(size) for size in (512, 576, 580, 640)] == [True, True, False, False]
    assert ours.supports_compute_capability(SimpleNamespace(major=8, minor=0))
    rest = (None, True, False, True, False, None)
    assert ours.supports_combination(576, torch.bfloat16, "auto", *rest) is None
    assert ours.supports_combination(576, torch.bfloat16, "fp8_ds_mla", *rest) is None
    said = ours.supports_combination(576, torch.float16, "fp8_ds_mla", *rest)
    assert said == "kv_cache_dtype fp8_ds_mla with a model of torch.float16, whose keys have 576 columns"
    said = ours.supports_combination(576, torch.float16, "bfloat16", *rest)
    assert said == "kv_cache_dtype bfloat16 with a model of torch.float16"


def test_blocks_are_whole_rows_apart(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "align_blocks_to_rows", lambda spec: ("aligned", spec))
    assert backend.AttncSparseMLABackend.customize_spec("spec") == ("aligned", "spec")


def test_drafts_are_decoded_with_their_sequences(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[Any, ...]] = []
    builder = backend.AttncSparseMLAMetadataBuilder
    monkeypatch.setattr(
        builder, "_init_reorder_batch_threshold", lambda self, *args, **named: said.append((*args, named))
    )
    monkeypatch.setattr(builder, "__abstractmethods__", frozenset())
    builder("spec", ["layer"], "config", "cpu")
    assert said == [(1, {"supports_spec_as_decode": True})]


def test_a_process_that_is_sent_the_backend_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("vllm", NAME):
        names = sys.modules["vllm.v1.attention.backends.registry"]
        registry = Names()

        def register_backend(backend: str, path: str) -> None:
            registry.__members__[backend] = Member(registry, backend, path)

        monkeypatch.setattr(names, "register_backend", register_backend)
        monkeypatch.setattr(names, "AttentionBackendEnum", registry)
        sent = pickle.dumps(plugin.sparse_backend())
        registry = Names()
        monkeypatch.setattr(names, "AttentionBackendEnum", registry)
        found = pickle.loads(sent)
        assert found is registry["ATTNC_MLA_SPARSE"]
        assert found.path == plugin.SPARSE_BACKEND
