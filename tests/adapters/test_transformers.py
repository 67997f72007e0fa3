"""The implementation for transformers: logits and generated tokens equal those of `eager`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.adapters.transformers import attention, mask, register

transformers = pytest.importorskip(
    "transformers", minversion="5.0", reason="transformers is an optional extra; it is not among the pins"
)

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def llama(implementation: str) -> Any:
    return model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES), implementation)


def model(kind: Any, config: Any, implementation: str) -> Any:
    """Random weights, the same for every implementation."""
    torch.manual_seed(0)
    made = kind(config).eval()
    made.set_attn_implementation(implementation)
    return made


def prompt(batch: int = 2, length: int = 19) -> torch.Tensor:
    return torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(1))


def padded(*lengths: int, side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention_mask) of prompts that are padded to the longest."""
    ids, longest = prompt(len(lengths), max(lengths)), max(lengths)
    index = torch.arange(longest)
    edge = torch.tensor(lengths)[:, None]
    kept = index >= longest - edge if side == "left" else index < edge
    return torch.where(kept, ids, 0), kept.long()


@torch.no_grad()
def test_logits() -> None:
    ours, eager = (llama(name)(prompt()).logits for name in ("attnc", "eager"))
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_padded_prompts(side: str) -> None:
    ids, kept = padded(19, 7, 12, side=side)
    ours, eager = (llama(name)(ids, attention_mask=kept).logits for name in ("attnc", "eager"))
    torch.testing.assert_close(ours[kept.bool()], eager[kept.bool()], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampled"]
)
def test_generate(options: dict[str, Any], cache: str) -> None:
    ids, kept = padded(11, 6)
    tokens = []
    for name in ("attnc", "eager"):
        torch.manual_seed(3)
        made = llama(name)
        made.generation_config.disable_compile = True
        tokens.append(
            made.generate(ids, attention_mask=kept, max_new_tokens=12, cache_implementation=cache, **options)
        )
    assert torch.equal(*tokens)
    assert tokens[0].shape == (2, 23)


@torch.no_grad()
def test_generate_with_a_sliding_window() -> None:
    config = transformers.MistralConfig(**SIZES, sliding_window=8)
    ids, kept = padded(14, 9)
    tokens = [
        model(transformers.MistralForCausalLM, config, name).generate(
            ids, attention_mask=kept, max_new_tokens=10
        )
        for name in ("attnc", "eager")
    ]
    assert torch.equal(*tokens)


@torch.no_grad()
def test_softcap_and_two_kinds_of_layers() -> None:
    sizes = {**SIZES, "head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0}
    config = transformers.Gemma2Config(**sizes, query_pre_attn_scalar=16)
    ours, eager = (
        model(transformers.Gemma2ForCausalLM, config, name)(prompt()).logits for name in ("attnc", "eager")
    )
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_chunks_of_a_prompt() -> None:
    """A cache that holds keys already: the last query stands at the last key."""
    made, ids = llama("attnc"), prompt()
    first = made(ids[:, :8], use_cache=True)
    rest = made(ids[:, 8:], past_key_values=first.past_key_values)
    expected = llama("eager")(ids).logits
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_holes_in_a_mask_are_refused() -> None:
    kept = torch.ones(2, 19).long()
    kept[1, 4] = 0
    with pytest.raises(ValueError, match="attention_mask: expected one run of ones in every row"):
        llama("attnc")(prompt(), attention_mask=kept)


@torch.no_grad()
def test_masks_of_ones_own_are_refused() -> None:
    own = torch.zeros(2, 1, 19, 19)
    with pytest.raises(ValueError, match=r"attention_mask: expected .*, got a tensor \[2, 1, 19, 19\]"):
        llama("attnc")(prompt(), attention_mask=own)


def test_other_mask_functions_are_refused() -> None:
    def every_second(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (kv_idx % 2 == 0)

    config = transformers.MistralConfig(**SIZES, sliding_window=8)
    with pytest.raises(ValueError, match=r"config's sliding_window = 8, got .*every_second"):
        mask(2, 9, 9, mask_function=every_second, config=config)


def test_packed_prompts_are_refused() -> None:
    """Positions that start again: transformers makes them a mask of documents, which is no band."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with torch.no_grad(), pytest.raises(ValueError, match="mask_function: expected a causal mask"):
        llama("attnc")(prompt(1, 8), position_ids=positions, use_cache=False)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attention_mask": None}, "attention_mask: expected what the mask function .*, got None"),
        ({"dropout": 0.1}, "dropout: expected None, as it is not supported, got 0.1"),
        ({"output_attentions": True}, "output_attentions: expected None"),
        ({"is_causal": False}, "is_causal: expected True, got False"),
        ({"position_bias": torch.zeros(1)}, r"position_bias: expected None, .*, got a tensor \[1\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused(changed: dict[str, Any], said: str) -> None:
    q, k, v = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    arguments: dict[str, Any] = {"query": q, "key": k, "value": v, "attention_mask": mask(1, 5, 5)}
    with pytest.raises(ValueError, match=said):
        attention(torch.nn.Module(), **arguments | changed)


@pytest.mark.parametrize("window", [None, 6])
def test_gradients(window: int | None) -> None:
    """A training step on padded prompts: the loss and the gradient of every weight."""
    ids, kept = padded(19, 7, side="right")
    labels = torch.where(kept.bool(), ids, -100)
    kind, config = transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES)
    if window is not None:
        kind, config = (
            transformers.MistralForCausalLM,
            transformers.MistralConfig(**SIZES, sliding_window=window),
        )
    found = []
    for name in ("attnc", "eager"):
        made = model(kind, config, name).train()
        loss = made(ids, attention_mask=kept, labels=labels).loss
        loss.backward()
        found.append((loss, [weight.grad for weight in made.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
