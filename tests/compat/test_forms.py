"""What a call that says little has: the defaults of flash-attention, and the form that is compiled."""

from __future__ import annotations

import inspect
import math
import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.api import compile as api
from attnc.api.fastest import HOPPER, TRITON
from attnc.compat import call, compiled, flash_attn
from attnc.compat.form import Form
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import parse, prelude

#: Of flash-attention's functions, where they are not None, False or 0.
DEFAULTS = {
    "flash_attn_func": {"window_size": (-1, -1), "num_splits": 1},
    "flash_attn_varlen_func": {"window_size": (-1, -1)},
    "flash_attn_with_kvcache": {"window_size": (-1, -1), "rotary_interleaved": True},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_left_out_has_the_defaults_of_flash_attn(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    said = {p.name: p.default for p in parameters if p.default is not p.empty and p.default not in (None, 0)}
    assert said == DEFAULTS[name]


@pytest.mark.parametrize("is_fast", [False, True])
def test_only_fast_forms_add_gradients_in_any_order(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    default = object()

    def compile_family(text: str, **options: Any) -> Any:
        made.update(options, text=text)
        return SimpleNamespace(module=SimpleNamespace(default=default))

    monkeypatch.setattr(api, "compile_family", compile_family)
    form = Form(
        dtype="float16", size=16, size_v=16, grads=("q", "k", "v"), fast=is_fast, targets=("cuda.sm_90a",)
    )
    assert compiled.load_form(form) is default
    assert (made["deterministic"], made["target"], made["text"]) == (not is_fast, "cuda.sm_90a", form.text)
    assert made["warn"] is False


@pytest.mark.parametrize("size", [48, 64, 96, 128])
def test_the_usual_scale_is_known_however_it_was_rounded(size: int) -> None:
    """1 / sqrt(128), as PyTorch computes it, is not 128 ** -0.5: no number is then read at run time."""
    near = {size**-0.5, 1 / math.sqrt(size), math.nextafter(size**-0.5, 0)}
    assert all(call._is_usual(scale, size) for scale in near)
    assert not any(call._is_usual(scale * 1.00001, size) for scale in (*near, -1.0, 0.0))
    q = torch.randn(1, 2, 1, size).half()
    flash_attn.flash_attn_func(q, q, q)
    before = len(vars(call.FUNCTIONS))
    for scale in near:
        flash_attn.flash_attn_func(q, q, q, softmax_scale=scale)
    assert len(vars(call.FUNCTIONS)) == before


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("size", "more", "need"),
    [
        (264, {}, ""),
        (320, {"grads": ("q", "k", "v"), "causal": True}, ""),
        (512, {"grads": ("q", "k", "v")}, ""),
        (264, {"grads": ("q", "k", "v")}, ""),
        (320, {"grads": ("q", "k", "v"), "softcap": True}, ""),
        (320, {"q": "ragged", "kv": "ragged"}, ""),
        (520, {}, "520 columns of o are not lowered"),
    ],
)
def test_wide_heads_take_the_kernels_that_the_plan_has(
    size: int, more: dict[str, Any], need: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper's for heads of up to 512 columns; where it has none, Triton's, and a warning says why."""
    monkeypatch.setattr("attnc.api.fastest._SAID", set())
    form = Form(dtype="bfloat16", size=size, size_v=size, targets=(HOPPER, TRITON), **more)
    with pytest.warns(UserWarning, match=need) if need else nullcontext():
        made = compiled.load_form(form).CALL
    assert type(made).__name__ == ("TritonAttention" if need else "HopperAttention")
    assert (made.backward is not None) == ("grads" in more)


#: Of queries and keys; and what may say how many keys there are.
LAYOUTS: Any = (("dense", "dense"), ("dense", "paged"), ("ragged", "ragged"), ("ragged", "paged"))
LENGTHS = {
    "dense": ("", "cache_seqlens"),
    "paged": ("cache_seqlens", "cu_seqlens_k"),
    "ragged": ("", "seqused_k"),
}


@pytest.mark.parametrize("seed", range(4))
def test_forms_are_specs_of_what_they_name(seed: int) -> None:
    """Whatever is asked for together: each input is read, and has the axes that it is said to have."""
    chance = random.Random(seed)
    for _ in range(6):
        q, kv = chance.choice(LAYOUTS)
        paged = kv == "paged"
        lengths = chance.choice(LENGTHS[kv])
        causal = chance.random() < 0.5
        softcap = chance.random() < 0.5
        form = Form(
            dtype=chance.choice(("float16", "bfloat16", "float32")),
            size=chance.choice((16, 64)),
            size_v=chance.choice((16, 32)),
            q=q,
            kv=kv,
            page=16 * paged,
            lengths=lengths,
            rows="seqused_q" if q == "ragged" and chance.random() < 0.5 else "",
            leftpad="cache_leftpad" if kv != "ragged" and chance.random() < 0.5 else "",
            causal=causal,
            left=chance.random() < 0.5,
            right=not causal and chance.random() < 0.5,
            scaled=chance.random() < 0.5,
            softcap=softcap,
            cap=(4.0, 0.25) if softcap and chance.random() < 0.5 else None,
            dropout=chance.random() < 0.3,
            sink=chance.random() < 0.5,
            slopes=chance.choice((0, 1, 2)),
            blocks=(16, 16) if (q, kv, lengths) == ("dense", "dense", "") and chance.random() < 0.5 else None,
            lists=chance.choice(("", "b", "h", "bh")),
        )
        print(form)
        (attention,) = resolve(parse(Source("form.attn", form.text)), prelude()).attentions
        declared = {x.name: x for x in attention.inputs}
        assert [name for name, _ in form.inputs] == [*declared]
        read = {name for name in declared if form.text.count(name) > 1}
        assert {*declared} - read <= {"q", "k", "v"}
        wanted = {
            *(name for name in (lengths, form.rows, form.leftpad) if name),
            *(f"window_{side}" for side in ("left", "right") if getattr(form, side)),
            *({"softmax_scale"} if (form.scaled or softcap) and form.cap is None else ()),
            *({"cap"} if softcap and form.cap is None else ()),
            *({"dropout_p", "seed"} if form.dropout else ()),
            *({"s_aux"} if form.sink else ()),
            *({"alibi_slopes"} if form.slopes else ()),
            *({"blocks"} if form.blocks else ()),
            *({"block_table"} if paged else ()),
            *({"cu_seqlens_q"} if q == "ragged" else ()),
            *({"cu_seqlens_k"} if kv == "ragged" else ()),
        }
        assert {*declared} == {"q", "k", "v"} | wanted
        if form.slopes:
            assert len(declared["alibi_slopes"].shape) == form.slopes
        if form.blocks:
            assert len(declared["blocks"].shape) == 2 + len(form.lists)
