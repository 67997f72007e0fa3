"""Sources, constants and loading of compiled kernels."""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnc.runtime.nvrtc import compile_ptx
from attnc.support.binaries import (
    Compiled,
    Program,
    _is_as_safe,
    flags_of,
    inline_headers,
    list_defines,
    suspend_capture,
)
from attnc.target.support import with_headers
from tests.support.configs import CONFIGS


def test_a_source_has_its_header_in_place(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text(
        '#define N 1\n#include "x.cuh"\n#include "simt.h"\nint a;\n', encoding="utf-8"
    )
    (tmp_path / "x.cuh").write_text("int x;\n", encoding="utf-8")
    program = Program(str(tmp_path / "a.py"), (Compiled("f", "a.cu", CONFIGS),), None)
    assert program.source("f") == '#define N 1\nint x;\n#include "simt.h"\nint a;\n'
    assert inline_headers("int y;", str) == "int y;"
    before = program.cubin_name("f", CONFIGS[1], True, "sm_90")
    (tmp_path / "x.cuh").write_text("int z;\n", encoding="utf-8")
    program.forget()
    assert program.cubin_name("f", CONFIGS[1], True, "sm_90") != before
    inline = Program("", (Compiled("f", "a.cu", CONFIGS),), {"a.cu": "int b;\n"})
    assert inline.source("f") == "int b;\n"


def test_kernels_are_compiled_with_their_config() -> None:
    config = CONFIGS[1]
    assert list_defines(config, True) == {"BLOCK_M": 64, "BLOCK_N": 64, "WARPS": 4, "STAGES": 2, "ALIGNED": 1}
    assert list_defines(config._replace(maxnreg=128), False)["MAXNREG"] == 128
    for parts in range(4):
        in_parts: Any = SimpleNamespace(**config._asdict(), parts=parts)
        assert ("IN_PARTS" in list_defines(in_parts, True)) == (parts > 1)
    for kept in range(-1, 3):
        keeping: Any = SimpleNamespace(**config._asdict(), kept=kept)
        assert ("KEEPS_DS" in list_defines(keeping, True)) == (kept > 0)


def test_a_source_says_how_it_is_compiled_besides() -> None:
    """The header of sums in an absolute order leaves no product and sum to be contracted."""
    text = """extern "C" __global__ void f(float* x) { x[0] = x[1] * x[2] + x[3]; }\n"""
    told = "// nvrtc: --fmad=false\n"
    assert flags_of(text) == []
    assert flags_of(f"{told}{text}") == ["--fmad=false"]
    assert flags_of(with_headers('#include "sm90_order.cuh"\n')) == ["--fmad=false"]
    options = ("-arch=sm_90", "-std=c++17")
    assert "fma.rn.f32" in compile_ptx(text, options)
    assert "fma.rn.f32" not in compile_ptx(told + text, options)


@pytest.mark.parametrize("text", ["", "// nvrtc: --fmad=false\n"])
def test_the_compiler_is_told_what_a_source_says(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, ...]] = []
    nvrtc = SimpleNamespace(
        createProgram=lambda *_: 0,
        compileProgram=lambda _, options: given.append(options),
        getCUBIN=lambda _: b"code",
        destroyProgram=lambda _: None,
        NVRTCError=RuntimeError,
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(nvrtc=nvrtc)))
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nvrtc=nvrtc))
    program = Program("", (Compiled("f", "a.cu", CONFIGS),), {"a.cu": f"{text}int b;\n"})
    assert program.compile("f", ("-arch=sm_90",)) == b"code"
    assert given == [("-arch=sm_90", *flags_of(text))]


def test_code_is_loaded_outside_of_a_graph_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's mode is relaxed for the while, and then what it was."""
    modes = [0]

    def exchange(mode: Any) -> None:
        modes.append(mode._obj.value)
        mode._obj.value = modes[-2]

    library = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    with suspend_capture():
        assert modes[-1] == 2
    assert modes == [0, 2, 0]


def _status(mode: int, uid: int, gid: int) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


def _writers(one: os.stat_result, *, sticky: bool) -> set[str]:
    """Who can write to a file, or put another one in its place: in a sticky folder the owner alone."""
    found = {f"user {one.st_uid}"}
    if not (sticky and one.st_mode & stat.S_ISVTX):
        found |= {f"group {one.st_gid}"} if one.st_mode & stat.S_IWGRP else set()
        found |= {"others"} if one.st_mode & stat.S_IWOTH else set()
    return found


def test_code_is_trusted_that_nobody_else_could_write() -> None:
    """By the names of all who could, for every kind of a file beside every kind of two that are known."""
    kinds = [
        _status(mode, uid, gid)
        for mode, uid, gid in product((0o600, 0o655, 0o660, 0o602, 0o1777), (0, 1, 2), (1, 2))
    ]
    for found, one, other in product(kinds, kinds, kinds[::7]):
        known = [one, other]
        trusted = {"user 0"}.union(*(_writers(each, sticky=True) for each in known))
        assert _is_as_safe(found, known) == (_writers(found, sticky=False) <= trusted), (found, known)


def test_what_a_compiler_refuses_is_told_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    class NVRTCError(Exception):
        pass

    def refuse(program: int, options: tuple[str, ...]) -> None:
        raise NVRTCError(program)

    nvrtc = SimpleNamespace(
        createProgram=lambda *_: 7, compileProgram=refuse, getProgramLog=lambda number: f"log {number}",
        destroyProgram=ended.append, NVRTCError=NVRTCError,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(nvrtc=nvrtc)))
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nvrtc=nvrtc))
    program = Program("", (Compiled("f", "a.cu", CONFIGS),), {"a.cu": "int b;\n"})
    with pytest.raises(RuntimeError, match=r"^a\.cu \('-arch=sm_90',\): log 7$"):
        program.compile("f", ("-arch=sm_90",))
    assert ended == [7]
