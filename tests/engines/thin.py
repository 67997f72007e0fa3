"""Thins a compiled library to the machine code of one kind of GPU, so that its archive is small.

The section `.nv_fatbin` of an ELF file holds regions: a header (magic number, version, its own size, the size
of what follows), then entries, each a header (kind, version, its own size, the size of its code; the
architecture at byte 28) and code. Code of other architectures becomes zeros. Headers stay, and the driver
reads no entry but the one for its GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_REGION, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
_MAGIC, _MACHINE_CODE, _ARCHITECTURE_AT = 0xBA55ED50, 2, 28
_SECTION = struct.Struct("<IIQQQQIIQQ")


def thin(library: bytes, architecture: int) -> bytes:
    """Returns the library with zeros for code of any other architecture, e.g. 90. Raises ValueError where it
    has none for this one.
    """
    made, kept = bytearray(library), 0
    for start, end in _fatbin_sections(library):
        for kind, found, at, size in _entries(library, start, end):
            if (kind, found) == (_MACHINE_CODE, architecture):
                kept += 1
            else:
                made[at : at + size] = bytes(size)
    if not kept:
        raise ValueError(f"no machine code of sm_{architecture}")
    return bytes(made)


def _fatbin_sections(library: bytes) -> Iterator[tuple[int, int]]:
    """Yields where sections of GPU code begin and end."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names_in = struct.unpack_from("<HHH", library, 0x3A)
    sections = [_SECTION.unpack_from(library, table + number * size) for number in range(count)]
    names = sections[names_in][4]
    for section in sections:
        at = names + section[0]
        if library[at : library.index(b"\0", at)] == b".nv_fatbin":
            yield section[4], section[4] + section[5]


def _entries(library: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields kind, architecture, place and size of each entry."""
    while start < end:
        magic, _, header, size = _REGION.unpack_from(library, start)
        if magic != _MAGIC:
            start += 8  # regions are aligned
            continue
        at, start = start + header, start + header + size
        while at < start:
            kind, _, header, size = _ENTRY.unpack_from(library, at)
            (architecture,) = struct.unpack_from("<I", library, at + _ARCHITECTURE_AT)
            yield kind, architecture, at + header, size
            at += header + size
