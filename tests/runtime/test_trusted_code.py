"""What runs as code is what attnc wrote or the user named, and nothing that lies around."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import attnc
from attnc.api import compile as compiling
from attnc.runtime import nvrtc
from attnc.runtime.children import module_command, spawning_safely
from attnc.runtime.loader import load_file, load_files, load_text, program_of, store
from attnc.runtime.packages import Package, find_package, keep_package, load_package
from attnc.support import cache as caching
from attnc.verify import simt
from attnc.verify.interpreter import ensure_interpreter
from tests.processes import forked
from tests.support.test_cache import DAMAGES

GENERATED = Path(__file__).parents[2] / "generated"
#: What somebody else may have left anywhere.
PLANTED = "raise AssertionError('code of somebody else')\n"
MODULE = "from ..._support.sizes import *\nfrom ..._support import cache\nVALUE = {}\n"
KERNEL = """
typedef unsigned int u32;
struct f16 { unsigned short bits; };
typedef f16 element;
struct Args { float* x; };
#include "simt.h"
extern "C" __global__ void __launch_bounds__(32) example(const __grid_constant__ Args args)
{ args.x[threadIdx.x] = %d; }
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(folder))
    return folder


def plant(folder: Path, name: str) -> None:
    """A package and a module of this name in a folder."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(PLANTED)
    (folder / name / "cache.py").write_text(PLANTED)
    (folder / f"{name}.py").write_text(PLANTED)


# --- modules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", [".", "one", "one/two", "one/two/three"])
def test_nothing_above_the_cache_is_imported(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module imports `..._support`, from three packages up; everybody may write above the cache."""
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(tmp_path / below / "cache"))
    for folder in ("", "one", "one/two", "one/two/three"):
        plant(tmp_path / folder, "_support")
    text = MODULE.format(below.__hash__())
    (tmp_path / "one").chmod(0o700)
    loaded = [
        load_text(text),
        load_files({"m.py": text, "m.cu": ""}),
        load_package(tmp_path / "package", Package(files={"__init__.py": text}, facts={})),
    ]
    for module in loaded:
        assert module.cache.__name__ == "attnc_generated._support.cache"
        assert Path(module.cache.__file__) == Path(attnc.__file__).parent / "support" / "cache.py"


@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_a_process_without_a_home_has_a_folder_in_a_shared_one(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch job: $TMPDIR is everybody's, and nothing in it is imported."""
    monkeypatch.delenv("ATTNC_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(caching, "own_folder", caching.own_folder.__wrapped__)
    monkeypatch.setattr(caching, "_own_folder_because", caching._own_folder_because.__wrapped__)
    tmp_path.chmod(mode)
    plant(tmp_path, "_support")
    with pytest.warns(UserWarning, match="compiles anew"):
        module = load_text(MODULE.format(mode))
    assert module.cache.__name__ == "attnc_generated._support.cache"
    assert Path(module.__file__ or "").is_relative_to(tmp_path) is bool(mode & 0o1000)


def test_a_file_that_is_named_imports_nothing_around_it(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b"):
        plant(folder, "_support")
        plant(folder, "beside")
    named = tmp_path / "a" / "b" / "named.py"
    named.write_text(MODULE.format(1))
    assert load_file(named).cache.__name__ == "attnc_generated._support.cache"
    named.with_name("another.py").write_text("from . import beside\n")
    with pytest.raises(ImportError, match="beside"):
        load_file(named.with_name("another.py"))


def test_bytecode_is_neither_read_nor_written(tmp_path: Path, cache: Path) -> None:
    """Not even one that says of itself that it is of this text, whose time and size are those of the file."""
    named = tmp_path / "named.py"
    named.write_text("VALUE = 1023\n")
    stamp = named.stat().st_mtime_ns
    py_compile.compile(str(named), doraise=True)
    named.write_text("VALUE = 1022\n")
    os.utime(named, ns=(stamp, stamp))
    assert load_file(named).VALUE == 1022
    load_text("VALUE = 3\n")
    assert not list(cache.rglob("__pycache__"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_text_in_the_cache_is_written_again(damage: Callable[[Path], None], cache: Path) -> None:
    path = store("VALUE = 3\n")
    damage(path)
    assert store("VALUE = 3\n") == path
    assert path.read_text() == "VALUE = 3\n"


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_kernels_of_a_module_are_not_what_lies_in_the_cache(
    damage: Callable[[Path], None], cache: Path
) -> None:
    folder = GENERATED / "fa2_split_q" / "cuda_sm_80"
    files = {file.name: file.read_text(encoding="utf-8") for file in folder.glob("d64.*")}
    program = program_of(load_files(files))
    beside = program.module.with_suffix(".cu")
    damage(beside)
    program.forget()
    assert program._read("d64.cu") == files["d64.cu"]
    load_files(files)
    assert beside.read_text(encoding="utf-8") == files["d64.cu"]


@pytest.mark.parametrize("what", ["file", "link", "open"])
def test_what_has_the_name_of_a_folder_of_the_cache_goes(what: str, cache: Path, tmp_path: Path) -> None:
    files = {"m.py": f"VALUE = {what!r}\n", "m.cu": "int kernel;\n"}
    folder = Path(load_files(files).__file__ or "").parent
    (folder / "m.cu").write_text("")
    folder.rename(tmp_path / "elsewhere")
    match what:
        case "file":
            folder.write_text("")
        case "link":
            folder.symlink_to(tmp_path / "elsewhere")
        case _:
            folder.mkdir()
            folder.chmod(0o777)
    load_files(files)
    assert {path.name: path.read_text() for path in folder.iterdir()} == files
    assert folder.lstat().st_mode & 0o777 == 0o700
    assert (tmp_path / "elsewhere" / "m.cu").read_text() == ""


def test_a_full_disk_keeps_no_module_from_being_imported(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    assert load_text("VALUE = 'full'\n").VALUE == "full"
    assert load_files({"m.py": "VALUE = 'disk'\n", "m.cu": ""}).VALUE == "disk"


# --- packages -----------------------------------------------------------------------------------------------


PACKAGE = Package(
    files={"__init__.py": "from . import d64\n", "d64.py": "VALUE = 64\n", "d64.cu": "int kernel;\n"},
    facts={"name": "near", "spec": "mask = window(1022)", "target": "cuda.sm_80"},
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("file", [*PACKAGE.files, "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_package_is_whole_or_not_there(damage: Callable[[Path], None], file: str, tmp_path: Path) -> None:
    folder = tmp_path / "packages" / "key"
    assert find_package(folder) is None
    keep_package(folder, PACKAGE)
    assert find_package(folder) == PACKAGE
    damage(folder / file)
    assert find_package(folder) is None
    keep_package(folder, PACKAGE)
    assert find_package(folder) == PACKAGE


@pytest.mark.parametrize(("old", "new"), [("1022", "1023"), ("cuda.sm_80", "cuda.sm_90"), ("near", "neat")])
def test_facts_of_a_package_are_held_to_a_hash(old: str, new: str, tmp_path: Path) -> None:
    """They say which spec a kernel is of, and go into pickles."""
    folder = tmp_path / "packages" / "key"
    keep_package(folder, PACKAGE)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace(old, new))
    assert find_package(folder) is None


def test_a_package_of_another_key_is_none_of_this_one(tmp_path: Path) -> None:
    keep_package(tmp_path / "packages" / "key", PACKAGE)
    (tmp_path / "packages" / "key").rename(tmp_path / "packages" / "another")
    assert find_package(tmp_path / "packages" / "another") is None


@pytest.mark.parametrize("level", ["packages", "packages/key"])
def test_a_file_in_the_place_of_a_folder_of_packages(level: str, tmp_path: Path) -> None:
    (tmp_path / level).parent.mkdir(mode=0o700, exist_ok=True)
    (tmp_path / level).write_text("")
    assert find_package(tmp_path / "packages" / "key") is None
    keep_package(tmp_path / "packages" / "key", PACKAGE)
    assert find_package(tmp_path / "packages" / "key") == PACKAGE


def test_a_package_that_is_gone_is_imported_from_what_was_read(tmp_path: Path) -> None:
    plant(tmp_path / "key", "d64")
    assert load_package(tmp_path / "key", PACKAGE).d64.VALUE == 64


# --- machine code -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES[:3])
def test_machine_code_and_its_log_are_kept_together(
    damage: Callable[[Path], None], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = nvrtc.Cubin(image=b"\x7fELF\n12\n", log="Used 12 registers\né")
    calls: list[str] = []

    def compiler(source: str, options: list[str]) -> nvrtc.Cubin:
        calls.append(source)
        return made

    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(nvrtc, "_compile", compiler)
    assert [nvrtc.compile_cubin("source", ["-arch=sm_80"]) for _ in range(2)] == [made, made]
    assert calls == ["source"]
    (path,) = cache.iterdir()
    damage(path)
    assert nvrtc.compile_cubin("source", ["-arch=sm_80"]) == made
    assert calls == ["source"] * 2


def simulated(number: int) -> list[float]:
    import torch

    x = torch.zeros(32)
    address = x.data_ptr().to_bytes(8, "little")
    simt.launch(KERNEL % number, {}, address, blocks=1, threads=32, shared=0, seed=1)
    return x.tolist()


needs_gxx = pytest.mark.skipif(not simt.available(), reason="g++ compiles the kernels for the CPU")


@needs_gxx
def test_a_library_of_the_simulator_that_was_cut_is_built_again(cache: Path) -> None:
    simt._machine.cache_clear()
    assert simulated(1) == [1.0] * 32
    kernel_and_machine = [*cache.iterdir()]
    assert len(kernel_and_machine) == 2
    for library in kernel_and_machine:
        content = library.read_bytes()
        library.unlink()  # what is loaded stays as it is
        library.write_bytes(content[:-1000])
    simt._machine.cache_clear()
    simt._compile.cache_clear()
    assert simulated(1) == [1.0] * 32


@needs_gxx
def test_headers_in_the_working_folder_are_not_compiled(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "simt.h").write_text("#error code of somebody else\n")
    monkeypatch.chdir(tmp_path)
    assert simulated(2) == [2.0] * 32


# --- many processes -----------------------------------------------------------------------------------------


SPEC = """
attention tiny {
  input q: f16[B, M, H, 16]
  input k, v: f16[B, N, H, 16]
  score = dot(q, k) / sqrt(16)
  normalize = softmax
  output o: f16[B, M, H, 16]
}
"""


def test_eight_processes_compile_into_an_empty_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_interpreter()
    monkeypatch.setattr(compiling, "_FAMILIES", {})
    attnc.compile(SPEC.replace("tiny", "first"), cache=False)  # the grammar is read
    assert forked(8, lambda _: attnc.compile(SPEC)) == [0] * 8
    (folder,) = (cache / "packages").iterdir()
    assert find_package(folder) is not None
    assert not list(cache.rglob("*.tmp"))


@needs_gxx
def test_eight_processes_simulate_with_an_empty_cache(cache: Path) -> None:
    def work(_: int) -> None:
        assert simulated(3) == [3.0] * 32

    assert forked(8, work) == [0] * 8
    (library,) = cache.iterdir()
    assert caching.read_sealed(library) is not None


# --- processes of Python ------------------------------------------------------------------------------------


def test_a_process_imports_nothing_from_the_folder_that_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "multiprocessing", "runpy", "argparse"):
        plant(tmp_path, name)
    monkeypatch.chdir(tmp_path)
    command = module_command("json.tool", "--help")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "json" in done.stdout
    with spawning_safely():
        program = "import sys, multiprocessing; print(sys.flags.safe_path)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
