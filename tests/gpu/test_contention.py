"""Memory that is kept busy beside a kernel."""

from __future__ import annotations

import torch

from attnc.verify.check import check
from attnc.verify.contention import crowd_of, crowding_memory
from attnc.verify.covering import covering_cases
from attnc.verify.subject import subject_of
from tests.plans import module_of


def test_copies_run_on_a_stream_of_their_own() -> None:
    to, content, stream = crowd_of(torch.cuda.current_device())
    content.fill_(7)
    torch.cuda.synchronize()
    with crowding_memory("cuda", is_crowded=False):
        assert not to.any()
    with crowding_memory("cuda"):
        torch.cuda.current_stream().wait_stream(stream)
        assert to.eq(7).all()
    to.zero_()


def test_kernels_are_right_beside_them() -> None:
    for target in ("triton", "cuda.sm_80"):
        subject = subject_of(module_of("causal_gqa", target))
        for case in list(covering_cases(subject.space, subject.limits(), 3)):
            verdict = check(subject, case, fills=("nan", "zero"))
            assert verdict.ok, verdict.message
