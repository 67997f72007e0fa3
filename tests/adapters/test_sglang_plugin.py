"""SGLang's backend: it fits the signatures of the published wheel, and serves requests as a runner asks."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.adapters import sglang as plugin
from tests.adapters.contract import mismatches
from tests.adapters.engines import Request, check, engine
from tests.adapters.sglang_runner import (
    BASE,
    GROUP,
    HEADS,
    READ,
    SIZE,
    Mode,
    Pool,
    Runner,
    WriteLocation,
    layer_of,
)


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


def test_what_stands_in_for_sglang_fits_it_too() -> None:
    modules = READ["sglang.srt.mem_cache.memory_pool"], READ["sglang.srt.model_executor.forward_batch_info"]
    assert mismatches(Pool, modules[0]["MHATokenToKVPool"], "sglang's pool") == []
    assert mismatches(WriteLocation, modules[0]["KVWriteLoc"], "sglang's KVWriteLoc") == []
    assert mismatches(Mode, modules[1]["ForwardMode"], "sglang's ForwardMode") == []


@pytest.fixture(autouse=True)
def write_locations(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "KVWriteLoc", WriteLocation)


@pytest.mark.one_in(2)
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


@pytest.mark.one_in(6)
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


DETERMINISTIC = SimpleNamespace(enable_deterministic_inference=True)


def test_deterministic_inference_is_asked_of_kernels(backend: ModuleType) -> None:
    runner = Runner(backend, server_args=DETERMINISTIC)
    assert runner.backend.order == 2048
    request = Request()
    runner.step([(request, 5)], "EXTEND")
    runner.step([(request, 1)], "DECODE")
    assert Runner(backend).backend.order == 0


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
        deterministic: list[list[str]] = [[], []]
        for name, allowed in zip(plugin._DETERMINISTIC, deterministic, strict=True):
            monkeypatch.setattr(choices, name, allowed, raising=False)
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
        assert deterministic == [["attnc"], ["attnc"]]
        runner = Runner(module)
        assert isinstance(runner.backend, module.AttncAttnBackend)
        given = SimpleNamespace(**runner.given)
        assert isinstance(made["attnc"](given), module.AttncAttnBackend)
        assert methods == {}
        latent = SimpleNamespace(**runner.given | {"use_mla_backend": True, "kv_cache_dtype": torch.bfloat16})
        ordered = made["attnc"](SimpleNamespace(**vars(latent) | {"server_args": DETERMINISTIC}))
        assert (ordered.is_latent, ordered.order) == (True, 2048)
        assert methods == {}  # SGLang's own, which attends to latents in such a server
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
