"""Trials: targets that must agree, cases that are kept, and large ones, on small cases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnc.target.files import render_files
from attnc.verify.case import Case
from attnc.verify.simt import available
from attnc.verify.strategies import fit_of
from attnc.verify.subject import Subject, subject_of
from attnc.verify.trials import across, check_large, corpus, file_of, large_cases
from tests.plans import SPECS, module_of, plans_of
from tests.planted.bug import plant
from tests.planted.registry import BUGS
from tests.verify.judging import committed, right, verify

# --- targets that must agree --------------------------------------------------------------------------------


@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
def test_targets_agree_and_a_bug_in_one_shows() -> None:
    triton, cuda = (module_of("paged_decode", target) for target in ("triton", "cuda.sm_80"))
    case = Case(dims={"B": 2, "M": 2, "Hkv": 1, "G": 3, "N": 100}, seed=4)
    same = across({"cuda.sm_80": subject_of(cuda)})
    assert not list(same(subject_of(triton), case))
    bug = BUGS["cuda serving: warps joined without their maxima"]
    name = f"{cuda.variant.name}.cu"
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
        made = subject_of(module)
        cases = corpus(module.variant, fit_of(module.variant.attention, len(made.configs)), Path("nowhere"))
        assert len(cases) == len(entries)
        assert all(entry["why"] for entry in entries)
        for case in cases:
            right(made, case)


def test_what_was_found_is_replayed_first(tmp_path: Path) -> None:
    module = plans_of("prefix_lm").modules[0]
    made = subject_of(module)
    variant = module.variant
    fit = fit_of(variant.attention, len(made.configs))
    case = Case(dims={"B": 1, "M": 3, "H": 1, "N": 4}, seed=9)
    (tmp_path / f"{variant.attention.name}-{variant.name}-0.json").write_text(case.to_json())
    other = replace(case, dims={"B": 1})
    (tmp_path / f"{variant.attention.name}-{variant.name}-1.json").write_text(other.to_json())
    replay = corpus(variant, fit, tmp_path)
    assert replay == (case,)
    seen: list[Case] = []
    verify(made, count=1, fills=("nan",), replay=replay, seconds=0, progress=lambda n, c, v: seen.append(c))
    assert seen == [case]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    module = plans_of("prefix_lm").modules[0]
    source = replace(module.variant.source, path=str(tmp_path / "a.attn"))
    variant = replace(module.variant, source=source)
    fit = fit_of(variant.attention, 1)
    file_of(variant).parent.mkdir()
    file_of(variant).write_text('{"prefix_lm": [{"case": 3}]}', encoding="utf-8")
    with pytest.raises(ValueError, match="not a file of cases"):
        corpus(variant, fit, tmp_path)
    file_of(variant).unlink()
    assert corpus(variant, fit, tmp_path) == ()


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
