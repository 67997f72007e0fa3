"""Bugs of host code that no single call shows are found without a GPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from attnc.build import digest
from attnc.plan import ir
from attnc.target.files import render_files
from attnc.verify.calls import call_violations
from attnc.verify.subject import Subject
from attnc.verify.subjects import subject_of
from tests.plans import plans_of

SPECS = Path(__file__).parents[2] / "specs"
#: What is taken out of a module's host code, what is put there, and what is then said.
BUGS = {
    "triton": (
        ("q.shape, q.stride(), q.dtype, q.device,", "q.shape, q.stride(), q.device,", "another type of q"),
        ("k.shape, k.stride(), k.dtype,", "k.shape, k.dtype,", "strides of k: after another call"),
        ("_described(dlse),", "", "dlse: after another call"),
        ("_cuda_getCurrentRawStream(self.index)", "_cuda_getDevice()", "not launched on the caller's stream"),
        ("v.shape, v.stride(), v.dtype,", "v.stride(), v.dtype,", "another size N of v is taken"),
        ('_sizes("out o", o, torch.bfloat16, (B, M, H, 128), q)', "", "another type of o is taken"),
        ("aligned = bits % 16 == 0", "aligned = True", "for aligned tensors is launched on others"),
        ("do.shape, do.stride(), do.dtype,", "do.shape, do.dtype,", "strides of do: after another call"),
        ("_contiguous_rows(q=q, k=k, v=v)", "", "another order of axes of q is taken"),
        ("_apart(o=o, lse=lse)", "", "another memory of o is taken"),
    ),
    "cuda.sm_80": (
        ("_cuda_getCurrentRawStream(gpu.index)", "_cuda_getDevice()", "not launched on the caller's stream"),
        ("_described(dlse),", "", "dlse: after another call"),
        (
            "self.starts.get(aligned)",
            "next(iter(self.starts.values()), None)",
            "alignment of q: causal_gqa_forward for aligned rows is launched on others",
        ),
        ("aligned and self.rows_aligned", "aligned", "for aligned rows is launched on others"),
    ),
}


@cache
def module(target: str, name: str = "causal_gqa") -> ir.Module:
    modules = plans_of(SPECS / f"{name}.attn").modules
    return next(made for made in modules if made.target == target)


def changed(target: str, old: str, new: str) -> Subject:
    """A module with another text in the first such place of its host code."""
    planned = module(target)
    files = render_files(planned, path="causal_gqa.attn", sha256=digest(planned.variant.source))
    name = f"{planned.variant.name}.py"
    text = files[name]
    assert old in text
    text = text.replace(old, new, 1)
    return subject_of(planned, {name: text})


@pytest.mark.parametrize("target", BUGS)
@pytest.mark.parametrize("name", ["causal_gqa", "decode", "varlen", "bias"])
def test_modules_launch_the_same_after_any_call(target: str, name: str) -> None:
    assert list(call_violations(subject_of(module(target, name)))) == []


def test_torch_may_ask_whether_it_was_given_a_device_while_launches_are_noted() -> None:
    """`torch.cuda.get_device_properties` does, which host code calls on a GPU."""
    begin = "    if len(_CALLS) >= 1024:\n"
    asking = f"    assert not isinstance(q.device, torch.cuda.device)\n{begin}"
    assert list(call_violations(changed("cuda.sm_80", begin, asking))) == []


@pytest.mark.parametrize(
    ("target", "old", "new", "said"), [(target, *bug) for target, bugs in BUGS.items() for bug in bugs]
)
def test_bugs_of_host_code_are_found(target: str, old: str, new: str, said: str) -> None:
    found = list(call_violations(changed(target, old, new)))
    assert any(said in message for message in found), found
