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

    def is_extend_or_draft_extend_or_mixed(self, include_draft_extend_v2: bool = False) -> bool:
        return self.name in ("EXTEND", "MIXED")


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
        given = {
            "model_config": SimpleNamespace(is_encoder_decoder=False, context_len=CONTEXT),
            "token_to_kv_pool": Pool(192, device=device, dtype=cache or dtype),
            "req_to_token_pool": SimpleNamespace(req_to_token=self.table),
            "page_size": page,
            "device": device,
            "kv_cache_dtype": cache or dtype,
            "use_mla_backend": False,
            "attention_chunk_size": None,
            "spec_algorithm": SimpleNamespace(is_none=lambda: True),
            "kv_index_translator": SimpleNamespace(is_translating=False),
        }
        wanted = READ["sglang.srt.model_executor.model_runner"]["ModelRunner"]["members"]
        assert given.keys() == wanted.keys()
        self.backend = backend.AttncAttnBackend(SimpleNamespace(**given | changed))
        self.layer = layer_of() if layer is None else layer
        self.cache = cache

    def step(
        self, scheduled: list[tuple[Request, int]], mode: str, *, graph: bool = False, sinks: Any = None
    ) -> None:
        """Checks the attention of so many new tokens of each request."""
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
            spec_info=None,
        )
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
        for (request, _), own, found in zip(
            scheduled, torch.split(q, counts), torch.split(out.view_as(q), counts), strict=True
        ):
            left = self.layer.sliding_window_size
            check(found, own, request, left=left, softcap=self.layer.logit_cap, sinks=sinks)


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
        ({"use_mla_backend": True}, "attention_arch: expected MHA, as multi-head latent attention"),
        (
            {"model_config": SimpleNamespace(is_encoder_decoder=True)},
            "is_encoder_decoder: expected False, as cross attention is not supported",
        ),
        (
            {"kv_cache_dtype": torch.float8_e4m3fnuz},
            "kv_cache_dtype: expected one of torch.float16, .*, got torch.float8_e4m3fnuz",
        ),
        ({"attention_chunk_size": 8192}, "attention_chunk_size: expected None, .*, got 8192"),
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "spec_algorithm: expected none"),
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
        ({"v_head_dim": 8}, "v_head_dim: expected 16, like the keys', got 8"),
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


@pytest.mark.parametrize("graph", [False, True])
def test_drafts_are_refused(backend: ModuleType, graph: bool) -> None:
    runner = Runner(backend)
    runner.backend.init_cuda_graph_state(2, 2)
    with pytest.raises(ValueError, match="forward_mode: expected decoding"):
        runner.step([(Request(), 3)], "TARGET_VERIFY", graph=graph)


def test_the_entry_point_offers_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert READ["sglang.srt.plugins"]["GENERAL_PLUGINS_GROUP"]["value"] == "'sglang.srt.plugins'"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    points = project["project"]["entry-points"]["sglang.srt.plugins"]
    assert points == {"attnc": "attnc.adapters.sglang:register"}
    with engine("sglang", "attnc.adapters.sglang.backend") as module:
        choices = sys.modules["sglang.srt.arg_groups.choices"]
        registry = sys.modules["sglang.srt.layers.attention.attention_registry"]
        known: list[str] = []
        made: dict[str, Any] = {}
        monkeypatch.setattr(choices, "ATTENTION_BACKEND_CHOICES", known)
        monkeypatch.setattr(choices, "add_attention_backend_choices", known.extend)
        monkeypatch.setattr(
            registry, "register_attention_backend", lambda name: lambda maker: made.update({name: maker})
        )
        plugin.register()
        plugin.register()
        assert known == ["attnc"]
        assert isinstance(Runner(module).backend, module.AttncAttnBackend)
        monkeypatch.setattr(module, "AttncAttnBackend", lambda runner: ("made for", runner))
        assert made["attnc"]("runner") == ("made for", "runner")
