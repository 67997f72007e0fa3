"""NVIDIA's compute-sanitizer over generated CUDA modules: bad accesses, uninitialised reads, barriers, races.

A process runs some modules under one tool (`attnc.verify.launches`) and says on its output where each begins
and ends; what the tool reports in between is about that module. Modules that a crash kept from running are
run again by another process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from attnc.runtime.children import module_command

TOOLS: tuple[str, ...] = ("memcheck", "initcheck", "synccheck", "racecheck")
BEGIN, END = "== begin ", "== end "

_VERSION = re.compile(r"Version (\S+)")
_SILENT = re.compile(
    r"=========( COMPUTE-SANITIZER| ERROR SUMMARY: 0 errors| RACECHECK SUMMARY: 0 hazards.*)?$"
)
_SECONDS = 600
_LINES = 12

Progress: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A module to run: its name, what `attnc.verify.launches` needs to find it, and the tools that watch."""

    name: str
    spec: str
    attention: str
    variant: str
    target: str
    tools: tuple[str, ...] = TOOLS


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFinding:
    """What a tool said about a module."""

    name: str
    tool: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """launches: kernels that one tool has watched in each module; findings: what the tools reported."""

    launches: Mapping[str, int]
    findings: tuple[ToolFinding, ...]

    @property
    def clean(self) -> tuple[str, ...]:
        guilty = {finding.name for finding in self.findings}
        return tuple(name for name in self.launches if name not in guilty)


def find_sanitizer() -> Path | None:
    """Returns compute-sanitizer, from the path or the usual place of the CUDA toolkit."""
    usual = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    found = shutil.which("compute-sanitizer") or (str(usual) if usual.is_file() else None)
    return None if found is None else Path(found)


def version(sanitizer: Path) -> str:
    text = subprocess.run([str(sanitizer), "--version"], capture_output=True, text=True, check=True).stdout
    found = _VERSION.search(text)
    return f"compute-sanitizer {found[1]}" if found else "compute-sanitizer"


def sanitize(sanitizer: Path, jobs: Sequence[Job], *, processes: int, progress: Progress) -> ToolOutcome:
    """Runs every module under each of its tools, in `processes` processes at a time.

    The first tool goes alone, so that the others find all machine code in the cache."""
    findings: list[ToolFinding] = []
    launches: dict[str, int] = {}

    def run(tool: str, part: Sequence[Job]) -> None:
        left = list(part)
        while left:
            ended, reports = _run(sanitizer, tool, left)
            findings.extend(reports)
            launches.update(ended)
            for job in left[: len(ended) + 1]:
                progress(f"{tool} {job.name}")
            left = left[len(ended) + 1 :]  # the one after those that ended is the one that crashed

    with ThreadPoolExecutor(processes) as pool:
        for tools in (TOOLS[:1], TOOLS[1:]):
            count = max(1, processes // len(tools))
            parts = [(t, part) for t in tools for part in _deal_out([j for j in jobs if t in j.tools], count)]
            list(pool.map(lambda one: run(*one), parts))
    ordered = tuple(sorted(findings, key=lambda finding: (finding.name, TOOLS.index(finding.tool))))
    return ToolOutcome(launches=launches, findings=ordered)


def read_output(tool: str, jobs: Sequence[Job], text: str) -> tuple[dict[str, int], tuple[ToolFinding, ...]]:
    """Launches of the modules that ended, and what was reported, from the output of one process."""
    names = [job.name for job in jobs]
    ended: dict[str, int] = {}
    said: dict[str, list[str]] = {}
    current = names[0]
    for line in text.splitlines():
        if line.startswith(BEGIN):
            current = line.removeprefix(BEGIN)
        elif line.startswith(END):
            name, _, count = line.removeprefix(END).rpartition(" ")
            ended[name] = int(count)
        elif line.startswith("=========") and not _SILENT.match(line):
            said.setdefault(current, []).append(line.removeprefix("=========").strip())
    crashed = next((name for name in names if name not in ended), None)
    if crashed is not None:
        said.setdefault(crashed, []).extend(["did not end", *text.splitlines()[-3:]])
    return ended, tuple(
        ToolFinding(name=name, tool=tool, message="\n".join(lines[:_LINES])) for name, lines in said.items()
    )


def _run(sanitizer: Path, tool: str, jobs: Sequence[Job]) -> tuple[dict[str, int], tuple[ToolFinding, ...]]:
    described = json.dumps([[job.name, job.spec, job.attention, job.variant, job.target] for job in jobs])
    command = [str(sanitizer), "--tool", tool, *module_command("attnc.verify.launches", described)]
    # Each tensor is an allocation of its own, so that the tool sees where it ends.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            env=environment,
            check=False,
        )
        text = done.stdout
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode(errors="replace") + f"\nno end after {_SECONDS} s"
    return read_output(tool, jobs, text)


def _deal_out(jobs: Sequence[Job], count: int) -> list[Sequence[Job]]:
    return [part for n in range(count) if (part := jobs[n::count])]
