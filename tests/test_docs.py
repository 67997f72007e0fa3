"""The documentation is true: specs compile, programs run, links lead somewhere, commands exist, tables agree.

`pytest tests/test_docs.py --update-golden` writes the parts that are computed from the program; see
tools/documentation.py for how blocks are marked.
"""

from __future__ import annotations

import ast as python
import keyword
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnc
from attnc.build import compile_program, plan_program
from attnc.cli import main
from attnc.diagnostics import Diagnostic, DiagnosticError, render
from attnc.expr.evaluate import Env, evaluate
from attnc.model.knobs import ACCUMULATE, ACCUMULATE_DQ, KEYS
from attnc.model.names import GLOBALS, INTERFACE, RESERVED, SOFT
from attnc.model.variants import variants
from attnc.source import Source
from attnc.syntax import ast
from attnc.syntax.parser import parse
from tests.processes import run_program, searched
from tools import (
    documented,
    documented_commands,
    documented_figures,
    documented_flex,
    documented_gallery,
    documented_mutants,
    documented_speed,
)
from tools.documentation import (
    PAGES,
    ROOT,
    Block,
    anchors,
    blocks,
    cells,
    command_lines,
    links,
    prose,
    region,
    whole,
    with_region,
)

LANGUAGE = ROOT / "docs" / "language.md"
REGIONS: Mapping[tuple[str, str], Callable[[str], str]] = {
    ("README.md", "kernel"): lambda page: documented_gallery.kernel(),
    ("README.md", "picture"): lambda page: documented_gallery.masks(),
    ("README.md", "flex"): lambda page: documented_flex.changed_import(),
    ("README.md", "speed on Hopper"): lambda page: documented_speed.hopper(),
    ("README.md", "speed"): lambda page: documented_speed.triton(),
    ("docs/flex.md", "speeds"): lambda page: documented_flex.speeds(),
    ("docs/flex.md", "waits"): lambda page: documented_flex.waits(),
    ("docs/verification.md", "mutants"): lambda page: documented_mutants.campaigns(),
    ("docs/language.md", "prelude"): lambda page: documented.definitions(),
    ("docs/language.md", "keys"): documented.keys,
    ("docs/language.md", "status"): lambda page: documented.status(),
    ("docs/language.md", "names"): lambda page: documented.names(),
    ("docs/language.md", "limits"): lambda page: documented.limits(),
    ("docs/guide.md", "platforms"): lambda page: documented.platforms(),
    ("docs/cli.md", "commands"): lambda page: documented_commands.commands(),
    ("docs/distributed.md", "explain"): lambda page: documented_commands.ranks_of_a_window(),
    ("docs/flashattention.md", "measured"): lambda page: documented_figures.papers(),
    ("docs/performance.md", "summary"): lambda page: documented_figures.summary(),
    ("docs/performance.md", "hopper"): lambda page: documented_figures.forward_hopper(),
    ("docs/performance.md", "hopper backward"): lambda page: documented_figures.backward_hopper(),
    ("docs/performance.md", "hopper backward fa4"): lambda page: documented_figures.backward_beside_fa4(),
    ("docs/performance.md", "hopper deterministic"): lambda page: documented_figures.deterministic_hopper(),
    ("docs/performance.md", "triton"): lambda page: documented_figures.forward_triton(),
    ("docs/performance.md", "triton backward"): lambda page: documented_figures.backward_triton(),
    ("docs/performance.md", "cuda"): lambda page: documented_figures.forward_cuda(),
    ("docs/performance.md", "cuda backward"): lambda page: documented_figures.backward_cuda(),
    ("docs/performance.md", "schedules"): lambda page: documented_figures.schedules(),
    ("docs/performance.md", "decode"): lambda page: documented_figures.decode(),
    ("docs/performance.md", "serving"): lambda page: documented_figures.serving(),
    ("docs/performance.md", "f32"): lambda page: documented_figures.f32(),
    ("docs/performance.md", "decode cuda"): lambda page: documented_figures.decode_cuda(),
    ("docs/performance.md", "models summary"): lambda page: documented_figures.models_summary(),
    ("docs/performance.md", "models"): lambda page: documented_figures.models(),
    ("docs/performance.md", "odd summary"): lambda page: documented_figures.odd_summary(),
    ("docs/performance.md", "odd"): lambda page: documented_figures.odd_behind(),
    ("docs/performance.md", "lists"): lambda page: documented_figures.lists(),
    ("docs/performance.md", "host"): lambda page: documented_figures.host(),
    ("docs/performance.md", "hopper prefill"): lambda page: documented_figures.prefill_hopper(),
    ("docs/performance.md", "hopper latent"): lambda page: documented_figures.latent_hopper(),
    ("docs/performance.md", "hopper decode"): lambda page: documented_figures.decode_hopper(),
    ("docs/performance.md", "host functions"): lambda page: documented_figures.host("host_functions_h200"),
    ("docs/performance.md", "hopper host"): lambda page: documented_figures.host("host_hopper_h200"),
    ("docs/training.md", "figures"): lambda page: documented_figures.training(),
    ("docs/distributed.md", "ranks"): lambda page: documented_figures.ranks("h200"),
    ("docs/distributed.md", "ranks_sm90a"): lambda page: documented_figures.ranks("h200_sm90a"),
    ("docs/distributed.md", "ranks_x4"): lambda page: documented_figures.ranks("h200x4_sm90a"),
}
SPECS = [block for page in PAGES for block in blocks(page) if block.language == "attn"]
PROGRAMS = [block for page in PAGES for block in blocks(page) if block.language == "python"]


# --- parts that are computed --------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "name"), REGIONS)
def test_computed_parts_are_up_to_date(page: str, name: str, golden: Callable[[Path, str], None]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    golden(ROOT / page, with_region(text, name, REGIONS[page, name](text)))


def test_the_page_of_diagnostics_is_up_to_date(golden: Callable[[Path, str], None]) -> None:
    golden(ROOT / "docs" / "diagnostics.md", documented.diagnostics_page())


def test_the_gallery_is_up_to_date(golden: Callable[[Path, str], None]) -> None:
    golden(ROOT / documented_gallery.PAGE, documented_gallery.gallery())


def test_every_key_is_probed_and_explained() -> None:
    assert documented.PROBES.keys() == KEYS.keys() | {"accumulate.dq"}
    rows = [cells(row) for row in region(LANGUAGE.read_text(encoding="utf-8"), "keys").splitlines()[2:]]
    assert len(rows) == len({**KEYS, "accumulate.dq": ACCUMULATE_DQ, "accumulate": ACCUMULATE})
    assert [row[0] for row in rows if not row[-1]] == []


def test_every_reserved_name_is_explained() -> None:
    text = prose(LANGUAGE)
    section = text[text.index("### Reserved names") : text.index("## Positions")]
    explained = set(re.findall(r"`(\w+)`", section))
    assert set(RESERVED) - set(keyword.kwlist) - explained == set()
    assert explained >= SOFT


def test_every_name_of_the_interface_is_explained() -> None:
    listed = set(re.findall(r"`([A-Za-z]\w*)`", region(LANGUAGE.read_text(encoding="utf-8"), "names")))
    assert listed >= (GLOBALS | INTERFACE) - RESERVED.keys()
    assert len(GLOBALS | INTERFACE) < 60, "what only generated code sees is renamed, and not refused"


def test_every_statement_is_explained() -> None:
    text = prose(LANGUAGE)
    section = text[text.index("## A file") : text.index("## Tensors")]
    words = {item.__name__.lower() for item in ast.AttentionItem.__args__}
    assert words - set(re.findall(r"`(\w+) ", section)) == set()


# --- specs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", SPECS, ids=str)
def test_specs_mean_what_the_page_says(block: Block, golden: Callable[[Path, str], None]) -> None:
    text = whole(block)
    name = block.file or f"{block.page.stem}.attn"
    if "wrong" in block.marks:
        page, answer = block.page.read_text(encoding="utf-8"), following(block)
        end = answer.start + len(answer.text)
        golden(block.page, page[: answer.start] + messages(text, name) + page[end:])
        return
    problems = refused(text, name)
    if "planned" in block.marks:
        assert problems, "this compiles now: remove the mark, and say so in the text"
        assert {problem.code for problem in problems} == {"E0602"}, render(problems)
    else:
        assert not problems, render(problems)


def refused(text: str, name: str) -> tuple[Diagnostic, ...]:
    """The errors of a spec; the first attention of one without schedules is compiled for Triton."""
    try:
        program = documented.program_of(text, name)
        for attention in program.attentions:
            variants(program, attention)
        if not program.schedules and program.attentions:
            schedule = f"\nschedule {program.attentions[0].name} for triton {{\ntile.q = 64\n}}\n"
            program = documented.program_of(text + schedule, name)
        compile_program(program, name)
    except DiagnosticError as failure:
        return tuple(d for d in failure.diagnostics if d.severity == "error")
    return ()


def messages(text: str, name: str) -> str:
    try:
        return render(plan_program(documented.program_of(text, name)).warnings)
    except DiagnosticError as failure:
        return render(failure.diagnostics)


def following(block: Block) -> Block:
    """The block after this one on its page."""
    return next(other for other in blocks(block.page) if other.start > block.start)


# --- programs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_programs_are_python(block: Block) -> None:
    compile(textwrap.dedent(block.text), str(block), "exec")


@pytest.mark.parametrize("block", [block for block in PROGRAMS if block.is_runnable], ids=str)
def test_what_programs_import_of_attnc_is_there(block: Block) -> None:
    found = re.findall(r"^\s*from (attnc[\w.]*) import ([\w, ]+)", block.text, re.M)
    for module, names in found:
        missing = [name for name in names.split(", ") if not hasattr(import_module(module), name)]
        assert missing == [], f"{module} has no {missing}"


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_programs_import_the_modules_of_attnc_that_they_use(block: Block) -> None:
    """They run where modules of attnc's are imported already, and would not miss them."""
    assert unimported(block.text) == []


def test_a_module_that_only_the_process_has_imported_is_missed() -> None:
    text = "import attnc\nattnc.compile('')\nattnc.flex\nattnc.runtime.trial.f()\n"
    assert unimported(text) == ["attnc.runtime", "attnc.runtime.trial"]
    assert unimported(f"from attnc.runtime import trial\n{text}") == []
    assert unimported("import attnc.flex as here\nhere.functions.f()") == ["attnc.flex.functions"]


def unimported(text: str) -> list[str]:
    """Returns the modules of attnc's that a program uses by their whole names, and does not import."""
    tree = python.parse(textwrap.dedent(text))
    imported, meaning = {f"attnc.{name}" for name in attnc.__all__}, {"attnc": "attnc"}
    for node in python.walk(tree):
        if isinstance(node, python.Import):
            imported |= {alias.name for alias in node.names}
            meaning |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, python.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    used = set()
    for node in python.walk(tree):
        if isinstance(node, python.Attribute):
            first, *rest = python.unparse(node).split(".")
            used.add(".".join([meaning.get(first, first), *rest]))
    modules = {name for name in used if re.fullmatch(r"attnc(\.\w+)+", name) and is_module(name)}
    return sorted(name for name in modules if not any(f"{each}.".startswith(f"{name}.") for each in imported))


def is_module(name: str) -> bool:
    place = ROOT / name.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").exists()


PYTEST = "import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.slow
@pytest.mark.one_in(5)
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.file for b in blocks(page))], ids=str)
def test_the_example_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, as a reader would save them: specs are compiled, then the programs run on the CPU."""
    monkeypatch.chdir(tmp_path)
    files = [block for block in blocks(page) if block.file and "wrong" not in block.marks]
    for block in files:
        path = tmp_path / str(block.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
    if any(block.language == "attn" for block in files):
        assert main(["compile"]) == 0
    for block in files:
        if block.language == "python" and block.is_runnable:
            environment = {
                **os.environ,
                "PYTHONPATH": searched(tmp_path),
                "CUDA_VISIBLE_DEVICES": "",
            }
            path = Path(str(block.file))
            if path.name.startswith("test_"):
                command: tuple[str | Path, ...] = (PYTEST, "-q", "-p", "no:cacheprovider", path)
            else:
                command = (path,)
            done = run_program(*command, environment=environment, has_attnc=True)
            assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"


# --- links and commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_blocks_of_code_end_where_they_seem_to(page: Path) -> None:
    """A fence with anything behind it does not close a block, which then takes in the text that follows."""
    text = "\n".join([prose(page), *(block.text for block in blocks(page))])
    assert re.findall(r"^ *```.*", text, re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    """`plan/layout.py` and `support.splits.plan_splits`, with and without `attnc` in front."""
    packages = "|".join(path.name for path in (ROOT / "attnc").iterdir() if path.is_dir())
    named = re.findall(rf"`(?:attnc[./])?((?:{packages}|tests|templates)[./][\w./]+)`", prose(page))
    assert [name for name in named if not (is_file(name) if "/" in name else is_attribute(name))] == []


def is_file(name: str) -> bool:
    return any((root / name).exists() for root in (ROOT, ROOT / "attnc"))


def is_attribute(name: str) -> bool:
    """Whether there is such a module or package of attnc's, or one whose text has the word."""
    *parts, word = name.split(".")
    place = ROOT / "attnc" / name.replace(".", "/")
    return (
        place.is_dir()
        or place.with_suffix(".py").exists()
        or any(
            re.search(rf"\b{word}\b", path.read_text(encoding="utf-8"))
            for path in (ROOT / "attnc" / "/".join(parts[: n + 1]) for n in range(len(parts)))
            for path in (path.with_suffix(".py"), path / "__init__.py")
            if path.exists()
        )
    )


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_exist(page: Path) -> None:
    wrong = [f"{line}: {problem}" for line in command_lines(page) if (problem := refusal(line))]
    assert wrong == []


def test_the_steps_of_the_readme_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`attnc new` writes the file that the commands after it are about."""
    (block,) = (block for block in blocks(ROOT / "README.md") if "attnc new" in block.text)
    first, *rest = [shlex.split(line, comments=True) for line in block.text.splitlines()[1:]]
    monkeypatch.chdir(tmp_path)
    assert main(first[1:]) == 0
    assert [words[1] for words in rest] == ["compile", "explain", "verify", "fuzz"]
    for words in rest:
        assert Path(words[2]).is_file()
    assert main(rest[0][1:]) == 0
    assert sorted(path.name for path in Path("generated/my/triton").glob("d*.py")) == ["d128.py", "d64.py"]


@cache
def refusal(line: str) -> str:
    """What the command says against a command line; empty if it takes it. Nothing is run."""
    words = [word for word in shlex.split(line)[1:] if word not in ("...", "|")]
    group: Any = documented_commands.group()
    if not words:
        return ""
    if words[0].startswith("-"):
        own = {option for param in group.params for option in param.opts}
        return "" if words[0] in {"--help", "-h", *own} else "no such option"
    if words[0] not in group.commands:
        return "no such command"
    command = group.commands[words[0]]
    if len(words) == 1 or words[-1] in ("--help", "-h"):
        return ""
    try:
        command.make_context(words[0], words[1:], resilient_parsing=False)
    except Exception as failure:  # whatever click's copy inside of typer raises
        missing = "Missing argument" in str(
            failure
        )  # `attnc explain --arch sm_80` in the text is no whole line
        return "" if missing else str(failure)
    return ""


# --- FlexAttention ------------------------------------------------------------------------------------------

_FLEX = [
    row
    for line in prose(LANGUAGE)[prose(LANGUAGE).index("## From FlexAttention") :].splitlines()
    if len(row := cells(line)) == 3 and "lambda" in row[1]
]


def test_there_are_eight_translations() -> None:
    assert len(_FLEX) == 8


@pytest.mark.parametrize(("name", "flex", "attn"), _FLEX, ids=[row[0] for row in _FLEX])
def test_translations_agree(name: str, flex: str, attn: str) -> None:
    """Both sides, evaluated on the same data for M = N: every score or mask bit is the same."""
    statements = "\n".join(re.findall(r"`([^`]+)`", attn))
    block = Block(page=LANGUAGE, line=0, language="attn", marks=(), text=statements + "\n")
    program = documented.program_of(whole(block))
    variant = variants(program, program.attentions[0])[0]
    batch, heads, length = 2, 4, 128 if name == "relative bias" else 200
    random = np.random.default_rng(0)
    tensors = {
        "doc": np.sort(random.integers(0, 4, (batch, length)), axis=-1),
        "prefix": random.integers(0, length, batch),
        "slope": random.random(heads),
        "table": random.standard_normal((heads, 255)),
        "reach": random.integers(0, 64, heads),
    }
    scaled = random.standard_normal((batch, heads, length, length))
    at = np.ix_(range(batch), range(heads), range(length), range(length))
    mod = eval(flex.strip("`"), {"torch": torch, **{key: torch.tensor(t) for key, t in tensors.items()}})
    indices = [torch.from_numpy(np.array(index)) for index in at]
    is_mask = "score" not in flex
    theirs = mod(*indices) if is_mask else mod(torch.from_numpy(scaled), *indices)
    dims = {"B": batch, "H": heads, "M": length, "N": length, "Hkv": heads, "G": 1, "R": 255}
    names = ("b", "h", "q_idx", "kv_idx")
    dot = scaled * np.sqrt(variant.params["D"])
    env = Env(indices=dict(zip(names, at, strict=True)), dims=dims, tensors=tensors, dot=dot)
    ours = evaluate(variant.attention.mask if is_mask else variant.attention.score, env)
    np.testing.assert_allclose(
        np.broadcast_to(ours, scaled.shape).astype(float),
        np.broadcast_to(theirs.numpy(), scaled.shape).astype(float),
        rtol=1e-12,
        atol=1e-12,
    )


def test_fragments_are_completed() -> None:
    """The filling does not hide mistakes: what a fragment has is kept, and parses."""
    block = Block(page=LANGUAGE, line=1, language="attn", marks=(), text="mask = casual\n")
    with pytest.raises(DiagnosticError, match="casual"):
        documented.program_of(whole(block))
    assert parse(Source("x", whole(block))).items
