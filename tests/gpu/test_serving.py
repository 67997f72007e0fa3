"""Serving on a GPU: nothing waits, captured graphs see new tables, and models generate what `eager` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.adapters.flashinfer import BatchDecodeWithPagedKVCacheWrapper
from attnc.adapters.vllm import unified_attention
from attnc.paging import PagedCache
from examples.llama_graph import never_waiting
from examples.llama_model import TINY, Llama
from examples.llama_serving import SMALL, serve
from tests.adapters.oracle import attend

HEADS, GROUP, SIZE, PAGE = 2, 4, 128, 16


def close(o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Of bf16 against float64: a few roundings of the largest element."""
    expected, _ = attend(q.cpu(), k.cpu(), v.cpu(), scale=SIZE**-0.5)
    assert (o.cpu().double() - expected).abs().max() <= 2**-7 * expected.abs().max()


@pytest.mark.parametrize("counts", [[1, 1, 1], [70, 1, 300]], ids=["decode", "mixed"])
def test_vllm_over_a_page_manager_never_waits(counts: list[int], device: torch.device) -> None:
    torch.manual_seed(0)
    cache = PagedCache(
        pages=64, page=PAGE, kv_heads=HEADS, head_dim=SIZE, sequences=4, max_length=400, device=device
    )
    sequences = [cache.allocate() for _ in counts]
    k, v = torch.randn(2, sum(counts) + 90, HEADS, SIZE, device=device).bfloat16().unbind()
    q = torch.randn(sum(counts), HEADS * GROUP, SIZE, device=device).bfloat16()
    out = torch.empty_like(q)

    def step() -> None:
        cache.write(cache.append(sequences, 30).slots, k[:90], v[:90])
        new = cache.append(sequences, counts)
        cache.write(new.slots, k[90:], v[90:])
        unified_attention(
            q=q,
            k=cache.k(),
            v=cache.v(),
            out=out,
            cu_seqlens_q=new.cu_q,
            max_seqlen_q=max(counts),
            seqused_k=new.kv_len,
            max_seqlen_k=400,
            softmax_scale=SIZE**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=new.block_table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )

    step()  # compiles
    for sequence in sequences:
        cache.truncate(sequence, 0)
    with never_waiting(device):
        step()
        child = cache.fork(sequences[0])
        cache.append([child])
        cache.free(child)
    for sequence, rows_q, rows_o in zip(
        sequences, torch.split(q, counts), torch.split(out, counts), strict=True
    ):
        close(rows_o, rows_q, *cache.read(sequence))


def test_a_captured_run_of_flashinfer_sees_a_later_plan(device: torch.device) -> None:
    torch.manual_seed(1)
    batch, pages = 3, 60
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1, device=device),
        use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.empty(batch + 1, device=device),
        paged_kv_indices_buffer=torch.empty(pages, device=device),
        paged_kv_last_page_len_buffer=torch.empty(batch, device=device),
    )
    pool = torch.randn(pages, 2, PAGE, HEADS, SIZE, device=device).bfloat16()
    q = torch.randn(batch, HEADS * GROUP, SIZE, device=device).bfloat16()
    o = torch.empty_like(q)

    def plan(lengths: list[int]) -> list[torch.Tensor]:
        counts = [-(-length // PAGE) for length in lengths]
        order = torch.randperm(pages)[: sum(counts)].int()
        indptr = torch.tensor([0, *counts]).cumsum(0).int()
        last = torch.tensor([(length - 1) % PAGE + 1 for length in lengths]).int()
        sizes: dict[str, Any] = {"num_qo_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim": SIZE}
        wrapper.plan(indptr, order, last, page_size=PAGE, q_data_type=torch.bfloat16, **sizes)
        return list(torch.split(order.long(), counts))

    plan([40, 50, 60])
    wrapper.run(q, pool, out=o)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, pool, out=o)
    lengths = [700, 1, 33]
    chosen = plan(lengths)
    graph.replay()
    for b, (length, numbers) in enumerate(zip(lengths, chosen, strict=True)):
        k, v = pool[numbers.to(device)].unbind(1)
        close(o[b : b + 1], q[b : b + 1], k.flatten(0, 1)[:length], v.flatten(0, 1)[:length])


@torch.no_grad()
def test_tokens_over_pages_equal_dense_ones(device: torch.device) -> None:
    for row in serve(Llama(TINY, dtype=torch.float32, device="cuda"), SMALL):
        assert row.equal == row.tokens > 0, row


@torch.no_grad()
def test_transformers_generates_the_same_tokens(device: torch.device) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="an optional extra")
    from attnc.adapters.transformers import register

    register()
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=None,
    )
    ids = torch.randint(2, 1000, (2, 150), device=device)
    kept = torch.ones_like(ids)
    kept[1, :60] = 0
    tokens = []
    for name in ("attnc", "eager"):
        torch.manual_seed(2)
        model = transformers.LlamaForCausalLM(config).to(device).eval()
        model.set_attn_implementation(name)
        tokens.append(model.generate(ids, attention_mask=kept, max_new_tokens=24))
    assert torch.equal(*tokens)
