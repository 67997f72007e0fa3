"""Names, orders and defaults of arguments are FlashInfer's, as its published wheel has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from attnc.adapters import flashinfer
from tests.adapters.contract import snapshot, unfit

#: What FlashInfer gives its methods, where they take their arguments by another.
OURS = {"_plan_impl": "plan"}


def signatures() -> Iterator[tuple[str, Any]]:
    """(name, parameters) of every function and method, `self` included."""
    for names in snapshot("flashinfer")["modules"].values():
        for name, what in names.items():
            if "parameters" in what:
                yield name, what["parameters"]
                continue
            for member, described in what["members"].items():
                if "parameters" in described and not described.get("property"):
                    yield f"{name}.{OURS.get(member, member)}", described["parameters"]


SIGNATURES = list(signatures())


@pytest.mark.parametrize(("name", "theirs"), SIGNATURES, ids=[name for name, _ in SIGNATURES])
def test_calls_of_flashinfer_fit(name: str, theirs: Any) -> None:
    owner, _, member = name.partition(".")
    function = getattr(flashinfer, owner)
    if member:
        function = getattr(function, member)
        # Their optional arguments behind the tables may be given by position, which is deprecated there.
        theirs = [[given, "" if kind == "" else kind, default] for given, kind, default in theirs]
    assert list(unfit(function, theirs)) == []


def test_nothing_is_missing() -> None:
    assert len(SIGNATURES) >= 25
    assert all(hasattr(flashinfer, name) for name in flashinfer.__all__)
