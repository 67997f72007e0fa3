"""Runs the quick tests at both ends of the ranges that pyproject.toml allows for torch, triton and CuPy.

    python tools/version_ends.py             # both ends
    python tools/version_ends.py --end old   # one of them

Each end is an environment of its own below .venv-ends/, kept between runs. The old end has the lowest version
of each range, the new end the newest that the index offers within it. CuPy compiles a kernel for each CUDA
target at both ends, which takes no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The packages whose range is tested.
TESTED = ("torch", "triton", "cupy-cuda13x")
#: What generated modules use of CuPy: NVRTC compiles a kernel of each target; other functions are there.
_COMPILED_BY_CUPY = """
from attnc.runtime.nvrtc import nvrtc_version

nvrtc_version()  # loads NVRTC, which CuPy then finds: PyTorch for CUDA does so too

import cupy
from cupy.cuda import driver, runtime
from generated.causal_gqa.cuda_sm_80 import bf16_d64 as sm_80
from generated.causal_gqa.cuda_sm_90a import bf16_d64 as sm_90a

for arch, module in (("sm_80", sm_80), ("sm_90a", sm_90a)):
    program = module.CALL.program
    (name, *_) = program.kernels
    image = program.compile(name, program.options(module.CONFIGS[0], True, arch))
    print(f"CuPy {cupy.__version__}: {name} for {arch} has {len(image)} bytes")
for owner, names in ((driver, "ctxGetCurrent launchKernel"), (runtime, "setDevice"), (cupy, "RawModule")):
    assert all(callable(getattr(owner, name)) for name in names.split()), owner
"""
_REQUIREMENT = re.compile(r"(?P<name>[\w-]+)>=(?P<lowest>[\d.]+)(?P<rest>[^;]*)")


def find_ranges(pyproject: str) -> dict[str, tuple[str, str]]:
    """Returns the lowest version and the whole range of each tested package, from the text of
    pyproject.toml. KeyError where one has no lowest version.
    """
    project = tomllib.loads(pyproject)["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    found = {}
    for requirement in wanted:
        match = _REQUIREMENT.match(requirement)
        if match and match["name"] in TESTED:
            found[match["name"]] = (match["lowest"], f">={match['lowest']}{match['rest'].strip()}")
    return {name: found[name] for name in TESTED}


def requirements_of(end: str, ranges: dict[str, tuple[str, str]]) -> list[str]:
    """Returns what pip installs for an end, "old" or "new"."""
    if end == "old":
        return [f"{name}=={lowest}" for name, (lowest, _) in ranges.items()]
    return [f"{name}{allowed}" for name, (_, allowed) in ranges.items()]


def passes_end(end: str) -> bool:
    """Makes the environment of an end; returns whether the quick tests pass in it, and CuPy compiles."""
    folder = ROOT / ".venv-ends" / end
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    ranges = find_ranges((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = requirements_of(end, ranges)
    print(f"{end}: {', '.join(wanted)}", flush=True)
    install = [python, "-m", "pip", "install", "-q", "--upgrade"]
    subprocess.run([*install, "setuptools", "wheel", *wanted], check=True)
    subprocess.run([*install, "--no-build-isolation", "-e", f"{ROOT}[test]", *wanted], check=True)
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    # tools need parsers that attnc does not
    tests = [python, "-m", "pytest", "-q", "-n", "2", "-m", "quick", "tests", "--ignore=tests/tools"]
    compiled = [python, "-c", _COMPILED_BY_CUPY]
    statuses = [subprocess.run(run, cwd=ROOT, env=environment).returncode for run in (compiled, tests)]
    return not any(statuses)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--end", choices=("old", "new"))
    given = parser.parse_args()
    ends = (given.end,) if given.end else ("old", "new")
    failed = [end for end in ends if not passes_end(end)]
    if failed:
        sys.exit(f"failed with the versions at the end: {', '.join(failed)}")


if __name__ == "__main__":
    main()
