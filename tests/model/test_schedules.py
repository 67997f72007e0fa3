"""Schedules as data, and the configs that they span."""

import pytest

from attnc.model.configs import configs
from attnc.model.schedule import Choice, Config, Phase, Value
from attnc.model.variants import variants
from tests.model.resolving import codes_of, plain, resolve_text
from tests.refusals import refused

ONLINE = Choice(name="online", args={"rescale": "deferred"})


def configs_of(
    body: str, phase: Phase = "forward", *, extra: str = "", grads: str = ""
) -> tuple[Config, ...]:
    """The configs of the default variant under a schedule with this body."""
    text = plain(extra).removesuffix("}\n") + f"  {grads}\n}}\nschedule plain for triton {{\n{body}\n}}\n"
    program = resolve_text(text)
    return configs(program.schedules[0], phase, variants(program, program.attentions[0])[0])


def values(body: str, key: str, phase: Phase = "forward") -> list[Value]:
    return [config.value(key) for config in configs_of(body, phase)]


def test_absent_keys_have_defaults() -> None:
    [config] = configs_of("")
    assert config.values() == {
        "loops": ("q", "kv"),
        "tile.q": 64,
        "tile.kv": 64,
        "tile.d": 64,
        "warps": 4,
        "warp_split": "q",
        "stages": 2,
        "split.kv": 1,
        "pack": "none",
        "softmax": ONLINE,
        "persistent": False,
        "order": "default",
    }


def test_backward_has_its_own_keys_and_defaults() -> None:
    [config] = configs_of("tile.q = 32", "backward", grads="grad q, v")
    assert config.value("loops") == ("kv", "q")
    assert config.value("tile.q") == 64
    assert config.value("accumulate.dq") == config.value("accumulate.dv") == "two_pass"
    assert "accumulate.dk" not in config.values()
    assert "softmax" not in config.values()


def test_the_first_choices_are_the_default() -> None:
    found = configs_of("tile.q in {128, 64}, stages in {3, 2}")
    assert [(config.value("tile.q"), config.value("stages")) for config in found] == [
        (128, 3),
        (128, 2),
        (64, 3),
        (64, 2),
    ]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("online", ONLINE),
        ("online(rescale = every_step)", Choice(name="online", args={"rescale": "every_step"})),
        (
            "online(rescale = lazy(8))",
            Choice(name="online", args={"rescale": Choice(name="lazy", args={"threshold": 8.0})}),
        ),
        ("two_pass", Choice(name="two_pass", args={})),
        (
            "unified_max(phi = -1, bounds = [-60, 60.5])",
            Choice(name="unified_max", args={"phi": -1.0, "bounds": (-60.0, 60.5), "fallback": ONLINE}),
        ),
    ],
)
def test_softmax_values(written: str, value: Choice) -> None:
    assert values(f"softmax = {written}", "softmax") == [value]


@pytest.mark.parametrize(
    "setting",
    [
        "softmax = online(rescale = lazy(0))",
        "softmax = online(8)",
        "softmax = online(scale = deferred)",
        "softmax = unified_max(phi = 0)",
        "softmax = unified_max(phi = 0, bounds = [60, -60])",
        "softmax = unified_max(phi = 0, bounds = [1, 2, 3])",
        "softmax = unified_max(phi = 0, phi = 1, bounds = [1, 2])",
        "softmax = unified_max(phi = 0, bounds = [1, 2], fallback = unified_max(phi = 0, bounds = [1, 2]))",
        "loops = q",
        "loops = [q]",
        "loops = [kv, kv]",
        "tile.q = 0",
        "tile.q = 48.0",
        "tile.q = -16",
        "tile.q = 2048",
        "split.kv = 0",
        "persistent = yes",
        "warps in {4, 5}",
    ],
)
def test_values_outside_of_the_domain(setting: str) -> None:
    assert codes_of(plain() + f"schedule plain for triton {{\n{setting}\n}}") == ["E0403"]


@pytest.mark.parametrize("tile", [1, 8, 16, 80, 176, 1024])
def test_tiles(tile: int) -> None:
    assert values(f"tile.kv = {tile}", "tile.kv") == [tile]


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


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("dq { stages = 2 }", "E0406"),
        ("backward { forward { stages = 2 } }", "E0406"),
        ("backward { dq { dp = late } }", "E0404"),
        ("backward { dkdv { order = longest_first } }", "E0404"),
        ("maxnreg = 168", "E0404"),
        ("backward { maxnreg = 100 }", "E0403"),
        ("backward { dkdv { accumulate.dq = atomic } }", "E0404"),
        ("backward { accumulate.dk = sequential }", "E0403"),
    ],
)
def test_what_a_kernel_of_the_backward_cannot_be_told(body: str, code: str) -> None:
    head = plain("").removesuffix("}\n") + "  grad q, k\n}\n"
    assert codes_of(f"{head}schedule plain for triton {{\n{body}\n}}\n") == [code]


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
