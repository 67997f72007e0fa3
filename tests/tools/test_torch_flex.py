"""PyTorch's tests on attnc's function: the import that is added, the exclusions, and what a run says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import run_program
from tools import torch_flex
from tools.torch_flex import (
    EXCLUDED,
    accept_common_positions,
    group,
    judge,
    list_methods,
    main,
    read_exclusions,
    run,
    ungroup,
    use_attnc,
)

#: What ran on a GPU.
KEPT = Path(__file__).parents[1] / "flex" / "torch_outcomes.json"

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

    def test_builtin_score_mods_float16(self):
        q = torch.ones(1, 1, 4, 16, device=self.device)
        compiled = torch.compile(lambda: flex_attention(q, q, q), backend="eager", fullgraph=True)
        assert torch.equal(compiled(), flex_attention(q, q, q))
        assert not flex_attention.__module__.startswith("attnc")

    def test_epilogue_fused(self):
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
    methods = ["test_fine", "test_known", "test_stale", "test_new"]
    judged = judge(found, {"test_known": "a limit", "test_stale": "another"}, methods)
    assert [judged[name]["outcome"] for name in found] == ["passed", "excluded", "passed", "passed", "failed"]
    assert judged["TestA::test_known_mode_eager_cuda_float16"]["reason"] == "a limit"
    assert "reason" in judged["TestA::test_stale_cpu"]
    assert "reason" not in judged["TestA::test_known_mode_eager_cuda_float32"]
    assert judged["TestA::test_new_cuda"]["reason"] == "what went wrong"
    earlier = {"TestA::test_stale_cuda": {"outcome": "excluded", "reason": "another"}}
    judged = judge({"TestA::test_stale_cpu": ("passed", "")}, {"test_stale": "another"}, methods, earlier)
    assert judged == {"TestA::test_stale_cpu": {"outcome": "passed"}}


def test_an_exclusion_may_be_of_one_class() -> None:
    found = {
        "TestOne::test_known_float16": ("failed", "no"),
        "TestOneCUDA::test_known_cuda": ("failed", "no"),
        "TestTwo::test_known_float16": ("passed", ""),
        "TestTwoCUDA::test_known_cuda": ("failed", "what went wrong"),
    }
    judged = judge(found, {"TestOne::test_known": "a limit"}, ["test_known"])
    assert [judged[name]["outcome"] for name in found] == ["excluded", "excluded", "passed", "failed"]
    assert judged["TestTwo::test_known_float16"] == {"outcome": "passed"}


def test_a_method_is_not_another_one_that_its_name_begins_like() -> None:
    found = {
        "Test::test_known_cuda": ("failed", "no"),
        "Test::test_known_too_cuda_float16": ("failed", "what went wrong"),
        "Test::test_other_float16_mode0": ("failed", "no"),
        "Test::test_other_float64": ("failed", "what went wrong"),
    }
    exclusions = {"test_known": "a limit", "test_other_b?float(16|32)": "another"}
    judged = judge(found, exclusions, ["test_known", "test_known_too", "test_other"])
    assert [test["outcome"] for test in judged.values()] == ["excluded", "failed", "excluded", "failed"]
    assert list_methods(FILE) == {
        "test_identity",
        "test_builtin_score_mods_float16",
        "test_epilogue_fused",
        "test_skipped",
    }


def test_the_page_has_the_figures_of_what_was_kept() -> None:
    page = " ".join((EXCLUDED.parents[1] / "docs" / "flex.md").read_text(encoding="utf-8").split())
    for file in json.loads(KEPT.read_text(encoding="utf-8"))["files"]:
        tests = file["tests"]
        counts = [f"{len(tests['passed'])} passed"]
        for outcome in ("skipped", "excluded"):
            count = sum(map(len, tests.get(outcome, {}).values()))
            counts += [f"{count} {outcome}"] if count else []
        assert f"`{file['name']}`: {', '.join(counts)}" in page


def test_a_record_has_tests_by_outcome_and_reason() -> None:
    tests = {
        "TestA::test_a": {"outcome": "passed"},
        "TestA::test_b": {"outcome": "passed", "reason": "passes, and is excluded"},
        "TestA::test_c": {"outcome": "excluded", "reason": "a limit"},
        "TestA::test_d": {"outcome": "excluded", "reason": "a limit"},
        "TestA::test_e": {"outcome": "failed"},
    }
    grouped = group(tests)
    assert grouped["passed"] == ["TestA::test_a"]
    assert grouped["excluded"] == {"a limit": ["TestA::test_c", "TestA::test_d"]}
    assert ungroup(grouped) == tests


def test_what_was_kept_of_a_gpu_has_no_failure_and_todays_exclusions() -> None:
    record = json.loads(KEPT.read_text(encoding="utf-8"))
    assert record["device"] != "cpu"
    reasons = set(read_exclusions(EXCLUDED.read_text(encoding="utf-8")).values())
    for file in record["files"]:
        assert set(file["tests"]) <= {"passed", "skipped", "excluded"}, file["name"]
        assert set(file["tests"].get("excluded", {})) <= reasons, file["name"]


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_positions_of_pages_may_be_those_of_all_sequences(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tests of torch 2.6 give them."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    monkeypatch.setattr(PagedAttention, "assign", PagedAttention.assign)  # put back afterwards
    accept_common_positions()
    accept_common_positions()
    paged = PagedAttention(4, 2, 2, device="cpu")
    for b in range(2):
        paged.reserve(torch.tensor(b), torch.tensor(4))
    k, v = torch.randn(2, 2, 1, 4, 16)
    caches = torch.zeros(2, 1, 1, 8, 16)
    paged.assign(torch.arange(2), torch.arange(4).expand(shape), k, v, *caches)
    for x, cache in zip((k, v), caches, strict=True):
        pages = cache.view(4, 2, 16)[paged.page_table[:, :2].flatten()]
        assert torch.equal(pages.view(2, 1, 4, 16), x)


#: Fails, and is not excluded.
_WRONG = """
    def test_wrong(self):
        q = torch.ones(1, 1, 4, 16, device=self.device)
        assert not torch.equal(flex_attention(q, q, q), q)
"""


@pytest.mark.slow
def test_a_file_of_torchs_kind_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}

    def run_and_keep(*given: Any) -> tuple[dict[str, tuple[str, str]], bool]:
        outcomes, is_whole = run(*given)
        found.update(outcomes)
        return outcomes, is_whole

    def fork(command: Sequence[str], environment: Mapping[str, str], seconds: float | None) -> int:
        program = "import sys, pytest; raise SystemExit(pytest.main(sys.argv[1:]))"
        return run_program(program, *command[3:], environment=environment, has_attnc=True).returncode

    file, out = tmp_path / "test_small.py", tmp_path / "out.json"
    file.write_text(FILE.replace("\n\nclass TestFlexAttentionCPU", f"{_WRONG}\n\nclass TestFlexAttentionCPU"))
    monkeypatch.setattr(torch_flex, "_status", fork)  # in less time; by night its own process
    monkeypatch.setattr(torch_flex, "run", run_and_keep)
    assert main([str(file), "--out", str(out)]) == 1
    said = capfd.readouterr().out
    assert "test_wrong: failed: assert not True" in said
    assert "cut short" not in said
    (record,) = json.loads(out.read_text(encoding="utf-8"))["files"]
    outcomes = {name.partition("::")[2]: test["outcome"] for name, test in ungroup(record["tests"]).items()}
    assert outcomes == {
        "test_identity": "passed",
        "test_builtin_score_mods_float16": "passed",
        "test_epilogue_fused": "excluded",
        "test_skipped": "skipped",
        "test_wrong": "failed",
    }
    right = {name: outcome for name, outcome in found.items() if not name.endswith("::test_wrong")}
    monkeypatch.setattr(torch_flex, "run", lambda *_: (right, True))
    assert main([str(file)]) == 0  # of the same tests without that one


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
@pytest.mark.nightly
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
    assert len(ungroup(record["tests"])) == 5
    assert "TestFlexAttentionCPU::test_identity" in record["tests"]["passed"]
    assert (tmp_path / "runs").read_text(encoding="utf-8") == "identity zero zero "
    assert main([str(file), "--out", str(out), "--resume"]) == 0  # nothing is left
