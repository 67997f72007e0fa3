"""vLLM's backend: it fits the signatures of the published wheel, and serves requests as a runner asks."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.adapters import vllm as plugin
from tests.adapters.contract import mismatches, snapshot
from tests.adapters.engines import Request, check, coded, engine, meant

HEADS, GROUP, SIZE, PAGE = 2, 2, 16, 16
READ = snapshot("vllm")["modules"]
BASE = READ["vllm.v1.attention.backend"]


@pytest.fixture(scope="module")
def backend() -> Iterator[ModuleType]:
    with engine("vllm", "attnc.adapters.vllm.backend") as module:
        yield module


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("AttncBackend", "AttentionBackend"),
        ("AttncMetadataBuilder", "AttentionMetadataBuilder"),
        ("AttncImpl", "AttentionImpl"),
    ],
)
def test_signatures_are_those_of_the_wheel(backend: ModuleType, ours: str, theirs: str) -> None:
    """A parameter that moved, a method that is wanted or gone: each by name."""
    extra = ("do_kv_cache_update",) if ours == "AttncImpl" else ()
    assert mismatches(getattr(backend, ours), BASE[theirs], f"vllm's {theirs}", extra) == []


def test_what_layers_call_is_there_as_in_vllms_own(backend: ModuleType) -> None:
    example = READ["vllm.v1.attention.backends.triton_attn"]["TritonAttentionImpl"]
    assert mismatches(backend.AttncImpl, example, "vllm's TritonAttentionImpl") == []


class Runner:
    """A layer of a model runner: requests, pages in a random order, and one pool, heads outside or inside."""

    def __init__(
        self,
        backend: ModuleType,
        *,
        heads_outside: bool = True,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        scales: tuple[torch.Tensor, torch.Tensor] = (torch.tensor(0.25), torch.tensor(0.05)),
        **layer: Any,
    ) -> None:
        torch.manual_seed(0)
        self.made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.layer = layer
        self.cache = QUANTISED.get(layer.get("kv_cache_dtype", "auto"))
        self.scales = [scale.to(device) for scale in scales]
        self.backend = backend.AttncBackend
        given = {"head_size": SIZE, "head_size_v": SIZE}
        assert given.keys() == READ["vllm.v1.kv_cache_interface"]["AttentionSpec"]["members"].keys()
        spec = SimpleNamespace(**given)
        self.builder = self.backend.get_builder_cls()(spec, ["layer"], None, torch.device(device))
        self.impl = self.backend.get_impl_cls()(HEADS * GROUP, SIZE, SIZE**-0.5, HEADS, **layer)
        if heads_outside:
            self.pool = torch.full((12, HEADS, PAGE, 2 * SIZE), torch.nan, **self.made)
        else:
            self.pool = torch.full((12, PAGE, HEADS, 2 * SIZE), torch.nan, **self.made).transpose(1, 2)
        if self.cache is not None:  # vLLM's caches of 8 bits are bytes; these are NaN
            self.pool = torch.full(self.pool.shape, 0x7F, dtype=torch.uint8, device=device)
        self.free: list[int] = torch.randperm(12).tolist()

    def step(self, scheduled: list[tuple[Request, int]], padding: int = 3, **common: Any) -> None:
        """Checks the attention of so many new tokens of each request."""
        counts = [count for _, count in scheduled]
        tokens = sum(counts) + padding
        device = self.made["device"]
        q = torch.randn(tokens, HEADS * GROUP, SIZE, **self.made)
        k, v = torch.randn(2, tokens, HEADS, SIZE, **self.made)
        starts = torch.tensor([0, *counts]).cumsum(0)
        slots: list[int] = []
        kept_k, kept_v = k, v
        if self.cache is not None:
            kept_k, kept_v = (
                meant(coded(x, self.cache, scale), scale)
                for x, scale in zip((k, v), self.scales, strict=True)
            )
        for (request, count), at in zip(scheduled, starts.tolist(), strict=False):
            slots += request.append(kept_k[at : at + count], kept_v[at : at + count], PAGE, self.free)
        table = torch.full((len(counts), 8), 1 << 20, dtype=torch.int32)
        for b, (request, _) in enumerate(scheduled):
            table[b, : len(request.pages)] = torch.tensor(request.pages)
        lengths = [request.length for request, _ in scheduled]
        given = sys.modules["vllm.v1.attention.backend"].CommonAttentionMetadata(
            query_start_loc=starts.int().to(device),
            query_start_loc_cpu=starts.int(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            num_reqs=len(counts),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            block_table_tensor=table.to(device),
            slot_mapping=torch.tensor([*slots, *[-1] * padding], device=device),
            **common,
        )
        metadata = self.builder.build(0, given)
        output = torch.full_like(q, torch.nan)
        layer = SimpleNamespace(_k_scale=self.scales[0], _v_scale=self.scales[1])
        self.impl.do_kv_cache_update(layer, k, v, self.pool, metadata.slot_mapping)
        returned = self.impl.forward(layer, q, k, v, self.pool, metadata, output=output)
        assert returned is output
        parts = [*counts, padding]
        for (request, _), own, found in zip(
            scheduled, torch.split(q, parts), torch.split(output, parts), strict=False
        ):
            slopes, width = self.layer.get("alibi_slopes"), self.layer.get("sliding_window")
            check(
                found,
                own,
                request,
                left=-1 if width is None else width - 1,
                softcap=self.layer.get("logits_soft_cap", 0.0),
                slopes=None if slopes is None else torch.tensor(slopes),
                sinks=self.layer.get("sinks"),
                causal=common.get("causal", True),
            )


QUANTISED = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
LAYERS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 9, "logits_soft_cap": 3.0},
    {"sinks": torch.linspace(-1, 2, HEADS * GROUP), "heads_outside": False},
    {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: "-".join(layer) or "plain")
def test_requests_are_served(backend: ModuleType, layer: dict[str, Any]) -> None:
    """Prompts of two; a chunk and a decoded token beside a request that reuses a prefix; single tokens."""
    runner = Runner(backend, **layer)
    first, second = Request(), Request()
    runner.step([(first, 35), (second, 5)])
    third = first.fork(32, PAGE)
    runner.step([(first, 1), (second, 14), (third, 3)], padding=0)
    runner.step([(first, 1), (second, 1), (third, 1)], padding=0)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cache", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_caches_of_8_bits_are_written_and_read(backend: ModuleType, cache: str, dtype: torch.dtype) -> None:
    """What vLLM divides by a layer's scales, and rounds, is multiplied by them again."""
    for scales in (
        (torch.tensor(0.25), torch.tensor([0.05])),
        (torch.tensor([0.002, 0.5]), torch.tensor([1.0, 0.001])),  # of which the small ones saturate
    ):
        runner = Runner(backend, dtype=dtype, scales=scales, kv_cache_dtype=cache, sliding_window=30)
        first, second = Request(), Request()
        runner.step([(first, 35), (second, 5)])
        runner.step([(first, 1), (second, 14)], padding=0)
        runner.step([(first, 1), (second, 1)], padding=0)


def test_drafts_in_blocks_see_each_other(backend: ModuleType) -> None:
    """A step that is not causal: all keys of a request, with all of its new tokens."""
    runner = Runner(backend)
    first, second = Request(), Request()
    runner.step([(first, 20), (second, 5)])
    runner.step([(first, 4), (second, 4)], padding=0, causal=False)
    runner.step([(first, 7), (second, 2)], causal=False)


def test_a_step_may_pad_its_requests(backend: ModuleType) -> None:
    """As graphs do: tokens that belong to nobody, whose slot is none, change no page."""
    runner = Runner(backend)
    request = Request()
    runner.step([(request, 20)], padding=12)
    for page in set(range(len(runner.pool))) - {*request.pages}:
        assert runner.pool[page].isnan().all()


def test_groups_of_layers_share_metadata_but_for_pages(backend: ModuleType) -> None:
    runner = Runner(backend)
    table, slots = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    metadata = backend.AttncMetadata(1, 1, slots.int(), slots.int(), 1, table + 1, slots + 1)
    changed = runner.builder.update_block_table(metadata, table, slots)
    assert changed.block_table is table
    assert changed.slot_mapping is slots
    assert changed.seq_lens is metadata.seq_lens


def test_without_metadata_the_output_is_zero(backend: ModuleType) -> None:
    """vLLM runs the model once to see how much memory it takes."""
    output = torch.full((3, HEADS * GROUP, SIZE), torch.nan)
    Runner(backend).impl.forward(None, output, output, output, output, None, output)
    assert torch.equal(output, torch.zeros_like(output))


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype: expected one of auto, .*, got 'nvfp4'"),
        (
            {"attn_type": "encoder_decoder"},
            "attn_type: expected a decoder's self-attention, got 'encoder_dec",
        ),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt: expected None, as it is not supported, got True"),
        ({"chunk_lookback": 2}, "chunk_lookback: expected -1"),
        ({"q_lora_rank": 512}, "q_lora_rank: expected None, as it is not supported, got 512"),
        ({"of_a_later_version": 1}, "of_a_later_version: expected None"),
    ],
)
def test_what_a_layer_cannot_have_is_refused_by_name(
    backend: ModuleType, layer: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        backend.AttncImpl(4, SIZE, 1.0, 2, **layer)


def test_context_parallelism_is_refused(backend: ModuleType) -> None:
    class Parallel(backend.AttncImpl):  # type: ignore[misc, name-defined]
        dcp_world_size = 2

    with pytest.raises(ValueError, match="dcp_world_size: expected 1"):
        Parallel(4, SIZE, 1.0, 2)


@pytest.mark.parametrize(
    ("common", "said"),
    [
        ({"causal": torch.ones(1)}, "causal: expected True or False of all sequences, got tensor"),
        ({"mm_req_doc_ranges": {0: [(1, 4)]}}, "mm_req_doc_ranges: expected None"),
        ({"rswa_prefix_lens": torch.ones(1)}, "rswa_prefix_lens: expected None"),
        ({"dcp_local_seq_lens": torch.ones(1)}, "dcp_local_seq_lens: expected None"),
        ({"encoder_seq_lens": torch.ones(1)}, "encoder_seq_lens: expected None"),
    ],
)
def test_what_a_step_cannot_ask_is_refused_by_name(
    backend: ModuleType, common: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Runner(backend).step([(Request(), 4)], **common)


def test_values_of_another_width_are_read(backend: ModuleType) -> None:
    """As vLLM lays them out: behind the keys of each head."""
    impl = backend.AttncImpl(HEADS * GROUP, SIZE, SIZE**-0.5, HEADS)
    pool = torch.full((4, HEADS, PAGE, SIZE + 8), torch.nan)
    k, v = torch.randn(5, HEADS, SIZE), torch.randn(5, HEADS, 8)
    impl.do_kv_cache_update(None, k, v, pool, torch.arange(5) + 2 * PAGE)
    table, start = torch.tensor([[2]], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    metadata = backend.AttncMetadata(5, 5, start, start[1:], 5, table, start)
    q, output = torch.randn(5, HEADS * GROUP, SIZE), torch.empty(5, HEADS * GROUP, 8)
    impl.forward(None, q, k, v, pool, metadata, output)
    check(output, q, Request([2], k, v))


def test_what_vllm_asks_of_the_backend(backend: ModuleType) -> None:
    ours = backend.AttncBackend
    assert [ours.supports_head_size(size) for size in (8, 64, 80, 100, 256, 512)] == [
        False, True, True, False, True, False,
    ]  # fmt: skip
    assert [size.base for size in ours.get_supported_kernel_block_sizes()] == [16]
    assert ours.supports_compute_capability(SimpleNamespace(major=9, minor=0))
    assert not ours.supports_compute_capability(SimpleNamespace(major=7, minor=5))
    rest = (None, False, False, False, False, None)
    assert ours.supports_combination(64, torch.bfloat16, "auto", *rest) is None
    assert ours.supports_combination(64, torch.bfloat16, "bfloat16", *rest) is None
    said = ours.supports_combination(64, torch.float16, "bfloat16", *rest)
    assert said == "kv_cache_dtype bfloat16 with a model of torch.float16"
    assert set(QUANTISED) <= set(ours.supported_kv_cache_dtypes)
    for cache in QUANTISED:
        assert ours.supports_combination(64, torch.bfloat16, cache, *rest) is None
        said = ours.supports_combination(64, torch.float32, cache, *rest)
        assert said == f"kv_cache_dtype {cache} with a model of torch.float32"
        ada, ampere = (SimpleNamespace(major=8, minor=minor) for minor in (9, 0))
        assert ours.supports_combination(64, torch.bfloat16, cache, *rest[:-1], ada) is None
        said = ours.supports_combination(64, torch.bfloat16, cache, *rest[:-1], ampere)
        assert (said is None) == (cache == "fp8_e5m2")
        assert said is None or "needs compute capability 8.9 or newer, and this GPU has 8.0" in said


class Registry:
    """As much of AttentionBackendEnum as the plug-in uses."""

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self.__members__ = {"ATTNC_MLA": self, "ATTNC_MLA_SPARSE": self}

    def __getitem__(self, name: str) -> Registry:
        return self.__members__[name]

    @property
    def CUSTOM(self) -> Registry:
        return self

    def is_overridden(self) -> bool:
        return self.path is not None

    def get_path(self, include_classname: bool = True) -> str | None:
        return self.path


def test_the_entry_point_offers_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert READ["vllm.plugins"]["DEFAULT_PLUGINS_GROUP"]["value"] == "'vllm.general_plugins'"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    points = project["project"]["entry-points"]["vllm.general_plugins"]
    assert points == {"attnc": "attnc.adapters.vllm:register"}
    with engine("vllm", "attnc.adapters.vllm.backend") as module:
        names = sys.modules["vllm.v1.attention.backends.registry"]
        prompts = sys.modules["vllm.v1.attention.backends.mla.prefill.registry"]
        registry, prefill, registered = Registry(), Registry(), []
        monkeypatch.setattr(names, "AttentionBackendEnum", registry)
        monkeypatch.setattr(names, "register_backend", lambda *given: registered.append(given))
        monkeypatch.setattr(prompts, "MLAPrefillBackendEnum", prefill)
        monkeypatch.setattr(prompts, "register_mla_prefill_backend", lambda *given: registered.append(given))
        plugin.register()
        plugin.register()
        assert registered == [(registry, plugin.BACKEND), (prefill, plugin.PREFILL_BACKEND)] * 2
        assert f"{module.__name__}.{module.AttncBackend.__name__}" == plugin.BACKEND
        registry.path = "others.Backend"
        with pytest.warns(UserWarning, match="CUSTOM is others.Backend already") as warned:
            plugin.register()
        assert len(registered) == 5
        assert warned[0].filename == __file__


def test_batch_invariance_is_offered_and_asked_of_kernels(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backend.AttncBackend.supports_batch_invariance()
    assert backend.AttncImpl(4, SIZE, 1.0, 2)._order == 0
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    runner = Runner(backend)
    assert runner.impl._order == 2048
    runner.step([(Request(), 1), (Request(), 1)])
    assert backend.AttncImpl(4, SIZE, 1.0, 2, kv_cache_dtype="fp8")._order == 2048


def test_what_the_backend_says_of_itself(backend: ModuleType) -> None:
    says = backend.AttncBackend
    asked = ("sink", "sliding_window", "non_causal", "batch_invariance")
    assert all(getattr(says, f"supports_{name}")() is True for name in asked)
    assert [size for size in range(0, 300, 4) if says.supports_head_size(size)] == [*range(16, 257, 8)]
    for heads, wanted in ((None, 4), (2, 2), (1, 1)):
        made = backend.AttncImpl(4, 16, 0.25, heads, None, None, "auto")
        assert (made.num_heads, made.num_kv_heads, made.scale) == (4, wanted, 0.25)
