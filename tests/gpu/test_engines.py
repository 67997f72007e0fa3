"""The attention backends of vLLM and SGLang on a GPU: requests are served, also by captured steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.adapters import sglang_runner as of_sglang
from tests.adapters import test_pages as of_pages
from tests.adapters import test_vllm_plugin as of_vllm
from tests.adapters.engines import Request, engine

GPU: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def vllm() -> Iterator[ModuleType]:
    with engine("vllm", "attnc.adapters.vllm.backend") as module:
        yield module


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with engine("sglang", "attnc.adapters.sglang.backend") as module:
        monkeypatch.setattr(module, "KVWriteLoc", of_sglang.WriteLocation)
        yield module


@pytest.mark.parametrize("layer", of_vllm.LAYERS, ids=lambda layer: "-".join(layer) or "plain")
def test_vllm_serves_requests(vllm: ModuleType, layer: dict[str, Any], device: torch.device) -> None:
    own: dict[str, Any] = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in layer.items()
    }
    with device:
        runner = of_vllm.Runner(vllm, **GPU, **own)
    first, second = Request(), Request()
    runner.step([(first, 35), (second, 5)])
    third = first.fork(32, of_vllm.PAGE)
    runner.step([(first, 1), (second, 14), (third, 3)], padding=0)
    runner.step([(first, 1), (second, 1), (third, 1)], padding=0)


class Captured:
    """An implementation whose update and attention are one graph, captured at the first step."""

    def __init__(self, impl: Any) -> None:
        self.impl = impl
        self.graph: torch.cuda.CUDAGraph | None = None

    def do_kv_cache_update(self, *_: Any) -> None:
        """Part of the graph that `forward` replays."""

    def forward(
        self, layer: Any, q: Any, k: Any, v: Any, pool: Any, metadata: Any, output: torch.Tensor
    ) -> torch.Tensor:
        names = ("slot_mapping", "query_start_loc", "seq_lens", "block_table")
        given = (q, k, v, *(getattr(metadata, name) for name in names))
        if self.graph is None:
            self.kept = [x.clone() for x in given]
            self.output = torch.empty_like(output)
            own = replace(metadata, **dict(zip(names, self.kept[3:], strict=True)))

            def run() -> None:
                self.impl.do_kv_cache_update(layer, *self.kept[1:3], pool, self.kept[3])
                self.impl.forward(layer, *self.kept[:3], pool, own, self.output)

            run()  # compiles
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                run()
        for kept, x in zip(self.kept, given, strict=True):
            kept.copy_(x)
        self.graph.replay()
        return output.copy_(self.output)


@pytest.mark.usefixtures("device")
def test_a_captured_step_of_vllm_serves_the_next(vllm: ModuleType) -> None:
    runner = of_vllm.Runner(vllm, **GPU)
    requests = [Request(), Request()]
    runner.step([(requests[0], 30), (requests[1], 14)])
    runner.impl = Captured(runner.impl)
    for _ in range(4):  # across the end of a page of each
        runner.step([(request, 1) for request in requests], padding=0)


@pytest.mark.parametrize("page", [1, 16])
def test_sglang_serves_requests(sglang: ModuleType, page: int, device: torch.device) -> None:
    runner = of_sglang.Runner(sglang, page, of_sglang.layer_of(logit_cap=3.0), **GPU)
    first, second = Request(), Request()
    runner.step([(first, 35), (second, 5)], "EXTEND")
    third = first.fork(32, page)
    runner.step([(first, 1), (second, 14), (third, 3)], "MIXED")
    runner.step([(first, 1), (second, 1), (third, 1)], "DECODE")
    sinks = torch.linspace(-1, 2, of_sglang.HEADS * of_sglang.GROUP, device=device)
    runner.backend.init_cuda_graph_state(5, 5)
    for _ in range(2):
        runner.step([(third, 1), (first, 1)], "DECODE", graph=True, sinks=sinks)


def test_sglang_verifies_drafts(sglang: ModuleType, device: torch.device) -> None:
    """Chains and trees, by a graph's tensors."""
    runner = of_sglang.Runner(sglang, 16, of_sglang.layer_of(), **GPU)
    requests = [Request(), Request()]
    runner.step([(requests[0], 35), (requests[1], 5)], "EXTEND")
    runner.backend.init_cuda_graph_state(4, 16)
    scheduled = [(request, 3) for request in requests]
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().expand(2, 3, 3)
    for seen in (None, tree, tree):
        asked = of_sglang.drafts(requests, 3, seen, device=device)
        runner.step(scheduled, "TARGET_VERIFY", graph=True, drafts=asked, tree=seen)


@pytest.mark.filterwarnings("ignore:latent_attention.*kernels of cuda.sm_90a")  # of packed queries
@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize(("tokens", "queries"), [(1, None), (4, None), (0, [70, 0, 130])], ids=str)
def test_latents_of_deepseek(tokens: int, queries: list[int] | None, page: int, device: torch.device) -> None:
    """Keys of 576 columns, of which 512 are the values, for many heads: decoded, verified and extended."""
    of_pages.check(
        tokens,
        [200, 5, 333],
        page=page,
        heads=1,
        group=16,
        size=576,
        value=512,
        latent=True,
        scale=0.05,
        dtype=torch.bfloat16,
        queries=queries,
        device=device,
    )
