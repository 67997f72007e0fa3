"""NaN and infinities in rows of k and v that no query keeps reach neither outputs nor gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from attnc.plan import ir
from attnc.verify.case import Case
from attnc.verify.gradient_properties import GradientRun, excluded_keys_have_no_gradient
from attnc.verify.rerun import FinishedRun, excluded_keys_are_invisible, may_exclude, poisoned_keys
from attnc.verify.subject import Subject, subject_of
from tests.targets import needs_gxx
from tests.verify.judging import modules_of, spec, subject_of_text

FIRST, END, VALID = "first: i32[B]", "end: i32[B]", "valid: bool[B, N]"
#: Masks with the inputs they read: edges on the left, on the right and on both sides, gaps.
MASKS = (
    ("kv_idx >= first[b]", (FIRST,)),
    ("causal and kv_idx >= first[b]", (FIRST,)),
    ("kv_idx < end[b]", (END,)),
    ("causal and kv_idx >= first[b] and kv_idx < end[b]", (FIRST, END)),
    ("valid[b, kv_idx]", (VALID,)),
    ("window(20, 0) and valid[b, kv_idx]", (VALID,)),
    ("(kv_idx < 3 or kv_idx >= first[b]) and causal", (FIRST,)),
)
TILES = "tile.q = 16, tile.kv = 16"
CASE = Case(dims={"B": 2, "M": 20, "N": 50, "H": 1}, seed=3)
DECODE = Case(dims={"B": 2, "M": 3, "N": 70, "Hkv": 2, "G": 2}, seed=4)


def lines(mask: str, inputs: tuple[str, ...], score: str = "dot(q, k)", grads: str = "q, k, v") -> list[str]:
    return [
        "input q: f32[B, H, M, 16]",
        "input k, v: f32[B, H, N, 16]",
        *(f"input {line}" for line in inputs),
        f"score = {score}",
        f"mask = {mask}",
        "normalize = softmax",
        "output o: f32[B, H, M, 16]",
        "output lse: f32[B, H, M]",
        *([f"grad {grads}"] if grads else []),
    ]


def judged(subject: Subject, case: Case) -> None:
    """The properties hold, and not for want of keys that they are about."""
    run = FinishedRun.of(subject, case)
    assert may_exclude(run.attention)
    assert isinstance(poisoned_keys(run.attention, run.inputs), dict)
    assert excluded_keys_are_invisible(run) is None
    if subject.gradients is not None:
        assert excluded_keys_have_no_gradient(GradientRun.of(subject, case)) is None


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("mask", "inputs"), MASKS)
def test_triton(mask: str, inputs: tuple[str, ...]) -> None:
    judged(subject_of_text(spec(lines(mask, inputs), TILES)), CASE)


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize(("mask", "inputs"), MASKS[3:4])
def test_cuda(mask: str, inputs: tuple[str, ...]) -> None:
    judged(subject_of_text(spec(lines(mask, inputs), f"{TILES}, warps = 1", target="cuda.sm_80")), CASE)


@pytest.mark.parametrize(("mask", "inputs"), [MASKS[3]])
def test_the_order_of_flash_attention_1(mask: str, inputs: tuple[str, ...]) -> None:
    judged(subject_of_text(spec(lines(mask, inputs), f"loops = [kv, q]\n  {TILES}")), CASE)


@needs_gxx
@pytest.mark.slow
def test_the_order_of_flash_attention_1_on_cuda() -> None:
    mask, inputs = MASKS[3]
    schedule = f"loops = [kv, q]\n  {TILES}, warps = 1"
    judged(subject_of_text(spec(lines(mask, inputs), schedule, target="cuda.sm_80")), CASE)


@pytest.mark.parametrize(
    "target", ["triton", pytest.param("cuda.sm_80", marks=[pytest.mark.slow, needs_gxx])]
)
def test_derivatives_that_read_the_score(target: str) -> None:
    """A slope of NaN would make a NaN of ds = 0; gradients of a bias are sums over ds."""
    mask, (first,) = MASKS[0]
    score = "softcap(dot(q, k), 5) + bias[h, q_idx, kv_idx]"
    made = lines(mask, (first, "bias: f32[H, M, N]"), score, "q, k, v, bias")
    warps = ", warps = 1" if target != "triton" else ""
    judged(subject_of_text(spec(made, TILES + warps, target=target)), CASE)


def decode(mask: str, inputs: tuple[str, ...], schedule: str, target: str, *, paged: bool) -> Subject:
    lines = [
        "input q: f32[B, M, Hkv * G, 16]",
        f"input k, v: f32[B, N, Hkv, 16]{' via paged(block_table, page = 16)' if paged else ''}",
        *(["input block_table: i32[B, P]", "input kv_len: i32[B]", "length N = kv_len[b]"] if paged else []),
        *(f"input {line}" for line in inputs),
        "score = dot(q, k)",
        f"mask = {mask}",
        "normalize = softmax",
        "output o: f32[B, M, Hkv * G, 16]",
        "output lse: f32[B, Hkv * G, M]",
    ]
    return subject_of_text(spec(lines, f"loops = [kv], pack = gqa\n  {TILES}, {schedule}", target=target))


#: Mask, inputs, and how the tiles of keys are shared out.
DECODES = (
    ("causal and kv_idx >= first[b]", (FIRST,), "split.kv = 3"),
    ("window(20, 0) and kv_idx >= first[b]", (FIRST,), "split.kv = 1"),
    ("causal and kv_idx < end[b]", (END,), "split.kv = 3"),
)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("mask", "inputs", "splits"), DECODES)
def test_decode(mask: str, inputs: tuple[str, ...], splits: str, paged: bool) -> None:
    case = replace(DECODE, dims={**DECODE.dims, **({"P": 5} if paged else {})})
    judged(decode(mask, inputs, splits, "triton", paged=paged), case)


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("split", ["q", "kv"])
@pytest.mark.parametrize(("mask", "inputs", "splits"), DECODES)
def test_decode_on_cuda(mask: str, inputs: tuple[str, ...], splits: str, split: str) -> None:
    schedule = f"{splits}, warps = 1, warp_split = {split}"
    judged(
        decode(mask, inputs, schedule, "cuda.sm_80", paged=split == "kv"),
        replace(DECODE, dims={**DECODE.dims, **({"P": 5} if split == "kv" else {})}),
    )


# -- it can fail ------------------------------------------------------------------------------------------


K = TypeVar("K", bound=ir.TileKernel)


def without_fills(module: ir.Module) -> ir.Module:
    """The module as if the plan had not seen the keys that no query keeps."""

    def plain(kernel: K) -> K:
        loops = tuple(replace(loop, zero_fill=False) for loop in kernel.regions.loops)
        regions = replace(kernel.regions, loops=loops)
        return replace(kernel, step=replace(kernel.step, kept=None), regions=regions)

    backward = module.backward
    assert backward is not None
    kernels = tuple(map(plain, backward.kernels))
    return replace(
        module,
        kernel=plain(module.kernel),
        backward=replace(backward, kernels=kernels),
    )


def test_kernels_that_leave_them_are_found() -> None:
    mask, inputs = MASKS[1]
    (module,) = modules_of(spec(lines(mask, inputs), TILES))
    subject = subject_of(without_fills(module))
    message = excluded_keys_are_invisible(FinishedRun.of(subject, CASE))
    assert message == "'o' depends on keys that no query keeps"
    assert "differs" in (excluded_keys_have_no_gradient(GradientRun.of(subject, CASE)) or "")


def test_a_plan_that_excludes_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, inputs = MASKS[0]
    subject = subject_of_text(spec(lines(mask, inputs), TILES))
    run = FinishedRun.of(subject, CASE)
    wrong = subject_of_text(spec(lines("kv_idx >= first[b] + 1", inputs), TILES)).variant.attention.mask
    monkeypatch.setattr("attnc.verify.rerun.kept_by_some", lambda mask: wrong)
    assert "no query keeps it, but one does" in (excluded_keys_are_invisible(run) or "")


def test_junk_is_put_where_the_keys_lie() -> None:
    mask, inputs = MASKS[0]
    run = FinishedRun.of(subject_of_text(spec(lines(mask, inputs), TILES)), CASE)
    poisoned = poisoned_keys(run.attention, run.inputs)
    assert isinstance(poisoned, dict)
    first = run.tensor("first")
    for b in range(2):
        for name in ("k", "v"):
            value: Any = poisoned[name]
            assert isinstance(value, torch.Tensor)
            finite = value[b, 0].isfinite()
            assert finite.all(1).equal(torch.arange(50) >= first[b])
            assert finite.any(1).equal(finite.all(1))
