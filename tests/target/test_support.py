"""Copies of the support package: beside modules, and in the text of one."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attnc.build import front, plan_program
from attnc.cli import main
from attnc.runtime.loader import load_files
from attnc.target.files import render_files
from attnc.target.support import _PLACES, FOLDER, _inline, standalone, support_files
from attnc.verify.interpreter import ensure_interpreter
from attnc.verify.simt import attach, available

ROOT = Path(__file__).parents[2]


def rendered(name: str, target: str) -> dict[str, str]:
    modules = plan_program(front(ROOT / "specs" / f"{name}.attn")).modules
    module = next(made for made in modules if made.target == target)
    return render_files(module, path=f"{name}.attn", sha256="0")


def alone(files: dict[str, str]) -> str:
    return standalone(next(iter(files.values())), {k: v for k, v in files.items() if k.endswith(".cu")})


def imported(text: str, path: Path) -> ModuleType:
    """A file, imported with nothing but itself."""
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", ["triton", "cuda.sm_80"])
def test_a_standalone_module_computes_the_same_with_nothing_beside_it(target: str, tmp_path: Path) -> None:
    if target != "triton" and not available():
        pytest.skip("g++ compiles the kernels for the CPU")
    ensure_interpreter()
    files = rendered("alibi", target)
    text = alone(files)
    assert f"from ...{FOLDER}" in files[next(iter(files))]
    assert f"from ...{FOLDER}" not in text
    modules: list[Any] = [imported(text, tmp_path / f"alone_{target[:4]}.py"), load_files(files)]
    torch.manual_seed(0)
    inputs = [torch.randn(1, 9, 2, 64, dtype=torch.bfloat16) for _ in range(3)] + [torch.rand(2)]
    found = []
    for module in modules:
        if target != "triton":
            attach(module)
        leaves = [x.clone().requires_grad_() for x in inputs]
        o = module.alibi(*leaves)
        o.float().square().sum().backward()
        found.append([o, *(x.grad for x in leaves)])
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)


def test_a_name_that_would_mean_two_things_is_refused() -> None:
    text = next(iter(rendered("alibi", "triton").values()))
    with pytest.raises(ValueError, match="cdiv is also the name of a part of the support package"):
        standalone(text + "\n\ndef cdiv():\n    pass\n")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", ["triton", "cuda", "hopper"])
def test_no_two_parts_have_a_name_in_common(target: str) -> None:
    """In one file the second of two would stand for both."""
    body, _ = _inline(frozenset({*_PLACES["all"], *_PLACES[target]}))
    found = Counter[str]()
    for node in ast.parse(body).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] += 1
            case ast.Assign(targets=targets):
                found.update(x.id for to in targets for x in ast.walk(to) if isinstance(x, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] += 1
    assert found["Attention"] == 1
    assert [name for name, count in found.items() if count > 1] == []


def test_what_modules_import_of_the_copy_is_in_it() -> None:
    """The copy changes with the package, modules with their templates."""
    lines = {
        line
        for file in (ROOT / "generated").rglob("*.py")
        if FOLDER not in file.parts
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.startswith("from ") and f".{FOLDER}." in line
    }
    assert len(lines) > 10
    for line in lines:
        (imported,) = ast.parse(line).body
        assert isinstance(imported, ast.ImportFrom)
        assert imported.module is not None
        part = importlib.import_module(f"attnc.support.{imported.module.rpartition('.')[2]}")
        assert not [one.name for one in imported.names if not hasattr(part, one.name)], line


def test_the_copy_is_the_package_itself() -> None:
    files = support_files()
    for path in sorted((ROOT / "attnc" / "support").glob("*.[pc]*")):
        if path.suffix in (".py", ".cuh"):
            assert files[f"{FOLDER}/{path.name}"].endswith(path.read_text(encoding="utf-8"))
    assert {f"{FOLDER}/{name}.cuh" for name in ("device", "sm80", "sm90")} <= files.keys()
    assert all("attnc compile" in text for name, text in files.items() if name.endswith(".py"))


def test_compile_writes_files_that_stand_alone(tmp_path: Path) -> None:
    spec, out = str(ROOT / "specs" / "alibi.attn"), tmp_path / "out"
    assert main(["compile", spec, "--out", str(out), "--standalone"]) == 0
    files = [path for path in out.glob("*/**/*") if path.is_file()]
    assert {path.parent.name for path in files} == {"alibi", "triton", "cuda_sm_80", "cuda_sm_90a"}
    assert {path.name for path in files} == {"__init__.py", "d64.py"}
    assert "SOURCES = {" in (out / "alibi" / "cuda_sm_80" / "d64.py").read_text(encoding="utf-8")
    assert main(["compile", spec, "--out", str(out)]) == 0
    assert (out / FOLDER / "call.py").is_file()
