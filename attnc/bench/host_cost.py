"""`attnc bench --host`: what a call costs the host until it returns, on inputs so small that it waits for
nothing.

All calls take turns in one process, in bursts, and the fastest burst of each counts: what makes others slower
is the machine. Beside them is PyTorch's attention, of the same shapes, and what autograd takes for a function
that does nothing. PyTorch's attention on attnc is registered for its bursts alone, beside PyTorch's own flash
backend, which programs that choose attnc would choose else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnc.bench.host_functions import (
    FUNCTIONS,
    draw_trained,
    packed_by_torch,
    served_functions,
    trained_functions,
)
from attnc.bench.report import Page, document, ran_on, table
from attnc.bench.run import Benchmark, Job, Report
from attnc.build import front, plan_program, schedule_all
from attnc.compat.sdpa import activate
from attnc.plan import ir
from attnc.runtime.loader import load_module
from attnc.runtime.timing import Launch, Which, host_ms, take_turns
from attnc.runtime.trial import problem_for

#: Of the inputs; a decode kernel gets one row of q.
SIZES = {"B": 2, "H": 8, "Hkv": 2, "G": 4, "M": 200, "N": 200}
#: Launches of a burst: fewer than the driver queues.
_BURST = 50
#: Calls of a function before the one whose gradients are timed.
_BEFORE = 10
_TORCHS, _PACKED = "scaled_dot_product_attention", "varlen_attn"
_OURS, _PEER, _FLASH = "functions of attnc", "PyTorch", "PyTorch's flash backend"


@dataclass(frozen=True, slots=True)
class HostCall:
    """What is timed. what: the row of the table; whose: its column."""

    what: str
    whose: str


@dataclass(frozen=True, slots=True)
class HostCell:
    """The calls of a module."""

    module: ir.Module

    @property
    def name(self) -> str:
        return self.module.variant.attention.name


def first_variants(specs: Sequence[Path]) -> list[ir.Module]:
    """Returns the first variant of every attention of the specs, for each target. One without a schedule has
    those that `attnc.compile` gives it. Raises DiagnosticError.
    """
    first: dict[tuple[str, str], ir.Module] = {}
    for spec in specs:
        for module in plan_program(schedule_all(front(spec))[0]).modules:
            first.setdefault((module.variant.attention.name, module.target), module)
    return list(first.values())


def _call_once(module: ir.Module) -> None:
    with suppress(Exception):  # the measurement meets the same failure and reports it
        _call_all(calls_of(module))


def _call_function(name: str) -> None:
    with suppress(Exception), _keeping_graphs():
        function, lay = trained_functions(SIZES, "cuda")[name]
        _call_all(_make_calls(name, _OURS, function, [lay(x) for x in draw_trained(SIZES, "cuda")]))


def _call_others() -> None:
    with suppress(Exception), _keeping_graphs():
        for call in served_functions(SIZES, "cuda").values():
            call()
        for whose in (_OURS, _FLASH):
            with _put_in_place(whose):
                _call_all(_calls_of_torch(whose) | _calls_of_packed(whose))


def _keeping_graphs() -> AbstractContextManager[None]:
    """Keeps the graph of a compiled function for its next backward."""
    from torch._functorch import config

    context: AbstractContextManager[None] = config.patch(donated_buffer=False)
    return context


def _call_all(calls: Mapping[HostCall, Launch]) -> None:
    for call in calls.values():
        call()
    torch.cuda.synchronize()


def calls_of(module: ir.Module) -> dict[HostCall, Launch]:
    """Returns the call itself, and where there are gradients also with what they need, and they
    by autograd.
    """
    name, grads = module.variant.attention.name, module.variant.attention.grads
    function = getattr(load_module(module), name)
    sizes = SIZES | ({"M": 1} if module.kernel.structure == "decode" else {})
    tensors = problem_for(module, SIZES["N"], sizes=sizes)
    calls: dict[HostCall, Launch] = {HostCall(name, module.target): lambda: function(*tensors)}
    if grads:
        names = (arg.tensor.name for arg in module.args)
        inputs = [x.clone().requires_grad_(n in grads) for n, x in zip(names, tensors, strict=True)]
        calls |= _make_backward_calls(name, module.target, function, inputs)
    return calls


def functions() -> dict[HostCall, Launch]:
    """Returns the functions that programs call, on whichever kernels they take here."""
    tensors = draw_trained(SIZES, "cuda")
    calls: dict[HostCall, Launch] = {}
    for name, (function, lay) in trained_functions(SIZES, "cuda").items():
        calls |= _make_calls(name, _OURS, function, [lay(x) for x in tensors])
    served = served_functions(SIZES, "cuda")
    return calls | {HostCall(name, _OURS): call for name, call in served.items()}


def peers() -> dict[HostCall, Launch]:
    """Returns PyTorch's attention of such shapes, and an autograd function that does nothing."""
    inputs = [x.clone().requires_grad_() for x in _draw_heads()]
    nothing = _make_backward_calls("a function that does nothing", _PEER, _Nothing.apply, inputs)
    return _calls_of_torch(_PEER) | nothing


def replaceable() -> dict[HostCall, Launch]:
    """Returns the calls of PyTorch's attention on attnc, and on PyTorch's flash backend, to be made in their
    `place_of`.
    """
    calls: dict[HostCall, Launch] = {}
    for whose in (_OURS, _FLASH):
        with _put_in_place(whose):
            calls |= _calls_of_torch(whose) | _calls_of_packed(whose)
    return calls


def place_of(call: HostCall) -> AbstractContextManager[None]:
    """Returns the context that a call is made in: where PyTorch's attention runs on attnc, or on PyTorch's
    flash backend, that stands in place of PyTorch's choice.
    """
    is_replaced = call.whose == _FLASH or (call.whose == _OURS and call.what.startswith((_TORCHS, _PACKED)))
    return _put_in_place(call.whose) if is_replaced else nullcontext()


@contextmanager
def _put_in_place(whose: str) -> Iterator[None]:
    handle = activate("CUDA") if whose == _OURS else None
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        if handle is not None:
            handle.remove()


def _calls_of_torch(whose: str) -> dict[HostCall, Launch]:
    from torch.nn.functional import scaled_dot_product_attention

    return _make_calls(_TORCHS, whose, partial(scaled_dot_product_attention, is_causal=True), _draw_heads())


def _calls_of_packed(whose: str) -> dict[HostCall, Launch]:
    batch, heads, length, width = SIZES["B"], SIZES["H"], SIZES["N"], 64
    tensors = torch.randn(3, batch * length, heads, width, device="cuda", dtype=torch.bfloat16).unbind()
    ends = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
    return _make_calls(_PACKED, whose, partial(packed_by_torch, ends=ends, longest=length), tensors)


def _make_calls(
    name: str, whose: str, function: Callable[..., Any], tensors: Sequence[torch.Tensor]
) -> dict[HostCall, Launch]:
    """Returns calls of a function, with gradients and without, and the same under torch.compile."""
    calls: dict[HostCall, Launch] = {}
    compiled = torch.compile(_make_apart(function, name), fullgraph=True)
    for title, made in ((name, function), (f"{name}, compiled", compiled)):
        inputs = [x.detach().requires_grad_() for x in tensors]
        calls[HostCall(title, whose)] = partial(made, *tensors)
        calls |= _make_backward_calls(title, whose, made, inputs)
    return calls


def _make_apart(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns the function with code of its own, by which PyTorch finds what it compiled: it would look
    through that of all others first.
    """

    def call(*given: torch.Tensor) -> Any:
        return function(*given)

    return FunctionType(call.__code__.replace(co_name=name), call.__globals__, closure=call.__closure__)


def _draw_heads() -> Sequence[torch.Tensor]:
    shape = SIZES["B"], SIZES["H"], SIZES["N"], 64
    return torch.randn(3, *shape, device="cuda", dtype=torch.bfloat16).unbind()


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return cotangents * len(ctx.saved_tensors)


def _make_backward_calls(
    name: str, whose: str, function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> dict[HostCall, Launch]:
    found = function(*inputs)
    for _ in range(_BEFORE - 1):  # as in training, where all calls but the first are like one before
        found = function(*inputs)
    o = found[0] if isinstance(found, tuple) else found
    wanted, do = [x for x in inputs if x.requires_grad], torch.randn_like(o)
    return {
        HostCall(f"{name}, with what a gradient needs", whose): lambda: function(*inputs),
        HostCall(f"{name}, its backward by autograd", whose): (
            lambda: torch.autograd.grad(o, wanted, do, retain_graph=True)
        ),
    }


def measure_calls(
    calls: Mapping[Which, Launch],
    rounds: int,
    report: Report,
    place: Callable[[Which], AbstractContextManager[None]] = lambda which: nullcontext(),
) -> dict[Which, float]:
    """Measures the microseconds of the host for a call, of the fastest burst. `report` is called with the
    number of each round. place: of a call, the context that its bursts are made in.
    """

    def sample(which: Which, call: Launch) -> float:
        with place(which):
            return host_ms(call, _BURST)

    for which, call in calls.items():
        with place(which):
            for _ in range(3):
                call()
    samplers = {which: partial(sample, which, call) for which, call in calls.items()}
    samples = take_turns(samplers, rounds, report)
    torch.cuda.synchronize()
    return {which: 1e3 * min(found) for which, found in samples.items()}


@dataclass(frozen=True)
class HostBenchmark(Benchmark[HostCell, Mapping[HostCall, float]]):
    stem: ClassVar[str] = "host"
    modules: Sequence[ir.Module]

    @property
    def cells(self) -> Sequence[HostCell]:
        return [HostCell(module) for module in self.modules]

    def describe(self, cell: HostCell) -> str:
        return f"{cell.name:26} {cell.module.target}"

    def jobs(self, cells: Sequence[HostCell]) -> Sequence[Job]:
        modules = [partial(_call_once, cell.module) for cell in cells]
        return [*modules, *(partial(_call_function, name) for name in FUNCTIONS), _call_others]

    def steps(self, cells: Sequence[HostCell], rounds: int) -> int:
        return rounds

    def measure(self, cells: Sequence[HostCell], rounds: int, report: Report) -> dict[HostCall, float]:
        calls = {call: launch for cell in cells for call, launch in calls_of(cell.module).items()}
        with _keeping_graphs():
            return measure_calls(calls | functions() | peers() | replaceable(), rounds, report, place_of)

    def page(self, results: Mapping[HostCall, float], machine: Mapping[str, str]) -> Page:
        rows: dict[str, dict[str, float]] = {}
        for call, microseconds in results.items():
            rows.setdefault(call.what, {})[call.whose] = microseconds
        rounded = {
            what: {whose: round(cost, 2) for whose, cost in costs.items()} for what, costs in rows.items()
        }
        targets = ", ".join(sorted({module.target for module in self.modules}))
        ran = {**machine, "target": targets}
        return Page(
            markdown=_markdown(rows, ran),
            data={"format": 1, "machine": ran, "us": rounded},
        )


def _markdown(rows: Mapping[str, Mapping[str, float]], machine: Mapping[str, str]) -> str:
    whose = list(dict.fromkeys(name for costs in rows.values() for name in costs))
    return document(
        [ran_on(machine)],
        [f"Microseconds of the host for a call, of the fastest burst of {_BURST}."],
        table(
            ["call", *whose],
            (
                (what, *(f"{costs[name]:.1f}" if name in costs else "" for name in whose))
                for what, costs in rows.items()
            ),
        ),
    )
