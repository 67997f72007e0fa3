"""Which of the profiles of `tests/conftest.py` the tests run in."""

from __future__ import annotations

from hypothesis import settings


def is_night() -> bool:
    """Returns whether this is `make nightly`, which has hours."""
    return settings.get_current_profile_name() == "nightly"
