"""Keys and values of 8 bits on a GPU: every code becomes its number, and results are within the bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnc.adapters import latent_kernels
from attnc.adapters.flash_mla import flash_mla_with_kvcache
from attnc.adapters.latent_rows import FORMATS, store_rows, unpack_cache
from attnc.model.dtypes import DType
from attnc.plan.targets import schedule_for
from attnc.verify.case import Case, TensorLayout
from attnc.verify.subject import Subject, subject_of
from tests.kernels import test_sm90_narrow as hopper
from tests.kernels.test_narrow import KINDS, NARROW, case, numbers, same_numbers, subject, types_of
from tests.model.resolving import resolve_text
from tests.verify.judging import assert_within_bound, modules_of, spec


def skip_what_is_not_read(*dtypes: str) -> None:
    """e4m3 is compiled from compute capability 8.9 on."""
    if "e4m3" in dtypes and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton does not compile e4m3 for this GPU")


@pytest.mark.parametrize("element", [DType.F16, DType.BF16])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_code_becomes_its_number(dtype: DType, element: DType) -> None:
    skip_what_is_not_read(dtype)
    got, expected = numbers(dtype, element, "cuda")
    assert same_numbers(got, expected)


def large(made: Subject) -> dict[str, int]:
    few = made.plan is not None and made.plan.kernel.structure == "decode"
    return {"B": 3, "M": 4 if few else 300, "N": 777, "Hkv": 2, "G": 4}


@pytest.mark.parametrize("pair", [("e4m3", "e4m3"), ("e5m2", "i8"), ("i8", "bf16")], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_within_the_bound(kind: str, pair: tuple[str, str]) -> None:
    types = types_of(kind, pair)
    skip_what_is_not_read(*types)
    made = subject(kind, *types)
    for number in range(len(made.configs)):
        assert_within_bound(made, replace(case(made, seed=number, config=number), dims=large(made)))


@pytest.mark.parametrize("size", list(FORMATS))
def test_rows_of_several_types_are_read_in_a_graph(size: int, device: torch.device) -> None:
    """Lists that change between replays, of two caches, against rows of 16 bits. These are shared out among
    other numbers of blocks, whose sums are rounded in another order.
    """
    torch.manual_seed(0)
    columns, page = FORMATS[size].columns, 64
    memory = torch.zeros(40, page * size + 64, dtype=torch.uint8, device=device)
    cache = memory[:, : page * size].view(40, page, 1, size)
    store_rows(torch.randn(40 * page, columns, device=device), cache, torch.arange(40 * page, device=device))
    wide = unpack_cache(cache)
    both = torch.cat([wide.flatten(0, 1), wide[30:].flatten(0, 1)])[None]
    q = torch.randn(3, 2, 16, columns, device=device).bfloat16()
    lists = torch.randint(40 * page, (3, 2, 300), device=device).int()
    more = torch.randint(10 * page, (3, 2, 70), device=device).int()

    def attend() -> tuple[torch.Tensor, torch.Tensor]:
        return flash_mla_with_kvcache(
            q,
            cache,
            None,
            None,
            512,
            is_fp8_kvcache=True,
            indices=lists,
            extra_k_cache=cache[30:],
            extra_indices_in_kvcache=more,
        )

    for _ in range(2):
        attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    for seed in range(3):
        torch.manual_seed(seed)
        lists.copy_(torch.randint(-3, 40 * page, lists.shape, device=device))
        more.copy_(torch.randint(-3, 10 * page, more.shape, device=device))
        graph.replay()
        named = torch.cat([lists, torch.where(more < 0, -1, more + 40 * page)], -1)
        o, lse = flash_mla_with_kvcache(q, both, None, None, 512, indices=named)
        torch.testing.assert_close(found[0].float(), o.float(), atol=2**-8 * o.abs().max().item(), rtol=2**-7)
        torch.testing.assert_close(found[1], lse, atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", list(FORMATS))
@pytest.mark.parametrize("heads", [16, 128])
def test_rows_of_several_types_are_read_as_they_lie(heads: int, size: int, device: torch.device) -> None:
    """By a kernel on Hopper, in a graph too; numbers and scales at both ends of their range."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels of Hopper alone read them")
    torch.manual_seed(0)
    columns, page, pages = FORMATS[size].columns, 64, 40
    latents = torch.randn(pages * page, columns, device=device)
    latents *= torch.logspace(-30, 3, pages * page, base=2, device=device)[:, None]
    cache = torch.zeros(pages, page, 1, size, dtype=torch.uint8, device=device)
    store_rows(latents, cache, torch.arange(pages * page, device=device))
    wide = unpack_cache(cache)
    q = torch.randn(3, 2, heads, columns, device=device).bfloat16()
    lists = torch.randint(pages * page, (3, 2, 300), device=device).int()
    counts = torch.tensor([300, 1, 17], dtype=torch.int32, device=device)
    table = torch.randperm(pages, device=device).int()[:36].view(3, 12)
    lengths = torch.tensor([700, 1, 64], dtype=torch.int32, device=device)

    def attend(rows: torch.Tensor, *, packed: bool) -> list[torch.Tensor]:
        listed: dict[str, Any] = {"indices": lists, "topk_length": counts, "is_fp8_kvcache": packed}
        of_pages: dict[str, Any] = {"causal": True, "is_fp8_kvcache": packed}
        found = flash_mla_with_kvcache(q, rows, None, None, 512, softmax_scale=0.05, **listed)
        return [*found, *flash_mla_with_kvcache(q, rows, table, lengths, 512, softmax_scale=0.05, **of_pages)]

    reads = latent_kernels.reads_rows("test", q, cache, 512)
    assert reads, "no kernel reads them"
    for _ in range(2):
        attend(cache, packed=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(cache, packed=True)
    for seed in range(3):
        torch.manual_seed(seed)
        lists.copy_(torch.randint(-3, pages * page, lists.shape, device=device))
        graph.replay()
        for mine, theirs in zip(found, attend(wide, packed=False), strict=True):
            limit = 2**-7 * theirs[theirs.isfinite()].abs().max().item()
            torch.testing.assert_close(mine.float(), theirs.float(), atol=max(limit, 1e-4), rtol=2**-7)


def test_calls_that_convert_one_after_the_other_keep_their_numbers(device: torch.device) -> None:
    """Kernels begin while those before them end, and take memory that these have just left."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels of Hopper alone are converted for")
    torch.manual_seed(0)
    lines = [
        "input q: bf16[B, M, Hkv * G, 128]",
        "input k, v: {}[B, N, Hkv, 128] via paged(table, page = 16)",
        "input table: i32[B, P]",
        "input lens: i32[B]",
        "length N = lens[b]",
        "score = dot(q, k) / sqrt(D)",
        "mask = causal",
        "normalize = softmax",
        "output o: bf16[B, M, Hkv * G, 128]",
    ]
    knobs = "softmax = online(maximum = lazy(20)), order = longest_first, tile.kv = 128"
    functions = []
    for kv, more in (("e4m3", ", convert = before"), ("bf16", "")):
        text = spec([line.format(kv) for line in lines], knobs + more, target="cuda.sm_90a")
        (module,) = modules_of(text)
        functions.append(subject_of(module).function)
    narrow, wide = functions
    q = torch.randn(2, 300, 8, 128, device=device).bfloat16()
    pools = torch.randn(6, 2, 80, 16, 2, 128, device=device).to(torch.float8_e4m3fn)
    table = torch.randperm(80, device=device).int().view(2, 40)
    lens = torch.tensor([640, 411], device=device, dtype=torch.int32)
    expected = [wide(q, *pool.bfloat16(), table, lens) for pool in pools]

    def attend() -> list[torch.Tensor]:
        return [narrow(q, *pool, table, lens) for pool in pools]

    for _ in range(3):
        for mine, theirs in zip(attend(), expected, strict=True):
            assert torch.equal(mine, theirs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    for _ in range(20):
        graph.replay()
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("lies", list(hopper.LYING.values()), ids=list(hopper.LYING))
@pytest.mark.parametrize(
    "kind", ["warps, blocks in pages", "warps, blocks of powers of two", "blocks in pages"]
)
def test_scales_are_loaded_wherever_they_begin(kind: str, lies: TensorLayout) -> None:
    """A lane loads 16 bytes of scales at once only where these are aligned, of which a CPU knows nothing."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels of Hopper alone load them so")
    made = hopper.subject(kind)
    dims = {"B": 2, "M": 3, "G": 4, "N": 700, "Hkv": 2, "R": 64}
    name = "es" if "powers" in kind else "ks"
    assert_within_bound(made, Case(dims=dims, seed=1, logits="rising", layouts={name: lies}))


def test_latents_of_8_bits_without_a_schedule_have_a_kernel_of_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("its warpgroups convert and multiply tiles")
    lines = [
        "input q: bf16[B, M, G, 576]",
        "input k: e4m3[B, N, 1, 576] via paged(table, page = 64)",
        "input v: e4m3[B, N, 1, 512] via prefix(k)",
        "input table: i32[B, P]",
        "input lens: i32[B]",
        "length N = lens[b]",
        "score = dot(q, k) / 24",
        "mask = causal",
        "normalize = softmax",
        "output o: bf16[B, M, G, 512]",
    ]
    text = spec(lines, target="cuda.sm_90a").partition("schedule")[0]
    schedule = schedule_for(resolve_text(text), "spec", "cuda.sm_90a")
    (module,) = modules_of(f"{text}\n{schedule}")
    made = subject_of(module)
    for number in range(len(made.configs)):
        dims = {"B": 3, "M": 2, "G": 40, "N": 1500, "R": 100}
        assert_within_bound(made, Case(dims=dims, seed=number, logits="rising", config=number))
