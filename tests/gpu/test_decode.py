"""What serving does with a decode kernel on a GPU: captured graphs, prepared calls, splits of fixed size."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attnc.build import front, plan_program
from attnc.runtime.loader import load_module
from tests.plans import SPECS, module_of
from tests.targets import TARGETS, skip_without_launcher

B, HEADS, KV_HEADS, ROOM, PAGE = 4, 16, 4, 4096, 16
LENGTHS = ((4096, 1, 777, 2048), (16, 0, 4000, 4096), (1, 1, 1, 1))


def paged_decode(target: str) -> ModuleType:
    return load_module(module_of("paged_decode", target, "d128"))


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return paged_decode("triton")


def tensors(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v and a block table over pages in random order."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    pages = B * ROOM // PAGE
    pool = (pages, PAGE, KV_HEADS, 128)
    table = torch.randperm(pages, generator=generator, device="cuda").to(torch.int32).reshape(B, -1)
    return normal(B, 1, HEADS, 128), normal(*pool), normal(*pool), table


def lengths(values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize(("target", "config"), [("triton", 0), ("triton", 1), ("cuda.sm_80", 0)])
def test_one_captured_graph_serves_changing_lengths(target: str, config: int) -> None:
    """Counted splits, and splits of a fixed size: the grid depends on shapes alone."""
    skip_without_launcher(target)
    module: Any = paged_decode(target)
    inputs, kv_len = tensors(), lengths(LENGTHS[0])
    chosen = module.CONFIGS[config]
    module.paged_decode(*inputs, kv_len, config=chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = module.paged_decode(*inputs, kv_len, config=chosen)
    for values in LENGTHS:
        kv_len.copy_(lengths(values))
        graph.replay()
        expected = module.paged_decode(*inputs, lengths(values), config=chosen)
        assert torch.equal(o, expected[0])
        assert torch.equal(lse, expected[1])


def test_a_prepared_launch_gives_the_bits_of_the_first(module: Any) -> None:
    inputs, kv_len = tensors(), lengths(LENGTHS[0])
    module.CALL.forget()
    first = module.paged_decode(*inputs, kv_len)
    second = module.paged_decode(*inputs, kv_len)
    q = inputs[0]
    moved = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view_as(q)  # not aligned to 16 bytes
    moved.copy_(q)
    third = module.paged_decode(moved, *inputs[1:], kv_len)
    for other in (second, third):
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])


def test_bits_of_fixed_shares_do_not_depend_on_the_batch(module: Any) -> None:
    q, k, v, table = tensors()
    fixed = next(config for config in module.CONFIGS if config.split_size)
    together = module.paged_decode(q, k, v, table, lengths(LENGTHS[0]), config=fixed)
    for b, length in enumerate(LENGTHS[0]):
        one = slice(b, b + 1)
        alone = module.paged_decode(q[one], k, v, table[one], lengths((length,)), config=fixed)
        assert torch.equal(alone[0], together[0][one])
        assert torch.equal(alone[1], together[1][one])


@pytest.mark.parametrize("page", [1, 4, 7, 16, 48, 256])
@pytest.mark.parametrize("target", TARGETS)
def test_pages_of_any_size_give_the_bits_of_a_tensor(target: str, page: int, tmp_path: Path) -> None:
    """Decoding, with splits; pages lie in random order."""
    skip_without_launcher(target)
    text = (SPECS / "paged_decode.attn").read_text(encoding="utf-8").replace("page = 16", f"page = {page}")
    path = tmp_path / "paged_decode.attn"
    path.write_text(text, encoding="utf-8")
    made = plan_program(front(path)).modules + plan_program(front(SPECS / "decode.attn")).modules
    functions = {
        name: getattr(load_module(module), name)
        for module in made
        if (module.target, module.variant.params["D"]) == (target, 128)
        and (name := module.variant.attention.name) in ("paged_decode", "decode")
    }
    generator = torch.Generator("cuda").manual_seed(page)
    columns = ROOM // page
    room = columns * page
    q = torch.randn((B, 1, HEADS, 128), generator=generator, device="cuda").bfloat16()
    k, v = torch.randn((2, B, room, KV_HEADS, 128), generator=generator, device="cuda").bfloat16()
    order = torch.randperm(B * columns, generator=generator, device="cuda")
    pools = [torch.empty_like(x).view(-1, page, KV_HEADS, 128) for x in (k, v)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[order] = x.view(-1, page, KV_HEADS, 128)
    table, kv_len = order.to(torch.int32).reshape(B, columns), lengths(LENGTHS[1]).clamp(max=room)
    configs = {
        name: function.__globals__["CONFIGS"][0]._replace(splits=4) for name, function in functions.items()
    }
    found = functions["paged_decode"](q, *pools, table, kv_len, config=configs["paged_decode"])
    expected = functions["decode"](q, k, v, kv_len, config=configs["decode"])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
