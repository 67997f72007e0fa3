"""Generated modules keep the properties; modules with a bug of the right kind do not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.plan.ir import pack_of
from attnc.verify.case import Case
from attnc.verify.gradient_properties import GRADIENT_PROPERTIES
from attnc.verify.properties import PROPERTIES, violations
from attnc.verify.strategies import free_dims
from tests.plans import SPECS, plans_of
from tests.verify.judging import committed

NAMES = sorted(path.stem for path in SPECS.glob("*.attn") if "attention " in path.read_text(encoding="utf-8"))
#: A spec with a scale of v for each key, in no table.
SCALED = SPECS.parent / "tests" / "planted" / "specs" / "hopper_narrow.attn"
SIZES = {"B": 2, "M": 70, "N": 75, "H": 2, "Hkv": 1, "G": 2}
#: One of each kind, see `_kind`, and a third of them by day; the others are held to the rules every night.
BY_DAY = (
    *("prefix_lm", "causal_gqa", "softcap", "chunked_prefill", "full", "decode", "dropout", "fa1"),
    *("kv8_decode", "local_sink", "mla_decode", "neighborhood", "padding", "shared_prefix", "varlen"),
    *("warp_split",),
)
#: Queries of a sequence that is decoded: each has a program that joins its splits, under each of 20 configs.
DECODED = 3


def case(name: str, **changes: Any) -> Case:
    plan, attention = committed(name).plan, committed(name).variant.attention
    sizes = {dim: SIZES[dim] for dim in free_dims(attention)}
    if plan is not None and plan.kernel.structure == "decode":
        sizes["M"] = DECODED
    return replace(Case(dims=sizes, seed=3), **changes)


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in NAMES]
)
def test_properties_hold(name: str) -> None:
    logits = ("random", "spike")[NAMES.index(name) % 2]
    assert list(violations(committed(name), case(name, logits=logits))) == []


@pytest.mark.nightly
def test_every_kind_is_held_to_the_rules_by_day() -> None:
    assert {_kind(name) for name in BY_DAY} == {_kind(name) for name in NAMES}


def _kind(name: str) -> tuple[object, ...]:
    """What a spec has for rules to hold: a kernel of some structure, storages, and the rules that apply."""
    attention, plan = committed(name).variant.attention, committed(name).plan
    assert plan is not None
    kernel = plan.kernel
    rules = [rule.name for rule in PROPERTIES if rule.applies(attention)]
    if plan.backward is not None:
        rules += [rule.name for rule in GRADIENT_PROPERTIES if rule.applies(attention)]
    return (
        *(kernel.structure, pack_of(kernel) is not None),
        *(type(tensor.storage) for tensor in (attention.q, attention.k)),
        frozenset(rules),
    )


def test_each_property_applies_somewhere() -> None:
    paths = [*(SPECS / f"{name}.attn" for name in NAMES), SCALED]
    attentions = [module.variant.attention for path in paths for module in plans_of(path).modules]
    for rule in PROPERTIES:
        assert any(rule.applies(attention) for attention in attentions), rule.name
    applied = {rule.name for rule in PROPERTIES if rule.applies(committed("dropout").variant.attention)}
    assert not applied & {"batches permute", "heads permute", "keys permute"}


def test_violations_are_found() -> None:
    real = committed("causal_gqa")
    calls = 0

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: Any, config: Any) -> None:
        nonlocal calls
        calls += 1
        o, lse = out
        real.module.causal_gqa(q, k, v, out=out, config=config)
        o[0] += 0.25 * v[0].nan_to_num().mean()  # every row sees every key, in the first sequence alone
        o[:, :, 0] += 0.5
        lse += calls

    real = replace(real, gradients=None)
    module = SimpleNamespace(CONFIGS=real.module.CONFIGS, causal_gqa=wrong)
    found = {text.split(":")[0] for text in violations(replace(real, module=module), case("causal_gqa"))}  # type: ignore[arg-type]  # it has what is used
    assert found >= {
        "run to run",
        "2v gives 2o",
        "batches permute",
        "heads permute",
        "masked keys are invisible",
        "prefixes agree",
        "configs agree",
    }


def test_deaf_outputs_are_found() -> None:
    real = committed("full")

    def deaf(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: Any, config: Any) -> None:
        real.module.full(q, k, v.clamp(-3, 3), out=out, config=config)

    module = SimpleNamespace(CONFIGS=real.module.CONFIGS, full=deaf)
    broken = replace(real, gradients=None, module=module)  # type: ignore[arg-type]  # it has what is used
    assert any(
        text.startswith("visible keys count: ") for text in violations(broken, case("full", logits="spike"))
    )
