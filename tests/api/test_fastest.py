"""Whose kernels a call runs on where its caller does not say, on GPUs that are not here."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from attnc.api import fastest
from attnc.api.fastest import HOPPER, KINDS, NEEDS, SM80, TRITON, run_on, targets_of_call, targets_on
from attnc.support.by_target import Needs
from attnc.target.dispatch import needs_of
from tests.gpus import fake_gpu, tensor

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def targets(q: torch.Tensor, k: torch.Tensor | None = None, *, gradients: bool = False) -> tuple[str, ...]:
    k = q if k is None else k
    return targets_of_call("a_door", q, k, k, gradients=gradients)


# --- the ranking --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(75, (TRITON,)), (80, (TRITON,)), (89, (TRITON,)), (90, (HOPPER, TRITON)), (100, (TRITON,))],
)
def test_each_gpu_takes_its_own(
    capability: int, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(monkeypatch, capability)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is lost
        assert targets(tensor(2, 8, 4, 64)) == expected
        assert targets(tensor(2, 8, 4, 64, dtype=torch.float16), gradients=True) == expected


def test_the_cpu_interprets() -> None:
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    assert targets(q) == (TRITON,)
    assert {targets_on("a_door", -1, kind) for kind in KINDS} == {(TRITON,)}


@pytest.mark.parametrize("capability", [80, 90])
def test_f32_takes_what_is_faster_for_its_columns_and_gradients(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(monkeypatch, capability)
    narrow, wide = (tensor(2, 8, 4, width, dtype=torch.float32) for width in (64, 128))
    assert targets(narrow) == (TRITON,)
    assert targets(wide) == targets(narrow, wide) == (SM80, TRITON)
    assert targets(narrow, gradients=True) == (SM80, TRITON)


@pytest.mark.parametrize(("capability", "first"), [(80, ()), (90, (HOPPER,))])
def test_gradients_of_wide_heads_are_not_triton_s(
    capability: int, first: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(monkeypatch, capability)
    wide, narrow = tensor(2, 8, 4, 264), tensor(2, 8, 4, 256)
    assert targets(wide, gradients=True) == (*first, SM80, TRITON)
    assert targets(wide) == targets(narrow, gradients=True) == (*first, TRITON)


def speeds(name: str) -> dict[str, dict[str, float]]:
    cells = json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))["cells"]
    return {cell["name"]: {who: found["tflops"] for who, found in cell["results"].items()} for cell in cells}


def test_the_ranking_is_that_of_the_figures() -> None:
    """Geometric means over the cells that a row of it stands for."""

    def faster(name: str, ours: str, other: str, of: str = "") -> bool:
        product = 1.0
        for cell, found in speeds(name).items():
            product *= found[ours] / found[other] if of in cell else 1.0
        return product > 1

    assert faster("forward_hopper_h200", "attnc", "triton")
    assert faster("backward_hopper_h200", "attnc", "triton")
    assert faster("forward_cuda_h200", "triton", "attnc")
    assert faster("f32_forward_h200", "triton", "attnc", "d64")
    assert faster("f32_forward_h200", "attnc", "triton", "d128")
    assert faster("f32_backward_h200", "two_pass", "triton")


def test_a_warning_states_the_factor_of_the_figures() -> None:
    least, most = fastest._FACTORS
    ratios = [
        found["attnc"] / found["triton"]
        for name in ("forward_hopper_h200", "backward_hopper_h200")
        for found in speeds(name).values()
    ]
    assert least <= min(ratios) < least + 0.1
    assert most <= max(ratios) < most + 0.1


def test_what_targets_need_is_what_they_say() -> None:
    assert {target: Needs(*needs_of(target)) for target in NEEDS} == NEEDS


# --- what is lost -------------------------------------------------------------------------------------------


def test_a_missing_package_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, packages=["triton"])
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.warns(
        UserWarning, match="need cupy, which is not installed: pip install cupy-cuda12x"
    ) as said:
        targets(tensor(2, 8, 4, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert targets(tensor(2, 8, 4, 64)) == targets(tensor(2, 8, 4, 128)) == (TRITON,)
        assert targets_of_call("another_door", *[tensor(2, 8, 4, 64)] * 3) == (TRITON,)
    (warning,) = said
    assert warning.filename == __file__
    assert str(warning.message).startswith("a_door: kernels of cuda.sm_90a, 1.1x to 2.2x as fast here, need")


def test_another_gpu_says_nothing_of_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, 80, packages=["triton"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert targets(tensor(2, 8, 4, 128)) == (TRITON,)
        assert targets(tensor(2, 8, 4, 128, dtype=torch.float32)) == (TRITON,)


def test_without_triton_cuda_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, packages=["cupy"])
    assert targets(tensor(2, 8, 4, 64)) == (HOPPER, SM80)
    fake_gpu(monkeypatch, 80, packages=["cupy"])
    assert targets(tensor(2, 8, 4, 64)) == (SM80,)


@pytest.mark.parametrize(
    ("shape", "strides", "needs"),
    [
        ((1, 8, 2, 68), (), "rows of a multiple of 8 elements, which those of k are not"),
        ((1, 8, 2, 264), (), ""),  # what the widest rows are, the plan says
        ((1, 8, 2, 512), (), ""),
        ((1, 8, 2, 64), (1088, 136, 68, 1), "strides of a multiple of 16 bytes, which k has not"),
        ((1, 8, 2, 64), (1024, 128, 64, 1), ""),
        ((1, 8, 2, 64), (1024, 64, 512, 1), ""),  # rows of a head together
        ((1, 8, 2, 64), (1152, 144, 72, 1), ""),  # part of rows of 144 bytes
        ((1, 8, 2, 64), (3, 128, 64, 1), ""),  # of one sequence nobody asks where the next is
        ((4, 8, 2, 64), (0, 128, 64, 1), ""),  # sequences that share keys
    ],
)
def test_tensors_that_would_be_copied_stay_on_triton(
    shape: Any, strides: Any, needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(monkeypatch)
    q = tensor(*shape[:-1], 64)
    k = tensor(*shape, strides=strides)
    if not needs:
        assert targets(q, k) == (HOPPER, TRITON)
        return
    with pytest.warns(UserWarning, match=needs):
        assert targets(q, k) == (TRITON,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert targets(q, k) == (TRITON,)


# --- a choice of the caller's -------------------------------------------------------------------------------


def test_run_on_chooses_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    q = tensor(2, 8, 4, 64)
    run_on(TRITON)
    assert targets(q) == (TRITON,)
    run_on(SM80)
    assert targets(q) == (SM80, HOPPER, TRITON)
    run_on(None)
    assert targets(q) == (HOPPER, TRITON)
    with pytest.raises(ValueError, match=r"target: expected None or one of cuda\.sm_90a, .*, got 'hopper'"):
        run_on("hopper")


def test_a_choice_that_does_not_run_here_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, 80)
    run_on(HOPPER)
    assert targets(tensor(2, 8, 4, 64)) == (TRITON,)


def test_rows_of_8_bits_are_aligned_as_tma_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """72 bytes from one row to the next: they would be copied before every call."""
    fake_gpu(monkeypatch, 90)
    q = tensor(2, 8, 4, 72)
    assert targets(q, tensor(2, 8, 4, 72)) == (HOPPER, TRITON)
    assert targets(tensor(2, 8, 4, 64), tensor(2, 8, 4, 64, dtype=torch.float8_e4m3fn)) == (HOPPER, TRITON)
    with pytest.warns(match="strides of a multiple of 16 bytes, which k has not"):
        assert targets(q, tensor(2, 8, 4, 72, dtype=torch.float8_e4m3fn)) == (TRITON,)
