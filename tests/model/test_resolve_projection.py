"""Projections and their schedules: what is read, and what is refused (the golden diagnostics show how)."""

import pytest

from attnc.build import plan_program
from attnc.diagnostics import DiagnosticError
from attnc.model.configs import projection_configs
from attnc.model.variants import projection_variants
from attnc.source import Source
from attnc.syntax.format import format_file
from attnc.syntax.parser import parse
from tests.model.projections import LAYER, SCHEDULE, program


def codes(text: str) -> set[str]:
    with pytest.raises(DiagnosticError) as failure:
        plan_program(program(text))
    return {diagnostic.code for diagnostic in failure.value.diagnostics}


def test_variants_fix_types_and_sizes() -> None:
    found = program(LAYER)
    names = [variant.name for variant in projection_variants(found, found.projections[0])]
    assert names == ["bf16_k64", "bf16_k128", "f16_k64", "f16_k128"]
    last = projection_variants(found, found.projections[0])[-1].projection
    assert (last.dtype, last.size("K"), last.size("N")) == ("f16", 128, None)


def test_configs_stand_by_implementation_with_defaults_first() -> None:
    read = program(LAYER + SCHEDULE)
    found = projection_configs(
        read.projection_schedules[0], projection_variants(read, read.projections[0])[0]
    )
    assert [config.impl for config in found] == ["gemv", "flat", "flat", "flat"]
    assert [(c.value("tile.n"), c.value("stages")) for c in found[1:]] == [(64, 2), (64, 3), (32, 2)]


def test_schedules_pick_variants_and_list_configs_as_those_of_attentions_do() -> None:
    text = (
        LAYER
        + """
schedule layer for triton {
  impl = flat
  flat {
    tile.n = 64
    when K == 128 and T == bf16 {
      config tile.n = 32, stages = 3
      config tile.n = 16, stages in {2, 3}
    }
    where stages < 5
  }
}
"""
    )
    read = program(text)
    (schedule,) = read.projection_schedules
    found = {
        variant.name: [(c.value("tile.n"), c.value("stages")) for c in projection_configs(schedule, variant)]
        for variant in projection_variants(read, read.projections[0])
    }
    assert found["bf16_k128"] == [(32, 3), (16, 2), (16, 3)]
    assert found["bf16_k64"] == found["f16_k128"] == [(64, 4)]


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("y = dot(x, w)", "y = dot(w, x)", "E0331"),
        ("y = dot(x, w)", "y = dot(x, w) + bias[n]", "E0331"),
        ("  output y: T[M, N]\n", "", "E0330"),
        ("input x: T[M, K]", "input x: T[B, M, K]", "E0332"),
        ("input x: T[M, K]", "input x: T[8, K]", "E0332"),
        ("input x: T[M, K]", "input x: T[M, K] is sorted", "E0332"),
        ("input w: T[N, K]", "input w: T[N, K // 2]", "E0308"),
        ("param T in {bf16, f16}", "param T in {i32, i64}", "E0211"),
        ("input w: T[N, K]", "input w, w: T[N, K]", "E0201"),
        ("projection layer", "projection print", "E0202"),
        ("impl in {flat, gemv}", "impl in {flat, flat}", "E0405"),
        ("tile.k = 64", "tile.k = 64, tile.k = 32", "E0405"),
        ("where tile.n == 64 or", "where tile.n == 16 and", "E0409"),
        ("where tile.n == 64", "where tile.q == 64", "E0203"),
        ("stages in {2, 3}", "stages = 8, tile.k = 2048", "E0405"),
        ("tile.k = 64", "tile.k = 4096", "E0601"),
        ("schedule layer for triton", "schedule layer for cuda.sm_90a", "E0602"),
    ],
)
def test_mistakes(old: str, new: str, code: str) -> None:
    text = LAYER + SCHEDULE
    assert old in text
    assert code in codes(text.replace(old, new))


def test_two_schedules_are_one_too_many() -> None:
    assert "E0408" in codes(LAYER + SCHEDULE + SCHEDULE)


def test_an_unused_param_is_a_warning() -> None:
    text = LAYER.replace("param T", "param W in {1}, T")
    assert [warning.code for warning in program(text).warnings] == ["W0201"]


def test_formatting_is_stable() -> None:
    text = format_file(parse(Source("layer.attn", LAYER + SCHEDULE)))
    assert text == LAYER + SCHEDULE
    assert format_file(parse(Source("layer.attn", text.replace(" = ", "=")))) == text
