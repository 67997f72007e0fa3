"""The gradient of q, where nobody asks for another: the same bits by fewer kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from attnc.support.asked import end_behind_q
from attnc.support.cuda_call import Kernel, Kernels
from attnc.support.gradients import Backward, Gradient, Made
from attnc.support.pages import Pages
from attnc.verify.case import Case
from attnc.verify.problem import build
from attnc.verify.subject import Subject
from tests.targets import EACH, skip_without_compiler
from tests.verify.judging import spec, subject_of_text


@dataclass(frozen=True)
class Alone:
    """A launch of one kernel, as Triton's are."""

    name: str
    config: str


def grouped(*kernels: tuple[str, str]) -> tuple[Kernels, ...]:
    made = tuple([Kernel(name, "1", config=config) for name, config in kernels])
    return (Kernels(kernels=made, addresses="q k v", strides="", numbers=""),)


def backward(launches: Sequence[Any], grads: str = "q k v", pages: Pages | None = None) -> Backward:
    gradients = tuple([Gradient(name) for name in grads.split()])
    return Backward(configs={}, tuned={}, made=(), launches=tuple(launches), gradients=gradients, pages=pages)


#: Kernels by the names of their configs, and how many are left.
ORDERS: dict[str, tuple[tuple[tuple[str, str], ...], int]] = {
    "two passes": ((("first", "dq"), ("q", "dq"), ("kv", "dkdv"), ("join", "dkdv")), 2),
    "three": ((("q", "dq"), ("v", "dv"), ("k", "dk")), 1),
    "kept ds": ((("q", "dq"), ("kv", "dkdv"), ("kept", "dq"), ("join", "dkdv")), 3),
    "one pass": ((("first", "dkdv"), ("all", "dkdv"), ("finish", "dkdv")), 0),
    "q last": ((("kv", "dkdv"), ("q", "dq")), 0),
}


@pytest.mark.parametrize("order", ORDERS)
def test_what_comes_behind_the_last_kernel_of_q_is_left_out(order: str) -> None:
    kernels, left = ORDERS[order]
    for launches in (grouped(*kernels), tuple([Alone(*kernel) for kernel in kernels])):
        found = end_behind_q(backward(launches), "q")
        if not left:
            assert found is None
            continue
        assert found is not None
        launched = [x for launch in found.launches for x in getattr(launch, "kernels", (launch,))]
        assert [(x.name, x.config) for x in launched] == list(kernels[:left])
        assert found.gradients == (Gradient("q"),)


def test_launches_behind_those_of_q_are_left_out() -> None:
    launches = (*grouped(("lists", "dq")), *grouped(("q", "dq"), ("kv", "dkdv")), *grouped(("sum", "dkdv")))
    found = end_behind_q(backward(launches), "q")
    assert found is not None
    assert found.launches == (launches[0], *grouped(("q", "dq")))


def test_q_without_a_gradient_has_no_kernels_of_its_own() -> None:
    assert end_behind_q(backward(grouped(("q", "dq"), ("kv", "dkdv")), "k v"), "q") is None
    assert end_behind_q(backward(()), "q") is None


def test_gradients_of_rows_in_pages_are_not_allocated() -> None:
    pages = Pages(table="table", page=16, length="N", axes={"k": "bnh", "v": "bnh"})
    found = end_behind_q(backward(grouped(("q", "dq"), ("kv", "dkdv")), pages=pages), "q")
    assert found is not None
    likes = [Made(f"d{name}", like=name, type="f32") for name in "qkv"]
    assert [found.allocates(made, (2, 3)) for made in likes] == [True, False, False]


LINES = [
    "input q: bf16[B, M, Hkv * G, 32]",
    "input k, v: bf16[B, N, Hkv, 32]{}",
    "score = dot(q, k) / 8",
    "mask = causal",
    "normalize = softmax",
    "output o: bf16[B, M, Hkv * G, 32]",
    "grad q, k, v",
]
IN_PAGES = ["input table: i32[B, P]", "input lens: i32[B]", "length N = lens[b]"]


def made(storage: str, target: str) -> Subject:
    skip_without_compiler(target)
    more = IN_PAGES if storage else []
    lines = [LINES[0], LINES[1].format(storage), *more, *LINES[2:]]
    tiles = "loops = [q, kv], tile.q = 16, tile.kv = 32, warps = 4, stages = 1"
    if target == "triton":
        return subject_of_text(spec(lines, f"{tiles}\n  backward {{ tile.q = 16 }}", target=target))
    return subject_of_text(
        spec(lines, "loops = [q, kv]\n  backward { accumulate.dq = two_pass }", target=target)
    )


def differentiate(function: Callable[..., Any], inputs: Sequence[torch.Tensor], *asked: int) -> list[Any]:
    given = [x.detach() for x in inputs]
    leaves = [given[at].requires_grad_() for at in asked]
    found = function(*given)
    o = found[0] if isinstance(found, tuple) else found
    return [*torch.autograd.grad(o, leaves, torch.ones_like(o))]


@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize("storage", ["", " via paged(table, page = 16)"])
def test_q_alone_has_the_bits_that_it_has_beside_others(storage: str, target: str) -> None:
    subject = made(storage, target)
    dims = {"B": 2, "M": 20, "N": 40, "Hkv": 1, "G": 2}
    problem = build(subject.variant.attention, Case(dims=dims, seed=1), device=subject.device)
    inputs = [torch.as_tensor(x) for x in problem.inputs.values()]
    call = subject.module.CALL
    call.forget()
    every = differentiate(subject.function, inputs, 0, 1, 2)
    for _ in range(6):  # calls that follow themselves are launched without a look
        (alone,) = differentiate(subject.function, inputs, 0)
        assert torch.equal(alone, every[0])
    assert all(map(torch.equal, differentiate(subject.function, inputs, 0, 2), (every[0], every[2])))
    ((of_all,), (of_q,)) = (x.prepared_gradients.values() for x in (call, call.alone))
    assert len(of_q.made) <= len(of_all.made) - 2 * bool(storage)
    assert _count(of_q.launches) < _count(of_all.launches)
    call.forget()
    assert not call.alone.prepared_gradients


def _count(launches: Sequence[Any]) -> int:
    return sum(len(getattr(launch, "kernels", (launch,))) for launch in launches)


def test_a_compiled_call_allocates_nothing_for_what_nobody_asks() -> None:
    subject = made(" via paged(table, page = 16)", "triton")
    dims = {"B": 2, "M": 5, "N": 40, "Hkv": 1, "G": 2}
    problem = build(subject.variant.attention, Case(dims=dims, seed=1), device=subject.device)
    inputs = [torch.as_tensor(x) for x in problem.inputs.values()]
    every = differentiate(subject.function, inputs, 0, 1, 2)
    compiled = torch.compile(subject.function, fullgraph=True, backend="aot_eager")
    for asked in ((0,), (0, 2)):
        found = differentiate(compiled, inputs, *asked)
        assert all(map(torch.equal, found, [every[at] for at in asked]))
    call = subject.module.CALL
    operator = getattr(torch.ops.attnc, f"{call.operator}_backward")
    given = torch.ones_like(inputs[0])
    kept = call.empty_kept(tuple(inputs))
    o = call.execute(tuple(inputs), None, None, None, (*kept, *call.no_extras[len(kept) :]))
    for bits, sizes in ((1, (True, False, False)), (5, (True, False, True)), (0, (False, False, False))):
        results = operator(given, *inputs, o, *kept, "", bits)
        assert tuple(x.numel() > 0 for x in results) == sizes
