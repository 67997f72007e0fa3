"""What Hopper's kernels over keys, and over queries, have for themselves."""

from __future__ import annotations

import pytest

from attnc.plan.ir import Module
from attnc.target.sm90.backward_tiles import Sm90Arguments, Sm90BackwardText
from tests.plan.test_sm90_backward import planned
from tests.verify.judging import modules_of, spec


def texts_of(module: Module) -> dict[str, Sm90BackwardText]:
    """The texts of the kernels of wgmma, by what they make."""
    arguments = Sm90Arguments(module)
    assert module.backward is not None
    return {kernel.kind: Sm90BackwardText(module, arguments, kernel) for kernel in module.backward.kernels}


def test_a_kernel_is_over_keys_or_over_queries() -> None:
    texts = texts_of(planned(accumulate="two_pass"))
    assert {kind: (text.dkdv is None, text.dq is None) for kind, text in texts.items()} == {
        "dkdv": (False, True),
        "dq": (True, False),
    }


@pytest.mark.parametrize(("accumulate", "adds"), [("atomic", True), ("two_pass", False)])
def test_cut_rows_are_cleared_where_dq_sums_over_keys(accumulate: str, adds: bool) -> None:
    module = planned(accumulate=accumulate, inputs=("kv_len: i32[B]\n  length N = kv_len[b]",))
    text = texts_of(module)["dkdv"]
    assert text.dkdv is not None
    assert (text.chain.adds_dq is not None) == adds
    assert text.dkdv.is_cleared == "kv_lo + row >= N"
    assert text.clears_values == adds


@pytest.mark.parametrize(("heads", "late"), [("Hkv * G", ["slope"]), ("H", [])])
def test_loads_of_a_query_head_wait_where_several_share_keys(heads: str, late: list[str]) -> None:
    """The slope is of a head of q: of a tile of keys that several share it is another for each."""
    lines = (
        f"input q: bf16[B, {heads}, M, 64]",
        f"input k, v: bf16[B, {heads.removesuffix(' * G')}, N, 64]",
        f"input slope: f32[{heads}, N]",
        "score = dot(q, k) / 8 + slope[h, kv_idx]",
        "mask = causal",
        "normalize = softmax",
        f"output o: bf16[B, {heads}, M, 64]",
        f"output lse: f32[B, {heads}, M]",
        "grad q, k, v",
    )
    (module,) = modules_of(spec(lines, "loops = [q, kv]", target="cuda.sm_90a"))
    dkdv = texts_of(module)["dkdv"].dkdv
    assert dkdv is not None
    assert [fetch.load.tensor for fetch in dkdv.late_fetches] == late
    others = [fetch.load.tensor for fetch in dkdv.tile_fetches]
    assert sorted([*late, *others]) == ["slope"]
