"""Launches of Triton kernels, from the second time on, and what they need of the thread that makes them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.verify.interpreter import ensure_interpreter
from tests.support.noted import NotedKernel

pytestmark = pytest.mark.quick


def test_a_thread_without_a_context_gets_one_where_descriptors_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton refuses to make one there; a launch of torch's brings the context."""
    ensure_interpreter()
    from attnc.support.triton_launch import in_context

    brought: list[object] = []

    def make(problem: str, *, size: int) -> int:
        if problem and not brought:
            raise RuntimeError(problem)
        return size

    monkeypatch.setattr(torch, "zeros", lambda shape, device: brought.append(device))
    assert in_context(make, "", size=3) == 3
    assert brought == []
    with pytest.raises(RuntimeError, match="out of memory"):
        in_context(make, "out of memory", size=3)
    assert brought == []
    assert in_context(make, "Failed to create it: invalid device context", size=3) == 3
    assert brought == ["cuda"]


@pytest.mark.parametrize("boxes", [None, 0, 2])
def test_a_launch_begins_again_as_triton_was_asked_for(
    boxes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same arguments in the same order: only of aligned tensors, on the device of the launch; and
    what is made of a tensor's address is made once.
    """
    ensure_interpreter()
    from attnc.support.triton_launch import TritonLaunch

    current, started, mapped = [0], list[Any](), list[int]()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    monkeypatch.setattr(TritonLaunch, "on_device", lambda self: nullcontext())
    monkeypatch.setattr(TritonLaunch, "made_fast", lambda self, binary: lambda *given: started.append(given))

    def map_of(launch: Any, made: Any, i: int, address: int, x: torch.Tensor) -> list[Any]:
        assert (address, x.shape) == (x.data_ptr(), (4, 32))
        mapped.append(i)
        found: list[Any] = made.setdefault(address, [f"map {i}", address])
        return found

    monkeypatch.setattr(TritonLaunch, "map", map_of)
    kernel, constants = NotedKernel(), {"BLOCK_M": 16, "PDL": True}
    described = None if boxes is None else (([4, 32], [32, 1], [1, 16]),) * boxes
    launch = TritonLaunch(
        kernel, (3,), (2, 0, -1), (5, 6), constants, torch.device("cuda", 0), described, {"num_warps": 4}
    )
    base = torch.zeros(1024)
    base = base[-base.data_ptr() // 4 % 16 :]  # at a multiple of 64 bytes
    first, second = (base[at : at + 128].view(4, 32) for at in (0, 128))
    odd = base[257 : 257 + 128].view(4, 32)
    flag = () if boxes is None else (bool(boxes),)

    def told() -> tuple[int, int]:
        return len(kernel.launched), len(started)

    launch.run([second, base, first, None])
    grid, tensors, options = kernel.launched[-1]
    assert (grid, len(tensors), told()) == ((3,), 5, (1, 0))
    assert [getattr(x, "base", x) is given for x, given in zip(tensors, (first, second, None), strict=False)]
    assert [hasattr(x, "block_shape") for x in tensors[:2]] == [bool(boxes)] * 2
    assert (tensors[2:], options) == ((None, 5, 6), {
        **constants, "num_warps": 4, **({} if boxes is None else {"TMA": bool(boxes)})
    })  # fmt: skip
    for _ in range(2):
        launch.run([second, base, first, None])
        stream, arguments = started[-1]
        addresses = [first.data_ptr(), second.data_ptr(), 0]
        maps = [[f"map {i}", at] for i, at in enumerate(addresses[:boxes])] if boxes else []
        expected = [*(x for each in maps for x in each), *addresses[boxes or 0 :], 5, 6, 16, True, *flag]
        assert (stream, list(arguments)) == (70, expected)
    assert told() == (1, 2)
    assert mapped == ([0, 1] if boxes else [])
    launch.run([odd, base, first, None])  # by Triton, which looks at the alignment
    assert told() == (2, 2)
    assert not any(hasattr(x, "block_shape") for x in kernel.launched[-1][1])
    launch.run([second, base, first, None])
    assert told() == (2, 3)
    current[0] = 1
    launch.run([second, base, first, None])
    assert told() == (3, 3)


@pytest.mark.parametrize("version", ["3.5.1", "3.6.0", "3.7.1"])
def test_a_known_triton_is_called_below_its_checks(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_interpreter()
    import triton

    from attnc.support import triton_launch

    def binary(**changed: Any) -> Any:
        known: dict[str, Any] = {"backend": "cuda", "scratch": 0, "profiled": 0, "described": ()} | changed
        run = SimpleNamespace(
            global_scratch_size=known["scratch"], profile_scratch_size=known["profiled"], launch=launch,
            launch_cooperative_grid="together", launch_pdl="early", arg_annotations="notes",
            kernel_signature="signature",
        )  # fmt: skip
        metadata = SimpleNamespace(
            target=SimpleNamespace(backend=known["backend"]), tensordesc_meta=known["described"]
        )
        return SimpleNamespace(run=run, packed_metadata="packed", function="function", metadata=metadata)

    calls: list[tuple[Any, ...]] = []

    def launch(*given: Any) -> None:
        calls.append(given)

    def make_launch(launcher: Any) -> Any:
        def described(*given: Any) -> None:
            launcher("described", *given)

        return described

    monkeypatch.setattr(triton, "__version__", version)
    for refused in ({"backend": "hip"}, {"scratch": 8}, {"profiled": 8}, {"described": ("one",)}):
        assert triton_launch.fast_launcher(binary(**refused), 0, 2) is None
    assert triton_launch.fast_launcher(binary(), 1, 2) is None
    start = triton_launch.fast_launcher(binary(), 0, 2, 3)
    if version == "3.5.1":
        assert start is None
        return
    assert start is not None
    start(9, ["address", 7])
    first = (2, 3, 1, 9, "function", "together", "early")
    if version == "3.7.1":
        assert calls == [(*first, "packed", *[None] * 5, "notes", "signature", ["address", 7])]
        return
    assert calls == [(*first, None, None, "packed", *[None] * 3, "address", 7)]
    made = binary(described=("one",))
    made.run.launch = make_launch(launch)  # which makes descriptors of tensors
    again = triton_launch.fast_launcher(made, 1, 2, 3)
    assert again is not None
    again(9, ["address", 7])
    assert calls[1] == calls[0]
