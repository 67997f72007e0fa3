"""What `attnc doctor` says of tables of targets, and of what functions call on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnc.build import compile_program, support_outputs
from attnc.cli.doctor import Finding, _choices, _functions, _tables, _targets
from attnc.model.resolve import resolve
from attnc.output import write
from attnc.runtime import devices
from attnc.runtime.one_import import TargetGpu, absent_gpu, choose_functions, read_choice, rule
from attnc.source import Source
from attnc.support import by_target
from attnc.support.devices import Gpu as Properties
from attnc.syntax.parser import parse, prelude
from attnc.tuned.tables import ANY_TARGET, TARGET_SIZES, ChoiceTable, TableRow, dump_tables
from tests.cli.conftest import Run

H200 = "NVIDIA H200"
TEXT = """
attention near {
  param D in {32, 64}
  input q: bf16[B, M, H, D]
  input k, v: bf16[B, N, H, D]
  score = dot(q, k)
  normalize = softmax
  output o: bf16[B, M, H, D]
  grad q
}
schedule near for triton {
}
schedule near for cuda.sm_80 {
}
schedule near for cuda.sm_90a {
}
attention old {
  input q: f16[B, M, H, 32]
  input k, v: f16[B, N, H, 32]
  score = dot(q, k)
  normalize = softmax
  output o: f16[B, M, H, 32]
}
schedule old for triton {
}
schedule old for cuda.sm_80 {
}
"""


def table(name: str = "near", variant: str = "d64", device: str = H200) -> ChoiceTable:
    picked: tuple[tuple[tuple[int | None, ...], str], ...] = (
        ((None, 512, None, 0), "triton"),
        ((16, None, 32, None), "cuda.sm_80"),
        ((None, None, None, None), "cuda.sm_90a"),
    )
    rows = tuple(TableRow(limits=limits, choice={"target": to}, microseconds=1.0) for limits, to in picked)
    return ChoiceTable(
        name=name,
        target=ANY_TARGET,
        variant=variant,
        device=device,
        toolchain="triton 3.6.0",
        sizes=TARGET_SIZES,
        rows=rows,
    )


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with generated/, where one variant of one function has been measured."""
    measured = Source("near.dispatch.json", dump_tables([table()]))
    compiled = compile_program(
        resolve(parse(Source("near.attn", TEXT)), prelude()), "near.attn", None, measured
    )
    write((*compiled.outputs, *support_outputs()), tmp_path / "generated")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def machine(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts GPUs and packages into the machine, for attnc and for what is generated."""
    found: Any = importlib.util.find_spec

    def make(name: str, capability: tuple[int, int], packages: set[str]) -> None:
        gpu = Properties(0, name, capability, 1, 1, 132, 1, 1 << 37)
        known = devices.CudaDevice(name=name, arch=gpu.arch, memory=1)
        monkeypatch.setattr(devices, "gpus", lambda: (known,))
        by_target.runs.cache_clear()
        monkeypatch.setattr(by_target, "gpu_of", lambda index: gpu)
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: (
                name in packages or None if name in ("cupy", "triton") else found(name, *rest)
            ),
        )

    yield make
    by_target.runs.cache_clear()


def said(findings: Iterator[Finding]) -> dict[str, str]:
    return {found.name: found.detail for found in findings}


def test_tables_of_this_device_are_named_and_malformed_ones_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "specs" / "tuned"
    folder.mkdir(parents=True)
    tables = [table(device="a GPU"), table("far", device="another")]
    (folder / "near.dispatch.json").write_text(dump_tables(tables), encoding="utf-8")
    (folder / "worn.dispatch.json").write_text("{", encoding="utf-8")
    assert [(found.state, found.detail) for found in _tables(0, "a GPU")] == [
        ("note", f"{Path('specs/tuned/worn.dispatch.json')} cannot be read"),
        ("ok", "near cuda.sm_80 or cuda.sm_90a or triton"),
    ]


def test_a_measured_gpu_takes_what_its_table_says(machine: Callable[..., None]) -> None:
    machine(H200, (9, 0), {"cupy", "triton"})
    assert said(_targets(None)) == {
        "targets 0": f"what a table measured on {H200} says, without one the first that a function has of "
        "cuda.sm_90a, triton, cuda.sm_80",
        "near 0": "D = 32: cuda.sm_90a (the first that runs); D = 64: triton for N <= 512 without gradients, "
        "cuda.sm_80 for M <= 16 and batch times heads <= 32, else cuda.sm_90a (measured)",
        "old 0": "triton (the first that runs)",
    }


def test_a_gpu_that_nobody_measured_takes_the_first_that_runs(machine: Callable[..., None]) -> None:
    machine("NVIDIA H100", (9, 0), {"cupy", "triton"})
    assert said(_targets(None)) == {
        "targets 0": "the first that a function has of cuda.sm_90a, triton, cuda.sm_80, since no table was "
        f"measured on it: there are those of {H200}",
        "near 0": "cuda.sm_90a (the first that runs)",
        "old 0": "triton (the first that runs)",
    }


def test_what_cannot_be_launched_is_left_out_and_named(machine: Callable[..., None]) -> None:
    machine(H200, (9, 0), {"triton"})
    rule_, near, old = _targets(None)
    assert rule_.detail.endswith("the first that a function has of triton")
    assert rule_.fix == "pip install cupy-cuda13x (cupy-cuda12x for CUDA 12), for cuda.sm_90a, cuda.sm_80 too"
    assert near.detail == ("D = 32: triton (the first that runs); D = 64: triton (measured)")
    assert (old.state, old.detail) == ("ok", "triton (the first that runs)")
    machine(H200, (9, 0), set())
    assert [(found.state, found.detail) for found in _targets(None)] == [("missing", "none runs")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("arch", "near", "old"),
    [
        ("sm_80", "triton", "triton"),
        ("sm_90", "cuda.sm_90a", "triton"),
        ("sm_90a", "cuda.sm_90a", "triton"),
        ("sm_100", "triton", "triton"),
        ("sm_121", "triton", "triton"),
    ],
)
def test_a_gpu_that_is_not_here_takes_the_first_too(project: Path, arch: str, near: str, old: str) -> None:
    found = said(_targets(arch))
    assert found[f"near {arch}"] == f"{near} (the first that runs)"
    assert found[f"old {arch}"] == f"{old} (the first that runs)"
    assert found[f"targets {arch}"].endswith(f"measured on it: there are those of {H200}")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0), (13, 7)])
def test_what_is_said_of_an_absent_gpu_is_what_calls_take_on_one(
    machine: Callable[..., None], project: Path, capability: tuple[int, int]
) -> None:
    """Not by another rule than the generated function's own."""
    major, minor = capability
    absent = absent_gpu(f"sm_{major}{minor}")
    machine("some GPU", capability, {"cupy", "triton"})
    here = TargetGpu(name="some GPU", capability=absent.capability, index=0)
    folder = project / "generated"
    assert list(choose_functions(folder, absent)) == list(choose_functions(folder, here))
    choice, params = read_choice(folder / "near" / "__init__.py")
    assert params
    for key in choice.variants:
        ((_, target),) = choice.rows(0, key)
        assert absent.rows(choice, key) == [((), target)]


def test_an_older_gpu_takes_none(project: Path) -> None:
    assert [(found.state, found.detail) for found in _choices("sm_75", absent_gpu("sm_75"))] == [
        ("note", "none is for it")
    ]


def test_a_function_that_runs_nowhere_here_and_one_that_is_broken_are_notes(project: Path) -> None:
    (project / "generated" / "old" / "__init__.py").write_text("ByTarget\n1 / 0\n", encoding="utf-8")
    near, old = choose_functions(project / "generated", absent_gpu("sm_70"))
    assert near.text == "none of cuda.sm_90a, triton, cuda.sm_80 runs"
    assert not near.runs
    assert old.text == "cannot be read: it has no TARGETS"
    assert [found.state for found in _choices("sm_90", absent_gpu("sm_90"))] == ["ok", "ok", "note"]


def test_without_functions_the_rule_is_that_of_all_targets(tmp_path: Path) -> None:
    assert list(choose_functions(tmp_path, absent_gpu("sm_80"))) == []
    assert rule(absent_gpu("sm_80"), []) == "the first that a function has of triton, cuda.sm_80"


@pytest.mark.parametrize("arch", ["hopper", "90", "sm_9", "sm_90b", ""])
def test_what_is_no_architecture_is_a_mistake(arch: str, run: Run) -> None:
    done = run("doctor", "--device", arch)
    assert done.code == 2
    assert f"'{arch}' is no architecture" in done.err


def test_it_is_said_of_every_function_of_this_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    found = said(_targets("sm_90"))
    texts = (
        (path.parent.name, path.read_text(encoding="utf-8")) for path in root.glob("generated/*/__init__.py")
    )
    names = {name for name, text in texts if "CHOICE = " in text}
    assert len(names) > 30
    assert set(found) == {"targets sm_90", *(f"{name} sm_90" for name in names)}
    assert found["causal_gqa sm_90"] == "cuda.sm_90a (the first that runs)"


def test_a_cache_that_cannot_be_is_a_finding_like_others(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(folder / "file" / "cache"))
    done = run("doctor")
    assert done.code == 1
    assert done.out.count("point ATTNC_CACHE_DIR to a folder of yours") == 2
    assert "ok  torch" in done.out


# --- what the functions of attnc run on ---------------------------------------------------------------------

KNOWN = "f16 and bf16 {half}; f32 cuda.sm_80, forward up to 64 columns triton"


def test_every_function_says_whose_kernels_it_runs(machine: Callable[..., None]) -> None:
    machine(H200, (9, 0), {"cupy", "triton"})
    found = said(_functions(None))
    hopper = KNOWN.format(half="cuda.sm_90a")
    assert found["attnc.flex.flex_attention 0"] == f"{hopper}; up to 16 queries triton"
    assert found["attnc.compile 0"] == f"{hopper}; latent attention cuda.sm_90a"
    assert found["attnc.compat.flash_attn 0"] == f"{hopper}; up to 16 queries triton"
    for function in ("compat.sdpa", "adapters.transformers", "adapters.vllm", "adapters.sglang"):
        assert f"attnc.{function} 0" in found
    machine("A100", (8, 0), {"cupy", "triton"})
    assert said(_functions(None))["attnc.compile 0"] == KNOWN.format(half="triton")


def test_what_a_missing_package_costs_is_said_once(machine: Callable[..., None]) -> None:
    machine(H200, (9, 0), {"triton"})
    first, *others = _functions(None)
    assert first.detail == "f16 and bf16 triton; f32 triton"
    assert "cupy" in first.fix
    assert not any(finding.fix for finding in others)
    machine("A100", (8, 0), {"triton"})
    assert not any(finding.fix for finding in _functions(None))


def test_functions_of_a_gpu_that_is_not_here() -> None:
    found = said(_functions("sm_80"))
    assert found["attnc.compile sm_80"] == KNOWN.format(half="triton")
    assert found["attnc.compat.sdpa sm_80"] == "f16 and bf16 triton; up to 16 queries triton"
    assert list(_functions("sm_75")) == []


def test_the_functions_are_those_that_choose() -> None:
    """Each module that asks for the targets of a call is among them, or is what they share."""
    root = Path(__file__).parents[2] / "attnc"
    shared = {"attnc.api.fastest", "attnc.compat.call", "attnc.adapters.specs", "attnc.flex.programs"}
    asking = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for path in root.rglob("*.py")
        if "targets_of_call" in path.read_text(encoding="utf-8")
    }
    assert asking == shared
