"""An attention for transformers: causal, sliding windows, padding, softcap, sinks; inference and training.

    from attnc.adapters.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnc")

`register` gives the attention function and the mask function one name: without the latter transformers
drops the mask. The mask function proves that a model's mask is a band (keys first .. last - 1, none after the
query, a window before it) and hands it to the attention function, which takes no other mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from attnc.adapters.specs import Kernel, Wanted, dtype_of, kernel, number_of, refuse

MaskFunction: TypeAlias = Callable[..., torch.Tensor]

_BAND = "attnc_band"

#: What models pass on that no implementation of attention computes with, or that the mask has dealt with.
_WITHOUT_EFFECT = frozenset(
    (
        "cache_position",
        "is_causal",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    )
)


@dataclass(frozen=True, slots=True)
class Band:
    """Row q_idx of M sees the keys first[b] .. last[b] - 1, none after q_pos = q_idx + stop[b] - M and, with
    a window, at most `window` before q_pos. first, last, stop: i32[B].
    """

    first: torch.Tensor
    last: torch.Tensor
    stop: torch.Tensor
    window: int | None


def register(name: str = "attnc") -> None:
    """Makes `attn_implementation=name` known to transformers (5.0 or newer, which must be installed)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    device: torch.device | str = "cpu",
    **rest: object,
) -> torch.Tensor:
    """Returns the band of a forward pass, attached to a tensor [B, 1, 1, 1] of NaN that carries it to the
    attention.

    mask_function: causal, or equal to causal or to the config's sliding window at every one of the indices.
    attention_mask: [B, keys] with one run of ones in a row: padding on the left, on the right, or on both.
    ValueError for any other. One wait for the device, as for transformers' own masks.
    """
    stop = (torch.as_tensor(q_offset, device=device) + q_length - kv_offset).expand(batch_size)
    window = _window(mask_function, config, batch_size, (q_length, kv_length), (q_offset, kv_offset), device)
    first, last = torch.zeros_like(stop), stop
    if attention_mask is not None:
        first, last = _run_of_ones(attention_mask[:, kv_offset : kv_offset + kv_length].bool(), stop)
    # A consumer that does not know the band adds NaN and is seen to fail.
    carrier = torch.full((batch_size, 1, 1, 1), torch.nan, device=device)
    setattr(
        carrier,
        _BAND,
        Band(first.int().contiguous(), last.int().contiguous(), stop.int().contiguous(), window),
    )
    return carrier


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **rest: object,
) -> tuple[torch.Tensor, None]:
    """Returns (o: [B, M, Hq, D], None) of query [B, Hq, M, D] and key, value [B, Hkv, N, D], all of float16,
    bfloat16 or float32.

    scaling: 1 / sqrt(D) if None; s_aux: [Hq], a logit for each head that joins the denominator.
    Rows that see no key (padding on the left) are 0. Raises ValueError or TypeError that names the argument,
    what was expected and what came: a mask that `mask` has not made, dropout, weights to return, unknown
    arguments.
    """
    band = getattr(attention_mask, _BAND, None)
    if not isinstance(band, Band):
        came = "None" if attention_mask is None else f"a tensor {list(attention_mask.shape)}"
        raise ValueError(f"attention_mask: expected what the mask function of this name returned, got {came}")
    refuse("attention", dropout=dropout, output_attentions=rest.get("output_attentions"))
    if rest.get("is_causal") is False:
        raise ValueError("attention: is_causal: expected True, got False")
    refuse("attention", **{name: rest[name] for name in rest if name not in _WITHOUT_EFFECT})
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    made = _kernel(
        dtype_of("query", query),
        query.shape[-1],
        number_of("attention: scaling", scaling, query.shape[-1] ** -0.5),
        band.window,
        number_of("attention: softcap", softcap, 0.0),
        s_aux is not None,
        gradients,
        query.shape[2] == 1 and not gradients,
    )
    sinks = () if s_aux is None else (s_aux.float(),)
    o: torch.Tensor = made(query, key, value, band.first, band.last, band.stop, *sinks)
    return o, None


@lru_cache(maxsize=256)
def _kernel(
    dtype: torch.dtype,
    head_dim: int,
    scale: float,
    window: int | None,
    softcap: float,
    sinks: bool,
    gradients: bool,
    decode: bool,
) -> Kernel:
    seen = "first[b] <= kv_idx < last[b] and kv_idx <= q_pos"
    return kernel(
        Wanted(
            name="transformers_attention",
            dtype=dtype,
            head_dim=head_dim,
            scale=scale,
            q="[B, Hkv * G, M, D]",
            kv="[B, Hkv, N, D]",
            o="[B, M, Hkv * G, D]",
            inputs=("first, last, stop: i32[B]",),
            length="stop",
            mask=seen if window is None else f"{seen} and q_pos - {window} <= kv_idx",
            softcap=softcap,
            sink="s_aux" if sinks else "",
            grad=(("q", "k", "v", "s_aux") if sinks else ("q", "k", "v")) if gradients else (),
            decode=decode,
        )
    )


def _run_of_ones(kept: torch.Tensor, stop: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first key of [B, N] that is kept and one past the last, before `stop`. ValueError for
    holes.
    """
    index = torch.arange(kept.shape[1], device=kept.device)
    kept = kept & (index < stop[:, None])
    count = kept.sum(1)
    first = torch.where(count > 0, kept.int().argmax(1), stop)
    last = torch.where(kept, index + 1, 0).amax(1)
    if kept.shape[1] and not bool(((last - first == count) | (count == 0)).all()):
        raise ValueError(
            "attention_mask: expected one run of ones in every row, got ones on both sides of zeros"
        )
    return first, last


def _window(
    function: MaskFunction | None,
    config: Any,
    batch: int,
    lengths: tuple[int, int],
    offsets: tuple[int | torch.Tensor, int],
    device: torch.device | str,
) -> int | None:
    """Returns how many keys before its own a query sees, None for all. Raises ValueError if the function is
    neither mask.
    """
    from transformers.masking_utils import causal_mask_function

    if function is None or function is causal_mask_function:
        return None
    b = torch.arange(batch, device=device)[:, None, None, None]
    q_idx = (torch.arange(lengths[0], device=device) + offsets[0])[:, None]
    kv_idx = (torch.arange(lengths[1], device=device) + offsets[1])[None, :]
    found = function(b, torch.zeros_like(b), q_idx, kv_idx)
    causal = kv_idx <= q_idx
    if bool((found == causal).all()):
        return None
    window = getattr(config, "sliding_window", None)
    if window is not None and bool((found == (causal & (kv_idx > q_idx - window))).all()):
        return int(window) - 1
    raise ValueError(
        f"mask_function: expected a causal mask, or one with the config's sliding_window = {window}, got"
        f" {getattr(function, '__qualname__', function)}"
    )
