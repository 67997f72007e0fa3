"""Callables under torch.compile: one operator a call, on every target, with all that a caller chooses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attnc.runtime.loader import load_module
from attnc.runtime.trial import problem_for
from attnc.verify.interpreter import ensure_interpreter
from attnc.verify.runners import runner_of
from tests.plans import SPECS, module_of
from tests.targets import TARGETS, skip_without_compiler
from tests.tensors import results, same

SIZES = {"H": 2, "Hkv": 1, "G": 2}
LENGTH = 20
#: A sink and a window, dropout with scalars, an lse that the spec does not return.
TRAINED = ("local_sink", "dropout", "bias")
#: Decoding from rows, and from pages with a counter.
DECODED = ("decode", "unified_decode")

#: Of operators, one after the other.
_NUMBERS = count()

pytestmark = pytest.mark.slow


class Loaded:
    """A module with tensors for it; without a GPU, CUDA kernels run on the CPU as well."""

    def __init__(self, name: str, target: str) -> None:
        skip_without_compiler(target)
        ensure_interpreter()
        self.planned = module_of(name, target)
        self.attention = self.planned.variant.attention
        self.module: Any = load_module(self.planned)
        runner_of(target).attach(self.module)
        self.function: Callable[..., Any] = getattr(self.module, name)
        # A name of its own: torch keeps what the first module of the same kernels registered, and other tests
        # may have loaded one.
        self.module.CALL.operator = f"{name}_{next(_NUMBERS)}"
        torch.compiler.reset()

    def tensors(self, gradients: bool = False) -> list[torch.Tensor]:
        made = problem_for(self.planned, LENGTH, device="cpu", tokens=LENGTH, sizes=SIZES)
        names = [arg.tensor.name for arg in self.planned.args]
        return [
            x.clone().requires_grad_(gradients and name in self.attention.grads)
            for name, x in zip(names, made, strict=True)
        ]

    @property
    def compiled(self) -> Callable[..., Any]:
        return torch.compile(self.function, fullgraph=True, backend="aot_eager")

    def operator(self, suffix: str = "") -> Any:
        assert self.module.CALL.register_operators()
        return getattr(torch.ops.attnc, self.module.CALL.operator + suffix)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", [*TRAINED, *DECODED])
def test_the_operators_keep_the_promises_of_torch(name: str, target: str) -> None:
    made = Loaded(name, target)
    tensors = made.tensors(gradients=True)
    counter = [torch.zeros(1, dtype=torch.int32)] if name == "unified_decode" else []
    torch.library.opcheck(made.operator(), (*tensors, *counter, ""))
    with torch.no_grad():
        outputs = results(made.operator()(*tensors, *counter, ""))
        torch.library.opcheck(made.operator("_out"), (*tensors, *counter, *outputs, ""))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_those_of_an_eager_call(name: str, target: str) -> None:
    made = Loaded(name, target)
    found = []
    for function in (made.function, made.compiled):
        tensors = made.tensors(gradients=True)
        outputs = results(function(*tensors))
        torch.stack([o.float().square().sum() for o in outputs]).sum().backward()  # type: ignore[no-untyped-call]  # torch's
        found.append([*outputs, *(x.grad for x in tensors if x.grad is not None)])
    assert len(found[0]) > 3
    assert same(tuple(found[0]), tuple(found[1]))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["local_sink", *DECODED])
def test_what_a_caller_chooses_reaches_the_kernel(
    name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Loaded(name, target)
    seen: list[Any] = []
    call = made.module.CALL
    prepare = call._prepare

    def watched(inputs: Any, out: Any, config: Any, extras: Any) -> Any:
        seen.append(config)
        return prepare(inputs, out, config, extras)

    monkeypatch.setattr(call, "_prepare", watched)
    tensors, chosen = made.tensors(), made.module.CONFIGS[1]
    expected = made.function(*tensors, config=chosen)
    seen.clear()
    call.forget()
    assert same(made.compiled(*tensors, config=chosen), expected)
    assert seen == [chosen]


def test_a_config_of_the_backward_reaches_its_kernel(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Loaded("local_sink", target)
    kernel, configs = next(iter(made.module.BACKWARD_CONFIGS.items()))
    seen: list[Any] = []
    call = made.module.CALL
    prepare = call.prepare_gradients

    def watched(tensors: Any, given: Any) -> Any:
        seen.append(given)
        return prepare(tensors, given)

    monkeypatch.setattr(call, "prepare_gradients", watched)
    found = []
    for function in (made.function, made.compiled):
        tensors = made.tensors(gradients=True)
        call.forget()
        o = results(function(*tensors, backward_config={kernel: configs[-1]}))[0]
        o.float().sum().backward()  # type: ignore[no-untyped-call]  # torch's
        found.append(tuple(x.grad for x in tensors if x.grad is not None))
    assert seen == [{kernel: configs[-1]}] * 2
    assert same(*found)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["bias", *DECODED])
def test_results_go_where_the_caller_wants_them(name: str, target: str) -> None:
    made = Loaded(name, target)
    tensors = made.tensors()
    expected = made.function(*tensors)
    out = tuple(torch.full_like(x, torch.nan) for x in results(expected))
    found = made.compiled(*tensors, out=out if len(out) > 1 else out[0])
    assert same(found, expected)
    assert same(out, expected)
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(results(found), out, strict=True))
    with pytest.raises(ValueError, match="out o: expected shape"):
        made.compiled(*tensors, out=(out[0][:, :0], *out[1:]) if len(out) > 1 else out[0][:, :0])


def test_the_log_sum_exp_is_kept_for_whom_it_wants(target: str) -> None:
    made = Loaded("bias", target)
    tensors = made.tensors()
    q = tensors[0]
    found = [torch.zeros(q.shape[0], q.shape[2], q.shape[1]) for _ in range(3)]
    o = made.function(*tensors, lse=found[0])
    assert same(made.compiled(*tensors, lse=found[1]), o)
    assert same(made.compiled(*tensors, lse=found[2], out=torch.empty_like(o)), o)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for function in (made.function, made.compiled):
        with pytest.raises(Exception, match="lse: cannot be given where a gradient is wanted"):
            function(*made.tensors(gradients=True), lse=found[0])


def test_fallbacks_are_counted(target: str) -> None:
    made = Loaded("unified_decode", target)
    tensors = made.tensors()
    tensors[0] *= 1000  # scores leave the bounds
    counts = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
    expected = made.function(*tensors, fallbacks=counts[0])
    found = made.compiled(*tensors, fallbacks=counts[1])
    assert same(found, expected)
    assert counts[0] == counts[1] > 0


def test_numbers_are_checked_where_they_are_traced(target: str) -> None:
    made = Loaded("dropout", target)
    q, k, v, _, _ = made.tensors()
    expected = made.function(q, k, v, 0.25, 7)
    assert same(made.compiled(q, k, v, 0.25, 7), expected)
    with pytest.raises(Exception, match="p: expected a probability"):
        made.compiled(q, k, v, 1.5, 7)


def test_a_decode_kernel_refuses_gradients_where_it_is_traced(target: str) -> None:
    made = Loaded("decode", target)
    q, *others = made.tensors()
    with pytest.raises(Exception, match="decode has no backward"):
        made.compiled(q.detach().requires_grad_(True), *others)


def test_one_graph_serves_other_lengths(target: str) -> None:
    """With shapes marked as dynamic, nothing about a call depends on their values."""
    made = Loaded("decode", target)
    compiled = torch.compile(made.function, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (40, 70, 90):
        tensors = list(problem_for(made.planned, length, device="cpu", tokens=length, sizes=SIZES))
        assert same(compiled(*tensors), made.function(*tensors))


class Layer(torch.nn.Module):
    """A callable as a module, as torch.export wants it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["local_sink", "decode"])
def test_callables_are_exported(name: str, target: str) -> None:
    made = Loaded(name, target)
    tensors = tuple(made.tensors())
    exported: Any = torch.export.export(Layer(made.function), tensors)
    assert same(exported.module()(*tensors), made.function(*tensors))


def test_dispatchers_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function of a package picks the module while it is traced."""
    import importlib
    import sys

    ensure_interpreter()
    from attnc.build import compile_spec
    from attnc.output import OutputFile, write
    from attnc.target.support import support_files

    support = (OutputFile(path=path, text=text) for path, text in support_files().items())
    write((*compile_spec(SPECS / "decode.attn").outputs, *support), tmp_path / "traced_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    package: ModuleType = importlib.import_module("traced_package.decode.triton")
    tensors = Loaded("decode", "triton").tensors()
    traced: Any = torch.compile(package.decode, fullgraph=True, backend="aot_eager")
    assert same(traced(*tensors), package.decode(*tensors))
    for name in [name for name in sys.modules if name.startswith("traced_package")]:
        del sys.modules[name]
