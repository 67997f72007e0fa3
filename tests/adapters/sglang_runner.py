"""A model runner of SGLang, as far as the backend asks one: modes, pools, requests, and a layer."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.adapters.contract import snapshot
from tests.adapters.engines import Request, check, coded, meant

HEADS, GROUP, SIZE, CONTEXT = 2, 2, 16, 96
READ = snapshot("sglang")["modules"]
BASE = READ["sglang.srt.layers.attention.base_attn_backend"]["AttentionBackend"]


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


def drafts(
    requests: list[Request],
    tokens: int,
    tree: torch.Tensor | None,
    topk: int = 2,
    spare: int = 0,
    device: torch.device | str = "cpu",
    form: str = "FULL_MASK",
) -> SimpleNamespace:
    """A spec_info; form: of its mask, by the names of TreeMaskMode."""
    mask = None
    if tree is not None and form == "QLEN_ONLY":
        mask = tree.flatten().to(device)
    elif tree is not None and form == "QLEN_ONLY_BITPACKING":
        words = (tree.long() << torch.arange(tokens)).sum(-1).flatten()
        dtype = torch.uint8 if tokens <= 8 else torch.uint16 if tokens <= 16 else torch.uint32
        mask = words.to(dtype).to(device)
    elif tree is not None:
        rows = [
            torch.cat([torch.ones(tokens, request.length, dtype=torch.bool), own], 1).flatten()
            for request, own in zip(requests, tree, strict=True)
        ]
        mask = torch.cat([*rows, torch.zeros(spare, dtype=torch.bool)]).to(device)
    return SimpleNamespace(num_tokens_per_req=tokens, topk=topk, custom_mask=mask)
