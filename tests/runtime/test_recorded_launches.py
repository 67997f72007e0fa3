"""Launches made ready pass the driver what Triton's own launches pass, byte by byte, whatever changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from attnc.support.cache import cache_folder
from tests.processes import run_program

HERE = Path(__file__).parent
#: Tensor maps; an optional pointer and inputs without maps; a second kernel and scratch; gradients.
SPECS = ("full", "bias", "decode", "gradients:full")
#: The same of small tiles, which compile in seconds: by day the one with two kernels.
SMALL = ("small_decode",)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `libcuda.so.1` that notes launches."""
    headers, compiler = Path(sysconfig.get_paths()["include"]) / "Python.h", shutil.which("gcc")
    if compiler is None or not headers.is_file():
        pytest.skip("Triton builds its launcher with a C compiler and Python's headers")
    spec = find_spec("triton.backends.nvidia")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    include = Path(next(iter(spec.submodule_search_locations))) / "include"
    folder = tmp_path_factory.mktemp("driver")
    flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", f"-I{include}"]
    source, made = HERE / "recording_driver.c", folder / "libcuda.so.1"
    subprocess.run([compiler, *flags, "-o", str(made), str(source)], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "specs", [SMALL, pytest.param(("small_bias", *SPECS), marks=pytest.mark.nightly)], ids=len
)
def test_launches_pass_what_triton_passes(driver: Path, specs: tuple[str, ...]) -> None:
    """In one process, as importing takes longer than what is checked. What Triton compiles is kept from run
    to run, by its content, and ptxas need not optimise it.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(cache_folder() / "recorded_launches"),
        "DISABLE_PTXAS_OPT": "1",
    }
    done = run_program(HERE / "recorded_launches.py", driver, *specs, environment=environment)
    assert done.stdout == "".join(f"{name}: ok\n" for name in specs), done.stdout + done.stderr
