"""Values of callers in messages."""

from __future__ import annotations

_LONGEST = 80


def show_value(value: object) -> str:
    """Returns a value as a message shows it: what has axes by their sizes, anything else as Python does, cut
    where it is long.
    """
    shape = getattr(value, "shape", None)
    if shape:
        kind = "tensor" if hasattr(value, "requires_grad") else type(value).__name__
        return f"a {kind} {list(shape)}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
