"""What is packed of a compiled library, and how processes share tests."""

from __future__ import annotations

import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.engines import pack
from tests.engines.outcomes import Outcome, is_mine, share
from tests.engines.standins import anything
from tests.engines.thin import thin


def library(*entries: tuple[int, int, bytes]) -> bytes:
    """An ELF file whose section of GPU code has an entry for each kind, architecture and code."""
    code = b"".join(
        struct.pack("<HHIQ", kind, 0x101, 64, len(text))
        + bytes(12)
        + struct.pack("<I", architecture)
        + bytes(32)
        + text
        for kind, architecture, text in entries
    )
    fatbin = bytes(8) + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(code)) + code
    names = b"\0.nv_fatbin\0.names\0"
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, 64 + len(fatbin) + len(names))
    struct.pack_into("<HHH", head, 0x3A, 64, 3, 2)
    section = struct.Struct("<IIQQQQIIQQ")
    table = [
        bytes(64),
        section.pack(1, 1, 0, 0, 64, len(fatbin), 0, 0, 8, 0),
        section.pack(12, 3, 0, 0, 64 + len(fatbin), len(names), 0, 0, 1, 0),
    ]
    return bytes(head) + fatbin + names + b"".join(table)


def test_code_of_other_architectures_becomes_zeros() -> None:
    whole = library((2, 80, b"old" * 8), (1, 90, b"ptx" * 8), (2, 90, b"new" * 8), (2, 120, b"far" * 8))
    assert thin(whole, 90) == library(
        (2, 80, bytes(24)), (1, 90, bytes(24)), (2, 90, b"new" * 8), (2, 120, bytes(24))
    )


def test_a_library_without_the_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="no machine code of sm_90"):
        thin(library((2, 80, b"old" * 8)), 90)


def test_an_engine_is_packed_without_what_its_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = pack.COMPILED["vllm"][0]
    kept = {"vllm/a.py": b"a = 1", compiled: library((2, 80, b"old" * 8), (2, 90, b"new" * 8))}
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for name, data in {**kept, "vllm/other.so": b"machine code"}.items():
            wheel.writestr(name, data)
    tests = tmp_path / "sdist" / "tests" / "v1" / "attention"
    tests.mkdir(parents=True)
    (tests / "utils.py").touch()
    asked: list[str] = []
    monkeypatch.setattr(pack, "_download", lambda names, *_, **__: asked.extend(names))
    out = tmp_path / "packed"
    size = pack.pack(
        "vllm", tmp_path / "vllm.whl", out, source=tmp_path / "sdist", installed=["Py_CPUinfo", "aiohttp"]
    )
    assert size == sum(path.stat().st_size for path in out.iterdir())
    with tarfile.open(out / "vllm.txz") as part:
        names = part.getnames()
        code = part.extractfile(compiled)
        assert code is not None
        assert code.read() == library((2, 80, bytes(24)), (2, 90, b"new" * 8))
    assert names == [*kept, "source/tests/v1/attention/utils.py"]
    assert {"pydantic", "cachetools"} < set(asked)
    assert not {"aiohttp", "py-cpuinfo"} & set(asked)
    assert "vllm.txz" in (out / "vllm.sh").read_text(encoding="utf-8")


def test_parts_are_all_tests_once() -> None:
    parts = [{number for number in range(10) if is_mine(number, f"{part}/3")} for part in range(3)]
    assert sorted(number for part in parts for number in part) == list(range(10))


def test_processes_share_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module.py").write_text(
        "import sys\n"
        "if sys.argv[-1] == '1/2':\n"
        "    raise SystemExit(7)\n"
        """print('outcome {"name": "a test", "result": "passed"}')\n""",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    died = Outcome("a process of tests", "failed", "exit 7")
    assert share("module", [], 2) == [Outcome("a test", "passed"), died]


def test_a_stand_in_can_be_a_field_and_a_dictionary_of_types() -> None:
    """What models of pydantic and classes of openai ask of theirs."""
    made = anything("Parameter")
    assert made.__get_pydantic_core_schema__(made, None) == {"type": "any"}
    assert type("More", (made,), {}, total=False).__name__ == "More"
