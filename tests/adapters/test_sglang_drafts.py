"""Drafts in SGLang's backend: verified as chains and trees, extended, and made step by step."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.adapters.engines import Request, check, engine
from tests.adapters.sglang_runner import GROUP, HEADS, SIZE, Runner, WriteLocation, drafts, layer_of


@pytest.fixture(scope="module")
def backend() -> Iterator[ModuleType]:
    with engine("sglang", "attnc.adapters.sglang.backend") as module:
        yield module


@pytest.fixture(autouse=True)
def write_locations(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "KVWriteLoc", WriteLocation)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("page", "window"), [(1, -1), (16, 6)])
def test_drafts_are_verified(backend: ModuleType, page: int, window: int, graph: bool) -> None:
    """Chains, with a mask and without, and trees, also by a graph's tensors."""
    runner = Runner(backend, page, layer_of(sliding_window_size=window))
    requests = [Request(), Request()]
    runner.step([(requests[0], 20), (requests[1], 5)], "EXTEND")
    runner.backend.init_cuda_graph_state(4, 16)
    scheduled = [(request, 3) for request in requests]
    runner.step(scheduled, "TARGET_VERIFY", graph=graph, drafts=drafts(requests, 3, None))
    chain = torch.ones(2, 3, 3, dtype=torch.bool).tril()
    runner.step(scheduled, "TARGET_VERIFY", graph=graph, drafts=drafts(requests, 3, chain, topk=1))
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    both = torch.stack([tree, torch.eye(3).bool()])
    found = drafts(requests, 3, both, spare=7)
    runner.step(scheduled, "TARGET_VERIFY", graph=graph, drafts=found, tree=both)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("tokens", [2, 9, 17, 32])
@pytest.mark.parametrize("form", ["QLEN_ONLY", "QLEN_ONLY_BITPACKING"])
def test_masks_of_drafts_alone(backend: ModuleType, form: str, tokens: int, graph: bool) -> None:
    """As booleans, and as a word of 8, 16 or 32 bits for each draft."""
    runner = Runner(backend)
    requests = [Request(), Request()]
    runner.step([(requests[0], 20), (requests[1], 5)], "EXTEND")
    runner.backend.init_cuda_graph_state(2, 2 * tokens)
    torch.manual_seed(tokens)
    tree = (torch.rand(2, tokens, tokens) < 0.5) | torch.eye(tokens, dtype=torch.bool)
    found = drafts(requests, tokens, tree, form=form)
    scheduled = [(request, tokens) for request in requests]
    runner.step(scheduled, "TARGET_VERIFY", graph=graph, drafts=found, tree=tree)


@pytest.mark.parametrize("graph", [False, True])
def test_accepted_drafts_are_extended(backend: ModuleType, graph: bool) -> None:
    runner = Runner(backend, 16)
    first, second = Request(), Request()
    runner.step([(first, 20), (second, 5)], "EXTEND")
    runner.backend.init_cuda_graph_state(4, 16)
    counts = (3, 3) if graph else (3, 1)
    extended = SimpleNamespace(num_tokens_per_req=3)
    scheduled = [(first, counts[0]), (second, counts[1])]
    runner.step(scheduled, "DRAFT_EXTEND_V2", graph=graph, drafts=extended)


def test_graphs_are_captured_of_as_many_tokens_of_each(backend: ModuleType) -> None:
    runner = Runner(backend)
    runner.backend.init_cuda_graph_state(2, 2)
    with pytest.raises(ValueError, match="forward_mode: expected as many new tokens of each request"):
        runner.step([(Request(), 3)], "EXTEND", graph=True)
    with pytest.raises(ValueError, match="forward_mode: expected decoding, extending or verification"):
        runner.step([(Request(), 3)], "DLLM_EXTEND")


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("page", "topk"), [(16, 1), (1, 1), (1, 3)])
def test_a_model_drafts_step_by_step(backend: ModuleType, page: int, topk: int, graph: bool) -> None:
    """Each branch of a request sees its prefix and its own drafts, which lie behind those of others."""
    torch.manual_seed(0)
    with engine("sglang", "attnc.adapters.sglang.drafts") as module:
        runner = Runner(backend, page)
        steps, prefixes = 4, [19, 6]
        pool = runner.given["token_to_kv_pool"]
        pool.k.normal_()
        pool.v.normal_()
        for row, width in enumerate(prefixes):
            pages = torch.tensor([runner.free.pop() for _ in range(-(-(width + topk * steps) // page))])
            slots = (pages[:, None] * page + torch.arange(page)).flatten()
            runner.table[row, : len(slots)] = slots
        made = module.AttncMultiStepDraftBackend(SimpleNamespace(**runner.given), topk, steps)
        assert len(made.attn_backends) == steps - 1
        batch = SimpleNamespace(
            batch_size=2, req_pool_indices=torch.tensor([0, 1]), seq_lens=torch.tensor(prefixes)
        )
        if graph:
            made.init_cuda_graph_state(3, 3 * topk)
            made.init_forward_metadata_out_graph(batch, in_capture=True)
            made.init_forward_metadata_in_graph(batch)
        else:
            made.init_forward_metadata(batch)
        for step, own in enumerate(made.attn_backends):
            q = torch.randn(2 * topk, HEADS * GROUP, SIZE)
            out = own.forward_decode(q.flatten(1), None, None, runner.layer, batch).view_as(q)
            for row, (query, found) in enumerate(zip(q, out, strict=True)):
                request, branch = divmod(row, topk)
                width = prefixes[request]
                drafted = width + branch * steps + torch.arange(step + 1)
                at = runner.table[request, torch.cat([torch.arange(width), drafted])].long()
                check(found[None], query[None], Request([], pool.k[at], pool.v[at]))


def test_branches_in_pages_are_refused(backend: ModuleType) -> None:
    with engine("sglang", "attnc.adapters.sglang.drafts") as module:
        runner = Runner(backend, 16)
        with pytest.raises(ValueError, match="page_size: expected 1, as drafts have 2 branches, got 16"):
            module.AttncMultiStepDraftBackend(SimpleNamespace(**runner.given), 2, 3)
        single = module.AttncMultiStepDraftBackend(SimpleNamespace(**runner.given), 1, 1)
        single.init_forward_metadata(SimpleNamespace(batch_size=1))
        assert single.attn_backends == []


def test_lengths_stay_on_the_device(backend: ModuleType) -> None:
    """Of drafts too, whose steps have a token of each branch."""
    from attnc.adapters.sglang.drafts import AttncMultiStepDraftBackend

    assert backend.AttncAttnBackend.needs_cpu_seq_lens is False
    assert AttncMultiStepDraftBackend.needs_cpu_seq_lens is False
