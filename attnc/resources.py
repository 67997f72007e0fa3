"""Where the grammar, the prelude and the templates are: inside the package, else beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def resource(*parts: str) -> Path:
    """Returns the path of a file or folder that ships with the compiler: `resource("grammar", "attn.lark")`.

    Raises FileNotFoundError, which means a broken installation.
    """
    for root in (_PACKAGE, _PACKAGE.parent):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise FileNotFoundError(f"attnc is not completely installed: {'/'.join(parts)} is missing")
