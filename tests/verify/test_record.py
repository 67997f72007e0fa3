"""Every committed module was verified on a GPU, or says that it was not."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from attnc.runtime.loader import load_file
from attnc.target.support import kernel_files, with_headers
from attnc.verify.record import (
    Record,
    Records,
    Sanitized,
    dump,
    hash_of,
    lapsed_support,
    list_lapsed,
    read,
    support_hash,
    target_of,
)

GENERATED = Path(__file__).parents[2] / "generated"
#: What names the file of a module's kernels.
DECLARED = 'CALL = f(\n    file="a",\n)\n'


def modules() -> list[str]:
    """Paths of the generated modules; an `__init__` only picks among them."""
    files = (path for path in GENERATED.glob("*/*/*.py") if path.name != "__init__.py")
    return sorted(path.relative_to(GENERATED).as_posix() for path in files)


def unsupported(folder: Path, modules: Iterable[str], records: Records) -> list[str]:
    """Targets for which no GPU has run the support package as it is, nor `unverified` says why."""
    targets = lapsed_support(folder, modules, records)
    return [target for target in targets if f"_support/{target}" not in records.unverified]


def without_record(folder: Path, modules: Iterable[str], records: Records) -> list[str]:
    """Lists modules (paths below `folder`) with neither a record of their text nor an entry `unverified`."""
    return [name for name in list_lapsed(folder, modules, records.verified) if name not in records.unverified]


def without_sanitizer(folder: Path, modules: Iterable[str], records: Records) -> list[str]:
    """Lists modules of kernels that compute-sanitizer has not watched in their text, and no entry
    `unsanitized`.
    """
    found = {name: folder / name for name in modules}
    kernels = [
        name
        for name, path in found.items()
        if kernel_files(path.read_text(encoding="utf-8"), (beside.name for beside in path.parent.iterdir()))
    ]
    return [
        name for name in list_lapsed(folder, kernels, records.sanitized) if name not in records.unsanitized
    ]


def test_every_module_has_a_record_of_its_text_or_says_that_it_is_unverified() -> None:
    assert modules()
    assert without_record(GENERATED, modules(), read(GENERATED)) == [], (
        "run `attnc verify --record` on a machine with a GPU, or list it under 'unverified' with the reason"
    )


def test_a_gpu_has_run_the_support_package_for_every_target_or_it_is_unverified() -> None:
    assert unsupported(GENERATED, modules(), read(GENERATED)) == [], (
        "the code beside the kernels has changed: run its unit tests, and `attnc verify SPEC --record` for a "
        "spec with this target on a machine with a GPU, or list `_support/TARGET` under 'unverified'"
    )


def test_a_change_of_the_support_package_asks_for_a_run_of_each_target(tmp_path: Path) -> None:
    folder = tmp_path / "_support"
    folder.mkdir()
    (folder / "call.py").write_text("1\n", encoding="utf-8")
    (folder / "sm80.cuh").write_text("1\n", encoding="utf-8")
    paths, now = ["a/triton/d.py", "b/triton/d.py", "a/cuda_sm_80/d.py"], support_hash(tmp_path)
    assert unsupported(tmp_path, paths, Records()) == ["triton", "cuda_sm_80"]
    record = Record(sha256="0", device="d", toolchain="t", cases=1, worst=0.5, where="")
    records = (
        Records().with_support(now, {"a/triton/d.py": record}).with_support(now, {"b/triton/d.py": record})
    )
    assert records.support["triton"].modules == 2
    assert unsupported(tmp_path, paths, records) == ["cuda_sm_80"]
    excused = replace(records, unverified={"_support/cuda_sm_80": "no GPU here"})
    assert unsupported(tmp_path, paths, excused.only(paths)) == []
    assert excused.with_verified({"a/cuda_sm_80/d.py": record}).unverified == {}
    (tmp_path / "verified.json").write_text(dump(records), encoding="utf-8")
    assert read(tmp_path) == records
    (folder / "sm80.cuh").write_text("2\n", encoding="utf-8")  # a part of kernels
    assert unsupported(tmp_path, paths, records) == ["cuda_sm_80"]
    (folder / "call.py").write_text("2\n", encoding="utf-8")
    assert unsupported(tmp_path, paths, records) == ["triton", "cuda_sm_80"]


def test_every_cuda_module_was_sanitized_too_or_says_that_it_was_not() -> None:
    assert without_sanitizer(GENERATED, modules(), read(GENERATED)) == [], (
        "run `attnc verify --target cuda.sm_80 --sanitize --record` on a machine with a GPU, or list it "
        "under 'unsanitized' with the reason"
    )


def test_nothing_is_recorded_of_modules_that_are_gone() -> None:
    records = read(GENERATED)
    sections = (records.verified, records.unverified, records.sanitized, records.unsanitized)
    packages = {f"_support/{target_of(path)}" for path in modules()}
    assert {name for section in sections for name in section} <= {*modules(), *packages}


def test_what_the_sanitizer_saw_lapses_with_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"1\n{DECLARED}", encoding="utf-8")
    assert without_sanitizer(tmp_path, ["a.py"], Records()) == []  # not a module of CUDA kernels
    (tmp_path / "a.cu").touch()
    assert without_sanitizer(tmp_path, ["a.py"], Records()) == ["a.py"]
    left = Records(unsanitized={"a.py": "no time"})
    assert without_sanitizer(tmp_path, ["a.py"], left) == []
    seen = Sanitized(sha256=hash_of(tmp_path / "a.py"), device="d", tool="t", launches=1)
    records = left.with_sanitized({"a.py": seen})
    assert not records.unsanitized
    assert without_sanitizer(tmp_path, ["a.py"], records) == []
    (tmp_path / "a.py").write_text(f"2\n{DECLARED}", encoding="utf-8")
    assert without_sanitizer(tmp_path, ["a.py"], records) == ["a.py"]


def test_no_recorded_error_is_beyond_the_bound() -> None:
    assert all(record.worst <= 1.0 and record.cases > 0 for record in read(GENERATED).verified.values())


def test_a_record_lapses_with_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1\n", encoding="utf-8")
    record = Record(
        sha256=hash_of(tmp_path / "a.py"), device="d", toolchain="t", cases=1, worst=0.5, where=""
    )
    records = Records().with_verified({"a.py": record})
    assert without_record(tmp_path, ["a.py"], records) == []
    (tmp_path / "a.py").write_text("2\n", encoding="utf-8")
    assert without_record(tmp_path, ["a.py"], records) == ["a.py"]
    assert without_record(tmp_path, ["a.py"], Records(unverified={"a.py": "no GPU here"})) == []


def test_comments_and_docstrings_are_no_part_of_what_is_recorded(tmp_path: Path) -> None:
    module, kernel = tmp_path / "a.py", tmp_path / "a.cu"

    def hashed(python: str, cuda: str) -> str:
        module.write_text(python, encoding="utf-8")
        kernel.write_text(cuda, encoding="utf-8")
        return hash_of(module)

    python = '"""Spec sha256: 1."""\n\n\ndef f(x):\n    """Adds."""\n    # one\n    return x + 1, "a.cu"\n'
    python += DECLARED
    cuda = '// one\nint f(int x) { return x + 1; /* two\nlines */ }\nasm("// kept");\n'
    first = hashed(python, cuda)
    same = python.replace(": 1.", ": 2.").replace("Adds", "Adds one").replace("# one", "# two")
    assert hashed(same, cuda.replace("// one", "//  three").replace("two", "2")) == first
    for change in (("x + 1", "x + 2"), ("    return", "    x = x\n    return"), ('"a.cu"', '"# a"')):
        assert hashed(python.replace(*change), cuda) != first
    for change in (("x + 1", "x + 2"), ("kept", "changed")):
        assert hashed(python, cuda.replace(*change)) != first


def test_a_record_holds_the_kernels_whose_name_the_declaration_begins(tmp_path: Path) -> None:
    module, other = tmp_path / "bf16_a.py", tmp_path / "b.cu"
    module.write_text(DECLARED, encoding="utf-8")
    kernels = [tmp_path / "a.cu", tmp_path / "a_backward_dq.cu"]
    for path in (*kernels, other):
        path.write_text("int f();\n", encoding="utf-8")
    for path in kernels:
        before = hash_of(module)
        path.write_text("int g();\n", encoding="utf-8")
        assert hash_of(module) != before
    before = hash_of(module)
    other.write_text("int g();\n", encoding="utf-8")
    assert hash_of(module) == before


def test_records_survive_the_file(tmp_path: Path) -> None:
    record = Record(sha256="0", device="d", toolchain="t", cases=3, worst=0.25, where="o[b=0]")
    seen = Sanitized(sha256="0", device="d", tool="t", launches=5)
    records = Records(
        verified={"b.py": record, "a.py": record},
        unverified={"c.py": "why"},
        sanitized={"b.py": seen},
        unsanitized={"a.py": "why"},
    )
    (tmp_path / "verified.json").write_text(dump(records), encoding="utf-8")
    assert read(tmp_path) == records


def test_what_was_met_is_noted_and_older_records_have_none(tmp_path: Path) -> None:
    old = Record(sha256="0", device="d", toolchain="t", cases=3, worst=0.25, where="o[b=0]")
    (tmp_path / "verified.json").write_text(dump(Records(verified={"a.py": old})), encoding="utf-8")
    assert "met" not in (tmp_path / "verified.json").read_text(encoding="utf-8")
    new = replace(old, met={"points": [3, 4], "pairs": [5, 9]}, large={"cases": 7, "worst": 0.5})
    records = read(tmp_path).with_verified({"b.py": new})
    (tmp_path / "verified.json").write_text(dump(records), encoding="utf-8")
    assert read(tmp_path) == records


def test_large_cases_are_noted_in_the_record_of_the_same_text() -> None:
    record = Record(sha256="0", device="d", toolchain="t", cases=3, worst=0.25, where="")
    large = replace(record, cases=9, worst=0.75)
    records = Records().with_large({"a.py": large})
    assert not records.verified
    records = Records().with_verified({"a.py": record}).with_large({"a.py": large})
    assert records.verified["a.py"].large == {"cases": 9, "worst": 0.75}
    again = records.with_verified({"a.py": replace(record, cases=5)})
    assert again.verified["a.py"].large == {"cases": 9, "worst": 0.75}
    assert not records.with_verified({"a.py": replace(record, sha256="1")}).verified["a.py"].large


KERNELS = sorted(GENERATED.glob("*/cuda_*/[!_]*.py"))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_a_cuda_module_names_all_its_kernels_by_hash(path: Path) -> None:
    """What is recorded of a module is recorded of these files too."""
    text = path.read_text(encoding="utf-8")
    program: Any = load_file(path).CALL.program
    files = list(dict.fromkeys(kernel.file for kernel in program.kernels.values()))
    beside = (found.name for found in path.parent.glob("*.cu"))
    assert sorted(files) == sorted(kernel_files(text, beside))
    forward, *backward = (with_headers(path.with_name(name).read_text(encoding="utf-8")) for name in files)
    hashes = re.findall(r"^(?:Kernel sha256|Those of the backward): (\w+)$", text, re.M)
    assert hashes == [sha256(part.encode()).hexdigest() for part in (forward, "".join(backward)) if part]
