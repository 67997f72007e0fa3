"""Mistakes planted in attnc's own Python: a piece of a function's text is replaced while a block runs."""

from __future__ import annotations

import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(place: str, old: str, new: str) -> Iterator[None]:
    """Has `new` for `old` in a function, `module.function` or `module.Class.method`, within the block.

    LookupError if `old` is not in its text exactly once.
    """
    owner_name, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    right = inspect.getattr_static(owner, name)
    function = inspect.unwrap(getattr(owner, name))
    text = textwrap.dedent(inspect.getsource(function))
    if text.count(old) != 1:
        raise LookupError(f"{place}: {old!r} is there {text.count(old)} times")
    made: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + text.replace(old, new), place, "exec")
    exec(code, function.__globals__, made)
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, right)
