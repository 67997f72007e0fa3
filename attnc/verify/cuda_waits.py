"""Instructions that wait, or order memory, in the device functions that are named after them.

The simulator has functions of its own in the place of these, and on a GPU what they wait for is mostly there
anyway. So no run shows that one of them has lost its instruction, and the text is read instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from attnc.runtime.loader import program_of
from attnc.verify.cuda_offsets import list_tokens
from attnc.verify.subject import Subject

#: What each function executes, whatever its arguments are (PTX ISA, "Data Movement and Conversion
#: Instructions", "Parallel Synchronization and Communication Instructions", "Asynchronous Warpgroup Level
#: Matrix Instructions").
INSTRUCTIONS: Mapping[str, tuple[str, ...]] = {
    "commit_copies": ("cp.async.commit_group",),
    "wait_copies": ("cp.async.wait_group",),
    "copies_arrive": ("cp.async.mbarrier.arrive.noinc",),
    "mbarrier_fence": ("fence.mbarrier_init.release.cluster", "fence.proxy.async"),
    "mbarrier_arrive": ("mbarrier.arrive",),
    "mbarrier_arrive_if": ("mbarrier.arrive",),
    "mbarrier_expect": ("mbarrier.arrive.expect_tx",),
    "mbarrier_wait": ("mbarrier.try_wait.parity",),
    "cluster_wait": ("mbarrier.try_wait.parity.acquire.cluster",),
    "cluster_sync": ("barrier.cluster.arrive.release", "barrier.cluster.wait.acquire"),
    "tma_commit": ("cp.async.bulk.commit_group",),
    "tma_wait": ("cp.async.bulk.wait_group 0",),
    "tma_wait_read": ("cp.async.bulk.wait_group.read 0",),
    "proxy_fence": ("fence.proxy.async.shared::cta",),
    "proxy_fence_all": ("fence.proxy.async;",),
    "wgmma_fence": ("wgmma.fence.sync.aligned",),
    "wgmma_commit": ("wgmma.commit_group.sync.aligned",),
    "wgmma_wait": ("wgmma.wait_group.sync.aligned",),
    "await_turn": ("ld.acquire.gpu",),
    "pass_turn": ("st.release.gpu",),
    "named_barrier_sync": ("bar.sync",),
    "named_barrier_meet": ("barrier.sync",),
    "named_barrier_arrive": ("bar.arrive",),
    "wait_for_launch": ("griddepcontrol.wait",),
}
#: What a statement follows that is executed whenever its function is.
_BEFORE = ("{", "}", ";", "do")


def wait_violations(subject: Subject) -> Iterator[str]:
    """Yields `waits: ...` for each function of a module's CUDA kernels that has lost its instruction."""
    if hasattr(getattr(subject.module, "CALL", None), "program"):
        program = program_of(subject.module)
        for text in dict.fromkeys(map(program.source, program.kernels)):
            yield from (f"waits: {line}" for line in missing_instructions(text))


@lru_cache(maxsize=64)
def missing_instructions(text: str) -> tuple[str, ...]:
    """Lists the functions in a kernel's text that do not execute their instruction in every call."""
    tokens, found = list_tokens(text), dict[str, None]()
    for at, name in enumerate(tokens):
        if name in INSTRUCTIONS and (body := body_at(tokens, at)) is not None:
            executed = "".join(_statements(body))
            for instruction in INSTRUCTIONS[name]:
                if instruction not in executed:
                    found[f"{name} without {instruction.rstrip(';')}"] = None
    return tuple(found)


def body_at(tokens: Sequence[str], at: int) -> Sequence[str] | None:
    """Returns the tokens between the braces of a function whose name stands at a place; None for a call."""
    end = _end_of(tokens, at + 1, "(", ")")
    if end is None or tokens[end : end + 1] != ["{"]:
        return None
    stop = _end_of(tokens, end, "{", "}")
    return None if stop is None else tokens[end : stop - 1]


def _end_of(tokens: Sequence[str], at: int, opening: str, closing: str) -> int | None:
    if tokens[at : at + 1] != [opening]:
        return None
    depth = 0
    for place in range(at, len(tokens)):
        depth += {opening: 1, closing: -1}.get(tokens[place], 0)
        if not depth:
            return place + 1
    return None


def _statements(body: Sequence[str]) -> Iterator[str]:
    depth = 0
    for at, token in enumerate(body):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if token == "asm" and depth == 1 and body[at - 1] in _BEFORE:
            start = body.index("(", at) + 1
            yield from _strings(body, start)


def _strings(tokens: Sequence[str], at: int) -> Iterator[str]:
    while tokens[at].startswith('"'):
        yield tokens[at][1:-1]
        at += 1
