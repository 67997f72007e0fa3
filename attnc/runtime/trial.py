"""A planned module made ready to launch at a realistic size: what `attnc tune` and `attnc demo` run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Dim, Expr, show, walk
from attnc.model.tensors import DType, Paged, Ragged, Role
from attnc.plan import ir
from attnc.plan.layout import KernelName
from attnc.plan.signature import PAGES
from attnc.runtime.dtypes import TORCH
from attnc.runtime.loader import load_module
from attnc.runtime.timing import Launch

#: Sizes that a spec leaves open, apart from the lengths.
_DIMS = {"H": 16, "Hkv": 4, "G": 4}
_TOKENS = 16384
_DOCUMENT = 1000
#: Integer inputs that are lengths of sequences, by the names that specs give them.
_LENGTHS = frozenset({"kv_len", "q_len"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Arguments of the callable in order, and the sizes they were made for."""

    tensors: tuple[torch.Tensor, ...]
    dims: Mapping[str, int]


def problem_for(
    module: ir.Module,
    length: int,
    *,
    device: str = "cuda",
    tokens: int = _TOKENS,
    sizes: Mapping[str, int] | None = None,
) -> Problem:
    """N(0, 1) inputs with M = N = `length` and as many sequences as make `tokens` tokens.

    Sorted integers number documents of 1000 tokens; other integers of the size of a length are one eighth of
    it. Packed sequences are all as long, pages lie in random order; a decode kernel gets M = 1 and, on a GPU,
    sixteen times as many sequences. sizes: dims that are to be something else.
    """
    decodes = module.kernel.structure == "decode"
    tokens *= 16 if decodes and device != "cpu" else 1
    dims = {**_DIMS, "B": max(1, tokens // length), "M": 1 if decodes else length, "N": length}
    dims |= sizes or {}
    dims |= _memory_dims(module, dims)
    heads = module.variant.attention.q.size(Role.HEAD)
    if all(node.name in dims for node in walk(heads) if isinstance(node, Dim)):
        dims["H"] = _value(heads, dims)  # of a group of fixed size, say
    for arg in module.args:
        for bind in arg.axes:
            if bind.name is not None:
                dims.setdefault(bind.name, length)
    generator = torch.Generator(device).manual_seed(0)
    located = _located(module, dims, generator)
    tensors = (
        located[arg.tensor.name] if arg.tensor.name in located else _draw(arg, dims, generator)
        for arg in module.args
    )
    return Problem(tensors=tuple(tensors), dims=dims)


def _memory_dims(module: ir.Module, dims: Mapping[str, int]) -> dict[str, int]:
    """Rows of packed tensors, columns of a block table and pages, for sequences that are all as long."""
    attention, known = module.variant.attention, {}
    for tensor, role, name in ((attention.q, Role.QUERY, "M"), (attention.k, Role.KEY, "N")):
        match tensor.storage:
            case Ragged():
                known[show(tensor.size(role))] = dims["B"] * dims[name]
            case Paged(block_table=table, page=page):
                columns = -(-dims["N"] // page)
                known[show(attention.tensor(table).shape[1])] = columns
                known[PAGES.name] = dims["B"] * columns
                known["N"] = columns * page
    return known


def _located(
    module: ir.Module, dims: Mapping[str, int], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """What says where rows lie: cumulative lengths and block tables."""
    attention, batch, device = module.variant.attention, dims["B"], generator.device
    made = {}
    for tensor, name in ((attention.q, "M"), (attention.k, "N")):
        match tensor.storage:
            case Ragged(cu_seqlens=cu):
                made[cu] = torch.arange(batch + 1, device=device, dtype=torch.int32) * dims[name]
            case Paged(block_table=table):
                pages = torch.randperm(dims[PAGES.name], generator=generator, device=device)
                made[table] = pages.to(torch.int32).reshape(batch, -1)
    return made


def trial(module: ir.Module, problem: Problem, position: int | None = None) -> Launch:
    """A launch of the config at this position (None: the module's own choice); each call makes new
    outputs.
    """
    loaded: Any = load_module(module)
    function = getattr(loaded, module.variant.attention.name)
    if position is None:
        return lambda: function(*problem.tensors)
    config = loaded.CONFIGS[position]
    return lambda: function(*problem.tensors, config=config)


def backward_trial(
    module: ir.Module, problem: Problem, kernel: KernelName | None = None, position: int = 0
) -> Launch:
    """A launch of all backward kernels, one of them with its config at this position and the others with the
    module's own choice, as autograd does it for a forward that is kept.
    """
    loaded: Any = load_module(module)
    attention = module.variant.attention
    given = {} if kernel is None else {kernel: loaded.BACKWARD_CONFIGS[kernel][position]}
    inputs = {arg.tensor.name: x.detach() for arg, x in zip(module.args, problem.tensors, strict=True)}
    leaves = [inputs[name].requires_grad_() for name in attention.grads]
    found: Any = getattr(loaded, attention.name)(*inputs.values(), backward_config=given)
    o: torch.Tensor = found[0] if isinstance(found, tuple) else found
    generator = torch.Generator(o.device).manual_seed(1)
    do = torch.randn(o.shape, generator=generator, device=o.device, dtype=torch.float32).to(o.dtype)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True, allow_unused=True)


def device_name() -> str:
    """The current CUDA device, as tuned files call it."""
    return torch.cuda.get_device_name()


def synchronize() -> None:
    """Waits for the GPU, so that a failed launch raises here."""
    torch.cuda.synchronize()


def _draw(arg: ir.Arg, dims: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
    axes = zip(arg.tensor.shape, arg.axes, strict=True)
    shape = [dims[PAGES.name] if size == PAGES else _size(bind, dims) for size, bind in axes]
    dtype = TORCH[DType(arg.tensor.dtype)]
    device = generator.device
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
    if arg.tensor.is_sorted:
        row = torch.arange(shape[-1], device=device) // _DOCUMENT
        return row.expand(shape).to(dtype).contiguous()
    if dtype is torch.bool:
        return torch.ones(shape, device=device, dtype=dtype)
    length = dims["N"] if arg.tensor.name in _LENGTHS else dims["N"] // 8
    return torch.full(shape, length, device=device, dtype=dtype)


def _size(bind: ir.Bind, dims: Mapping[str, int]) -> int:
    return dims[bind.name] + bind.plus if bind.name is not None else _value(bind.expected, dims)


def _value(expr: Expr | None, dims: Mapping[str, int]) -> int:
    if expr is None:
        raise ValueError("an axis that is neither bound nor checked")
    used = {node.name: dims[node.name] for node in walk(expr) if isinstance(node, Dim)}
    return int(evaluate(expr, Env(dims=used)))
