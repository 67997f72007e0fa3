"""Whatever parses resolves, or is refused with diagnostics: never a traceback. What resolves compiles."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnc.build import plan_program
from attnc.diagnostics import DiagnosticError, render
from attnc.explain.forward import as_text, explain
from attnc.model.configs import configs
from attnc.model.resolve import resolve
from attnc.model.schedule import PHASES
from attnc.model.variants import variants
from attnc.plan.device import DEVICES
from attnc.source import Source
from attnc.syntax import ast
from attnc.syntax.parser import parse, prelude
from attnc.target.files import render_files
from tests.model.resolving import EXAMPLES, ROOT, SPECS

GOLDEN = sorted((ROOT / "tests" / "golden" / "diagnostics").glob("E0[2-4]*.attn"))
TEXTS = [path.read_text(encoding="utf-8") for path in (*SPECS, *EXAMPLES, *GOLDEN)]
TOKEN = re.compile(r"\s+|#[^\n]*|[A-Za-z_][\w.]*|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|[<>=!]=|//|.", re.S)
WORD = re.compile(r"[A-Za-z_0-9]")
WORDS = sorted({token for text in TEXTS for token in TOKEN.findall(text) if WORD.match(token)})
NUMBERS = (
    "0",
    "1",
    "2",
    "3",
    "7",
    "16",
    "31",
    "33",
    "100",
    "1024",
    "2147483648",
    "9999999999",
    "0.5",
    "1e30",
)


@st.composite
def mutated_specs(draw: st.DrawFn) -> str:
    """A spec with some words replaced, left out, doubled or swapped, or a line taken from another spec."""
    tokens = TOKEN.findall(draw(st.sampled_from(TEXTS)))
    places = st.sampled_from([i for i, token in enumerate(tokens) if WORD.match(token)])
    for _ in range(draw(st.integers(0, 4))):
        i, j = draw(places), draw(places)
        match draw(st.sampled_from(["other", "other", "number", "none", "twice", "swap"])):
            case "other":
                tokens[i] = draw(st.sampled_from(WORDS))
            case "number":
                tokens[i] = draw(st.sampled_from(NUMBERS))
            case "none":
                tokens[i] = ""
            case "twice":
                tokens[i] += f" {tokens[i]}"
            case _:
                tokens[i], tokens[j] = tokens[j], tokens[i]
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
                        if schedule.name == attention.name:
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


# Few of them come as far as a kernel, which takes a hundred times as long.
@pytest.mark.slow
@settings(max_examples=settings().max_examples * 9 // 4)
@given(mutated_specs())
def test_what_mutated_specs_compile_to(text: str) -> None:
    try:
        program = resolve(parse(Source("fuzz.attn", text)), prelude())
        modules = plan_program(program).modules
    except DiagnosticError as refused:
        render(refused.diagnostics)
        return
    for module in modules[:2]:
        for name, made in render_files(module, path="fuzz.attn", sha256="0").items():
            if name.endswith(".py"):
                compile(made, name, "exec")
        as_text(explain(module, program.schedules[0], DEVICES["sm_90"], shapes=(), length=256))
