"""What commands print besides results."""

from __future__ import annotations

import warnings

import pytest

from attnc.cli import app


def test_a_warning_is_a_line_without_the_place_in_attnc(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warn(*given: object, **named: object) -> None:
        warnings.warn("the cache is gone", UserWarning, stacklevel=1)
        raise SystemExit(0)

    monkeypatch.setattr(app, "app", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert app.run_guarded(["doctor"]) == 0
    assert capsys.readouterr().err == "warning: the cache is gone\n"
