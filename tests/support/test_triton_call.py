"""What a module of Triton kernels launches, and what it says to the compiler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.support.arguments import Tensor
from attnc.support.devices import CPU
from attnc.support.memory import memory_of
from attnc.verify.interpreter import ensure_interpreter
from tests.support.noted import NotedKernel

pytestmark = pytest.mark.quick


def test_neighbours_of_several_rounds_take_turns() -> None:
    ensure_interpreter()
    from attnc.support.triton_call import Kernel, TritonAttention

    rounds = {"lists": "1", "dq": "n", "dk": "n", "sum": "1"}
    kernels = tuple(Kernel(function=name, grid="1", rounds=count) for name, count in rounds.items())
    call = SimpleNamespace(_launch=lambda kernel, place: kernel.function)
    made: Any = TritonAttention.made_ready
    for count, expected in ((0, []), (1, ["dq", "dk"]), (2, ["dq", "dk", "dq", "dk"])):
        place = SimpleNamespace(names={"n": count})
        assert made(call, kernels, place) == ("lists", *expected, "sum")


@pytest.mark.parametrize("warps", [0, 8])
@pytest.mark.parametrize("contracts", [False, True])
@pytest.mark.parametrize("phase", ["", "dq"])
def test_what_a_launch_says_to_the_compiler(warps: int, contracts: bool, phase: str) -> None:
    """Warps of the kernel's own or of its config; a limit of registers is that of a kernel of gradients."""
    ensure_interpreter()
    from attnc.support.triton_call import Kernel, TritonAttention

    named = SimpleNamespace(BLOCK_M=16, BLOCK_N=32, num_warps=2, num_stages=3, maxnreg=96)
    for capability, limit in (((9, 0), 96), ((8, 0), 0)):
        config = SimpleNamespace(**{**vars(named), "maxnreg": limit})
        names = {"config": config, "dq_config": config, "M": 33, "stride": 7}
        place: Any = SimpleNamespace(
            names=names, gpu=SimpleNamespace(capability=capability, index=0), device="a device",
            positions=lambda tensors: [*tensors], declared={}, memories={},
        )  # fmt: skip
        call: Any = SimpleNamespace(launch_type=lambda *given: given)
        kernel = Kernel(
            function=NotedKernel(), grid="(cdiv(M, BLOCK_M), n)", pointers="a b c", sizes={"n": "M + 1"},
            config=phase, warps=warps, contracts=contracts,
        )  # fmt: skip
        made: Any = TritonAttention._launch(call, kernel, place)
        _, grid, positions, numbers, constants, device, boxes, options = made
        assert (grid, positions, numbers, device) == ((3, 34), ["a", "b", "c"], [7], "a device")
        assert boxes == ()  # nothing that is described
        assert constants == {"BLOCK_M": 16, "PDL": capability == (9, 0)}
        expected: dict[str, Any] = {"num_warps": warps} if warps else {"num_warps": 2, "num_stages": 3}
        expected |= {"maxnreg": 96} if limit and phase and not warps else {}
        expected |= {} if contracts else {"enable_fp_fusion": False}
        expected |= {"launch_pdl": True} if capability == (9, 0) else {}
        assert options == expected


TILES = SimpleNamespace(BLOCK_M=32, BLOCK_N=64)


def boxes(*given: tuple[Tensor, torch.Tensor], gpu: Any = CPU) -> Any:
    ensure_interpreter()
    from attnc.support.triton_call import _boxes

    return _boxes([(tensor, memory_of(x)) for tensor, x in given], TILES, gpu)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_what_the_copy_engine_moves(dtype: torch.dtype) -> None:
    """Tiles of rows that begin at multiples of 16 bytes, in any order of the axes; of all tensors or none."""
    unit = 16 // dtype.itemsize
    q, k = Tensor("q", "bf16[B, M, H, D]", "bmh"), Tensor("k", "bf16[B, N, H, D]", "bnh")
    lse, numbers = Tensor("lse", "f32[B, H, M]", ""), torch.empty(2, 3, 8)
    x = torch.empty(2, 5, 3, 5 * unit, dtype=dtype)
    wide = max(16, 1 << (5 * unit - 1).bit_length())
    of_q = ([2, 3, 5, 5 * unit], [75 * unit, 5 * unit, 15 * unit, 1], [1, 1, 32, wide])
    of_lse = ([6, 8], [8, 1], [1, 32])
    assert boxes((q, x), (lse, numbers)) == (of_q, of_lse)
    moved = torch.empty(2, 3, 5, 5 * unit, dtype=dtype).transpose(1, 2)
    of_k = ([2, 3, 5, 5 * unit], [75 * unit, 25 * unit, 5 * unit, 1], [1, 1, 64, wide])
    assert boxes((lse, numbers), (k, moved)) == (of_lse, of_k)
    room = torch.empty(2, 5, 3, 6 * unit, dtype=dtype)[..., : 5 * unit]
    assert boxes((q, room))[0][1] == [90 * unit, 6 * unit, 18 * unit, 1]
    odd = torch.empty(2, 5, 3, 6 * unit + 1, dtype=dtype)[..., : 5 * unit]
    refused = (odd, x[:, :0], x[..., :0], x[:1].expand(2, -1, -1, -1), x[:, :1].expand(-1, 5, -1, -1))
    for other in refused:
        assert boxes((q, other)) == ()
        assert boxes((q, x), (k, other), (lse, numbers)) == ()
    assert boxes((q, x), (lse, torch.empty(2, 3, 7))) == ()


@pytest.mark.parametrize(("index", "capability", "has"), [
    (-1, (0, 0), True), (0, (8, 0), False), (1, (8, 9), False), (0, (9, 0), True), (1, (10, 0), True),
])  # fmt: skip
def test_which_devices_have_a_copy_engine(index: int, capability: tuple[int, int], has: bool) -> None:
    gpu = CPU._replace(index=index, capability=capability)
    found = boxes((Tensor("q", "bf16[B, M, H, D]", "bmh"), torch.empty(1, 4, 1, 16).bfloat16()), gpu=gpu)
    assert len(found) == has
