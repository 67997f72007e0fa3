"""Configs that a schedule spans."""

import pytest

from attnc.model.configs import configs
from attnc.model.schedule import Phase, Value
from attnc.model.variants import variants
from tests.model.resolving import resolve_text
from tests.model.schedules import configs_of, values
from tests.refusals import refused


def test_the_first_choices_are_the_default() -> None:
    found = configs_of("tile.q in {128, 64}, stages in {3, 2}")
    assert [(config.value("tile.q"), config.value("stages")) for config in found] == [
        (128, 3),
        (128, 2),
        (64, 3),
        (64, 2),
    ]


@pytest.mark.parametrize(
    ("condition", "left"),
    [
        ("tile.q <= stages * 32", [(64, 2), (64, 3)]),
        ("tile.q > 64 and stages == 3", [(128, 3)]),
        ("not (tile.q == D) or 2 <= stages < 3", [(128, 2), (128, 3), (64, 2)]),
        ("tile.q % 128 == 0", [(128, 2), (128, 3)]),
        ("tile.q / (stages - 2) < 100", [(64, 3)]),
        ("stages // 0 == 1 or tile.q == 64", [(64, 2), (64, 3)]),
        ("softmax == two_pass or order == longest_first or stages == 2", [(128, 2), (64, 2)]),
        (
            "softmax == online and persistent == false and split.kv != auto",
            [(128, 2), (128, 3), (64, 2), (64, 3)],
        ),
        ("T == bf16 and W < 4 and is_long and scale < 0.75 and stages == 2", [(128, 2), (64, 2)]),
        ("-stages < -2", [(128, 3), (64, 3)]),
    ],
)
def test_where_prunes(condition: str, left: list[tuple[int, int]]) -> None:
    extra = "param T in {bf16}, W in {1}, is_long in {true}, scale in {0.5}\n  input x: T[W]"
    found = configs_of(f"tile.q in {{128, 64}}, stages in {{2, 3}}\nwhere {condition}", extra=extra)
    assert [(config.value("tile.q"), config.value("stages")) for config in found] == left


def test_where_of_a_phase_prunes_that_phase() -> None:
    body = "stages in {2, 3}\nbackward {\nstages in {1, 2}\nwhere stages > 1\n}"
    assert values(body, "stages") == [2, 3]
    assert values(body, "stages", "backward") == [2]


BACKWARD = """
backward {
  stages in {1, 2}, warps = 8
  where stages < 2 or warps == 8
  dq { tile.q = 128, maxnreg in {none, 168} }
  dkdv { stages in {2, 3}, dp in {late, early} where dp == early or stages == 3 and warps == 8 }
}
"""


def test_kernels_of_the_backward_start_from_its_keys() -> None:
    found = configs_of(BACKWARD.replace(" where dp", "\n  where dp"), "dq", grads="grad q")
    assert [(c.value("stages"), c.value("maxnreg")) for c in found] == [
        (1, "none"),
        (1, 168),
        (2, "none"),
        (2, 168),
    ]
    assert {(c.value("tile.q"), c.value("tile.kv"), c.value("warps")) for c in found} == {(128, 64, 8)}
    assert found[0].value("accumulate.dq") == "two_pass"
    assert "dp" not in found[0].values()


def test_their_own_keys_and_conditions_come_on_top() -> None:
    found = configs_of(BACKWARD.replace(" where dp", "\n  where dp"), "dkdv", grads="grad q")
    assert [(c.value("stages"), c.value("dp")) for c in found] == [(2, "early"), (3, "late"), (3, "early")]
    assert {(c.value("tile.q"), c.value("warps")) for c in found} == {(64, 8)}
    assert "order" not in found[0].values() or found[0].value("order") == "default"


BY_SIZE = """\
attention a {
  param D in {64, 128, 256}
  input q: f16[B, M, H, D]
  input k, v: f16[B, N, H, D]
  score = dot(q, k)
  normalize = softmax
  output o: f16[B, M, H, D]
  grad q, k, v
}
schedule a for triton {
"""


def configs_by_size(body: str, phase: Phase = "forward") -> list[list[tuple[Value, Value, Value]]]:
    """tile.q, tile.kv and stages of the configs of each variant, D = 64, 128 and 256."""
    program = resolve_text(f"{BY_SIZE}{body}\n}}\n")
    return [
        [
            (config.value("tile.q"), config.value("tile.kv"), config.value("stages"))
            for config in configs(program.schedules[0], phase, variant)
        ]
        for variant in variants(program, program.attentions[0])
    ]


def test_when_stands_in_place_of_what_is_around_it() -> None:
    body = """
      tile.q in {128, 64}, tile.kv = 32
      where tile.q == 64
      when D == 64 { tile.kv in {64, 32} }
      when D >= 128 {
        stages = 3
        where tile.q * D < 16384
      }
      when D == 256 { tile.q in {32, 64, 16} }
    """
    assert configs_by_size(body.replace("where tile.q == 64", "where tile.q >= 32")) == [
        [(128, 64, 2), (128, 32, 2), (64, 64, 2), (64, 32, 2)],
        [(64, 32, 3)],
        [(32, 32, 3)],
    ]


def test_config_lines_list_configs() -> None:
    body = """
      tile.q in {128, 64}, stages = 3
      config tile.kv = 64
      config tile.q = 64, tile.kv = 128, stages = 4
      config tile.q in {64, 128}, tile.kv = 64
      where stages == 4 or tile.q == 128 or D != 64
      when D == 256 {
        config tile.q = 16
      }
    """
    assert configs_by_size(body) == [
        [(128, 64, 3), (64, 128, 4)],
        [(128, 64, 3), (64, 64, 3), (64, 128, 4)],
        [(16, 64, 3)],
    ]


def test_a_key_of_other_lines_alone_has_its_default() -> None:
    assert configs_by_size("config stages = 3\nconfig tile.q = 16")[0] == [(64, 64, 3), (16, 64, 2)]


def test_lines_of_a_kernel_stand_in_place_of_those_of_the_backward() -> None:
    body = """
      backward {
        config tile.q = 64, tile.kv = 64
        config tile.q = 32, tile.kv = 128
        dq { tile.q = 16 }
        dkdv { config stages = 3 }
      }
    """
    assert configs_by_size(body, "backward")[0] == [(64, 64, 2), (32, 128, 2)]
    assert configs_by_size(body, "dq")[0] == [(16, 64, 2), (16, 128, 2)]
    assert configs_by_size(body, "dkdv")[0] == [(64, 64, 3)]


def test_keys_of_another_target_make_no_configs() -> None:
    assert values("consumers = 2\nconfig tile.q = 32, overlap = false", "tile.q") == [32]
    assert "consumers" not in configs_of("consumers = 2")[0].values()


def test_lists_are_as_long_as_sets_may_be() -> None:
    lines = ["config tile.q in {16, 32, 64, 128}, tile.kv in {16, 32, 64, 128}"] * 257
    assert refused(configs_of, "\n".join(lines)).code == "E0509"


def test_conditions_that_exclude_everything() -> None:
    diagnostic = refused(configs_of, "stages in {2, 3}\nwhere stages > 0\nwhere stages > 3")
    assert diagnostic.code == "E0409"
    assert diagnostic.primary.span.text == "stages > 3"
