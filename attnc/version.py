"""The version of the package, as generated files and the command state it, and the commit it was made of."""

from __future__ import annotations

import subprocess
from pathlib import Path

__version__ = "0.1.0"

_PACKAGE = Path(__file__).parent


def find_commit() -> str | None:
    """Returns the commit that this package was built from, with "-dirty" where files had been changed.

    A wheel has it in the file `COMMIT`, which `setup.py` writes; a checkout is asked through git. None where
    neither says so.
    """
    noted = _PACKAGE / "COMMIT"
    if noted.is_file():
        return noted.read_text().strip()
    return describe_checkout(_PACKAGE.parent)


def describe_checkout(root: Path) -> str | None:
    """Returns the commit that is checked out in this folder, None where it is no checkout of git."""
    if not (root / ".git").exists():
        return None
    command = ("git", "-C", str(root), "describe", "--always", "--abbrev=10", "--dirty", "--exclude=*")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
