"""Chunks beside long caches on Hopper, thread by thread on the CPU: two warpgroups with 64 rows each, and p v
of a tile beside the softmax of the next one.
"""

from __future__ import annotations

import pytest

from attnc.verify.case import Case
from tests.targets import needs_gxx
from tests.verify.judging import assert_within_bound, every_fill, spec, subject_of_text

pytestmark = [needs_gxx, pytest.mark.slow]


def chunk(mask: str, splits: str, *, page: int = 0, rows: int = 128, overlap: bool = True) -> str:
    pool = f" via paged(bt, page = {page})" if page else ""
    lines = [
        "input q: bf16[B, M, Hkv * G, 64]",
        f"input k, v: bf16[B, N, Hkv, 64]{pool}",
        *(["input bt: i32[B, P]"] if page else []),
        "input kv_len: i32[B]",
        "length N = kv_len[b]",
        "score = dot(q, k) / 8",
        f"mask = {mask}",
        "normalize = softmax",
        "output o: bf16[B, M, Hkv * G, 64]",
        "output lse: f32[B, Hkv * G, M]",
    ]
    own = ", overlap = true" if overlap else ""
    schedule = f"loops = [kv], pack = gqa, tile.q = {rows}, tile.kv = 32, stages = 2, split.kv {splits}{own}"
    return spec(lines, schedule, target="cuda.sm_90a")


@pytest.mark.one_in(9)
@pytest.mark.parametrize("page", [0, 1, 16])
@pytest.mark.parametrize(("rows", "overlap"), [(128, True), (128, False), (64, True)])
def test_chunks(rows: int, overlap: bool, page: int) -> None:
    for mask, splits in (("causal", "= auto"), ("causal and kv_idx % 3 != 1", "in {1, 3}")):
        made = subject_of_text(chunk(mask, splits, page=page, rows=rows, overlap=overlap))
        case = Case(dims={"B": 2, "M": 27, "N": 150, "Hkv": 1, "G": 5}, seed=rows + page)
        assert_within_bound(made, case, fills=every_fill() if page == 16 else ("nan",))
