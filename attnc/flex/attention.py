"""`flex_attention`: torch's function of this name, on a kernel that the mods are compiled to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from attnc.api.repeats import Plan, keep, repeat
from attnc.api.tensors import lower_to_autocast
from attnc.flex.arguments import Auxiliary, check_tensors, mask_of
from attnc.flex.blocks import Blocks, restrict
from attnc.flex.dense import max_scores
from attnc.flex.layouts import as_logical, laid_out, logical_axes, order_like, written_order
from attnc.flex.programs import (
    FlexKernel,
    as_tensor,
    convert_tensor,
    kernel_of,
    read_options,
    targets_of,
    targets_of_steps,
)
from attnc.flex.snapshot import Snapshot, find_token, keep_token, snapshot
from attnc.flex.spec import DTYPES, NARROW, CallLayout
from attnc.flex.trace import MaskMod, ScoreMod, Trace, trace
from attnc.support.arguments import requires_gradient

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    from attnc.api.family import Family


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    mask_mod: MaskMod | None = None,
    target: str | None = None,
) -> Any:
    """Computes attention whose scores and mask are functions of positions:
    `torch.nn.attention.flex_attention`'s.

    query: [B, Hq, M, D]; key: [B or 1, Hkv, N, D]; value: [B or 1, Hkv, N, Dv]; of float16, bfloat16 or
        float32; any strides but a contiguous last axis, without which it is copied. key and value may both be
        of float8_e4m3fn or float8_e5m2. Tensors of float64 are given to torch's own function.
        Under torch.autocast the others are converted to its type.
    score_mod(score, b, h, q_idx, kv_idx): returns the score to use; `score` is the product times `scale`
    mask_mod(b, h, q_idx, kv_idx): returns whether the key is visible
    block_mask: torch's BlockMask, in place of mask_mod: its own mask_mod, within the blocks that it lists
    scale: 1 / sqrt(D) if None; enable_gqa: whether Hq may be a multiple of Hkv
    return_lse: returns (o, lse) instead of o; return_aux: returns (o, AuxOutput), by torch's AuxRequest
    kernel_options: BLOCK_M, BLOCK_N, num_warps and num_stages of the forward kernel
    target: as of `attnc.compile`; None for the fastest that the GPU runs

    Returns o: [B, Hq, M, Dv], with the strides of query; lse: f32[B, Hq, M], natural logarithm; max_scores:
    f32[B, Hq, M], without a gradient. Gradients flow to query, key, value and captured float tensors.

    Mods are traced at every call, unless they cannot have changed. Each expression is compiled once:
    lengths and the data of captured tensors are read at run time, and so are Python numbers that a mod
    captures, after their fourth value.

    Raises FlexError, with the place in the caller's file, for an operation that no spec has; ValueError or
    TypeError with the argument's name, what was expected and what came; and torch's own errors where torch
    makes the same check.
    """
    query, key, value = lower_to_autocast(query, key, value)
    taken = token = repeated = None
    if kernel_options is None and not return_lse and not torch.compiler.is_compiling():
        taken = snapshot((score_mod, mask_mod), block_mask)
        token = None if taken is None else find_token(taken)
    if taken is not None and token is not None:
        asked = None
        if return_aux is not None:
            asked = return_aux.lse, getattr(return_aux, "max_scores", None)
        facts = ("flex_attention", token, scale, enable_gqa, asked, target)
        repeated, found = repeat(facts, (query, key, value, *taken.tensors))
        if found is not None:
            return found[0]
    if _is_double(query, key, value) and target is None:
        return _computed_by_torch(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux, mask_mod=mask_mod,
        )  # fmt: skip
    sizes = check_tensors(query, key, value, enable_gqa)
    mask_mod, blocks = mask_of(block_mask, mask_mod, query, key)
    wanted = Auxiliary(return_lse, return_aux)
    order = order_like((*query.shape[:3], value.shape[3]), query)
    given = query, key, value
    query, key, value = _made_ready(query, key, value, score_mod)
    if torch.compiler.is_compiling():
        from attnc.flex.compiled import attend

        results = attend(
            query, key, value, score_mod, mask_mod, blocks, scale, wanted, order, kernel_options, target
        )
        return wanted.arrange_results(*results)
    traced = _read(score_mod, mask_mod, blocks, scale, sizes, query, key)
    layout = _layout(query, key, value, scale, wanted.lse, order, kernel_options, target)
    kernel = kernel_of(traced, layout, (score_mod, mask_mod))
    o, lse = _run(kernel, query, key, value, traced, wanted.lse)
    largest = max_scores(traced, query, key, scale) if wanted.max_scores else None
    if taken is not None and all(map(is_, given, (query, key, value))):
        _remember(taken, repeated, kernel, traced, wanted, order)
    return wanted.arrange_results(laid_out(as_logical(o, order), order), lse, largest)


def family_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    mask_mod: MaskMod | None = None,
    target: str | None = None,
) -> Family:
    """Returns the kernels that `flex_attention` runs on for these arguments, to be read: `spec`, `source`,
    `target`, `explain()`. Nothing is run. Raises what `flex_attention` raises.
    """
    query, key, value = lower_to_autocast(query, key, value)
    sizes = check_tensors(query, key, value, enable_gqa)
    mask_mod, blocks = mask_of(block_mask, mask_mod, query, key)
    order = order_like((*query.shape[:3], value.shape[3]), query)
    query, key, value = _made_ready(query, key, value, score_mod)
    traced = _read(score_mod, mask_mod, blocks, scale, sizes, query, key)
    layout = _layout(query, key, value, scale, return_lse, order, kernel_options, target)
    return kernel_of(traced, layout, (score_mod, mask_mod)).family


def _read(
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    blocks: Blocks | None,
    scale: float | None,
    sizes: dict[str, int],
    query: torch.Tensor,
    key: torch.Tensor,
) -> Trace:
    of_score = requires_gradient(query) or requires_gradient(key)
    gradients = torch.is_grad_enabled() and of_score
    traced = trace(score_mod, mask_mod, scale=scale, sizes=sizes, device=query.device, gradients=gradients)
    return traced if blocks is None else restrict(traced, blocks)


def _run(
    kernel: FlexKernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, traced: Trace, lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    arguments = kernel.arguments(traced)
    found = kernel.function(query, key, value, *arguments)
    return found if lse else (found, None)


def _remember(
    taken: Snapshot, repeated: Any, kernel: FlexKernel, traced: Trace, wanted: Auxiliary, order: str
) -> None:
    """Keeps the plan of a call whose mods are known by their snapshot: from the second one on. repeated: what
    `repeat` keeps it by.
    """
    tape = traced.tape
    is_unseen = any(x.is_cuda for x in taken.looked_at) and torch.cuda.is_current_stream_capturing()
    if tape.computes or wanted.max_scores or is_unseen:
        return
    if repeated is None:
        keep_token(taken)
        return
    places: list[int | torch.Tensor] = []
    for at in kernel.captures:
        x = tape.captures[at].tensor
        place = next((3 + i for i, other in enumerate(taken.tensors) if other is x), None)
        if place is None and id(x) not in tape.named:  # made by the mod
            return
        places.append(x if place is None else place)
    numbers = [tape.numbers[at] for at in kernel.numbers]

    def arrange(given: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        captured = [convert_tensor(given[x] if isinstance(x, int) else x) for x in places]
        return (*given[:3], *captured, *(as_tensor(x, given[0]) for x in numbers)), None

    takes = arrange if places or numbers else _take_three
    call = kernel.family.module.default.CALL
    finish = _finishing(wanted, order)
    axes = logical_axes(order) if finish is None else None
    keep(repeated, Plan(kernel.function, call, takes, finish, axes))


def _take_three(given: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    return given[:3], None


def _finishing(wanted: Auxiliary, order: str) -> Callable[[Any, Sequence[Any]], Any] | None:
    """Returns the function that makes the results of a call from those of its kernel; None if only the axes
    of a single result differ.
    """
    if wanted.lse or wanted.is_named or not order.endswith("D"):

        def finish(found: Any, given: Sequence[Any]) -> Any:
            o, lse = found if wanted.lse else (found, None)
            return wanted.arrange_results(laid_out(as_logical(o, order), order), lse, None)

        return finish
    return None


def _is_double(*tensors: torch.Tensor) -> bool:
    return all(getattr(x, "dtype", None) == torch.float64 for x in tensors)


def _computed_by_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    *arguments: Any,
    return_aux: AuxRequest | None,
    mask_mod: MaskMod | None,
) -> Any:
    """Returns the result of torch's own function for float64, for which there are no kernels here. So
    references and `torch.autograd.gradcheck` keep working.
    """
    from torch.nn.attention import flex_attention as torchs

    value, score_mod, block_mask, *rest = arguments
    if mask_mod is not None:
        if block_mask is not None:
            raise ValueError("mask_mod: expected None beside a block_mask, which has its own")
        empty = torchs._create_empty_block_mask(query, key)
        block_mask = torchs.BlockMask.from_kv_blocks(
            empty.kv_num_blocks, empty.kv_indices, BLOCK_SIZE=empty.BLOCK_SIZE, mask_mod=mask_mod
        )
    named = {} if return_aux is None else {"return_aux": return_aux}
    function: Any = torchs.flex_attention
    return function(query, key, value, score_mod, block_mask, *rest, **named)


def _made_ready(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: ScoreMod | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k and v with as many sequences each and with last axes that are contiguous. Keys and values
    of 8 bits are converted where their kernels cannot take them: beside q of 32 bits, and where gradients
    may be asked for, of q or of what a score_mod reads.
    """
    may_learn = torch.is_grad_enabled() and (score_mod is not None or requires_gradient(query))
    if key.dtype != query.dtype and (query.dtype == torch.float32 or may_learn):
        key, value = key.to(query.dtype), value.to(query.dtype)
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return query, key, value


def _layout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    lse: bool,
    order: str,
    kernel_options: Mapping[str, Any] | None,
    target: str | None,
) -> CallLayout:
    wants = torch.is_grad_enabled()
    wanted = read_options(kernel_options)
    tensors = (("q", query), ("k", key), ("v", value))
    grad = tuple(name for name, x in tensors if wants and requires_gradient(x))
    steps = () if grad or wanted else targets_of_steps(target, query, key, value)
    target, otherwise = targets_of(target, query, key, value, wanted, gradients=bool(grad))
    return CallLayout(
        dtype=DTYPES[query.dtype],
        kept_as=NARROW.get(key.dtype, ""),
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        grouped=query.shape[1] != key.shape[1],
        order=written_order(order),
        scaled=scale is not None,
        lse=lse,
        differentiable=wants and key.dtype == query.dtype,
        grad=grad,
        target=target,
        otherwise=otherwise,
        steps=steps,
        wanted=wanted,
    )
