"""Which configs of Triton kernels some device can run."""

import re
from dataclasses import replace

import pytest

from attnc.diagnostics import DiagnosticError, render
from attnc.model.attention import Form
from attnc.model.dtypes import DType
from attnc.model.schedule import Knob, Schedule
from attnc.plan.device import DEVICES
from attnc.plan.fitting import TileShape
from attnc.plan.layout import KernelName, fits
from attnc.plan.triton import TRITON
from attnc.plan.triton.resources import misfit, room
from attnc.plan.triton.target import portable, triton_backward_configs, triton_configs
from tests.plan.wide_attention import SPEC, config, variant


def schedule() -> Schedule:
    def knob(text: str, key: str) -> Knob:
        start = SPEC.text.index(text)
        return Knob(key=key, choices=(0,), span=SPEC.span(start, start + len(text)))

    texts = (("tile.q", "tile.q = 128"), ("tile.kv", "tile.kv = 256"), ("stages", "stages = 4"))
    knobs = {key: knob(text, key) for key, text in texts}
    whole = SPEC.span(0, len(SPEC.text))
    return Schedule(name="huge", target="triton", knobs={"forward": knobs}, where={}, span=whole)


@pytest.mark.parametrize("d", [64, 128])
def test_gradients_of_f32_fit_every_device(d: int) -> None:
    schedule = Schedule(name="huge", target="triton", knobs={}, where={})
    kernels: tuple[KernelName, ...] = ("dq", "dkdv")
    for kernel in kernels:
        found = triton_backward_configs(variant(d, dtype=DType.F32), schedule, kernel)
        needs = [room(config, variant(d, dtype=DType.F32), kernel) for config in found]
        assert all(any(fits(need, device) for need in needs) for device in DEVICES.values())


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
@pytest.mark.parametrize("d", [264, 384, 512])
def test_wide_heads_fit_a_device_where_a_schedule_says_nothing(d: int, dtype: DType) -> None:
    schedule = Schedule(name="huge", target="triton", knobs={}, where={})
    assert triton_configs(variant(d, dtype=dtype), schedule)
    kernels: tuple[KernelName, ...] = ("dq", "dk", "dv")
    for kernel in kernels:
        assert triton_backward_configs(variant(d, dtype=dtype), schedule, kernel)


def test_wide_heads_have_a_config_for_devices_of_little_shared_memory() -> None:
    schedule = Schedule(name="huge", target="triton", knobs={}, where={})
    least = min(DEVICES.values(), key=lambda device: device.shared_per_block)
    assert any(fits(room(config, variant(512)), least) for config in triton_configs(variant(512), schedule))


def test_what_a_schedule_says_of_wide_heads_stays() -> None:
    said = schedule().phases["forward"]["stages"]
    knobs = {"stages": replace(said, choices=(1,))}
    wide = Schedule(name="huge", target="triton", knobs={"forward": knobs}, where={})
    assert {config.stages for config in triton_configs(variant(512), wide)} == {1}


@pytest.mark.parametrize("d", [64, 128])
def test_stick_breaking_sums_over_no_more_than_64_keys(d: int) -> None:
    """A tile of 128 would be multiplied by ones for twice as many keys, and take their registers."""
    shape = TileShape("bf16", d, gradients=True, masked=True, form="stick_breaking")
    schedule = "\n".join(TRITON.default_schedule(shape))
    assert re.findall(r"tile\.kv in {(\d+)", schedule) == ["64", "64", "64"]


@pytest.mark.parametrize(
    ("width", "dtype", "group", "tiles"),
    [
        (576, "bf16", 128, "tile.q in {64, 32, 16}, tile.kv in {32, 16} warps = 8"),
        (576, "bf16", 32, "tile.q in {32, 16}, tile.kv in {32, 16} warps = 4"),
        (576, "bf16", 16, "tile.q = 16, tile.kv in {64, 32, 16} warps = 4"),
        (576, "bf16", 0, "tile.q = 16, tile.kv in {64, 32, 16} warps = 4"),
        (576, "f32", 128, "tile.q = 16, tile.kv in {32, 16} warps = 4"),
        (128, "bf16", 40, "tile.q in {64, 32, 16}, tile.kv in {64, 32, 16} warps = 4"),
        (128, "bf16", 17, "tile.q in {32, 16}, tile.kv in {64, 32, 16} warps = 4"),
        (128, "bf16", 1, "tile.q = 16, tile.kv in {64, 32, 16} warps = 4"),
        (128, "f32", 128, "tile.q = 16, tile.kv in {32, 16} warps = 4"),
    ],
)
def test_heads_of_a_query_that_lists_keys_read_them_once(
    width: int, dtype: str, group: int, tiles: str
) -> None:
    shape = TileShape(dtype, width, gradients=False, masked=True, listed=(1, 1), group=group)
    loops, *lines = TRITON.default_schedule(shape)
    assert loops == "loops = [kv], pack = gqa, split.kv = auto"
    assert " ".join(lines).startswith(tiles)


@pytest.mark.parametrize(("gradients", "form"), [(True, "softmax"), (False, "stick_breaking")])
def test_lists_are_not_split_beside_gradients_and_sticks(gradients: bool, form: Form) -> None:
    shape = TileShape("bf16", 64, gradients=gradients, masked=True, form=form, listed=(1, 64))
    assert next(iter(TRITON.default_schedule(shape))) == "loops = [kv], pack = gqa"


def test_portable_keeps_what_runs_on_some_device() -> None:
    only_large = config(64, 128, 3)
    configs = [only_large, config(64, 32, 2), config(128, 256, 4)]
    assert portable(configs, variant(128), schedule()) == tuple(configs[:2])
    assert misfit(only_large, variant(128), DEVICES["sm_86"]) is not None


def test_nothing_fits() -> None:
    with pytest.raises(DiagnosticError) as caught:
        portable([config(128, 256, 4)], variant(128), schedule())
    assert render(caught.value.diagnostics) == (
        "error[E0601]: no config of schedule 'huge' fits any GPU\n"
        "  --> specs/huge.attn:2:3\n"
        " 2 |   tile.q = 128, tile.kv = 256, stages = 4\n"
        "   |   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^"
        " needs 558080 B of shared memory; the limit is 232448 B\n"
        "   = note: q 128x128 + k 4 x 256x128 + v 4 x 256x128 + barriers and alignment, bf16, default\n"
        "   = help: 'tile.kv = 64' needs 164864 B and about 264 registers\n"
    )
