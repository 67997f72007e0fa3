"""Latent attention in SGLang's backend: latents are decoded, prompts come with keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.adapters.contract import mismatches
from tests.adapters.engines import Request, check, engine
from tests.adapters.oracle import attend
from tests.adapters.sglang_runner import READ, SIZE, Mode, Runner, WriteLocation, drafts, layer_of


@pytest.fixture(scope="module")
def backend() -> Iterator[ModuleType]:
    with engine("sglang", "attnc.adapters.sglang.backend") as module:
        yield module


@pytest.fixture(autouse=True)
def write_locations(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "KVWriteLoc", WriteLocation)


class LatentPool:
    """As much of MLATokenToKVPool as the backend uses."""

    def __init__(self, slots: int, width: int, dtype: torch.dtype) -> None:
        self.k = torch.full((slots, 1, width), torch.nan).to(dtype)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        self.k.view(torch.uint8)[loc_info.loc] = cache_k.to(self.k.dtype).view(torch.uint8)


def test_the_pool_of_latents_fits_sglang_too() -> None:
    theirs = READ["sglang.srt.mem_cache.memory_pool"]["MLATokenToKVPool"]
    assert mismatches(LatentPool, theirs, "sglang's pool") == []


LATENT, ROPE = 32, 8


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("cache", "scale"),
    [(torch.bfloat16, None), (torch.float8_e4m3fn, None), (torch.float8_e5m2, 0.25)],
    ids=str,
)
def test_latent_attention_reads_latents(backend: ModuleType, cache: torch.dtype, scale: float | None) -> None:
    """A chunk of each request, single tokens and drafts: keys are latents, values their first columns."""
    pool = LatentPool(192, LATENT + ROPE, cache)
    layer = layer_of(
        tp_k_head_num=1, qk_head_dim=LATENT + ROPE, v_head_dim=LATENT, scaling=0.3, k_scale=scale
    )
    given: dict[str, Any] = {"token_to_kv_pool": pool, "use_mla_backend": True, "kv_cache_dtype": cache}
    runner = Runner(backend, 16, layer, dtype=torch.bfloat16, **given)
    requests = [Request(), Request()]
    for mode, counts, info in (
        ("EXTEND", [20, 5], None),
        ("DECODE", [1, 1], None),
        ("TARGET_VERIFY", [3, 3], drafts(requests, 3, None)),
    ):
        q = torch.randn(sum(counts), 4, LATENT + ROPE).bfloat16()
        k = torch.randn(sum(counts), 1, LATENT + ROPE).bfloat16()
        divided = k if scale is None else k / scale
        kept = divided.to(cache).float() * (1.0 if scale is None else scale)
        slots: list[int] = []
        for row, (request, own) in enumerate(zip(requests, torch.split(kept, counts), strict=True)):
            slots += request.append(own, own[..., :LATENT], 16, runner.free)
            whole = [page * 16 + at for page in request.pages for at in range(16)]
            runner.table[row, : request.length] = torch.tensor(whole[: request.length])
        lengths = torch.tensor([request.length for request in requests])
        batch = SimpleNamespace(
            forward_mode=Mode(mode),
            batch_size=2,
            req_pool_indices=torch.tensor([0, 1]),
            seq_lens=lengths - 3 if info else lengths,
            seq_lens_cpu=None,
            extend_seq_lens=torch.tensor(counts),
            out_cache_loc=torch.tensor(slots),
            spec_info=info,
        )
        runner.backend.init_forward_metadata(batch)
        forward = runner.backend.forward_decode if mode == "DECODE" else runner.backend.forward_extend
        out = forward(q.flatten(1), k, k[..., :LATENT], layer, batch)
        assert out.shape == (sum(counts), 4 * LATENT)
        found = torch.split(out.view(-1, 4, LATENT), counts)
        for request, own, o in zip(requests, torch.split(q, counts), found, strict=True):
            check(o, own, request, scale=0.3)


@pytest.mark.parametrize("heads", [4, 1])  # of a rank, which may have one
def test_prompts_of_latent_attention_come_with_keys_and_values(backend: ModuleType, heads: int) -> None:
    """New tokens among each other, and a chunk of the prefix, which one request does not have."""
    pool = LatentPool(32, LATENT + ROPE, torch.bfloat16)
    layer = layer_of(tp_q_head_num=heads, tp_k_head_num=heads, qk_head_dim=24, v_head_dim=SIZE, scaling=0.3)
    given: dict[str, Any] = {"token_to_kv_pool": pool, "use_mla_backend": True}
    runner = Runner(backend, 16, layer, dtype=torch.bfloat16, **given)
    counts, context = [7, 4], [0, 9]
    batch = SimpleNamespace(
        forward_mode=Mode("EXTEND"),
        batch_size=2,
        req_pool_indices=torch.tensor([0, 1]),
        seq_lens=torch.tensor([7, 13]),
        seq_lens_cpu=None,
        extend_seq_lens=torch.tensor(counts),
        spec_info=None,
        attn_attend_prefix_cache=None,
        mha_return_lse=None,
        prefix_chunk_cu_seq_lens=[torch.tensor([0, 0, 9], dtype=torch.int32)],
        prefix_chunk_idx=0,
    )
    runner.backend.init_forward_metadata(batch)
    for own, causal in ((counts, True), (context, False)):
        q, k = torch.randn(11, heads, 24).bfloat16(), torch.randn(sum(own), heads, 24).bfloat16()
        v = torch.randn(sum(own), heads, SIZE).bfloat16()
        batch.attn_attend_prefix_cache, batch.mha_return_lse = not causal, not causal
        found = runner.backend.forward_extend(q.flatten(1), k, v, layer, batch, save_kv_cache=False)
        parts = (torch.split(q, counts), torch.split(k, own), torch.split(v, own))
        expected = [attend(*rows, scale=0.3, causal=causal) for rows in zip(*parts, strict=True)]
        o = torch.cat([o for o, _ in expected])
        if causal:
            assert found.shape == (11, heads * SIZE)
            torch.testing.assert_close(found.view(-1, heads, SIZE).double(), o, rtol=2e-2, atol=2e-2)
        else:
            torch.testing.assert_close(found[0].double(), o, rtol=2e-2, atol=2e-2)
            lse = torch.cat([lse for _, lse in expected])
            torch.testing.assert_close(found[1].double(), lse, rtol=2e-2, atol=2e-2)
            assert found[1].is_contiguous()
