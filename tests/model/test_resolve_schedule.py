"""Values of schedule keys: which are read, which are refused."""

import pytest

from attnc.model.schedule import Choice
from tests.model.resolving import codes_of, plain
from tests.model.schedules import ONLINE, values


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
