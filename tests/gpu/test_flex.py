"""FlexAttention's programs on a GPU: every mod of the table as torch computes it, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnc.flex import flex_attention, tape
from attnc.flex.tape import NOTHING
from tests.flex.mods import CASES, Case, Setting
from tests.flex.oracle import cotangent, gradients, torch_flex
from tests.flex.roundings import Dense, allowed

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
