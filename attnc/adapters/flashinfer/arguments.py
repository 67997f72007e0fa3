"""What the arguments of FlashInfer's functions say: types, scales, masks and slopes. TypeError and ValueError
name the argument, what was expected and what came.
"""

from __future__ import annotations

import math
from operator import index
from typing import Any, TypeAlias

import torch

from attnc.adapters.specs import NARROW, expand_scales, made_for, number_of, refuse
from attnc.diagnostics.shown import show_value

DType: TypeAlias = str | torch.dtype

LOG2E = 1 / math.log(2)
LN2 = math.log(2)

#: Whose arguments mean what they mean here; "cudnn" counts elements where others count rows.
_BACKENDS = (
    "auto",
    "fa2",
    "fa3",
    "cutlass",
    "cutile",
    "trtllm-gen",
    "xqa",
    "cute-dsl",
    "cute-dsl-monolithic",
    "cute-dsl-modular",
)


def check_backend(function: str, backend: str, *others: str) -> None:
    """Takes the name of a backend, which steers FlashInfer's own kernels. ValueError for one whose arguments
    have another meaning. others: that this function has besides
    """
    known = (*_BACKENDS, *others)
    if backend not in known:
        raise ValueError(f"{function}: backend: expected one of {', '.join(known)}, got {backend!r}")


def check_layout(kv_layout: str) -> str:
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: expected 'NHD' or 'HND', got {kv_layout!r}")
    return kv_layout


def check_integer(name: str, value: Any, least: int) -> int:
    """Returns an integer. TypeError for what is none, ValueError below `least`."""
    try:
        found = None if isinstance(value, bool) else index(value)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"{name}: expected an integer, got {show_value(value)}")
    if found < least:
        raise ValueError(f"{name}: expected at least {least}, got {found}")
    return found


def check_heads(num_qo_heads: Any, num_kv_heads: Any) -> tuple[int, int]:
    """Returns the heads of q and of K and V. ValueError where these do not divide those."""
    heads = check_integer("plan: num_qo_heads", num_qo_heads, 1)
    shared = check_integer("plan: num_kv_heads", num_kv_heads, 1)
    if heads % shared:
        raise ValueError(f"plan: num_qo_heads: expected a multiple of num_kv_heads, {shared}, got {heads}")
    return heads, shared


def choose_dtypes(
    planned: DType, kv: DType | None, o: DType | None
) -> tuple[torch.dtype, torch.dtype | None]:
    """Returns the dtype of q and o, and that of K and V where it has 8 bits. TypeError for one that no kernel
    has queries of, ValueError where they are to differ otherwise.
    """
    given = (planned, kv or planned, o or planned)
    names = ("plan: q_data_type", "plan: kv_data_type", "plan: o_data_type")
    made = [to_dtype(name, x) for name, x in zip(names, given, strict=True)]
    found = made_for(names[0], made[0])
    cached = next((dtype for dtype in NARROW if dtype == made[1]), None)
    cache = cached if found in (torch.float16, torch.bfloat16) else None
    for name, dtype in zip(names[1:], made[1:], strict=True):
        if dtype != found and not (name == names[1] and dtype is cache):
            raise ValueError(f"{name}: expected {found}, like q_data_type, got {dtype}")
    return found, cache


def to_dtype(name: str, given: DType) -> torch.dtype:
    """Returns a dtype by its name or as it is. TypeError for what is none."""
    found = getattr(torch, given, given) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name}: expected a dtype, got {given!r}")
    return found


def choose_scale(function: str, sm_scale: float | None, head_dim: int) -> float:
    """Returns the scale of the score, 1 / sqrt(head_dim) for None."""
    return number_of(f"{function}: sm_scale", sm_scale, head_dim**-0.5)


def combine_scales(
    function: str,
    shape: tuple[int, int],
    one: torch.Tensor,
    *,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    always: bool,
) -> dict[str, torch.Tensor]:
    """Returns the factors of the score and of the values, f32 that expands to [B, Hkv]: k_scale, multiplied
    by q_scale, and v_scale. There are none if all are None or 1, unless `always`. one: f32 1 on the device,
    for those that are None.
    """
    given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    if not always and all(not isinstance(x, torch.Tensor) and x in (None, 1) for x in given.values()):
        return {}
    q, k, v = (
        expand_scales(f"{function}: {name}", one if x is None else x, shape, one.device).float()
        for name, x in given.items()
    )
    return {"k_scale": k if q_scale is None else k * q, "v_scale": v}


def write_position_terms(function: str, mode: str, softcap: float, **rope: object) -> tuple[str, ...]:
    """Returns the terms of the score that depend on positions: none, or ALiBi's slopes, as FlashInfer counts
    them from the first query and the first key. ValueError if q and K are to be rotated inside of attention.
    """
    if mode not in ("NONE", "ALIBI"):
        raise ValueError(f"{function}: pos_encoding_mode: expected 'NONE' or 'ALIBI', got {mode!r}")
    refuse(function, **rope)
    if mode == "NONE":
        return ()
    if softcap > 0:
        raise ValueError(f"{function}: logits_soft_cap: expected 0 beside 'ALIBI', got {softcap!r}")
    return ("alibi_slopes[h] * (kv_idx - q_idx)",)


def compute_alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Returns f32[H]: powers of 2^(-8 / n) for the largest power of two n, then every other power of
    2^(-4 / n) (ALiBi; Press et al. 2022, arXiv 2108.12409).
    """
    n = 1 << (heads.bit_length() - 1)
    first = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    rest = [2 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)]
    return torch.tensor(first + rest, dtype=torch.float32, device=device)


def declare_slopes(terms: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the declaration of what `write_position_terms` reads."""
    return ("alibi_slopes: f32[Hkv * G]",) if terms else ()


def declare_mask(custom: bool) -> tuple[str, ...]:
    """Returns the declarations of what a custom mask is read from."""
    return ("custom_mask: u8[Z]", "mask_start: i64[B]") if custom else ()


def check_split_size(fixed_split_size: int | None, page: int) -> int:
    """Returns the keys that a program takes, from a number of pages; 0 for the device's choice. ValueError
    for what is no multiple of 16 keys.
    """
    if fixed_split_size is None:
        return 0
    keys = check_integer("plan: fixed_split_size", fixed_split_size, 0) * page
    if keys % 16:
        raise ValueError(f"plan: fixed_split_size: expected a multiple of 16 keys, got {keys}")
    return keys


def choose_tile_rows(tokens: int, heads: tuple[int, int]) -> int:
    """Returns the rows of a tile of few queries and the heads of a group: 16, 32 or 64."""
    wanted = tokens * heads[0] // heads[1]
    return 16 if wanted <= 16 else 32 if wanted <= 32 else 64


def measure_buffers(buffers: dict[str, torch.Tensor | None]) -> list[int]:
    """Returns the lengths of buffers for CUDA graphs. ValueError for one that is missing."""
    for name, buffer in buffers.items():
        if not isinstance(buffer, torch.Tensor):
            raise ValueError(f"{name}: expected a tensor, as use_cuda_graph is set, got {buffer!r}")
    return [len(buffer) for buffer in buffers.values() if buffer is not None]


def write_mask(causal: bool, custom: bool, window_left: int) -> str:
    """Writes the mask in the language; a window bounds the keys before a query alone, and a custom mask
    stands in the place of the causal one.
    """
    element = "(q_idx * N + kv_idx)"
    read = f"bit(custom_mask[mask_start[b] + {element} // 8], {element} % 8)"
    parts = [read] if custom else ["causal"] if causal else []
    parts += [f"q_pos - {window_left} <= kv_idx"] if window_left >= 0 else []
    return " and ".join(parts)


def describe_shape(x: Any) -> Any:
    """Returns the shape of a tensor for a message, or the type of what is none."""
    return list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__


def choose_value_dim(qk: int, vo: int | None) -> int:
    """Returns the head dimension of V where it is not that of K, else 0."""
    check_integer("plan: head_dim_qk", qk, 1)
    return 0 if vo in (None, qk) else check_integer("plan: head_dim_vo", vo, 1)


def name_items(prefix: torch.Tensor | None, positions: torch.Tensor | None, length: int) -> dict[str, object]:
    """Names what scores several items of a prompt at once."""
    return {
        "prefix_len_ptr": prefix,
        "token_pos_in_items_ptr": positions,
        "token_pos_in_items_len": length,
    }
