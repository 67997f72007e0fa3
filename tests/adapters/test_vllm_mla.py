"""vLLM's backends of latent attention: they fit the published wheel, decode latents, attend to prompts."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.adapters import vllm as plugin
from tests.adapters.contract import mismatches, snapshot
from tests.adapters.engines import Request, check, engine
from tests.adapters.oracle import attend

HEADS, RANK, ROPE, PAGE = 4, 32, 8, 16
#: Parameters of a layer's implementation that every backend has, self included, are the first ones.
PLACED = 10
READ = snapshot("vllm")["modules"]
LAYER = READ["vllm.model_executor.layers.attention.mla_attention"]
PREFILL = READ["vllm.v1.attention.backends.mla.prefill.base"]["MLAPrefillBackend"]
BASE = READ["vllm.v1.attention.backend"]


@pytest.fixture(scope="module")
def backend() -> Iterator[ModuleType]:
    with engine("vllm", "attnc.adapters.vllm.mla") as module:
        yield module


def test_signatures_are_those_of_the_wheel(backend: ModuleType) -> None:
    """A parameter that moved, a method that is wanted or gone: each by name."""
    theirs = {
        "AttncMLABackend": merged(BASE["AttentionBackend"], LAYER["MLACommonBackend"]),
        "AttncMLAMetadataBuilder": merged(
            BASE["AttentionMetadataBuilder"], LAYER["MLACommonMetadataBuilder"], made=True
        ),
        "AttncMLAImpl": merged(BASE["MLAAttentionImpl"], LAYER["MLACommonImpl"]),
        "AttncMLAPrefill": merged(PREFILL),
    }
    for name, members in theirs.items():
        assert mismatches(getattr(backend, name), members, f"vllm's base of {name}") == []


def merged(*classes: dict[str, Any], made: bool = False) -> dict[str, Any]:
    """A class that derives from others. made: its methods are no longer abstract."""
    members: dict[str, Any] = {}
    for one in classes:
        members |= one["members"]
    if classes[0] is BASE["AttentionBackend"]:  # vLLM's common class has these
        members["get_builder_cls"] = {**members["get_builder_cls"], "staticmethod": True}
    if classes[0] is BASE["MLAAttentionImpl"]:  # vLLM's layer passes sizes by name
        members["__init__"] = {
            "parameters": [
                [name, "*" if at > PLACED else kind, default]
                for at, (name, kind, default) in enumerate(members["__init__"]["parameters"])
            ]
        }
    if made:
        members = {name: {**what, "abstractmethod": False} for name, what in members.items()}
    return {"members": members}


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
    }
    ranks = changed.pop("dcp_world_size", 1)
    made = type("Impl", (backend.AttncMLAImpl,), {"dcp_world_size": ranks})
    return made(**given | changed)


@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize(("tokens", "causal"), [(1, True), (3, True), (3, False)])
def test_latents_are_written_and_decoded(backend: ModuleType, tokens: int, causal: bool, cache: str) -> None:
    """Single tokens, or as many drafts of each sequence; queries as one tensor or in two parts."""
    torch.manual_seed(0)
    impl, quantised = impl_of(backend, kv_cache_dtype=cache), cache != "auto"
    pool = torch.full((8, PAGE, RANK + ROPE), torch.nan, dtype=torch.bfloat16)
    if quantised:  # vLLM's caches of 8 bits are bytes; these are NaN
        pool = torch.full(pool.shape, 0x7F, dtype=torch.uint8)
    scale = torch.tensor(0.25)
    requests, free = [Request(), Request()], torch.randperm(8).tolist()
    for counts in ((20, 7), (tokens, tokens)):
        c, pe = (
            torch.randn(sum(counts) + 2, RANK).bfloat16(),
            torch.randn(sum(counts) + 2, 1, ROPE).bfloat16(),
        )
        rows = torch.cat([c, pe[:, 0]], -1)[:, None]
        if quantised:
            rows = (rows.float() / scale).to(torch.float8_e4m3fn).float() * scale
        slots: list[int] = []
        for request, own in zip(requests, torch.split(rows, [*counts, 2]), strict=False):
            slots += request.append(own, own[..., :RANK], PAGE, free)
        mapping = torch.tensor([*slots, -1, -1])
        impl.do_kv_cache_update(c, pe, pool, mapping, cache, scale, False)
    table = torch.full((2, 8), 1 << 20, dtype=torch.int32)
    for b, request in enumerate(requests):
        table[b, : len(request.pages)] = torch.tensor(request.pages)
    lengths = torch.tensor([request.length for request in requests], dtype=torch.int32)
    metadata = SimpleNamespace(
        causal=causal,
        query_start_loc=torch.arange(3, dtype=torch.int32) * tokens,
        decode=SimpleNamespace(block_table=table, seq_lens=lengths),
    )
    q = torch.randn(2 * tokens, HEADS, RANK + ROPE).bfloat16()
    latents = pool.view(torch.float8_e4m3fn) if quantised else pool
    layer = SimpleNamespace(_k_scale=scale)
    whole, lse = impl.forward_mqa(q, latents, metadata, layer)
    parts, _ = impl.forward_mqa(torch.split(q, [RANK, ROPE], -1), latents, metadata, layer)
    assert lse is None
    assert torch.equal(whole, parts)
    for request, own, o in zip(requests, torch.split(q, tokens), torch.split(whole, tokens), strict=True):
        check(o, own, request, scale=0.3, causal=causal)


def test_an_empty_cache_is_not_written(backend: ModuleType) -> None:
    """vLLM has none yet where it looks how much memory a step takes."""
    impl_of(backend).do_kv_cache_update(
        torch.zeros(1, RANK),
        torch.zeros(1, 1, ROPE),
        torch.tensor([]),
        torch.zeros(1),
        "auto",
        torch.ones(()),
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype: expected one of auto, .*, got 'fp8_e5m2'"),
        ({"attn_type": "encoder"}, "attn_type: expected a decoder's self-attention, got 'encoder'"),
        ({"sliding_window": 8}, "sliding_window: expected None, as it is not supported, got 8"),
        ({"alibi_slopes": [1.0]}, "alibi_slopes: expected None"),
        ({"logits_soft_cap": 3.0}, "logits_soft_cap: expected None"),
        ({"kv_sharing_target_layer_name": "first"}, "kv_sharing_target_layer_name: expected None"),
        ({"indexer": "sparse"}, "indexer: expected None, as it is not supported, got 'sparse'"),
        ({"dcp_world_size": 2}, "dcp_world_size: expected 1, as context parallelism is not supported"),
    ],
)
def test_what_a_layer_cannot_have_is_refused_by_name(
    backend: ModuleType, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        impl_of(backend, **changed)


def test_queries_keep_their_bits(backend: ModuleType) -> None:
    assert impl_of(backend, kv_cache_dtype="fp8").supports_quant_query_input is False


def test_what_vllm_asks_of_the_backend(backend: ModuleType) -> None:
    ours = backend.AttncMLABackend
    assert ours.get_name() == "ATTNC_MLA"
    assert ours.get_impl_cls() is backend.AttncMLAImpl
    assert ours.get_builder_cls() is backend.AttncMLAMetadataBuilder
    assert [size.base for size in ours.get_supported_kernel_block_sizes()] == [16]
    assert [ours.supports_head_size(size) for size in (320, 512, 576, 580, 640)] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert ours.supports_compute_capability(SimpleNamespace(major=8, minor=0))
    rest = (None, True, False, False, False, None)
    assert ours.supports_combination(576, torch.bfloat16, "auto", *rest) is None
    assert ours.supports_combination(576, torch.bfloat16, "fp8", *rest) is None
    ampere = SimpleNamespace(major=8, minor=0)
    said = ours.supports_combination(576, torch.bfloat16, "fp8", *rest[:-1], ampere)
    assert "needs compute capability 8.9 or newer, and this GPU has 8.0" in said
    said = ours.supports_combination(576, torch.float16, "bfloat16", *rest)
    assert said == "kv_cache_dtype bfloat16 with a model of torch.float16"
    prefill = backend.AttncMLAPrefill
    assert prefill.get_name() == "CUSTOM"
    dimensions = sys.modules["vllm.v1.attention.backends.mla.prefill.base"].MLADimensions
    for nope, rope, value, fits in ((128, 64, 128, True), (192, 64, 256, True), (192, 72, 128, False)):
        wanted = dimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value)
        assert prefill.supports_mla_dimensions(wanted) is fits
    assert prefill.supports_compute_capability(None)
    assert not prefill.supports_compute_capability(SimpleNamespace(major=7, minor=5))


def test_prompts_and_chunks_of_their_contexts(backend: ModuleType) -> None:
    """New tokens among each other, then a chunk that one sequence has no keys in."""
    torch.manual_seed(0)
    prefill = backend.AttncMLAPrefill(HEADS, 0.3, RANK, 16, ROPE, 16, None)
    assert prefill.supports_out()
    counts, context = [7, 4], [0, 9]
    ends = torch.tensor([0, 7, 11], dtype=torch.int32)
    prefill._prefill_metadata = SimpleNamespace(query_start_loc=ends)
    chunk = SimpleNamespace(query_start_loc=ends, cu_seq_lens=torch.tensor([0, 0, 9], dtype=torch.int32))
    for own, causal in ((counts, True), (context, False)):
        q, k = torch.randn(11, HEADS, 24).bfloat16(), torch.randn(sum(own), HEADS, 24).bfloat16()
        v = torch.randn(sum(own), HEADS, 32).bfloat16()[..., 16:]
        parts = (torch.split(q, counts), torch.split(k, own), torch.split(v, own))
        expected = [attend(*rows, scale=0.3, causal=causal) for rows in zip(*parts, strict=True)]
        wanted = torch.cat([o for o, _ in expected]), torch.cat([lse for _, lse in expected]).mT
        out = torch.full((11, HEADS, 16), torch.nan).bfloat16()
        if causal:
            plain = prefill.run_prefill_new_tokens(q, k, v, False)
            found = prefill.run_prefill_new_tokens(q, k, v, True, out=out)
            assert torch.equal(plain, found[0])
        else:
            found = prefill.run_prefill_context_chunk(chunk, q, k, v, out=out)
        assert found[0] is out
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=2e-2)


def test_prompts_of_8_bits_are_refused(backend: ModuleType) -> None:
    prefill = backend.AttncMLAPrefill(HEADS, 0.3, RANK, 16, ROPE, 16, None)
    q = torch.zeros(1, HEADS, 24)
    with pytest.raises(ValueError, match="output_scale: expected None, as it is not supported, got a tensor"):
        prefill.run_prefill_new_tokens(q, q, q, False, output_scale=torch.ones(1))


class Names:
    """As much of AttentionBackendEnum as the plug-in uses: names that can be added."""

    def __init__(self) -> None:
        self.__members__: dict[str, Any] = {"CUSTOM": Member(self, "CUSTOM")}

    @property
    def CUSTOM(self) -> Any:
        return self.__members__["CUSTOM"]

    def __getitem__(self, name: str) -> Any:
        return self.__members__[name]


class Member:
    def __init__(self, names: Names, name: str, path: str | None = None) -> None:
        self.name, self.path = name, path

    def is_overridden(self) -> bool:
        return self.path is not None

    def get_path(self) -> str | None:
        return self.path


def test_a_process_that_is_sent_the_backend_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations are pickled to processes that have not loaded plug-ins."""
    with engine("vllm", "attnc.adapters.vllm.mla") as module:
        assert f"{module.__name__}.{module.AttncMLABackend.__name__}" == plugin.LATENT_BACKEND
        assert f"{module.__name__}.{module.AttncMLAPrefill.__name__}" == plugin.PREFILL_BACKEND
        names = sys.modules["vllm.v1.attention.backends.registry"]

        def register_backend(backend: Any, path: str) -> None:
            if isinstance(backend, str):
                registry.__members__[backend] = Member(registry, backend, path)
            else:
                backend.path = path

        monkeypatch.setattr(names, "register_backend", register_backend)
        registry = Names()
        monkeypatch.setattr(names, "AttentionBackendEnum", registry)
        sent = pickle.dumps(plugin.latent_backend())
        assert plugin.latent_backend() is registry["ATTNC_MLA"]
        registry = Names()
        monkeypatch.setattr(names, "AttentionBackendEnum", registry)
        found = pickle.loads(sent)
        assert found is registry["ATTNC_MLA"]
        assert found.path == plugin.LATENT_BACKEND
