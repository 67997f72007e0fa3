"""The text of a Hopper forward kernel, where a plan changes it."""

from __future__ import annotations

from attnc.target.files import render_files
from tests.plan.hopper import planned


def test_warpgroups_have_key_tiles_of_their_own_where_one_may_not_see_a_tile() -> None:
    def kernel(schedule: str, mask: str) -> str:
        module = planned(schedule, mask=mask, d=64)
        return render_files(module, path="a.attn", sha256="")["default.cu"]

    apart = "int last_tile[CONSUMERS];"
    assert apart in kernel("consumers = 2, tile.kv = 64", "window(100, 0)")
    assert apart in kernel("consumers = 3, tile.kv = 128", "causal")
    assert apart not in kernel("consumers = 2, tile.kv = 128", "causal")
    assert apart not in kernel("consumers = 2, tile.kv = 64", "kv_idx < 100")
