"""Kernels that start while the one before them runs, and what is said of one that does not wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnc.target.support import with_headers
from attnc.verify.early_launches import early_violations, find_early, list_early
from attnc.verify.subject import subject_of
from tests.by_day import some_by_day
from tests.plans import module_of

GENERATED = Path(__file__).parents[2] / "generated"
FOLDERS = sorted(GENERATED.glob("*/triton"))
KERNEL = """
@triton.jit
def _prefetch(table):
    tl.inline_asm_elementwise("prefetch.global.L2 [$1];", "=r,l", [table], tl.int32, False, 1)


@triton.jit
def _length(row):
    return tl.load(row)


@triton.jit
def kernel(Q, length_ptr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    tile = tl.program_id(0)
    if PDL:
        _prefetch(Q)
        tl.extra.cuda.gdc_wait()
    length = _length(length_ptr + tile)
"""
WAIT = "tl.extra.cuda.gdc_wait()"
CUDA = """
extern "C" __global__ void kernel(const Args args)
{
    const int* const row = args.row_ptr + blockIdx.x;
    wait_for_launch();
    const int length = *row + args.more_ptr[0];
}
"""
MISSING = "kernel does not wait for the kernel before it in every program"
LATE = "kernel touches memory before it waits for the kernel before it"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", ()),
        (WAIT, "pass", (MISSING,)),
        ("if PDL:", "if not PDL:", (MISSING,)),
        ("if PDL:", "if PDL and tile > 0:", (MISSING,)),
        (WAIT, f"if tile > 0:\n            {WAIT}", (MISSING,)),
        ("_prefetch(Q)", "_length(length_ptr)", (LATE,)),
        ("tile = tl.program_id(0)", "tile = tl.load(Q)", (LATE,)),
    ],
)
def test_kernels_for_triton(old: str, new: str, said: tuple[str, ...]) -> None:
    assert list_early(KERNEL.replace(old, new)) == said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", ""),
        ("wait_for_launch();", "", MISSING),
        ("wait_for_launch();", "if (blockIdx.x) wait_for_launch();", MISSING),
        ("wait_for_launch();", "if (blockIdx.x) { wait_for_launch(); }", MISSING),
        ("blockIdx.x;", "args.more_ptr[0];", LATE),
    ],
)
def test_cuda_kernels(old: str, new: str, said: str) -> None:
    assert find_early(CUDA.replace(old, new), "kernel") == said


@pytest.mark.one_in(2)
@pytest.mark.parametrize("folder", some_by_day(FOLDERS, of=9))
def test_committed_kernels_wait(folder: Path) -> None:
    for path in sorted(folder.glob("*.py")):
        assert list_early(path.read_text(encoding="utf-8")) == (), path


@pytest.mark.parametrize(
    ("spec", "target", "wait"),
    [
        ("paged_decode", "triton", "        tl.extra.cuda.gdc_wait()\n"),
        ("paged_decode", "cuda.sm_90a", "    wait_for_launch();"),
        ("kv8_blocks", "cuda.sm_90a", "    wait_for_launch();"),
    ],
)
def test_a_module_without_a_wait_breaks_a_rule(spec: str, target: str, wait: str) -> None:
    module = module_of(spec, target)
    folder = GENERATED / spec / target.replace(".", "_")
    suffix = ".py" if target == "triton" else ".cu"
    name = f"{module.variant.name if suffix == '.py' else module.variant.kernels}{suffix}"
    text = with_headers((folder / name).read_text(encoding="utf-8"))
    waits = text.count(wait)
    assert waits
    assert list(early_violations(subject_of(module, {name: text}, on_cpu=True))) == []
    found = early_violations(
        subject_of(module, {name: text.replace(wait, "        pass\n" * (suffix == ".py"))}, on_cpu=True)
    )
    assert len(list(found)) == waits
