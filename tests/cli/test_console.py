"""What commands print besides results."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest

from attnc.cli import app
from attnc.cli.console import say_json


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


def test_what_is_infinite_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Python would write `Infinity`, which no other program reads."""
    say_json({"worst": float("inf"), "cases": [(float("nan"), 0.5, 3, "inf")]})
    assert json.loads(capsys.readouterr().out) == {"worst": None, "cases": [[None, 0.5, 3, "inf"]]}


def test_commands_leave_json_to_the_console() -> None:
    folder = Path(app.__file__).parent
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    assert [name for name, text in texts.items() if re.search(r"\bjson\.dumps\(", text)] == []
