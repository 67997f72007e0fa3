"""Cases that are kept are run again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attnc.verify.case import Case
from attnc.verify.search import verify
from attnc.verify.strategies import fit_of
from attnc.verify.subject import subject_of
from attnc.verify.trials import corpus, file_of
from tests.plans import plans_of
from tests.verify.judging import right

SPECS = Path(__file__).parents[2] / "specs"
KEPT = sorted((SPECS / "cases").glob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_cases_fit_their_spec_and_pass(path: Path) -> None:
    modules = plans_of(SPECS / f"{path.stem}.attn").modules
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
    module = plans_of(SPECS / "prefix_lm.attn").modules[0]
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
    module = plans_of(SPECS / "prefix_lm.attn").modules[0]
    source = replace(module.variant.source, path=str(tmp_path / "a.attn"))
    variant = replace(module.variant, source=source)
    fit = fit_of(variant.attention, 1)
    file_of(variant).parent.mkdir()
    file_of(variant).write_text('{"prefix_lm": [{"case": 3}]}', encoding="utf-8")
    with pytest.raises(ValueError, match="not a file of cases"):
        corpus(variant, fit, tmp_path)
    file_of(variant).unlink()
    assert corpus(variant, fit, tmp_path) == ()
