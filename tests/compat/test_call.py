"""How a call is put together: which kernel it asks for, and what its arguments mean before there is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from attnc.api import repeats
from attnc.compat import call, flash_attn, kvcache
from attnc.compat import flash_attn_interface as three
from attnc.compat.call import draw_seed_for, one_sink
from attnc.compat.export import forms
from attnc.compat.form import Form

#: Without their types: options are drawn, and some are wrong.
flash_attn_func: Any = flash_attn.flash_attn_func
flash_attn_varlen_func: Any = flash_attn.flash_attn_varlen_func
flash_attn_with_kvcache: Any = flash_attn.flash_attn_with_kvcache

ENDS = torch.tensor([0, 5, 10], dtype=torch.int32)
TABLE = torch.zeros(2, 1, dtype=torch.int32)


def tensors(rows: int = 5, keys: int = 9, size: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, rows, 4, size, generator=generator).half()
    k, v = torch.randn(2, 2, keys, 2, size, generator=generator).half()
    return q, k, v


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Form]]:
    """The forms that calls ask for, on a GPU of Hopper's; nothing is computed."""
    found: list[Form] = []

    plan = SimpleNamespace(gradients=None, resume=lambda *given, **options: None)

    def load(form: Form) -> Any:
        found.append(form)

        def function(q: torch.Tensor, *others: torch.Tensor, out: Any = None) -> Any:
            return q, q.new_zeros(q.shape[:-1], dtype=torch.float32)

        return SimpleNamespace(flash_attention=function, CALL=plan)

    monkeypatch.setattr(call, "targets_of_call", lambda *given, **options: ("cuda.sm_90a", "triton"))
    monkeypatch.setattr(call, "targets_of_few", lambda *given, **options: ("triton",))
    monkeypatch.setattr(call, "load_form", load)
    monkeypatch.setattr(call, "_PREPARED", {})
    repeats.forget()
    yield found
    repeats.forget()


def test_gradients_are_in_any_order_where_that_is_faster_and_allowed(asked: list[Form]) -> None:
    """Not of one tile of keys, nor of short packed sequences."""

    def fast(function: Callable[..., Any], *given: Any, **options: Any) -> bool:
        asked.clear()
        call._PREPARED.clear()
        repeats.forget()
        function(*given, **options)
        (form,) = asked
        return form.fast

    def packed(keys: int | None, **options: Any) -> bool:
        q, k, v = (x.flatten(0, 1).requires_grad_() for x in tensors(keys=5))
        return fast(flash_attn_varlen_func, q, k, v, ENDS, ENDS, 5, keys, **options)

    def dense(keys: int, **options: Any) -> bool:
        return fast(flash_attn_func, *(x.requires_grad_() for x in tensors(keys=keys)), **options)

    sink = torch.zeros(4, requires_grad=True)
    assert [dense(keys) for keys in (1, 128, 129)] == [False, False, True]
    assert not dense(300, deterministic=True)
    assert dense(64, s_aux=sink)
    assert not dense(64, s_aux=sink.detach())
    assert dense(64, alibi_slopes=sink)
    assert [packed(keys) for keys in (1, 1024, 1025, None)] == [False, False, True, True]
    assert not packed(None, deterministic=True)
    q, k, v = (x.requires_grad_() for x in tensors(keys=300))
    assert not fast(flash_attn_func, q.detach(), k.detach(), v.detach())
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert not dense(300)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("asked")
def test_packed_sinks_have_no_order_of_gradients() -> None:
    q, k, v = (x.flatten(0, 1) for x in tensors(keys=5))
    leaf = torch.zeros(4, requires_grad=True)
    for option in ("s_aux", "alibi_slopes"):
        with pytest.raises(ValueError, match="deterministic: expected False"):
            flash_attn_varlen_func(q, k, v, ENDS, ENDS, 5, 5, deterministic=True, **{option: leaf})
        for given in (leaf.detach(), None):
            o = flash_attn_varlen_func(q, k, v, ENDS, ENDS, 5, 5, deterministic=True, **{option: given})
            assert o.shape == q.shape


def test_one_query_of_each_sequence_asks_for_another_kernel(asked: list[Form]) -> None:
    """Though calls like it, of more queries, have been repeated; and where keys are in pages."""
    q, k, v = (x.flatten(0, 1) for x in tensors(keys=5))
    for most, splits in ((5, None), (1, 0)):
        for at in range(5):
            asked.clear()
            call._PREPARED.clear()
            flash_attn_varlen_func(q, k, v, ENDS, ENDS, most, 5)
            assert [form.splits for form in asked] in ([splits], [] if at else [splits])
        call._PREPARED.clear()
    q, k, v = tensors(rows=1, keys=16)
    for function in (flash_attn_with_kvcache, three.flash_attn_with_kvcache):
        asked.clear()
        call._PREPARED.clear()
        repeats.forget()
        function(q, k, v, cache_seqlens=torch.tensor([3, 9], dtype=torch.int32))
        assert [form.splits for form in asked] == [0]


def test_calls_of_models_are_exported(asked: list[Form], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "targets_of_call", lambda *given, **options: ("triton",))
    q, k, v = tensors(keys=256)
    pages, lengths = torch.randn(2, 2, 256, 2, 16).half(), torch.tensor([3, 9], dtype=torch.int32)
    flat = [x.flatten(0, 1)[:10] for x in (q, k, v)]
    sink = torch.zeros(4)
    for options in ({}, {"causal": True}, {"window_size": (3, 0)}, {"window_size": (3, 3)}):
        for more in ({}, {"softmax_scale": 0.3}, {"softcap": 5.0}, {"s_aux": sink}):
            named: Any = {**options, **more}
            flash_attn_func(q, k, v, **named)
            trained = {**named, "s_aux": sink.clone().requires_grad_()} if "s_aux" in named else named
            flash_attn_func(q.clone().requires_grad_(), k, v, **trained)
            flash_attn_func(q[:, :1], k, v, **named)
            flash_attn_varlen_func(*flat, ENDS, ENDS, 5, 5, **named)
            flash_attn_with_kvcache(
                q[:, :1], *pages, block_table=TABLE, cache_seqlens=lengths, num_splits=0, **named
            )
    assert {form.kv for form in asked} == {"dense", "ragged", "paged"}
    assert {*asked} <= {*forms(["f16"], [16])}


# --- arguments ----------------------------------------------------------------------------------------------


def test_a_seed_is_drawn_for_dropout_alone() -> None:
    """A call without leaves torch's generator as it is."""
    q = torch.zeros(1)
    before = torch.get_rng_state()
    for p, x in ((0.0, q), (0, q), (1.0, q), (1.5, q), (-0.5, q), ("0.5", q), (None, q), (0.5, "q")):
        assert draw_seed_for(p, x) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert draw_seed_for(0.5, q) is not None
    assert not torch.equal(torch.get_rng_state(), before)


def test_sinks_have_three_names_and_one_is_taken() -> None:
    a, b = torch.zeros(4), torch.ones(4)
    for place in range(3):
        given = [None] * place + [a] + [None] * (2 - place)
        assert one_sink("f", *given) is a
        for other in {*range(3)} - {place}:
            both = [b if at == other else x for at, x in enumerate(given)]
            with pytest.raises(TypeError, match=r"f: .* are the same argument: give one of them"):
                one_sink("f", *both)
    assert one_sink("f", None, None, None) is None


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_bound_of_a_window_that_is_negative_is_none(
    is_hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a number, and of what torch.compile knows no number of: far away there."""
    monkeypatch.setattr(call, "is_hidden", lambda x: is_hidden)
    for given, wanted in (
        (-1, None),
        (-7, None),
        (0, 0),
        (1, 1),
        (5, 5),
        (call._FAR, call._FAR),
        (1 << 40, call._FAR),
    ):
        found = call._read_bound(torch.tensor(given) if is_hidden else given)
        if is_hidden:
            assert found.dtype == torch.int32
            assert int(found) == (call._FAR if wanted is None else wanted)
        else:
            assert found == wanted
    for wrong in (0.0, torch.tensor(0.5)) if not is_hidden else (torch.tensor(0.5),):
        with pytest.raises(TypeError):
            call._read_bound(wrong if is_hidden or isinstance(wrong, float) else wrong.item())


@pytest.mark.parametrize("size", [16, 96, 128])
def test_a_scale_is_usual_up_to_roundings(size: int) -> None:
    usual = size**-0.5
    assert all(call._is_usual(usual * (1 + x), size) for x in (0.0, 1e-15, -1e-15))
    assert not any(call._is_usual(usual * (1 + x), size) for x in (2.0**-39, -(2.0**-39), 1e-9))
    assert not call._is_usual(-usual, size)


@pytest.mark.parametrize("name", ["block_table", "page_table"])
def test_tables_of_pages_have_two_names_and_one_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every call: also once calls like it are repeated, with tables of other pages."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2, 6, 16, 2, 16, generator=generator).half()
    q = torch.randn(2, 1, 4, 16, generator=generator).half()
    lengths = torch.tensor([20, 30], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    table, packed = torch.empty(0), ()
    seen = {module: Mock(wraps=module.Call) for module in (flash_attn, kvcache)}
    for module, made in seen.items():
        monkeypatch.setattr(module, "Call", made)
    for seed in range(7):
        table = torch.randperm(6, generator=torch.Generator().manual_seed(seed))[:4].view(2, 2).int()
        whole = [x[table.long()].flatten(1, 2) for x in pages]
        expected = flash_attn_with_kvcache(q, *whole, cache_seqlens=lengths)
        found = flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, **{name: table})
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
        packed = (q[:, 0], *pages, starts)
        options: Any = {name: table, "max_seqlen_q": 1}
        found = flash_attn_varlen_func(*packed, seqused_k=lengths, **options)
        torch.testing.assert_close(found, expected[:, 0], rtol=2e-3, atol=2e-3)
    assert seen[flash_attn].call_count < 4
    assert seen[kvcache].call_count < 8  # of calls with pages, and with whole caches
    other = {"block_table", "page_table"} - {name}
    both: Any = {name: table, **dict.fromkeys(other, table)}
    with pytest.raises(TypeError, match="block_table and page_table are the same argument"):
        flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, **both)
    with pytest.raises(TypeError, match="block_table and page_table are the same argument"):
        flash_attn_varlen_func(*packed, seqused_k=lengths, max_seqlen_q=1, **both)
    for given in ({name: table}, {"seqused_k": lengths}):
        with pytest.raises(
            ValueError, match="cu_seqlens_k: expected a tensor, or seqused_k with block_table"
        ):
            flash_attn_varlen_func(*packed, None, 1, **given)


@pytest.mark.parametrize("kind", ["dense", pytest.param("packed", marks=pytest.mark.nightly)])
def test_results_are_returned_as_they_are_asked_for_once_calls_repeat(kind: str) -> None:
    q, k, v = tensors()
    flat = [x.flatten(0, 1)[:10] for x in (q, k, v)]
    calls: dict[str, Callable[..., Any]] = {
        "dense": lambda **more: flash_attn_func(q, k, v, causal=True, **more),
        "packed": lambda **more: flash_attn_varlen_func(*flat, ENDS, ENDS, 5, 5, causal=True, **more),
    }
    function = calls[kind]
    o, lse, nothing = function(return_attn_probs=True)
    for _ in range(3):
        assert torch.equal(function(), o)
        for name in ("return_lse", "return_softmax_lse"):
            assert all(map(torch.equal, function(**{name: True}), (o, lse)))
        assert all(map(torch.equal, function(return_attn_probs=True), (o, lse, nothing)))
        torch.manual_seed(0)
        dropped = function(dropout_p=0.5)
        torch.manual_seed(0)
        assert torch.equal(function(dropout_p=0.5), dropped)
        assert not torch.equal(function(dropout_p=0.5), dropped)
        out = torch.full_like(o, math.nan)
        assert function(out=out) is out
        assert torch.equal(out, o)
