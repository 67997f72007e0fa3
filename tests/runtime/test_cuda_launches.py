"""A prepared or repeated call of a CUDA module passes the driver what it passes when it is the first.

Without a GPU: tensors of the CPU count as those of device 0, and a driver notes what it is given.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.runtime.loader import load_file, load_module
from attnc.runtime.trial import problem_for
from attnc.support.devices import Gpu
from attnc.target.files import render_files
from tests.plan.hopper import planned
from tests.plans import module_of
from tests.runtime.same_memory import Memory
from tests.tensors import results, shifted, spread

STREAM = 7
#: An optional output, packed sequences, a second kernel and its scratch, pages, a counter, numbers.
NAMES = ("causal_gqa", "bias", "varlen", "decode", "paged_decode", "unified_decode", "dropout", "fa1")
#: One kernel that adds dq up, two of their own, gradients of inputs besides, packed sequences.
TRAINED = ("causal_gqa", "bias", "local_sink", "varlen")
#: Tensor maps with a counter of tiles and without, packed sequences, pages.
HOPPER = ("causal_gqa", "varlen", "decode", "paged_decode")
#: (kernel, how it was compiled, blocks, threads, shared memory, stream, packed arguments)
Launch = tuple[object, ...]


class Driver:
    """In place of CuPy and of what torch knows of devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[Launch] = []
        self.contexts: list[int] = []
        self.context, self.device = 1, 0
        self._functions: list[object] = []
        self.size = 0
        driver = SimpleNamespace(launchKernel=self.launch, ctxGetCurrent=lambda: self.context)
        cuda = SimpleNamespace(driver=driver, runtime=SimpleNamespace(setDevice=self.contexts.append))
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, RawModule=None))
        monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
        monkeypatch.setattr(torch.cuda, "device", self.on)

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        yield
        self.device = before

    def function(self, name: str, config: Any, aligned: bool, device: int, arch: str) -> Any:
        """A handle of what would be compiled."""
        assert self.device == device
        made = (name, config, aligned)
        if made not in self._functions:
            self._functions.append(made)
        return SimpleNamespace(ptr=self._functions.index(made))

    def launch(self, pointer: int, *given: int) -> None:
        """cuLaunchKernel."""
        *grid, stream, parameters, extra = given
        arguments = ctypes.c_void_p.from_address(parameters).value
        assert arguments is not None
        assert extra == 0
        packed = ctypes.string_at(arguments, self.size)
        self.launches.append((self._functions[pointer], tuple(grid), stream, self.device, packed))

    def take(self) -> list[Launch]:
        taken, self.launches = self.launches, []
        return taken


class Case:
    """A module whose calls, or the gradients of these, are watched."""

    def __init__(
        self, name: str, target: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, gradients: bool
    ) -> None:
        self.planned = module_of(name, target)
        self.driver, self.memory = Driver(monkeypatch), Memory()
        files = render_files(self.planned, path=f"{name}.attn", sha256="")
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        self.module: Any = load_file(folder / next(iter(files)))
        call = self.module.CALL
        gpu = Gpu(0, "any", (9, 0), 232448, 233472, 132, 50 << 20, 1 << 37)
        monkeypatch.setattr(call, "gpu_of", lambda index: gpu)
        monkeypatch.setattr(call, "allocate", self.memory.allocate)
        monkeypatch.setattr(call.program, "function", self.driver.function)
        self.gradients = gradients
        (launch,) = call.backward.launches if gradients else call.launches
        strides, sizes = len(launch.stride_names), len(launch.numbers.split())
        self.driver.size = 8 * (len(launch.addresses.split()) + strides) + 4 * (sizes + sizes % 2)
        if hasattr(launch, "maps"):  # the class is of the module's own support package
            size = 128 * len(launch.maps) + 8 * (launch.counts + len(launch.addresses.split()) + strides)
            self.driver.size = size + 4 * sizes + -(size + 4 * sizes) % 64
            self.on_hopper(call, monkeypatch)
        self.function = getattr(self.module, name)
        if gradients:
            self.function = lambda *tensors, configs=None: call.gradients(*tensors, configs)
        self.prepared: dict[Any, Any] = call.prepared_gradients if gradients else call.prepared
        self.forget = call.forget

    def on_hopper(self, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Maps that say what they are of, one counter, and copies in the same place every time."""
        counter, copies = torch.zeros(2, dtype=torch.int32), dict[Any, torch.Tensor]()

        def copied(x: torch.Tensor) -> torch.Tensor:
            key = (x.data_ptr(), x.shape, x.stride())
            return copies.setdefault(key, x.clone(memory_format=torch.contiguous_format))

        def tensor_map(*layout: Any) -> bytes:
            return hashlib.sha512(repr(layout).encode()).digest() * 2

        def launcher(function: int, blocks: int, threads: int, shared: int) -> Any:
            return functools.partial(self.driver.launch, function, blocks, 1, 1, threads, 1, 1, shared)

        for name, fake in (
            ("counter", lambda index: counter),
            ("copied", copied),
            ("tensor_map", tensor_map),
        ):
            monkeypatch.setattr(call, name, fake)
        monkeypatch.setattr(sys.modules[type(call).__module__], "launcher_behind", launcher)

    def call(self, *tensors: Any, **options: Any) -> list[Launch]:
        self.memory.start()
        with torch.no_grad():
            self.function(*tensors, **options)
        return self.driver.take()

    def first(self, *tensors: Any, **options: Any) -> list[Launch]:
        self.forget()
        return self.call(*tensors, **options)

    def tensors(self, **sizes: int) -> list[Any]:
        sizes = {"H": 4, "Hkv": 2, "G": 2, "B": 2, "M": 70, "N": 70} | sizes
        inputs = list(problem_for(self.planned, 70, device="cpu", tokens=140, sizes=sizes))
        if not self.gradients:
            return inputs
        q = inputs[0]
        shape = q.shape[:2] if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
        dlse = [] if self.planned.kept else [torch.zeros(shape)]
        return [torch.ones_like(q), *dlse, *inputs, torch.ones_like(q), torch.zeros(shape)]

    def variations(self) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
        """(what changes, arguments, options): all that a preparation depends on, one after the other."""
        tensors = self.tensors()
        yield "nothing", tensors, {}
        yield "addresses", [x.clone() for x in tensors], {}
        yield "batch", self.tensors(B=3), {}
        yield "keys", self.tensors(N=90), {}
        for i, x in enumerate(tensors):
            if x.dim() > 2 and x.dtype == torch.bfloat16:
                yield f"strides of {i}", [*tensors[:i], spread(x), *tensors[i + 1 :]], {}
            if x.dim():
                yield f"alignment of {i}", [*tensors[:i], shifted(x), *tensors[i + 1 :]], {}
        yield from self.trained(tensors) if self.gradients else self.called(tensors)

    def trained(self, tensors: list[Any]) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
        for kernel, configs in self.module.BACKWARD_CONFIGS.items():
            yield f"config of {kernel}", tensors, {"configs": {kernel: configs[-1]}}
        if not self.planned.kept:
            yield "no dlse", [tensors[0], None, *tensors[2:]], {}

    def called(self, tensors: list[Any]) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
        for config in self.module.CONFIGS[1:3]:
            yield f"config {config}", tensors, {"config": config}
        with torch.no_grad():
            made = results(self.function(*tensors))
        for name, change in (("dense", torch.clone), ("spread", spread), ("shifted", shifted)):
            given = (change(made[0]), *map(torch.clone, made[1:]))
            yield f"out {name}", tensors, {"out": given if len(given) > 1 else given[0]}
        q = tensors[0]
        for arg in self.planned.kept:
            lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1])
            yield arg.tensor.name, tensors, {arg.tensor.name: lse}
            yield f"{arg.tensor.name} transposed", tensors, {arg.tensor.name: lse.mT.contiguous().mT}


CASES = [(name, "cuda.sm_80", False) for name in NAMES] + [(name, "cuda.sm_80", True) for name in TRAINED]
CASES += [(name, "cuda.sm_90a", False) for name in HOPPER]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}{'-gradients' if case[2] else ''}")
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    name, target, gradients = request.param
    return Case(name, target, tmp_path, monkeypatch, gradients=gradients)


def test_prepared_calls_pass_what_first_calls_pass(case: Case) -> None:
    """Byte by byte, whatever has been called in between."""
    variations = list(case.variations())
    case.driver.take()
    expected = [case.first(*given, **options) for _, given, options in variations]
    assert all(expected)
    case.forget()
    for _ in range(2):
        for (what, given, options), launches in zip(variations, expected, strict=True):
            assert case.call(*given, **options) == launches, what
    for (what, _, options), launches in zip(variations[1:], expected[1:], strict=True):
        chosen: list[Any] = [function for function, *_ in expected[0]]
        is_chosen = any(options.get("config") in function for function in chosen)
        assert is_chosen == (launches == expected[0]), what


def test_a_call_that_repeats_itself_passes_what_it_passed_first(case: Case) -> None:
    """Whatever comes after it, which is not taken for the same call."""
    variations = list(case.variations())
    case.driver.take()
    (_, base, _), *others = variations
    first, *expected = (case.first(*given, **options) for _, given, options in variations)
    case.forget()
    for (what, given, options), launches in zip(others, expected, strict=True):
        for tensors, options_, same in ((base, {}, first), (given, options, launches)):
            for _ in range(7):
                assert case.call(*tensors, **options_) == same, what


def test_a_prepared_call_is_made_once(case: Case) -> None:
    tensors = case.tensors()
    for _ in range(3):
        case.call(*tensors)
        case.call(*(x.clone() for x in tensors))
    assert len(case.prepared) == 1


def test_all_kernels_of_a_call_take_the_same_arguments(case: Case) -> None:
    launches = case.first(*case.tensors())
    assert len({packed for *_, packed in launches}) == 1
    assert {stream for _, _, stream, _, _ in launches} == {STREAM}


def test_launches_go_to_the_device_of_the_tensors(case: Case) -> None:
    tensors = case.tensors()
    expected = case.first(*tensors)
    case.driver.device = 1
    assert case.call(*tensors) == expected
    assert case.driver.device == 1


def test_a_thread_without_a_context_gets_one(case: Case) -> None:
    tensors = case.tensors()
    case.call(*tensors)
    assert case.driver.contexts == []
    case.driver.context = 0
    assert case.call(*tensors)
    assert case.driver.contexts == [0]


def test_workspaces_of_a_backward_are_one_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at its own bytes; gradients have memory of their own."""
    case = Case("causal_gqa", "cuda.sm_80", tmp_path, monkeypatch, gradients=True)
    tensors, layouts = case.tensors(), []
    allocate = case.module.CALL.allocate

    def noting(found: Any, like: torch.Tensor) -> Any:
        nonlocal layouts
        layouts += found
        return allocate(found, like)

    monkeypatch.setattr(case.module.CALL, "allocate", noting)
    joined = case.first(*tensors)
    made, layouts = layouts, []
    monkeypatch.setattr(type(case.module.CALL), "joins_workspaces", False)
    apart = case.first(*tensors)
    assert len(made) < len(layouts)
    sizes = [sum(math.prod(shape) for shape, *_ in found) for found in (layouts, made)]
    assert sizes[0] <= sizes[1] <= sizes[0] + 64 * len(layouts)
    assert [launch[:4] for launch in joined] == [launch[:4] for launch in apart]
    count = len(case.module.CALL.backward.launches[0].addresses.split())
    packed: Any = [launches[0][4] for launches in (joined, apart)]
    starts = [struct.unpack_from(f"={count}Q", x) for x in packed]
    assert len(set(starts[0])) == len(set(starts[1]))


@pytest.mark.parametrize(("rows", "keys", "first"), [(64, 64, 3), (128, 128, 3), (512, 512, 2), (1, 4096, 0)])
def test_a_call_takes_the_config_that_suits_its_sizes(
    rows: int, keys: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load_module(planned("blocks in {1, 2}", d=64))
    call, gpu = module.CALL, Gpu(0, "any", (9, 0), 232448, 233472, 132, 50 << 20, 1 << 37)
    sizes = {"B": 64, "H": 12, "M": rows, "N": keys}
    assert call._order_configs(sizes, gpu)[0] == module.CONFIGS[first]
    monkeypatch.setattr(call, "costs", ())
    assert call._order_configs(sizes, gpu) == module.CONFIGS


@contextmanager
def called_functions() -> Iterator[list[str]]:
    """Lists functions of the support package that are called. List comprehensions are some in old Pythons."""
    called: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        is_ours = Path(code.co_filename).parent.name in ("support", "_support")
        if event == "call" and is_ours and code.co_name != "<listcomp>":
            called.append(code.co_name)

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        (False, ["run", "call", "again", "run", "start"]),
        (True, ["gradients", "launch_gradients", "call", "_launch_prepared", "run", "start"]),
    ],
)
def test_a_call_that_repeats_itself_calls_few_functions(
    gradients: bool, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked by a guard, allocated and launched: nothing is asked of a tensor but its address."""
    case = Case("causal_gqa", "cuda.sm_80", tmp_path, monkeypatch, gradients=gradients)
    tensors = case.tensors()
    for _ in range(8):
        case.call(*tensors)
    case.memory.start()
    with torch.no_grad(), called_functions() as called:
        case.function(*tensors)
    assert called == expected
