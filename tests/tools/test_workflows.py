"""Workflows run scripts that are in this repository, and commands that attnc has."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from attnc.cli.app import app

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted([*ROOT.glob(".github/workflows/*.yml"), *ROOT.glob("examples/ci/*.yml")])


def _steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
        assert job["timeout-minutes"] <= 360
        yield from job["steps"]


def _lines(workflow: Path) -> Iterator[str]:
    for step in _steps(workflow):
        yield from step.get("run", "").splitlines()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_each_step_uses_or_runs_something(workflow: Path) -> None:
    for step in _steps(workflow):
        assert ("uses" in step) != ("run" in step)


def test_scripts_of_the_workflows_are_executable_files() -> None:
    scripts = {
        match[0]
        for workflow in ROOT.glob(".github/workflows/*.yml")
        for line in _lines(workflow)
        if (match := re.match(r"\S+/\S+", line))
    }
    assert scripts == {".ci/run", ".ci/gpu"}
    for script in scripts:
        assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / ".ci" / "gpu"], ids=lambda path: path.name)
def test_commands_and_their_options_exist(path: Path) -> None:
    commands: Any = get_command(app)
    text = path.read_text(encoding="utf-8")
    for name, rest in re.findall(r"(?:^|[ /])attnc (\w+)((?: [^\n|#]*)?)", text, re.M):
        if path.name != "gpu" and not re.search(rf"(?:run: |^ +)attnc {name}", text, re.M):
            continue
        known = {option for param in commands.commands[name].params for option in param.opts}
        assert set(re.findall(r"--[\w-]+", rest)) <= known
