"""Cases as text: what a failure prints is read back, and anything else is refused in words."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from attnc.verify.case import Case, Fit, Kept, TensorLayout
from tests.plans import plans_of

CASE = Case(
    dims={"B": 1, "M": 3}, seed=7, layouts={"q": TensorLayout(order=(1, 0, 2), gaps=(0, 8, 0), expanded=(1,))}
)
FIT = Fit(
    dims=("B", "M"),
    ranks={"q": 3},
    configs=2,
    logits=("random",),
    values=("random",),
    specials=("none", "nan_q"),
)


def test_what_is_printed_is_read_back() -> None:
    assert Case.from_json(CASE.to_json()) == CASE
    assert FIT.misfit(CASE) is None


def test_the_command_that_runs_it_again_has_the_rule_that_it_broke() -> None:
    variant = plans_of("full").modules[0].variant
    for rule in ("", "cuda.sm_80"):
        text = shlex.split(CASE.repro(variant, rule=rule))[-1]
        assert Kept.from_json(text) == Kept(case=CASE, rule=rule)
    kept = Kept(case=CASE, rule="nan", target="cuda.sm_80")
    assert Kept.from_json(kept.to_json()) == kept


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting property name"),
        ("[]", "not an object with 'dims'"),
        ("3", "not an object with 'dims'"),
        ('{"seed": 1}', "its 'dims' are not sizes"),
        ('{"dims": 3}', "its 'dims' are not sizes"),
        ('{"dims": {"B": -1}}', "its size 'B' is -1, and has to be from 0 to 2147483647"),
        ('{"dims": {"B": 10000000000000000000}}', "its size 'B' is 10000000000000000000, and has to be"),
        ('{"dims": {"B": 2147483648}}', "its size 'B' is 2147483648, and has to be"),
        ('{"dims": {"B": true}}', "its size 'B' is True"),
        ('{"dims": {"B": 1e9}}', "its size 'B' is 1000000000.0"),
        ('{"dims": {}, "seed": -1}', "its 'seed' is -1"),
        ('{"dims": {}, "seed": 99999999999999999999}', "its 'seed' is 99999999999999999999"),
        ('{"dims": {}, "colour": 1}', "there is no 'colour'"),
        ('{"dims": {}, "config": "x"}', "its 'config' is 'x'"),
        ('{"dims": {}, "layouts": []}', "its 'layouts' are not layouts"),
        ('{"dims": {}, "layouts": {"q": {}}}', "the layout of 'q' is none"),
    ],
)
def test_anything_else_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Case.from_json(text)


@pytest.mark.parametrize("axes", [[-1], 3, ["0"]])
def test_a_layout_has_lists_of_axes(axes: object) -> None:
    layout = {"order": axes, "gaps": [0], "expanded": [], "offset": 0}
    with pytest.raises(ValueError, match="the 'order' of the layout of 'q' is "):
        Case.from_json(json.dumps({"dims": {}, "layouts": {"q": layout}}))


@pytest.mark.parametrize(
    ("part", "value"), [("offset", -1), ("offset", 10**20), ("step", 0), ("step", 10**20), ("gaps", [10**20])]
)
def test_numbers_of_a_layout_are_in_range(part: str, value: object) -> None:
    layout = {"order": [0], "gaps": [0], "expanded": [], "offset": 0, part: value}
    with pytest.raises(ValueError, match=f"the '{part}' of the layout of 'q' is .*, and has to be from"):
        Case.from_json(json.dumps({"dims": {}, "layouts": {"q": layout}}))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (replace(CASE, dims={"B": 1}), "it has no size M"),
        (replace(CASE, config=2), "there is no config 2"),
        (replace(CASE, config=-1), "there is no config -1"),
        (replace(CASE, logits="odd"), "there is no 'logits' called 'odd'"),
        (replace(CASE, special="inf_x"), "there is no 'special' called 'inf_x'"),
        (replace(CASE, layouts={"k": CASE.layouts["q"]}), "the layout of 'k' does not fit it"),
        (replace(CASE, layouts={"q": TensorLayout(order=(0, 0, 1), gaps=(0, 0, 0))}), "the layout of 'q'"),
    ],
)
def test_a_case_of_another_module_is_told(case: Case, said: str) -> None:
    """As one of a spec that has changed since the case failed."""
    assert said in (FIT.misfit(case) or "")
