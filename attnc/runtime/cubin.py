"""What is in a cubin that a GPU runs or reads, so that two can be compared: the instructions and constants of
each kernel, the symbols they refer to, and the launch's resources. Names are no part of it.

A cubin is an ELF file (System V ABI, chapter 4) with a section `.text.KERNEL` for each kernel.
"""

from __future__ import annotations

import struct
import subprocess
import tempfile
from dataclasses import dataclass

from attnc.runtime.toolchains import tool

#: Types of sections: relocations with and without addend, and memory without content.
_RELA, _REL, _NOBITS = 4, 9, 8
#: The form of an attribute whose size follows. Those of all kernels, and that of the bank of parameters
#: (EIATTR_PARAM_CBANK), begin with the number of a symbol.
_SIZED, _PARAMETERS = 4, 10
#: The table of addresses of global constants, which the compiler makes of all that the text names, and the
#: relocations that fill it.
_TABLE = (".nv.constant4", ".rela.nv.constant4")
#: Sections that say where names and lines are, which compiler it was, and how to unwind a stack.
_SILENT = (
    ".shstrtab",
    ".strtab",
    ".symtab",
    ".note",
    ".debug",
    ".nv.compat",
    ".nv.callgraph",
    ".nv.prototype",
)


@dataclass(frozen=True, slots=True)
class _ElfSection:
    name: str
    kind: int
    size: int
    info: int
    content: bytes


def list_machine_code(image: bytes) -> tuple[tuple[str, bytes], ...]:
    """Returns the sections of a cubin that matter, by names without those of kernels, sorted. ValueError for
    another file.

    A relocation is its place, its type, and what the symbol stands for: so data of the same content under
    another name, or at another place, is the same.
    """
    if image[:5] != b"\x7fELF\x02":
        raise ValueError("not a cubin")
    sections = _read_sections(image)
    kernels = [
        section.name.removeprefix(".text.") for section in sections if section.name.startswith(".text.")
    ]
    found = []
    for section in sections:
        if section.kind in (_RELA, _REL):
            if not sections[section.info].name.startswith(_SILENT):
                found.append((section.name, _resolve(section, sections)))
        elif section.name and not section.name.startswith((*_SILENT, ".nv.global")):
            found.append((section.name, _content_of(section)))
    return tuple(sorted((_without_kernel(name, kernels), content) for name, content in found))


def _content_of(section: _ElfSection) -> bytes:
    if section.kind == _NOBITS:
        return b"%d" % section.size
    if not section.name.startswith(".nv.info"):
        return section.content
    kept, at = [], 0
    while at < len(section.content):
        form, attribute, size = struct.unpack_from("<BBH", section.content, at)
        at += 4
        if form == _SIZED:
            symbol = 4 if section.name == ".nv.info" or attribute == _PARAMETERS else 0
            kept.append(bytes([attribute]) + section.content[at + symbol : at + size])
            at += size
        else:
            kept.append(bytes([attribute]) + size.to_bytes(2, "little"))
    return b"\n".join(sorted(kept))


def _without_kernel(name: str, kernels: list[str]) -> str:
    for number, kernel in enumerate(kernels):
        if name.endswith(f".{kernel}"):
            return f"{name.removesuffix(kernel)}{number}"
    return name


def _read_sections(image: bytes) -> list[_ElfSection]:
    (start,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, start + size * i) for i in range(count)]
    names = headers[names_at][4]
    return [
        _ElfSection(
            name=_text_at(image, names + header[0]),
            kind=header[1],
            size=header[5],
            info=header[7],
            content=b"" if header[1] == _NOBITS else image[header[4] : header[4] + header[5]],
        )
        for header in headers
    ]


def _resolve(relocations: _ElfSection, sections: list[_ElfSection]) -> bytes:
    table = next(section.content for section in sections if section.name == ".symtab")
    entries = "<QQq" if relocations.kind == _RELA else "<QQ"
    lines = []
    for place, info, *addend in struct.iter_unpack(entries, relocations.content):
        _, _, _, index, value, size = struct.unpack_from("<IBBHQQ", table, 24 * (info >> 32))
        lines.append(f"{place} {info & 0xFFFFFFFF} {addend} {_describe(sections, index, value, size)}")
    return "\n".join(sorted(lines)).encode()


def _describe(sections: list[_ElfSection], index: int, value: int, size: int) -> str:
    if index >= len(sections):  # absolute, or of another file
        return f"at {value}"
    section = sections[index]
    if not section.name.startswith(".nv.global"):
        return f"{section.kind} at {value}"
    return f"{size} bytes {section.content[value : value + size].hex()}"


def _text_at(image: bytes, at: int) -> str:
    return image[at : image.index(b"\0", at)].decode()


def list_differences(old: bytes, new: bytes) -> list[str]:
    """Lists the names of sections that two cubins do not have alike.

    The table of addresses of global constants has all that a text names. Where instructions are the same and
    read nothing of it, which nvdisasm says, it is not compared."""
    before, after = list_machine_code(old), list_machine_code(new)
    names = sorted({name for name, _ in (*before, *after)})
    found = [name for name in names if _contents(before, name) != _contents(after, name)]
    if found and set(found) <= set(_TABLE):
        text = disassemble(new)
        if text is not None and "c[0x4]" not in text:
            return []
    return found


def _contents(sections: tuple[tuple[str, bytes], ...], name: str) -> list[bytes]:
    return [content for found, content in sections if found == name]


def disassemble(image: bytes) -> str | None:
    """Returns the text of a cubin's kernels; None where nvdisasm, of Triton's wheel, is missing."""
    program = tool("nvdisasm")
    if program is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [str(program), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
