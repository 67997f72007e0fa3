"""Shared memory and registers of Triton kernels: estimates by hand, and pruning."""

from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from attnc.expr.nodes import Const
from attnc.model.attention import Softmax
from attnc.model.dtypes import DType
from attnc.plan.device import DEVICES
from attnc.plan.layout import Which, fits
from attnc.plan.triton.resources import count_staged_bytes, estimate, misfit, room
from tests.plan.wide_attention import config, variant
from tests.verify.judging import modules_of


def test_hopper_keeps_q_beside_the_stages_of_k_and_v() -> None:
    needs = estimate(config(128, 64, 2), variant(128), DEVICES["sm_90"])
    assert [(b.name, b.shape, b.bytes) for b in needs.buffers] == [
        ("q", "128x128", 32768),
        ("k", "2 x 64x128", 32768),
        ("v", "2 x 64x128", 32768),
        ("barriers", "and alignment", 1024),
    ]
    assert needs.shared == 99328
    assert needs.registers["acc"] == 128
    assert needs.registers["s"] == 64


def test_ampere_takes_operands_to_registers_at_once() -> None:
    needs = estimate(config(128, 64, 2), variant(128), DEVICES["sm_80"])
    assert {b.name: b.bytes for b in needs.buffers} == {"q": 32768, "k": 16384, "v": 16384, "p": 16384}
    assert needs.registers["q"] == 64


def test_a_tile_of_f32_is_split_while_it_is_at_hand() -> None:
    needs = estimate(config(64, 64, 2), variant(64, 128, DType.F32), DEVICES["sm_90"])
    assert {b.name: b.shape for b in needs.buffers} == {
        "q": "2 x 64x64",
        "k": "64x64",
        "v": "64x128",
        "v now": "2 x 64x128",
        "barriers": "and alignment",
    }


def test_k_and_v_may_differ_in_width_and_are_padded_to_powers_of_two() -> None:
    needs = estimate(config(64, 32, 2), variant(192, 80), DEVICES["sm_90"])
    assert {b.name: b.bytes for b in needs.buffers} == {
        "q": 32768,
        "k": 32768,
        "v": 16384,
        "barriers": 1024,
    }


def test_a_config_is_rejected_with_numbers() -> None:
    assert misfit(config(64, 64, 2), variant(128), DEVICES["sm_86"]) is None
    rejection = misfit(config(128, 128, 4), variant(128), DEVICES["sm_86"])
    assert str(rejection) == "needs 262144 B of shared memory; the limit is 101376 B"


def test_too_large_an_accumulator_is_rejected() -> None:
    rejection = misfit(config(128, 64, 1, warps=4), variant(256), DEVICES["sm_80"])
    assert rejection is not None
    assert str(rejection) == "needs 320 words of a thread's registers for acc and s; the limit is 255 words"


def test_large_tiles_stay_where_tensor_cores_read_them() -> None:
    assert count_staged_bytes(config(128, 64, 2), variant(128)) == 99328
    assert count_staged_bytes(config(32, 64, 2), variant(128)) == 0


def test_what_dropout_keeps_passes_through_shared_memory_on_hopper_alone() -> None:
    """As compiled: a byte for each probability, where tensor cores read their operands there."""
    plain = variant(64)
    dropped = Softmax(dropout=Const(0.1), seed=Const(1))
    dropping = replace(plain, attention=replace(plain.attention, softmax=dropped))
    for arch, kept in (("sm_80", 0), ("sm_90", 128 * 64), ("sm_100", 0)):
        with_, without = (estimate(config(128, 64, 2), v, DEVICES[arch]).shared for v in (dropping, plain))
        assert with_ - without == kept


PAIRED = """attention paired {
  input q: bf16[B, M, H, 64]
  input k, v: bf16[B, N, H, 64]
  input bias: f32[M, N]
  input p: f32[]
  input seed: i64[]
  score = dot(q, k) / sqrt(D) + bias[q_idx, kv_idx]
  normalize = softmax(dropout = p, seed = seed)
  output o: bf16[B, M, H, 64]
  grad q, k, v
}
schedule paired for triton {
  tile.q = 64, tile.kv = 64, stages = 2, warps = 4
}
"""


def test_what_dropout_keeps_passes_twice_beside_a_load_of_each_pair_on_its_way() -> None:
    """As compiled, but that gradients of q take one."""
    (module,) = modules_of(PAIRED)
    kernels: tuple[Which, ...] = ("forward", "dkdv", "dq")
    kept = {}
    for kernel, stages in product(kernels, (1, 2)):
        wanted = replace(module.kernels[kernel].configs[0], stages=stages)
        needs = estimate(wanted, module.variant, DEVICES["sm_90"], kernel)
        tile = wanted.tile_q * wanted.tile_kv
        kept[kernel, stages] = next(b.bytes // tile for b in needs.buffers if b.name == "keep")
    assert kept == {
        ("forward", 1): 1, ("forward", 2): 2, ("dkdv", 1): 1, ("dkdv", 2): 2, ("dq", 1): 1, ("dq", 2): 1,
    }  # fmt: skip


def test_a_result_passes_through_shared_memory_after_all_else() -> None:
    needs = estimate(config(128, 32, 1), variant(64, 128), DEVICES["sm_100"])
    assert needs.shared == 32768  # a tile of o, as compiled for an sm_100
    assert needs.buffers[-1].name == "result"


def test_a_launcher_takes_what_fits_and_nothing_else() -> None:
    """Of a number, none that lacks shared memory may have as much; where none is such, each has its own."""
    kinds = set()
    for tile in product((32, 64, 128), (32, 64, 128), (1, 2, 3, 4)):
        wanted = replace(config(*tile), persistent=True)
        needed = room(wanted, variant(128))
        kinds.add(type(needed))
        for device in DEVICES.values():
            enough = estimate(wanted, variant(128), device).shared <= device.shared_per_block
            assert fits(needed, device) == enough
    assert kinds == {int, tuple}
    assert room(config(128, 64, 2), variant(128)) == 81920  # of 99 KiB, though an H200 takes 99328


TILES = st.sampled_from([16, 32, 64, 128])


@given(TILES, TILES, st.integers(1, 4), st.sampled_from([4, 8]), st.sampled_from([16, 64, 80, 128, 256]))
def test_smaller_tiles_never_need_more(q: int, kv: int, stages: int, warps: int, d: int) -> None:
    for device in DEVICES.values():
        larger = estimate(config(q, kv, stages, warps), variant(d), device)
        smaller = estimate(config(q, kv // 2, stages, warps), variant(d), device)
        assert smaller.shared <= larger.shared
        assert smaller.registers_per_thread <= larger.registers_per_thread
