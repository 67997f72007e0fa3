"""`from generated.NAME import NAME`: the target that it calls, by device, variant and sizes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from attnc.build import compile_program, support_outputs
from attnc.model.resolve import resolve
from attnc.output import write
from attnc.source import Source
from attnc.support import by_target
from attnc.support.by_target import ByTarget
from attnc.support.devices import Gpu
from attnc.syntax.parser import parse, prelude
from attnc.target.dispatch import needs_of
from attnc.tuned.tables import ANY_TARGET, TARGET_SIZES, ChoiceTable, TableRow, dump_tables
from attnc.verify.interpreter import ensure_interpreter

TEXT = """
attention small {
  param D in {32, 64}
  input q: f32[B, M, H, D]
  input k, v: f32[B, N, H, D]
  input target: f32[H]
  score = dot(q, k) * target[h]
  normalize = softmax
  output o: f32[B, M, H, D]
  grad q, k
}

schedule small for triton {
  tile.q = 16, tile.kv = 16
}

schedule small for cuda.sm_80 {
  tile.q = 32, tile.kv = 32, warps = 2
}
"""
H200 = Gpu(0, "NVIDIA H200", (9, 0), 1, 1, 132, 1, 1 << 37)
A100 = Gpu(0, "NVIDIA A100", (8, 0), 1, 1, 108, 1, 1 << 37)
ROWS = (
    TableRow(limits=(None, 1024, None, 0), choice={"target": "cuda.sm_80"}, microseconds=1.0),
    TableRow(limits=(None, None, None, 0), choice={"target": "triton"}, microseconds=2.0),
    TableRow(limits=(None, None, None, None), choice={"target": "cuda.sm_80"}, microseconds=3.0),
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The generated package, imported as a user does, with a table for one of the variants."""
    ensure_interpreter()
    folder = tmp_path_factory.mktemp("project")
    table = ChoiceTable(
        name="small",
        target=ANY_TARGET,
        variant="d64",
        device=H200.name,
        toolchain="triton 3.6.0",
        sizes=TARGET_SIZES,
        rows=ROWS,
    )
    dispatch = Source("small.dispatch.json", dump_tables([table]))
    compiled = compile_program(
        resolve(parse(Source("small.attn", TEXT)), prelude()), "small.attn", None, dispatch
    )
    write((*compiled.outputs, *support_outputs()), folder / "one_import")
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("one_import.small")
    finally:
        sys.path.remove(str(folder))


def inputs(D: int = 32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return (*torch.randn(3, 1, 20, 2, D), torch.ones(2))


def test_the_cpu_interprets_triton(package: Any) -> None:
    q, k, v, scale = inputs()
    o = package.small(q, k, v, scale)
    expected = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k), -1)
    torch.testing.assert_close(o, torch.einsum("bhqk,bkhd->bqhd", expected, v), atol=1e-4, rtol=1e-4)
    assert "one_import.small.cuda_sm_80" not in sys.modules


def test_a_target_can_be_named(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`target` is an input of this spec, so the keyword is called otherwise."""
    monkeypatch.setattr(package.CHOICE, "function", lambda target: lambda *_, **given: (target, given))
    given = {"out": None, "lse": None, "config": 1}
    assert package.small(*inputs(), target_="cuda.sm_80", config=1) == ("cuda.sm_80", given)
    with pytest.raises(ValueError, match=r"target: expected one of \['triton', 'cuda.sm_80'\], got 'fast'"):
        package.small(*inputs(), target_="fast")


def test_what_is_no_tensor_or_no_variant_is_named(package: Any) -> None:
    _, k, v, scale = inputs()
    with pytest.raises((TypeError, ValueError), match=r"^q: "):
        package.small(None, k, v, scale)
    with pytest.raises(ValueError, match="small was not compiled for D = 16; there is: D = 32; D = 64"):
        package.small(*inputs(16))


class Fakes:
    """Stands for the families of an attention: what is called says which target it is."""

    def __init__(self, package: ModuleType, gpu: Gpu, packages: set[str]) -> None:
        self.gpu, self.packages, self.package = gpu, packages, package
        self.choice: ByTarget = package.CHOICE

    def picked(self, D: int, *sizes: int) -> str:
        device, key = torch.device("cuda", 0), (D,)
        found: Any = self.choice.only(device, key)
        return str(found if found is not None else self.choice.fastest(device, key, sizes))


@pytest.fixture
def fake(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fakes]]:
    def make(gpu: Gpu, packages: set[str]) -> Fakes:
        fakes = Fakes(package, gpu, packages)
        monkeypatch.setattr(by_target, "gpu_of", lambda index: gpu)
        support: Any = importlib.import_module("one_import._support.by_target")
        support.runs.cache_clear()
        monkeypatch.setattr(support, "gpu_of", lambda index: gpu)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in packages else None)
        monkeypatch.setattr(fakes.choice, "function", lambda target: target)
        fakes.choice._only.clear()
        return fakes

    yield make
    package.CHOICE._only.clear()
    importlib.import_module("one_import._support.by_target").runs.cache_clear()


def test_a_measured_table_decides_by_sizes_and_gradients(fake: Callable[..., Fakes]) -> None:
    here = fake(H200, {"triton", "cupy"})
    assert here.picked(64, 10, 1024, 32, 0) == "cuda.sm_80"
    assert here.picked(64, 10, 1025, 32, 0) == "triton"
    assert here.picked(64, 10, 1025, 32, 1) == "cuda.sm_80"


def test_sizes_are_looked_at_only_where_they_decide(fake: Callable[..., Fakes]) -> None:
    choice, device = fake(H200, {"triton", "cupy"}).choice, torch.device("cuda", 0)
    assert choice.only(device, (64,)) is None
    only: Any = choice.only(device, (32,))
    assert only == "triton"


def test_where_nobody_measured_the_first_target_that_runs_is_taken(fake: Callable[..., Fakes]) -> None:
    assert fake(H200, {"triton", "cupy"}).picked(32, 10, 10, 32, 0) == "triton"
    assert fake(A100, {"triton", "cupy"}).picked(64, 10, 10, 32, 0) == "triton"
    assert fake(A100, {"cupy"}).picked(64, 10, 10, 32, 0) == "cuda.sm_80"


def test_a_measured_target_that_does_not_run_is_passed_over(fake: Callable[..., Fakes]) -> None:
    assert fake(H200, {"triton"}).picked(64, 10, 10, 32, 0) == "triton"


@pytest.mark.parametrize(
    ("target", "capability", "does"),
    [
        ("cuda.sm_90a", (9, 0), True),
        ("cuda.sm_90a", (10, 0), False),
        ("cuda.sm_90a", (8, 0), False),
        ("cuda.sm_80", (9, 0), True),
        ("cuda.sm_80", (7, 5), False),
        ("triton", (12, 0), True),
    ],
)
def test_which_targets_run(
    target: str, capability: tuple[int, int], does: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_target, "gpu_of", lambda index: H200._replace(capability=capability))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert by_target.runs.__wrapped__(by_target.Needs(*needs_of(target)), 0) is does


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", [None, "triton"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compiles_the_first_call_whole(package: Any, target: str | None, *, dynamic: bool) -> None:
    """Nothing has been imported or decided by a call before."""
    for found in (package.CHOICE._only, package.CHOICE._functions):
        found.clear()
    given = inputs(64)
    options = {} if target is None else {"target_": target}
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *x: package.small(*x, **options) * 2, fullgraph=True, backend="eager", dynamic=dynamic
    )
    assert torch.equal(compiled(*given), 2 * package.small(*given))
