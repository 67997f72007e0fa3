"""Which mutants are run: drawn from the kernels of all committed specs, evenly by target and phase."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from attnc.build import digest
from attnc.files import write_text
from attnc.plan import ir
from attnc.plan.ir import Decode
from attnc.target.files import render_files
from attnc.target.support import with_headers
from tests.plans import SPECS, plans_of
from tools.mutants.operators import OPERATORS, Mutant, list_mutants

Phase: TypeAlias = Literal["forward", "decode", "backward"]
#: How often a draw may find no mutant that is new before there are taken to be no more.
_ATTEMPTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A module: the file of its spec, and its attention, variant and target."""

    spec: str
    attention: str
    variant: str
    target: str

    @property
    def module(self) -> ir.Module:
        """Returns the plan. KeyError where the specs have no such module."""
        for module in plans_of(self.spec).modules:
            if place_of(self.spec, module) == self:
                return module
        raise KeyError(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A mutant and the module that it is of."""

    place: Place
    phase: Phase
    mutant: Mutant

    @property
    def group(self) -> tuple[str, Phase]:
        return self.place.target, self.phase


def write_draws(path: Path, draws: Mapping[int, Draw]) -> None:
    """Writes mutants to a file, which takes seconds to draw."""
    write_text(path, "".join(f"{json.dumps(asdict(draws[number]))}\n" for number in sorted(draws)))


def read_draws(path: Path) -> dict[int, Draw]:
    """Reads the mutants of a file, by their numbers."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        data = json.loads(line)
        place, mutant = Place(**data["place"]), Mutant(**data["mutant"])
        found[number] = Draw(place=place, phase=data["phase"], mutant=mutant)
    return found


def place_of(spec: str, module: ir.Module) -> Place:
    return Place(
        spec=spec,
        attention=module.variant.attention.name,
        variant=module.variant.name,
        target=module.target,
    )


@cache
def texts_of(place: Place) -> Mapping[str, str]:
    """Renders the files of a module that hold kernels, by name; headers stand in the place of an #include."""
    module = place.module
    source = module.variant.source
    files = render_files(module, path=Path(source.path).name, sha256=digest(source))
    suffix = ".py" if place.target == "triton" else ".cu"
    return {name: with_headers(text) for name, text in files.items() if name.endswith(suffix)}


def list_places(targets: Collection[str] = (), specs: Collection[str] = ()) -> tuple[Place, ...]:
    """Lists the modules of the committed specs; of some targets or specs alone where any are given."""
    found = (
        place_of(path.stem, module)
        for path in sorted(SPECS.glob("*.attn"))
        if not specs or path.stem in specs
        for module in plans_of(path.stem).modules
    )
    return tuple(place for place in found if not targets or place.target in targets)


def draw_mutants(count: int, seed: int, places: Collection[Place], together: int = 1) -> Iterator[Draw]:
    """Draws so many mutants, none twice: target and phase take turns, then a module is drawn, and for each of
    so many together an operator and a site, each with the same chance. Fewer where there are no more.
    """
    chance = random.Random(seed)
    groups: dict[tuple[str, Phase], list[tuple[Place, str]]] = {}
    for place in places:
        for name in texts_of(place):
            for phase in _phases_of(place, name):
                groups.setdefault((place.target, phase), []).append((place, name))
    seen: set[tuple[str, str, int, int, str]] = set()
    failed = dict.fromkeys(groups, 0)
    while count and any(times < _ATTEMPTS for times in failed.values()):
        for (target, phase), files in sorted(groups.items()):
            if not count or failed[target, phase] >= _ATTEMPTS:
                continue
            place, name = chance.choice(files)
            known = _mutants(place, name, phase)
            operators = [operator for operator in OPERATORS if operator in known]
            for _ in range(min(together, count)):
                mutant = chance.choice(known[chance.choice(operators)])
                key = (f"{place}", name, mutant.start, mutant.stop, mutant.new)
                if key in seen:
                    failed[target, phase] += 1
                    continue
                failed[target, phase] = 0
                seen.add(key)
                count -= 1
                yield Draw(place=place, phase=phase, mutant=mutant)


def _phases_of(place: Place, name: str) -> tuple[Phase, ...]:
    """Returns the phases whose kernels a file holds."""
    if "_backward_" in name:
        return ("backward",)
    first: Phase = "decode" if isinstance(place.module.kernel, Decode) else "forward"
    has_both = name.endswith(".py") and place.module.backward is not None
    return (first, "backward") if has_both else (first,)


@cache
def _mutants(place: Place, name: str, phase: Phase) -> Mapping[str, tuple[Mutant, ...]]:
    """Lists the mutants of a file's kernels of a phase, by operator."""
    found: dict[str, list[Mutant]] = {}
    for mutant in list_mutants(name, texts_of(place)[name]):
        is_backward = "backward" in mutant.function or "_backward_" in name
        if is_backward == (phase == "backward"):
            found.setdefault(mutant.operator, []).append(mutant)
    return {operator: tuple(mutants) for operator, mutants in found.items()}
