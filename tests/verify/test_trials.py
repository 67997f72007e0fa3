"""Trials: targets that must agree, cases that are kept, and large ones, on small cases."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.target.files import render_files
from attnc.verify.case import Case, Kept
from attnc.verify.properties import violations
from attnc.verify.search import AttentionTrial, Report, run, search
from attnc.verify.simt import available
from attnc.verify.subject import Subject, subject_of
from attnc.verify.trials import across, check_large, corpus, file_of, large_cases, rule_of, trial_of
from tests.plans import SPECS, module_of, plans_of
from tests.planted.bug import plant
from tests.planted.registry import BUGS
from tests.verify.judging import committed, verify

# --- targets that must agree --------------------------------------------------------------------------------


@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
def test_targets_agree_and_a_bug_in_one_shows() -> None:
    triton, cuda = (module_of("paged_decode", target) for target in ("triton", "cuda.sm_80"))
    case = Case(dims={"B": 2, "M": 2, "Hkv": 1, "G": 3, "N": 100}, seed=4)
    same = across({"cuda.sm_80": subject_of(cuda)})
    assert not list(same(subject_of(triton), case))
    bug = BUGS["cuda serving: warps joined without their maxima"]
    name = f"{cuda.variant.kernels}.cu"
    text = plant(render_files(cuda, path="paged_decode.attn", sha256="0")[name], bug)
    wrong = across({"cuda.sm_80": subject_of(cuda, {name: text})})
    (message,) = wrong(subject_of(triton), case)
    assert message.startswith("cuda.sm_80: ")


# --- cases that are kept ------------------------------------------------------------------------------------


KEPT = sorted((SPECS / "cases").glob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_cases_fit_their_spec_and_pass(path: Path) -> None:
    modules = plans_of(path.stem).modules
    kept = json.loads(path.read_text(encoding="utf-8"))
    for name, entries in kept.items():
        module = next(m for m in modules if m.variant.attention.name == name and m.target == "triton")
        trial = trial_of(module, failures=Path("nowhere"))
        assert len(trial.kept) == len(entries)
        assert all(entry["why"] for entry in entries)
        for kept in trial.kept:
            verdict = trial.replay(kept, ("nan",))
            assert verdict.ok, verdict.message


def ordinary_cases(trial: AttentionTrial) -> tuple[list[Case], Report]:
    """What runs besides kept failures, and the report."""
    seen: list[Case] = []
    report = run(trial, count=9, fills=("nan",), progress=lambda number, case, verdict: seen.append(case))
    return seen, report


def test_kept_failures_run_beside_the_other_cases(tmp_path: Path) -> None:
    """A case of before, without a rule, is kept too; one of a spec that has changed is not."""
    module = plans_of("prefix_lm").modules[0]
    case = Case(dims={"B": 1, "M": 3, "H": 1, "N": 4}, seed=9)
    name = f"{module.variant.attention.name}-{module.variant.name}"
    (tmp_path / f"{name}-0.json").write_text(case.to_json())
    (tmp_path / f"{name}-1.json").write_text(Kept(case=replace(case, dims={"B": 1})).to_json())
    (tmp_path / f"{name}-2.json").write_text(Kept(case=case, rule="run to run").to_json())
    trials = {folder: trial_of(module, failures=folder) for folder in (tmp_path, tmp_path / "empty")}
    assert trials[tmp_path].kept == (Kept(case=case), Kept(case=case, rule="run to run"))
    held: dict[Path, list[Case]] = {folder: [] for folder in trials}
    found = {}
    for folder, trial in trials.items():
        assert isinstance(trial, AttentionTrial)
        trial.subject = replace(trial.subject, gradients=None)
        trial.rules = lambda subject, case, held=held[folder]: held.append(case) or ()
        found[folder] = ordinary_cases(trial)
    (seen, report), (others, plain) = found.values()
    assert seen == others
    assert held[tmp_path] == held[tmp_path / "empty"] != []
    assert replace(report, seconds=0.0, replayed=0) == replace(plain, seconds=0.0)
    assert (report.replayed, plain.replayed) == (2, 0)


def test_a_kept_failure_is_held_to_the_rule_that_it_broke(tmp_path: Path) -> None:
    """What broke a rule breaks it again, though no ordinary case is held to it, and fails alone."""
    module = module_of("full")
    made = replace(subject_of(module), gradients=None)
    calls = itertools.count()

    def restless(*given: Any, config: Any, out: Any = None) -> Any:
        result = made.module.full(*given, out=out, config=config)
        if next(calls) % 2:  # well within the bound
            lse = result[1]
            lse.copy_(torch.where(lse.isfinite(), torch.nextafter(lse, torch.tensor(1e30)), lse))
        return result

    broken = replace(made, module=SimpleNamespace(CONFIGS=made.module.CONFIGS, full=restless))  # type: ignore[arg-type]  # it has what is used
    trial = AttentionTrial(broken, lambda subject, case: violations(subject, case, only="run to run"))
    report = search(trial, examples=20, shrink=False, seed=3, failures=tmp_path)
    assert "run to run" in report.failures[0].verdict.message
    (kept,) = corpus(trial, module.variant.source, "full", tmp_path)
    assert kept.rule == "run to run"
    again = verify(broken, count=1, fills=("nan",), seconds=0, kept=(kept,))
    assert (again.ok, again.examples, again.replayed) == (False, 1, 1)
    assert again.failures[0].case == kept.case
    assert verify(made, count=1, fills=("nan",), seconds=0, kept=(kept,)).ok


def test_a_rule_is_found_by_its_name() -> None:
    """That of a target, if it is a peer; all properties for what none is called, as an exception is."""
    triton, cuda = (module_of("paged_decode", target) for target in ("triton", "cuda.sm_80"))
    assert rule_of({"cuda.sm_80": cuda}, "cuda.sm_90a") is None
    for name, only in (("keys permute", "keys permute"), ("calls", "calls"), ("ValueError", "")):
        rules = rule_of({"cuda.sm_80": cuda}, name)
        assert isinstance(rules, partial)
        assert rules.keywords == {"only": only}
    if available():
        rules = rule_of({"cuda.sm_80": cuda}, "cuda.sm_80")
        assert rules is not None
        assert not list(rules(subject_of(triton), Case(dims={"B": 1, "M": 1, "Hkv": 1, "G": 1, "N": 5})))


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    module = plans_of("prefix_lm").modules[0]
    source = replace(module.variant.source, path=str(tmp_path / "a.attn"))
    trial = trial_of(module)
    file_of(source).parent.mkdir()
    file_of(source).write_text('{"prefix_lm": [{"case": 3}]}', encoding="utf-8")
    with pytest.raises(ValueError, match="not a file of cases"):
        corpus(trial, source, "prefix_lm", tmp_path)
    file_of(source).unlink()
    assert corpus(trial, source, "prefix_lm", tmp_path) == ()
    (tmp_path / f"{trial.name}-0.json").write_text('{"case": {"dims": {}}, "rule": 3}', encoding="utf-8")
    with pytest.raises(ValueError, match="its 'rule' is 3"):
        corpus(trial, source, "prefix_lm", tmp_path)


# --- sizes that only a GPU reaches --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dim", "size"),
    [
        ("causal_gqa", "M", 4097),
        ("causal_gqa", "Hkv", 65536),
        ("decode", "Hkv", 65537),
        ("document", "N", 16385),
        ("varlen", "B", 128),
        ("varlen", "B", 16384),
        ("decode", "N", 65552),
        ("paged_decode", "N", 16 * 4097),
    ],
)
def test_cases_reach_what_is_large(name: str, dim: str, size: int) -> None:
    cases = list(large_cases(committed(name).space))
    assert size in {case.dims[dim] for case in cases}
    assert len({case.to_json() for case in cases}) == len(cases) <= 60


CASE = Case(dims={"B": 2, "M": 40, "N": 30, "H": 2})


def test_right_results_are_judged_right() -> None:
    verdict = check_large(committed("prefix_lm"), CASE)
    assert verdict.ok, verdict.message
    assert verdict.worst > 0.1


@pytest.mark.parametrize(("change", "said"), [(1.0, "is off"), (float("nan"), "that are NaN")])
def test_wrong_results_are_found(change: float, said: str) -> None:
    real = committed("prefix_lm")

    def wrong(*given: object, out: object, config: object) -> None:
        real.module.prefix_lm(*given, out=out, config=config)
        out[1, 39, 1, 3] += change  # type: ignore[index]  # a tensor

    module = SimpleNamespace(CONFIGS=real.module.CONFIGS, prefix_lm=wrong)
    made = Subject(variant=real.variant, bound=real.bound, module=module)  # type: ignore[arg-type]  # has what is used
    assert said in check_large(made, CASE).message
