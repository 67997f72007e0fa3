"""Models of transformers on a GPU: random weights and greedy tokens, which are those of `eager`."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from attnc.adapters.transformers import register
from attnc.cli import main
from attnc.compat import export

transformers = pytest.importorskip("transformers", minversion="5.0", reason="has the models")

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GEMMA = {"sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20}
_GPT_OSS = {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1}
MODELS = [("Llama", {}), ("Gemma2", _GEMMA), ("GptOss", _GPT_OSS)]


@torch.no_grad()
def tokens(name: str, more: dict[str, Any], implementation: str, dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    kind = getattr(transformers, f"{name}ForCausalLM")
    made = kind._from_config(config, dtype=dtype, attn_implementation=implementation).eval().cuda()
    assert made.config._attn_implementation == implementation
    prompt = torch.randint(2, 128, (2, 19), generator=torch.Generator().manual_seed(1)).cuda()
    kept = torch.ones_like(prompt)
    if options.pop("is_padded", False):
        kept[1, :7] = 0
    return made.generate(prompt, attention_mask=kept, max_new_tokens=24, do_sample=False, **options)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(("name", "more"), MODELS, ids=lambda x: x if isinstance(x, str) else "")
def test_the_adapter_gives_the_tokens_of_eager(name: str, more: dict[str, Any], is_padded: bool) -> None:
    register()
    found = [tokens(name, more, how, torch.float32, is_padded=is_padded) for how in ("attnc", "eager")]
    assert found[0].shape == (2, 43)
    assert torch.equal(*found)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The package that `attnc export` writes, with the forms that these models call."""
    path = tmp_path_factory.mktemp("export") / "kernels"
    wanted = [
        form for form in export.forms(["f16"], [32]) if form.causal and not form.grads and not form.page
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "forms", lambda dtypes, sizes: iter(wanted))
        assert main(["export", "--hf-kernel", str(path), "--sizes", "32", "--dtypes", "f16"]) == 0
    init = path / "build" / "torch-universal" / "attnc" / "__init__.py"
    spec = importlib.util.spec_from_file_location("exported_for_models", init)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "more"), MODELS, ids=lambda x: x if isinstance(x, str) else "")
def test_exported_kernels_give_the_tokens_of_eager(
    name: str, more: dict[str, Any], exported: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers fetches from the hub what is here handed to it."""
    hub = pytest.importorskip("transformers.integrations.hub_kernels")
    monkeypatch.setattr(hub, "is_kernels_available", lambda *args, **options: True)
    monkeypatch.setattr(hub, "get_kernel", lambda *args, **options: exported)
    found = [tokens(name, more, how, torch.float16) for how in ("attnc/kernels", "eager")]
    assert torch.equal(*found)
