"""What is said of GPUs and systems agrees with the targets and with what has been recorded."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest

from attnc.cli.platforms import FAMILIES, GPUS, SYSTEMS, state_of, system_here
from attnc.plan.device import DEVICES

ROOT = Path(__file__).parents[2]


def test_what_is_tested_has_records() -> None:
    recorded = (ROOT / "generated" / "verified.json").read_text()
    devices = {entry["device"] for entry in json.loads(recorded)["verified"].values()}
    assert all("H100" in device or "H200" in device for device in devices)
    assert {state_of(target, 90) for target in FAMILIES} == {"tested"}


def test_every_device_that_is_planned_for_has_a_row() -> None:
    assert {device.capability for device in DEVICES.values()} <= set(GPUS.values())


def test_a_target_is_expected_where_it_runs_and_nowhere_else() -> None:
    assert state_of("triton", 75) == "no"
    assert state_of("cuda.sm_80", 89) == "expected"
    assert state_of("cuda.sm_90a", 100) == "no"


@pytest.mark.parametrize(
    ("system", "release", "machine", "row"),
    [
        ("linux", "6.8.0", "x86_64", "Linux, x86-64"),
        ("linux", "5.15.90.1-microsoft-standard-WSL2", "x86_64", "WSL 2"),
        ("linux", "6.8.0", "aarch64", "Linux, Arm (GH200)"),
        ("darwin", "24.0", "arm64", "Windows, macOS"),
        ("win32", "11", "AMD64", "Windows, macOS"),
    ],
)
def test_a_machine_has_a_row(
    system: str, release: str, machine: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert system_here() == row
    assert row in SYSTEMS
