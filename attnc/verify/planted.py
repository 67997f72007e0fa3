"""Bugs that real attention kernels have had, planted in generated text: the fuzzer must catch every one.

A bug is an anchored patch. Its anchor must occur exactly once in the code of the rendered module, or planting
fails, so that a change of a template cannot turn the test into an empty one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

from attnc.build import digest
from attnc.plan import ir
from attnc.runtime.loader import load_text
from attnc.target.files import render_files
from attnc.verify.search import Report, fuzz
from attnc.verify.subject import Subject
from attnc.verify.subjects import cuda_subject, subject_of

Phase: TypeAlias = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """name; spec: the spec file whose module it is planted in; story: how kernels came by such a bug.

    anchor: code as a template prints it, whatever its line breaks; NUMBER stands for a literal; patch: what
    replaces it, or a function of that literal; phase: whose functions to look in. file: of a CUDA module, the
    kernel of the backward ("backward_dkdv"), or "host" for the Python module; "": the forward kernel.
    """

    name: str
    spec: str
    story: str
    anchor: str
    patch: str | Callable[[float], str]
    phase: Phase = "forward"
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catch:
    """What became of a planted bug: whether it was caught, after how many examples, and what gave it away."""

    bug: Bug
    caught: bool
    examples: int
    seconds: float
    message: str


def plant(text: str, bug: Bug) -> str:
    """The module's text with the bug in it. ValueError unless the anchor occurs exactly once in its code."""
    tokens = [re.escape(token) for token in re.findall(r"\w+|\S", bug.anchor)]
    # A wrapped call has a comma before its closing bracket.
    spelled = r"\s*".join(rf",?\s*{token}" if token in (r"\)", r"\]") else token for token in tokens)
    pattern = r"(?<!\w)" + spelled.replace("NUMBER", r"([-+.\de]+)") + r"(?!\w)"
    start = _HEADER.search(text)
    if start is None:
        raise ValueError(f"'{bug.name}': the module of '{bug.spec}' is not one that attnc makes")
    inside = [span for span, phase in _definitions(text) if phase == bug.phase]
    found = [
        match
        for match in re.finditer(pattern, text)
        if match.start() > start.start() and any(first <= match.start() < last for first, last in inside)
    ]
    if len(found) != 1:
        raise ValueError(f"'{bug.name}': its anchor occurs {len(found)} times in the module of '{bug.spec}'")
    (match,) = found
    patch = bug.patch if isinstance(bug.patch, str) else bug.patch(float(match[1]))
    return text[: match.start()] + patch + text[match.end() :]


#: The first line of code, after a header that speaks of the code too.
_HEADER = re.compile(r"^(import torch|typedef unsigned int u32;)$", re.M)
_BACKWARD = re.compile(
    r"^(class|def) (\w*_backward_\w*|_choose_backward|_gradients|_prepare_gradients|_Differentiable)", re.M
)


def _definitions(text: str) -> Iterator[tuple[tuple[int, int], Phase]]:
    """The top-level pieces of a module, and the phase that each belongs to."""
    ends = [match.end() for match in re.finditer(r"\n\n\n", text)]
    for first, last in pairwise([0, *ends, len(text)]):
        yield (first, last), "backward" if _BACKWARD.search(text[first:last]) else "forward"


def hunt(module: ir.Module, bug: Bug, *, examples: int = 300, seconds: float = 60.0, seed: int = 0) -> Catch:
    """Plants the bug in the module of its spec and fuzzes until it is caught. ValueError as for `plant`."""
    subject = _with_bug(module, bug)
    report = fuzz(subject, examples=examples, seconds=seconds, seed=seed, shrink=False)
    return catch_of(bug, report)


def catch_of(bug: Bug, report: Report) -> Catch:
    """What a fuzzer's report says of a planted bug."""
    return Catch(
        bug=bug,
        caught=not report.ok,
        examples=report.examples,
        seconds=report.seconds,
        message=report.failures[0].verdict.message if report.failures else "",
    )


def files_with(module: ir.Module, bug: Bug) -> dict[str, str]:
    """The file of the module that the bug is in, by its name, with the bug. ValueError as for `plant`."""
    source = module.variant.source
    files = render_files(module, path=Path(source.path).name, sha256=digest(source))
    if module.target == "triton":
        return {name: plant(text, bug) for name, text in files.items()}
    endings = {"": ".cu", "host": ".py"}
    name = f"{module.variant.name}{endings.get(bug.file, f'_{bug.file}.cu')}"
    return {name: plant(files[name], replace(bug, phase="backward") if bug.file == "host" else bug)}


def _with_bug(module: ir.Module, bug: Bug) -> Subject:
    files = files_with(module, bug)
    if module.target != "triton":
        return cuda_subject(module, files)
    (text,) = files.values()
    return replace(subject_of(module), module=load_text(text))


def table(catches: list[Catch]) -> str:
    """One line per bug: caught after how many examples, and how it showed."""
    lines = [
        f"{'caught' if c.caught else 'MISSED':7} {c.examples:4} {c.seconds:6.1f} s  "
        f"{c.bug.name:34} {c.bug.spec:15} {c.message[:60]}"
        for c in catches
    ]
    caught = sum(c.caught for c in catches)
    return "\n".join([*lines, f"{caught} of {len(catches)} bugs caught"])
