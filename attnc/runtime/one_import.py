"""Finds the kernels that `from generated.NAME import NAME` calls on a GPU, present or not, and the reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnc.plan.targets import TARGETS, target_of
from attnc.support.arguments import DTYPES
from attnc.support.by_target import ByTarget, Needs, Row, runs
from attnc.support.sizes import parse_beside_threads
from attnc.target.dispatch import fastest_first, needs_of
from attnc.tuned.tables import TARGET_SIZES

_ARCH = re.compile(r"sm_(\d{2,3})a?")
#: Sizes by which a table decides, as a reader calls them.
_SIZES = dict(zip(TARGET_SIZES, ("M", "N", "batch times heads", "gradients"), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGpu:
    """A GPU that calls are chosen for. name: as tables call it; capability: 90 for 9.0; index: PyTorch's
    number, None for one that is not here.
    """

    name: str
    capability: int
    index: int | None = None

    def runs(self, target: str) -> bool:
        """Returns whether kernels of a target can be launched; where the GPU is not here, what launches them
        counts as installed.
        """
        if self.index is None:
            return self.could_run(target)
        return runs(Needs(*needs_of(target)), self.index)

    def could_run(self, target: str) -> bool:
        return target_of(target).runs_on(self.capability)

    def rows(self, choice: ByTarget, key: tuple[Any, ...]) -> Sequence[Row]:
        """Returns the rows that decide for a variant: the first that admits the sizes does. There are none if
        no target of the function runs.
        """
        able = [target for target in choice.variants[key] if self.runs(target)]
        if not able:
            return ()
        return [((), able[0])] if self.index is None else choice.rows(self.index, key)


def absent_gpu(arch: str) -> TargetGpu:
    """Returns a GPU that need not be here, of e.g. "sm_90". Raises ValueError for what is no architecture."""
    found = _ARCH.fullmatch(arch)
    if found is None:
        raise ValueError(f"'{arch}' is no architecture")
    return TargetGpu(name=arch, capability=int(found[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a function calls, in words. targets: those that it has; measured_on: GPUs of which it has tables;
    runs: whether all variants have a target that does.
    """

    name: str
    text: str
    targets: tuple[str, ...] = ()
    measured_on: tuple[str, ...] = ()
    runs: bool = True


def choose_functions(folder: Path, gpu: TargetGpu) -> Iterator[Chosen]:
    """Yields, for each function of a folder of `attnc compile` that has several targets, the kernels that it
    calls.
    """
    for file in sorted(folder.glob("*/__init__.py")):
        if "ByTarget" not in file.read_text(encoding="utf-8", errors="replace"):
            continue
        name = file.parent.name
        try:
            choice, params = read_choice(file)
        except ValueError as failure:  # somebody has changed it
            yield Chosen(name=name, text=f"cannot be read: {failure}", runs=False)
            continue
        found = {key: _words(gpu, choice, key) for key in choice.variants}
        yield Chosen(
            name=name,
            text=_join_texts(params, found),
            targets=tuple(choice.needs),
            measured_on=tuple(dict.fromkeys(device for device, _ in choice.tuned)),
            runs=all(gpu.rows(choice, key) for key in choice.variants),
        )


def read_choice(file: Path) -> tuple[ByTarget, Sequence[str]]:
    """Returns the table from which a function with several targets picks, and the names of its params, as
    `__init__.py` of its folder writes them down. Nothing of the file is run. ValueError for a file of another
    kind.
    """
    written = dict[str, Any]()
    try:
        for node in parse_beside_threads(ast.parse, file.read_bytes()).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in _TABLES:
                    written[name] = _literal(value)
        if missing := [name for name in _TABLES if name not in written]:
            raise ValueError(f"it has no {missing[0]}")
        targets, params, variants, tuned = (written[name] for name in _TABLES)
        return ByTarget("", file.parent.name, targets, variants, tuned), params
    except (SyntaxError, TypeError, AttributeError) as failure:
        raise ValueError(str(failure)) from failure


_TABLES = ("TARGETS", "PARAMS", "VARIANTS", "TUNED")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Tuple(elts=parts):
            return tuple(map(_literal, parts))
        case ast.Dict(keys=keys, values=values):
            known = [key for key in keys if key is not None]
            return dict(zip(map(_literal, known), map(_literal, values), strict=True))
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in _DTYPES:
            return _DTYPES[name]
        case _:
            return ast.literal_eval(node)


def rule(gpu: TargetGpu, functions: Sequence[Chosen]) -> str:
    tables = sorted({device for function in functions for device in function.measured_on})
    targets = [target for function in functions for target in function.targets] or TARGETS
    able = [target for target in fastest_first(targets) if gpu.runs(target)]
    first = f"the first that a function has of {', '.join(able)}"
    if gpu.name in tables:
        return f"what a table measured on {gpu.name} says, without one {first}"
    of = f", since no table was measured on it: there are those of {', '.join(tables)}" if tables else ""
    return f"{first}{of}"


def _words(gpu: TargetGpu, choice: ByTarget, key: tuple[Any, ...]) -> str:
    rows = gpu.rows(choice, key)
    if not rows:
        return f"none of {', '.join(choice.variants[key])} runs"
    decided = "measured" if len(rows) > 1 else "the first that runs"
    last = next(at for at, (limits, _) in enumerate(rows) if all(limit is None for limit in limits))
    while last and rows[last - 1][1] == rows[last][1]:
        last -= 1
    said = [f"{target} {_condition(limits)}" for limits, target in rows[:last]]
    return f"{', '.join([*said, 'else ' * bool(said) + rows[last][1]])} ({decided})"


def _condition(limits: Sequence[int | None]) -> str:
    sizes = dict(zip(_SIZES.values(), limits, strict=True))
    plain = sizes.pop("gradients") is not None
    within = " and ".join(f"{name} <= {limit}" for name, limit in sizes.items() if limit is not None)
    return " ".join([*([f"for {within}"] if within else []), *(["without gradients"] if plain else [])])


def _join_texts(params: Sequence[str], found: dict[tuple[Any, ...], str]) -> str:
    alike: dict[str, list[str]] = {}
    for key, text in found.items():
        values = (str(value).removeprefix("torch.") for value in key)
        alike.setdefault(text, []).append(", ".join(map("{} = {}".format, params, values)))
    if len(alike) == 1:
        return next(iter(alike))
    return "; ".join(f"{' or '.join(variants)}: {text}" for text, variants in alike.items())
