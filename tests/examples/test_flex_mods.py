"""The example with FlexAttention's mods runs, and its command prints a spec."""

from __future__ import annotations

import pytest

from attnc.flex import to_spec
from examples import flex_mods


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    flex_mods.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "alibi and causal",
        "same_document",
        "learned and causal",
        "gradient of the learned bias",
    ]


def test_its_mods_are_a_spec() -> None:
    text = to_spec(flex_mods.alibi, flex_mods.causal)
    assert "score = dot(q, k) / sqrt(D) - slope[h] * (q_idx - kv_idx)" in text
