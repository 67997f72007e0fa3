"""The places of tiles, as printed texts compute them."""

from __future__ import annotations

import re

Place = tuple[int, int, int]


def as_python(line: str) -> str:
    """A declaration of C++ with sizes that are not negative."""
    code = line.split("  //")[0].removeprefix("const ").removeprefix("int ").rstrip(";").replace("/", "//")
    code = re.sub(r", (?=\w+ = )", "; ", code)
    return re.sub(r"= ([^;?]*) \? ([^;:]*) : ([^;]*)", r"= (\2) if (\1) else (\3)", code)
