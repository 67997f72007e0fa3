"""What was verified on a GPU: a committed file beside the generated modules, keyed by their paths.

A record speaks of what a module does: it holds the SHA-256 of its code (configs, declaration and kernels,
with the headers that they include) and lapses when that changes. Comments and docstrings are no part of it,
since they quote the spec and its digest: a spec that says the same in other words, or gains a schedule for
another target, changes no kernel. A module that could not be verified, without a GPU, is listed under
`unverified` with the reason.

The Python beside all kernels, the support package, has a record of its own for each target. A change of it
leaves the modules' records as they are: it asks for its unit tests, and for one module of each target to be
verified on a GPU again.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

from attnc.target.support import FOLDER, kernel_files, with_headers

NAME = "verified.json"
#: Comments of C++, or a string, which may hold what looks like one.
_COMMENTS = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record of a verified module: where it ran, how many cases, the largest error / bound and its place.

    met: of the boundaries' points and of the pairs, how many of how many (`cover.Summary`), and the large
    sizes met; empty in records from before that was counted. large: of sizes that only a GPU reaches, how
    many cases and the largest error / bound; empty where they were not run.
    """

    sha256: str
    device: str
    toolchain: str
    cases: int
    worst: float
    where: str
    met: Mapping[str, Sequence[int]] = field(default_factory=dict)
    large: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sanitized:
    """A module in which no tool of compute-sanitizer found anything: how many launches each has watched."""

    sha256: str
    device: str
    tool: str
    launches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Supported:
    """The support package, as a GPU has last run it for a target: its hash, and how many modules were
    verified.
    """

    sha256: str
    device: str
    modules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The file, by paths below generated/: a record or why there is none, and what compute-sanitizer has
    watched or why it has not. support: by the folder of a target, such as `triton`.
    """

    verified: Mapping[str, Record] = field(default_factory=dict)
    unverified: Mapping[str, str] = field(default_factory=dict)
    sanitized: Mapping[str, Sanitized] = field(default_factory=dict)
    unsanitized: Mapping[str, str] = field(default_factory=dict)
    support: Mapping[str, Supported] = field(default_factory=dict)

    def with_support(self, sha256: str, new: Mapping[str, Record]) -> Records:
        support = dict(self.support)
        for path, record in new.items():
            target = target_of(path)
            known = support.get(target)
            before = known.modules if known is not None and known.sha256 == sha256 else 0
            support[target] = Supported(sha256=sha256, device=record.device, modules=before + 1)
        return replace(self, support=support)

    def with_verified(self, new: Mapping[str, Record]) -> Records:
        """Adds or replaces these records, and keeps what is known of large cases of the same text; a module
        that has one is no longer unverified.
        """
        ran = {f"_support/{target_of(path)}" for path in new}
        left = {path: why for path, why in self.unverified.items() if path not in new and path not in ran}
        kept = {
            path: replace(record, large=self.verified[path].large)
            if path in self.verified and self.verified[path].sha256 == record.sha256
            else record
            for path, record in new.items()
        }
        return replace(self, verified={**self.verified, **kept}, unverified=left)

    def with_large(self, new: Mapping[str, Record]) -> Records:
        """Notes what these records of large cases say in the records of the same texts."""
        changed = {
            path: replace(known, large={"cases": record.cases, "worst": record.worst})
            for path, record in new.items()
            if (known := self.verified.get(path)) is not None and known.sha256 == record.sha256
        }
        return replace(self, verified={**self.verified, **changed})

    def with_sanitized(self, new: Mapping[str, Sanitized]) -> Records:
        """Adds or replaces what the sanitizer said; a module with such a record is no longer unsanitized."""
        left = {path: why for path, why in self.unsanitized.items() if path not in new}
        return replace(self, sanitized={**self.sanitized, **new}, unsanitized=left)

    def only(self, paths: Iterable[str]) -> Records:
        kept = set(paths)
        return Records(
            verified={path: record for path, record in self.verified.items() if path in kept},
            unverified={
                path: why
                for path, why in self.unverified.items()
                if path in kept or path.startswith("_support/")
            },
            sanitized={path: record for path, record in self.sanitized.items() if path in kept},
            unsanitized={path: why for path, why in self.unsanitized.items() if path in kept},
            support={
                target: known for target, known in self.support.items() if target in set(map(target_of, kept))
            },
        )


def hash_of(module: Path) -> str:
    """Returns SHA-256 of the code of a module, of the .cu files of its kernels and of the headers that these
    include, comments and docstrings apart. Headers are those of the support package beside the modules.
    """
    texts = [_code_of(module.read_text(encoding="utf-8"))]
    for name, source in kernel_sources(module):
        texts += [name, source]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def kernel_sources(module: Path) -> Iterator[tuple[str, str]]:
    """Yields the .cu files of a module's kernels by name: their text with headers, without comments and line
    breaks.
    """
    code = module.read_text(encoding="utf-8")
    support = module.resolve().parents[2] / FOLDER
    for name in kernel_files(code, (path.name for path in module.parent.glob("*.cu"))):
        text = module.with_name(name).read_text(encoding="utf-8")
        source = with_headers(text, support if support.is_dir() else None)
        yield name, " ".join(without_comments(source).split())


def without_comments(source: str) -> str:
    """Returns C++ without comments."""
    return _COMMENTS.sub(r"\1", source)


@cache
def _code_of(text: str) -> str:
    """Returns the lines of Python without comments and docstrings.

    Cut from the text, and not printed from its tree, which each release of Python prints in its own way.
    """
    lines: list[str] = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            first = node.body[0]
            lines[first.lineno - 1 : first.end_lineno] = [""] * ((first.end_lineno or 0) - first.lineno + 1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def support_hash(folder: Path) -> str:
    """Returns SHA-256 of the Python of the support package in a folder of modules, comments and docstrings
    apart; its headers are part of the kernels.
    """
    texts = (path.read_text(encoding="utf-8") for path in sorted((folder / "_support").glob("*.py")))
    return hashlib.sha256("\0".join(_code_of(text) for text in texts).encode()).hexdigest()


def list_lapsed(
    folder: Path, modules: Iterable[str], records: Mapping[str, Record] | Mapping[str, Sanitized]
) -> list[str]:
    """Lists modules (paths below `folder`) of whose text there is no record: changed since, or never run."""
    known = {name: record.sha256 for name, record in records.items()}
    return [name for name in modules if known.get(name) != hash_of(folder / name)]


def lapsed_support(folder: Path, modules: Iterable[str], records: Records) -> list[str]:
    """Lists the targets of modules for which no GPU has run the support package as it is: `triton`."""
    current = support_hash(folder)
    known = {target for target, support in records.support.items() if support.sha256 == current}
    return [target for target in dict.fromkeys(map(target_of, modules)) if target not in known]


def target_of(path: str) -> str:
    """Returns the folder of a module's target: `triton` of `alibi/triton/d64.py`."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else ""


def read(folder: Path) -> Records:
    """Returns the records of a folder of modules; none where there is no file. Raises ValueError when
    malformed.
    """
    path = folder / NAME
    if not path.is_file():
        return Records()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        verified = {name: Record(**fields) for name, fields in data["verified"].items()}
        sanitized = {name: Sanitized(**fields) for name, fields in data.get("sanitized", {}).items()}
        support = {target: Supported(**fields) for target, fields in data.get("support", {}).items()}
        reasons = {section: dict(data.get(section, {})) for section in ("unverified", "unsanitized")}
        return Records(verified=verified, sanitized=sanitized, support=support, **reasons)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a file of verification records: {error}") from None


def dump(records: Records) -> str:
    """Returns the file's text: sorted, a line for each module, so that a change shows as one line."""
    sections = {
        "verified": {path: _without_empty(asdict(record)) for path, record in records.verified.items()},
        "unverified": records.unverified,
        "sanitized": {path: asdict(record) for path, record in records.sanitized.items()},
        "unsanitized": records.unsanitized,
        "support": {target: asdict(support) for target, support in records.support.items()},
    }
    texts = (f"{json.dumps(name)}: {_object(section)}" for name, section in sections.items())
    return "{\n" + ",\n".join(texts) + "\n}\n"


def _without_empty(entries: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in entries.items() if name not in ("met", "large") or value}


def _object(section: Mapping[str, object]) -> str:
    body = ",\n".join(f"  {json.dumps(path)}: {json.dumps(section[path])}" for path in sorted(section))
    return f"{{\n{body}\n}}" if body else "{}"
