"""What the Hopper target decides of a backward: which have a kernel of wgmma, its layout, its refusals."""

from __future__ import annotations

from typing import Any

import pytest

from attnc.plan.ir import Module
from attnc.plan.layout import KernelName
from attnc.plan.sm90.backward import CONSUMER_REGISTERS, PRODUCER_REGISTERS, Sm90Backward
from attnc.plan.sm90.layout import entry_registers
from attnc.target.files import render_files
from tests.plan import planning
from tests.refusals import refused
from tests.verify.judging import modules_of, spec

ROOM = 232448
CAUSAL = "kv_idx <= q_pos"


def planned(mask: str = CAUSAL, *, dkdv: str = "", accumulate: str = "atomic", **options: object) -> Module:
    inner = f"\n    dkdv {{ {dkdv} }}\n  " if dkdv else ""
    schedule = f"  backward {{ accumulate.dq = {accumulate} {inner}}}"
    given = {"grads": "q, k, v", **options}
    return planning.planned(mask, schedule=schedule, target="cuda.sm_90a", **given)


def is_by_wgmma(module: Module, kernel: KernelName = "dkdv") -> bool:
    """Whether a kernel is, as the plan says; its text says the same."""
    assert module.backward is not None
    text = render_files(module, path="a.attn", sha256="")[f"default_backward_{kernel}.cu"]
    layout = module.backward.layout
    found = isinstance(layout, Sm90Backward) and kernel in layout.by_wgmma
    assert ("WGMMA_RS(" in text, '"sm80.cuh"' in text) == (found, not found)
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("d", [16, 40, 64, 72, 80, 96, 128])
def test_a_block_fits_and_registers_are_those_that_the_launch_holds(d: int) -> None:
    module = planned(d=d)
    assert is_by_wgmma(module)
    planned_kernel = module.backward_kernels["dkdv"]
    (config,) = planned_kernel.configs
    assert module.backward is not None
    assert module.backward.layout is not None
    layout = module.backward.layout
    assert planned_kernel.shared[0] == sum(layout.shared_memory(config, "dkdv").values()) <= ROOM
    assert sum(layout.registers(config, "dkdv").values()) < CONSUMER_REGISTERS[2]
    # setmaxnreg would wait for ever for more
    assert 3 * entry_registers(2) == PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS[2]
    sizes = [config.tile_q, config.tile_kv, config.warps, config.stages]
    assert sizes == [128 if d <= 64 else 64, 128, 12, 2]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("d", "keys", "tiles"),
    [(64, 128, (2, 2)), (72, 96, (2, 2)), (128, 96, (2, 2)), (192, 80, (1, 2)), (256, 64, (1, 1))],
)
def test_the_kernel_over_queries_fits_too(d: int, keys: int, tiles: tuple[int, int]) -> None:
    module = planned(d=d, accumulate="two_pass")
    assert is_by_wgmma(module, "dq")
    assert module.backward is not None
    layout, kernel = module.backward.layout, module.backward_kernels["dq"]
    assert isinstance(layout, Sm90Backward)
    (config,) = kernel.configs
    assert [config.tile_q, config.tile_kv, config.warps, config.stages] == [128, keys, 12, 2]
    assert layout.dq_tiles == tiles
    assert kernel.shared[0] == sum(layout.shared_memory(config, "dq").values()) <= ROOM
    assert sum(layout.registers(config, "dq").values()) < CONSUMER_REGISTERS[2]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("d", [144, 192, 256])
@pytest.mark.parametrize(
    ("score", "tiles"),
    [
        # dk and dv of the same keys, in a warpgroup each
        ("dot(q, k)", {"dkdv": (64, 64)}),
        ("dot(q, k) + kv_idx - q_pos", {"dkdv": (64, 64)}),
        # what the slope is made from is not given on
        ("50 * tanh(dot(q, k) / 50)", {"dv": (64, 128), "dk": (64, 128)}),
    ],
)
def test_wide_heads_share_p_where_ds_needs_nothing_else(
    score: str, tiles: dict[KernelName, tuple[int, int]], d: int
) -> None:
    module = planned(d=d, accumulate="two_pass", score=score)
    kernels = module.backward_kernels
    assert list(kernels) == ["dq", *tiles]
    assert module.backward is not None
    layout = module.backward.layout
    assert isinstance(layout, Sm90Backward)
    assert layout.gives_p == ("dkdv" in tiles)
    for name, (tile_q, tile_kv) in tiles.items():
        assert is_by_wgmma(module, name)
        (config,) = kernels[name].configs
        stages = 3 if layout.gives_p and d < 256 else 2  # as many as fit
        assert [config.tile_q, config.tile_kv, config.warps, config.stages] == [tile_q, tile_kv, 12, stages]
        assert kernels[name].shared[0] == sum(layout.shared_memory(config, name).values()) <= ROOM
        assert sum(layout.registers(config, name).values()) < CONSUMER_REGISTERS[2]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("d", "options", "held"),
    [
        (64, {}, None),  # products of 128 queries
        (64, {"dv": 72, "accumulate": "two_pass"}, None),  # ptxas would give registers of V to dS
        (64, {"dv": 128, "accumulate": "two_pass"}, None),
        (72, {}, {"v": 20}),
        (96, {"accumulate": "ordered"}, {"v": 24}),
        (80, {"accumulate": "two_pass"}, {"v": 20}),
        (104, {}, None),
        (128, {}, None),
        (136, {"accumulate": "two_pass"}, {"k or v": 36}),
        (192, {"accumulate": "two_pass"}, {"k or v": 48}),
        (256, {"accumulate": "two_pass"}, None),
        # what stands between p and ds is kept beside both
        (96, {"score": "50 * tanh(dot(q, k) / 50)"}, None),
        (96, {"softmax": "softmax(dropout = p, seed = s)", "inputs": ("p: f32[]", "s: i64[]")}, None),
    ],
)
def test_rows_of_v_are_held_where_registers_have_room(
    d: int, options: dict[str, Any], held: dict[str, int] | None
) -> None:
    """And rows of K, where a warpgroup of its own multiplies these."""
    module = planned(d=d, **options)
    assert module.backward is not None
    layout = module.backward.layout
    assert isinstance(layout, Sm90Backward)
    (config,) = module.backward_kernels["dkdv"].configs
    registers = layout.registers(config, "dkdv")
    assert layout.holds_rows("dkdv") == (held is not None)
    assert {name: count for name, count in registers.items() if name in ("v", "k or v")} == (held or {})
    assert held is None or sum(registers.values()) <= 216
    text = render_files(module, path="a.attn", sha256="")["default_backward_dkdv.cu"]
    assert text.count("hold_rows<") == (0 if held is None else 2 if "k or v" in held else 1)
    assert ("WGMMA_RS_COLUMNS(64)" in text) == (held is not None)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("mask", "options"),
    [
        ("true", {}),
        ("kv_idx <= q_pos and kv_idx > q_pos - 100", {}),
        ("kv_idx < n[b]", {"inputs": ("n: i32[B]",)}),
        ("true", {"accumulate": "two_pass"}),
        (
            CAUSAL,
            {
                "accumulate": "two_pass",
                "grads": "q, k, v, x",
                "score": "dot(q, k) + x[h]",
                "inputs": ("x: f32[H]",),
            },
        ),
        # a kernel of rows makes the gradient of the sink
        (CAUSAL, {"grads": "q, k, v, x", "softmax": "softmax(sink = x[h])", "inputs": ("x: f32[H]",)}),
        (CAUSAL, {"score": "50 * tanh(dot(q, k) / 50)"}),
        (CAUSAL, {"score": "dot(q, k) + slope[h] * (kv_idx - q_pos)", "inputs": ("slope: f32[H]",)}),
    ],
)
def test_masks_and_scores_have_it(mask: str, options: dict[str, Any]) -> None:
    assert is_by_wgmma(planned(mask, **options))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [
        {"d": 192},
        {"accumulate": "sequential"},
        {"grads": "q, k, v, x", "score": "dot(q, k) + x[h]", "inputs": ("x: f32[H]",)},
        {
            "accumulate": "two_pass",
            "grads": "q, k, v, x",
            "score": "dot(q, k) + x[kv_idx]",
            "inputs": ("x: f32[N]",),
        },
    ],
)
def test_what_it_does_not_do_has_the_kernels_of_mma_sync(options: dict[str, object]) -> None:
    assert not is_by_wgmma(planned(**options))  # type: ignore[arg-type]  # of many types


@pytest.mark.parametrize(
    ("dkdv", "said"),
    [
        (
            "tile.q = 32",
            "tile.q = 32 is not 128: what the registers of a head dimension of 64 leave room for",
        ),
        ("tile.kv = 64", "tile.kv = 64 is not 128: 64 for each of 2 warpgroups"),
        ("warps = 8", "warps = 8 is not 12: 4 for each of 2 warpgroups that multiply, and 4 that copy"),
        ("stages = 1", "stages = 1 leaves nothing to copy ahead"),
        ("stages = 4", "B of shared memory (k 32768 + v 16384 + q 65536"),
        ("maxnreg = 168", "maxnreg is not for warpgroups"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(dkdv: str, said: str) -> None:
    found = refused(planned, dkdv=dkdv)
    assert found.code == "E0601"
    assert said in found.primary.text
    assert "tile.q = 128, tile.kv = 128, warps = 12, stages = 2" in found.hints[0]


@pytest.mark.parametrize(("storage", "spans"), [("", True), (" via ragged(ends)", False)])
def test_spans_of_keys_are_of_sequences_that_lie_apart(storage: str, spans: bool) -> None:
    """Tiles of packed keys are found by their sequences, and have no spans."""
    keys = "S, H" if storage else "B, N, H"
    (made,) = modules_of(
        spec(
            [
                "input q: f16[B, M, H, 64]",
                f"input k, v: f16[{keys}, 64]{storage}",
                *(["input ends: i32[B + 1]"] if storage else []),
                "score = dot(q, k)",
                "normalize = softmax",
                "output o: f16[B, M, H, 64]",
                "grad q, k, v",
            ],
            "consumers = 2",
            target="cuda.sm_90a",
        )
    )
    assert made.backward is not None
    assert isinstance(made.backward.layout, Sm90Backward)
    assert made.backward.layout.spans_keys == spans
