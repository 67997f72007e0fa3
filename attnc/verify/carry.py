"""Carries records over to modules whose text has changed and whose machine code has not: they are carried to
the new text.

A rename changes the text of a kernel, so its record lapses, though no GPU can tell the difference. Where the
compiler that the record names makes the same machine code of both texts, for each kernel and config, and the
declaration says the same of launches, what was verified of the one holds of the other. Machine code is made
of PTX, and is compared where that differs, as it does by names of functions. So it does where
comments, docstrings, line breaks, annotations of functions around kernels, and factors of 1 before the size
of a tile alone have changed, which no compiler sees, of Triton's kernels too.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnc.runtime.cubin import list_differences
from attnc.runtime.loader import load_file
from attnc.runtime.nvrtc import CompilationError, compile_cubin, digest_ptx, nvrtc_version
from attnc.support.binaries import flags_of, inline_headers
from attnc.verify.record import Record, Records, hash_of, kernel_sources, without_comments

#: What kernels are compiled for when records are carried, by the name of the device that has run them.
_ARCHITECTURES: Mapping[str, str] = {
    "NVIDIA A100": "sm_80",
    "NVIDIA H100": "sm_90",
    "NVIDIA H200": "sm_90",
    "NVIDIA B200": "sm_100",
}


#: Fields of a declaration that machine code answers for: the kernels' file, the type that it is compiled for,
#: and the name of torch's operator, which has a hash of texts.
_COMPILED = ("file", "element", "operator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The machine code of a kernel at one config, before and after. Registers and spilled bytes are of a
    thread, and not counted where PTX is the same.

    differs: the sections that are not alike.
    """

    kernel: str
    options: str
    registers: tuple[int, int] = (0, 0)
    spills: tuple[int, int] = (0, 0)
    differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two texts of a module. because: why they are not the same to a GPU, empty if they are."""

    module: str
    pairs: tuple[Pair, ...] = ()
    because: str


def find_arch(device: str) -> str | None:
    """Returns the architecture of a device by its name, such as "sm_90"; None where it is not known."""
    return next((arch for name, arch in _ARCHITECTURES.items() if device.startswith(name)), None)


def compare_modules(name: str, before: Path, after: Path, arch: str) -> Comparison:
    """Compares a module below two folders of generated modules, its kernels compiled for an architecture.

    Raises FileNotFoundError without NVRTC.
    """
    old, new = before / name, after / name
    if not old.is_file():
        return Comparison(module=name, because="there was no such module")
    if is_same_program(old, new):
        return Comparison(module=name, because="")
    if because := compare_declarations(old.read_text(encoding="utf-8"), new.read_text(encoding="utf-8")):
        return Comparison(module=name, because=because)
    try:
        kernels = [dict(_list_kernels(path, arch)) for path in (old, new)]
        if kernels[0].keys() != kernels[1].keys():
            return Comparison(module=name, because="it has other kernels or configs")
        if not kernels[0]:
            return Comparison(module=name, because="its kernels are no CUDA C++")
        jobs = [(key, kernels[0][key], kernels[1][key]) for key in kernels[0]]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            pairs = tuple(pool.map(_compare, jobs))
    except (CompilationError, AttributeError, OSError, TypeError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        return Comparison(module=name, because=f"it does not compile: {str(error).splitlines()[0]}")
    different = dict.fromkeys(pair.kernel for pair in pairs if pair.differs)
    because = f"other machine code: {', '.join(different)}" if different else ""
    return Comparison(module=name, pairs=pairs, because=because)


def carry_records(
    records: Records, before: Path, after: Path, *, report: Callable[[Comparison], None] = lambda _: None
) -> Records:
    """Returns the records, with those of modules that are the same to a GPU under the hash of their new text.

    before, after: folders of generated modules, of which `records` speaks of the first. report: told of every
    module whose record has lapsed. Raises FileNotFoundError without NVRTC.
    """
    verified, sanitized = dict(records.verified), dict(records.sanitized)
    for name, record in records.verified.items():
        old, new = before / name, after / name
        if not new.is_file() or hash_of(new) == record.sha256:
            continue
        seen = sanitized.get(name)
        found = _judge(record, name, before, after)
        report(found)
        if not found.because:
            verified[name] = replace(record, sha256=hash_of(new))
            if seen is not None and seen.sha256 == hash_of(old):
                sanitized[name] = replace(seen, sha256=hash_of(new))
    return replace(records, verified=verified, sanitized=sanitized)


def adopt_carried(known: Records, before: Records, carried: Records) -> Records:
    """Returns the records that are known now, with those that were carried since `before`: what others have
    written meanwhile stays.
    """
    verified = {
        name: record
        for name, record in carried.verified.items()
        if known.verified.get(name) == before.verified.get(name)
    }
    sanitized = {
        name: seen
        for name, seen in carried.sanitized.items()
        if known.sanitized.get(name) == before.sanitized.get(name)
    }
    return replace(known, verified={**known.verified, **verified}, sanitized={**known.sanitized, **sanitized})


def is_same_program(before: Path, after: Path) -> bool:
    """Returns whether two texts of a module are one to every compiler: they differ in comments, docstrings,
    line breaks, annotations of functions that are no kernels, factors of 1 before the size of a tile, and the
    name of torch's operator, which has a hash of the text.
    """
    old, new = (
        ast.dump(_Program().visit(ast.parse(path.read_text(encoding="utf-8")))) for path in (before, after)
    )
    return old == new and list(kernel_sources(before)) == list(kernel_sources(after))


def list_cuda_modules(folder: Path) -> list[str]:
    """Lists the CUDA modules below a folder of generated ones, by path."""
    files = (path for path in folder.glob("*/cuda_*/*.py") if path.name != "__init__.py")
    return sorted(path.relative_to(folder).as_posix() for path in files)


def _judge(record: Record, name: str, before: Path, after: Path) -> Comparison:
    if not (before / name).is_file() or hash_of(before / name) != record.sha256:
        return Comparison(module=name, because="the record is not of that revision's text")
    if is_same_program(before / name, after / name):
        return Comparison(module=name, because="")
    arch = find_arch(record.device)
    if arch is None:
        return Comparison(module=name, because=f"the architecture of {record.device} is not known")
    if not record.toolchain.startswith("nvrtc "):
        return Comparison(module=name, because=f"{record.toolchain} made its machine code on a GPU")
    if record.toolchain != f"nvrtc {nvrtc_version()}":
        return Comparison(
            module=name, because=f"{record.toolchain} made its machine code, here is nvrtc {nvrtc_version()}"
        )
    return compare_modules(name, before, after, arch)


# --- kernels ------------------------------------------------------------------------------------------------


def _list_kernels(
    module: Path, arch: str
) -> Iterator[tuple[tuple[str, int, bool], tuple[str, tuple[str, ...]]]]:
    program: Any = getattr(load_file(module).CALL, "program", None)
    if program is None:
        return
    support = module.parents[2] / "_support"

    def read(file: str) -> str:
        beside = module.with_name(file)
        return (beside if beside.is_file() else support / file).read_text(encoding="utf-8")

    for name, kernel in program.kernels.items():
        source = inline_headers(read(kernel.file), read)
        known = set()
        for position, config in enumerate(kernel.configs):
            for aligned in (True, False):
                options = program.options(config, aligned, arch)
                if options not in known:
                    known.add(options)
                    yield (name, position, aligned), (source, options)


def _compare(
    job: tuple[tuple[str, int, bool], tuple[str, tuple[str, ...]], tuple[str, tuple[str, ...]]],
) -> Pair:
    (name, _, _), old, new = job
    options = " ".join(option for option in new[1] if option.startswith("-D"))
    if _is_same_ptx(old, new):
        return Pair(kernel=name, options=options)
    before, after = compile_cubin(*old), compile_cubin(*new)
    return Pair(
        kernel=name,
        options=options,
        registers=(before.registers, after.registers),
        spills=(before.spills, after.spills),
        differs=tuple(list_differences(before.image, after.image)),
    )


def _is_same_ptx(old: tuple[str, tuple[str, ...]], new: tuple[str, tuple[str, ...]]) -> bool:
    if (old[1], flags_of(old[0])) != (new[1], flags_of(new[0])):
        return False
    if without_comments(old[0]) == without_comments(new[0]):
        return True
    return digest_ptx(*old) == digest_ptx(*new)


# --- declarations -------------------------------------------------------------------------------------------


def compare_declarations(before: str, after: str) -> str:
    """Says why two texts of a module do not declare the same, "" if they do: of configs the same numbers, and
    all else alike but comments and docstrings.

    A constant that only the kernel knows may be renamed, added or dropped, and the file of a kernel may have
    another name: machine code has the last word on those. A constant that the declaration names must be what
    it was.
    """
    old, new = _Declaration(before), _Declaration(after)
    for place in {**old.rest, **new.rest}:
        if old.rest.get(place) != new.rest.get(place):
            return f"{place} has changed"
    if [len(configs) for configs in old.configs] != [len(configs) for configs in new.configs]:
        return "it has other configs"
    common = set(old.fields) & set(new.fields)
    if named := sorted((set(old.fields) ^ set(new.fields)) & old.words):
        return f"its declaration names {named[0]}, which only one of the two has"
    for one, other in zip(old.configs, new.configs, strict=True):
        for values, others in zip(one, other, strict=True):
            if changed := sorted(name for name in common if values[name] != others[name]):
                return f"{changed[0]} of a config has changed"
    return ""


class _Program(ast.NodeTransformer):
    """Takes docstrings, annotations of functions that are no kernels, the name of torch's operator, and
    factors of 1 before the size of a tile, a number when a kernel is compiled, out of a module.
    """

    def visit_Module(self, node: ast.Module) -> ast.AST:
        return self._without_docstring(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._without_docstring(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if not node.decorator_list:  # a compiler reads those of a kernel
            node.returns = None
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
        return self._without_docstring(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        match node:
            case ast.BinOp(ast.Constant(1), ast.Mult(), ast.Name(size)) if size.startswith("BLOCK_"):
                return node.right
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "operator"]
        return self.generic_visit(node)

    def _without_docstring(self, node: ast.Module | ast.ClassDef | ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return self.generic_visit(node)


class _Declaration(ast.NodeTransformer):
    """A module's text without comments and docstrings, its configs by name apart.

    fields: of the class Config; configs: of each tuple of them; rest: all else, as text by its place; words:
    of that.
    """

    def __init__(self, text: str) -> None:
        self.fields: dict[str, object] = {}
        self.configs: list[list[dict[str, object]]] = []
        tree = ast.parse(text)
        kept = [node for node in map(self._read, tree.body) if node is not None]
        self.rest = {place: text for node in kept for place, text in _list_places(node)}
        self.words = set(re.findall(r"\w+", " ".join(self.rest.values())))

    def _read(self, node: ast.stmt) -> ast.stmt | None:
        match node:
            case ast.ClassDef(name="Config"):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        value = field.value
                        self.fields[field.target.id] = None if value is None else ast.literal_eval(value)
                return None
            case ast.Expr(value=ast.Constant(value=str())):
                return None
        kept = self.visit(node)
        assert isinstance(kept, ast.stmt)
        return kept

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in _COMPILED]
        return self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        calls = [one for one in node.elts if isinstance(one, ast.Call) and _name_of(one) == "Config"]
        if not calls or len(calls) != len(node.elts):
            return self.generic_visit(node)
        self.configs.append([self._values(call) for call in calls])
        return ast.Constant(value=f"configs {len(self.configs)}")

    def _values(self, call: ast.Call) -> dict[str, object]:
        given = dict(zip(self.fields, map(ast.literal_eval, call.args), strict=False))
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
        return {**self.fields, **given, **named}


def _list_places(node: ast.AST, place: str = "") -> Iterator[tuple[str, str]]:
    """Yields the parts of a statement as text, with a name for each: `CALL.launches[0].maps`."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield from _list_places(value, name)
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name, ast.dump(node)
        case ast.Call(func=func, args=args, keywords=keywords):
            yield place, ast.dump(func)
            for position, value in enumerate(args):
                yield from _list_places(value, f"{place}[{position}]")
            for keyword in keywords:
                yield from _list_places(keyword.value, f"{place}.{keyword.arg}")
        case ast.Tuple(elts=values):
            yield place, f"{len(values)} values"
            for position, value in enumerate(values):
                yield from _list_places(value, f"{place}[{position}]")
        case _:
            text = ast.dump(node)
            yield place or text, text


def _name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""
