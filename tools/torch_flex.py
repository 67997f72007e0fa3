"""Runs PyTorch's own tests of FlexAttention on attnc's function, unchanged but for the import.

    python tools/torch_flex.py test_flex_attention.py test_flex_decoding.py -n 8 --out outcomes.json

The files are those of test/inductor/ in PyTorch's repository, at the tag of the torch that is installed; they
are no part of its wheel, nor of this repository. A copy of each, with `flex_attention` imported from attnc
behind torch's own import, runs under pytest: on the GPU, or without one on the CPU. Tests that
`tools/torch_flex.toml` excludes, each for a reason, run as well. The exit status is 1 if a test fails that is
not excluded, or if one passes that is.

outcomes.json: torch's version; of each file its name, SHA-256 and the outcomes of its tests by name
("passed", "failed", "skipped", "excluded"); reasons of those that are excluded, and what those that failed
say.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXCLUDED = Path(__file__).with_suffix(".toml")
#: Makes a class of tests for each device, in files of torch 2.8 and later.
_DEVICES = "instantiate_device_type_tests"
_MODULE, _FUNCTION = "torch.nn.attention.flex_attention", "flex_attention"


def read_exclusions(text: str) -> dict[str, str]:
    """Returns the reason for each method that is excluded. KeyError for a group without a reason."""
    groups = tomllib.loads(text)["excluded"]
    return {name: group["reason"] for group in groups for name in group["tests"]}


def use_attnc(text: str) -> str:
    """Returns a test file with attnc's function in place of torch's. ValueError where it imports none."""
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ImportFrom) or node.module != _MODULE:
            continue
        if _FUNCTION in (alias.asname or alias.name for alias in node.names):
            assert node.end_lineno is not None
            lines = text.splitlines(keepends=True)
            lines.insert(node.end_lineno, f"from attnc.flex import {_FUNCTION}\n")
            return "".join(lines)
    raise ValueError(f"expected an import of {_FUNCTION} from {_MODULE}")


def judge(found: Mapping[str, tuple[str, str]], exclusions: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns the outcome of each test, with its reason. found: (outcome, what the failure says) by name."""
    judged = {}
    for name, (outcome, said) in sorted(found.items()):
        reason = next((exclusions[method] for method in exclusions if _is_of(name, method)), "")
        if reason and outcome == "failed":
            judged[name] = {"outcome": "excluded", "reason": reason}
        elif reason and outcome == "passed":
            judged[name] = {"outcome": "passed", "reason": "passes, and is excluded"}
        else:
            judged[name] = {"outcome": outcome, **({"reason": said} if said else {})}
    return judged


def _is_of(name: str, method: str) -> bool:
    """Returns whether a test is one of a method's: its parameters and the device follow the method's name."""
    return re.fullmatch(rf"{method}(_.*)?", name.rpartition("::")[2]) is not None


def read_outcomes(report: Path) -> dict[str, tuple[str, str]]:
    """Returns the outcomes that a report of pytest's has (JUnit's XML)."""
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        failure = next((child for child in case if child.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        if failure is not None:
            found[name] = ("failed", (failure.get("message") or "").strip().splitlines()[0][:300])
        elif skipped is not None:
            found[name] = ("skipped", (skipped.get("message") or "")[:300])
        else:
            found[name] = ("passed", "")
    return found


def run(path: Path, processes: int, chosen: str) -> dict[str, tuple[str, str]]:
    """Runs a file's tests in so many processes. chosen: an expression for pytest's -k, "" for all."""
    text = path.read_text(encoding="utf-8")
    conditions = [f"({chosen})"] if chosen else []
    if _DEVICES in text:
        conditions.append(_device())
    with tempfile.TemporaryDirectory() as folder:
        copy, report = Path(folder, path.name), Path(folder, "report.xml")
        copy.write_text(use_attnc(text), encoding="utf-8")
        wanted = " and ".join(conditions)
        command = [sys.executable, "-m", "pytest", "-q", str(copy), f"--junitxml={report}", "-k", wanted]
        command += ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={folder}"]
        command += ["-n", str(processes)] if processes > 1 else []
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "PYTORCH_TEST_WITH_SLOW": "1",
        }
        subprocess.run(command, env=environment, check=False)
        if not report.exists():
            raise RuntimeError(f"{path.name}: pytest wrote no report")
        return read_outcomes(report)


def _device() -> str:
    """Returns what the names of the classes end in that run on this machine."""
    import torch

    return "CUDA" if torch.cuda.is_available() else "CPU"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="test_flex_attention.py and its like"
    )
    parser.add_argument(
        "-n", type=int, default=1, dest="processes", help="processes that share a file's tests"
    )
    parser.add_argument("-k", default="", dest="chosen", help="which tests, as pytest's -k")
    parser.add_argument("--out", type=Path, help="where the outcomes are written, as JSON")
    options = parser.parse_args(arguments)
    import torch

    exclusions = read_exclusions(EXCLUDED.read_text(encoding="utf-8"))
    record: dict[str, Any] = {"torch": torch.__version__, "files": []}
    for path in options.files:
        judged = judge(run(path, options.processes, options.chosen), exclusions)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        record["files"].append({"name": path.name, "sha256": digest, "tests": judged})
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    tests = {name: test for file in record["files"] for name, test in file["tests"].items()}
    counts = Counter(test["outcome"] for test in tests.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    wrong = {
        name: test
        for name, test in tests.items()
        if test["outcome"] == "failed" or (test["outcome"] == "passed" and "reason" in test)
    }
    for name, test in wrong.items():
        print(f"{name}: {test['outcome']}: {test.get('reason', '')}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
