"""Where the grammar, the prelude and the templates are: inside the package, else beside it in a checkout; and
where what was compiled of them is kept.
"""

from __future__ import annotations

import hashlib
import sys
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path

from attnc.files import replace_file

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


def read_kept(place: Path | None, made_of: str) -> bytes | None:
    """Returns the content that `keep` wrote there. None if it was made from something else, or if the file is
    damaged. made_of: all that the content follows from.
    """
    if place is None:
        return None
    with suppress(OSError):
        kept = place.read_bytes()
        digest, content = kept[:_DIGEST], kept[_DIGEST:]
        if digest == _digest_of(made_of, content):
            return content
    return None


def keep(place: Path | None, made_of: str, content: bytes) -> None:
    """Writes content behind a SHA-256 of it and of what it is made of. What cannot be written is not kept."""
    if place is not None:
        with suppress(OSError):
            replace_file(place, _digest_of(made_of, content) + content)


#: Bytes of a SHA-256.
_DIGEST = 32


def _digest_of(made_of: str, content: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(made_of.encode()).digest() + content).digest()
