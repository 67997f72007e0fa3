"""The support package of generated modules: how they import it, and its text for those who want one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path

from attnc.resources import resource

#: The folder beside the modules, and what a file copied there begins with.
FOLDER = "_support"
_NOTE = "# Copied by `attnc compile`, from attnc/support. Do not edit.\n"
#: In the order in which the files need each other.
_PARTS = (
    "sizes", "devices", "by_target", "memory", "arguments", "place", "configs", "splits", "repeat",
    "pages", "gradients", "operators", "margins", "asked", "call", "folders", "cache", "binaries",
    "cuda_call", "hopper_call", "triton_launch", "page_kernels", "triton_call",
)  # fmt: skip
#: What declarations are made of, and the file that it is in.
_PLACES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "triton": {"triton_call": ("Kernel", "TritonAttention")},
    "cuda": {"cuda_call": ("CudaAttention", "Kernel", "Kernels")},
    "hopper": {"cuda_call": ("Kernel", "Kernels"), "hopper_call": ("HopperAttention", "TmaKernels")},
    "all": {
        "arguments": ("Tensor",),
        "gradients": ("Backward", "Gradient", "Made", "Part"),
        "margins": ("margins",),
        "pages": ("Pages",),
        "splits": ("Split",),
    },
}
_HEADER = re.compile(r'^#include "(\w+\.cuh)"\n', re.M)
_FILE = re.compile(r'^    file="(\w+)",$', re.M)
_IMPORT = re.compile(r"^from \.+_support\.(\w+) import .*\n", re.M)


def support_files() -> dict[str, str]:
    """Returns texts by path below the output folder."""
    return {
        f"{FOLDER}/{name}": _NOTE + text if name.endswith(".py") else text for name, text in _files().items()
    }


def imports(classes: Collection[str], target: str) -> str:
    """Returns the lines by which a module in OUT/NAME/TARGET/ imports what its declaration and function call.
    target: "triton", "cuda" or "hopper".
    """
    places = sorted({**_PLACES["all"], **_PLACES[target]}.items())
    used = {file: [name for name in names if name in classes] for file, names in places}
    return "\n".join(
        f"from ...{FOLDER}.{file} import {', '.join(names)}" for file, names in used.items() if names
    )


def beside(text: str) -> str:
    """Returns the text of a module in whose own folder the support package is."""
    return _IMPORT.sub(lambda match: match[0].replace(f"from ...{FOLDER}", f"from .{FOLDER}"), text)


def with_headers(source: str, folder: Path | None = None) -> str:
    """Returns a `.cu` file with the text of the support package's headers in the place of its `#include`.

    folder: that of a copy of the support package, whose headers are taken where it has them.
    """

    def read(match: re.Match[str]) -> str:
        if folder is not None and (copied := folder / match[1]).is_file():
            return with_headers(copied.read_text(encoding="utf-8"), folder)
        return with_headers(_files()[match[1]], folder) if folder is not None else _whole_header(match[1])

    return _HEADER.sub(read, source)


@cache
def _whole_header(name: str) -> str:
    return with_headers(_files()[name])


def kernel_files(module: str, beside: Iterable[str]) -> list[str]:
    """Names the files with the kernels of a module, that of the forward first; none of a Triton module.

    module: its text; beside: names of the files in its folder.
    """
    declared = _FILE.search(module)
    if declared is None:
        return []
    forward, backward = f"{declared[1]}.cu", re.compile(rf"{declared[1]}_backward_\w+\.cu")
    found = [name for name in beside if name == forward or backward.fullmatch(name)]
    return sorted(found, key=lambda name: (name != forward, name))


def standalone(text: str, sources: Mapping[str, str] | None = None) -> str:
    """Returns a module that needs nothing beside it: with the text of the support package, and those of its
    `.cu` files.

    ValueError where a name of the module is one that the support package has too.
    """
    wanted = {match[1] for match in _IMPORT.finditer(text)}
    if not wanted:
        return text
    body, needed = _inline(frozenset(wanted))
    first = _IMPORT.search(text)
    assert first is not None
    head, rest = text[: first.start()], _IMPORT.sub("", text[first.start() :])
    docstring, own = _split_docstring(head)
    own_names = _list_defined(rest)
    if twice := sorted(own_names & _list_defined(body)):
        raise ValueError(f"{twice[0]} is also the name of a part of the support package")
    files = ""
    if sources:
        texts = "".join(f'    "{name}": r"""{with_headers(source)}""",\n' for name, source in sources.items())
        files = f"#: The kernels' files.\nSOURCES = {{\n{texts}}}\n\n"
        rest = rest.replace("    module=__file__,\n", "    module=__file__,\n    sources=SOURCES,\n", 1)
    lines = _merge_imports(
        [*needed, *(line for line in own.splitlines() if line.startswith(("import", "from")))]
    )
    return "\n".join(
        [docstring, "", *_group_imports(lines), "", body.strip("\n"), "", "", files + rest.lstrip("\n")]
    )


@cache
def _files() -> Mapping[str, str]:
    paths = sorted(path for path in resource("support").iterdir() if path.suffix in (".py", ".cuh"))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


@cache
def _inline(wanted: frozenset[str]) -> tuple[str, tuple[str, ...]]:
    needed = set(wanted)
    for part in reversed(_PARTS):
        if part in needed:
            needed |= set(re.findall(r"^(?:    )?from \.(\w+) import", _files()[f"{part}.py"], re.M))
    bodies, lines = [], []
    for part in _PARTS:
        if part in needed:
            body, imports = _without_imports(_files()[f"{part}.py"])
            bodies.append(body)
            lines += imports
    return "\n\n\n".join(bodies), tuple(dict.fromkeys(lines))


def _without_imports(text: str) -> tuple[str, list[str]]:
    tree, lines = ast.parse(text), text.splitlines()
    dropped: set[int] = set()
    imports = []
    for number, node in enumerate(tree.body):
        own = range(node.lineno - 1, (node.end_lineno or node.lineno))
        match node:
            case ast.Expr(value=ast.Constant()) if number == 0:
                dropped |= set(own)
            case ast.Import() | ast.ImportFrom(level=0):
                dropped |= set(own)
                imports.append(ast.unparse(node))
            case ast.ImportFrom():
                dropped |= set(own)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                dropped |= set(own)
    kept = [line for at, line in enumerate(lines) if at not in dropped]
    return "\n".join(kept).strip("\n"), [line for line in imports if "TYPE_CHECKING" not in line]


def _split_docstring(head: str) -> tuple[str, str]:
    end = ast.parse(head).body[0].end_lineno or 1
    lines = head.splitlines()
    return "\n".join(lines[:end]), "\n".join(lines[end:])


@lru_cache(maxsize=16)  # of the support package's text it is asked for every module
def _list_defined(text: str) -> frozenset[str]:
    found = set()
    for node in ast.parse(text).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return frozenset(found)


def _merge_imports(lines: Iterable[str]) -> list[str]:
    plain, names = set(), dict[str, set[str]]()
    for line in lines:
        if line.startswith("from"):
            module, _, imported = line.removeprefix("from ").partition(" import ")
            names.setdefault(module, set()).update(imported.split(", "))
        else:
            plain.add(line)
    imports = (f"from {module} import {', '.join(sorted(found))}" for module, found in names.items())
    return sorted([*plain, *imports], key=_import_order)


def _import_order(line: str) -> tuple[bool, bool, str]:
    outside = re.match(r"(?:import|from) (torch|triton|cupy)", line) is not None
    return outside, line.startswith("from"), line


def _group_imports(lines: Iterable[str]) -> Iterator[str]:
    before = False
    for line in lines:
        outside = _import_order(line)[0]
        if outside and not before:
            yield ""
        before = outside
        yield line
