"""What flash-attention's functions take, return and refuse; what they compute is in test_pairs.py."""

from __future__ import annotations

import inspect
import json
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from attnc.api import compile as api
from attnc.api import repeats
from attnc.api.tensors import LARGEST_HEAD
from attnc.compat import call, compiled, flash_attn, kvcache, run_on
from attnc.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from attnc.compat.form import Form
from attnc.diagnostics import error
from attnc.model.declarations import MAX_HEAD_DIM
from attnc.source import Source
from tests.compat.callers import DATA, Calls
from tests.gpus import fake_gpu


def tensors(*, rows: int = 5, keys: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q = torch.randn(2, rows, 4, 16).half()
    k, v = torch.randn(2, 2, keys, 2, 16).half()
    return q, k, v


def test_training_goes_on_after_inference_mode() -> None:
    """Numbers that calls keep on the device are ordinary tensors, whoever made them first."""
    options: Any = {"softcap": 3.25, "softmax_scale": 0.3}
    q, k, v = tensors()
    with torch.inference_mode():
        expected = flash_attn_func(q, k, v, **options)
    found = flash_attn_func(q.requires_grad_(), k, v, **options)
    assert torch.equal(found, expected)
    (dq,) = torch.autograd.grad(found.sum(), [q])
    assert dq.isfinite().all()


def test_threads_get_the_functions_of_their_own_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_PREPARED", {})
    repeats.forget()
    q, k, v = tensors()
    every: list[Any] = [{}, {"causal": True}, {"softcap": 5.0}]
    with ThreadPoolExecutor(len(every)) as pool:
        found = list(pool.map(lambda options: flash_attn_func(q, k, v, **options), every))
    for options, o in zip(every, found, strict=True):
        assert torch.equal(o, flash_attn_func(q, k, v, **options))
    assert len({name for name, *_ in call._PREPARED.values()}) == len(every)


def test_numbers_compile_nothing() -> None:
    """A form is compiled once; windows, scales, caps and lengths are read at run time."""
    q, k, v = tensors(rows=20)
    flash_attn_func(q, k, v, softmax_scale=0.2, window_size=(1, 2), softcap=3.0)
    before = len(vars(call.FUNCTIONS))
    for numbers in (3, 4, 7):
        flash_attn_func(
            q,
            k[:, :numbers],
            v[:, :numbers],
            softmax_scale=1 / numbers,
            window_size=(numbers, 1),
            softcap=numbers,
        )
    assert len(vars(call.FUNCTIONS)) == before


def test_the_first_softcaps_are_built_in_where_tanh_is_a_polynomial(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, and not in kernels that share keys out, which wait for memory."""
    forms: list[Form] = []

    def load(form: Form) -> Any:
        forms.append(form)
        return SimpleNamespace(flash_attention=lambda q, *others: (q, q), CALL=None)

    monkeypatch.setattr(call, "targets_of_call", lambda *given, **options: ("cuda.sm_90a", "triton"))
    monkeypatch.setattr(call, "load_form", load)
    monkeypatch.setattr(call, "_PREPARED", {})
    monkeypatch.setattr(compiled, "_CAPS", set())
    repeats.forget()
    q, k, v = tensors(rows=20)
    caps = [2.0, 4.0, 8.0, 16.0, 32.0, 4.0]
    for cap in caps:
        flash_attn_func(q, k, v, softmax_scale=0.5, softcap=cap)
    assert [form.cap for form in forms] == [(cap, 0.5 / cap) for cap in caps[:4]] + [None]
    assert [[name for name, _ in form.inputs[3:]] for form in forms] == [[]] * 4 + [["softmax_scale", "cap"]]
    forms.clear()
    monkeypatch.setattr(compiled, "_CAPS", set())
    flash_attn_func(q[:, :1], k, v, softcap=3.0)
    flash_attn_func(q, k, v)
    assert [form.cap for form in forms] == [None, None]


def test_a_softcap_that_is_built_in_means_the_same() -> None:
    q, k, v = tensors(rows=20)
    form = Form(dtype="float16", size=16, size_v=16, softcap=True, cap=(3.25, 0.3 / 3.25))
    o, lse = compiled.load_form(form).flash_attention(q, k, v)
    expected = flash_attn_func(q, k, v, softmax_scale=0.3, softcap=3.25, return_lse=True)
    torch.testing.assert_close((o, lse), expected, rtol=1e-3, atol=1e-3)


def test_packed_forms_are_the_same_calls() -> None:
    q, k, v = tensors(rows=9)
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    expected = flash_attn_func(q, k, v, 0.0, None, True)
    qkv = torch.stack([q, k, v], 2)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, 0.0, None, True), expected)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), expected)
    ends = torch.tensor([0, 9, 18], dtype=torch.int32)
    flat = qkv.flatten(0, 1)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(flat, ends, 9, causal=True)
    halves = flash_attn.flash_attn_varlen_kvpacked_func(
        flat[:, 0], flat[:, 1:], ends, ends, 9, 9, causal=True
    )
    assert torch.equal(packed, halves)
    torch.testing.assert_close(packed.view_as(expected), expected, rtol=1e-3, atol=1e-3)


def test_what_is_returned() -> None:
    q, k, v = tensors()
    assert isinstance(flash_attn_func(q, k, v), torch.Tensor)
    o, lse, probabilities = flash_attn_func(q, k, v, return_attn_probs=True)
    assert (o.shape, lse.shape, probabilities.numel()) == ((2, 5, 4, 16), (2, 4, 5), 0)
    assert lse.dtype == torch.float32
    with pytest.raises(ValueError, match="return_attn_probs"):
        flash_attn_func(q, k, v, 0.5, return_attn_probs=True)


ANGLES: dict[str, Any] = {"rotary_cos": torch.ones(9, 8), "rotary_sin": torch.ones(9, 8)}
NEW: dict[str, Any] = {
    "k": torch.ones(2, 1, 2, 16).half(),
    "v": torch.ones(2, 1, 2, 16).half(),
    "cache_seqlens": 3,
}
REFUSED: list[tuple[Any, str, dict[str, Any]]] = [
    (flash_attn_func, "qv", {"qv": torch.ones(1)}),
    (flash_attn_func, "attention_chunk", {"attention_chunk": 64}),
    (flash_attn_func, "k_descale", {"k_descale": torch.ones(1)}),
    (flash_attn_func, "dropout_p", {"dropout_p": 1.0}),
    (flash_attn_func, "dropout_p: expected a number, got None", {"dropout_p": None}),
    (flash_attn_func, "softmax_scale: expected a number, got 'small'", {"softmax_scale": "small"}),
    (flash_attn_func, "softcap: expected a number", {"softcap": [30.0]}),
    (flash_attn_func, r"softcap: expected a number, got a tensor \[2\]", {"softcap": torch.ones(2)}),
    (flash_attn_func, "softcap: expected a number, got 1000", {"softcap": 10**400}),
    (flash_attn_func, "softcap: expected a finite number", {"softcap": float("nan")}),
    (flash_attn_func, "softmax_scale: expected a finite number", {"softmax_scale": float("inf")}),
    (flash_attn_func, "softmax_scale: expected a finite number of float32", {"softmax_scale": 1e39}),
    (flash_attn_func, "window_size", {"window_size": 5}),
    (flash_attn_func, "window_size", {"window_size": (1.5, 0)}),
    (flash_attn_func, "alibi_slopes: expected a tensor, got list", {"alibi_slopes": [1.0] * 4}),
    (flash_attn_func, "out: expected a tensor, got str", {"out": "o"}),
    (flash_attn_func, r"out: expected shape \[2, 5, 4, 16\], got \[1\]", {"out": torch.ones(1).half()}),
    (flash_attn_func, "alibi_slopes", {"alibi_slopes": torch.ones(1, 2, 4)}),
    (flash_attn_func, "s_aux and learnable_sink", {"s_aux": torch.ones(4), "learnable_sink": torch.ones(4)}),
    (flash_attn_func, "s_aux", {"s_aux": torch.ones(3)}),
    (flash_attn_with_kvcache, "cache_seqlens: expected 0 to 9 rows, got 10", {"cache_seqlens": 10}),
    (flash_attn_with_kvcache, "cache_seqlens: expected 0 to 9 rows, got -1", {"cache_seqlens": -1}),
    (flash_attn_with_kvcache, "without k and v: rotary_cos", ANGLES),
    (flash_attn_with_kvcache, "rotary_cos, rotary_sin: expected both", {"rotary_cos": torch.ones(9, 8)}),
    (flash_attn_with_kvcache, "rotary_cos, rotary_sin: expected both", {"rotary_sin": torch.ones(9, 8)}),
    (flash_attn_with_kvcache, "without rotary_cos: rotary_seqlens", {"rotary_seqlens": torch.ones(2).int()}),
    (
        flash_attn_with_kvcache,
        "rotary_cos: expected a tensor, got list",
        NEW | {**ANGLES, "rotary_cos": [1.0]},
    ),
    (
        flash_attn_with_kvcache,
        "rotary_sin: expected dtype torch.float16 or torch.float32",
        NEW | {**ANGLES, "rotary_sin": torch.ones(9, 8).double()},
    ),
    (
        flash_attn_with_kvcache,
        r"rotary_cos: expected half to be 1 .. 8, got 9",
        NEW | {**ANGLES, "rotary_cos": torch.ones(9, 9)},
    ),
    (
        flash_attn_with_kvcache,
        r"rotary_cos: expected shape \[positions, half\], got \[8\]",
        NEW | {**ANGLES, "rotary_cos": torch.ones(8)},
    ),
    (
        flash_attn_with_kvcache,
        r"rotary_cos: expected shape \[positions, half\], got \[9, 8, 1\]",
        NEW | {**ANGLES, "rotary_cos": torch.ones(9, 8, 1)},
    ),
    (
        flash_attn_with_kvcache,
        r"rotary_sin: expected shape \[9, 8\], got \[8, 8\]",
        NEW | {**ANGLES, "rotary_sin": torch.ones(8, 8)},
    ),
    (
        flash_attn_with_kvcache,
        r"rotary_seqlens: expected shape \[2\], got \[3\]",
        NEW | {**ANGLES, "rotary_seqlens": torch.ones(3).int()},
    ),
    (flash_attn_with_kvcache, "k, v: expected both", {"k": torch.ones(2, 1, 2, 16).half()}),
    (flash_attn_with_kvcache, "cache_seqlens", {"k": torch.ones(2, 1, 2, 16), "v": torch.ones(2, 1, 2, 16)}),
    (flash_attn_with_kvcache, "cache_seqlens", {"block_table": torch.zeros(2, 1, dtype=torch.int32)}),
    (
        flash_attn_with_kvcache,
        "cache_batch_idx",
        {"block_table": torch.zeros(2, 1, dtype=torch.int32), "cache_batch_idx": torch.arange(2)},
    ),
]


@pytest.mark.parametrize(
    ("function", "named", "options"), REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_what_it_cannot_do_is_refused_by_name(function: Any, named: str, options: dict[str, Any]) -> None:
    q, k, v = tensors()
    kept = k.clone(), v.clone()
    with pytest.raises((TypeError, ValueError), match=named):
        function(q, k, v, **options)
    assert torch.equal(k, kept[0])
    assert torch.equal(v, kept[1])


def test_scores_are_looked_at_before_the_cache_is_written() -> None:
    q, k, v = tensors()
    kept = k.clone()
    for wrong in ({"softcap": math.nan}, {"window_size": 5}, {"softmax_scale": "small"}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            flash_attn_with_kvcache(q, k, v, **NEW, **wrong)
    assert torch.equal(k, kept)


def test_angles_may_be_float32() -> None:
    """Where flash-attention wants them in q's type."""
    q, k, v = tensors()
    angle = torch.rand(9, 8)
    angles: Any = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    cos, sin = angle.cos().half(), angle.sin().half()
    found = flash_attn_with_kvcache(q, k.clone(), v.clone(), **NEW, **angles)
    expected = flash_attn_with_kvcache(q, k.clone(), v.clone(), **NEW, rotary_cos=cos, rotary_sin=sin)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_wrong_tensors_are_named() -> None:
    q, k, v = tensors()
    with pytest.raises(TypeError, match=r"q: expected dtype .*float16, .*, got torch\.float64"):
        flash_attn_func(q.double(), k, v)
    with pytest.raises(TypeError, match=r"v: expected dtype torch\.float16, like q"):
        flash_attn_func(q, k, v.float())
    with pytest.raises(ValueError, match=r"k: expected shape \[2, N, Hkv, 16\], got \[16\]"):
        flash_attn_func(q, k[0, 0, 0], v)
    with pytest.raises(ValueError, match=r"v: expected a last axis of 1 to 1024, got \[2, 9, 2, 2048\]"):
        flash_attn_func(q, k, v.repeat(1, 1, 1, 128))
    with pytest.raises(ValueError, match=r"qkv: expected shape \[B, N, 3, H, D\], got \[2, 9, 2, 2"):
        flash_attn.flash_attn_qkvpacked_func(torch.stack([k, v], 2))
    with pytest.raises(ValueError, match=r"kv: expected shape \[S, 2, Hkv, 16\], got \[9, 2, 16\]"):
        flash_attn.flash_attn_varlen_kvpacked_func(q[0], k[0])
    assert LARGEST_HEAD == MAX_HEAD_DIM
    ends, long = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0, 5])
    packed = (q[0], k[0], v[0], ends)
    with pytest.raises(TypeError, match="cu_seqlens_k"):
        flash_attn_varlen_func(*packed, long, 5, 5)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        flash_attn_varlen_func(*packed)
    sink = torch.zeros(4, requires_grad=True)
    with pytest.raises(ValueError, match="deterministic"):
        flash_attn_varlen_func(*packed, ends, 5, 5, deterministic=True, s_aux=sink)
    with pytest.raises(RuntimeError, match="no_grad"):
        flash_attn_with_kvcache(q.requires_grad_(), k, v)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (
            {"k": (1, 1, 2, 16), "v": (1, 1, 2, 16)},
            r"k: expected shape \[2, new, 2, 16\], got \[1, 1, 2, 16\]",
        ),
        ({"k": (2, 1, 2, 16), "v": (2, 2, 2, 16)}, r"v: expected shape \[2, 1, 2, 16\], got \[2, 2, 2, 16\]"),
        (
            {"k": (2, 1, 1, 16), "v": (2, 1, 1, 16)},
            r"k: expected shape \[2, new, 2, 16\], got \[2, 1, 1, 16\]",
        ),
        ({"k": (2, 2, 16), "v": (2, 2, 16)}, r"k: expected shape \[2, new, 2, 16\], got \[2, 2, 16\]"),
        ({"cache_seqlens": (1,)}, r"cache_seqlens: expected shape \[2\], got \[1\]"),
        ({"cache_batch_idx": (3,)}, r"cache_batch_idx: expected shape \[2\], got \[3\]"),
        ({"cu_seqlens_k_new": (2,)}, r"cu_seqlens_k_new: expected shape \[3\], got \[2\]"),
    ],
)
def test_new_keys_that_do_not_fit_are_written_nowhere(new: dict[str, Any], message: str) -> None:
    """One row for two sequences, or for two heads, would have been spread out or left where it was."""
    q, k, v = tensors()
    shapes = {"k": (2, 1, 2, 16), "v": (2, 1, 2, 16), "cache_seqlens": (2,), **new}
    given: Any = {
        name: torch.ones(shape, dtype=torch.float16 if name in "kv" else torch.int32)
        for name, shape in shapes.items()
    }
    kept = k.clone(), v.clone()
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(q, k, v, **given)
    assert torch.equal(k, kept[0])
    assert torch.equal(v, kept[1])


def test_one_length_of_all_sequences_may_be_a_number_of_numpys() -> None:
    q, k, v = tensors(rows=1)
    length: Any = np.int64(5)
    found = flash_attn_with_kvcache(q, k, v, cache_seqlens=length)
    assert torch.equal(found, flash_attn_with_kvcache(q, k, v, cache_seqlens=5))


def test_the_order_of_flash_attn_2() -> None:
    """Positions of arguments, which callers rely on, and the names that transformers looks for."""

    def positional(function: Any) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    shared = ["window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs"]
    scales = ["dropout_p", "softmax_scale", "causal"]
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    rotary = ["rotary_cos", "rotary_sin"]
    cache = ["cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal"]
    rest = [
        "window_size",
        "softcap",
        "rotary_interleaved",
        "alibi_slopes",
        "num_splits",
        "return_softmax_lse",
    ]
    assert positional(flash_attn_func) == ["q", "k", "v", *scales, *shared]
    assert positional(flash_attn_varlen_func) == ["q", "k", "v", *lengths, *scales, *shared, "block_table"]
    expected = ["q", "k_cache", "v_cache", "k", "v", *rotary, *cache, *rest]
    assert positional(flash_attn_with_kvcache) == expected
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
        assert {"s_aux", "learnable_sink", "num_splits"} <= set(inspect.signature(function).parameters)


CALLS: Calls = json.loads(DATA.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("caller", "function"), [(at, name) for at, names in CALLS.items() for name in names]
)
def test_callers_find_every_keyword(caller: str, function: str) -> None:
    """As SGLang and vLLM call the functions; what is refused is refused by name, and None says nothing."""
    assert set(CALLS[caller][function]) <= set(inspect.signature(getattr(flash_attn, function)).parameters)


def test_results_are_written_where_a_caller_wants_them() -> None:
    q, k, v = tensors()
    sink = torch.zeros(4)
    right, lse = flash_attn_func(q, k, v, causal=True, sinks=sink, return_softmax_lse=True, ver=3)
    made = torch.empty_like(q)
    assert flash_attn_func(q, k, v, causal=True, s_aux=sink, out=made) is made
    assert torch.equal(made, right)
    ends: Any = [torch.arange(0, 2 * x.shape[1] + 1, x.shape[1], dtype=torch.int32) for x in (q, k)]
    packed: Any = [x.flatten(0, 1) for x in (q, k, v)]
    o = torch.empty_like(packed[0])
    options: Any = {"causal": True, "sinks": sink, "out": o, "return_softmax_lse": True, "max_seqlen_q": 5}
    found, packed_lse = flash_attn_varlen_func(*packed, *ends, **options)
    assert found is o
    assert torch.equal(o.view_as(q), right)
    torch.testing.assert_close(packed_lse.view(4, 2, 5).transpose(0, 1), lse)
    token = torch.empty_like(q[:, -1])
    table = torch.arange(2, dtype=torch.int32)[:, None]  # a page of 9 for each sequence
    lengths: Any = {"seqused_k": torch.full((2,), 9, dtype=torch.int32), "block_table": table, "sinks": sink}
    last = torch.arange(3, dtype=torch.int32)
    flash_attn_varlen_func(q[:, -1], k, v, last, max_seqlen_q=1, out=token, **lengths)
    torch.testing.assert_close(token, right[:, -1], rtol=2e-3, atol=2e-3)
    with pytest.raises(ValueError, match="out"):
        flash_attn_func(q.requires_grad_(), k, v, out=made)


def test_torch_compile_sees_one_operator() -> None:
    q, k, v = tensors(rows=20)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flash_attn_func(q * 2, k, v, causal=True, window_size=(4, 0), softmax_scale=0.3)

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), layer(q, k, v))


Asked: TypeAlias = list[tuple[str, bool]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What calls on a Hopper GPU compile: (target, whether gradients are deterministic), in order. All run on
    Triton's kernels; dropout has no others.
    """
    found: Asked = []
    original = api.compile_family

    def noting(text: str, *, target: str, deterministic: bool, **options: Any) -> Any:
        found.append((target, deterministic))
        if "dropout" in text and target != "triton":
            raise api.SpecError([error("E0602", "not yet", Source("it.attn", text).span(0, 1), "")])
        return original(text, target="triton", **options)

    monkeypatch.setattr(api, "compile_family", noting)
    monkeypatch.setattr(call, "_PREPARED", {})
    fake_gpu(monkeypatch)
    return found


def test_calls_take_the_fastest_kernels(asked: Asked) -> None:
    """Prompts and gradients, queries that share keys beyond a tile of Triton's, narrow rows of pages, and
    wide heads; fewer against a cache, and what that target has no kernel for, stay.
    """
    q, k, v = tensors(rows=20)
    flash_attn_func(q, k, v, causal=True)
    flash_attn_func(q[:, :1], k, v, causal=True)
    group = q.shape[2] // k.shape[2]
    flash_attn_func(q[:, : 16 // group], k, v, causal=True)
    flash_attn_with_kvcache(q[:, : 16 // group + 1], k, v, causal=True)
    pages, table = k[:, :8], torch.zeros(2, 300, dtype=torch.int32)  # room for many
    flash_attn_with_kvcache(q[:, :1], pages, pages, block_table=table, cache_seqlens=8)
    wide = torch.zeros(1, 8, 1, 136, dtype=torch.float16)
    flash_attn_with_kvcache(wide[:, :1], wide, wide)
    with pytest.warns(UserWarning, match=r"cuda.sm_90a, .* need a spec without this: not yet"):
        flash_attn_func(q, k, v, 0.5)
    run_on("triton")
    flash_attn_func(q, k, v, causal=True)
    targets = [target for target, _ in asked]
    assert targets == ["cuda.sm_90a", "triton", *["cuda.sm_90a"] * 4, "triton", "triton"]


def test_single_queries_that_share_no_keys_take_the_kernel_whose_warps_do(asked: Asked) -> None:
    """Where keys are narrow rows of one tensor, and nobody chose another target."""

    def call(heads: int = 1, width: int = 16, dtype: torch.dtype = torch.float16, rows: int = 1) -> None:
        q = torch.randn(1, rows, heads, width, dtype=dtype)
        k, v = torch.randn(2, 1, 5, 1, width, dtype=dtype).unbind()
        flash_attn_func(q, k, v)

    call()
    call(width=64)
    call(heads=2)
    call(width=24, rows=2)
    call(width=72)
    call(dtype=torch.float32)
    run_on("triton")
    call(width=32)
    others = ["triton", "triton", "cuda.sm_90a", "triton", "triton"]  # Triton pads to 128 columns
    assert [target for target, _ in asked] == ["cuda.sm_80", "cuda.sm_80", *others]


def test_gradients_are_the_fastest_unless_somebody_wants_the_same_bits(asked: Asked) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(rows=20, keys=130))
    flash_attn_func(q, k, v, causal=True)
    flash_attn_func(q, k, v, causal=True, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        flash_attn_func(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.no_grad():
        flash_attn_func(q, k, v)  # which has none
    assert asked == [("cuda.sm_90a", deterministic) for deterministic in (False, True, True, True)]


def test_torch_compile_takes_the_fastest_kernels_too(asked: Asked) -> None:
    q, k, v = tensors(rows=20, keys=130)
    right = flash_attn_func(q, k, v, causal=True, window_size=(4, 0))
    asked.clear()
    torch.compiler.reset()
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    wanting = q.clone().requires_grad_()
    o = compiled(wanting, k, v, causal=True, window_size=(4, 0))
    assert torch.equal(o, right)
    o.sum().backward()
    assert asked == [("cuda.sm_90a", False)]


# --- calls that are like one before -------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls whose arguments are looked at, by name."""
    found: list[str] = []

    class Noted(call.Call):
        def __init__(self, name: str, *arguments: Any, **options: Any) -> None:
            found.append(name)
            super().__init__(name, *arguments, **options)

    monkeypatch.setattr(flash_attn, "Call", Noted)
    monkeypatch.setattr(kvcache, "Call", Noted)
    repeats.forget()
    return found


def test_a_call_like_one_before_is_not_looked_at(made: list[str]) -> None:
    q, k, v = tensors(rows=20)
    options: dict[str, Any] = {"causal": True, "window_size": (4, 0), "softmax_scale": 0.3}
    flash_attn_func(q, k, k, **options)  # the same tensor twice
    made.clear()
    o = flash_attn_func(q.clone(), k, v, **options)
    assert made == []
    repeats.forget()
    assert torch.equal(o, flash_attn_func(q, k, v, **options))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "changes",
    [
        {"causal": False},
        {"window_size": (5, 0)},
        {"window_size": [4, 0]},
        {"softmax_scale": 0.31},
        {"softcap": 20.0},
        {"dropout_p": 0.5},
        {"deterministic": True},
        {"alibi_slopes": torch.ones(4)},
        {"s_aux": torch.ones(4)},
    ],
    ids=str,
)
def test_another_call_is_looked_at(changes: dict[str, Any], made: list[str]) -> None:
    q, k, v = tensors(rows=20)
    options: dict[str, Any] = {"causal": True, "window_size": (4, 0), "softmax_scale": 0.3}
    flash_attn_func(q, k, v, **options)
    flash_attn_func(q, k, v, **{**options, **changes})
    assert len(made) == 2


def test_other_tensors_and_settings_are_looked_at(made: list[str]) -> None:
    q, k, v = tensors(rows=20)
    wanting = q.clone().requires_grad_()
    flash_attn_func(q, k, v)
    flash_attn_func(q[:, :19], k, v)
    flash_attn_func(q, k[:, :, :1], v[:, :, :1])
    flash_attn_func(wanting, k, v).sum().backward()
    with torch.no_grad():
        flash_attn_func(wanting, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        flash_attn_func(wanting, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    run_on("triton")
    try:
        flash_attn_func(wanting, k, v)
    finally:
        run_on(None)
    assert len(made) == 7
    flash_attn_func(wanting, k, v).sum().backward()
    assert len(made) == 7


def test_a_transposed_last_axis_is_copied_every_time(made: list[str]) -> None:
    q, k, v = tensors(rows=20)
    turned = k.transpose(1, 3).contiguous().transpose(1, 3)
    for _ in range(2):
        torch.testing.assert_close(flash_attn_func(q, turned, v), flash_attn_func(q, k, v))
    assert len(made) == 3


def test_packed_sequences_are_remembered_by_their_shapes(made: list[str]) -> None:
    q, k, v = (x[0].repeat(1, 1, 1) for x in tensors(rows=20))
    count = min(len(q), len(k))
    q, k, v = q[:count], k[:count], v[:count]
    first, second = (torch.tensor([0, cut, count], dtype=torch.int32) for cut in (3, 5))
    found = [flash_attn_varlen_func(q, k, v, ends, ends, causal=True) for ends in (first, second, first)]
    assert len(made) == 1
    repeats.forget()
    assert torch.equal(found[1], flash_attn_varlen_func(q, k, v, second, second, causal=True))
    assert torch.equal(found[0], found[2])


def test_decoding_is_remembered_but_for_what_it_writes(made: list[str]) -> None:
    q, k, v = tensors(rows=1)
    first, second = (torch.tensor(lengths, dtype=torch.int32) for lengths in ([3, 5], [8, 1]))
    found = [flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths) for lengths in (first, second)]
    assert len(made) == 1
    repeats.forget()
    assert torch.equal(found[1], flash_attn_with_kvcache(q, k, v, cache_seqlens=second))
    made.clear()
    token = torch.ones(2, 1, 2, 16).half()
    for rows in (first, first + 1):
        flash_attn_with_kvcache(q, k, v, token, token, cache_seqlens=rows)
    assert len(made) == 2
    assert bool((k[0, 3:5] == 1).all())
