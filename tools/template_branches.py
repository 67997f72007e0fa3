"""Which branches of the templates no spec renders.

    python -m tools.template_branches             # of committed specs, those of tests, and telling ones
    python -m tools.template_branches --random 300

Every condition of `{% if %}` and of `a if b else c` is asked how it came out. One that was always true, or
always false, is code that nobody has seen: it wants a telling spec in tests/telling_specs, or to be deleted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jinja2
from jinja2 import nodes
from jinja2.environment import Environment

from attnc.build import front, plan_program
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.target import templates
from attnc.target.files import render_files
from attnc.target.sm80 import render as cuda
from attnc.target.triton import render as triton

ROOT = Path(__file__).parent.parent
TELLING = ROOT / "tests/telling_specs"
SPECS = (
    *sorted((ROOT / "specs").glob("*.attn")),
    *sorted((ROOT / "templates/new").glob("*.attn")),
    *sorted((ROOT / "tests/planted/specs").glob("*.attn")),
    *sorted((ROOT / "tests/gpu/found_specs").glob("*.attn")),
    *sorted(TELLING.glob("*.attn")),
)


@dataclass(frozen=True, slots=True, order=True)
class Condition:
    """One condition, by its template, line, and place among those of the line."""

    template: str
    line: int
    place: int


@dataclass(slots=True)
class Branches:
    """How each condition of the templates that were read came out."""

    seen: dict[Condition, set[bool]] = field(default_factory=dict)

    def note(self, template: str, line: int, place: int, value: Any) -> Any:
        self.seen[Condition(template, line, place)].add(bool(value))
        return value

    def unmet(self) -> Iterator[tuple[Condition, str]]:
        """Conditions that came out one way alone, with that way."""
        for condition, values in sorted(self.seen.items()):
            if len(values) < 2:
                yield condition, f"always {values.pop()}".lower() if values else "never reached"


def watching(branches: Branches) -> type[Environment]:
    """An environment whose templates tell how their conditions come out."""

    class Watching(Environment):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "bytecode_cache": None})  # which has code that tells nothing

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            self.globals["note_branch"] = branches.note
            places: dict[int, int] = {}
            conditional: Any = (nodes.If, nodes.CondExpr)
            node: Any
            for node in tree.find_all(conditional):
                place = places[node.lineno] = places.get(node.lineno, -1) + 1
                branches.seen.setdefault(Condition(name or "", node.lineno, place), set())
                where = [nodes.Const(value) for value in (name or "", node.lineno, place)]
                note = nodes.Name("note_branch", "load")
                node.test = nodes.Call(note, [*where, node.test], [], None, None)
                node.test.set_lineno(node.lineno)
                node.test.set_environment(self)
            return tree

    return Watching


@contextmanager
def watched() -> Iterator[Branches]:
    """Within it, templates are read anew, and say which branches they take."""
    branches = Branches()
    caches = (templates.python_environment, cuda.cuda_environment, triton.triton_environment)
    for known in caches:
        known.cache_clear()
    try:
        with patch.object(jinja2, "Environment", watching(branches)):
            yield branches
    finally:
        for known in caches:
            known.cache_clear()


def render(texts: Iterable[str | Path]) -> None:
    """All modules of these specs."""
    for text in texts:
        program = front(text) if isinstance(text, Path) else resolve(parse(Source("a.attn", text)), prelude())
        planned = plan_program(program)
        for module in planned.modules:
            render_files(module, path="a.attn", sha256="0" * 64)


def described(found: tuple[Condition, str]) -> str:
    """A branch by its text, since lines move."""
    condition, way = found
    text = (ROOT / "templates" / condition.template).read_text(encoding="utf-8")
    return f"{condition.template}: {way}: {text.splitlines()[condition.line - 1].strip()}"


def random_texts(count: int) -> list[str]:
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from tests.verify.random_specs import EVERY_TARGET, specs

    found: list[str] = []

    @seed(1)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(specs(targets=EVERY_TARGET))
    def draw(text: str) -> None:
        found.append(text)

    draw()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random", type=int, default=0, help="random specs to render besides")
    given = parser.parse_args()
    with watched() as branches:
        render(SPECS)
        if given.random:
            render(random_texts(given.random))
        unmet = list(branches.unmet())
    for condition, way in unmet:
        template, rest = described((condition, way)).split(": ", 1)
        print(f"{template}:{condition.line}: {rest}")
    print(f"{2 * len(branches.seen) - len(unmet)} of {2 * len(branches.seen)} branches are rendered")
    return 1 if unmet else 0


if __name__ == "__main__":
    sys.exit(main())
