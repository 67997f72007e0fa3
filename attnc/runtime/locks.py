"""Locks that a forked process finds free: it has none of the threads that may have held them."""

from __future__ import annotations

import os
import threading
from typing import Any


def renew_in_forks(names: dict[str, Any], name: str) -> None:
    """Gives every forked process a lock of its own in place of a module's. names: the module's globals."""

    def renew() -> None:
        names[name] = threading.RLock()

    if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
        os.register_at_fork(after_in_child=renew)
