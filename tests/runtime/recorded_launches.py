"""What generated modules pass to the CUDA driver, noted by one that needs no GPU; in a process of its own.

    python -m tests.runtime.recorded_launches FOLDER

FOLDER holds `libcuda.so.1`, made from `recording_driver.c`. Triton compiles for capability 9, and everything
from the callable to the driver is what runs on a GPU. Each line of the output is a spec, and `ok` or what was
wrong.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.runtime.same_memory import Memory
from tests.tensors import results, shifted, spread

STREAM = 7
#: Specs of small tiles, beside the committed ones.
SMALL = Path(__file__).parent / "specs"
Record = bytes


class Recorder:
    """The driver; Triton's own calls of it go through `triton.backends.nvidia.driver`."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        vars(torch._C)["_cuda_getDevice"] = lambda: None  # tensors of the CPU are on no numbered device
        vars(torch._C)["_cuda_getCurrentRawStream"] = lambda index: STREAM
        import triton
        from triton.backends.nvidia.driver import CudaDriver

        active: Any = CudaDriver()
        active.get_current_device = lambda: 0
        active.get_device_capability = lambda device: (9, 0)
        active.get_current_stream = lambda device: STREAM
        triton.runtime.driver.set_active(active)

    @property
    def encoded(self) -> int:
        """Tensor maps encoded so far."""
        count: int = self._library.recording_encoded()
        return count

    def take(self) -> Record:
        """Every launch since the last call: function, grid, block, shared memory, stream, parameters."""
        into = ctypes.create_string_buffer(1 << 20)
        length = self._library.recording_take(into)
        return into.raw[:length]

    def learn(self, module: ModuleType) -> None:
        """Tells the driver the sizes of the parameters of all that has been compiled."""
        kernels = (value for value in vars(module).values() if hasattr(value, "device_caches"))
        for kernel in kernels:
            for binary in kernel.device_caches[0][0].values():
                if binary.function is not None:
                    sizes = list(parameter_sizes(binary.src.signature.values()))
                    array = (ctypes.c_int * len(sizes))(*sizes)
                    self._library.recording_expect(ctypes.c_ulonglong(binary.function), len(sizes), array)


def parameter_sizes(signature: Any) -> Iterator[int]:
    """Bytes of each parameter of a compiled kernel, and of the two that Triton adds."""
    for kind in signature:
        if kind.startswith("tensordesc"):
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            yield from (128, *[4] * rank, *[8] * rank)
        elif kind != "constexpr":
            yield 8 if kind[0] == "*" else {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "fp32": 4, "i64": 8}[kind]
    yield from (8, 8)


class Case:
    """One module, whose results always go to the same memory."""

    def __init__(self, recorder: Recorder, spec: str) -> None:
        from attnc.runtime.loader import load_module
        from tests.plans import module_of

        path = SMALL / f"{spec}.attn"
        self.planned = module_of(path if path.is_file() else spec)
        self.recorder, self.memory = recorder, Memory()
        self.module = self._without_gpu(load_module(self.planned))
        self.function: Callable[..., Any] = getattr(self.module, spec)

    def _without_gpu(self, module: Any) -> Any:
        class Launch(module.CALL.launch_type):  # type: ignore[misc]  # of its support package
            def on_device(self) -> Any:
                return nullcontext()

        module.CALL.launch_type, module.CALL.allocate = Launch, self.memory.allocate
        return module

    def call(self, *tensors: torch.Tensor, **options: Any) -> Any:
        self.memory.start()
        return self.function(*tensors, **options)

    def tensors(self, **sizes: int) -> list[torch.Tensor]:
        from attnc.runtime.trial import problem_for

        sizes = {"H": 2, "Hkv": 1, "G": 2, "B": 2, "M": 70, "N": 70} | sizes
        return list(problem_for(self.planned, 70, device="cpu", tokens=140, sizes=sizes))

    def ordinary(self, *tensors: torch.Tensor, **options: Any) -> Record:
        """By Triton's own launch, which is the first of a prepared call."""
        for _ in range(2):
            self.forget()
            self.recorder.take()
            self.call(*tensors, **options)
            self.recorder.learn(self.module)
        return self.recorder.take()

    def quick(self, *tensors: torch.Tensor, **options: Any) -> Record:
        """By the launch that was made ready, whatever else has been called before."""
        self.call(*tensors, **options)
        self.recorder.take()
        self.call(*tensors, **options)
        return self.recorder.take()

    def forget(self) -> None:
        self.module.CALL.forget()

    @property
    def prepared(self) -> dict[Any, Any]:
        found: dict[Any, Any] = self.module.CALL.prepared
        return found

    @property
    def launches(self) -> list[Any]:
        """Those of the prepared calls."""
        return [launches[0] for _, _, launches in self.prepared.values()]

    @property
    def is_quick(self) -> bool:
        return all(launch.starts for launch in self.launches)

    def variations(self) -> Iterator[tuple[str, list[torch.Tensor], dict[str, Any]]]:
        """(what changes, arguments, options): all that a preparation depends on, one after the other."""
        tensors = self.tensors()
        yield from self.changes(tensors)
        yield "config", tensors, {"config": self.module.CONFIGS[1]}
        made = results(self.call(*tensors))
        for name, change in (("dense", torch.clone), ("spread", spread), ("shifted", shifted)):
            given = (change(made[0]), *map(torch.clone, made[1:]))
            yield f"out {name}", tensors, {"out": given if len(given) > 1 else given[0]}
        if self.planned.kept:
            (kept,) = self.planned.kept
            q = tensors[0]
            lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1])
            yield "lse", tensors, {kept.tensor.name: lse}
            yield "lse shifted", tensors, {kept.tensor.name: shifted(lse)}

    def changes(self, tensors: list[Any]) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
        """Of the tensors."""
        yield "itself", tensors, {}
        yield "other addresses", [x if x is None else x.clone() for x in tensors], {}
        yield "a longer batch", self.tensors(B=3), {}
        if "M" in str(self.planned.args[0].tensor.shape):
            yield "fewer queries", self.tensors(M=33), {}
        yield "more keys", self.tensors(N=90), {}
        for i, x in enumerate(tensors):
            if x is not None and x.dim() > 2 and x.dtype == torch.bfloat16:
                yield f"strides of {i}", [*tensors[:i], spread(x), *tensors[i + 1 :]], {}
            if x is not None:
                yield f"alignment of {i}", [*tensors[:i], shifted(x), *tensors[i + 1 :]], {}


class Gradients(Case):
    """The backward of a module: what comes in are do, dlse (if lse is a result), the inputs, o and lse."""

    def __init__(self, recorder: Recorder, spec: str) -> None:
        super().__init__(recorder, spec)
        self.function = lambda *tensors, configs=None: self.module.CALL.gradients(*tensors, configs)

    def tensors(self, **sizes: int) -> list[Any]:
        inputs = super().tensors(**sizes)
        q = inputs[0]
        shape = q.shape[:2] if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
        rows = [torch.zeros(shape) for _ in range(2)]
        dlse = [] if self.planned.kept else rows[1:]
        return [torch.ones_like(q), *dlse, *inputs, torch.ones_like(q), rows[0]]

    @property
    def prepared(self) -> dict[Any, Any]:
        found: dict[Any, Any] = self.module.CALL.prepared_gradients
        return found

    @property
    def launches(self) -> list[Any]:
        return [launch for call in self.prepared.values() for launch in call.launches]

    def variations(self) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
        tensors = self.tensors()
        yield from self.changes(tensors)
        for kernel, configs in self.module.BACKWARD_CONFIGS.items():
            yield f"config of {kernel}", tensors, {"configs": {kernel: configs[-1]}}
        if not self.planned.kept:
            yield "without dlse", [tensors[0], None, *tensors[2:]], {}


def check(case: Case) -> Iterator[str]:
    """A line for each variation; the quick launches all go through one module that remembers them."""
    with torch.no_grad():
        expected = [
            (name, given, options, case.ordinary(*given, **options))
            for name, given, options in case.variations()
        ]
        case.forget()
        for _ in range(2):
            for name, given, options, record in expected:
                same = case.quick(*given, **options) == record and len(record) > 64
                if not same:
                    yield f"{name}: other parameters than Triton passes"
        tensors = case.tensors()
        case.forget()
        case.quick(*tensors)
        if not case.is_quick:
            yield "no launch was made ready"
        encoded = case.recorder.encoded
        case.quick(*tensors)
        if case.recorder.encoded != encoded:
            yield "tensor maps were encoded again"
        # all alive, hence at addresses of their own
        kept = [[x.clone() for x in tensors] for _ in range(100)]
        for clones in kept:
            case.call(*clones)
        if any(len(maps) > 64 for launch in case.launches for maps in getattr(launch, "maps", ())):
            yield "more than 64 tensor maps are kept"
        yield from without_quick_launches(case, tensors)


def without_quick_launches(case: Case, tensors: list[torch.Tensor]) -> Iterator[str]:
    """A Triton that nobody has looked at launches as it always does."""
    import triton

    version, expected = triton.__version__, case.ordinary(*tensors)
    triton.__version__ = "3.99.0"
    case.forget()
    if case.quick(*tensors) != expected:
        yield "other parameters without quick launches"
    if case.is_quick:
        yield "a launch was made ready for an unknown Triton"
    triton.__version__ = version
    case.forget()


def main(folder: Path, names: list[str]) -> int:
    """Exit status; a name is that of a spec, or `gradients:` and that."""
    recorder = Recorder(folder)
    wrong = 0
    for name in names:
        kind, _, spec = name.rpartition(":")
        found = list(check((Gradients if kind else Case)(recorder, spec)))
        wrong += len(found)
        sys.stdout.write(f"{name}: {'; '.join(found) or 'ok'}\n")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
