"""Modules of exported forms: their names, and which of those that are there is taken."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from attnc.api import compile as api
from attnc.api.compile import SpecError
from attnc.api.fastest import HOPPER, TRITON
from attnc.compat import export, exported
from attnc.compat.exported import load_form, module_name
from attnc.compat.form import Form
from attnc.diagnostics import error
from attnc.source import Source
from attnc.target.support import FOLDER

PLAIN = Form(dtype="float16", size=16, size_v=16)


def test_each_form_has_a_file_of_its_own() -> None:
    """Splits are no part of a text, and the kernel depends on them."""
    forms = [
        replace(PLAIN, splits=splits, causal=causal, grads=grads)
        for splits, causal, grads in product((None, 0, 1, 2), (False, True), ((), ("q",)))
    ]
    named = [(form, target, fast) for form in forms for target in ("", HOPPER) for fast in (False, True)]
    names = {module_name(form, target, fast=fast) for form, target, fast in named}
    assert len(names) == len(named)
    assert all(name.isidentifier() for name in names)
    assert module_name(replace(PLAIN, targets=(HOPPER,), fast=True)) == module_name(PLAIN)


@pytest.mark.parametrize("fast", [False, True])
def test_the_first_module_that_is_there_is_taken(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    form = replace(PLAIN, targets=(HOPPER, "other"), fast=fast)
    wanted = [
        f"{module_name(form, target, fast=way)}.default"
        for target in form.targets
        for way in ((True, False) if fast else (False,))
    ] + [module_name(form)]
    there: set[str] = set()
    tried: list[str] = []

    def find(name: str) -> ModuleType | None:
        tried.append(name)
        return ModuleType(name) if name in there else None

    monkeypatch.setattr(exported, "_import_module", find)
    with pytest.raises(
        ValueError, match="exported without one for this call; attnc makes it from\nattention"
    ):
        load_form(form)
    assert tried == wanted
    for at, name in reversed([*enumerate(wanted)]):
        there.add(name)
        tried.clear()
        assert load_form(form).__name__ == name
        assert tried == wanted[: at + 1]


@pytest.mark.parametrize("missing", [None, "cupy", "attnc.compat.kernelsx", "attnc.compat.kernels.it.more"])
def test_a_module_that_is_not_there_is_no_module_that_lacks_another(
    missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> Any:
        raise ModuleNotFoundError("it", name=missing)

    monkeypatch.setattr(exported, "import_module", fail)
    with pytest.raises(ModuleNotFoundError):
        exported._import_module("it")


@pytest.mark.parametrize("there", ["attnc", "attnc.compat.kernels", "attnc.compat.kernels.it"])
def test_packages_may_be_missing(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        assert name == "attnc.compat.kernels.it"
        raise ModuleNotFoundError("it", name=there)

    monkeypatch.setattr(exported, "import_module", fail)
    assert exported._import_module("it") is None


def test_exported_kernels_are_for_any_softcap() -> None:
    assert not exported.builds_in((5.0, 0.2))
    assert exported.making() is exported.making()


@pytest.mark.parametrize(
    ("form", "ways"),
    [
        (PLAIN, [False]),
        (replace(PLAIN, grads=("q", "k", "v")), [False, True]),
        (replace(PLAIN, q="ragged", kv="ragged", grads=("q",)), [False]),
        (replace(PLAIN, q="ragged", kv="ragged"), [False]),
    ],
)
@pytest.mark.parametrize("has_kernels", [True, False])
def test_files_of_a_form_are_those_of_its_kernels(
    form: Form, ways: list[bool], has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, bool, int | None]] = []

    def compile_family(
        text: str, *, target: str, deterministic: bool = True, warn: bool, splits: int | None
    ) -> Any:
        assert (text, warn) == (form.text, False)
        made.append((target, deterministic, splits))
        if target == HOPPER and not has_kernels:
            raise SpecError([error("E0602", "not yet", Source("it.attn", text).span(0, 1), "")])
        code = f"from ...{FOLDER} import x\n# {target} {deterministic}"
        return SimpleNamespace(files={"__init__.py": "whole", "default.py": code, "d16.cu": "kernel"})

    monkeypatch.setattr(api, "compile_family", compile_family)
    files = export.kernel_files(form)
    assert made == [
        (TRITON, True, None),
        *((HOPPER, not way, None) for way in (ways if has_kernels else ways[:1])),
    ]
    folders = [f"kernels/{module_name(form, HOPPER, fast=way)}" for way in ways] if has_kernels else []
    wanted = {f"{folder}/{name}" for folder in folders for name in ("__init__.py", "default.py", "d16.cu")}
    assert {*files} == {f"kernels/{module_name(form)}.py"} | wanted
    for way, folder in zip(ways, folders, strict=False):
        assert f"# {HOPPER} {not way}" in files[f"{folder}/default.py"]
        assert f"from ..{FOLDER} import x" in files[f"{folder}/default.py"]
        assert "CuPy" in files[f"{folder}/__init__.py"]
