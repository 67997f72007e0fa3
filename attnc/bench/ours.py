"""The generated kernels as candidates, compiled from the specs beside this file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from attnc.bench.cells import Cell, Inputs
from attnc.bench.peers import Peer
from attnc.bench.run import Unavailable
from attnc.build import front, plan_program, tuned_of
from attnc.diagnostics import DiagnosticError
from attnc.plan.signature import feature
from attnc.runtime.loader import load_module
from attnc.runtime.timing import Launch

OURS = "attnc"
_SPECS = Path(__file__).parent / "specs"
SPECS = tuple(sorted(_SPECS.glob("*.attn")))


def make(target: str, folder: Path, cell: Cell, x: Inputs) -> Launch:
    """A launch of the variant for the cell's mask and head dimension."""
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
    """Loads the modules of a folder of specs, by name, D, Dv and type."""
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
    """The function of an attention of a spec for a target. Raises Unavailable where there is no schedule."""
    try:
        kernel: Callable[..., Any] = getattr(_modules_of(spec, target)[name], name)
    except KeyError:
        raise Unavailable(f"no schedule for {target}") from None
    return kernel


@cache
def _modules_of(spec: Path, target: str) -> dict[str, ModuleType]:
    """The modules of a spec for a target, by the name of the attention."""
    planned = (module for module in plan_program(front(spec)).modules if module.target == target)
    return {module.variant.attention.name: load_module(module) for module in planned}


def ours(target: str = "triton") -> Peer:
    """The candidate that the others are compared with: the kernels for a target."""
    return Peer(name=OURS, title="attnc", make=partial(make, target, _SPECS), compiles=True, ours=True)


#: The kernels for Triton beside those for another target.
TRITON = Peer(
    name="triton", title="attnc on Triton", make=partial(make, "triton", _SPECS), compiles=True, ours=True
)
#: Ways to sum dq by which gradients are the same bits in every run, with the folders of their specs.
_SAME_BITS = {"two_pass": _SPECS / "deterministic", "ordered": _SPECS / "ordered"}


def same_bits(target: str) -> tuple[Peer, ...]:
    """CUDA kernels whose gradients are the same bits in every run, beside those that add dq atomically."""
    cuda = target if target.startswith("cuda.") else "cuda.sm_80"
    return tuple(
        Peer(name=way, title=f"attnc, {way}", make=partial(make, cuda, folder), compiles=True, ours=True)
        for way, folder in _SAME_BITS.items()
    )
