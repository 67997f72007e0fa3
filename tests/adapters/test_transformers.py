"""The implementation for transformers: logits and generated tokens equal those of `eager`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.adapters.transformers import attention, mask, register
from tests.adapters.dropout import keep_weights

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


NO_BAND = pytest.mark.filterwarnings("ignore:attnc. no tile is skipped")


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


@pytest.mark.one_in(2)
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
@NO_BAND
def test_generate_with_a_hole_and_a_static_cache() -> None:
    """The mask ends where the prompt does, the cache does not."""
    ids, kept = padded(11, 6)
    kept[0, 4] = 0
    tokens = []
    for name in ("attnc", "eager"):
        made = llama(name)
        made.generation_config.disable_compile = True
        tokens.append(
            made.generate(ids, attention_mask=kept, max_new_tokens=5, cache_implementation="static")
        )
    assert torch.equal(*tokens)


def test_training_under_autocast() -> None:
    """Weights stay in 32 bits, and so do queries and keys behind rotary embeddings, but not values."""
    found = []
    for name in ("attnc", "sdpa"):
        made = llama(name).train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = made(prompt(), labels=prompt()).loss
        loss.backward()
        found.append([loss, *(x.grad for x in made.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=2e-3)


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
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # from 5.24 on `cache`, unknown before
def test_chunks_of_a_prompt() -> None:
    """A cache that holds keys already: the last query stands at the last key."""
    made, ids = llama("attnc"), prompt()
    first = made(ids[:, :8], use_cache=True)
    rest = made(ids[:, 8:], past_key_values=first.past_key_values)
    expected = llama("eager")(ids).logits
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@NO_BAND
def test_masks_that_are_no_band_are_looked_up() -> None:
    """Holes, positions that start again, of which transformers makes documents, and masks of one's own."""
    kept = torch.ones(2, 19).long()
    kept[1, 4] = 0
    own = torch.rand(2, 1, 19, 19, generator=torch.Generator().manual_seed(2)) > 0.3
    own[..., 0] = True
    added = torch.where(own, 0.0, torch.finfo(torch.float32).min)
    packed = torch.tensor([[*range(8), *range(11)]])
    for options, of_eager in (
        ({"attention_mask": kept}, {}),
        ({"attention_mask": own}, {"attention_mask": added}),  # eager adds bools as numbers
        ({"attention_mask": added}, {}),
        ({"position_ids": packed.expand(2, -1), "use_cache": False}, {}),
    ):
        ours = llama("attnc")(prompt(), **options).logits
        eager = llama("eager")(prompt(), **options | of_eager).logits
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_a_mask_that_is_no_band_warns() -> None:
    def every_second(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (kv_idx % 2 == 0)

    with pytest.warns(UserWarning, match="no tile is skipped for a mask of transformers"):
        found = mask(2, 9, 9, mask_function=every_second)
    assert (found.shape, found.dtype) == ((2, 1, 9, 9), torch.bool)


@pytest.mark.parametrize(
    ("function", "ends"),
    [
        ("causal_mask_function", (None, 0)),
        ("bidirectional_mask_function", (None, None)),
        (("sliding_window_causal_mask_function", 4), (3, 0)),
        (("sliding_window_causal_mask_function", 40), (None, 0)),
        (("sliding_window_bidirectional_mask_function", 4), (4, 4)),
        (("sliding_window_bidirectional_mask_function", 40), (None, None)),
    ],
)
def test_ends_of_bands(function: str | tuple[str, int], ends: tuple[int | None, int | None]) -> None:
    from transformers import masking_utils

    made = (
        getattr(masking_utils, function)
        if isinstance(function, str)
        else getattr(masking_utils, function[0])(function[1])
    )
    band: Any = getattr(mask(2, 9, 9, mask_function=made), "attnc_band", None)
    assert (band.left, band.right) == ends


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attention_mask": None}, "attention_mask: expected what .*, got None for a module that is causal"),
        ({"dropout": 1.0}, "dropout: expected at least 0 and less than 1, got 1.0"),
        ({"output_attentions": True}, "output_attentions: expected None"),
        (
            {"position_bias": torch.zeros(1)},
            r"position_bias: expected shape \[any, any, any, any\], got \[1\]",
        ),
        ({"alibi": torch.zeros(1)}, r"alibi: expected None, .*, got a tensor \[1\]"),
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


def draw_by_eager(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, **rest: Any
) -> tuple[torch.Tensor, None]:
    """What `eager` computes, with the mask of dropout that kernels draw."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    weights = torch.softmax(scores if attention_mask is None else scores + attention_mask, -1)
    if dropout:
        seed = int(torch.randint(1 << 62, ()))
        weights = weights * keep_weights(dropout, seed, weights.shape) / (1 - dropout)
    return (weights @ value).transpose(1, 2).contiguous(), None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_dropout_in_training(name: str) -> None:
    """Loss and gradients are those of `eager` with the same mask; a seed repeats them, with activations
    computed again too; another seed does not.
    """
    from transformers.masking_utils import eager_mask

    transformers.AttentionInterface.register("eager_of_seeds", draw_by_eager)
    transformers.AttentionMaskInterface.register("eager_of_seeds", eager_mask)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    config = transformers.GPT2Config(**sizes, **ENDS) if "GPT" in name else transformers.BertConfig(**HEADS)
    ids, kept = padded(19, 7, side="right")

    def step(implementation: str, seed: int = 0, *, again: bool = False) -> list[torch.Tensor]:
        made = made_of(name, config, implementation).train()
        if again:  # of names in turn, the second of older releases
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            next(getattr(made, name) for name in names if hasattr(made, name))()
        torch.manual_seed(seed)
        loss = made(ids, attention_mask=kept, labels=torch.where(kept.bool(), ids, -100)).loss
        loss.backward()
        return [loss.detach(), *(weight.grad for weight in made.parameters() if weight.grad is not None)]

    ours = step("attnc")
    torch.testing.assert_close(ours, step("eager_of_seeds"), rtol=1e-3, atol=1e-5)
    assert all(map(torch.equal, ours, step("attnc")))
    torch.testing.assert_close(ours, step("attnc", again=True), rtol=1e-4, atol=1e-6)
    assert not torch.equal(ours[0], step("attnc", 1)[0])


# --- encoders, and what is between them and decoders --------------------------------------------------------

HEADS: dict[str, Any] = {
    name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
}
HEADS |= {"num_attention_heads": 4, "vocab_size": 128}
PICTURE: dict[str, Any] = {**HEADS, "image_size": 32, "patch_size": 8}
PAIR: dict[str, Any] = {
    "vocab_size": 128,
    "d_model": 64,
    **{
        f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 96))
    },
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
}
ENDS: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "cls_token_id": 1,
    "sep_token_id": 1,
}


def made_of(name: str, config: Any, implementation: str) -> Any:
    """Random weights; the implementation is given at once, since parts of some models copy the config."""
    torch.manual_seed(0)
    return getattr(transformers, name)._from_config(config, attn_implementation=implementation).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Bert", HEADS),
        ("Roberta", HEADS),
        ("LayoutLM", HEADS),
        ("ModernBert", {**HEADS, **ENDS, "local_attention": 8}),
        ("ViT", PICTURE),
        ("SiglipVision", PICTURE),
    ],
)
def test_encoders(name: str, sizes: dict[str, Any]) -> None:
    config = getattr(transformers, f"{name}Config")(**sizes)
    found = []
    for implementation in ("attnc", "eager"):
        made = made_of(f"{name}Model", config, implementation)
        if "image_size" in sizes:
            pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
            found.append(made(pixels).last_hidden_state)
        else:
            ids, kept = padded(19, 7, side="right")
            found.append(made(ids, attention_mask=kept).last_hidden_state[kept.bool()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Whisper", "Bart"])
def test_attention_between_encoder_and_decoder(name: str) -> None:
    more = {"max_source_positions": 20, "num_mel_bins": 16} if name == "Whisper" else {}
    config = getattr(transformers, f"{name}Config")(**PAIR, max_position_embeddings=64, **more)
    heard = torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(1))
    ids, kept = padded(19, 7, side="right")
    inputs = {"input_features": heard} if more else {"input_ids": ids, "attention_mask": kept}
    ours, eager = (
        made_of(f"{name}Model", config, implementation)(**inputs, decoder_input_ids=ids[:, :7])
        for implementation in ("attnc", "eager")
    )
    torch.testing.assert_close(ours.last_hidden_state, eager.last_hidden_state, rtol=1e-4, atol=1e-5)


def test_t5_trains_and_generates() -> None:
    """Its bias of relative positions is learned, and added to scores that are not scaled."""
    sizes = {"d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = transformers.T5Config(
        vocab_size=128, d_model=64, decoder_start_token_id=0, pad_token_id=0, **sizes
    )
    ids, kept = padded(19, 7, side="right")
    found, tokens = [], []
    for implementation in ("attnc", "eager"):
        made = made_of("T5ForConditionalGeneration", config, implementation)
        assert made.encoder.config._attn_implementation == implementation
        loss = made(input_ids=ids, attention_mask=kept, labels=ids[:, :7].clone()).loss
        loss.backward()
        found.append((loss, [weight.grad for weight in made.parameters()]))
        tokens.append(made.generate(ids, attention_mask=kept, max_new_tokens=5))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
    assert torch.equal(*tokens)


@torch.no_grad()
def test_sinks_of_16_bits() -> None:
    sizes = {**SIZES, "head_dim": 16, "num_local_experts": 1, "num_experts_per_tok": 1, "sliding_window": 8}
    config = transformers.GptOssConfig(**sizes)
    ours, eager = (
        made_of("GptOssModel", config, implementation).bfloat16()(prompt()).last_hidden_state
        for implementation in ("attnc", "eager")
    )
    torch.testing.assert_close(ours, eager, rtol=0, atol=0.07)  # two roundings of bf16 at 4
