"""Chunks beside long caches on Hopper, thread by thread on the CPU: two warpgroups with 64 rows each, and p v
of a tile beside the softmax of the next one.
"""

from __future__ import annotations

import pytest
import torch

from attnc.verify.case import Case
from attnc.verify.check import same_bits
from attnc.verify.rerun import FinishedRun
from tests.targets import needs_gxx
from tests.verify.judging import assert_within_bound, every_fill, spec, subject_of_text

pytestmark = [needs_gxx, pytest.mark.slow]


def chunk(
    mask: str,
    splits: str,
    *,
    page: int = 0,
    rows: int = 128,
    overlap: bool = True,
    own: str = "",
    columns: int = 64,
) -> str:
    pool = f" via paged(bt, page = {page})" if page else ""
    lines = [
        f"input q: bf16[B, M, Hkv * G, {columns}]",
        f"input k, v: bf16[B, N, Hkv, {columns}]{pool}",
        *(["input bt: i32[B, P]"] if page else []),
        "input kv_len: i32[B]",
        "length N = kv_len[b]",
        "score = dot(q, k) / 8",
        f"mask = {mask}",
        "normalize = softmax",
        f"output o: bf16[B, M, Hkv * G, {columns}]",
        "output lse: f32[B, Hkv * G, M]",
    ]
    own += ", overlap = true" if overlap else ""
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


@pytest.mark.one_in(6)
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("columns", [64, 72, 256])
def test_threads_that_join_few_some_and_many_splits(columns: int, rows: int) -> None:
    for splits, queries in ((5, 7), (60, 7), (20, 133), (10, 140)):  # of 21 rows, or of about 400
        made = subject_of_text(chunk("causal", f"= {splits}", rows=rows, columns=columns))
        case = Case(dims={"B": 1, "M": queries, "N": 150, "Hkv": 1, "G": 3}, seed=splits)
        assert_within_bound(made, case)


LAZY = ", softmax = online(maximum = lazy(20))"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page", [0, 1, 16])
@pytest.mark.parametrize("logits", ["random", "large"])
def test_chunks_under_a_lazy_maximum(logits: str, page: int) -> None:
    for mask, splits in (
        ("causal", "= auto"),
        ("causal and kv_idx % 3 != 1", "in {1, 3}"),
        ("window(70, 0)", "= 2"),
    ):
        made = subject_of_text(chunk(mask, splits, page=page, own=LAZY))
        case = Case(dims={"B": 2, "M": 27, "N": 290, "Hkv": 1, "G": 5}, seed=page, logits=logits)
        assert_within_bound(made, case, fills=every_fill() if page == 16 else ("nan",))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("page", [0, 1, 16])
@pytest.mark.parametrize("splits", ["= 1", "= 2"])
def test_rows_of_chunks_whose_maximum_fails_are_computed_again(splits: str, page: int) -> None:
    """One row alone has a number in the first column, which grows in a key behind the first tile."""
    row, key = 20, 200
    case = Case(dims={"B": 1, "M": 27, "N": 290, "Hkv": 1, "G": 5}, lengths="full")
    texts = (chunk("causal", splits, page=page, own=own) for own in (LAZY, ""))
    lazy, eager = (FinishedRun.of(subject_of_text(text), case) for text in texts)
    q, k = lazy.tensor("q").clone(), lazy.tensor("k").clone()
    q[..., 0] = 0
    q[:, row, 2, 0] = 8
    others = torch.ones(27, 5, dtype=torch.bool)
    others[row, 2] = False
    before = lazy.again({**lazy.inputs, "q": q})
    place = (int(lazy.tensor("bt")[0, key // page]), key % page) if page else (0, key)
    for size in (30.0, 1e3, -1e3):  # which scales sums, fails, and changes one probability
        k[(*place, 0, 0)] = size
        found, running = (run.again({**run.inputs, "q": q, "k": k}) for run in (lazy, eager))
        assert same_bits(found["o"][0, others], before["o"][0, others])
        assert same_bits(found["lse"][0, others.T], before["lse"][0, others.T])
        if size == 1e3:
            assert not same_bits(found["o"], running["o"])
            assert same_bits(found["o"][:, row, 2], running["o"][:, row, 2])
        assert (found["o"] - running["o"]).abs().max() < 0.02
