"""Scales of columns in a plan: what a step loads of each key and column, and in whose words."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import Ref, walk
from attnc.plan.ir.kernel import KEY_ROW, TILE_COLUMN
from attnc.plan.lists import KV_HEAD
from tests.verify.judging import modules_of, spec

LINES = (
    "input q: bf16[B, M, Hkv * G, 64]",
    "input k, v: e4m3[B, N, Hkv, 64]",
    "input ks: f32[B, N, Hkv, 2]",
    "input vs: u8[B, Hkv, 4]",
    "score = dot(q, k * ks[b, kv_idx, h // G, d // 32]) / 8",
    "normalize = softmax(v_scale = exp2(vs[b, h // G, d // 16] - 127))",
    "output o: bf16[B, M, Hkv * G, 64]",
)


@pytest.mark.parametrize(
    ("schedule", "packs"), [("loops = [q, kv]", False), ("loops = [kv], pack = gqa", True)]
)
def test_a_step_loads_scales_of_elements(schedule: str, packs: bool) -> None:
    (module,) = modules_of(spec(LINES, schedule))
    kernel = module.kernel
    assert kernel.softmax.v_scale is None
    assert kernel.step.v_scale is None
    k, v = kernel.step.scales
    assert (k.tensor, v.tensor) == ("k", "v")
    (of_k,), (of_v,) = k.fetches, v.fetches
    assert of_k.axes == ("q", "kv")  # of a tile whose rows are keys
    assert of_v.axes == ("kv",)
    names = {node.name for x in of_k.load.indices for node in walk(x) if isinstance(node, Ref)}
    assert {KEY_ROW.name, TILE_COLUMN.name} <= names
    assert (KV_HEAD.name in names) == packs
    assert {"ks_ptr", "vs_ptr"} <= set(kernel.step.names)
    assert all(fetch.row is None for fetch in (of_k, of_v))


def test_a_spec_without_them_has_none() -> None:
    (module,) = modules_of(
        spec(
            [line.replace(" * ks[b, kv_idx, h // G, d // 32]", "") for line in LINES[:5]]
            + ["normalize = softmax", LINES[-1]]
        )
    )
    assert module.kernel.step.scales == ()
