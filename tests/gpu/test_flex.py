"""FlexAttention's programs on a GPU: every mod of the table as torch computes it, with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch._inductor.ir import get_stride_order
from torch.nn.attention.flex_attention import BlockMask

from attnc.flex import blocks, flex_attention, tape
from attnc.flex.tape import NOTHING
from tests.flex.mods import CASES, Case, Setting
from tests.flex.oracle import compare_strides, cotangent, gradients, torch_flex
from tests.flex.random_mods import drawn
from tests.flex.roundings import Dense, allowed
from tests.flex.test_random_mods import check

SAID = [case for case in CASES if not case.refused]


@pytest.mark.parametrize(
    ("target", "dtype"),
    [("triton", torch.bfloat16), ("triton", torch.float32), ("cuda.sm_90a", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("case", SAID, ids=lambda case: case.name)
def test_mods_compute_what_torch_computes(case: Case, target: str, dtype: torch.dtype) -> None:
    """Against torch's eager function in float64 on the same inputs: o and the gradients of q, k and v within
    some roundings of the largest, gradients of learned tensors within what those of their terms add up to.
    A score s in float32 is off by roundings of s, which is what exp(s) is off by, relative to itself.
    """
    if target != "triton" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    setting = Setting(S=320, device="cuda")
    q, k, v = (
        setting.floats(setting.B, setting.H, setting.S, 64, dtype=dtype).requires_grad_() for _ in range(3)
    )
    score_mod, mask_mod = case.make(setting)
    leaves = (q, k, v, *setting.learned)
    o = flex_attention(q, k, v, score_mod, mask_mod=mask_mod, target=target)
    expected = torch_flex(q, k, v, score_mod, mask_mod, learned=bool(setting.learned))
    found = (o, *gradients(o, leaves))
    right = (expected, *gradients(expected, leaves, like=o))
    roundings = (8 if dtype == torch.bfloat16 else 64) * torch.finfo(dtype).eps
    largest = Dense(q, k, v, score_mod, mask_mod).largest_score()
    roundings += 2 * torch.finfo(torch.float32).eps * largest
    pairs = list(zip(found, right, strict=True))
    for ours, exact in pairs[:4]:
        assert ours is not None
        exact = torch.zeros_like(ours) if exact is None else exact
        scale = exact.double().abs().max()
        error = (ours.double() - exact.double()).abs().max()
        assert error <= roundings * scale + 1e-6
    bounds = allowed(q, k, v, score_mod, mask_mod, cotangent(o), setting.learned)
    for (ours, exact), bound in zip(pairs[4:], bounds, strict=True):
        assert ours is not None
        exact = torch.zeros_like(ours) if exact is None else exact
        # The result itself is rounded to the type of the tensor.
        own = torch.finfo(ours.dtype).eps * exact.double().abs()
        excess = (ours.double() - exact.double()).abs() - bound - own
        assert excess.max() <= 0, f"{excess.max():.3g} beyond {bound.flatten()[excess.argmax()]:.3g}"


def test_lengths_and_data_compile_nothing_on_a_gpu() -> None:
    """The second length finds its kernel: no file is added to Triton's cache."""
    from attnc.flex import programs

    for length in (256, 300, 1000):
        document = torch.arange(length, device="cuda", dtype=torch.int32) // 100
        q = torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16)

        def mask(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, d: torch.Tensor = document
        ) -> torch.Tensor:
            return d[q] == d[kv]

        known = len(programs._PROGRAMS)
        flex_attention(q, q, q, mask_mod=mask)
        assert length == 256 or len(programs._PROGRAMS) == known


@pytest.mark.filterwarnings(
    "ignore:The CUDA Graph is empty:UserWarning"
)  # one that Inductor makes to begin with
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_has_one_graph(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor, and CUDA graphs: the same bits as outside of it, with gradients, at other lengths too. Graphs
    are captured with what is right for any data: the kernel for documents that need not ascend.
    """
    bias = torch.randn(4, device="cuda", requires_grad=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        def biased(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return score + bias[h] * (q - kv)

        def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return (document[q] == document[kv]) & ~(q < kv)

        o: torch.Tensor = flex_attention(q, k, v, biased, mask_mod=mask)
        return o

    inside = torch.compile(attend, fullgraph=True, mode=mode)
    for length in (256, 300, 448):
        document = torch.arange(length, device="cuda", dtype=torch.int32) // 100
        # apart, as Inductor adds gradients of one tensor in float32
        q, k, v = (
            torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        leaves = (q, k, v, bias)

        def computed(function: Any, leaves: Any = leaves, document: torch.Tensor = document) -> list[Any]:
            o = function(*leaves[:3], document)
            return [o.detach().clone(), *(x.clone() for x in gradients(o, leaves) if x is not None)]

        right = [computed(attend)]
        if mode == "reduce-overhead":
            with monkeypatch.context() as unknown:
                unknown.setattr(tape, "facts_of", lambda tensor: NOTHING)
                right.append(computed(attend))
        for _ in range(3):  # as it is, to be captured, and replayed
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch has no types here
            found = computed(inside)
            assert len(found) == 5
            assert any(all(map(torch.equal, found, expected)) for expected in right)


# --- what else torch's function does ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_random_mods_compute_what_torch_computes(seed: int, dtype: torch.dtype) -> None:
    """On Triton's kernels in float32, and on those that a call gets in bfloat16."""
    draw = drawn(seed, "cuda", dtype)
    print(draw)
    check(draw, 1e-3 if dtype == torch.float32 else 4e-2)


ORDERS = [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)]


@pytest.mark.parametrize("shape", [(2, 1, 128, 16), (4, 2, 64, 16), (2, 5, 128, 16)])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_results_are_laid_out_as_queries(
    order: tuple[int, ...], shape: tuple[int, ...], is_compiled: bool
) -> None:
    q, k, v = (torch.randn(shape, device="cuda").permute(order).requires_grad_() for _ in range(3))
    attend = torch.compile(flex_attention, fullgraph=True) if is_compiled else flex_attention
    o = attend(q, k, v)
    compare_strides(o, q)  # by the rule of this torch, which from 2.11 on keeps rows whole
    o.backward(torch.randn_like(o))
    for leaf in (q, k, v):
        assert leaf.grad is not None
        if 1 not in leaf.shape:  # autograd leaves the strides of such axes open
            assert get_stride_order(leaf.grad.stride()) == get_stride_order(leaf.stride())


def test_options_under_dynamic_shapes() -> None:
    q = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    inside = torch.compile(flex_attention, fullgraph=True, dynamic=True)
    for options in ({"BLOCK_M": 64, "BLOCK_N": 64}, {"BLOCK_M": 128, "BLOCK_N": 32, "USE_TMA": True}):
        found = inside(q, q, q, kernel_options=options)
        torch.testing.assert_close(found, flex_attention(q, q, q), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_keys_of_8_bits(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    k, v = k.to(dtype), v.to(dtype)

    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    found = flex_attention(q, k, v, mask_mod=causal)
    right = torch_flex(q.float(), k.float(), v.float(), None, causal)
    torch.testing.assert_close(found.double(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_float64_has_exact_gradients(backend: str) -> None:
    """torch's own function takes it, in a graph too."""
    q, k, v = (
        torch.randn(2, 2, 11, 4, device="cuda", dtype=torch.float64, requires_grad=True) for _ in range(3)
    )

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(q >= kv, torch.sin(score) * torch.tan(b + 0.1), -torch.inf)

    inside = torch.compile(flex_attention, backend=backend, fullgraph=True)
    with torch._functorch.config.patch(donated_buffer=False):  # gradcheck goes back more than once
        assert torch.autograd.gradcheck(lambda q, k, v: inside(q, k, v, mod), (q, k, v))


def test_more_heads_than_a_grid_has_rows() -> None:
    q, k, v = (
        torch.randn(22720, 3, 64, 32, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    )
    o = torch.compile(flex_attention, fullgraph=True, dynamic=True)(q, k, v)
    o.backward(torch.ones_like(o))
    right = torch.nn.functional.scaled_dot_product_attention(q[-2:], k[-2:], v[-2:])
    torch.testing.assert_close(o[-2:], right, rtol=1e-2, atol=2e-3)
    assert q.grad is not None
    assert q.grad[-2:].isfinite().all()


def test_lists_of_blocks_in_a_captured_graph() -> None:
    """Nothing is looked at there: lists are tables."""
    q = torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16)
    listed = torch.rand(1, 4, 4, 4, device="cuda") < 0.6
    counts = listed.sum(-1).int()
    indices = torch.argsort(listed.int(), dim=-1, descending=True, stable=True).int()
    mask = BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=128, mask_mod=lambda b, h, q, kv: q - kv < 300
    )
    eager = flex_attention(q, q, q, block_mask=mask)
    fresh = BlockMask.from_kv_blocks(counts.clone(), indices.clone(), BLOCK_SIZE=128, mask_mod=mask.mask_mod)
    flex_attention(q, q, q, block_mask=mask)
    with monkeypatched_memory():
        flex_attention(q, q, q, block_mask=fresh)  # compiles what the graph needs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flex_attention(q, q, q, block_mask=fresh)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, eager)


@contextmanager
def monkeypatched_memory() -> Iterator[None]:
    """Lets no list be looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "remember", lambda tensors, what, look, unseen: unseen)
        yield
