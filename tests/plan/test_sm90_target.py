"""The Hopper target: what it says of its roles, and the schedules that it writes itself."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from attnc.build import add_schedules, plan_program, schedules_for
from attnc.model.resolve import resolve
from attnc.plan.fitting import TileShape
from attnc.plan.sm90 import SM90A, decode_layout_of
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.target.files import render_files
from tests.plan.hopper import planned


@pytest.mark.parametrize(("d", "line"), [(72, "80 columns of q and k, of which 72 are stored"), (80, "")])
def test_what_is_multiplied_besides_what_is_stored_is_said(d: int, line: str) -> None:
    kernel = planned(d=d).kernel
    said = [text for text in SM90A.roles(kernel, kernel.configs[0]) if "columns of q and k" in text]
    assert said == ([f"  products have {line}, and 80 of v, of which 72 are"] if line else [])


@pytest.mark.parametrize("consumers", [2, 3, 4])
def test_barriers_of_turns_are_among_those_that_a_block_has(consumers: int) -> None:
    """Named barriers are 0 to 15; lower ones are of all threads, all consumers, each one."""
    module = planned(f"consumers = {consumers}, tile.kv = 32, pingpong = true")
    text = render_files(module, path="a.attn", sha256="")["default.cu"]
    found = re.search(r"TURN_BARRIER = 2 \+ CONSUMERS, TURN_THREADS = (\d+)", text)
    assert found is not None
    assert int(found[1]) == 2 * 128
    assert 2 + 2 * consumers <= 15
    roles = list(SM90A.roles(module.kernel, module.kernel.configs[0]))
    assert f"  {consumers} warpgroups  " in roles[2]
    assert roles[2].endswith("multiply 64 rows each, q k^T beside the softmax, in turns")
    assert roles[-1] == f"  {consumers} named barriers: the turn of a warpgroup each, 256 threads"


@pytest.mark.parametrize("masked", [True, False])
def test_the_defaults_of_an_attention_without_a_schedule_are_a_schedule(*, masked: bool) -> None:
    """Tiles that all see every key have no order, and are claimed as early as can be."""
    lines = "\n  ".join(SM90A.default_schedule(TileShape("bf16", 128, gradients=False, masked=masked)))
    assert planned(lines, d=128).kernel.grid.longest_first is masked


def test_latents_without_a_schedule_have_their_segments_in_one_block_and_in_several() -> None:
    shape = TileShape("bf16", 576, gradients=False, masked=True, latent=True)
    assert SM90A.default_labels(shape) == {"": ()}
    ordered = replace(shape, segment=2048)
    assert SM90A.default_labels(ordered) == {"whole": (), "segments": ("split.kv = fixed(2048)",)}
    assert SM90A.default_labels(replace(ordered, is_one_segment=False)) == {"": ()}
    assert SM90A.default_labels(replace(ordered, gradients=True)) == {"": ()}
    assert SM90A.default_labels(replace(ordered, width=128)) == {"": ()}
    assert SM90A.default_labels(replace(ordered, packed=True)) == {"": ()}


def test_latents_without_a_schedule_split_no_keys_under_an_order() -> None:
    shape = TileShape("bf16", 576, gradients=False, masked=True, latent=True)
    lines = [line for keys in (0, 2048) for line in SM90A.default_schedule(replace(shape, segment=keys))]
    assert lines == ["loops = [kv], pack = gqa, split.kv = auto", "loops = [kv], pack = gqa"]
    assert [*SM90A.default_schedule(replace(shape, packed=True))] == ["loops = [kv], pack = gqa"]


def test_what_blocks_share_is_explained() -> None:
    kernel = planned("cluster = 2, tile.kv = 96, stages = 2, consumers = 3", d=64).kernel
    lines = list(SM90A.roles(kernel, kernel.configs[0]))
    assert lines[3:6] == [
        "  clusters of 2 blocks, of 384 queries of a head, walk over the keys that any sees",
        "    a block copies 48 of a tile's 96 keys, to all of them: it reads 12288 B a tile, not 24576",
        "    a stage is free when 2 x 12 warps have given it back",
    ]
    assert lines[6].endswith(", cluster 1")


CHUNKS = """
attention chunks {{
  input q: bf16[B, M, H, 128]
  input k, v: bf16[B, N, H, 128]
  input slope: f32[H]
  input row: f32[B, M]
  input bias: f32[H, M, N]
  input sum: f32[H, N]
  input falling: f32[H, N] is descending
  input table: f32[W]
  let far = slope[h] * (q_pos - kv_idx)
  score = {score}
  mask = causal
  normalize = softmax
  output o: bf16[B, M, H, 128]
}}
"""


@pytest.mark.parametrize(
    ("score", "drifts"),
    [
        ("dot(q, k) / sqrt(D)", False),
        ("softcap(dot(q, k) / sqrt(D), 30)", False),
        ("slope[h] * dot(q, k) + row[b, q_idx] + slope[h] * q_pos", False),
        ("dot(q, k) - far", True),
        ("softcap(dot(q, k) - far, 30)", True),
        ("dot(q, k) + bias[h, q_idx, kv_idx]", True),
        ("dot(q, k) + sum[h, q_pos] - sum[h, kv_idx]", True),
        ("dot(q, k) + falling[h, q_pos] - falling[h, kv_idx]", True),
        ("dot(q, k) + table[q_pos - kv_idx]", True),
        ("where(kv_idx < 4, dot(q, k), 2 * dot(q, k))", True),
    ],
)
def test_scores_of_chunks_that_may_grow_with_the_keys_have_an_eager_maximum(
    score: str, *, drifts: bool
) -> None:
    """A lazy one would fail in tile after tile, and a block whose maximum fails walks over its keys again."""
    program = resolve(parse(Source("a.attn", CHUNKS.format(score=score))), prelude())
    (schedule, *_) = schedules_for(program, "chunks", "cuda.sm_90a", splits=0, many=True)
    (module,) = plan_program(add_schedules(program, schedule)).modules
    layout = decode_layout_of(module.kernel)
    assert layout.overlaps
    assert layout.walks_again is not drifts
    assert (module.kernel.softmax.headroom == 0) is drifts
