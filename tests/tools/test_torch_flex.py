"""PyTorch's tests on attnc's function: the import that is added, the exclusions, and what a run says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.torch_flex import EXCLUDED, judge, main, read_exclusions, use_attnc

#: A file of the kind of PyTorch's, whose classes are made for each device.
FILE = """import unittest  # whose classes are those of instantiate_device_type_tests

import torch
from torch.nn.attention.flex_attention import (
    create_block_mask,
    flex_attention,
)


class Tests:
    device = "cpu"

    def test_identity(self):
        assert flex_attention.__module__.startswith("attnc")
        q = torch.ones(1, 1, 4, 16, device=self.device)
        assert torch.equal(flex_attention(q, q, q), q)

    def test_epilogue_fused_mode0(self):
        raise AssertionError("no such text")

    def test_skipped(self):
        self.skipTest("not here")


class TestFlexAttentionCPU(Tests, unittest.TestCase):
    pass


class TestFlexAttentionCUDA(Tests, unittest.TestCase):
    device = "cuda"
"""


def test_the_import_is_added_behind_torchs() -> None:
    lines = use_attnc(FILE).splitlines()
    assert lines[7] == "from attnc.flex import flex_attention"
    assert lines[:7] + lines[8:] == FILE.splitlines()
    with pytest.raises(ValueError, match="expected an import of flex_attention"):
        use_attnc("import torch\n")


def test_every_exclusion_has_a_reason_of_its_own() -> None:
    exclusions = read_exclusions(EXCLUDED.read_text(encoding="utf-8"))
    assert exclusions["test_epilogue_fused"].startswith("reads the code that Inductor generates")
    assert all(len(reason) > 20 for reason in exclusions.values())


def test_what_is_excluded_and_passes_is_told() -> None:
    found = {
        "TestA::test_fine_cuda": ("passed", ""),
        "TestA::test_known_mode_eager_cuda_float16": ("failed", "no"),
        "TestA::test_stale_cpu": ("passed", ""),
        "TestA::test_known_mode_eager_cuda_float32": ("passed", ""),
        "TestA::test_new_cuda": ("failed", "what went wrong"),
    }
    judged = judge(found, {"test_known": "a limit", "test_stale": "another"})
    assert [judged[name]["outcome"] for name in found] == ["passed", "excluded", "passed", "passed", "failed"]
    assert judged["TestA::test_known_mode_eager_cuda_float16"]["reason"] == "a limit"
    assert "reason" in judged["TestA::test_stale_cpu"]
    assert "reason" not in judged["TestA::test_known_mode_eager_cuda_float32"]
    assert judged["TestA::test_new_cuda"]["reason"] == "what went wrong"


@pytest.mark.slow
def test_a_file_of_torchs_kind_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "test_small.py", tmp_path / "out.json"
    file.write_text(FILE, encoding="utf-8")
    assert main([str(file), "--out", str(out)]) == 0
    (record,) = json.loads(out.read_text(encoding="utf-8"))["files"]
    assert sorted(test["outcome"] for test in record["tests"].values()) == ["excluded", "passed", "skipped"]
    file.write_text(FILE.replace("assert torch.equal", "assert not torch.equal"), encoding="utf-8")
    assert main([str(file)]) == 1
    assert "test_identity" in capfd.readouterr().out


#: Ends its process, the first time that it runs.
_ENDS = """
    def test_zero(self):
        import os, pathlib
        with open("FOLDER/runs", "a") as file:
            file.write("zero ")
        if pathlib.Path("FOLDER/runs").read_text() == "identity zero ":
            os._exit(9)
"""


@pytest.mark.slow
def test_a_run_that_is_cut_short_goes_on_later(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "test_small.py", tmp_path / "out.json"
    runs = "    def test_identity(self):\n        open('FOLDER/runs', 'a').write('identity ')\n"
    text = FILE.replace("    def test_identity(self):\n", runs)
    text = text.replace("\n\nclass TestFlexAttentionCPU", f"{_ENDS}\n\nclass TestFlexAttentionCPU")
    file.write_text(text.replace("FOLDER", str(tmp_path)), encoding="utf-8")
    assert main([str(file), "--out", str(out)]) == 1
    assert "cut short" in capfd.readouterr().out
    assert main([str(file), "--out", str(out), "--resume"]) == 0
    (record,) = json.loads(out.read_text(encoding="utf-8"))["files"]
    assert len(record["tests"]) == 4
    assert record["tests"]["TestFlexAttentionCPU::test_identity"] == {"outcome": "passed"}
    assert (tmp_path / "runs").read_text(encoding="utf-8") == "identity zero zero "
    assert main([str(file), "--out", str(out), "--resume"]) == 0  # nothing is left
