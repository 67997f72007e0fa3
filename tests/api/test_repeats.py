"""Calls of public functions that are like one before: the same results without another look at their
arguments, and a look where anything differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnc.adapters.bands import BAND, Band
from attnc.adapters.flashinfer import BatchDecodeWithPagedKVCacheWrapper
from attnc.adapters.pages import attend
from attnc.adapters.transformers import attention
from attnc.api import repeats
from attnc.compat import sdpa
from attnc.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from attnc.verify.interpreter import ensure_interpreter
from tests.by_day import each_by_day

ensure_interpreter()

#: Tensors of a call by name -> its results.
Door = Callable[[dict[str, Any]], Any]
B, M, N, H, HKV, D, PAGE = 2, 1, 32, 4, 2, 16, 16


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    repeats.forget()
    yield
    repeats.forget()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).half()


def dense() -> dict[str, Any]:
    return {"q": draw(B, 5, H, D), "k": draw(B, N, HKV, D, seed=1), "v": draw(B, N, HKV, D, seed=2)}


def by_head() -> dict[str, Any]:
    """With numbers for each head, of which kernels have float32."""
    return {"sinks": draw(H, seed=3), "slopes": draw(H, seed=4).abs().float()}


def packed() -> dict[str, Any]:
    ends = torch.tensor([0, 3, 10], dtype=torch.int32)
    return {
        "q": draw(10, H, D), "k": draw(10, HKV, D, seed=1), "v": draw(10, HKV, D, seed=2), "starts": ends,
        "starts_k": ends,
    }  # fmt: skip


def paged() -> dict[str, Any]:
    pages = B * N // PAGE
    return {
        "q": draw(B, H, D), "k": draw(pages, PAGE, HKV, D, seed=1), "v": draw(pages, PAGE, HKV, D, seed=2),
        "table": torch.arange(pages, dtype=torch.int32).view(B, -1).flip(0).contiguous(),
        "lengths": torch.tensor([17, 30], dtype=torch.int32), "sinks": torch.ones(H),
    }  # fmt: skip


def banded() -> dict[str, Any]:
    """For transformers, heads before rows."""
    turned = {name: x.transpose(1, 2) for name, x in dense().items()}
    ends = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [N, N - 1], [N, N])]
    return turned | dict(zip(("first", "last", "stop"), ends, strict=True))


def call_transformers(x: dict[str, Any]) -> Any:
    carrier = torch.full((B, 1, 1, 1), torch.nan)
    setattr(carrier, BAND, Band(x["first"], x["last"], x["stop"], None, 0))
    return attention(torch.nn.Module(), x["q"], x["k"], x["v"], carrier)[0]


def call_engine(x: dict[str, Any], tokens: int) -> torch.Tensor:
    out = torch.full_like(x["q"], torch.nan)
    attend(
        x["q"], x["k"], x["v"], out, cu_seqlens_q=torch.arange(B + 1, dtype=torch.int32),
        seqused_k=x["lengths"], block_table=x["table"], scale=0.2, left=-1, softcap=0.0,
        by_head={"alibi_slopes": None, "sinks": x["sinks"]}, tokens=tokens,
    )  # fmt: skip
    return out


SEED = torch.zeros(2, dtype=torch.uint64)
WRAPPERS: list[Any] = []


def call_flashinfer(x: dict[str, Any]) -> Any:
    if not WRAPPERS:
        WRAPPERS.append(BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), "NHD"))
        ends, last = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([1, 14], dtype=torch.int32)
        pages = torch.tensor([2, 3, 0, 1], dtype=torch.int32)
        WRAPPERS[0].plan(ends, pages, last, H, HKV, D, PAGE, q_data_type=torch.float16)
    out = torch.full_like(x["q"], torch.nan) if x["sinks"] is None else None
    return WRAPPERS[0].run(x["q"], (x["k"], x["v"]), return_lse=True, out=out)


DOORS: dict[str, tuple[Callable[[], dict[str, Any]], Door]] = {
    "flash_attn_func": (
        dense,
        lambda x: flash_attn_func(x["q"], x["k"], x["v"], causal=True, return_lse=True),
    ),
    "softmax_scale": (dense, lambda x: flash_attn_func(x["q"], x["k"], x["v"], softmax_scale=0.3)),
    "a sink": (
        lambda: dense() | by_head(),
        lambda x: flash_attn_func(x["q"], x["k"], x["v"], s_aux=x["sinks"], return_lse=True),
    ),
    "a sink of packed sequences": (
        lambda: packed() | by_head(),
        lambda x: flash_attn_varlen_func(
            x["q"], x["k"], x["v"], x["starts"], x["starts_k"], alibi_slopes=x["slopes"], sinks=x["sinks"]
        ),
    ),
    "a sink of a cache": (
        lambda: paged() | by_head(),
        lambda x: flash_attn_with_kvcache(
            x["q"][:, None],
            x["k"],
            x["v"],
            cache_seqlens=x["lengths"],
            block_table=x["table"],
            alibi_slopes=x["slopes"],
            learnable_sink=x["sinks"],
        ),
    ),
    "flash_attn_varlen_func": (
        packed,
        lambda x: flash_attn_varlen_func(x["q"], x["k"], x["v"], x["starts"], x["starts_k"], causal=True),
    ),
    "flash_attn_with_kvcache": (
        paged,
        lambda x: flash_attn_with_kvcache(
            x["q"][:, None], x["k"], x["v"], cache_seqlens=x["lengths"], block_table=x["table"]
        ),
    ),
    "transformers": (banded, call_transformers),
    "sdpa": (banded, lambda x: sdpa.sdpa_forward(x["q"], x["k"], x["v"], 0.0, True)[:2]),
    "varlen_attn": (
        packed,
        lambda x: sdpa.flash_attention_forward(
            x["q"], x["k"], x["v"], x["starts"], x["starts_k"], 7, 7, 0.0, True, False
        )[:2],
    ),
    "sdpa, gradients": (
        banded,
        lambda x: sdpa.sdpa_backward(
            x["q"],
            x["q"],
            x["k"],
            x["v"],
            x["q"],
            torch.ones(B, H, 5),
            None,
            None,
            5,
            N,
            0.0,
            True,
            SEED,
            SEED,
        ),
    ),
    "engines, one token": (paged, partial(call_engine, tokens=1)),
    "engines, a prompt": (paged, partial(call_engine, tokens=0)),
    "FlashInfer": (paged, call_flashinfer),
}


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same rows further apart."""
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same elements at an address that is no multiple of 16."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


#: What differs from the calls before: names of tensors that it is done to, and what is done.
CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "other data": ("qkv", lambda x: x * 0.5),
    "strides of q": ("q", spread),
    "strides of k": ("k", spread),
    "strides of v": ("v", spread),
    "addresses": ("qkv", shifted),
    "a negative view": ("q", lambda x: torch._neg_view(x)),
    "the last axis": ("k", lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2)),
    "the type": ("qkv", torch.Tensor.float),
    "other lengths": ("lengths", lambda x: x - 3),
    "no sinks": ("sinks", lambda x: None),
    "sinks of another type": ("sinks", torch.Tensor.double),
}


def results(found: Any) -> list[torch.Tensor]:
    return [x for x in found if x is not None] if isinstance(found, tuple) else [found]


def judge(door: Door, given: dict[str, Any]) -> None:
    """Holds a call to the same as the first of all."""
    try:
        found: Any = results(door(given))
    except (TypeError, ValueError) as failure:
        found = failure
    repeats.forget()
    WRAPPERS.clear()
    if isinstance(found, Exception):
        with pytest.raises(type(found)) as raised:
            door(given)
        assert str(raised.value) == str(found)
        return
    for got, right in zip(found, results(door(given)), strict=True):
        assert torch.equal(got, right)


def names_of(change: str, given: dict[str, Any]) -> list[str]:
    """The tensors that a change is for, where a call has them."""
    wanted = CHANGES[change][0]
    names = [wanted] if wanted in given or len(wanted) > 3 else [*wanted]
    return names if set(names) <= given.keys() else []


CASES = [
    (name, change) for name, (make, _) in DOORS.items() for change in CHANGES if names_of(change, make())
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "change"), each_by_day(CASES, of=7), ids=lambda part: part.replace(" ", "-")
)
def test_what_differs_is_looked_at(name: str, change: str) -> None:
    (make, door), changed = DOORS[name], CHANGES[change][1]
    given = make()
    for _ in range(5):
        door(given)
    judge(door, given | {one: changed(given[one]) for one in names_of(change, given)})


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", DOORS, ids=lambda name: name.replace(" ", "-"))
def test_what_follows_itself_is_not_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, door = DOORS[name]
    for _ in range(5):
        door(make())

    def refuse(*given: Any) -> Any:
        raise AssertionError("looked at again")

    with monkeypatch.context() as patch:
        patch.setattr(repeats.Plan, "run", refuse)
        patch.setattr(repeats, "keep", refuse)
        found = results(door(make()))
    repeats.forget()
    for got, right in zip(found, results(door(make())), strict=True):
        assert torch.equal(got, right)


def test_a_sink_has_gradients_in_calls_that_follow_themselves() -> None:
    make, door = DOORS["a sink"]
    found = []
    for _ in range(7):
        given = make()
        leaves = [given[name].detach().requires_grad_() for name in ("q", "sinks")]
        o = results(door(given | dict(zip(("q", "sinks"), leaves, strict=True))))[0]
        found.append(torch.autograd.grad(o.float().square().sum(), leaves))
    assert found[0][1].dtype == torch.float16
    assert found[0][1].abs().max() > 0
    assert all(torch.equal(x, y) for one in found for x, y in zip(one, found[0], strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_dropout_has_another_seed_in_every_call(name: str) -> None:
    """The same seeds as where every call is looked at."""

    def drop(times: int) -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = dense() if name == "flash_attn_func" else packed()
        starts = [x[each] for each in ("starts", "starts_k") if each in x]
        call: Any = flash_attn_func if name == "flash_attn_func" else flash_attn_varlen_func
        found = []
        for _ in range(6):
            if times == 1:
                repeats.forget()
            found.append(call(x["q"], x["k"], x["v"], *starts, dropout_p=0.5))
        return found

    kept, looked = drop(6), drop(1)
    assert all(torch.equal(x, y) for x, y in zip(kept, looked, strict=True))
    assert not any(torch.equal(x, kept[0]) for x in kept[1:])


def test_a_call_that_is_refused_is_refused_after_those_that_are_not() -> None:
    """Where both have the kernels of short sequences, whose gradients have the same bits anyway."""
    given = packed() | by_head()
    sink = given["sinks"].requires_grad_()
    call = partial(
        flash_attn_varlen_func, given["q"], given["k"], given["v"], given["starts"], given["starts_k"], 7, 7
    )
    for _ in range(6):
        call(s_aux=sink)
    with pytest.raises(ValueError, match="deterministic"):
        call(s_aux=sink, deterministic=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", each_by_day(["flash_attn_func", "flash_attn_varlen_func", "transformers"], of=2)
)
def test_gradients_come_and_go(name: str) -> None:
    """With gradients, without, and with them wanted of other tensors."""
    make, door = DOORS[name]
    right = None
    for wanted in ("qkv", "", "qkv", "kv", "qkv"):
        for _ in range(5):
            given = make()
            leaves = [given[one].detach().requires_grad_() for one in wanted]
            o = results(door(given | dict(zip(wanted, leaves, strict=True))))[0]
            assert o.requires_grad == bool(wanted)
            if wanted:
                found = torch.autograd.grad(o.float().square().sum(), leaves)
                by_name = dict(zip(wanted, found, strict=True))
                right = right or by_name
                assert all(torch.equal(x, right[one]) for one, x in by_name.items())
        with torch.no_grad():
            given = make()
            leaves = [given[one].detach().requires_grad_() for one in wanted]
            o = results(door(given | dict(zip(wanted, leaves, strict=True))))[0]
            assert not o.requires_grad


class Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates it so
    """Lets operators pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_nothing_is_remembered_under_a_mode_or_with_tangents() -> None:
    facts, tensors = ("function",), (torch.zeros(2),)
    assert repeats.repeat(facts, tensors)[0] is not None
    with Noting():  # type: ignore[no-untyped-call]  # torch annotates it so
        assert repeats.repeat(facts, tensors) == (None, None)
    with torch.autograd.forward_ad.dual_level():
        assert repeats.repeat(facts, tensors) == (None, None)
    assert repeats.repeat((["a list"],), tensors) == (None, None)
    assert repeats.repeat((torch.ones(()),), tensors) == (None, None)
    assert repeats.repeat(((torch.ones(()), 0),), tensors) == (None, None)  # a window
    assert repeats.repeat(facts, (1.0,)) == (None, None)
    assert repeats.repeat(facts, (None,)) == (None, None)


def test_calls_differ_by_which_tensors_are_left_out() -> None:
    x, y = torch.ones(3), torch.ones(4)
    kinds = [repeats.repeat(("a call",), given)[0] for given in ((x, None, y), (x, y, None), (x, y))]
    assert None not in kinds
    assert all(one != other for one, other in ((kinds[0], kinds[1]), (kinds[1], kinds[2])))


def test_gradients_of_what_has_none_are_refused_every_time() -> None:
    """Whatever was prepared for tensors that look alike."""
    make, door = DOORS["FlashInfer"]
    for _ in range(6):
        door(make())
    given = make()
    given["q"].requires_grad_()
    for _ in range(6):
        with pytest.raises(RuntimeError, match="no_grad"):
            door(given)


class Kept:
    """In the place of a kernel's call, which returns what it is given."""

    def resume(self, inputs: Any, out: Any, axes: Any = None) -> Any:
        return lambda inputs, out=None: (inputs, out)


def settled(arrange: repeats.Arrange, *given: Any) -> Any:
    plan = repeats.Plan(lambda *inputs: inputs, Kept(), arrange)
    return plan.settle(given)


def test_views_are_not_made_where_their_tensors_do() -> None:
    """Only addresses are read of what was prepared, inputs and the memory of a result."""
    number, (q, k, out) = torch.ones(()), torch.zeros(3, 4, 6)
    again = settled(lambda given: ((given[0].t(), number, given[1]), given[2].view(-1)), q, k, out)
    others = [torch.zeros(4, 6) for _ in range(3)]
    (first, second, third), into = again(others)
    assert [first, third, into] == others
    assert second is number
    inputs, into = settled(lambda given: (given[:2], None), q, k)(others)
    assert [*inputs] == others[:2]
    assert into is None


def test_copies_and_what_has_the_address_of_two_are_made_every_time() -> None:
    q, rows = torch.zeros(4, 6), torch.zeros(4, 6)
    latent = q[:, :3]

    def shapes(arrange: repeats.Arrange, *given: Any) -> list[torch.Size]:
        inputs, out = settled(arrange, *given)([torch.zeros(x.shape) for x in given])
        return [x.shape for x in (*inputs, *([] if out is None else out))]

    assert shapes(lambda given: ((given[0].t().contiguous(),), None), q) == [(6, 4)]
    assert shapes(lambda given: ((given[0], given[1].t()), None), q, latent) == [(4, 6), (3, 4)]
    assert shapes(lambda given: ((given[0].t(),), (given[1], torch.zeros(2))), q, rows) == [
        (6, 4),
        (4, 6),
        (2,),
    ]
    assert shapes(lambda given: ((given[0][:, :0].t(),), None), q.new_zeros(4, 0)) == [(0, 4)]


def test_gradients_have_the_shapes_of_what_kernels_take() -> None:
    q = torch.zeros(4, 6, requires_grad=True)

    def arrange(given: Any) -> tuple[Any, None]:
        return (given[0].t(),), None

    assert settled(arrange, q)([q])[0][0].shape == (6, 4)
    with torch.no_grad():
        assert settled(arrange, q)([q])[0][0] is q
