"""Compiling specs: the files, their determinism, the package that picks a variant, the work it takes."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from attnc.build import compile_spec, diagnose, display_name, front, support_outputs
from attnc.output import compare, write
from attnc.resources import resource

ROOT = Path(__file__).parent.parent
GENERATED = ROOT / "generated"
SPECS = sorted((ROOT / "specs").glob("*.attn"))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_spec_compiles_to_what_is_in_generated(path: Path) -> None:
    compiled = compile_spec(path, ROOT)
    assert compiled.outputs
    for output in compiled.outputs:
        if output.path.endswith(".py"):
            compile(output.text, output.path, "exec")
        assert f"attnc compile specs/{path.name}" in output.text
        assert str(ROOT) not in output.text
        assert output.text.endswith("\n")
        assert not output.text.endswith("\n\n")
    drifts = compare(compiled.outputs, GENERATED)
    assert [(drift.kind, drift.path) for drift in drifts] == [], "run: make generated"


def test_generated_holds_what_specs_make_and_the_support_package() -> None:
    support = support_outputs()
    assert compare(support, GENERATED) == (), "run: make generated"
    programs = [front(path) for path in SPECS]
    made = {attention.name for program in programs for attention in program.attentions}
    made |= {projection.name for program in programs for projection in program.projections}
    folders = {path.name for path in GENERATED.iterdir() if path.is_dir()}
    assert folders == made | {output.path.split("/")[0] for output in support}


@pytest.mark.parametrize("name", ["bias", "speculative", "linear"])
def test_what_was_compiled_before_changes_nothing(name: str) -> None:
    path = ROOT / "specs" / f"{name}.attn"
    assert compile_spec(path, ROOT).outputs == compile_spec(path, ROOT).outputs


def test_a_module_compiles_in_a_few_hundred_thousand_calls() -> None:
    """From parse to text, by functions called: a fifth of a second, on any machine, however busy."""
    path = ROOT / "specs" / "window.attn"
    compile_spec(path, ROOT)  # loads the grammar and the templates
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        outputs = compile_spec(path, ROOT).outputs
    finally:
        sys.setprofile(None)
    modules = sum(output.path.endswith(".py") for output in outputs)
    assert calls / modules < 150_000


def test_diagnose_reports_what_compiling_raises(tmp_path: Path) -> None:
    spec = tmp_path / "wrong.attn"
    spec.write_text("attention wrong {\n  scor = 1\n}\n")
    assert {d.severity for d in diagnose(spec)} == {"error"}


def test_numbers_are_checked_without_a_schedule() -> None:
    spec = ROOT / "tests" / "golden" / "diagnostics" / "E0507_reciprocal_beyond_float32.attn"
    assert [found.code for found in diagnose(spec)] == ["E0507"]


def test_the_name_of_a_spec_is_never_absolute(tmp_path: Path) -> None:
    spec = tmp_path / "specs" / "a.attn"
    assert display_name(spec, tmp_path) == "specs/a.attn"
    assert display_name(spec, tmp_path / "elsewhere") == "a.attn"
    assert display_name(spec, None) == "a.attn"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of an importable package made from a spec with every kind of param, modules replaced by
    stubs.
    """
    spec = tmp_path / "many.attn"
    spec.write_text(
        "attention many {\n  param T in {f16, bf16}, D in {64, 128}, W in {16, 32}\n"
        "  input q: T[B, H, M, D]\n  input k, v: T[B, H, N, D]\n  score = dot(q, k)\n"
        "  mask = window(W, 0)\n  normalize = softmax\n  output o: T[B, H, M, D]\n}\n"
        "schedule many for triton {\n  loops = [q, kv]\n  tile.q = 64, tile.kv = 32\n}\n"
    )
    write((*compile_spec(spec).outputs, *support_outputs()), tmp_path / "kernels_of_test")
    for path in tmp_path.glob("kernels_of_test/many/triton/*_*.py"):
        if path.name != "__init__.py":
            path.write_text(
                f"Config = tuple\n\n\ndef many(q, k, v, **options):\n    return '{path.stem}', options\n"
            )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "kernels_of_test.many.triton"
    for name in [name for name in sys.modules if name.startswith("kernels_of_test")]:
        del sys.modules[name]


def test_the_package_picks_a_variant_by_its_arguments(package: str) -> None:
    import torch

    many = importlib.import_module(package).many
    q = torch.empty(1, 2, 3, 128, dtype=torch.bfloat16)
    assert many(q, q, q) == ("bf16_d128_w16", {"out": None, "config": None})
    assert many(q.half(), q, q, W=32, out=q) == ("f16_d128_w32", {"out": q, "config": None})
    with pytest.raises(
        ValueError, match=r"many was not compiled for T = torch.float32, D = 128, W = 16; there is: T = "
    ):
        many(q.float(), q, q)
    # What is no such tensor goes on to a variant, whose checks name the argument.
    assert many(q[0], q, q) == ("f16_d64_w16", {"out": None, "config": None})
    assert many(None, q, q) == ("f16_d64_w16", {"out": None, "config": None})


def test_a_variant_can_be_imported_as_a_module(package: str) -> None:
    many = importlib.import_module(package)
    assert many.bf16_d128_w16 is importlib.import_module(f"{package}.bf16_d128_w16")


def test_templates_ship_with_the_compiler() -> None:
    assert resource("templates", "dispatch.py.jinja").is_file()
