"""PyTorch's operators of flash attention on attnc: here for the CPU, where PyTorch has none of its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attnc.compat import sdpa
from attnc.compat.call import Call
from tests.compat.flash_reference import Meaning, both, judge

aten = torch.ops.aten


@pytest.fixture
def active() -> Iterator[None]:
    handle = sdpa.activate("CPU")
    yield
    handle.remove()


def tensors(*, rows: int = 21, keys: int = 37, heads: int = 4) -> Any:
    torch.manual_seed(0)
    q = torch.randn(2, heads, rows, 32).half().requires_grad_()
    k, v = (torch.randn(2, heads, keys, 32).half().requires_grad_() for _ in range(2))
    return q, k, v


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dropout", "scale"), [(0.0, None), (0.0, 0.3), (0.3, None)])
def test_sdpa_and_its_gradients(active: None, dropout: float, scale: float | None) -> None:
    """Through the dispatcher and PyTorch's own derivatives."""
    q, k, v = tensors()
    torch.manual_seed(1)
    o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, dropout, False, scale=scale)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    if dropout:
        torch.manual_seed(1)
        again = aten._scaled_dot_product_flash_attention(q, k, v, dropout, False)[0]
        assert torch.equal(o, again)
        eye = torch.eye(37, 37).half().expand(2, 4, 37, 37)
        torch.manual_seed(1)
        p = aten._scaled_dot_product_flash_attention(q[..., :32], k, eye, dropout, False)[0]
        meaning = Meaning(scale=scale, dropout=dropout, keep=p > 0)
        assert 0.2 < (p == 0).float().mean() < 0.4
    else:
        meaning = Meaning(scale=scale)
    right, plain = both(turned, meaning)
    judge("o", o.transpose(1, 2), right[0], plain[0])
    judge("lse", lse, right[1], plain[1])
    assert o.stride() == q.stride()
    do = torch.randn_like(o)
    sets = [
        torch.autograd.grad(x, (q, k, v), do) for x in (o, right[0].transpose(1, 2), plain[0].transpose(1, 2))
    ]
    for name, got, exact, low in zip(("dq", "dk", "dv"), *sets, strict=True):
        judge(name, got, exact, low, rate=3.0)


def test_packed_sequences_and_windows(active: None) -> None:
    q, k, v = (x[0].transpose(0, 1).detach().requires_grad_() for x in tensors(rows=37))
    ends = torch.tensor([0, 12, 37], dtype=torch.int32)
    o, lse, *_ = aten._flash_attention_forward(
        q, k, v, ends, ends, 25, 25, 0.0, True, False, window_size_left=8, window_size_right=0
    )
    assert lse.shape == (4, 37)
    parts = [[x[None, rows] for x in (q, k, v)] for rows in (slice(0, 12), slice(12, 37))]
    pairs = [both(part, Meaning(causal=True, left=8)) for part in parts]
    right, plain = (torch.cat([pair[i][0][0] for pair in pairs]) for i in range(2))
    judge("o", o, right, plain)
    do = torch.randn_like(o)
    sets = [torch.autograd.grad(x, (q, k, v), do) for x in (o, right, plain)]
    for name, got, exact, low in zip(("dq", "dk", "dv"), *sets, strict=True):
        judge(name, got, exact, low, rate=3.0)


def test_out_and_used_keys(active: None) -> None:
    with torch.no_grad():
        q, k, v = (x.transpose(1, 2) for x in tensors())
        used = torch.tensor([5, 30], dtype=torch.int32)
        out = torch.empty_like(q)
        lse = aten._flash_attention_forward_no_dropout_inplace(
            out, q, k, v, None, None, 21, 37, 0.0, False, False, seqused_k=used
        )
        right, plain = both((q, k, v), Meaning(), lengths=used)
    judge("out", out, right[0], plain[0])
    judge("lse", lse, right[1], plain[1])


@pytest.mark.parametrize("name", sdpa._FUNCTIONS)
def test_functions_have_the_schemas_of_the_operators(name: str) -> None:
    packet, _, overload = name.partition(".")
    if not sdpa._is_there(name):
        pytest.skip(f"this PyTorch has no aten::{name}")
    schema = getattr(getattr(aten, packet), overload or "default")._schema
    signature = inspect.signature(cast(Any, sdpa._FUNCTIONS[name]))
    positional = [object() for argument in schema.arguments if not argument.kwarg_only]
    signature.bind(*positional, **{a.name: object() for a in schema.arguments if a.kwarg_only})
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    wanted = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert named[: len(wanted)] == wanted[: len(named)]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    ours = {p.name: p.default for p in parameters if p.default is not p.empty and p.name in defaults}
    assert ours == {name: defaults[name] for name in ours}


@pytest.mark.parametrize("is_packed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_calls_that_repeat_give_what_each_is_asked_for(
    is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside calls with dropout and with a result of the caller's; in any layout, and without a graph."""
    leaves = tensors(rows=9, keys=9, heads=2)
    q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves)
    ends = None
    if is_packed:
        q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v))
        ends = torch.tensor([0, 9, 18], dtype=torch.int32)
    made = Mock(wraps=Call)
    monkeypatch.setattr(sdpa, "Call", made)

    def forward(p: float = 0.0, **options: Any) -> Any:
        return sdpa.flash_attention_forward(q, k, v, ends, ends, 9, 9, p, True, False, **options)

    def backward(do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, state: Any, p: float = 0.0) -> Any:
        given = (q, k, v, o, lse, ends, ends, 9, 9, p, True, *state)
        found = sdpa.flash_attention_backward(do, *given)
        assert not any(x.requires_grad for x in found)
        return found

    o, lse, *state, _ = forward()
    do = torch.randn_like(o)
    gradients = backward(do, o, lse, state)
    turned = do.mT.contiguous().mT
    for _ in range(4):
        made.reset_mock()
        for first, second in zip((o, lse), forward(), strict=False):
            assert torch.equal(first, second)
        with torch.no_grad():
            out = torch.full_like(o, torch.nan)
            assert forward(out=out)[0] is out
            assert torch.equal(out, o)
            dropped, sums, *drawn, _ = forward(0.5)
            assert not torch.equal(dropped, o)
        assert all(map(torch.equal, backward(do, o, lse, state), gradients))
        of_dropped = backward(do, dropped, sums, drawn, 0.5)
        assert not torch.equal(of_dropped[2], gradients[2])
    assert made.call_count <= 3  # with dropout, and with a result of the caller's
    for other in ((turned, o, lse), (do, o.mT.contiguous().mT, lse), (do, o, lse.mT.contiguous().mT)):
        for _ in range(6):
            assert all(map(torch.equal, backward(*other, state), gradients))


def test_what_it_cannot_do_is_refused_by_name(active: None) -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match="return_debug_mask"):
        aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, True)
    with pytest.raises(ValueError, match="k_descale"):
        aten._scaled_dot_product_flash_attention.quantized(q, k, v, None, torch.ones(1), None)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with torch.no_grad(), pytest.raises(ValueError, match="block_table"):
        aten._flash_attention_forward(q, k, v, None, None, 1, 1, 0.0, False, False, block_table=table)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["_flash_attention", "_scaled_dot_product_flash_attention"])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_gradients_lie_as_compiled_code_is_told(
    active: None, name: str, order: tuple[int, ...], *, is_shared: bool
) -> None:
    """By PyTorch's function of shapes, for the first call and those that repeat it. order: axes in memory;
    is_shared: all heads have the keys of one, in one place.
    """
    q, k, v = (x.detach().permute(order).contiguous().permute(order) for x in tensors())
    if is_shared:
        k = k[:, :1].expand(k.shape)
    packed: tuple[Any, ...] = ()
    if name == "_flash_attention":  # of [B, M, H, D]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        packed = (None, None, 21, 37, 0.0, False, False)
    forward = getattr(aten, f"{name}_forward" if packed else name)
    backward = getattr(aten, f"{name}_backward")
    o, lse, *state, _ = forward(q, k, v, *packed)
    do = torch.randn_like(o)
    given = (do, q, k, v, o, lse, None, None, 21, 37, 0.0, False, *state[-2:])
    told = backward(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in given))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad(forward(*leaves, *packed)[0], leaves, do)
    for _ in range(3):
        found = backward(*given)
        assert [x.stride() for x in found] == [x.stride() for x in told]
        assert all(map(torch.equal, found, right))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_calls_that_follow_each_other_have_results_of_their_own(active: None, order: tuple[int, ...]) -> None:
    """Each as the first, which lie as the query does. order: axes in memory."""
    q, k, v = (x.detach().permute(order).contiguous().permute(order) for x in tensors())
    found = [aten._scaled_dot_product_flash_attention(q, k, v)[:2] for _ in range(9)]
    for o, lse in found:
        assert torch.equal(o, found[0][0])
        assert torch.equal(lse, found[0][1])
        assert o.stride() == q.stride()
    assert len({x.data_ptr() for results in found for x in results}) == 2 * len(found)


def test_columns_of_results_lie_beside_each_other(active: None) -> None:
    """Whichever way those of a query do."""
    q, k, v = (x.detach() for x in tensors())
    apart = q.transpose(2, 3).contiguous().transpose(2, 3)
    for _ in range(3):
        o = aten._scaled_dot_product_flash_attention(apart, k, v)[0]
        assert o.stride(-1) == 1
        assert torch.equal(o, aten._scaled_dot_product_flash_attention(q, k, v)[0])


@pytest.mark.parametrize("name", ["alibi_slopes", "seqused_k"])
def test_gradients_are_refused_beside_what_pytorchs_backward_does_not_take(active: None, name: str) -> None:
    q, k, v = (x.transpose(1, 2) for x in tensors())
    given = {"alibi_slopes": torch.ones(4), "seqused_k": torch.tensor([5, 30], dtype=torch.int32)}
    options = {name: given[name]}
    with pytest.raises(RuntimeError, match=f"attnc for PyTorch with {name}.*query"):
        aten._flash_attention_forward(q, k, v, None, None, 21, 37, 0.0, False, False, **options)
    with torch.no_grad():
        o = aten._flash_attention_forward(q, k, v, None, None, 21, 37, 0.0, False, False, **options)[0]
    assert not o.requires_grad


def test_it_is_active_when_the_user_says_so_and_not_before() -> None:
    attention = torch.nn.attention
    sdpa.register()
    assert "attnc" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl("attnc")
    assert attention.current_flash_attention_impl() == "attnc"
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    assert scaled_dot_product_attention(*tensors()).shape == (2, 4, 21, 32)


def test_nothing_is_in_place_before_and_after() -> None:
    """This file has imported the module, and the CPU has no kernel of PyTorch's own."""
    operators = [f"aten::{name}" for name in sdpa._FUNCTIONS if sdpa._is_there(name)]

    def present() -> list[bool]:
        return [torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU") for name in operators]

    assert not any(present())
    handle = sdpa.activate("CPU")
    assert all(present())
    handle.remove()
    assert not any(present())


def test_what_nobody_reads_is_allocated_once(active: None) -> None:
    """In inference mode first: gradients are computed with the same tensors afterwards."""
    sdpa._UNREAD.clear()
    q, k, v = tensors()
    with torch.inference_mode():
        first = aten._scaled_dot_product_flash_attention(q, k, v)[6:]
    found = [aten._scaled_dot_product_flash_attention(q, k, v) for _ in range(8)]
    assert all(
        x.data_ptr() == y.data_ptr() for results in found for x, y in zip(results[6:], first, strict=True)
    )
    for o, *_ in found:
        assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), (q, k, v)))
    torch.manual_seed(0)
    drawn = [aten._scaled_dot_product_flash_attention(q, k, v, 0.5)[6] for _ in range(2)]
    assert not torch.equal(*(x.view(torch.int64)[0] for x in drawn))
    assert len({x.data_ptr() for x in (*drawn, first[0])}) == 3


def test_what_leaves_a_graph_is_allocated_anew(active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are recorded beside the default stream, and own what leaves them."""
    stream = 0
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    q = Mock(is_cuda=True, device=torch.device("cpu"), dtype=torch.half, get_device=lambda: 0)
    monkeypatch.setattr(sdpa, "allocate", lambda layouts, like: [torch.empty(1) for _ in layouts])
    sdpa._UNREAD.clear()
    kept = sdpa._unread(q)
    stream = 7
    assert not {x.data_ptr() for x in sdpa._unread(q)} & {x.data_ptr() for x in kept}
    stream = 0
    assert sdpa._unread(q) is kept
    sdpa._UNREAD.clear()
