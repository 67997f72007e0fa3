"""Runs the quick tests at both ends of the ranges that pyproject.toml allows for torch, triton and CuPy.

    python tools/version_ends.py             # both ends
    python tools/version_ends.py --end old   # one of them

Each end is an environment of its own below .venv-ends/, kept between runs. The old end has the lowest version
of each range, the new end the newest that the index offers within it.
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
#: The packages whose range is tested; CuPy is only installed where there is a GPU to load it.
TESTED = ("torch", "triton", "cupy-cuda13x")
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


def requirements_of(end: str, ranges: dict[str, tuple[str, str]], has_gpu: bool) -> list[str]:
    """Returns what pip installs for an end, "old" or "new"."""
    names = [name for name in ranges if has_gpu or not name.startswith("cupy")]
    if end == "old":
        return [f"{name}=={ranges[name][0]}" for name in names]
    return [f"{name}{ranges[name][1]}" for name in names]


def run_quick_tests(end: str) -> int:
    """Makes the environment of an end and runs the quick tests in it; returns the exit status."""
    folder = ROOT / ".venv-ends" / end
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    ranges = find_ranges((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = requirements_of(end, ranges, has_gpu=Path("/dev/nvidiactl").exists())
    print(f"{end}: {', '.join(wanted)}", flush=True)
    install = [python, "-m", "pip", "install", "-q", "--upgrade"]
    subprocess.run([*install, "setuptools", "wheel", *wanted], check=True)
    subprocess.run([*install, "--no-build-isolation", "-e", f"{ROOT}[test]", *wanted], check=True)
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    # tools need parsers that attnc does not
    command = [python, "-m", "pytest", "-q", "-n", "2", "-m", "quick", "tests", "--ignore=tests/tools"]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--end", choices=("old", "new"))
    given = parser.parse_args()
    ends = (given.end,) if given.end else ("old", "new")
    failed = [end for end in ends if run_quick_tests(end)]
    if failed:
        sys.exit(f"failed with the versions at the end: {', '.join(failed)}")


if __name__ == "__main__":
    main()
