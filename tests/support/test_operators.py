"""What stands for a call while torch transforms or compiles it: its operators, and their rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import attnc
from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of torch's transforms

TEXT = """
attention {name} {{
  input q: f32[B, M, H, 16]
  input k, v: f32[B, N, H, 16]
  score = dot(q, k) / sqrt(D)
  mask = causal
  normalize = softmax
  output o: f32[B, M, H, 16]
  {rest}
}}
"""
#: An lse that is kept for gradients, or a result.
FORMS = {"kept": "grad q, k, v", "returned": "output lse: f32[B, H, M]\n  grad q, k, v"}


@pytest.fixture(params=FORMS)
def attend(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    family = attnc.compile(TEXT.format(name="transformed", rest=FORMS[request.param]), target="triton")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found = family(q, k, v)
        o: torch.Tensor = found if request.param == "kept" else found[0] + found[1].mT[..., None]
        return o

    return attend


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def gradients(
    attend: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], weights: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    return torch.autograd.grad((attend(*leaves) * weights).sum(), leaves)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("axis", [0, -1])
def test_torch_func_maps_and_differentiates(attend: Callable[..., torch.Tensor], axis: int) -> None:
    """As torch.autograd does, one after the other: gradients of each sample, too."""
    qs, k, v, weights = drawn((3, 2, 5, 2, 16), (2, 7, 2, 16), (2, 7, 2, 16), (2, 5, 2, 16))
    for _ in range(6):  # calls that follow themselves are launched without a look
        attend(qs[0], k, v)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (attend(q, k, v) * weights).sum()

    expected = [gradients(attend, (q, k, v), weights) for q in qs]
    laid = qs.movedim(0, axis).contiguous()
    axes = (axis, None, None)
    assert torch.equal(vmap(attend, axes)(laid, k, v), torch.stack([attend(q, k, v) for q in qs]))
    nested = vmap(vmap(attend, axes), (0, None, None))(laid[None], k, v)
    assert torch.equal(nested[0, 2], attend(qs[2], k, v))
    each = vmap(grad(loss, argnums=(0, 1, 2)), axes)(laid, k, v)
    for found, wanted in zip(each, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(wanted))

    def whole(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = vmap(attend, axes)(q, k, v)
        return (found * weights).sum()

    dq, dk = grad(whole, argnums=(0, 1))(laid, k)
    torch.testing.assert_close(dq.movedim(axis, 0), torch.stack([one[0] for one in expected]))
    torch.testing.assert_close(dk, sum(one[1] for one in expected))


@pytest.mark.one_in(2)
def test_rows_of_a_jacobian(attend: Callable[..., torch.Tensor]) -> None:
    """By torch.func, and by torch.autograd with gradients in a batch."""
    q, k, v = drawn((1, 2, 1, 16), (1, 3, 1, 16), (1, 3, 1, 16))
    leaf = q.clone().requires_grad_()
    o = attend(leaf, k, v)
    units = torch.eye(o.numel()).view(-1, *o.shape)
    rows = torch.stack([torch.autograd.grad(o, leaf, unit, retain_graph=True)[0] for unit in units])
    torch.testing.assert_close(jacrev(lambda q: attend(q, k, v))(q).flatten(0, 3), rows)
    (found,) = torch.autograd.grad(o, leaf, units, is_grads_batched=True)
    assert torch.equal(found, rows)
    jacobian: Any = torch.autograd.functional.jacobian
    of_torch = jacobian(lambda q: attend(q, k, v), q, vectorize=True)
    torch.testing.assert_close(of_torch.flatten(0, 3), rows)


def test_gradients_of_lse_come_in_batches_too() -> None:
    family = attnc.compile(TEXT.format(name="transformed", rest=FORMS["returned"]), target="triton")
    leaves = [x.requires_grad_() for x in drawn((1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16))]
    results = family(*leaves)
    many = [torch.stack(drawn(x.shape, x.shape, seed=1)) for x in results]
    for chosen in ((0,), (1,), (0, 1)):
        asked, given = [results[at] for at in chosen], [many[at] for at in chosen]
        found = torch.autograd.grad(asked, leaves, given, is_grads_batched=True, retain_graph=True)
        for number in range(2):
            one = torch.autograd.grad(asked, leaves, [x[number] for x in given], retain_graph=True)
            assert all(torch.equal(x[number], y) for x, y in zip(found, one, strict=True))


def test_what_has_no_rule_is_refused_by_name(attend: Callable[..., torch.Tensor]) -> None:
    q, k, v = drawn((1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16))
    with pytest.raises(RuntimeError, match=r"^transformed has no forward-mode derivative"):
        jvp(lambda q: attend(q, k, v), (q,), (q,))
    with pytest.raises(RuntimeError, match=r"^transformed has no second derivative"):
        grad(lambda q: grad(lambda q: attend(q, k, v).sum())(q).sum())(q)
    family = attnc.compile(TEXT.format(name="without", rest=""), target="triton")
    assert vmap(lambda q: family(q, k, v))(q[None]).shape == (1, *q.shape)
    assert vmap(lambda q: family(q, k, v))(q[None][:0]).shape == (0, *q.shape)
    with pytest.raises(RuntimeError, match=r"^without has no backward"):
        grad(lambda q: vmap(lambda q: family(q, k, v))(q[None]).sum())(q)
    with pytest.raises(RuntimeError, match=r"^without: out: cannot be given inside of torch\.vmap"):
        vmap(lambda q: family(q, k, v, out=torch.empty_like(q)))(q[None])


def test_tangents_of_a_transform_around_gradients_are_refused(attend: Callable[..., torch.Tensor]) -> None:
    """Forward over backward, which tensors of the inner transform do not show: never a silent zero."""
    q, k, v = drawn((1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16))
    for transform in (hessian, lambda f: jacfwd(grad(f)), lambda f: jacfwd(lambda s: vmap(f)(s[None]))):
        with pytest.raises(RuntimeError, match=r"^transformed has no forward-mode derivative"):
            transform(lambda s: attend(q * s, k, v).square().sum())(torch.ones(()))


def test_tangents_are_refused_inside_of_torch_compile(attend: Callable[..., torch.Tensor]) -> None:
    q, k, v = drawn((1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16))

    def pushed() -> Any:
        return jvp(lambda q: attend(q, k, v), (q,), (q,))

    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="transformed has no forward-mode derivative"):
        torch.compile(pushed, backend="aot_eager")()


def test_what_is_first_called_in_a_transform_is_made_outside_of_it() -> None:
    q, k, v = drawn((2, 1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16))

    def attend(q: torch.Tensor) -> Any:
        return attnc.compile(TEXT.format(name="inside", rest=""), target="triton", cache=False)(q, k, v)

    assert torch.equal(vmap(attend)(q)[1], attend(q[1]))


@pytest.mark.nightly
def test_a_torch_that_overrides_nothing_unasked_registers_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those before 2.12: an operator of Python's has a derivative before it gets its own."""
    impl: Any = torch.library.Library.impl

    def strict(library: Any, *given: Any, allow_override: bool = False, **named: Any) -> Any:
        return impl(library, *given, allow_override=allow_override, **named)

    monkeypatch.setattr(torch.library.Library, "impl", strict)
    family = attnc.compile(TEXT.format(name="guarded", rest="grad q, k, v"), target="triton")
    q, k, v, weights = drawn((1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16), (1, 5, 2, 16))
    compiled = torch.compile(family.function, fullgraph=True, backend="aot_eager")
    found = gradients(compiled, (q, k, v), weights)
    assert all(map(torch.equal, found, gradients(family, (q, k, v), weights)))


@pytest.mark.slow
def test_kernels_that_serve_two_specs_have_operators_of_both() -> None:
    """The same kernels make gradients of k and v, whichever of them are asked for, and in whatever order."""
    tensors = dict(zip("qkv", drawn((1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16)), strict=True))
    for names in ("q, k, v", "v, q", "q, k"):
        family = attnc.compile(TEXT.format(name="shared", rest=f"grad {names}"), target="triton")
        leaves = {name: x.clone().requires_grad_(name in names) for name, x in tensors.items()}
        wanted = [x for x in leaves.values() if x.requires_grad]
        compiled = torch.compile(family.function, fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(compiled(*leaves.values()).square().sum(), wanted)
        expected = torch.autograd.grad(family(*leaves.values()).square().sum(), wanted)
        assert all(map(torch.equal, found, expected)), names


@pytest.mark.one_in(2)
def test_torch_func_works_inside_of_torch_compile(attend: Callable[..., torch.Tensor]) -> None:
    """In the graph, with each sample and without; and gradients of a compiled call come in batches."""
    qs, k, v, weights = drawn((3, 1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16), (3, 1, 5, 2, 16))

    def each(qs: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return vmap(grad(lambda q: (attend(q, k, v) * weights[0]).sum()))(qs)

    torch.compiler.reset()
    found = torch.compile(each, fullgraph=True, backend="aot_eager")(qs, k, v)
    torch.testing.assert_close(found, each(qs, k, v))
    leaves = [x.requires_grad_() for x in (qs[0], k, v)]
    o = torch.compile(attend, fullgraph=True, backend="aot_eager")(*leaves)
    batch = torch.autograd.grad(o, leaves, weights, is_grads_batched=True, retain_graph=True)
    for number in range(3):
        one = torch.autograd.grad(o, leaves, weights[number], retain_graph=True)
        for found, wanted in zip(batch, one, strict=True):
            torch.testing.assert_close(found[number], wanted)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("wants", [False, True], ids=["results", "gradients"])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_calls_that_follow_themselves_are_eager_ones(form: str, wants: bool) -> None:
    """Launched without a look at their tensors, until these look otherwise."""
    family = attnc.compile(TEXT.format(name="followed", rest=FORMS[form]), target="triton")
    torch.compiler.reset()
    compiled = torch.compile(lambda *given: family(*given), fullgraph=True, backend="aot_eager")
    call = family.module.default.CALL
    call.forget()
    shapes = (1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16)
    guards = []
    for number in range(9):
        tensors = drawn(*shapes, seed=number)
        if number == 7:
            tensors[0] = tensors[0].mT.contiguous().mT.transpose(1, 2).contiguous().transpose(1, 2)
        if number == 8:
            tensors[1] = torch._neg_view(tensors[1])
        leaves = [x.detach().requires_grad_(wants) for x in tensors]
        found, right = ([*_tuple(run(*leaves))] for run in (compiled, family))
        if wants:
            found += torch.autograd.grad(found[0], leaves, torch.ones_like(found[0]))
            right += torch.autograd.grad(right[0], leaves, torch.ones_like(right[0]))
        assert len(found) == len(right)
        for x, y in zip(found, right, strict=True):
            assert torch.equal(x, y)
            assert x.stride() == y.stride()
        guards.append(call.repeated_operator.guard)
    assert guards[0] is None
    assert guards[6] is not None
    call.forget()
    assert call.repeated_operator.guard is None


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.nightly
@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)], ids=["o", "lse", "both"])
def test_a_graph_holds_no_gradient_that_nobody_has(of: tuple[int, ...]) -> None:
    """One of zeros would be filled, and read by the kernels."""
    family = attnc.compile(TEXT.format(name="followed", rest=FORMS["returned"]), target="triton")
    graphs: list[str] = []

    def show(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Any:
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    def attend(*given: torch.Tensor) -> torch.Tensor:
        found = family(*given)
        return torch.cat([found[at].flatten() for at in of])

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=show, bw_compiler=show)
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    leaves = [x.requires_grad_() for x in drawn((1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16))]
    found, right = (torch.autograd.grad(run(*leaves).sum(), leaves) for run in (compiled, attend))
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y)
    _, backward = graphs
    given = backward.partition("_backward.default(")[2].split(", ")[:2]
    assert [x == "None" for x in given] == [at not in of for at in (0, 1)]
    assert "zeros" not in backward
    assert "full" not in backward
