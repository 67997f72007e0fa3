"""Configs, splits, layouts, gradients of parts and binaries: what calls are made of."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from attnc.support.binaries import Compiled, Program, inline_headers, list_defines, suspend_capture
from attnc.support.configs import choose_config, decode_configs, encode_configs
from attnc.support.cuda_call import dq_floats
from attnc.support.devices import CPU, Gpu, gpu_of
from attnc.support.gradients import Part
from attnc.support.memory import allocate, contiguous, layouts_of, made_apart, make_picker, memory_of
from attnc.support.sizes import evaluate
from attnc.support.splits import Split, count_splits

H200 = Gpu(0, "NVIDIA H200", (9, 0), 232448, 233472, 132, 50 << 20)


class Config(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    WARPS: int
    STAGES: int
    shared: int
    splits: int = 0
    maxnreg: int = 0


CONFIGS = (Config(128, 64, 8, 3, 300000), Config(64, 64, 4, 2, 90000), Config(64, 32, 4, 2, 40000))


def test_a_config_is_given_measured_or_fits() -> None:
    tuned = {"NVIDIA H200": ((1024, 2), (None, 1))}
    assert choose_config(CONFIGS[0], H200, 10, CONFIGS, tuned) == CONFIGS[0]
    assert [choose_config(None, H200, n, CONFIGS, tuned) for n in (1024, 1025)] == [CONFIGS[2], CONFIGS[1]]
    assert choose_config(None, H200, 10, CONFIGS, {}) == CONFIGS[1]
    assert choose_config(None, CPU, 10, CONFIGS, {}) == CONFIGS[0]
    assert choose_config(None, H200._replace(shared=1), 10, CONFIGS, {}) == CONFIGS[2]


def test_a_choice_of_configs_survives_as_text() -> None:
    assert encode_configs(None, None) == ""
    assert decode_configs("", Config) == (None, {})
    text = encode_configs(CONFIGS[1], {"dq": CONFIGS[0], "dkdv": None})
    assert decode_configs(text, Config) == (CONFIGS[1], {"dq": CONFIGS[0]})


def test_splits_fill_the_device_and_no_more() -> None:
    def count(tiles: int, key_tiles: int) -> int:
        return count_splits(tiles, key_tiles, 64 * 512, 4 * 129 * tiles, 90000, H200, 1.2, 128)

    assert count(1, 1) == 1
    assert count(10_000, 64) == 1
    assert 16 <= count(8, 1024) <= 128
    assert count(0, 8) == 1


def test_splits_of_a_fixed_size() -> None:
    split = Split("B", "cdiv(N, BLOCK_N)", 512, 129, most=4)
    names = {"B": 2, "H": 4, "M": 1, "N": 1000, "BLOCK_N": 64}
    assert split.sizes(names, CONFIGS[1]._replace(splits=3), H200) == {
        "tiles": 2, "rows": 8, "SPLITS": 3, "SPLIT_ROWS": 24
    }  # fmt: skip
    with pytest.raises(ValueError, match="at most 4 splits, of 250 keys at least, got 5"):
        split.sizes(names, CONFIGS[1]._replace(splits=5), H200)


def test_blocks_share_the_columns_of_a_result_where_tiles_are_few() -> None:
    class Shared(NamedTuple):
        BLOCK_M: int
        BLOCK_N: int
        BLOCK_D: int
        shared: int = 230480
        splits: int = 0

    configs = whole, half = Shared(64, 64, 512), Shared(64, 64, 256)
    split = Split("cdiv(H, BLOCK_M) * B", "cdiv(N, BLOCK_N)", 1152, 513, columns=512, few=4)
    for batch, first in ((1, half), (4, whole)):
        names = {"B": batch, "H": 128, "M": 1, "N": 8192}
        assert split.in_order(configs, names, H200)[0] == first
        assert choose_config(None, H200, 8192, configs, {}, split.in_order(configs, names, H200)) == first
        assert choose_config(whole, H200, 8192, configs, {}, split.in_order(configs, names, H200)) == whole
    names = {"B": 1, "H": 128, "M": 1, "N": 8192, "BLOCK_M": 64, "BLOCK_N": 64}
    blocks = [split.sizes(names, config, H200)["SPLITS"] * 1024 // config.BLOCK_D for config in configs]
    assert all(count <= 132 for count in blocks)
    assert blocks[1] > blocks[0] / 2
    assert Split("B", "1", 512, 129).in_order(configs, names, H200) == configs


def test_layouts_are_those_of_torch() -> None:
    for shape in ((2, 3, 4), (2, 0, 4), (), (1,)):
        made = contiguous(shape, torch.float32)
        assert made == memory_of(torch.empty(shape))
        (x,) = allocate([tuple(made)], torch.empty(()))  # type: ignore[list-item]  # a Layout
        assert memory_of(x) == made
    tensors = [torch.zeros(n, 2) for n in range(7)]
    for count in range(1, 8):
        flat = [part for x in tensors[:count] for part in (x.shape, x.stride(), x.dtype, x.device)]
        assert layouts_of(count)(tensors[:count]) == tuple(flat)
    assert make_picker([2])("abc") == ("c",)
    assert make_picker([2, -1])("abc") == ("c", "c")


def test_the_cpu_is_a_device() -> None:
    assert gpu_of(-1) is CPU
    assert H200.arch == "sm_90"


def test_parts_are_summed_over_what_an_input_lacks() -> None:
    names = {"M": 3, "N": 5}
    pair = torch.arange(2.0 * 4 * 8 * 5).reshape(2, 4, 8, 5)  # rows padded to 8
    over_batch = Part("x", ("q", "kv"), ("h", "q_idx", "kv_idx")).summing((4, 3, 5), names)(pair)
    assert torch.equal(over_batch, pair[:, :, :3].sum(0))
    turned = Part("x", ("q", "kv"), ("kv_idx", "h")).summing((5, 4), names)(pair)
    assert torch.equal(turned, pair[:, :, :3].sum((0, 2)).T)
    tiles = torch.arange(2.0 * 4 * 6).reshape(2, 4, 6)
    assert torch.equal(Part("x", (), ("h",)).summing((4,), names)(tiles), tiles.sum((0, 2)))
    row = pair[..., 0]
    shifted = Part("x", ("q",), ("q_pos",)).summing((5,), names)(row)
    assert torch.equal(shifted, torch.cat([torch.zeros(2), row[:, :, :3].sum((0, 1))]))
    placed = Part("x", (), ("h", 1)).summing((4, 3), names)(tiles)
    assert torch.equal(placed[:, 1], tiles.sum((0, 2)))
    assert placed[:, 0].abs().sum() == 0
    assert Part("x", atomic=True).summing(row.shape, names)(row) is row


def test_sums_of_dq_have_whole_fragments() -> None:
    assert dq_floats(CONFIGS[0], 8) == 128 * 128
    assert dq_floats(CONFIGS[0]._replace(BLOCK_M=64, WARPS=8), 4) == 64 * 64


def test_a_source_has_its_header_in_place(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text(
        '#define N 1\n#include "x.cuh"\n#include "simt.h"\nint a;\n', encoding="utf-8"
    )
    (tmp_path / "x.cuh").write_text("int x;\n", encoding="utf-8")
    program = Program(str(tmp_path / "a.py"), (Compiled("f", "a.cu", CONFIGS),), None)
    assert program.source("f") == '#define N 1\nint x;\n#include "simt.h"\nint a;\n'
    assert inline_headers("int y;", str) == "int y;"
    before = program.cubin_name("f", CONFIGS[1], True, "sm_90")
    (tmp_path / "x.cuh").write_text("int z;\n", encoding="utf-8")
    program.forget()
    assert program.cubin_name("f", CONFIGS[1], True, "sm_90") != before
    inline = Program("", (Compiled("f", "a.cu", CONFIGS),), {"a.cu": "int b;\n"})
    assert inline.source("f") == "int b;\n"


def test_kernels_are_compiled_with_their_config() -> None:
    config = CONFIGS[1]
    assert list_defines(config, True) == {"BLOCK_M": 64, "BLOCK_N": 64, "WARPS": 4, "STAGES": 2, "ALIGNED": 1}
    assert list_defines(config._replace(maxnreg=128), False)["MAXNREG"] == 128


@pytest.mark.parametrize(
    ("text", "heads"),
    [
        ("section(32, 100, 1000)", 10),
        ("section(8, 100, 1000)", 8),
        ("section(32, 10000, 1000)", 1),
        ("section(32, 10000, 1000, 4, 16)", 4),
        ("section(32, 1, 1000, 4, 16)", 16),
        ("section(2, 0, 1000, 4, 16)", 2),
    ],
)
def test_how_many_heads_are_worked_at_together(text: str, heads: int) -> None:
    assert evaluate(text, {}) == heads


def test_code_is_loaded_outside_of_a_graph_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's mode is relaxed for the while, and then what it was."""
    modes = [0]

    def exchange(mode: Any) -> None:
        modes.append(mode._obj.value)
        mode._obj.value = modes[-2]

    library = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    with suspend_capture():
        assert modes[-1] == 2
    assert modes == [0, 2, 0]


def test_what_is_made_apart_is_ordinary_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of inference mode, and waited for; what goes wrong is raised."""
    waits: list[torch.device] = []

    def stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: waits.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    with torch.inference_mode():
        x = made_apart(lambda: torch.zeros(2))
        assert not x.is_inference()
    assert waits == [x.device]
    with pytest.raises(ZeroDivisionError):
        made_apart(lambda: torch.zeros(1 // 0))
