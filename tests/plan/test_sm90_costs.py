"""What waves of tiles take under each config, and which config a call gets by that."""

from __future__ import annotations

from typing import Any

import pytest

from attnc.plan.ir import Module
from attnc.plan.sm90 import layout_of
from attnc.plan.sm90.costs import costs_of
from attnc.plan.sm90.layout import hopper
from attnc.plan.targets import schedule_for
from attnc.support.sizes import evaluate
from attnc.target.files import render_files
from attnc.verify.subject import subject_of
from tests.model.resolving import resolve_text
from tests.plan.hopper import planned
from tests.verify.judging import modules_of, verify


@pytest.mark.one_in(2)
@pytest.mark.parametrize("d", [72, 96, 128])
def test_causal_calls_of_few_rows_have_two_warpgroups(d: int) -> None:
    """The last tile of queries walks over all keys: of one head of 32768 rows, all tiles of 192 rows take no
    longer than that one, which takes half as long again as one of 128 rows.
    """
    module = planned(d=d, mask="causal")
    three, two = configs = list(map(hopper, module.kernel.configs))
    assert [(x.tile_q, x.tile_kv, x.stages) for x in configs] == [(192, 64, 4), (128, 128, 2)]
    texts = costs_of(module.variant.attention, layout_of(module.kernel), configs)

    def chosen(heads: int, rows: int) -> Any:
        names = {"B": 1, "H": heads, "M": rows, "N": rows, "multiprocessors()": lambda: 132}
        costs = [evaluate(text, names) for text in texts]
        return configs[costs.index(min(costs))]

    assert chosen(1, 32768) == chosen(2, 16384) == chosen(1, 8192) == two
    assert chosen(16, 16384) == chosen(256, 1024) == chosen(16, 4096) == chosen(32, 2048) == three
    within_sectors = d % 16 > 0
    assert chosen(4, 16384) == chosen(8, 4096) == (three if within_sectors else two)
    assert len(planned(d=d, mask="causal", schedule="stages = 2").kernel.configs) == 1
    assert len(planned(d=d, mask="q_pos - 511 <= kv_idx and causal").kernel.configs) == 1


#: Of an H200: (B * H, M, N) and the faster of one block, two blocks, one of 256 rows, and two of two stages.
_FASTEST = {
    (8192, 64, 64): 3, (4096, 128, 128): 3, (3072, 197, 197): 2, (2048, 256, 256): 2, (1024, 384, 384): 1,
    (384, 512, 512): 2, (1024, 577, 577): 1, (20, 4096, 77): 3, (320, 448, 1500): 2, (40, 1024, 1024): 0,
}  # fmt: skip


@pytest.mark.parametrize("sizes", _FASTEST)
def test_calls_take_the_config_that_was_fastest(sizes: tuple[int, int, int]) -> None:
    module = planned("blocks in {1, 2}", d=64)
    texts = costs_of(
        module.variant.attention, layout_of(module.kernel), list(map(hopper, module.kernel.configs))
    )
    heads, rows, keys = sizes
    names = {"B": 1, "H": heads, "M": rows, "N": keys, "multiprocessors()": lambda: 132}
    costs = [evaluate(text, names) for text in texts]
    assert costs.index(min(costs)) == _FASTEST[sizes]


def test_scores_whose_times_are_not_known_have_the_first_config() -> None:
    biased = planned(
        "blocks in {1, 2}", d=64, score="dot(q, k) + bias[q_idx, kv_idx]", inputs=("bias: f32[M, N]",)
    )
    assert len(biased.kernel.configs) > 1
    assert "costs=" not in render_files(biased, path="a.attn", sha256="")["default.py"]


@pytest.mark.parametrize("schedule", ["blocks = 2", "blocks = 1", "blocks in {1, 2}, tile.kv = 32"])
def test_a_schedule_that_chooses_blocks_has_them_for_all_calls(schedule: str) -> None:
    assert "costs=" not in render_files(planned(schedule, d=64), path="a.attn", sha256="")["default.py"]


def _packed(width: int, *, mask: str = "causal", score: str = "dot(q, k) / sqrt(D)") -> Module:
    """Packed sequences without a schedule."""
    text = f"""
attention packed {{
  input q: bf16[Tq, Hkv * G, {width}] via ragged(ends)
  input k, v: bf16[Tk, Hkv, {width}] via ragged(ends)
  input ends: i32[B + 1]
  score = {score}
  mask = {mask}
  normalize = softmax
  output o: bf16[Tq, Hkv * G, {width}]
}}
"""
    (module,) = modules_of(text + schedule_for(resolve_text(text), "packed", "cuda.sm_90a"))
    return module


#: Columns, mask, and tokens of each of 7 sequences up to which tiles are narrow.
_SHORT = ((128, "causal", 640), (128, "true", 256), (96, "causal", 192), (64, "causal", 256))


@pytest.mark.parametrize(("width", "mask", "most"), _SHORT)
def test_short_packed_sequences_have_narrow_tiles(width: int, mask: str, most: int) -> None:
    module = _packed(width, mask=mask)
    wide, narrow = configs = list(map(hopper, module.kernel.configs))
    assert (wide.tile_q, wide.tile_kv, wide.blocks, wide.pingpong) == (128, 128, 1, width > 64)
    assert (narrow.tile_q, narrow.tile_kv, narrow.blocks) == (64 if width > 64 else 128, 64, 2)
    texts = costs_of(module.variant.attention, layout_of(module.kernel), configs)

    def chosen(tokens: int, heads: int = 1) -> Any:
        names = {"B": 7, "Tq": tokens, "H": heads, "multiprocessors()": lambda: 132}
        costs = [evaluate(text, names) for text in texts]
        return configs[costs.index(min(costs))]

    assert chosen(0) == chosen(most * 7) == narrow
    assert chosen(most * 7 + 1) == wide
    assert chosen(7 * 4096, heads=32) == (narrow if width == 64 else wide)


@pytest.mark.nightly
@pytest.mark.parametrize(("width", "mask"), [(128, "causal"), (64, "true")])
def test_packed_sequences_are_right_in_tiles_of_both_kinds(width: int, mask: str) -> None:
    report = verify(subject_of(_packed(width, mask=mask)), count=6, fills=("nan",))
    assert report.ok, "\n".join(failure.repro for failure in report.failures)


#: A window, a softcap, and a distance.
_UNTIMED = (
    {"mask": "q_pos - 511 <= kv_idx and causal"},
    {"score": "20 * tanh(dot(q, k) / 20)"},
    {"score": "dot(q, k) - abs(q_pos - kv_idx)"},
)


@pytest.mark.parametrize("more", _UNTIMED)
def test_packed_sequences_that_were_not_timed_have_the_usual_tiles(more: dict[str, str]) -> None:
    assert len(_packed(128, **more).kernel.configs) == 1
