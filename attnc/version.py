"""The version of the package, as generated files and the command state it."""

from __future__ import annotations

__version__ = "0.1.0"
