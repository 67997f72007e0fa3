"""Records go to a new text where a GPU could not tell it from the old one, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnc.runtime import nvrtc
from attnc.runtime.nvrtc import Cubin, nvrtc_version
from attnc.verify import carry
from attnc.verify.carry import (
    Comparison,
    adopt_carried,
    carry_records,
    compare_declarations,
    compare_modules,
    is_same_program,
)
from attnc.verify.record import Record, Records, Sanitized, hash_of

NAME = "tiny/cuda_sm_80/d64.py"
MODULE = '''"""Documented."""

from typing import NamedTuple

from ..._support.binaries import Compiled, Program


class Config(NamedTuple):
    """Sizes."""

    BLOCK_M: int
    WARPS: int
    shared: int
    STAGES: int = 2


CONFIGS = (
    Config(64, 4, 128),
)


class Call:
    program = Program(__file__, (Compiled("tiny", "d64.cu", CONFIGS),), None)


CALL = Call
FILES = dict(
    file="d64",
)
GRID = "cdiv(M, BLOCK_M)"
'''
KERNEL = """#include "part.cuh"
extern "C" __global__ void tiny(float* out, int rows)
{
    for (int row = threadIdx.x; row < rows; row += BLOCK_M)
        out[row] = doubled(out[row]) * STAGES;
}
"""
HEADER = "__device__ float doubled(float x) { return 2.0f * x; }\n"


def write(folder: Path, changes: Mapping[str, tuple[str, str]] | None = None) -> Path:
    """Writes a module, its kernel and a header; changes: of their texts, by name."""
    texts = {NAME: MODULE, "tiny/cuda_sm_80/d64.cu": KERNEL, "_support/part.cuh": HEADER}
    for path, text in texts.items():
        for old, new in [(changes or {}).get(Path(path).name, ("", ""))]:
            assert old in text
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace(old, new) if old else text, encoding="utf-8")
    return folder


def recorded(folder: Path) -> Records:
    sha256 = hash_of(folder / NAME)
    toolchain = f"nvrtc {nvrtc_version()}"
    record = Record(sha256=sha256, device="NVIDIA H200", toolchain=toolchain, cases=3, worst=0.5, where="")
    seen = Sanitized(sha256=sha256, device="NVIDIA H200", tool="t", launches=7)
    return Records(verified={NAME: record}, sanitized={NAME: seen})


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("d64.cu", ("rows", "length")),
        ("d64.cu", ("threadIdx.x; row < rows", "threadIdx.x; !(row >= rows)")),
        ("part.cuh", ("2.0f * x", "x * 2.0f")),
    ],
)
def test_a_record_is_carried_to_a_text_with_the_same_machine_code(
    tmp_path: Path, file: str, change: tuple[str, str]
) -> None:
    before, after = write(tmp_path / "before"), write(tmp_path / "after", {file: change})
    known = recorded(before)
    assert hash_of(after / NAME) != hash_of(before / NAME)
    carried = carry_records(known, before, after)
    new = hash_of(after / NAME)
    assert carried.verified == {NAME: replace(known.verified[NAME], sha256=new)}
    assert carried.sanitized == {NAME: replace(known.sanitized[NAME], sha256=new)}


@pytest.mark.parametrize(("name", "compiled"), [("twice", 0), ("two_times", 4)])
def test_machine_code_is_made_only_where_ptx_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, compiled: int
) -> None:
    """A function that is not inlined has its name in PTX; both kernels have two texts."""

    def write_calling(folder: str, name: str, variable: str) -> Path:
        text = f"__noinline__ __device__ float {name}(float {variable}) {{ return 2.0f * {variable}; }}\n"
        calling = f"{text}{HEADER.replace('2.0f * x', f'{name}(x)')}"
        return write(tmp_path / folder, {"part.cuh": (HEADER, calling)})

    before, after = write_calling("before", "twice", "x"), write_calling("after", name, "value")
    sources = list[str]()

    def compile_cubin(source: str, options: Sequence[str]) -> Cubin:
        sources.append(source)
        return nvrtc.compile_cubin(source, options)

    monkeypatch.setattr(carry, "compile_cubin", compile_cubin)
    known = recorded(before)
    assert carry_records(known, before, after).verified[NAME].sha256 == hash_of(after / NAME)
    assert len(sources) == compiled


TRITON = '''"""A module."""


@triton.jit
def step(x, N):
    """One tile."""
    # a comment
    x += 1 * BLOCK_N
    return tl.where(x < N, x, 0.0)


CALL = TritonAttention(name="tiny", operator="tiny_1234", launches=(step,))


def tiny(q: torch.Tensor, seed: float) -> torch.Tensor:
    return CALL(q, seed)
'''


@pytest.mark.parametrize(
    ("change", "is_carried"),
    [
        (('"""One tile."""', '"""One tile of keys."""'), True),
        (("# a comment", "# another"), True),
        (("tl.where(x < N, x, 0.0)", "tl.where(\n        x < N, x, 0.0,\n    )"), True),
        (("tiny_1234", "tiny_5678"), True),
        (("1 * BLOCK_N", "BLOCK_N"), True),
        (("1 * BLOCK_N", "2 * BLOCK_N"), False),
        (("1 * BLOCK_N", "BLOCK_M"), False),
        (("seed: float) -> torch.Tensor", "seed: int) -> object"), True),
        (("def step(x, N)", "def step(x, N: tl.constexpr)"), False),
        (("seed: float", "seed: float = 0"), False),
        (("x < N", "x <= N"), False),
        (('name="tiny"', 'name="small"'), False),
        (("(step,)", "(step, step)"), False),
    ],
)
def test_a_record_of_triton_is_carried_where_words_and_line_breaks_alone_have_changed(
    tmp_path: Path, change: tuple[str, str], is_carried: bool
) -> None:
    name = "tiny/triton/d64.py"
    for folder, text in (("before", TRITON), ("after", TRITON.replace(*change))):
        (tmp_path / folder / name).parent.mkdir(parents=True)
        # the name of the operator has a hash of the text
        text = text if folder == "before" else text.replace("tiny_1234", "tiny_9999")
        (tmp_path / folder / name).write_text(text, encoding="utf-8")
    before, after = tmp_path / "before", tmp_path / "after"
    sha256 = hash_of(before / name)
    record = Record(
        sha256=sha256, device="NVIDIA H200", toolchain="triton 3.6.0", cases=3, worst=0.5, where=""
    )
    carried = carry_records(Records(verified={name: record}), before, after).verified[name]
    assert carried.sha256 == (hash_of(after / name) if is_carried else sha256)
    assert is_same_program(before / name, after / name) == is_carried


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("file", "change", "because"),
    [
        ("d64.cu", ("* STAGES", "* 3"), "other machine code: tiny"),
        ("part.cuh", ("2.0f", "3.0f"), "other machine code: tiny"),
        ("d64.py", ("(64, 4", "(32, 4"), "BLOCK_M of a config has changed"),
        ("d64.py", ("4, 128)", "4, 256)"), "shared of a config has changed"),
        ("d64.py", ("cdiv(M", "cdiv(N"), "GRID has changed"),
        ("d64.py", ("    Config(64, 4, 128),", "    Config(64, 4, 128),\n" * 2), "it has other configs"),
        ("d64.cu", ("rows)\n", "rows\n"), "it does not compile: "),
    ],
)
def test_a_record_is_not_carried_to_what_a_gpu_could_tell_apart(
    tmp_path: Path, file: str, change: tuple[str, str], because: str
) -> None:
    before, after = write(tmp_path / "before"), write(tmp_path / "after", {file: change})
    known, told = recorded(before), list[Comparison]()
    assert carry_records(known, before, after, report=told.append) == known
    assert [one.because.startswith(because) for one in told] == [True]


def test_only_what_was_verified_by_this_compiler_is_carried(tmp_path: Path) -> None:
    before = write(tmp_path / "before")
    after = write(tmp_path / "after", {"d64.cu": ("rows", "length")})
    known = recorded(before)
    record = known.verified[NAME]

    def tell(**fields: Any) -> str:
        told = list[Comparison]()
        records = replace(known, verified={NAME: replace(record, **fields)})
        assert carry_records(records, before, after, report=told.append) == records
        (only,) = told
        return only.because

    assert tell(toolchain="nvrtc 1.0").startswith("nvrtc 1.0 made its machine code, here is nvrtc ")
    assert tell(toolchain="triton 3.6.0") == "triton 3.6.0 made its machine code on a GPU"
    assert tell(device="A GPU of next year") == "the architecture of A GPU of next year is not known"
    assert tell(sha256="0") == "the record is not of that revision's text"


def test_a_sanitized_module_of_an_older_text_stays_lapsed(tmp_path: Path) -> None:
    before = write(tmp_path / "before")
    after = write(tmp_path / "after", {"d64.cu": ("rows", "length")})
    known = recorded(before)
    older = {NAME: replace(known.sanitized[NAME], sha256="0")}
    assert carry_records(replace(known, sanitized=older), before, after).sanitized == older


def test_what_others_record_meanwhile_stays() -> None:
    def records(**hashes: str) -> Records:
        return Records(
            verified={
                name: Record(sha256=sha256, device="", toolchain="", cases=1, worst=0.0, where="")
                for name, sha256 in hashes.items()
            },
            sanitized={
                name: Sanitized(sha256=sha256, device="", tool="", launches=1)
                for name, sha256 in hashes.items()
            },
        )

    before, carried = records(a="1", b="1", c="1"), records(a="2", b="2", c="1")
    known = records(a="1", b="3", c="4", d="5")
    assert adopt_carried(known, before, carried) == records(a="2", b="3", c="4", d="5")


def test_registers_are_told_of_both(tmp_path: Path) -> None:
    before = write(tmp_path / "before")
    after = write(tmp_path / "after", {"d64.cu": ("* STAGES", "* 3")})
    pairs = compare_modules(NAME, before, after, "sm_90").pairs
    assert len(pairs) == 2  # of aligned rows, and of others
    assert all(pair.differs and pair.registers[0] > 0 for pair in pairs)


def test_a_constant_of_the_kernel_alone_may_have_another_name() -> None:
    assert compare_declarations(MODULE, MODULE.replace("STAGES", "BUFFERS")) == ""
    assert compare_declarations(MODULE, MODULE.replace("    STAGES: int = 2\n", "")) == ""
    renamed = MODULE.replace("    BLOCK_M:", "    ROWS:")
    assert compare_declarations(MODULE, renamed).startswith("its declaration names BLOCK_M, ")


def test_comments_docstrings_and_names_of_files_are_no_part_of_a_declaration() -> None:
    text = MODULE + 'CALL = f(file="d64", element="bf16", name="d64", operator="d64_1")\n'
    changed = text.replace('"""Documented."""', '"""Told."""').replace("class Call", "#\nclass Call")
    renamed = changed.replace('file="d64", element="bf16"', 'file="other"').replace("d64_1", "d64_2")
    assert compare_declarations(text, renamed) == ""
    assert compare_declarations(text, text.replace('name="d64"', 'name="other"')) == "CALL.name has changed"
