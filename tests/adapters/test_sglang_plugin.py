"""SGLang's backend: it fits the signatures of the published wheel, and serves requests as a runner asks."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.adapters import sglang as plugin
from tests.adapters.contract import mismatches, snapshot
from tests.adapters.engines import Request, check, coded, engine, meant
from tests.adapters.oracle import attend

HEADS, GROUP, SIZE, CONTEXT = 2, 2, 16, 96
READ = snapshot("sglang")["modules"]
BASE = READ["sglang.srt.layers.attention.base_attn_backend"]["AttentionBackend"]


@pytest.fixture(scope="module")
def backend() -> Iterator[ModuleType]:
    with engine("sglang", "attnc.adapters.sglang.backend") as module:
        yield module


def test_signatures_are_those_of_the_wheel(backend: ModuleType) -> None:
    """A parameter that moved, a method that is wanted or gone: each by name."""
    assert mismatches(backend.AttncAttnBackend, BASE, "sglang's AttentionBackend") == []


def test_what_layers_pass_is_taken_or_refused_by_name(backend: ModuleType) -> None:
    """The keywords of SGLang's own backend: sinks is taken, and whatever else it may be given named."""
    example = READ["sglang.srt.layers.attention.flashattention_backend"]["FlashAttentionBackend"]
    for name in ("forward_extend", "forward_decode"):
        known = {parameter for parameter, *_ in example["members"][name]["parameters"]}
        assert "sinks" in known
        own = {"self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "sinks"}
        assert own <= known
        for keyword in sorted(known - own):
            runner = Runner(backend)
            with pytest.raises(ValueError, match=f"{keyword}: expected None, as it is not supported"):
                getattr(runner.backend, name)(None, None, None, None, None, **{keyword: torch.ones(1)})


@dataclass
class Mode:
    """As much of ForwardMode as the backend asks."""

    name: str

    def is_decode_or_idle(self) -> bool:
        return self.name == "DECODE"

    def is_target_verify(self) -> bool:
        return self.name == "TARGET_VERIFY"

    def is_draft_extend_v2(self) -> bool:
        return self.name == "DRAFT_EXTEND_V2"

    def is_extend_or_draft_extend_or_mixed(self, include_draft_extend_v2: bool = False) -> bool:
        return self.name in ("EXTEND", "MIXED") or (include_draft_extend_v2 and self.is_draft_extend_v2())


class Pool:
    """As much of MHATokenToKVPool as the backend uses: a row for each slot."""

    def __init__(self, slots: int, **made: Any) -> None:
        self.k = torch.full((slots, HEADS, SIZE), torch.nan, device=made["device"]).to(made["dtype"])
        self.v: torch.Tensor = self.k.clone()

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: torch.Tensor | None = None,
    ) -> None:
        for pool, rows, scale in ((self.k, cache_k, k_scale), (self.v, cache_v, v_scale)):
            if rows.dtype != pool.dtype and scale is not None:
                rows.div_(scale)  # as SGLang's does, in place
            pool.view(torch.uint8)[loc_info.loc] = rows.to(pool.dtype).view(torch.uint8)


def test_what_stands_in_for_sglang_fits_it_too() -> None:
    modules = READ["sglang.srt.mem_cache.memory_pool"], READ["sglang.srt.model_executor.forward_batch_info"]
    assert mismatches(Pool, modules[0]["MHATokenToKVPool"], "sglang's pool") == []
    assert mismatches(WriteLocation, modules[0]["KVWriteLoc"], "sglang's KVWriteLoc") == []
    assert mismatches(Mode, modules[1]["ForwardMode"], "sglang's ForwardMode") == []


class Runner:
    """A model runner with one layer: requests, slots of pages in a random order, and a table of slots."""

    def __init__(
        self,
        backend: ModuleType,
        page: int = 1,
        layer: Any = None,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        cache: torch.dtype | None = None,
        **changed: Any,
    ) -> None:
        torch.manual_seed(0)
        self.made: dict[str, Any] = {"device": device, "dtype": dtype}
        pages = 192 // page
        self.page, self.free = page, torch.randperm(pages - 1).add(1).tolist()
        self.table = torch.zeros(6, CONTEXT, dtype=torch.int32, device=device)
        self.rows: dict[int, int] = {}
        given: dict[str, Any] = {
            "model_config": SimpleNamespace(is_encoder_decoder=False, context_len=CONTEXT),
            "token_to_kv_pool": Pool(192, device=device, dtype=cache or dtype),
            "req_to_token_pool": SimpleNamespace(req_to_token=self.table),
            "page_size": page,
            "device": device,
            "kv_cache_dtype": cache or dtype,
            "use_mla_backend": False,
            "attention_chunk_size": None,
            "kv_index_translator": SimpleNamespace(is_translating=False),
        }
        wanted = READ["sglang.srt.model_executor.model_runner"]["ModelRunner"]["members"]
        assert given.keys() == wanted.keys()
        self.given: dict[str, Any] = given | changed
        self.backend = backend.AttncAttnBackend(SimpleNamespace(**self.given))
        self.layer = layer_of() if layer is None else layer
        self.cache = cache

    def step(
        self,
        scheduled: list[tuple[Request, int]],
        mode: str,
        *,
        graph: bool = False,
        sinks: Any = None,
        drafts: Any = None,
        tree: torch.Tensor | None = None,
    ) -> None:
        """Checks the attention of so many new tokens of each request. drafts: spec_info; tree: as it says."""
        counts = [count for _, count in scheduled]
        device = self.made["device"]
        q = torch.randn(sum(counts), HEADS * GROUP, SIZE, **self.made)
        k, v = torch.randn(2, sum(counts), HEADS, SIZE, **self.made)
        slots: list[int] = []
        kept = [k, v]
        if self.cache is not None:
            scales = [
                torch.as_tensor(1.0 if scale is None else scale)
                for scale in (self.layer.k_scale, self.layer.v_scale)
            ]
            kept = [
                meant(coded(x.clone().div_(scale), self.cache, torch.ones(())), scale)
                for x, scale in zip((k, v), scales, strict=True)
            ]
        for (request, count), own_k, own_v in zip(
            scheduled, *(torch.split(x, counts) for x in kept), strict=True
        ):
            new = request.append(own_k, own_v, self.page, self.free)
            row = self.rows.setdefault(id(request), 1 + len(self.rows))
            whole = [page * self.page + at for page in request.pages for at in range(self.page)]
            self.table[row, : request.length] = torch.tensor(whole[: request.length])
            slots += new
            assert len(new) == count
        lengths = torch.tensor([request.length for request, _ in scheduled])
        batch = SimpleNamespace(
            forward_mode=Mode(mode),
            batch_size=len(counts),
            req_pool_indices=torch.tensor(
                [self.rows[id(request)] for request, _ in scheduled], device=device
            ),
            seq_lens=lengths.to(device),
            seq_lens_cpu=None if graph else lengths,
            extend_seq_lens=torch.tensor(counts, device=device),
            out_cache_loc=torch.tensor(slots, device=device),
            spec_info=drafts,
        )
        if mode == "TARGET_VERIFY":
            batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens - counts[0], lengths - counts[0]
        assert (
            vars(batch).keys()
            == READ["sglang.srt.model_executor.forward_batch_info"]["ForwardBatch"]["members"].keys()
        )
        if graph:
            self.backend.init_forward_metadata_out_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if mode == "DECODE" else self.backend.forward_extend
        out = forward(q.flatten(1), k, v, self.layer, batch, **({} if sinks is None else {"sinks": sinks}))
        for b, ((request, _), own, found) in enumerate(
            zip(scheduled, torch.split(q, counts), torch.split(out.view_as(q), counts), strict=True)
        ):
            seen = {
                "left": self.layer.sliding_window_size,
                "tree": None if tree is None else tree[b],
            }
            check(found, own, request, softcap=self.layer.logit_cap, sinks=sinks, **seen)


def layer_of(**changed: Any) -> Any:
    """A RadixAttention by its attributes."""
    attributes = {
        "layer_id": 0,
        "tp_q_head_num": HEADS * GROUP,
        "tp_k_head_num": HEADS,
        "qk_head_dim": SIZE,
        "v_head_dim": SIZE,
        "scaling": SIZE**-0.5,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
        "logit_capping_method": "tanh",
        "pos_encoding_mode": "NONE",
        "xai_temperature_len": -1,
        "is_cross_attention": False,
        "k_scale": None,
        "v_scale": None,
        "attn_type": SimpleNamespace(value="decoder"),
    }
    known = READ["sglang.srt.layers.radix_attention"]["RadixAttention"]["members"]
    assert attributes.keys() == known.keys()
    return SimpleNamespace(**attributes | changed)


class WriteLocation:
    """KVWriteLoc, as far as the pool looks at it."""

    @classmethod
    def for_layer(cls, forward_batch: Any, layer: Any, *, swa_loc: Any = None, full_loc: Any = None) -> Any:
        return SimpleNamespace(loc=forward_batch.out_cache_loc)


@pytest.fixture(autouse=True)
def write_locations(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "KVWriteLoc", WriteLocation)


@pytest.mark.parametrize(
    ("page", "layer", "sinks"),
    [
        (1, {}, None),
        (16, {"sliding_window_size": 8, "logit_cap": 3.0}, None),
        (16, {}, torch.linspace(-1, 2, HEADS * GROUP)),
    ],
)
def test_requests_are_served(backend: ModuleType, page: int, layer: dict[str, Any], sinks: Any) -> None:
    """Prompts of two; a chunk and a token beside a request that reuses a prefix; tokens, also by a graph's
    tensors.
    """
    runner = Runner(backend, page, layer_of(**layer))
    first, second = Request(), Request()
    runner.step([(first, 35), (second, 5)], "EXTEND", sinks=sinks)
    third = first.fork(32, page)
    runner.step([(first, 1), (second, 14), (third, 3)], "MIXED", sinks=sinks)
    runner.step([(first, 1), (second, 1), (third, 1)], "DECODE", sinks=sinks)
    runner.backend.init_cuda_graph_state(5, 5)
    runner.step([(third, 1), (first, 1)], "DECODE", graph=True, sinks=sinks)


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(
    "scales",
    [
        (None, None),
        (torch.tensor(0.25), torch.tensor(0.0625)),
        (torch.tensor([3.0]), None),
        (0.25, 0.125),  # as a model's load_kv_cache_scales leaves them
    ],
)
def test_caches_of_8_bits_are_read(
    backend: ModuleType, cache: torch.dtype, scales: tuple[torch.Tensor | float | None, ...]
) -> None:
    layer = layer_of(k_scale=scales[0], v_scale=scales[1], logit_cap=3.0)
    runner = Runner(backend, 16, layer, dtype=torch.bfloat16, cache=cache)
    first, second = Request(), Request()
    runner.step([(first, 35), (second, 5)], "EXTEND")
    runner.step([(first, 1), (second, 14)], "MIXED")
    runner.step([(first, 1), (second, 1)], "DECODE")
    runner.backend.init_cuda_graph_state(5, 5)
    runner.step([(first, 1), (second, 1)], "DECODE", graph=True)


def test_a_captured_step_reads_the_same_tensors(backend: ModuleType) -> None:
    runner = Runner(backend, 16)
    requests = [Request(), Request()]
    runner.step([(request, 3) for request in requests], "EXTEND")
    runner.backend.init_cuda_graph_state(4, 4)
    runner.step([(request, 1) for request in requests], "DECODE", graph=True)
    before = runner.backend.forward_metadata
    runner.step([(request, 1) for request in requests], "DECODE", graph=True)
    after = runner.backend.forward_metadata
    for name in ("cu_seqlens_q", "seq_lens", "page_table"):
        assert getattr(after, name).data_ptr() == getattr(before, name).data_ptr()
        assert getattr(after, name).shape == getattr(before, name).shape
    assert runner.backend.get_cuda_graph_seq_len_fill_value() == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"use_mla_backend": True, "kv_cache_dtype": torch.float32},
            "kv_cache_dtype: expected 16 or 8 bits for latent attention, got torch.float32",
        ),
        (
            {"model_config": SimpleNamespace(is_encoder_decoder=True)},
            "is_encoder_decoder: expected False, as cross attention is not supported",
        ),
        (
            {"kv_cache_dtype": torch.float8_e4m3fnuz},
            "kv_cache_dtype: expected one of torch.float16, .*, got torch.float8_e4m3fnuz",
        ),
        ({"attention_chunk_size": 8192}, "attention_chunk_size: expected None, .*, got 8192"),
        (
            {"token_to_kv_pool": SimpleNamespace(translate_loc_from_full_to_swa=None)},
            "token_to_kv_pool: .*--disable-hybrid-swa-memory",
        ),
        (
            {"kv_index_translator": SimpleNamespace(is_translating=True)},
            "kv_index_translator: expected slots",
        ),
    ],
)
def test_what_a_runner_cannot_have_is_refused_by_name(
    backend: ModuleType, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Runner(backend, **changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"is_cross_attention": True}, "attn_type: .*, got cross attention"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "attn_type: .*, got encoder_only"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "logit_capping_method: expected 'tanh'"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode: expected 'NONE', got 'ALIBI'"),
        ({"xai_temperature_len": 4}, "xai_temperature_len: expected none, got 4"),
    ],
)
def test_what_a_layer_cannot_have_is_refused_by_name(
    backend: ModuleType, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Runner(backend, layer=layer_of(**changed)).step([(Request(), 3)], "EXTEND")


def drafts(
    requests: list[Request], tokens: int, tree: torch.Tensor | None, topk: int = 2, spare: int = 0
) -> SimpleNamespace:
    """A spec_info: a mask of all keys for each draft, one request behind another."""
    mask = None
    if tree is not None:
        rows = [
            torch.cat([torch.ones(tokens, request.length, dtype=torch.bool), own], 1).flatten()
            for request, own in zip(requests, tree, strict=True)
        ]
        mask = torch.cat([*rows, torch.zeros(spare, dtype=torch.bool)])
    return SimpleNamespace(num_tokens_per_req=tokens, topk=topk, custom_mask=mask)


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


def test_prompts_of_latent_attention_come_with_keys_and_values(backend: ModuleType) -> None:
    """New tokens among each other, and a chunk of the prefix, which one request does not have."""
    pool = LatentPool(32, LATENT + ROPE, torch.bfloat16)
    layer = layer_of(tp_k_head_num=4, qk_head_dim=24, v_head_dim=SIZE, scaling=0.3)
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
        q, k = torch.randn(11, 4, 24).bfloat16(), torch.randn(sum(own), 4, 24).bfloat16()
        v = torch.randn(sum(own), 4, SIZE).bfloat16()
        batch.attn_attend_prefix_cache, batch.mha_return_lse = not causal, not causal
        found = runner.backend.forward_extend(q.flatten(1), k, v, layer, batch, save_kv_cache=False)
        parts = (torch.split(q, counts), torch.split(k, own), torch.split(v, own))
        expected = [attend(*rows, scale=0.3, causal=causal) for rows in zip(*parts, strict=True)]
        o = torch.cat([o for o, _ in expected])
        if causal:
            assert found.shape == (11, 4 * SIZE)
            torch.testing.assert_close(found.view(-1, 4, SIZE).double(), o, rtol=2e-2, atol=2e-2)
        else:
            torch.testing.assert_close(found[0].double(), o, rtol=2e-2, atol=2e-2)
            lse = torch.cat([lse for _, lse in expected])
            torch.testing.assert_close(found[1].double(), lse, rtol=2e-2, atol=2e-2)
            assert found[1].is_contiguous()


def test_values_of_another_width_are_read(backend: ModuleType) -> None:
    runner = Runner(backend, layer=layer_of(v_head_dim=8))
    pool = runner.given["token_to_kv_pool"]
    pool.v = pool.v[..., :8].contiguous()
    k, v = torch.randn(5, HEADS, SIZE), torch.randn(5, HEADS, 8)
    request = Request()
    slots = request.append(k, v, 1, runner.free)
    runner.table[0, :5] = torch.tensor(slots)
    q = torch.randn(5, HEADS * GROUP, SIZE)
    batch = SimpleNamespace(
        forward_mode=Mode("EXTEND"),
        batch_size=1,
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([5]),
        seq_lens_cpu=None,
        extend_seq_lens=torch.tensor([5]),
        out_cache_loc=torch.tensor(slots),
        spec_info=None,
    )
    runner.backend.init_forward_metadata(batch)
    out = runner.backend.forward_extend(q.flatten(1), k, v, runner.layer, batch)
    check(out.view(5, HEADS * GROUP, 8), q, request)


def test_the_entry_point_offers_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert READ["sglang.srt.plugins"]["GENERAL_PLUGINS_GROUP"]["value"] == "'sglang.srt.plugins'"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    points = project["project"]["entry-points"]["sglang.srt.plugins"]
    assert points == {"attnc": "attnc.adapters.sglang:register"}
    with engine("sglang", "attnc.adapters.sglang.backend") as module:
        choices = sys.modules["sglang.srt.arg_groups.choices"]
        registry = sys.modules["sglang.srt.layers.attention.attention_registry"]
        hooks = sys.modules["sglang.srt.plugins.hook_registry"]
        handlers = sys.modules["sglang.srt.models.deepseek_common.attention_backend_handler"]
        known: dict[str, list[str]] = {"": [], "_draft": [], "chunked": []}
        made: dict[str, Any] = {}
        hooked: list[Any] = []
        methods: dict[str, Any] = {}
        monkeypatch.setattr(choices, "ATTENTION_BACKEND_CHOICES", known[""])
        for kind in ("", "_draft"):
            monkeypatch.setattr(choices, f"add{kind}_attention_backend_choices", known[kind].extend)
        monkeypatch.setattr(choices, "add_chunked_prefix_cache_attention_backend", known["chunked"].append)
        monkeypatch.setattr(
            registry, "register_attention_backend", lambda name: lambda maker: made.update({name: maker})
        )
        monkeypatch.setattr(
            hooks.HookRegistry, "register", lambda *given, **more: hooked.append(given), raising=False
        )
        monkeypatch.setattr(
            handlers.AttentionBackendRegistry, "register", lambda name, method: methods.update({name: method})
        )
        monkeypatch.setattr(handlers, "_handle_attention_backend", lambda *given: given)
        plugin.register()
        plugin.register()
        assert known == {"": ["attnc"], "_draft": ["attnc"], "chunked": ["attnc"]}
        runner = Runner(module)
        assert isinstance(runner.backend, module.AttncAttnBackend)
        given = SimpleNamespace(**runner.given)
        assert isinstance(made["attnc"](given), module.AttncAttnBackend)
        assert methods == {}
        latent = SimpleNamespace(**runner.given | {"use_mla_backend": True, "kv_cache_dtype": torch.bfloat16})
        assert made["attnc"](latent).is_latent
        assert methods["attnc"]("layer", "batch") == ("layer", "batch", "attnc")
        ((target, hook, kind),) = hooked
        assert kind == hooks.HookType.AROUND
        path, _, name = target.rpartition(".")
        factory_module, _, factory_name = path.rpartition(".")
        theirs = READ[factory_module][factory_name]["members"]
        assert [parameter for parameter, *_ in theirs[name]["parameters"]] == [
            "self", "backend_name", "backend_map", "error_template", "stamps_children",
        ]  # fmt: skip
        factory = SimpleNamespace(draft_model_runner=given, topk=1, speculative_num_steps=3)

        def create(factory: Any, name: str, backends: Any, error: str, stamps_children: bool = False) -> Any:
            assert (name, error) == ("decode_attention_backend", "not supported")
            assert backends.keys() == {"triton", "attnc"}
            return backends["attnc"]()

        asked = (create, factory, "decode_attention_backend", {"triton": None}, "not supported")
        name, backends = hook(*asked, stamps_children=True)
        assert (name, len(backends.attn_backends)) == ("attnc", 2)
        name, single = hook(*asked)
        assert (name, type(single).__name__) == ("attnc", "AttncAttnBackend")
