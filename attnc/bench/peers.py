"""Who is measured: libraries, and the kernels generated from the specs beside this file. Each makes a launch
of its forward for a cell, or says why it cannot; the launch returns o, or a tuple that starts with it.

Its backward is what `torch.autograd.grad` runs for one forward that is kept, the same way for everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnc.bench.cells import SOFTCAP, WINDOW, Cell, Inputs
from attnc.bench.run import Candidate, Unavailable
from attnc.build import front, plan_program, tuned_of
from attnc.diagnostics import DiagnosticError
from attnc.plan.signature import feature
from attnc.runtime.loader import load_module
from attnc.runtime.timing import Launch

Make: TypeAlias = Callable[[Cell, Inputs], Launch]
Peer: TypeAlias = Candidate[Cell, Inputs]

_EAGER_BYTES = 16 * 2**30


def backward_of(forward: Launch, x: Inputs) -> Launch:
    """Returns a launch of the backward: gradients of q, k and v, which from here on require one, for a random
    do.
    """
    leaves = [tensor.requires_grad_() for tensor in (x.q, x.k, x.v)]
    found: Any = forward()
    o: torch.Tensor = found[0] if isinstance(found, tuple) else found
    do = torch.randn(o.shape, dtype=torch.float32, device=o.device).to(o.dtype)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def _sdpa(backend: SDPBackend) -> Make:
    def make(cell: Cell, x: Inputs) -> Launch:
        if cell.mask not in ("full", "causal"):
            raise Unavailable("only full and causal")

        def launch() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=cell.mask == "causal")

        return launch

    return make


class Flash3(torch.autograd.Function):
    """FlashAttention-3 by its operators, so that one function of autograd stands for every release of it.
    options: keywords of both operators.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Mapping[str, Any]
    ) -> torch.Tensor:
        o, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **options)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = options
        made: torch.Tensor = o
        return made

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        found = [torch.empty_like(x) for x in (q, k, v)]
        do = cotangents[0]
        do = do if do.stride(-1) == 1 else do.contiguous()
        deterministic = torch.are_deterministic_algorithms_enabled()
        torch.ops.flash_attn_3.bwd(do, q, k, v, o, lse, *found, **ctx.options, deterministic=deterministic)
        return (*found, None)


def options_of_flash3(
    width: int, *, causal: bool, window: int | None = None, softcap: float = 0.0
) -> dict[str, Any]:
    """Returns the options of FlashAttention-3 for a mask and a score. window: keys before a query, None for
    all.
    """
    options: dict[str, Any] = {"softmax_scale": width**-0.5, "is_causal": causal and window is None}
    if window is not None:
        options |= {"window_size_left": window, "window_size_right": 0}
    return options | ({"softcap": softcap} if softcap else {})


def options_of_flash4(*, causal: bool, window: int | None = None, softcap: float = 0.0) -> dict[str, Any]:
    """Returns the options of FlashAttention-4 for a mask and a score."""
    options: dict[str, Any] = {"causal": causal and window is None, "softcap": softcap}
    return options | ({} if window is None else {"window_size": (window, 0)})


#: Masks and scores that FlashAttention-3 and -4 have.
_FLASH: Mapping[str, Mapping[str, Any]] = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window512": {"causal": True, "window": WINDOW},
    "softcap30": {"causal": True, "softcap": SOFTCAP},
}


def _need_flash_mask(cell: Cell) -> Mapping[str, Any]:
    """Returns what a cell's mask and score are. Raises Unavailable for one that FlashAttention has not."""
    if cell.mask not in _FLASH:
        raise Unavailable(f"only {', '.join(_FLASH)}")
    return _FLASH[cell.mask]


def need_flash3() -> None:
    """Registers the operators of FlashAttention-3. Raises Unavailable where it is not installed."""
    try:
        import flash_attn_3._C  # noqa: F401 - it registers the operators
    except ImportError as error:
        raise Unavailable("flash_attn_3 is not installed") from error


def _flash3(cell: Cell, x: Inputs) -> Launch:
    mask = _need_flash_mask(cell)
    need_flash3()
    options = options_of_flash3(cell.width, **mask)

    def launch() -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v))
        o: torch.Tensor = Flash3.apply(q, k, v, options)  # type: ignore[no-untyped-call]  # torch's
        return o.transpose(1, 2)

    return launch


def _flash4(cell: Cell, x: Inputs) -> Launch:
    mask = _need_flash_mask(cell)
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        raise Unavailable("flash-attn-4 is not installed") from error
    options = options_of_flash4(**mask)

    def launch() -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v))
        found: Any = flash_attn_func(q, k, v, **options)
        o: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return o.transpose(1, 2)

    return launch


def _flex(cell: Cell, x: Inputs) -> Launch:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask_mod = _mask_mod(cell, x)
    score_mod = _score_mod(cell, x)
    block_mask = None
    if mask_mod is not None:
        batch = cell.batch if x.extras else None
        block_mask = create_block_mask(mask_mod, batch, None, cell.length, cell.length, device="cuda")
    # Without fullgraph, PyTorch falls back to an unfused version once it has compiled for eight shapes.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda: compiled(x.q, x.k, x.v, score_mod=score_mod, block_mask=block_mask)


def _mask_mod(cell: Cell, x: Inputs) -> Any:
    match cell.mask:
        case "full":
            return None
        case "window512":
            return lambda b, h, q, kv: (kv <= q) & (q - kv <= WINDOW)
        case "documents":
            (doc,) = x.extras
            return lambda b, h, q, kv: (doc[b, q] == doc[b, kv]) & (kv <= q)
        case "prefix":
            (prefix,) = x.extras
            return lambda b, h, q, kv: (kv <= q) | (kv < prefix[b])
        case _:
            return lambda b, h, q, kv: kv <= q


def _score_mod(cell: Cell, x: Inputs) -> Any:
    match cell.mask:
        case "alibi":
            (slope,) = x.extras
            return lambda s, b, h, q, kv: s - slope[h] * (q - kv)
        case "softcap30":
            return lambda s, b, h, q, kv: SOFTCAP * torch.tanh(s / SOFTCAP)
        case _:
            return None


def _eager(cell: Cell, x: Inputs) -> Launch:
    needs = cell.batch * cell.heads * cell.length**2 * 2
    if needs > _EAGER_BYTES:
        raise Unavailable(f"scores of {needs / 2**30:.0f} GiB")
    mask_mod, score_mod = _mask_mod(cell, x), _score_mod(cell, x)
    b, h, q, kv = (
        torch.arange(size, device="cuda") for size in (cell.batch, cell.heads, cell.length, cell.length)
    )
    grid = (b[:, None, None, None], h[:, None, None], q[:, None], kv)
    hidden = None if mask_mod is None else ~mask_mod(*grid)

    def launch() -> object:
        scores = (x.q @ x.k.transpose(-1, -2)) * cell.width**-0.5
        if score_mod is not None:
            scores = score_mod(scores, *grid)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores.softmax(-1).to(x.v.dtype) @ x.v

    return launch


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(name="cudnn", title="cuDNN", make=_sdpa(SDPBackend.CUDNN_ATTENTION)),
        Peer(name="fa2", title="FlashAttention-2", make=_sdpa(SDPBackend.FLASH_ATTENTION)),
        Peer(name="fa3", title="FlashAttention-3", make=_flash3),
        Peer(name="fa4", title="FlashAttention-4", make=_flash4, compiles=True),
        Peer(name="efficient", title="memory-efficient", make=_sdpa(SDPBackend.EFFICIENT_ATTENTION)),
        Peer(name="flex", title="FlexAttention", make=_flex, compiles=True),
        Peer(name="eager", title="eager", make=_eager),
    )
}


# --- attnc's kernels ----------------------------------------------------------------------------------------


OURS = "attnc"
_SPECS = Path(__file__).parent / "specs"


def make(target: str, folder: Path, cell: Cell, x: Inputs) -> Launch:
    """Returns a launch of the variant for the cell's mask and head dimension."""
    try:
        module = _modules(target, folder)[cell.mask, cell.width, cell.value_width, cell.dtype]
    except KeyError:
        raise Unavailable("no variant in attnc/bench/specs") from None
    except DiagnosticError as failure:
        raise Unavailable(str(failure)) from None
    kernel = getattr(module, cell.mask)
    return lambda: kernel(x.q, x.k, x.v, *x.extras)


@cache
def _modules(target: str, folder: Path) -> dict[tuple[str, int, int, str], ModuleType]:
    found = {}
    for path in sorted(folder.glob("*.attn")):
        choices = tuned_of(path)
        for module in plan_program(front(path)).modules:
            if module.target == target:
                attention = module.variant.attention
                widths = feature(attention.q), feature(attention.v)
                found[attention.name, *widths, str(attention.q.dtype)] = load_module(module, choices)
    return found


def kernel_of(spec: Path, target: str, name: str) -> Callable[..., Any]:
    """Returns the function of an attention of a spec for a target. Raises Unavailable where there is no
    schedule.
    """
    try:
        kernel: Callable[..., Any] = getattr(_modules_of(spec, target)[name], name)
    except KeyError:
        raise Unavailable(f"no schedule for {target}") from None
    return kernel


@cache
def _modules_of(spec: Path, target: str) -> dict[str, ModuleType]:
    planned = (module for module in plan_program(front(spec)).modules if module.target == target)
    return {module.variant.attention.name: load_module(module) for module in planned}


def ours(target: str = "triton") -> Peer:
    """Returns the candidate that the others are compared with: the kernels for a target."""
    return Peer(name=OURS, title="attnc", make=partial(make, target, _SPECS), compiles=True, ours=True)


#: The kernels for Triton beside those for another target.
TRITON = Peer(
    name="triton", title="attnc on Triton", make=partial(make, "triton", _SPECS), compiles=True, ours=True
)
#: Ways to sum dq by which gradients are the same bits in every run, with the folders of their specs.
_SAME_BITS = {"two_pass": _SPECS / "deterministic", "ordered": _SPECS / "ordered"}


def same_bits(target: str) -> tuple[Peer, ...]:
    """Returns CUDA kernels whose gradients are the same bits in every run, beside those that add dq
    atomically.
    """
    cuda = target if target.startswith("cuda.") else "cuda.sm_80"
    return tuple(
        Peer(name=way, title=f"attnc, {way}", make=partial(make, cuda, folder), compiles=True, ours=True)
        for way, folder in _SAME_BITS.items()
    )
