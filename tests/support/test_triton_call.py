"""What a module of Triton kernels launches, and what it says to the compiler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
