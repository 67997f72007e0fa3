"""Expected texts kept in files, for output that a person reviews: `pytest --update-golden` rewrites them."""

from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write expected texts instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compares a text with the file that holds what is expected; the file must exist."""
    update: bool = request.config.getoption("--update-golden")

    def check(path: Path, text: str) -> None:
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        elif not path.exists():
            pytest.fail(f"{path.name} is missing; --update-golden writes it:\n{text}")
        else:
            expected = path.read_bytes().decode("utf-8")
            assert text == expected, f"{path.name} differs; if the change is meant, --update-golden writes it"

    return check
