"""`attnc.compile`: spec text to callable, its cache, its errors, and what it shows."""

from __future__ import annotations

import inspect
import pickle
import stat
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch

import attnc
from attnc.api import compile as compiling
from attnc.diagnostics import DiagnosticError
from attnc.verify.interpreter import ensure_interpreter
from tests.processes import run_program

SPEC = """
attention tiny {
  param T in {f16, bf16}
  input q: T[B, M, H, 16]
  input k, v: T[B, N, H, 16]
  score = dot(q, k) / sqrt(16)
  mask = causal
  normalize = softmax
  output o: T[B, M, H, 16]
  grad q, k, v
}
"""
TWO = "".join(SPEC.replace("tiny", name) for name in ("first", "second"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and no memory of other tests' families."""
    ensure_interpreter()
    monkeypatch.setattr(compiling, "_FAMILIES", {})
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fails_to_compile(*_: object, **__: object) -> None:
    raise AssertionError("it should have been found in the cache")


def test_text_to_function() -> None:
    family = attnc.compile(SPEC)
    q, k, v = torch.randn(3, 1, 20, 2, 16).half().requires_grad_().unbind()
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    attention: Any = torch.nn.functional.scaled_dot_product_attention
    expected = attention(*heads_first, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(family(q, k, v), expected, rtol=0, atol=4e-3)
    torch.testing.assert_close(
        torch.autograd.grad(family(q, k, v).sum(), v),
        torch.autograd.grad(expected.sum(), v),
        rtol=0,
        atol=8e-3,
    )


def test_a_path_is_as_good_as_text(tmp_path: Path) -> None:
    path = tmp_path / "tiny.attn"
    path.write_text(SPEC)
    assert attnc.compile(path).files == attnc.compile(str(path)).files
    assert attnc.compile(path).variants == ("f16", "bf16")


def test_a_schedule_that_the_spec_lacks_is_added_for_the_target() -> None:
    assert "schedule tiny for triton {" in attnc.compile(SPEC).spec
    cuda = attnc.compile(attnc.compile(SPEC).spec, target="cuda.sm_80")
    assert cuda.spec.count("schedule tiny for") == 2
    assert "__global__" in cuda.source
    assert cuda.folder.joinpath("default.cu").read_text() == cuda.source


def test_other_processes_find_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    first = attnc.compile(SPEC)
    monkeypatch.setattr(compiling, "_FAMILIES", {})
    monkeypatch.setattr(compiling, "_package", fails_to_compile)
    again = attnc.compile(SPEC)
    assert again is not first
    assert (again.files, again.module) == (first.files, first.module)
    with pytest.raises(AssertionError, match="found in the cache"):
        attnc.compile(SPEC.replace("16", "32"))


@pytest.mark.parametrize("damage", ["f16.py", "manifest.json"])
def test_a_damaged_package_is_made_again(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = attnc.compile(SPEC)
    whole = first.files["f16.py"]
    (first.folder / damage).write_text("")
    monkeypatch.setattr(compiling, "_FAMILIES", {})
    assert attnc.compile(SPEC).files["f16.py"] == whole
    assert (first.folder / "f16.py").read_text() == whole


def test_the_folder_is_private(cache: Path) -> None:
    folder = attnc.compile(SPEC).folder
    assert folder.is_relative_to(cache)
    for each in (cache, cache / "packages", folder):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700


@pytest.mark.parametrize("level", ["cache", "packages", "package"])
def test_a_folder_that_others_may_have_prepared_is_refused(
    level: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = attnc.compile(SPEC).folder
    prepared = {"cache": cache, "packages": cache / "packages", "package": folder}[level]
    monkeypatch.setattr(compiling, "_FAMILIES", {})
    prepared.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write to it"):
        attnc.compile(SPEC)
    prepared.rename(prepared.with_name("elsewhere"))
    prepared.symlink_to(prepared.with_name("elsewhere"))
    with pytest.raises(PermissionError, match="is a link"):
        attnc.compile(SPEC)


@pytest.mark.parametrize("names", [("keep_package",), ("find_package", "keep_package")])
def test_a_full_disk_costs_the_cache_alone(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the user has named a folder, that it is full is an error."""

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(folder: Path, *package: Any) -> Any:
            if folder.is_relative_to(tmp_path):
                raise OSError(ENOSPC, "No space left on device")
            return original(folder, *package)

        return call

    for name in names:
        monkeypatch.setattr(compiling, name, failing(getattr(compiling, name)))
    with pytest.raises(OSError, match="No space left"):
        attnc.compile(SPEC)
    monkeypatch.delenv("ATTNC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match=r"cannot be written \(No space left on device\)"):
        made = attnc.compile(SPEC)
    assert not made.folder.is_relative_to(tmp_path)
    assert attnc.compile(SPEC) is made


def test_a_text_may_begin_with_the_mark_of_an_editor() -> None:
    assert attnc.compile("\ufeff" + SPEC).spec == attnc.compile(SPEC).spec


def test_another_folder_and_none(cache: Path, tmp_path: Path) -> None:
    assert attnc.compile(SPEC, cache=tmp_path / "here").folder.is_relative_to(tmp_path / "here")
    assert not attnc.compile(SPEC, cache=False).folder.is_relative_to(tmp_path)
    assert not cache.exists()


def test_a_mistake_reads_as_attnc_check_prints_it() -> None:
    with pytest.raises(attnc.SpecError) as caught:
        attnc.compile(SPEC.replace("causal", "casual"))
    assert isinstance(caught.value, DiagnosticError)
    assert caught.value.diagnostics[0].primary.span.text == "casual"
    assert str(caught.value).splitlines()[1:] == [
        "error[E0203]: unknown name 'casual'",
        "  --> tiny.attn:7:10",
        " 7 |   mask = casual",
        "   |          ^^^^^^ not an index, dimension, input, param, let or def",
        "   = help: did you mean 'causal'?",
    ]


def test_a_doubtful_spec_warns_every_time() -> None:
    doubtful = SPEC.replace("causal", "kv_idx < 0")
    for _ in range(2):
        with pytest.warns(attnc.SpecWarning, match=r"warning\[W0701\]"):
            attnc.compile(doubtful)


@pytest.mark.parametrize(
    ("source", "choice", "error", "message"),
    [
        (TWO, {}, ValueError, "attention: the spec declares first, second; say which one"),
        (TWO, {"attention": "third"}, ValueError, "attention: expected one of first, second, got 'third'"),
        ("# {\n", {}, ValueError, "it declares none"),
        (SPEC, {"target": "cuda"}, ValueError, "target: expected one of cuda.sm_100, .*, got 'cuda'"),
        (3, {}, TypeError, "source: expected the text of a spec or a path, got int"),
        ("", {}, ValueError, "source: expected the text of a spec or a path, got an empty string"),
        (SPEC, {"deterministic": "no"}, TypeError, "deterministic: expected True or False, got 'no'"),
        (SPEC, {"cache": 3}, TypeError, "cache: expected True, False or a path, got int"),
        (
            "nowhere.attn",
            {},
            FileNotFoundError,
            "no such file; the text of a spec has a brace .*nowhere.attn",
        ),
    ],
)
def test_wrong_arguments(source: str, choice: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attnc.compile(source, **choice)


def test_one_of_several() -> None:
    assert attnc.compile(TWO, attention="second").name == "second"


def test_what_it_says_of_itself() -> None:
    family = attnc.compile(SPEC)
    assert "def tiny_forward(" in family.source
    assert family.source_of("bf16") == (family.folder / "bf16.py").read_text()
    assert "tensor cores" in family.explain(arch="sm_80")
    assert list(inspect.signature(family).parameters)[:3] == ["q", "k", "v"]
    shown = family._repr_html_()
    assert "<b>tiny</b> for triton: f16, bf16" in shown
    assert "&lt;" not in repr(family)
    for wrong in (
        lambda: family.explain("f32"),
        lambda: family.source_of("f32"),
        lambda: family.verify("f32"),
    ):
        with pytest.raises(ValueError, match="variant: expected one of f16, bf16, got 'f32'"):
            wrong()


def test_verify_judges_the_kernels() -> None:
    verification = attnc.compile(SPEC).verify("f16", count=1, seconds=1)
    assert verification
    assert repr(verification).startswith("ok    tiny f16: 1 case in ")


@pytest.mark.parametrize(("given", "message"), [({"count": 0}, "count: "), ({"seconds": -1.0}, "seconds: ")])
def test_no_cases_say_nothing(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attnc.compile(SPEC).verify("f16", **given)


def test_a_family_travels_by_its_text() -> None:
    family = attnc.compile(SPEC)
    assert pickle.loads(pickle.dumps(family)).spec == family.spec


def test_names_of_the_package() -> None:
    assert {*attnc.__all__} <= {*dir(attnc), "Family", "SpecError", "SpecWarning", "flex"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = attnc.nothing


@pytest.mark.slow
def test_no_gpu_and_no_preparation() -> None:
    """In a new process the kernels run on the CPU by themselves."""
    program = f"""if True:
        import attnc, torch
        q = torch.ones(1, 3, 1, 16).half()
        print(attnc.compile({SPEC!r})(q, q, q).sum())
    """
    done = run_program(program, check=True, has_attnc=True)
    assert done.stdout == "tensor(48., dtype=torch.float16)\n"


def test_an_editor_sees_types_and_shapes() -> None:
    capped = SPEC.replace("mask", "param cap in {30.0, 50.0}, soft in {false, true}\n  mask").replace(
        "dot(q, k) / sqrt(16)", "where(soft, softcap(dot(q, k), cap), dot(q, k))"
    )
    family = attnc.compile(capped)
    signature = inspect.signature(family)
    annotated = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    optional = torch.Tensor | None
    assert {name: annotated[name] for name in ("q", "k", "v")} == dict.fromkeys("qkv", torch.Tensor)
    assert annotated["config"] == "Config | None"
    assert (annotated["out"], annotated["lse"], annotated["cap"], annotated["soft"]) == (
        optional,
        optional,
        float,
        bool,
    )
    assert signature.parameters["cap"].default == 30.0
    assert signature.return_annotation is torch.Tensor
    documented = inspect.getdoc(family.function) or ""
    assert "for T in {f16, bf16}, cap in {30.0, 50.0}, soft in {false, true}:" in documented
    assert "    q: T[B, M, H, 16]" in documented
