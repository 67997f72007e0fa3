"""Cases in which offsets pass 32 bits: along every axis of every tensor, and that kernels which count in 32
bits fail them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnc.build import digest
from attnc.target.files import render_files
from attnc.verify import search
from attnc.verify.case import Case, TensorLayout
from attnc.verify.check import check
from attnc.verify.cover import Coverage
from attnc.verify.far import AXES
from attnc.verify.problem import Arena, build
from attnc.verify.search import Step
from attnc.verify.subject import Subject, subject_of
from tests.plans import module_of

#: Tensors that are stretched along each axis.
STRETCHED = {
    "causal_gqa": {
        "batch": "q k v o lse do dlse",
        "heads": "q k v o lse do dlse",
        "queries": "q o lse do dlse",
        "keys": "k v",
    },
    "bias": {
        "batch": "q k v key_bias o do",
        "heads": "q k v pair o do",
        "queries": "q pair o do",
        "keys": "k v pair key_bias",
    },
    "paged_decode": {
        "batch": "q k v block_table kv_len o lse",
        "heads": "q k v o lse",
        "queries": "q o lse k v",  # pages are stretched wherever there are three
        "keys": "k v",
    },
}


@pytest.mark.parametrize("spec", sorted(STRETCHED))
def test_every_tensor_is_stretched_along_every_axis(spec: str) -> None:
    space = subject_of(module_of(spec)).space
    assert set(space.far_cases) == set(AXES)
    for axes, case in space.far_cases.items():
        assert set(STRETCHED[spec][axes].split()) <= set(case.layouts), axes
        problem = build(space.attention, case)
        for name in case.layouts.keys() - {"do", "dlse"}:
            tensor = {**problem.inputs, **problem.outputs}[name]
            assert isinstance(tensor, torch.Tensor)
            last = [(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
            assert max(last) >= 2**31 > max(tensor.stride()), (axes, name)


@pytest.mark.parametrize("spec", ["causal_gqa", "bias", "gated", "wide"])
def test_a_case_knows_that_it_takes_gigabytes(spec: str) -> None:
    """Also where many elements lie between two rows already, so that gaps are small."""
    space = subject_of(module_of(spec)).space
    for axes, case in space.far_cases.items():
        for name, layout in case.layouts.items():
            assert replace(case, layouts={name: layout}).is_far, (axes, name)
    assert not Case(dims={}, layouts={"q": TensorLayout(order=(0, 1), gaps=(20, 8), step=2)}).is_far


def test_coverage_has_them() -> None:
    coverage = Coverage(subject_of(module_of("causal_gqa")).space)
    boundaries = {b.axes: b for b in coverage.space.boundaries if b.axes in AXES}
    assert boundaries.keys() == set(AXES)
    for axes, case in coverage.space.far_cases.items():
        assert (boundaries[axes], 2**31) not in coverage.points
        coverage.note(case)
        assert (boundaries[axes], 2**31) in coverage.points


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("anchor", "axes"),
    [
        ("O += b.to(tl.int64)", "batch"),
        ("Q += b.to(tl.int64) * stride_qb + h.to(tl.int64)", "heads"),
        ("lse_rows + q_idx.to(tl.int64)", "queries"),
        ("V += b.to(tl.int64) * stride_vb + h_kv.to(tl.int64)", "heads"),
    ],
)
def test_a_kernel_that_counts_in_32_bits_is_wrong(anchor: str, axes: str) -> None:
    module = module_of("causal_gqa", variant="bf16_d64")
    source = module.variant.source
    files = render_files(module, path="causal_gqa.attn", sha256=digest(source))
    text = files["bf16_d64.py"]
    assert anchor in text
    narrow = anchor[: anchor.rindex(".to(tl.int64)")]
    subject = subject_of(module, text.replace(anchor, narrow, 1))
    assert not check(subject, subject.space.far_cases[axes]).ok


def test_autograd_counts_changes_of_each_tensor_of_an_arena() -> None:
    """A gradient that is placed later must not look like a change of the inputs that were kept."""
    arena = Arena()
    q, do = (arena.take((2, 8), (1 << 20, 1), 0, torch.bfloat16, "meta") for _ in range(2))
    before = q._version
    do.zero_()
    assert q._version == before


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "triton") for name in ("causal_gqa", "gated", "varlen", "kv8_decode", "local_sink")),
        ("selected_blocks", "triton"),
        ("selected_rank", "cuda.sm_90a"),  # 16 heads, so that rows of one tensor reach those of another
    ],
)
def test_tensors_of_an_arena_share_no_byte(name: str, target: str) -> None:
    """On a GPU they lie in the same gigabytes; without memory their places are the same."""
    space = subject_of(module_of(name, target)).space
    for case in space.far_cases.values():
        problem = build(space.attention, case, device="meta")
        seen: dict[int, set[int]] = {}
        for value in (*problem.inputs.values(), *problem.outputs.values()):
            if isinstance(value, torch.Tensor) and value.numel():
                bytes_of = places(value)
                met = seen.setdefault(value.untyped_storage()._cdata, set())
                assert len(bytes_of) == value.numel() * value.element_size()
                assert not met & bytes_of
                met |= bytes_of


def places(tensor: torch.Tensor) -> set[int]:
    """The bytes of its storage that a tensor's elements take."""
    found = torch.tensor(tensor.storage_offset())
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = found[..., None] + torch.arange(length) * stride
    starts = (found.reshape(-1, 1) * tensor.element_size() + torch.arange(tensor.element_size())).reshape(-1)
    return set(starts.tolist())


def test_a_far_case_without_room_is_left_out_and_another_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small or full GPU says nothing of a kernel; one that asks for too much in other cases is wrong."""
    subject = replace(subject_of(module_of("full")), gradients=None)

    def run_out(*given: object) -> None:
        raise torch.OutOfMemoryError("no room for 8 GiB")

    monkeypatch.setattr(Subject, "run", run_out)
    far = subject.space.far_cases["heads"]
    verdict = check(subject, far)
    assert verdict.ok
    assert verdict.is_left_out
    assert "8 GiB" in verdict.message
    assert not check(subject, replace(far, layouts={})).ok
    monkeypatch.setattr("attnc.verify.check.is_crowded", lambda device: True)
    assert check(subject, far).is_left_out
    with pytest.raises(torch.OutOfMemoryError):
        check(subject, replace(far, layouts={}))
    monkeypatch.undo()
    monkeypatch.setattr(Subject, "run", run_out)
    steps = [Step(case=case, fills=("nan",), is_held=False) for case in (far, replace(far, layouts={}))]
    monkeypatch.setattr(search, "list_steps", lambda trial, count, fills: steps)
    report = search.run(search.AttentionTrial(subject))
    assert (report.examples, report.left_out, len(report.failures)) == (1, 1, 1)
    assert report.lack.endswith("no room for 8 GiB")
