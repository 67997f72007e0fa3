"""The sanitizer's reports are read right, whatever happens to its processes; the tool itself needs a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from attnc.verify.sanitize import TOOLS, Job, read_output, sanitize

JOBS = tuple(Job(name=name, spec="s.attn", attention="a", variant="v", target="t") for name in "abc")
CLEAN = """========= COMPUTE-SANITIZER
== begin a
== end a 3
== begin b
== end b 1
== begin c
== end c 2
========= ERROR SUMMARY: 0 errors
"""
#: Stands in for compute-sanitizer: crashes in b under initcheck, reports c under racecheck.
TOOL = """#!{python}
import json, sys
tool, jobs = sys.argv[2], json.loads(sys.argv[-1])
print("========= COMPUTE-SANITIZER")
for name, *_ in jobs:
    print("== begin", name)
    if tool == "initcheck" and name == "b":
        print("Traceback ...")
        sys.exit(1)
    if tool == "racecheck" and name == "c":
        print("========= Error: Race reported between Write access at c_forward+0x10")
        print("=========     and Read access at c_forward+0x20 [8 hazards]")
    print("== end", name, 4)
print("========= ERROR SUMMARY: 0 errors")
"""


def test_clean_output() -> None:
    assert read_output("memcheck", JOBS, CLEAN) == ({"a": 3, "b": 1, "c": 2}, ())


def test_reports_belong_to_the_module_that_runs() -> None:
    report = "========= Invalid __global__ read of size 16 bytes\n"
    ended, (finding,) = read_output("memcheck", JOBS, CLEAN.replace("== end b", report + "== end b"))
    assert set(ended) == {"a", "b", "c"}
    assert (finding.name, finding.message) == ("b", "Invalid __global__ read of size 16 bytes")


def test_an_output_that_breaks_off() -> None:
    ended, (finding,) = read_output("memcheck", JOBS, CLEAN[: CLEAN.index("== end b")])
    assert ended == {"a": 3}
    assert finding.name == "b"
    assert finding.message.startswith("did not end")


def test_all_tools_see_all_modules_though_one_crashes(tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(python=sys.executable), encoding="utf-8")
    tool.chmod(0o755)
    seen: list[str] = []
    outcome = sanitize(tool, JOBS, processes=2, progress=seen.append)
    assert sorted(seen) == sorted(f"{name} {job.name}" for name in TOOLS for job in JOBS)
    assert [(f.name, f.tool) for f in outcome.findings] == [("b", "initcheck"), ("c", "racecheck")]
    assert outcome.clean == ("a",)
    assert outcome.launches == {"a": 4, "b": 4, "c": 4}


def test_tools_that_do_not_understand_a_kernel_are_left_out(tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(python=sys.executable), encoding="utf-8")
    tool.chmod(0o755)
    jobs = [replace(job, tools=("memcheck", "synccheck")) for job in JOBS[1:]]
    seen: list[str] = []
    outcome = sanitize(tool, (JOBS[0], *jobs), processes=8, progress=seen.append)
    assert sorted(line.split()[0] for line in seen if line.endswith("a")) == sorted(TOOLS)
    assert {line.split()[0] for line in seen if not line.endswith("a")} == {"memcheck", "synccheck"}
    assert sorted(outcome.clean) == ["a", "b", "c"]
