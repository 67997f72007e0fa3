"""Calls for a device that is not the current one: they run there, and the current one stays current."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.gpu.test_host import Loaded, close
from tests.targets import TARGETS
from tests.tensors import results, shifted

#: Descriptors and optional outputs, packed sequences, a second kernel and its scratch, pages.
NAMES = ("causal_gqa", "bias", "varlen", "decode", "paged_decode")


@pytest.fixture(autouse=True)
def other(device: torch.device) -> torch.device:
    """The second GPU; the first is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    return torch.device("cuda", 1)


def moved(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [x.detach().to(device).requires_grad_(x.requires_grad) for x in tensors]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_calls_run_where_their_tensors_are(name: str, target: str, other: torch.device) -> None:
    """The first call and prepared ones, in turns with calls on the current device; aligned and not."""
    made = Loaded(name, target)
    here = made.tensors()
    there = moved(here, other)
    expected = made.function(*here)
    unaligned = shifted(there[0])
    for _ in range(3):
        for found in (made.function(*there), made.function(unaligned, *there[1:])):
            assert {x.device for x in results(found)} == {other}
            close(tuple(x.to(here[0].device) for x in results(found)), expected)
        close(made.function(*here), expected)
        out = tuple(torch.empty_like(x) for x in results(found))
        made.function(*there, out=out if len(out) > 1 else out[0])
        close(tuple(x.to(here[0].device) for x in out), expected)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["causal_gqa", "bias", "varlen"])
def test_gradients_run_where_their_tensors_are(name: str, target: str, other: torch.device) -> None:
    made = Loaded(name, target)
    here = made.tensors(gradients=True)
    there = moved(here, other)
    for _ in range(3):
        found = []
        for tensors in (here, there):
            wanted = [x for x in tensors if x.requires_grad]
            o = results(made.function(*tensors))[0]
            found.append(torch.autograd.grad(o.float().square().sum(), wanted))
        assert {x.device for x in found[1]} == {other}
        close(tuple(x.to(here[0].device) for x in found[1]), found[0])
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("target", TARGETS)
def test_tensors_of_two_devices_are_refused_by_name(target: str, other: torch.device) -> None:
    made = Loaded("causal_gqa", target)
    q, k, v = made.tensors()
    with pytest.raises(ValueError, match="k: expected device cuda:0, like q, got cuda:1"):
        made.function(q, k.to(other), v)
    o, lse = made.function(q, k, v)
    with pytest.raises(ValueError, match="out lse: expected device cuda:0, like q, got cuda:1"):
        made.function(q, k, v, out=(o, lse.to(other)))


@pytest.mark.parametrize("target", TARGETS)
def test_a_graph_is_captured_on_the_device_of_the_tensors(target: str, other: torch.device) -> None:
    made = Loaded("decode", target)
    tensors = moved(made.tensors(), other)
    with torch.cuda.device(other):
        made.function(*tensors)
        made.function(*tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = made.function(*tensors)
        for x in tensors[:3]:
            x.copy_(x.flip(1))
        graph.replay()
        close(found, made.function(*tensors))


@pytest.mark.parametrize("target", TARGETS)
def test_new_threads_launch_on_any_device(target: str, other: torch.device) -> None:
    """A thread's current device is the first, and it has no context of its own."""
    made = Loaded("causal_gqa", target)
    here = made.tensors()
    expected = made.function(*here)
    made.function(*moved(here, other))
    found: list[Any] = []

    def run(tensors: list[torch.Tensor]) -> None:
        found.append(made.function(*tensors))

    for tensors in (moved(here, other), here, list(map(shifted, here))):
        torch.cuda.synchronize(other)
        thread = threading.Thread(target=run, args=(tensors,))
        thread.start()
        thread.join()
    for each in found:
        close(tuple(x.to(here[0].device) for x in results(each)), expected)
    assert len(found) == 3
