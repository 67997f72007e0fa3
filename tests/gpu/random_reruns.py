"""Specs of an earlier run of `tests.gpu.random_specs`, once more: those that were wrong or had no memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.random_specs import PATIENCE, Mode, Record, wrong_on, wrong_to_compilers
from tests.processes import environment_of

if TYPE_CHECKING:
    from attnc.verify.case import Case
    from attnc.verify.subject import Subject


def again(record: Record, workers: int, out: Path | None, mode: Mode) -> None:
    """Runs what was wrong once more, and keeps in the record what still is."""
    import torch

    devices = torch.cuda.device_count()
    known = [f for f in (*record.failures, *record.unjudged) if f["wrong"] or f.get("lacked")]
    ran = [f for f in known if f["text"] and (f["case"] or mode.compiling)]

    def rerun(number: int) -> None:
        """Every so manyth of them, in a process that is started again behind one that it died of."""
        left = ran[number::workers]
        while left:
            command = [sys.executable, "-m", "tests.gpu.random_specs", "--these", *mode.options]
            with subprocess.Popen(
                ["timeout", "-s", "KILL", str(PATIENCE + 10 * len(left)), *command],
                env=environment_of(number, devices),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps(left))
                process.stdin.close()
                for line in process.stdout:
                    if line.startswith("wrong: "):
                        told(left.pop(0), json.loads(line.removeprefix("wrong: ")))
            if left:
                told(left.pop(0), {"": f"died: {process.returncode}"})

    def told(failure: dict[str, Any], wrong: dict[str, str] | None) -> None:
        """wrong: None where there was no room in memory again."""
        if wrong is None:
            said = "not enough memory"
        else:
            said = str(wrong) if wrong else "right"
        print(f"seed {failure['chunk']}, spec {failure['number']}: {said}", flush=True)
        if wrong is None:
            return
        was_judged = not failure.get("lacked")
        failure |= {"wrong": wrong, "lacked": ""}
        if not was_judged:
            record.unjudged.remove(failure)
            record.counts["specs"] += 1
            record.counts["without memory"] -= 1
            record.failures += [failure] if wrong else []
        elif not wrong and not failure["refused"]:
            record.failures.remove(failure)
        record.counts["wrong"] = sum(bool(failure["wrong"]) for failure in record.failures)
        if out is not None:
            record.write(out)

    with ThreadPoolExecutor(workers) as crew:
        list(crew.map(rerun, range(workers)))


def _wrong_or_unjudged(
    made: Mapping[str, Subject], case: Case, mode: Mode, number: int
) -> dict[str, str] | None:
    """What is wrong, None where there is no room in memory."""
    from attnc.runtime.memory import ran_out_of_memory

    try:
        return wrong_on(made, case, mode, number)
    except Exception as error:
        if ran_out_of_memory(error):
            return None
        raise


def rerun_here(mode: Mode) -> None:
    """Says of each failure that comes in what is still wrong with it."""
    from attnc.verify.case import Case
    from attnc.verify.subject import subject_of
    from tests.verify.judging import modules_of

    for failure in json.load(sys.stdin):
        modules = modules_of(failure["text"])
        if mode.compiling is None:
            ran = [
                module for module in modules if not mode.one or f"on {module.target}" in failure["features"]
            ]
            made = {module.target: subject_of(module) for module in ran}
            wrong = _wrong_or_unjudged(made, Case.from_json(failure["case"]), mode, failure["number"])
        else:
            wrong = wrong_to_compilers(modules, whole=mode.compiling == "whole")
        print("wrong: " + json.dumps(wrong), flush=True)
