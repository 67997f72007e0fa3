"""Generated backward kernels against the reference's gradients, in the interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from attnc.expr.evaluate import Env, evaluate
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.resolve import resolve
from attnc.model.variants import variants
from attnc.plan import ir
from attnc.plan.lower import plan
from attnc.reference_gradients import gradients
from attnc.runtime.loader import load_module
from attnc.source import Source
from attnc.support.arguments import DTYPES
from attnc.syntax.parser import parse, prelude
from attnc.verify.case import Case
from attnc.verify.check import check
from tests.plans import module_of, plans_of
from tests.verify.judging import subject_of_text

FRAME = """attention under_test {{
  input q: f32[B, M, H, 32]
  input k, v: f32[B, N, H, 32]
{inputs}
  score = {score}
  mask = {mask}
  normalize = {softmax}
  output o: f32[B, M, H, 32]
  grad {grads}
}}
schedule under_test for triton {{
  tile.q = 32, tile.kv = 32
  backward {{
    tile.q = 16, tile.kv = 32
{schedule}
  }}
}}
"""
LENGTHS = {"B": 2, "H": 2, "M": 40, "N": 50}
TALL = {"B": 2, "H": 2, "M": 50, "N": 40}


@cache
def written(
    score: str,
    grads: str,
    inputs: tuple[str, ...] = (),
    mask: str = "true",
    softmax: str = "softmax",
    schedule: tuple[str, ...] = (),
) -> ir.Module:
    text = FRAME.format(
        score=score,
        grads=grads,
        inputs="\n".join(f"  input {line}" for line in inputs),
        mask=mask,
        softmax=softmax,
        schedule="\n".join(f"    {line}" for line in schedule),
    )
    program = resolve(parse(Source("test.attn", text)), prelude())
    return plan(variants(program, program.attentions[0])[0], program.schedules[0])


def draw(attention: Attention, dims: Mapping[str, int], given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Inputs of these sizes; floats require a gradient where the spec asks for one."""
    make = torch.Generator().manual_seed(0)
    tensors = {}
    for tensor in attention.inputs:
        shape = [int(evaluate(size, Env(dims=dims))) for size in tensor.shape]
        dtype = DTYPES[tensor.dtype]
        if tensor.name in given:
            value = torch.tensor(given[tensor.name], dtype=dtype).expand(shape).contiguous()
        elif dtype.is_floating_point:
            value = torch.randn(shape, generator=make).to(dtype)
        else:
            value = torch.randint(0, 4, shape, generator=make, dtype=dtype).sort(-1).values
        tensors[tensor.name] = value.requires_grad_(tensor.name in attention.grads)
    return tensors


def run(
    module: ir.Module, dims: Mapping[str, int], *, lse: bool = True, **given: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Any], ModuleType]:
    """The module's gradients and the reference's; lse: with a gradient of lse, where it is an output."""
    attention = module.variant.attention
    loaded = load_module(module)
    tensors = draw(attention, dims, given)
    function = getattr(loaded, attention.name)
    config = loaded.Config(16, 32, 4, 1)
    found = function(*tensors.values(), backward_config=dict.fromkeys(loaded.BACKWARD_CONFIGS, config))
    values = found if isinstance(found, tuple) else (found,)
    outputs = {tensor.name: value for tensor, value in zip(attention.outputs, values, strict=True)}
    make = torch.Generator().manual_seed(1)
    cotangents = {}
    for name, value in outputs.items():
        if name == "o" or lse:
            random = torch.randn(value.shape, generator=make).to(value.dtype)
            cotangents[name] = random.where(value.isfinite(), torch.zeros((), dtype=value.dtype))
    got = torch.autograd.grad(
        [outputs[name] for name in cotangents],
        [tensors[name] for name in attention.grads],
        list(cotangents.values()),
    )
    plain = {name: value.detach() for name, value in tensors.items()}
    return dict(zip(attention.grads, got, strict=True)), gradients(attention, plain, cotangents), loaded


def agree(module: ir.Module, dims: Mapping[str, int], *, lse: bool = True, **given: Any) -> None:
    got, want, _ = run(module, dims, lse=lse, **given)
    rounding = DType(module.variant.attention.q.dtype).unit_roundoff
    for name, value in got.items():
        expected = want[name]
        scale = np.abs(expected).max(initial=0.0)
        error = np.abs(value.double().numpy() - expected)
        assert value.shape == expected.shape
        assert error.max(initial=0.0) <= 8 * max(rounding, 2.0**-20) * scale + 1e-30, (
            name,
            error.max(),
            scale,
        )


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("name", "dims", "given"),
    [
        ("full", {**TALL, "B": 1}, {}),
        ("causal_gqa", {"B": 1, "Hkv": 2, "G": 2, "M": 20, "N": 50}, {}),
        ("causal_gqa", {"B": 1, "Hkv": 1, "G": 3, "M": 50, "N": 20}, {}),
        ("local_sink", {"B": 1, "Hkv": 1, "G": 2, "M": 40, "N": 180}, {}),
        ("odd_dims", {"B": 1, "Hkv": 1, "M": 40, "N": 50}, {}),
        ("bias", LENGTHS, {}),
        ("cross", {**LENGTHS, "H": 1}, {}),
        ("dropout", {**LENGTHS, "H": 1}, {"p": 0.3}),
        ("dropout", {**LENGTHS, "H": 1}, {"p": 1.0}),
        ("document", {"B": 2, "Hkv": 1, "G": 2, "M": 30, "N": 40}, {}),
        ("fa1", {**TALL, "B": 1}, {}),
        ("prefix_document", {"B": 2, "H": 1, "M": 40, "N": 40}, {"prefix": [3, 21]}),
        ("padding", {**LENGTHS, "H": 1}, {"kv_len": [0, 33]}),
        ("single", LENGTHS, {}),
    ],
)
def test_specs_are_right(name: str, dims: dict[str, int], given: dict[str, Any]) -> None:
    agree(module_of("f32" if name == "single" else name), dims, **given)


SLOPE = ("slope: f32[H]",)
ALIBI = "dot(q, k) / sqrt(32) - slope[h] * abs(q_pos - kv_idx) * 0.1"
ROWS = ("row: f32[N, B]", "column: f32[N]")
PAIRS = ("pair: f32[B, H, M, N]", "turned: f32[B, 1, N, M]", "shared: f32[M, N]")
PAIRED = (
    "dot(q, k) / sqrt(32) + pair[b, h, q_idx, kv_idx] * turned[b, 0, kv_idx, q_idx] + shared[q_idx, kv_idx]"
)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("dims", [LENGTHS, TALL], ids=["wide", "tall"])
@pytest.mark.parametrize(
    "module",
    [
        ("q, k, v, slope", SLOPE, ALIBI, "causal", ()),
        ("q, k, v, slope", SLOPE, ALIBI, "causal", ("accumulate.dq = atomic",)),
        ("q, k, v, slope", SLOPE, ALIBI, "causal", ("accumulate.dq = sequential", "dkdv { dp = late }")),
        ("q, k, v, slope", SLOPE, ALIBI, "causal", ("dkdv { dp in {late, early}, maxnreg = 168 }",)),
        ("slope", SLOPE, ALIBI, "causal", ("accumulate.dslope = atomic",)),
        ("k, slope", SLOPE, ALIBI, "window(5, 3)", ()),
        ("v", SLOPE, ALIBI, "causal", ()),
        ("q, k, v, row, column", ROWS, "dot(q, k) * row[q_pos, b] + column[kv_idx]", "causal", ()),
        (
            "q, k, v, row, column",
            ROWS,
            "dot(q, k) * row[q_pos, b] + column[kv_idx]",
            "window(7, 2)",
            ("accumulate.dq = atomic, accumulate.drow = atomic, accumulate.dcolumn = atomic",),
        ),
        ("q, row", ROWS, "dot(q, k) * row[q_pos, b] + column[kv_idx]", "true", ("accumulate.dq = atomic",)),
        ("q, k, v, pair, turned, shared", PAIRS, PAIRED, "causal or kv_idx < 3", ()),
        ("q, k, v, pair", PAIRS, PAIRED, "window(9, 0)", ("accumulate.dq = sequential",)),
        ("k, pair, shared", PAIRS, PAIRED, "true", ("accumulate.dshared = atomic",)),
        ("q, k, v, rel", ("rel: f32[H, R]",), "dot(q, k) / 6 + rel[h, q_pos - kv_idx + 7]", "true", ()),
        (
            "q, k, v, u, w",
            ("u: f32[3]", "w: f32[]"),
            "u[1] * softcap(dot(q, k) / sqrt(32) * w, 2) + u[2] * kv_idx * 0.01",
            "causal",
            (),
        ),
    ],
    ids=lambda module: f"{module[0].replace(', ', '_')}-{module[3][:6]}-{'-'.join(module[4])[14:30]}",
)
def test_gradients_of_what_the_score_loads(
    module: tuple[str, tuple[str, ...], str, str, tuple[str, ...]], dims: dict[str, int]
) -> None:
    grads, inputs, score, mask, schedule = module
    planned = written(score, grads, inputs, mask, schedule=schedule)
    agree(planned, {**dims, "R": 15})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", [(), ("accumulate.dq = atomic",)], ids=["two_pass", "atomic"])
def test_gradient_of_the_sink(schedule: tuple[str, ...]) -> None:
    planned = written(
        "dot(q, k) / 6 + sink[0, h] * kv_idx * 0.01",
        "q, sink",
        ("sink: f32[2, H]",),
        "window(4, 0)",
        "softmax(sink = sink[1, h] * 2)",
        schedule,
    )
    agree(planned, LENGTHS)
    agree(planned, {**TALL, "N": 0})


@pytest.mark.one_in(4)
@pytest.mark.parametrize("sizes", [{"M": 0}, {"N": 0}, {"B": 0}, {"H": 0}], ids=str)
def test_sizes_of_nothing(sizes: dict[str, int]) -> None:
    agree(written(ALIBI, "q, k, v, slope", SLOPE, "causal"), {**LENGTHS, **sizes})


def test_wide_heads_have_a_kernel_for_each_gradient() -> None:
    module = plans_of("causal_gqa").modules[2]
    assert module.backward is not None
    assert module.variant.name == "bf16_d256"
    assert [planned.makes for planned in module.backward.kernels] == [("dq",), ("dv",), ("dk",)]
    agree(module, {"B": 1, "Hkv": 1, "G": 2, "M": 20, "N": 40})


@pytest.mark.one_in(4)
@pytest.mark.parametrize("tiles", [(16, 64), (64, 16), (128, 32)], ids=str)
@pytest.mark.parametrize("early", [True, False])
def test_kernels_differ_in_their_tiles(tiles: tuple[int, int], early: bool) -> None:
    """The rows' workspace is padded to whole tiles of both kernels, whichever has the larger ones."""
    planned = written(ALIBI, "q, k, v, slope", SLOPE, "causal", schedule=("dkdv { dp in {late, early} }",))
    loaded = load_module(planned)
    tensors = draw(planned.variant.attention, TALL, {})
    config = {
        "dq": loaded.Config(tiles[0], 16, 4, 1),
        "dkdv": loaded.Config(tiles[1], 16, 4, 1, early_dp=early),
    }
    found = vars(loaded)["under_test"](*tensors.values(), backward_config=config)
    do = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(found, list(tensors.values()), do)
    plain = {name: value.detach() for name, value in tensors.items()}
    want = gradients(planned.variant.attention, plain, {"o": do})
    for name, value in zip(tensors, got, strict=True):
        np.testing.assert_allclose(value.numpy(), want[name], rtol=0, atol=1e-4 * np.abs(want[name]).max())


def test_flash_attention_1_has_a_program_for_each_head() -> None:
    module = module_of("fa1")
    assert module.backward is not None
    assert [planned.grid.over for planned in module.backward.kernels] == ["head"]
    grouped = written("dot(q, k) / 6", "q, k, v", mask="causal", schedule=("accumulate.dq = sequential",))
    agree(grouped, LENGTHS)
    first, second = (run(grouped, LENGTHS)[0] for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name])


def test_two_passes_are_deterministic() -> None:
    planned = written(ALIBI, "q, k, v, slope", SLOPE, "causal")
    first, second = (run(planned, LENGTHS)[0] for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name])


def test_a_gradient_of_o_alone() -> None:
    agree(module_of("cross"), {**LENGTHS, "H": 1}, lse=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mask", ["true", "window(9, 4)"])
def test_identities(mask: str) -> None:
    """Weights of a row sum to 1; adding a vector to every key, or trading length between q and k, changes
    nothing.
    """
    planned = written("dot(q, k) / sqrt(32)", "q, k, v", mask=mask)
    tensors = {
        name: x.detach().requires_grad_() for name, x in draw(planned.variant.attention, LENGTHS, {}).items()
    }
    o = vars(load_module(planned))["under_test"](*tensors.values())
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
    o.backward(do)
    q, k, v = tensors.values()
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    torch.testing.assert_close(v.grad.sum(1), do.sum(1), rtol=0, atol=2e-5)
    torch.testing.assert_close(k.grad.sum(1), torch.zeros_like(k.grad.sum(1)), rtol=0, atol=2e-5)
    torch.testing.assert_close((q.grad * q).sum((1, 3)), (k.grad * k).sum((1, 3)), rtol=1e-4, atol=1e-4)


WIDER_OUTPUTS = """attention a {
  input q: bf16[B, M, H, 32]
  input k, v: bf16[B, N, H, 32]
  score = dot(q, k) / 4
  mask = causal
  normalize = softmax
  output o: f32[B, M, H, 32]
  grad q, k, v
}
schedule a for triton {
  tile.q = 16, tile.kv = 16
  backward { tile.q = 16, tile.kv = 16 }
}
"""


def test_delta_is_summed_before_do_is_rounded_for_products() -> None:
    made = subject_of_text(WIDER_OUTPUTS)
    verdict = check(made, Case(dims={"B": 1, "M": 20, "N": 30, "H": 2}, seed=0, config=0))
    assert verdict.ok, verdict.message
