"""`flex_attention` under torch.compile: one operator of torch's, whatever the mods.

`attend` is traced into the caller's graph. What the mods do goes into the operator as a text (`replay`), the
tensors and numbers that they read as inputs, so that gradients reach them and nothing is traced again when
lengths or data change. At every call the operator does what `flex_attention` does outside of a graph: it
reads the mods, looks at captured integers, and finds the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attnc.flex.options import read_options
from attnc.flex.programs import Kernel, kernel_of
from attnc.flex.recorder import Recorder
from attnc.flex.replay import Program, mod_of, read, written
from attnc.flex.spec import DTYPES, Layout
from attnc.flex.targets import targets_of
from attnc.flex.trace import MaskMod, ScoreMod, Trace, trace

Tensors = Sequence[torch.Tensor]

#: Of b, h, q_idx and kv_idx.
_POSITIONS = (torch.int32,) * 4


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    scale: float | None,
    lse: bool,
    rows_first: bool,
    kernel_options: Mapping[str, Any] | None,
    target: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, lse or None) of checked arguments, as `flex_attention` has them."""
    recorder = Recorder(query.device)
    if scale is not None:
        recorder.floats.append(float(scale))
    score = None if score_mod is None else recorder.record(score_mod, (torch.float32, *_POSITIONS))
    mask = None if mask_mod is None else recorder.record(mask_mod, _POSITIONS)
    options = read_options(kernel_options)
    order = "rows" if rows_first else "heads"  # with lengths that vary, the condition itself is a symbol
    program = written(score, mask, scale is not None, order, lse, options, target or "")
    tensors = [query, key, value, *recorder.tensors]
    grads = [at for at, x in enumerate(tensors) if x.requires_grad] if torch.is_grad_enabled() else []
    o, log_sum = torch.ops.attnc.flex_attention(
        query, key, value, recorder.tensors, recorder.floats, recorder.integers, program, grads
    )
    return o, log_sum if lse else None


@torch.library.custom_op("attnc::flex_attention", mutates_args=())
def _operate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Sequence[torch.Tensor],
    floats: Sequence[float],
    integers: Sequence[int],
    program: str,
    grads: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse); lse has no elements where neither the caller nor a gradient needs it.

    grads: which of query, key, value and captured, by position, get a gradient.
    """
    said = read(program)
    traced, kernel = _found(query, key, value, captured, floats, integers, said, grads)
    with torch.no_grad():
        found = kernel.function(query, key, value, *kernel.arguments(traced))
    o, lse = found if said.lse or grads else (found, query.new_empty(0, dtype=torch.float32))
    return (o.transpose(1, 2) if said.order == "rows" else o), lse


@_operate.register_fake
def _operate_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Sequence[torch.Tensor],
    floats: Sequence[float],
    integers: Sequence[int],
    program: str,
    grads: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of the results. FlexError for what no spec can say."""
    said = read(program)
    known = [value if type(value) is int else 1 for value in integers]  # for a torch.SymInt any value will do
    _traced(said, captured, floats, known, grads, {}, torch.device("cpu"))
    B, H, M, _ = query.shape
    width = value.shape[3]
    if said.order == "rows":
        o = query.new_empty((B, M, H, width)).transpose(1, 2)
    else:
        o = query.new_empty((B, H, M, width))
    return o, query.new_empty((B, H, M) if said.lse or grads else (0,), dtype=torch.float32)


@torch.library.custom_op("attnc::flex_attention_backward", mutates_args=())
def _pull(
    do: torch.Tensor,
    dlse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Sequence[torch.Tensor],
    floats: Sequence[float],
    integers: Sequence[int],
    o: torch.Tensor,
    lse: torch.Tensor,
    program: str,
    grads: Sequence[int],
) -> list[torch.Tensor]:
    """The gradients of the tensors at `grads`."""
    said = read(program)
    traced, kernel = _found(query, key, value, captured, floats, integers, said, grads)
    if said.order == "rows":
        do, o = do.transpose(1, 2), o.transpose(1, 2)
    inputs = [_scalar(x, query) for x in kernel.arguments(traced)]
    assert kernel.gradients is not None
    own = [at for at in grads if at < 3]
    found: tuple[torch.Tensor, ...] = ()
    if own or kernel.learned:
        found = kernel.gradients(do, dlse, query, key, value, *inputs, o, lse, None)
    leaves = (query, key, value, *captured)
    made = {at: gradient.contiguous() for at, gradient in zip(own, found, strict=False)}
    for at in grads:
        if at not in made:
            made[at] = torch.zeros(leaves[at].shape, dtype=leaves[at].dtype, device=query.device)
    for at, gradient in zip(kernel.learned, found[len(own) :], strict=True):
        leaf, whole = _unfolded(traced.tape.captures[at].tensor, gradient, traced)
        made[next(at for at in grads if leaves[at] is leaf)] += whole
    return [made[at] for at in grads]


@_pull.register_fake
def _pull_fake(
    do: torch.Tensor,
    dlse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Sequence[torch.Tensor],
    floats: Sequence[float],
    integers: Sequence[int],
    o: torch.Tensor,
    lse: torch.Tensor,
    program: str,
    grads: Sequence[int],
) -> list[torch.Tensor]:
    leaves = (query, key, value, *captured)
    return [query.new_empty(leaves[at].shape, dtype=leaves[at].dtype) for at in grads]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, captured, ctx.floats, ctx.integers, ctx.program, ctx.grads = inputs
    ctx.captured = len(captured)
    ctx.save_for_backward(query, key, value, *captured, *output)


def _differentiate(ctx: Any, do: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
    query, key, value, *captured, o, lse = ctx.saved_tensors
    found = torch.ops.attnc.flex_attention_backward(
        do, dlse, query, key, value, captured, ctx.floats, ctx.integers, o, lse, ctx.program, ctx.grads
    )
    gradients: list[torch.Tensor | None] = [None] * (3 + ctx.captured)
    for at, gradient in zip(ctx.grads, found, strict=True):
        gradients[at] = gradient
    # torch wants None for a list of numbers, and a list for a list that is empty.
    numbers: list[Any] = [None if listed else [] for listed in (ctx.floats, ctx.integers)]
    return (*gradients[:3], gradients[3:], *numbers, None, None)


_operate.register_autograd(_differentiate, setup_context=_keep)


def _found(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Tensors,
    floats: Sequence[float],
    integers: Sequence[int],
    said: Program,
    grads: Sequence[int],
) -> tuple[Trace, Kernel]:
    """What the mods do at this call, and its kernel: the same for the forward and the backward."""
    B, H, M, width = query.shape
    sizes = {"B": B, "H": H, "M": M, "N": key.shape[2]}
    traced = _traced(said, captured, floats, integers, grads, sizes, query.device)
    target, otherwise = targets_of(said.target, query, key, value, said.wanted)
    layout = Layout(
        dtype=DTYPES[query.dtype],
        head_dim=width,
        value_dim=value.shape[3],
        grouped=key.shape[1] != H,
        rows_first=said.order == "rows",
        scaled=said.scaled,
        lse=said.lse or bool(grads),
        differentiable=bool(grads),
        grad=tuple("qkv"[at] for at in grads if at < 3),
        target=target,
        otherwise=otherwise,
        wanted=said.wanted,
    )
    return traced, kernel_of(traced, layout)


def _traced(
    said: Program,
    captured: Tensors,
    floats: Sequence[float],
    integers: Sequence[int],
    grads: Sequence[int],
    sizes: dict[str, int],
    device: torch.device,
) -> Trace:
    mods = (mod_of(steps, captured, floats, integers) for steps in (said.score, said.mask))
    scale = floats[0] if said.scaled else None
    learned = {id(captured[at - 3]) for at in grads if at >= 3}
    return trace(*mods, scale=scale, sizes=sizes, device=device, learned=learned)


def _unfolded(
    tensor: torch.Tensor, gradient: torch.Tensor, traced: Trace
) -> tuple[torch.Tensor, torch.Tensor]:
    """The captured tensor that this one is a view of, and its gradient."""
    while id(tensor) in traced.tape.views:
        tensor_of, axis, index, _ = traced.tape.views[id(tensor)]
        whole = gradient.new_zeros(tensor_of.shape)
        (whole.select(axis, index) if whole.dim() else whole.view(1)).copy_(gradient)
        tensor, gradient = tensor_of, whole
    return tensor, gradient


def _scalar(x: Any, like: torch.Tensor) -> torch.Tensor:
    """An argument as a tensor: numbers on the device, without waiting for it."""
    if isinstance(x, torch.Tensor):
        return x
    dtype = torch.int32 if isinstance(x, int) else torch.float32
    return torch.full((), x, dtype=dtype, device=like.device)
