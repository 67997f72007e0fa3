"""Runs PyTorch's own tests of FlexAttention on attnc's function, unchanged but for the import.

    python tools/torch_flex.py test_flex_attention.py test_flex_decoding.py -n 8 --out outcomes.json

The files are those of test/inductor/ in PyTorch's repository, at the tag of the torch that is installed; they
are no part of its wheel, nor of this repository. Those of torch 2.6 run under later ones too. A copy of each,
with `flex_attention` imported from attnc behind torch's own import, runs under pytest: on the GPU, or without
one on the CPU. Tests that `tools/torch_flex.toml` excludes, each for a reason, run as well. In a few that it
names, calls outside of torch.compile run torch's own function, as their reference. The exit status is 1 if a
test fails that is not excluded, or if all those of a method pass that is.

outcomes.json: torch's version and the device; of each file its name, SHA-256 and tests by outcome: names of
those that passed, and by reason those that failed, were skipped or are excluded. What ran on a GPU is kept in
tests/flex/torch_outcomes.json. A run that is cut short, by `--seconds` or by hand, keeps the outcomes it has
and ends with status 1; `--resume` reads `--out` and runs only the tests without an outcome and those that
failed.

The module is a plugin of the pytest that it starts, too: every outcome is written when it is there.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXCLUDED = Path(__file__).with_suffix(".toml")
#: Makes a class of tests for each device, in files of torch 2.8 and later.
_DEVICES = "instantiate_device_type_tests"
#: The variable that holds the folder in which a run and its plugin meet.
_FOLDER = "ATTNC_TORCH_FLEX"
_NONE_LEFT = pytest.ExitCode.NO_TESTS_COLLECTED
_MODULE, _FUNCTION = "torch.nn.attention.flex_attention", "flex_attention"


def read_exclusions(text: str) -> dict[str, str]:
    """Returns the reason for each method that is excluded. KeyError for a group without a reason."""
    groups = tomllib.loads(text)["excluded"]
    return {name: group["reason"] for group in groups for name in group["tests"]}


def read_references(text: str) -> tuple[str, ...]:
    """Returns the methods whose reference is torch's own function. KeyError for a group without a reason."""
    groups = tomllib.loads(text).get("reference", ())
    return tuple(name for group in groups if group["reason"] for name in group["tests"])


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


@cache
def list_methods(text: str) -> frozenset[str]:
    """Returns the names of a test file's methods, which its tests have, with parameters behind them."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test"))


def judge(
    found: Mapping[str, tuple[str, str]],
    exclusions: Mapping[str, str],
    methods: Iterable[str],
    earlier: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, dict[str, str]]:
    """Returns the outcome of each test, with its reason. found: (outcome, what the failure says) by name;
    methods: of the file; earlier: outcomes of tests that ran before. A method is excluded for nothing if all
    its tests pass.
    """

    def is_of(name: str, method: str) -> bool:
        return _is_of(name, method, methods)

    known = {name: next((method for method in exclusions if is_of(name, method)), "") for name in found}
    failing = {known[name] for name, (outcome, _) in found.items() if outcome == "failed"}
    excluded = [name for name, test in (earlier or {}).items() if test["outcome"] == "excluded"]
    failing |= {method for method in exclusions if any(is_of(name, method) for name in excluded)}
    judged = {}
    for name, (outcome, said) in sorted(found.items()):
        method = known[name]
        if method and outcome == "failed":
            judged[name] = {"outcome": "excluded", "reason": exclusions[method]}
        elif method and outcome == "passed" and method not in failing:
            judged[name] = {"outcome": "passed", "reason": "passes, and is excluded"}
        else:
            judged[name] = {"outcome": outcome, **({"reason": said} if said else {})}
    return judged


def group(tests: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Returns tests by outcome, as a record has them: names of those that passed, for no reason, and names by
    the reason of the others. `ungroup` is its inverse.
    """
    grouped: dict[str, Any] = {}
    for name, test in tests.items():
        if test == {"outcome": "passed"}:
            grouped.setdefault("passed", []).append(name)
        else:
            reasons = grouped.setdefault("left" if test["outcome"] == "passed" else test["outcome"], {})
            reasons.setdefault(test.get("reason", ""), []).append(name)
    return grouped


def ungroup(grouped: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns the outcome of each test of a record, with its reason."""
    tests = {name: {"outcome": "passed"} for name in grouped.get("passed", ())}
    for outcome, reasons in grouped.items():
        if outcome == "passed":
            continue
        said = "passed" if outcome == "left" else outcome
        for reason, names in reasons.items():
            tests |= {name: {"outcome": said, **({"reason": reason} if reason else {})} for name in names}
    return tests


def _is_of(name: str, wanted: str, methods: Iterable[str]) -> bool:
    """Returns whether a test is one of those wanted: an expression for a method, and for its first parameters
    or for all of them; the class need not be said. Of a test's name the longest method's is its own; its
    parameters follow that, the device the class's.
    """
    of_class, _, own = wanted.rpartition("::")
    found, _, test = name.rpartition("::")
    method = max((x for x in methods if f"{test}_".startswith(f"{x}_")), key=len, default=test)
    is_of_class = not of_class or re.fullmatch(rf"{of_class}(CPU|CUDA)?", found) is not None
    match = re.fullmatch(rf"({own})(_.*)?", test)
    return is_of_class and match is not None and len(match[1]) >= len(method)


def read_outcomes(lines: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the outcomes that the plugin wrote, by name: the worst of what was said of each test."""
    found: dict[str, tuple[str, str]] = {}
    for line in lines:
        name, outcome, said = json.loads(line)
        if name not in found or outcome != "passed":
            found[name] = (outcome, said)
    return found


def _name(nodeid: str) -> str:
    """Returns a test's name: its class and method."""
    return nodeid.partition("::")[2]


def accept_common_positions() -> None:
    """Makes torch's PagedAttention take positions that all sequences have in common, (S), as tests of torch
    2.6 give them; later ones are of each sequence, (B, S).
    """
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    assign = PagedAttention.assign
    if hasattr(assign, "__wrapped__"):
        return

    @wraps(assign)
    def assign_at(self: Any, batch_idx: Any, input_pos: Any, *tensors: Any, **named: Any) -> Any:
        if input_pos.dim() == 1:
            input_pos = input_pos.expand(len(batch_idx), -1)
        return assign(self, batch_idx, input_pos, *tensors, **named)

    PagedAttention.assign = assign_at  # type: ignore[method-assign]  # on purpose


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out the tests that have an outcome."""
    accept_common_positions()
    done = set(json.loads(Path(os.environ[_FOLDER], "done.json").read_text(encoding="utf-8")))
    items[:] = [item for item in items if _name(item.nodeid) not in done]


def compiled_alone(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what runs the first function in a graph of torch.compile, and the second elsewhere."""
    import torch

    def flex_attention(*given: Any, **named: Any) -> Any:
        return (ours if torch.compiler.is_compiling() else theirs)(*given, **named)

    return flex_attention


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    """Gives a test torch's function as its reference, where it is to have that."""
    wanted = read_references(EXCLUDED.read_text(encoding="utf-8"))
    methods = list_methods(item.path.read_text(encoding="utf-8"))
    if not any(_is_of(_name(item.nodeid), one, methods) for one in wanted):
        return (yield)
    import torch
    from torch.nn.attention import flex_attention as torchs

    module: Any = item.module
    ours = module.flex_attention
    module.flex_attention = compiled_alone(ours, torchs.flex_attention)
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # or torch's would be judged
            return (yield)
    finally:
        module.flex_attention = ours


def pytest_runtest_teardown() -> None:
    """Gives memory of the GPU back, which other processes may need."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes an outcome; only the process does that which the others report to."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.passed and report.when != "call"):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    said = "" if report.passed else str(crash.message) if crash is not None else report.longreprtext
    if isinstance(report.longrepr, tuple):
        said = report.longrepr[2].removeprefix("Skipped: ").removeprefix("TODO: ")
    line = json.dumps([_name(report.nodeid), report.outcome, said.strip().partition("\n")[0][:300]])
    with Path(os.environ[_FOLDER], "outcomes").open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def run(
    path: Path, processes: int, chosen: str, done: Iterable[str], seconds: float | None
) -> tuple[dict[str, tuple[str, str]], bool]:
    """Runs a file's tests in so many processes, but for those that are done. Returns outcomes, and whether
    all tests have one. chosen: an expression for pytest's -k, "" for all; seconds: after which it is ended.
    """
    text = path.read_text(encoding="utf-8")
    conditions = [f"({chosen})"] if chosen else []
    if _DEVICES in text:
        conditions.append(_device())
    with tempfile.TemporaryDirectory() as folder:
        copy, outcomes = Path(folder, path.name), Path(folder, "outcomes")
        copy.write_text(use_attnc(text), encoding="utf-8")
        outcomes.touch()
        Path(folder, "done.json").write_text(json.dumps(list(done)), encoding="utf-8")
        wanted = " and ".join(conditions)
        command = [sys.executable, "-m", "pytest", "-q", str(copy), "-k", wanted, "-p", "tools.torch_flex"]
        command += ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={folder}"]
        command += ["-n", str(processes)] if processes > 1 else []
        environment = {  # a pytest of its own, and no worker of one that runs this
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")},
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "PYTORCH_TEST_WITH_SLOW": "1",
            _FOLDER: folder,
        }
        status = _status(command, environment, seconds)
        found = read_outcomes(outcomes.read_text(encoding="utf-8").splitlines())
        return found, status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, _NONE_LEFT)


def _status(command: Sequence[str], environment: Mapping[str, str], seconds: float | None) -> int | None:
    """Returns the exit status of a command, None for one that was ended before it came."""
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            return process.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(process.pid, signal.SIGKILL)
            return None


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
    parser.add_argument("--resume", action="store_true", help="go on from the outcomes in --out")
    parser.add_argument("--seconds", type=float, help="for a file, after which its run is ended")
    options = parser.parse_args(arguments)
    if options.resume and not options.out:
        parser.error("--resume needs --out")
    import torch

    exclusions = read_exclusions(EXCLUDED.read_text(encoding="utf-8"))
    earlier = _earlier(options.out) if options.resume else {}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {"torch": torch.__version__, "device": device, "files": []}
    tests: dict[str, dict[str, str]] = {}
    whole = True
    for path in options.files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        methods = list_methods(path.read_text(encoding="utf-8"))
        done = {name: test for name, test in earlier.get(digest, {}).items() if test["outcome"] != "failed"}
        found, is_whole = run(path, options.processes, options.chosen, done, options.seconds)
        of_file = dict(sorted({**done, **judge(found, exclusions, methods, done)}.items()))
        record["files"].append({"name": path.name, "sha256": digest, "tests": group(of_file)})
        tests |= of_file
        whole = whole and is_whole
        if not is_whole:
            print(f"{path.name}: cut short: tests without an outcome are left")
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    counts = Counter(test["outcome"] for test in tests.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    wrong = {
        name: test
        for name, test in tests.items()
        if test["outcome"] == "failed" or (test["outcome"] == "passed" and "reason" in test)
    }
    for name, test in wrong.items():
        print(f"{name}: {test['outcome']}: {test.get('reason', '')}")
    return 1 if wrong or not whole else 0


def _earlier(out: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Returns the outcomes of an earlier run, by the SHA-256 of the file."""
    if not out.exists():
        return {}
    record = json.loads(out.read_text(encoding="utf-8"))
    return {file["sha256"]: ungroup(file["tests"]) for file in record["files"]}


if __name__ == "__main__":
    sys.exit(main())
