"""Every command, and what Python has in its place, over every committed spec: a result, or a mistake that is
named, and never a bug of attnc's. One variant each; some by day, all by night. `tests/api/test_every_door.py`
does the same of the ways by which programs come to kernels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest

import attnc
from attnc import editor
from attnc.build import front, plan_program
from attnc.cli import main
from attnc.source import Source
from tests.by_day import some_by_day

ROOT = Path(__file__).parents[2]
SPECS = sorted(path.stem for path in (ROOT / "specs").glob("*.attn"))
PROJECTIONS = ("projections", "no attention")
#: What is said of pages, lists of blocks, prefixes of keys, epilogues and weights.
ALONE = ("shared out over ranks", "not kept over ranks", *PROJECTIONS)
#: Arguments, and what is said where a spec has nothing of that.
COMMANDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "check": ("check SPEC", ()),
    "check_json": ("check --json SPEC", ()),
    "fmt": ("fmt --check SPEC", ()),
    "compile": ("compile SPEC", ()),
    "compile_standalone": ("compile --standalone SPEC", ()),
    "compile_diff": ("compile --diff SPEC", ("would change",)),
    "explain": ("explain --no-compile SPEC", PROJECTIONS),
    "explain_json": ("explain --no-compile --json SPEC", PROJECTIONS),
    "explain_ir": ("explain --ir SPEC", PROJECTIONS),
    "explain_ranks": ("explain --ranks 2 SPEC", ALONE),
    "new": ("new NAME --like NAME --out new", ("declares", "cannot be called so")),
    "tune": ("tune SPEC", ("timing needs a CUDA GPU",)),
    "calibrate": ("calibrate SPEC", ("has softmax = unified_max",)),
    "bench": ("bench --host SPEC", ("timing needs a CUDA GPU", "has kernels")),
}
#: The same of commands that run kernels.
RUNS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "verify": ("verify --count 1 --seconds 1 SPEC", ()),
    "verify_coverage": ("verify --count 1 --seconds 1 --coverage --json SPEC", ()),
    "verify_sm_80": (
        "verify --count 1 --seconds 1 --target cuda.sm_80 SPEC",
        ("there is no target", *PROJECTIONS),
    ),
    "verify_sm_90a": (
        "verify --count 1 --seconds 1 --target cuda.sm_90a SPEC",
        ("there is no target", *PROJECTIONS),
    ),
    "verify_large": ("verify --large SPEC", ("need a GPU", "has no large cases")),
    "fuzz": ("fuzz --examples 1 --seconds 1 SPEC", ()),
}
#: Those of which every process imports PyTorch.
NIGHTLY: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "verify_ranks": (  # or the first variant is one of several schedules: ranks have kernels of their own
        "verify --ranks 2 --count 1 --seconds 1 SPEC",
        (*ALONE, "there is no variant", "nothing was verified"),
    ),
}


def run(arguments: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    (folder / "specs").mkdir()
    (folder / "specs" / f"{name}.attn").write_text(spec_of(name).read_text())
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(folder / "cache"))
    words = (word.replace("SPEC", f"specs/{name}.attn").replace("NAME", name) for word in arguments.split())
    return main(list(words))


@pytest.mark.parametrize(("command", "name"), some_by_day(COMMANDS, SPECS, of=47))
def test_every_command_has_a_result_or_names_a_mistake(
    command: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments, mistakes = COMMANDS[command]
    code = run(arguments, name, tmp_path, monkeypatch)
    done = capfd.readouterr()
    assert code == 0 or (code in (1, 2) and any(mistake in done.err for mistake in mistakes)), done.err


def spec_of(name: str) -> Path:
    return ROOT / "specs" / f"{name}.attn"


def first_variant(name: str) -> str:
    """Returns the options that leave one variant of a spec."""
    planned = plan_program(front(spec_of(name)))
    names = [module.variant.name for module in planned.modules]
    names += [module.variant.name for module in planned.projections]
    return f"--variant {names[0]}"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *some_by_day(RUNS, SPECS, of=67),
        *(
            pytest.param(command, name, id=f"{command}-{name}", marks=pytest.mark.nightly)
            for command, name in product(NIGHTLY, SPECS)
        ),
    ],
)
def test_every_command_that_runs_kernels_has_a_verdict(
    command: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments, mistakes = {**RUNS, **NIGHTLY}[command]
    code = run(f"{arguments} {first_variant(name)}", name, tmp_path, monkeypatch)
    done = capfd.readouterr()
    refused = code in (1, 2) and any(mistake in done.err for mistake in mistakes)
    assert code == 0 or refused, done.out + done.err


@pytest.mark.nightly
@pytest.mark.parametrize("name", SPECS)
def test_cubins_are_made_ahead_of_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of all CUDA kernels of a spec, in some ten seconds each."""
    assert run("compile --aot sm_90 SPEC", name, tmp_path, monkeypatch) == 0
    wrote = re.search(r"wrote (\d+) cubins for sm_90", capfd.readouterr().out)
    has_some = any(module.target.startswith("cuda") for module in plan_program(front(spec_of(name))).modules)
    assert wrote is not None
    assert (int(wrote[1]) > 0) == has_some


@pytest.mark.parametrize("name", some_by_day(SPECS, of=12))
def test_editors_have_something_to_say(name: str) -> None:
    text = spec_of(name).read_text()
    source = Source(f"{name}.attn", text)
    assert [found for found in editor.diagnose(source) if found.severity == "error"] == []
    assert editor.format_text(source) == text
    first = text.index("\n  input") + 3
    assert editor.complete(source, first)
    assert editor.hover(source, first) is not None


@pytest.mark.parametrize("name", some_by_day(SPECS, of=13))
def test_functions_of_python_show_what_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(tmp_path / "cache"))
    program = front(spec_of(name))
    attentions = [attention.name for attention in program.attentions]
    targets = {module.target for module in plan_program(program).modules}
    target = "triton" if "triton" in targets else min(targets, default="triton")
    for block in (*attentions, *(projection.name for projection in program.projections)):
        made = attnc.compile(spec_of(name), attention=block, target=target)
        assert made.name == block
        assert (f"def {block}" if target == "triton" else block) in made.source
        assert repr(made).startswith(f"<{block} for {target}")
        assert block not in attentions or made.explain()
