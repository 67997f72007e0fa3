"""What the plan says of each role of a Hopper kernel of gradients."""

from __future__ import annotations

import pytest

from attnc.plan.ir import Module
from attnc.plan.sm90 import backward_roles_of
from attnc.plan.sm90.backward_roles import Sm90BackwardRoles
from tests.plan.test_sm90_backward import planned
from tests.plan.test_sm90_latent import planned as planned_latent
from tests.verify.judging import modules_of, spec


def roles_of(module: Module) -> dict[str, Sm90BackwardRoles]:
    """The roles of the kernels of wgmma, by what they make."""
    return {kernel.kind: backward_roles_of(kernel) for kernel in module.backward_kernels.values()}


def test_a_kernel_is_over_keys_or_over_queries() -> None:
    roles = roles_of(planned(accumulate="two_pass"))
    assert {kind: made.dkdv is None for kind, made in roles.items()} == {"dkdv": False, "dq": True}
    assert {kind: made.cuts_walks for kind, made in roles.items()} == {"dkdv": True, "dq": False}


def test_products_are_shared_where_values_are_in_the_keys() -> None:
    assert all(made.latent is not None for made in roles_of(planned_latent()).values())
    assert all(made.latent is None for made in roles_of(planned(accumulate="two_pass")).values())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("d", "accumulate", "apart"),
    [
        (64, "atomic", ""),
        (80, "atomic", "dkdv"),
        (128, "atomic", ""),
        (80, "two_pass", ""),
        (192, "two_pass", "dkdv"),
    ],
)
def test_consumers_of_unlike_products_have_a_program_each(d: int, accumulate: str, apart: str) -> None:
    """They meet at barriers that are not aligned; so do those of latent attention."""
    roles = roles_of(planned(d=d, accumulate=accumulate))
    assert "".join(kind for kind, made in roles.items() if made.apart) == apart
    assert all(made.apart for made in roles_of(planned_latent()).values())


@pytest.mark.parametrize(("accumulate", "adds"), [("atomic", True), ("two_pass", False)])
def test_cut_rows_are_cleared_where_dq_sums_over_keys(accumulate: str, adds: bool) -> None:
    module = planned(accumulate=accumulate, inputs=("kv_len: i32[B]\n  length N = kv_len[b]",))
    roles = roles_of(module)["dkdv"]
    assert roles.dkdv is not None
    assert roles.end_of_own == "N"
    assert roles.dkdv.is_cut == roles.clears_values == adds


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
    dkdv = roles_of(module)["dkdv"].dkdv
    assert dkdv is not None
    assert [fetch.load.tensor for fetch in dkdv.late_fetches] == late
    others = [fetch.load.tensor for fetch in dkdv.tile_fetches]
    assert sorted([*late, *others]) == ["slope"]


def test_p_comes_first_unless_gradients_of_loads_want_it_late() -> None:
    assert all(made.p_first for made in roles_of(planned(accumulate="two_pass")).values())
