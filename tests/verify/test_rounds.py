"""Rounds of queries: calls that are verified have several, and a case ends with one of fewer queries."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from attnc.verify.case import Case
from attnc.verify.cover import Coverage
from attnc.verify.covering import cases_beside_the_array
from attnc.verify.rounds import QueryRounds, has_rounds
from attnc.verify.subject import Subject, subject_of
from tests.planted.registry import module_of


@cache
def made_for(name: str) -> Subject:
    return subject_of(module_of(name, "triton"))


def test_a_short_round_comes_behind_a_whole_one() -> None:
    pairs = product((1, 2, 3, 4, 5), (1, 2, 4))
    short = [(queries, of) for queries, of in pairs if QueryRounds(queries=queries, chunk=of).end_short]
    assert short == [(3, 2), (5, 2), (5, 4)]


def test_calls_that_are_verified_have_room_for_few_queries() -> None:
    case = Case(dims={"B": 3, "M": 44, "N": 44, "Hkv": 1, "G": 1, "S": 4})
    assert made_for("latent_tokens").space.ends_in_a_short_round(case)


@pytest.mark.parametrize(("name", "has"), [("latent_tokens", True), ("added", False), ("steps", False)])
def test_coverage_names_rounds_where_there_are_any(name: str, has: bool) -> None:
    space = made_for(name).space
    assert has_rounds(space.call) == has
    assert any(boundary.quantity == "rounds" for boundary in space.boundaries) == has


def test_a_case_ends_with_a_short_round() -> None:
    subject = made_for("latent_tokens")
    coverage = Coverage(subject.space)
    for case in cases_beside_the_array(subject.space, subject.limits()):
        coverage.note(case)
    met = {one.boundary.name: one.met for one in coverage.summary.boundaries}
    assert met["a last round of fewer queries"]


def test_gradients_are_asked_of_more_heads_than_two_tiles_have() -> None:
    subject = made_for("added")
    limits = subject.limits()

    def shows(case: Case) -> bool:
        return case.dims.get("G", 1) > 32 and limits.includes_gradients(case.dims, case.config)

    assert any(map(shows, cases_beside_the_array(subject.space, limits)))
