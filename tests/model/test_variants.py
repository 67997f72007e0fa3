"""Variants: names, order, and attentions with every param filled in."""

from pathlib import Path

import pytest

from attnc.effort import remember
from attnc.expr.nodes import Const, Param, show, walk
from attnc.model.attention import Variant
from attnc.model.dtypes import DType
from attnc.model.variants import variants
from tests.model.resolving import SPECS, plain, resolve_path, resolve_text
from tests.refusals import refused


def variants_of(text: str) -> tuple[Variant, ...]:
    program = resolve_text(text)
    return variants(program, program.attentions[0])


def test_names_and_order() -> None:
    text = plain(
        "param T in {f32, f16}, W in {128, -1}, is_long in {false, true}\n"
        "param scale in {0.5, 1e-6}\n  input x: T[H]",
        score="dot(q, k) * scale + W",
        mask="is_long",
    )
    names = [variant.name for variant in variants_of(text)]
    assert names[:3] == [
        "f32_w128_is_long_false_scale0p5_d64",
        "f32_w128_is_long_false_scale0p5_d128",
        "f32_w128_is_long_false_scale1em06_d64",
    ]
    assert names[-1] == "f16_wm1_is_long_true_scale1em06_d128"
    assert len(set(names)) == len(names) == 32


def test_a_spec_without_params_has_one_variant() -> None:
    [variant] = variants_of(plain().replace("D", "80"))
    assert variant.name == "default"
    assert not variant.params


def test_params_are_constants_and_constants_are_folded() -> None:
    text = plain("param W in {128}", score="softcap(dot(q, k) / sqrt(D), 50)", mask="window(W * 2, 0)")
    attention = variants_of(text)[0].attention
    assert show(attention.score) == "50 * tanh(dot(q, k) / 400.0)"
    assert show(attention.mask) == "q_pos - 256 <= kv_idx <= q_pos"
    assert attention.q.shape[-1] == Const(64)
    assert attention.params == ()


def test_an_int_choice_of_a_float_param_is_a_float() -> None:
    first, _ = variants_of(plain("param s in {1, 0.5}", score="dot(q, k) * (2 * s)").replace("D]", "64]"))
    assert show(first.attention.score) == "dot(q, k) * 2.0"


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_nothing_is_left_open_in_a_variant(path: Path) -> None:
    program = resolve_path(path)
    for variant in (v for attention in program.attentions for v in variants(program, attention)):
        attention = variant.attention
        tensors = (*attention.inputs, *attention.outputs)
        assert all(isinstance(tensor.dtype, DType) for tensor in tensors)
        exprs = [attention.score, attention.mask, *(size for tensor in tensors for size in tensor.shape)]
        assert not any(isinstance(node, Param) for expr in exprs for node in walk(expr))
        assert attention.score.span is not None
        assert isinstance(attention.q.shape[-1], Const)
        assert isinstance(attention.v.shape[-1], Const)


def test_specs_make_a_number_of_variants_that_can_be_committed() -> None:
    programs = [resolve_path(path) for path in SPECS]
    assert sum(len(variants(program, a)) for program in programs for a in program.attentions) <= 128


def test_variants_are_counted_before_they_are_made() -> None:
    params = ", ".join(f"p{i} in {{1, 2}}" for i in range(60))
    total = " + ".join(f"p{i}" for i in range(60))
    diagnostic = refused(variants_of, plain(f"param {params}", mask=f"kv_idx < {total}"))
    assert diagnostic.code == "E0508"
    assert "more than 10^9" in diagnostic.message


def test_schedules_of_a_file_share_the_attentions_of_variants() -> None:
    program = resolve_text(plain("param W in {1, 2}", mask="kv_idx < W"))
    attention = program.attentions[0]
    with remember():
        first, again = variants(program, attention), variants(program, attention)
        some = variants(program, attention, 1)
    assert len({id(variant.attention) for variant in first}) == len(first) > 1
    assert [id(variant.attention) for variant in again] == [id(variant.attention) for variant in first]
    assert some[0].attention is first[0].attention
    alone = variants(program, attention)[0].attention
    assert alone == first[0].attention
    assert alone is not first[0].attention
