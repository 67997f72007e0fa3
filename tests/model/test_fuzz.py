"""Whatever parses resolves, or is refused with diagnostics: never a traceback."""

import re

from hypothesis import given
from hypothesis import strategies as st

from attnc.diagnostics import DiagnosticError, render
from attnc.model.configs import configs
from attnc.model.resolve import resolve
from attnc.model.schedule import PHASES
from attnc.model.variants import variants
from attnc.source import Source
from attnc.syntax import ast
from attnc.syntax.parser import parse
from attnc.syntax.prelude import prelude
from tests.model.resolving import EXAMPLES, ROOT, SPECS

GOLDEN = sorted((ROOT / "tests" / "golden" / "diagnostics").glob("E0[2-4]*.attn"))
TEXTS = [path.read_text(encoding="utf-8") for path in (*SPECS, *EXAMPLES, *GOLDEN)]
TOKEN = re.compile(r"\s+|#[^\n]*|[A-Za-z_][\w.]*|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|[<>=!]=|//|.", re.S)
WORD = re.compile(r"[A-Za-z_0-9]")
WORDS = sorted({token for text in TEXTS for token in TOKEN.findall(text) if WORD.match(token)})


@st.composite
def mutated_specs(draw: st.DrawFn) -> str:
    """A spec with some words replaced by other words, or a line taken from another spec."""
    tokens = TOKEN.findall(draw(st.sampled_from(TEXTS)))
    places = [i for i, token in enumerate(tokens) if WORD.match(token)]
    for _ in range(draw(st.integers(0, 4))):
        tokens[draw(st.sampled_from(places))] = draw(st.sampled_from(WORDS))
    lines = "".join(tokens).split("\n")
    if draw(st.booleans()):
        others = draw(st.sampled_from(TEXTS)).split("\n")
        lines[draw(st.integers(0, len(lines) - 1))] = draw(st.sampled_from(others))
    return "\n".join(lines)


def check(file: ast.File) -> None:
    try:
        program = resolve(file, prelude())
        for attention in program.attentions:
            for variant in variants(program, attention):
                for schedule in program.schedules:
                    for phase in PHASES:
                        if schedule.attention == attention.name:
                            configs(schedule, phase, variant)
    except DiagnosticError as refused:
        render(refused.diagnostics)


@given(mutated_specs())
def test_mutated_specs(text: str) -> None:
    try:
        file = parse(Source("fuzz.attn", text))
    except DiagnosticError:
        return
    check(file)
