"""Gradients of calls like one before: nothing is looked up, and what differs is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnc
from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

TEXT = """
attention repeated {{
  input q: f32[B, M, H, 16]
  input k, v: f32[B, N, H, 16]
  score = dot(q, k) / sqrt(D)
  mask = causal
  normalize = softmax
  output o: f32[B, M, H, 16]
  {lse}
  grad q, k, v
}}
"""
#: An lse that is kept for gradients, or a result.
FORMS = {"kept": "", "returned": "output lse: f32[B, H, M]"}


@pytest.fixture(params=FORMS)
def attention(request: pytest.FixtureRequest) -> Any:
    family = attnc.compile(TEXT.format(lse=FORMS[request.param]), target="triton")
    family.module.default.CALL.forget()
    return family


def lookups(family: Any, patch: pytest.MonkeyPatch) -> list[str]:
    """The calls of a family whose tensors are looked at, noted as they are made."""
    call, found = family.module.default.CALL, list[str]()
    names = type(call).gradients.__globals__["launch_gradients"].__globals__  # of the support package in use
    execute, find = call.execute, names["_find_gradients"]

    def executed(*given: Any, **named: Any) -> Any:
        found.append("forward")
        return execute(*given, **named)

    def gradients(*given: Any) -> Any:
        found.append("gradients")
        return find(*given)

    patch.setattr(call, "execute", executed)
    patch.setitem(names, "_find_gradients", gradients)
    return found


def drawn(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16), (1, 5, 2, 16))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def results(family: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    *tensors, do = given
    leaves = [x.detach().requires_grad_() for x in tensors]
    found = family(*leaves)
    o = found[0] if isinstance(found, tuple) else found
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def exact(given: list[torch.Tensor]) -> list[torch.Tensor]:
    *tensors, do = given
    q, k, v = (x.double().requires_grad_() for x in tensors)
    kept = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    o = attend(turned[0], turned[1], turned[2], attn_mask=kept).transpose(1, 2)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())]


def judge(found: list[torch.Tensor], given: list[torch.Tensor]) -> None:
    for got, right in zip(found, exact(given), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4)


def test_calls_that_follow_themselves_are_not_looked_at(
    attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(6):
        judge(results(attention, drawn(seed)), drawn(seed))
    found = lookups(attention, monkeypatch)
    for seed in range(6, 9):
        judge(results(attention, drawn(seed)), drawn(seed))
    assert found == []


def _negated(given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*given[:3], torch._neg_view(given[3])]


def _turned(given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*given[:3], given[3].transpose(1, 3).contiguous().transpose(1, 3)]


def _longer(given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [given[0], *(torch.cat([x, x[:, :1]], 1) for x in given[1:3]), given[3]]


def _strided(given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [given[0].repeat(1, 1, 1, 2)[..., :16], *given[1:]]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("change", [_negated, _turned, _longer, _strided])
def test_what_differs_is_looked_at(
    change: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    attention: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(6):
        results(attention, drawn(seed))
    found = lookups(attention, monkeypatch)
    given = change(drawn(7))
    judge(results(attention, given), given)
    assert "gradients" in found
    judge(results(attention, drawn(8)), drawn(8))


def test_calls_of_other_shapes_that_follow_themselves_are_right(attention: Any) -> None:
    """What is kept for gradients has the rows of its own call."""
    for rows in (5, 9, 3):
        for seed in range(8):
            *keys, do = drawn(seed)
            given = [torch.cat([x, x], 1)[:, :rows] for x in (keys[0], do)]
            given = [given[0], *(torch.cat([x, x], 1)[:, :9] for x in keys[1:]), given[1]]
            judge(results(attention, given), given)


def test_a_gradient_of_lse_is_looked_at() -> None:
    """It may be there or not, call by call."""
    family = attnc.compile(TEXT.format(lse=FORMS["returned"]), target="triton")
    right: dict[bool, list[torch.Tensor]] = {}
    for step in range(14):
        q, k, v, do = drawn(0)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o, lse = family(*leaves)
        both = bool(step % 7 > 3)
        total = (o * do).sum() + (lse.sum() if both else 0.0)
        found = list(torch.autograd.grad(total, leaves))
        for x, y in zip(found, right.setdefault(both, found), strict=True):
            assert torch.equal(x, y)
    assert not torch.equal(right[True][0], right[False][0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", range(7))
def test_each_tensor_of_another_layout_is_looked_at(place: int) -> None:
    """Also those that a forward has made: whoever kept them may have laid them out anew."""
    family = attnc.compile(TEXT.format(lse=FORMS["returned"]), target="triton")
    q, k, v, do = given = drawn(3)
    o, lse = family(q, k, v)
    tensors = [do, torch.zeros_like(lse), q, k, v, o, lse]
    right = exact(given)[1:]
    for turned in (False, True, False):
        seen = [*tensors]
        if turned:
            seen[place] = tensors[place].transpose(1, 2).contiguous().transpose(1, 2)
        found = family.module.default.CALL.gradients(*seen, None)
        for got, expected in zip(found, right, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_fewer_gradients_are_looked_at(attention: Any) -> None:
    for seed in range(6):
        results(attention, drawn(seed))
    q, k, v, do = drawn(9)
    q.requires_grad_()
    found = attention(q, k, v)
    o = found[0] if isinstance(found, tuple) else found
    (dq,) = torch.autograd.grad(o, q, do)
    torch.testing.assert_close(dq.double(), exact([q.detach(), k, v, do])[1], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        again = attention(q, k, v)
    assert not (again[0] if isinstance(again, tuple) else again).requires_grad


def test_calls_without_gradients_repeat_whatever_tensors_require(
    attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As inside of a compiled graph, whose inputs may require some; and not beyond."""
    call = attention.module.default.CALL
    given = [x.requires_grad_() for x in drawn(0)[:3]]
    with torch.no_grad():
        first, *_ = (attention(*given) for _ in range(6))
        assert call.repeated_unrecorded.guard is not None
        monkeypatch.setattr(call, "key_of", None)  # no look at them
        torch.testing.assert_close(attention(*given), first, rtol=0, atol=0)
        monkeypatch.undo()
    found = attention(*given)
    assert (found[0] if isinstance(found, tuple) else found).requires_grad
    call.forget()
    assert call.repeated_unrecorded.guard is None


WINDOW = TEXT.format(lse="output lse: f32[B, H, M]").replace(
    "mask = causal", "input left: i32[]\n  mask = q_pos - left <= kv_idx and causal"
)


@pytest.mark.parametrize("wants", [False, True])
def test_numbers_on_the_device_are_tensors_as_others(wants: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with them repeat. Python's numbers, and other lengths of the window, are looked at."""
    family = attnc.compile(WINDOW, target="triton")
    family.module.default.CALL.forget()
    q, k, v, _ = drawn(0)
    q.requires_grad_(wants)
    windows = [torch.tensor(x, dtype=torch.int32) for x in (1, 3)]
    right = [family(q, k, v, int(left))[0] for left in windows]
    assert not torch.equal(*right)
    for _ in range(6):
        family(q, k, v, windows[0])
    found = lookups(family, monkeypatch)
    call, runs = family.module.default.CALL, list[str]()
    tensors_of = call.tensors_of

    def noted(given: Any) -> Any:
        runs.append("numbers")
        return tensors_of(given)

    monkeypatch.setattr(call, "tensors_of", noted)
    for left, o in zip(windows, right, strict=True):
        assert torch.equal(family(q, k, v, left)[0], o)
    assert found == runs == []
    for left, o in zip(windows, right, strict=True):
        assert torch.equal(family(q, k, v, int(left))[0], o)
    assert runs
    with pytest.raises(TypeError, match=r"left: expected dtype torch\.int32, got torch\.int64"):
        family(q, k, v, windows[0].long())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_gradients_lie_as_their_inputs(attention: Any, order: tuple[int, ...]) -> None:
    """As torch's own do, for the first call, for those that repeat it, and as torch.compile is told."""
    *inputs, do = drawn(5)
    plain = [x.clone().requires_grad_() for x in inputs]
    right = torch.autograd.grad(first_of(attention(*plain)), plain, do)
    back = [order.index(axis) for axis in range(4)]
    laid = [x.permute(order).contiguous().permute(back).requires_grad_() for x in inputs]
    for _ in range(6):
        found = torch.autograd.grad(first_of(attention(*laid)), laid, do)
        assert [x.stride() for x in found] == [x.stride() for x in laid]
        assert all(map(torch.equal, found, right))
    call = attention.module.default.CALL
    call.register_operators()
    with torch.no_grad():
        torch.library.opcheck(getattr(torch.ops.attnc, call.operator), (*laid, ""))


def first_of(results: Any) -> torch.Tensor:
    first: torch.Tensor = results[0] if isinstance(results, tuple) else results
    return first


def test_gradients_are_resumed_where_kernels_take_what_is_there() -> None:
    """With the same results; not of a lazily negated tensor, nor of rows of do with gaps between elements."""
    family = attnc.compile(TEXT.format(lse=FORMS["returned"]), target="triton")
    call, (q, k, v, do) = family.module.default.CALL, drawn(3)
    o, lse = family(q, k, v)
    tensors = [do, torch.zeros_like(lse), q, k, v, o, lse]

    def look(layout: Any) -> Any:
        return layout

    call.forget()
    assert call.resume_gradients(tensors, look) is None
    right = call.gradients(*tensors, None)
    again = call.resume_gradients(tensors, look)
    assert again is not None
    assert all(map(torch.equal, again(tensors), right))
    for place in range(len(tensors)):
        changed = [*tensors]
        changed[place] = torch._neg_view(changed[place])
        assert call.resume_gradients(changed, look) is None
    gaps = do.repeat_interleave(2, -1)[..., ::2]
    assert torch.equal(call.gradients(gaps, *tensors[1:], None)[0], right[0])
    assert call.resume_gradients([gaps, *tensors[1:]], look) is None


def test_what_has_no_gradients_says_so_however_often_it_ran() -> None:
    text = TEXT.format(lse="").replace("  grad q, k, v\n", "")
    text += "schedule repeated for triton { loops = [q, kv] }\n"
    call, (q, k, v, _) = attnc.compile(text, target="triton").module.default.CALL, drawn(3)
    right, wanted = call.run((q, k, v)), tuple[torch.Tensor, ...]()
    for step in range(6):
        call.run((q, k, v))
        wanted = tuple(x.clone().requires_grad_(place == step % 3) for place, x in enumerate((q, k, v)))
        with pytest.raises(RuntimeError, match=r"^repeated has no backward"):
            call.run(wanted)
    with torch.no_grad():
        assert torch.equal(call.run(wanted), right)
