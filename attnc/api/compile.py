"""Spec text or file -> callable: `attnc.compile`.

    text --key--> package on disk?  --no--> parse, resolve, plan, render --keep--> package on disk
                        |                                                               |
                        +------------------------- import --> Family <------------------+

The key is a hash of all that the files depend on: the text, what was measured for it, the target and the
compiler's own source. A package that is there is imported without parsing anything.
"""

from __future__ import annotations

import copyreg
import hashlib
import json
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache as once
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from attnc.api import fastest
from attnc.api.family import Family
from attnc.api.fastest import (
    HOPPER,
    KINDS,
    TRITON,
    caller_level,
    chosen_target,
    kind_of,
    rank_for_lists,
    targets_on,
    warn_of_loss,
)
from attnc.diagnostics import DiagnosticError, render
from attnc.diagnostics.attempts import first_made
from attnc.diagnostics.shown import show_value
from attnc.resources import resource
from attnc.runtime.locks import renew_in_forks
from attnc.runtime.packages import Package, find_package, keep_package, load_package
from attnc.source import Source
from attnc.support.cache import cache_folder, own_folder
from attnc.support.folders import named_path

if TYPE_CHECKING:
    from attnc.build import CompiledSpec
    from attnc.model.attention import Attention
    from attnc.model.program import Program

Spec: TypeAlias = str | os.PathLike[str]
Cache: TypeAlias = bool | str | os.PathLike[str]

_NAME = re.compile(r"^[ \t]*(?:attention|projection)[ \t]+(\w+)", re.MULTILINE)


class SpecError(DiagnosticError):
    """The spec is wrong. Its text is what `attnc check` prints; `diagnostics` holds it with places."""

    def __str__(self) -> str:
        return "\n" + render(self.diagnostics).rstrip()


class SpecWarning(UserWarning):
    """What `attnc check` warns of."""


def compile_family(
    source: Spec,
    *,
    target: str | None = None,
    attention: str | None = None,
    deterministic: bool = True,
    cache: Cache = True,
    warn: bool = True,
    steps: bool = False,
    splits: int | None = None,
    many: bool = False,
) -> Family:
    """Returns the function of an attention (or projection) of a spec, compiled for a target; see
    `attnc.compile`.

    warn: whether warnings of the compiler become a SpecWarning. steps: whether an attention without a
    schedule gets one for single tokens and drafts, too. Callers that choose by sizes themselves ask for these
    kernels alone, by splits: how many programs share the keys of a head, 0 for as many as suit the device;
    many: of chunks, whose queries are more than few.
    """
    family = family_of(
        *_read_spec(source),
        target=target,
        attention=attention,
        deterministic=deterministic,
        cache=cache,
        steps=steps,
        splits=splits,
        many=many,
    )
    if warn and family.warnings:
        warnings.warn(f"\n{family.warnings}", SpecWarning, stacklevel=3)
    return family


_SAID: set[tuple[str, str]] = set()


def warn_of_dense_mask(function: str, family: Family) -> None:
    """Warns the caller of a function, once in a process for each such mask, that its kernel skips no tile for
    a condition that it looks up in a tensor.
    """
    said = (function, family.dense)
    if family.dense and said not in _SAID:
        _SAID.add(said)
        warnings.warn(
            f"{function}: {family.dense}: what it excludes costs what it would without a mask. Tiles are"
            " skipped for bounds by positions, lengths and ids that ascend",
            SpecWarning,
            stacklevel=caller_level(),
        )


def family_of(
    text: Source,
    tuned: Source | None = None,
    dispatch: Source | None = None,
    *,
    target: str | None = None,
    attention: str | None = None,
    deterministic: bool = True,
    cache: Cache = True,
    steps: bool = False,
    splits: int | None = None,
    many: bool = False,
    ahead: Family | None = None,
) -> Family:
    """Compiles a spec that is read already, with what was measured for it, as `compile_family` does. ahead:
    the kernels of another target that compute what calls return; None where the package says which.
    """
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: expected True or False, got {show_value(deterministic)}")
    ranked = _rank_targets(target)
    key = _key(text.path, text.text, *(measured.text if measured else "" for measured in (tuned, dispatch)))
    asked = (deterministic, steps, splits, many)
    key = _key(key, json.dumps(ranked), str(asked), attention or "", _compiler())
    key = key if ahead is None else _key(key, ahead.folder.name)  # calls of the same text alone run its own
    folder = _cache_folder(cache) / "packages" / key
    family = _FAMILIES.get(folder)
    if family is None:
        with making():
            family = _FAMILIES.get(folder)
            if family is None:
                package, place, made = _find(folder, cache), folder, None

                def make_forward(target: str) -> Family:
                    return family_of(text, tuned, dispatch, target=target, attention=attention, cache=cache)

                if package is None:
                    try:
                        package = _package(text, tuned, dispatch, ranked, attention, *asked)
                    except DiagnosticError as failure:
                        raise SpecError(failure.diagnostics) from None
                    package, made = _try_forward(package, make_forward)
                    place = _keep(folder, package, cache)
                family = _import_family(place, package)
                if forward := package.facts["forward"]:
                    ahead = made or make_forward(forward)
                if ahead is not None:
                    family.take_forward(ahead, package.facts["above"])
                _FAMILIES[folder] = family
                if lost := package.facts["lost"]:
                    warn_of_loss(_FUNCTION, lost)
    return family


def _try_forward(package: Package, make: Callable[[str], Family]) -> tuple[Package, Family | None]:
    """Returns the package, and the kernels that make results in place of its own; None, and a package that
    knows of no such kernels, if their target has none for the spec.
    """
    forward = package.facts["forward"]
    try:
        return package, make(forward) if forward else None
    except SpecError:  # kernels of one target do for all
        return replace(package, facts={**package.facts, "forward": ""}), None


def _is_named(cache: Cache) -> bool:
    return cache is not True or bool(os.environ.get("ATTNC_CACHE_DIR"))


def _find(folder: Path, cache: Cache) -> Package | None:
    try:
        return find_package(folder)
    except OSError:
        if _is_named(cache):
            raise
        return None


def _keep(folder: Path, package: Package, cache: Cache) -> Path:
    """Writes a package, and returns where: in a folder of this process where the user's has no room. OSError
    where the folder is named.
    """
    try:
        keep_package(folder, package)
    except OSError as failure:
        if _is_named(cache):
            raise
        reason = failure.strerror or str(failure)
        warnings.warn(
            f"{folder} cannot be written ({reason}); until it can, every process compiles anew", stacklevel=2
        )
        folder = _cache_folder(False) / "packages" / folder.name
        keep_package(folder, package)
    return folder


_FAMILIES: dict[Path, Family] = {}
_MAKING = threading.RLock()
renew_in_forks(globals(), "_MAKING")


@contextmanager
def making() -> Iterator[None]:
    """Holds the lock under which kernels are made: a module that another thread is still importing has no
    functions yet. Suspends transforms of torch.func, which would add an axis to the tables of a module.
    """
    from attnc.support.arguments import leaving_transforms  # which imports torch

    with _MAKING, leaving_transforms():
        yield


def _read_spec(source: Spec) -> tuple[Source, Source | None, Source | None]:
    """Returns the spec, and what was measured for a file of it. OSError where it cannot be read."""
    if isinstance(source, str) and ("\n" in source or "{" in source):
        found = _NAME.search(source)
        name = f"{found[1] if found else 'spec'}.attn"
        return Source(name, source.removeprefix("\ufeff")), None, None  # the mark of some editors
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"source: expected the text of a spec or a path, got {type(source).__name__}")
    if source == "":
        raise ValueError("source: expected the text of a spec or a path, got an empty string")
    from attnc.build import dispatch_source, tuned_source
    from attnc.syntax.parser import load

    path = named_path(source)
    try:
        text = load(path)
    except FileNotFoundError as failure:
        what = "no such file; the text of a spec has a brace or a line break"
        raise FileNotFoundError(failure.errno, what, str(source)) from None
    except DiagnosticError as failure:
        raise SpecError(failure.diagnostics) from None
    return text, tuned_source(path), dispatch_source(path)


#: What callers are told that they called.
_FUNCTION = "attnc.compile"
#: By the kind of an attention the targets that it may run on, the fastest first; for any kind the one that a
#: caller names.
Ranked: TypeAlias = Mapping[str, Sequence[str]]


def _rank_targets(target: str | None) -> Ranked:
    if target is not None:
        return {"": [target]}
    index = fastest.current_index()
    return {kind: targets_on(_FUNCTION, index, kind, chosen_target()) for kind in KINDS}


def _package(
    text: Source,
    tuned: Source | None,
    dispatch: Source | None,
    ranked: Ranked,
    attention: str | None,
    deterministic: bool,
    steps: bool,
    splits: int | None,
    many: bool,
) -> Package:
    """Returns the files for one attention, for the fastest target that has kernels for it. DiagnosticError,
    and ValueError for a wrong choice.
    """
    from attnc.model.resolve import resolve
    from attnc.syntax.parser import parse, prelude

    program = resolve(parse(text), prelude())
    name = _choose(program, attention)
    targets, lost = _candidates(program, name, ranked)

    def compile_package(target: str) -> Package:
        wanted = _schedules_for(program, name, target, deterministic, steps, splits, many)
        return _package_for(program, name, target, tuned, dispatch, wanted)

    package, failure = first_made(targets, compile_package)
    if failure and targets[0] == HOPPER:
        lost = need_of(failure)
    forward, above = _find_forward(program, name, ranked, package.facts["target"])
    more = {"lost": lost, "forward": forward, "above": above}
    return replace(package, facts={**package.facts, **more})


def _find_forward(program: Program, name: str, ranked: Ranked, target: str) -> tuple[str, int]:
    """Returns a faster target of an attention, and the queries up to which it is not: whose queries share
    blocks, or whose gradients are made by another one's kernels, of what the forward leaves; "" where there
    is none.
    """
    from attnc.model.variants import variants
    from attnc.plan.lists import adds_to_keys
    from attnc.plan.targets import shape_in, target_of
    from attnc.tuned.tables import BLOCKS_ALONE, FEW_ALONE

    if "" in ranked or name not in [attention.name for attention in program.attentions]:
        return "", 0
    shape = shape_in(program, name)
    kind = kind_of(shape.dtype == "f32", shape.width, gradients=False)
    first = ranked[kind][0]
    if first == target or _list_scheduled(program, name):
        return "", 0
    if shape.lists_blocks_of_queries and shape.unites:
        few = FEW_ALONE if shape.splits_unions else BLOCKS_ALONE
        return (first, few) if first == HOPPER else ("", 0)
    made = (variant.attention for variant in variants(program, program.attention(name)))
    is_left = all(adds_to_keys(x) for x in made) and not target_of(first).has_selected_gradients
    return (first, 0) if is_left else ("", 0)


def refuse_heads(function: str, columns: tuple[int, int], dtype: str, refused: DiagnosticError) -> ValueError:
    """Returns the error for heads of D and Dv columns for which no target has kernels."""
    d, dv = columns
    wide = f"{d}" if d == dv else f"{d} and {dv}"
    return ValueError(
        f"{function}: expected heads that kernels are made for, got {wide} columns of {dtype}:"
        f" {refused.diagnostics[0].message}"
    )


def need_of(failure: DiagnosticError) -> str:
    """Returns the need of kernels that a spec does not meet, in the words of `warn_of_loss`."""
    return f"a spec without this: {failure.diagnostics[0].message}"


def _candidates(program: Program, name: str, ranked: Ranked) -> tuple[Sequence[str], str]:
    """Returns the targets to try, the fastest first, and what keeps a faster one out, or "": one that has a
    schedule, where the attention has some.
    """
    from attnc.model.variants import variants
    from attnc.plan.targets import TARGETS, shape_in

    if "" in ranked:
        return ranked[""], ""
    known = [target for target in _list_scheduled(program, name) if target in TARGETS]
    if name not in [attention.name for attention in program.attentions]:
        return known[:1] or [TRITON], ""
    shape = shape_in(program, name)
    kind = kind_of(
        shape.dtype == "f32", shape.width, shape.gradients, lists_blocks=shape.lists_blocks_of_queries
    )
    targets = ranked[kind] if shape.listed is None else rank_for_lists(ranked[kind])
    if not known:
        made = [variant.attention for variant in variants(program, program.attention(name))]
        wanted = [attention for attention in made if attention.grads]
        able = [x for x in targets if all(_has_gradients(program, attention, x) for attention in wanted)]
        return able or targets, ""
    lost = _lacks(program, name, HOPPER) if targets[0] == HOPPER and HOPPER not in known else ""
    return [next((target for target in targets if target in known), known[0])], lost


def _has_gradients(program: Program, attention: Attention, target: str) -> bool:
    """Returns whether a target makes the gradients that an attention without a schedule asks for. Those of
    selected keys depend on the schedule that it gets.
    """
    from attnc.plan.differentiable import can_differentiate, has_backward
    from attnc.plan.lists import lists_blocks
    from attnc.plan.targets import target_of

    if not can_differentiate(attention, target_of(target)):
        return False
    if not lists_blocks(attention):
        return True
    try:
        with_schedule = _add_schedule(program, attention.name, target)
    except DiagnosticError:
        return False
    schedules = [x for x in with_schedule.schedules if (x.name, x.target) == (attention.name, target)]
    return all(has_backward(attention, schedule) for schedule in schedules)


def _list_scheduled(program: Program, name: str) -> list[str]:
    schedules = (*program.schedules, *program.projection_schedules)
    return list(dict.fromkeys(schedule.target for schedule in schedules if schedule.name == name))


def _lacks(program: Program, name: str, target: str) -> str:
    """Returns the need of a faster target that a spec does not meet, "" if there is none: a schedule of its
    own, if kernels could be made, and no schedule of the spec shares out the keys of a sequence.
    """
    from attnc.build import keep, plan_program

    if any(schedule.is_decode for schedule in program.schedules if schedule.name == name):
        return ""
    try:
        plan_program(keep(_add_schedule(program, name, target), name, target))
    except DiagnosticError:
        return ""
    return f"a schedule of their own for '{name}', or target='{target}'"


def _package_for(
    program: Program,
    name: str,
    target: str,
    tuned: Source | None,
    dispatch: Source | None,
    added: Sequence[str],
) -> Package:
    """Returns the files for one target. added: schedules for an attention that has none, of which the first
    that compile are taken.
    """
    from attnc.build import add_schedules, compile_program, keep
    from attnc.plan.mask_findings import DENSE
    from attnc.plan.targets import target_of

    folder = target_of(target).folder

    def compile_schedules(schedules: str) -> tuple[Source, CompiledSpec]:
        only = keep(add_schedules(program, schedules), name, target)
        return only.source, compile_program(only, Path(only.source.path).name, tuned, dispatch)

    (text, compiled), _ = first_made(added, compile_schedules)
    prefix = f"{name}/{folder}/"
    files = {
        output.path.removeprefix(prefix): output.text
        for output in compiled.outputs
        if output.path.startswith(prefix)
    }
    facts = {
        "name": name,
        "target": target,
        "path": text.path,
        "spec": text.text,
        "warnings": render(compiled.warnings).rstrip(),
        "dense": next((found.message for found in compiled.warnings if found.code == DENSE), ""),
    }
    return Package(files=files, facts=facts)


def _choose(program: Program, wanted: str | None) -> str:
    names = [attention.name for attention in program.attentions]
    names += [projection.name for projection in program.projections]
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted is not None and wanted in names:
        return wanted
    if not names:
        raise ValueError("source: expected a spec with an attention or a projection, it declares none")
    known = ", ".join(names)
    if wanted is None:
        raise ValueError(f"attention: the spec declares {known}; say which one")
    raise ValueError(f"attention: expected one of {known}, got {wanted!r}")


def _schedules_for(
    program: Program,
    name: str,
    target: str,
    deterministic: bool,
    steps: bool,
    splits: int | None,
    many: bool,
) -> list[str]:
    from attnc.build import schedules_for

    if target in _list_scheduled(program, name):
        return [""]
    return schedules_for(
        program, name, target, deterministic=deterministic, steps=steps, splits=splits, many=many
    )


def _add_schedule(program: Program, name: str, target: str) -> Program:
    from attnc.build import add_schedules, schedules_for

    (schedule,) = schedules_for(program, name, target, steps=False)
    return add_schedules(program, schedule)


def _import_family(folder: Path, package: Package) -> Family:
    import torch

    if torch.cuda.is_available():
        return Family(load_package(folder, package), package)
    from attnc.verify.runners import runner_of

    runner = runner_of(package.facts["target"])
    runner.prepare()
    module = load_package(folder, package)
    for name in package.files:
        if name.endswith(".py") and name != "__init__.py":
            runner.attach(import_module(f"{module.__name__}.{name.removesuffix('.py')}"))
    return Family(module, package)


def _cache_folder(cache: Cache) -> Path:
    """Names the folder where packages are kept: the user's, another one, or one that this process removes."""
    if cache is True:
        return cache_folder()
    if cache is False:
        return own_folder()
    if not isinstance(cache, str | os.PathLike):
        raise TypeError(f"cache: expected True, False or a path, got {type(cache).__name__}")
    return named_path(cache).absolute()


@once
def _compiler() -> str:
    """Returns a hash of the compiler's own text, so that no package outlives what made it."""
    package = Path(__file__).resolve().parents[1]
    roots = (package, resource("grammar"), resource("templates"))
    files = (path for root in roots for path in sorted(root.rglob("*")))
    texts = (
        path.read_bytes()
        for path in files
        if path.suffix in (".py", ".lark", ".jinja", ".attn", ".h", ".cuh")
    )
    return _key(*(hashlib.sha256(text).hexdigest() for text in texts))


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(map(_add_length, parts)).encode()).hexdigest()


def _add_length(part: str) -> str:
    """Returns a part with its length in front, so that no two lists of parts look the same."""
    return f"{len(part)}:{part}"


def _again(spec: str, name: str, target: str, ahead: Family | None = None) -> Family:
    return family_of(*_read_spec(spec), target=target, attention=name, ahead=ahead)


def _reduce(family: Family) -> tuple[Callable[..., Family], tuple[str, str, str, Family | None]]:
    return _again, (str(family.spec), family.name, family.target, family.ahead)


copyreg.pickle(Family, _reduce)
