"""Bugs of host code that no single call shows are found without a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from pathlib import Path

import pytest

from attnc.build import digest
from attnc.target.files import render_files
from attnc.target.support import standalone, with_headers
from attnc.verify.calls import Event, call_violations, find_heap, launches_agree
from attnc.verify.subject import Subject, subject_of
from tests.plans import module_of
from tests.verify.judging import spec, subject_of_text

#: The layouts of three tensors, as the key of a prepared call has them.
Q, K, V = (f"{x}.shape, {x}.stride(), {x}.dtype, {x}.device," for x in "qkv")
#: What is taken out of a module's host code, what is put there, and what is then said.
BUGS = {
    "triton": (
        (Q, Q.replace("q.dtype, ", ""), "another type of q"),
        (K, K.replace("k.stride(), ", ""), "strides of k: after another call"),
        (
            "return (key, layout(tensors[1])) if call.first_input > 1 else key",
            "return key",
            "dlse: after another call",
        ),
        ("_cuda_getCurrentRawStream(index)", "_cuda_getDevice()", "not launched on the caller's stream"),
        (V, V.replace("v.shape, ", ""), "another size N of v is taken"),
        ('sizes.check_one(tensor, x, like, f"out {tensor.name}")', "pass", "another type of o is taken"),
        ("if bits % 16 or not starts", "if not starts", "for aligned tensors is launched on others"),
        ("layouts_of_3((tensors[0], ", "layouts_of_3((inputs[0], ", "strides of do: after another call"),
        (
            "require_contiguous_rows(tensor.name, x)",
            "pass",
            "another order of axes of q is taken",
        ),
        ('reject_overlapping_output(f"out {tensor.name}", x)', "pass", "another memory of o is taken"),
    ),
    "cuda.sm_80": (
        ("_cuda_getCurrentRawStream(index)", "_cuda_getDevice()", "not launched on the caller's stream"),
        (
            "return (key, layout(tensors[1])) if call.first_input > 1 else key",
            "return key",
            "dlse: after another call",
        ),
        (
            "self.starts.get(aligned)",
            "next(iter(self.starts.values()), None)",
            "alignment of q: causal_gqa_forward for aligned rows is launched on others",
        ),
        ("aligned and rows_aligned)", "aligned)", "for aligned rows is launched on others"),
    ),
}


def changed(target: str, old: str, new: str, spec: str = "causal_gqa") -> Subject:
    """A module with another text wherever its host code has this one; of the layouts, in those of three."""
    planned = module_of(spec, target)
    files = render_files(planned, path=f"{spec}.attn", sha256=digest(planned.variant.source))
    name = f"{planned.variant.name}.py"
    text = standalone(files[name])
    assert old in text
    start = text.index("def layouts_of_3(") if old in (Q, K, V) else 0
    text = text[:start] + text[start:].replace(old, new, 1 if start else -1)
    headed = {file: with_headers(source) for file, source in files.items()}
    return subject_of(planned, {**headed, name: text})


@pytest.mark.one_in(6)
@pytest.mark.parametrize("target", BUGS)
@pytest.mark.parametrize("name", ["causal_gqa", "decode", "varlen", "bias"])
def test_modules_launch_the_same_after_any_call(target: str, name: str) -> None:
    assert list(call_violations(subject_of(module_of(name, target)))) == []


def test_a_module_that_is_loaded_again_is_judged_as_at_first() -> None:
    """Equal files are one module, which launches on the CPU already."""
    target, bug = "cuda.sm_80", BUGS["cuda.sm_80"][2]
    changed(target, *bug[:2])
    assert any(bug[2] in message for message in call_violations(changed(target, *bug[:2])))


def test_a_length_that_only_a_part_of_the_tensor_shares_is_any_length() -> None:
    """v is not handed over where it is columns of k, so that nothing says how many rows k has."""
    lines = (
        "input q: f16[B, M, H, 16]",
        "input k: f16[B, N, H, 16]",
        "input v: f16[B, N, H, 16] via prefix(k)",
        *("score = dot(q, k)", "normalize = softmax", "output o: f16[B, M, H, 16]"),
    )
    assert list(call_violations(subject_of_text(spec(lines)))) == []


def test_launches_of_pages_are_noted_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are kernels, which a launch on the streams that are said to be current would end."""
    on_gpu = 'if pages is not None and place.device.type == "cuda" else None'
    everywhere = changed("triton", on_gpu, "if pages is not None else None", "paged_training")
    noted: set[object] = set()

    def agree(fresh: Sequence[Event], warm: Sequence[Event], *held: Set[int]) -> bool:
        noted.update(event[1] for event in warm)
        return launches_agree(fresh, warm, *held)

    monkeypatch.setattr("attnc.verify.calls.launches_agree", agree)
    assert list(call_violations(everywhere)) == []
    assert noted >= {"gather_pages", "sum_pages"}


def test_torch_may_ask_whether_it_was_given_a_device_while_launches_are_noted() -> None:
    """`torch.cuda.get_device_properties` does, which host code calls on a GPU."""
    begin = "        if len(self.prepared) >= _MOST_CALLS:\n"
    asking = f"        assert not isinstance(inputs[0].device, torch.cuda.device)\n{begin}"
    assert list(call_violations(changed("cuda.sm_80", begin, asking))) == []


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("target", "old", "new", "said"), [(target, *bug) for target, bugs in BUGS.items() for bug in bugs]
)
def test_bugs_of_host_code_are_found(target: str, old: str, new: str, said: str) -> None:
    found = list(call_violations(changed(target, old, new)))
    assert any(said in message for message in found), found


#: Addresses.
FIRST, SECOND = (1 << 40) + 64, (1 << 40) + 1024


@pytest.mark.parametrize(
    ("held_then", "held_now", "agree"),
    [
        (set(), set(), True),
        (set(), {FIRST}, True),
        ({FIRST}, {FIRST}, False),
        (set(), {SECOND}, False),
    ],
)
def test_what_a_call_makes_for_itself_may_lie_anywhere(
    held_then: set[int], held_now: set[int], *, agree: bool
) -> None:
    """Also where a tensor that is held came to lie since."""
    fresh, warm = ([("quick", "forward", (1,), 7, address)] for address in (FIRST, SECOND))
    assert launches_agree(fresh, warm, held_then, held_now) == agree
    assert not launches_agree(fresh, [*warm, *warm], held_then, held_now)


def test_a_heap_below_4_gib_has_addresses_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Python at a fixed place; numbers outside of it are sizes and strides."""
    monkeypatch.setattr("attnc.verify.calls.find_heap", lambda: range(1 << 29, 1 << 30))
    fresh, warm = ([("quick", "forward", (1,), 7, (1 << 29) + offset)] for offset in (64, 1024))
    assert launches_agree(fresh, warm, set(), set())
    assert not launches_agree([("quick", 64)], [("quick", 128)], set(), set())


def test_a_heap_is_found_where_the_system_says_it() -> None:
    at = re.search(r"^(\w+)-(\w+) .*\[heap\]$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    assert at is not None
    found = find_heap()  # which may have grown since
    assert (found.start, found.stop >= int(at[2], 16)) == (int(at[1], 16), True)


def test_the_heap_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of what lies in memory is long, and every number of every launch is asked for."""
    find_heap()
    monkeypatch.setattr(Path, "read_text", None)
    assert find_heap()
