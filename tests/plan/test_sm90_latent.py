"""How Hopper's kernels for gradients lie where the first columns of keys are values, and which there are."""

from __future__ import annotations

import pytest

from attnc.model.attention import Attention
from attnc.model.variants import variants
from attnc.plan.device import DEVICES
from attnc.plan.ir import Module
from attnc.plan.layout import KernelName
from attnc.plan.signature import normalise
from attnc.plan.sm90.latent import LatentBackward, refuse_latent_gradients
from tests.model.resolving import resolve_text
from tests.verify.judging import modules_of

SPEC = """attention latent {{
  input q: bf16[B, M, {heads}, {d}]
  input k: bf16[B, N, {shared}, {d}]
  input v: bf16[B, N, {shared}, {dv}] via prefix(k)
  {extra}
  score = {score}
  mask = {mask}
  normalize = {normalize}
  output o: bf16[B, M, {heads}, {dv}]
  grad {grads}
}}
schedule latent for cuda.sm_90a {{
  loops = [kv], pack = gqa, tile.kv = 64
}}
"""
USUAL = {
    "heads": "G",
    "shared": "1",
    "d": "576",
    "dv": "512",
    "extra": "",
    "score": "dot(q, k) / 8",
    "mask": "causal",
    "normalize": "softmax",
    "grads": "q, k",
}


def planned(**words: str) -> Module:
    """The module of multi-head latent attention with gradients: words of `USUAL`."""
    (module,) = modules_of(SPEC.format(**{**USUAL, **words}))
    return module


def layout_of(module: Module) -> LatentBackward:
    assert module.backward is not None
    assert isinstance(module.backward.layout, LatentBackward)
    return module.backward.layout


def attention(**words: str) -> Attention:
    program = resolve_text(SPEC.format(**{**USUAL, **words}))
    (variant,) = variants(program, program.attentions[0])
    return normalise(variant.attention)


@pytest.mark.parametrize(("d", "dv", "first"), [(128, 64, 1), (192, 128, 1), (576, 512, 4)])
def test_two_warpgroups_share_the_columns_of_the_sums(d: int, dv: int, first: int) -> None:
    module = planned(d=str(d), dv=str(dv))
    layout = layout_of(module)
    assert layout.by_wgmma == {"dq", "dk"}
    assert layout.first_panels == first
    kernels: tuple[KernelName, ...] = ("dq", "dk")
    for name in kernels:
        registers = layout.registers(module.backward_kernels[name].configs[0], name)
        # of the warpgroup with more columns, which 128 threads hold for 64 rows
        assert registers[name] == 64 * (d - 64 * first) // 128
        assert sum(registers.values()) < 255


@pytest.mark.parametrize(("kernel", "tile"), [("dq", (64, 32)), ("dk", (32, 64))])
def test_the_kept_tile_has_64_rows_and_32_come_by(kernel: KernelName, tile: tuple[int, int]) -> None:
    module = planned()
    layout, planned_kernel = layout_of(module), module.backward_kernels[kernel]
    config = planned_kernel.configs[0]
    assert layout.tile(kernel) == tile
    buffers = layout.shared_memory(config, kernel)
    # two tiles come by at once: of keys, or of queries with do
    assert buffers["q"] == buffers["k"] == 64 * 576 * 2
    assert buffers["do"] == 64 * 512 * 2
    assert (buffers["p"], buffers["ds"]) == (64 * 32 * 4, 64 * 32 * 2)
    assert ("rows" in buffers) == (kernel == "dk")
    assert sum(buffers.values()) == planned_kernel.shared[0] <= DEVICES["sm_90"].shared_per_block


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"d": "128", "dv": "64"},
        {"d": "640", "dv": "384"},
        {"heads": "H", "shared": "H", "mask": "kv_idx <= q_pos + h"},
        {"extra": "input w: f32[G]", "score": "dot(q, k) + w[h]"},
    ],
    ids=lambda words: ", ".join(words) or "usual",
)
def test_there_are_kernels(words: dict[str, str]) -> None:
    assert refuse_latent_gradients(attention(**words)) == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"normalize": "none"}, "these kernels make p from the score and lse"),
        ({"d": "568"}, "568 and 512 columns are no multiples of 64"),
        ({"dv": "504"}, "576 and 504 columns are no multiples of 64"),
        ({"d": "64", "dv": "64"}, "two warpgroups share 128 to 640 columns of sums, not 64"),
        ({"d": "704"}, "two warpgroups share 128 to 640 columns of sums, not 704"),
        ({"d": "640", "dv": "512"}, "tiles of 640 and 512 columns need 243200 B of shared memory"),
        (
            {"score": "softcap(dot(q, k), 20)"},
            "of ds, p is one factor, and the other a constant here: no soft caps, no dropout",
        ),
        (
            {
                "extra": "input p: f32[]\n  input seed: i64[]",
                "normalize": "softmax(dropout = p, seed = seed)",
            },
            "of ds, p is one factor, and the other a constant here: no soft caps, no dropout",
        ),
        (
            {"extra": "input w: f32[G]", "score": "dot(q, k) + w[h]", "grads": "q, k, w"},
            "these kernels make the gradients of q and k alone",
        ),
        ({"mask": "kv_idx <= q_pos + h"}, "one mask for all heads that share the keys"),
    ],
)
def test_why_there_are_none(words: dict[str, str], told: str) -> None:
    assert refuse_latent_gradients(attention(**words)) == told
