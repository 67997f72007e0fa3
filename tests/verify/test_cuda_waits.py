"""Device functions that wait or order memory, and the instructions that they are named after."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from attnc.target.support import with_headers
from attnc.verify.cuda_waits import INSTRUCTIONS, missing_instructions, wait_violations
from attnc.verify.subject import subject_of
from tests.by_day import some_by_day
from tests.plans import module_of

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path for path in (ROOT / "generated").glob("*/cuda_*") if path.is_dir())


@cache
def headers() -> dict[str, str]:
    """Returns the headers of the support package, by name."""
    return {
        path.name: path.read_text(encoding="utf-8") for path in (ROOT / "attnc" / "support").glob("*.cuh")
    }


def header_of(name: str) -> str:
    """Returns the header that defines a function of this name."""
    (text,) = (text for text in headers().values() if re.search(rf"\b{name}\([^;]*\)\s*{{", text))
    return text


def definition(name: str) -> tuple[str, int]:
    """Returns a header, and where it defines the function."""
    text = header_of(name)
    found = re.search(rf"\b{name}\([^;{{]*\)\s*{{", text)
    assert found is not None
    return text, found.end()


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_each_is_looked_for_in_the_function_that_has_it(name: str) -> None:
    text, at = definition(name)
    assert missing_instructions(text) == ()
    said = [f"{name} without {instruction.rstrip(';')}" for instruction in INSTRUCTIONS[name]]
    assert list(missing_instructions(f"{text[:at]} }} void rest() {{ {text[at:]}")) == said


@pytest.mark.parametrize(
    "change",
    ["if (GROUPS > 0) {}", "if (GROUPS > 0) {{ {} }}", "for (int i = 0; i < GROUPS; ++i) {}", "; // {}"],
)
def test_a_condition_is_no_execution(change: str) -> None:
    statement = 'asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS) : "memory");'
    text = header_of("wait_copies")
    assert text.count(statement) == 1
    changed = text.replace(statement, change.format(statement) + "\n")
    assert missing_instructions(changed) == ("wait_copies without cp.async.wait_group",)


def test_one_of_two_fences_is_missed() -> None:
    text, at = definition("mbarrier_fence")
    statement = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
    place = text.index(statement, at)
    changed = text[:place] + text[place + len(statement) :]
    assert missing_instructions(changed) == ("mbarrier_fence without fence.proxy.async",)


def test_calls_and_declarations_are_no_definitions() -> None:
    text = "__device__ void wait_copies(); void f() { if (a) { wait_copies(); } wgmma_fence(); }"
    assert missing_instructions(text) == ()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("folder", some_by_day(FOLDERS, of=9))
def test_committed_kernels_have_kept_theirs(folder: Path) -> None:
    for path in sorted(folder.glob("*.cu"))[:3]:  # those of a spec differ in sizes
        assert missing_instructions(with_headers(path.read_text(encoding="utf-8"))) == (), path


def test_a_module_without_a_wait_breaks_a_rule() -> None:
    module = module_of("prefix_lm", "cuda.sm_80")
    name = f"{module.variant.kernels}.cu"
    source = (ROOT / "generated" / "prefix_lm" / "cuda_sm_80" / name).read_text(encoding="utf-8")
    text = with_headers(source)
    changed = text.replace('asm volatile("cp.async.commit_group;" ::: "memory");', "")
    assert changed != text
    assert list(wait_violations(subject_of(module, {name: text}))) == []
    assert list(wait_violations(subject_of(module, {name: changed}))) == [
        "waits: commit_copies without cp.async.commit_group"
    ]
    assert list(wait_violations(subject_of(module_of("prefix_lm", "triton")))) == []
