"""Where the grammar, the prelude and the templates are: inside the package, else beside it in a checkout; and
where what was compiled of them is kept.
"""

from __future__ import annotations

import sys
from importlib.util import cache_from_source
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


def kept_code(module: str, name: str) -> Path | None:
    """Returns the path at which the module keeps what it has compiled of a resource: beside Python's own code
    for the module, hence trusted as much. None where Python keeps none.

    module: its file. name: of the resource, as file names may be.
    """
    if sys.dont_write_bytecode or sys.implementation.cache_tag is None:
        return None
    return Path(cache_from_source(module)).with_name(f"{name}.{sys.implementation.cache_tag}")
