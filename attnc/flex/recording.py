"""What mods do, recorded where torch.compile can follow.

A mod is called with tensors without data (on the "meta" device), and a mode sees every function of torch
that it calls with them. Nothing is decided then: each operation is a step (its name and references to its
arguments), so that the mod can be done again later, on symbols of `trace` and the tensors that the graph has
by then. Tensors and numbers are lists beside the steps, which become inputs of the graph; steps hold
constants alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from attnc.flex.errors import refused_branch, refused_number
from attnc.flex.shown import show_hidden

#: (kind, what): "symbol" and "step" by position, "tensor", "float" and "integer" by position in their lists,
#: "constant", and "several" of references.
Reference: TypeAlias = tuple[str, Any]
Step: TypeAlias = tuple[str, tuple[Reference, ...], tuple[tuple[str, Reference], ...]]
#: The steps of a mod, and what it returns.
Steps: TypeAlias = tuple[tuple[Step, ...], Reference]


#: Functions of torch that ask for the number that a tensor is.
_ASKED = (
    "__bool__", "__int__", "__float__", "__index__", "__complex__", "__len__", "__iter__", "item", "tolist",
)  # fmt: skip


class Recorder:
    """The tensors and numbers of the mods of one call, whose tensors are on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[torch.Tensor] = []
        self.floats: list[float] = []
        self.integers: list[int] = []

    def record(self, mod: Callable[..., Any], dtypes: tuple[torch.dtype, ...]) -> Steps:
        mode = _StepRecording(self, [torch.empty((), dtype=dtype, device="meta") for dtype in dtypes])
        show_hidden(True)
        try:
            with mode:
                returned = mod(*mode.values)
        finally:
            show_hidden(False)
        result = mode.refer(returned)
        return tuple(mode.steps), result

    def number(self, value: int) -> int:
        self.integers.append(value)
        return len(self.integers) - 1


class _StepRecording(TorchFunctionMode):
    """Notes what is done with values that are not there yet: the parameters of a mod, and results of steps.

    values, references: of these tensors, in parallel.
    """

    def __init__(self, recorder: Recorder, parameters: list[torch.Tensor]) -> None:
        super().__init__()
        self.recorder = recorder
        self.steps: list[Step] = []
        self.values = parameters
        self.references: list[Reference] = [("symbol", at) for at in range(len(parameters))]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result: Any
        if function.__name__ in _ASKED and self._has_value(args):
            _refuse(function.__name__)
        if not self._has_value((args, tuple(kwargs.values()))):
            return function(
                *self._on_device_of_caller(args),
                **{name: self._on_device_of_caller(kwargs[name]) for name in kwargs},
            )
        name = function.__name__
        if name in ("__getitem__", "getitem"):  # the latter is Python's, as strict export has operators
            name = "__getitem__"
            tensor, index = self._narrow(args[0], args[1])
            args = (tensor, index)
            result = torch.empty(tensor.shape[len(index) :], dtype=tensor.dtype, device="meta")
        else:
            result = function(*self._nowhere(args), **{key: self._nowhere(kwargs[key]) for key in kwargs})
        if not isinstance(result, torch.Tensor):
            return result
        named = tuple((key, self.refer(kwargs[key])) for key in kwargs)
        self.steps.append((name, tuple(self.refer(x) for x in args), named))
        if self._position_of(result) is not None:  # what returns its argument
            result = result.view(result.shape)
        self.values.append(result)
        self.references.append(("step", len(self.steps) - 1))
        return result

    def refer(self, value: Any) -> Reference:
        recorder = self.recorder
        if isinstance(value, torch.Tensor):
            at = self._position_of(value)
            return self.references[at] if at is not None else ("tensor", self._find_captured(value))
        if isinstance(value, tuple | list):
            return ("several", tuple(self.refer(part) for part in value))
        if isinstance(value, bool):
            return ("constant", value)
        if isinstance(value, float):
            recorder.floats.append(value)
            return ("float", len(recorder.floats) - 1)
        if isinstance(value, int):
            recorder.integers.append(value)
            return ("integer", len(recorder.integers) - 1)
        if getattr(value, "ndim", None) == 0:  # a number of NumPy's, which is a tensor while torch compiles
            return ("tensor", self._find_captured(torch.as_tensor(value, device=recorder.device)))
        return ("constant", value)

    def _position_of(self, value: Any) -> int | None:
        return _position(self.values, value)

    def _find_captured(self, tensor: torch.Tensor) -> int:
        if tensor.device.type == "meta":
            raise RuntimeError(
                "flex_attention: torch.compile hides what a mod does with a value; write torch.abs(x) for"
                " abs(x), and functions of torch for others of Python"
            )
        captured = self.recorder.tensors
        at = _position(captured, tensor)
        if at is None:
            captured.append(tensor)
            return len(captured) - 1
        return at

    def _has_value(self, values: Any) -> bool:
        for value in values:
            if isinstance(value, torch.Tensor):
                if self._position_of(value) is not None:
                    return True
            elif isinstance(value, tuple | list) and self._has_value(value):
                return True
        return False

    def _nowhere(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = value.device.type == "meta"
            return value if known else torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, tuple | list):
            return [self._nowhere(part) for part in value]
        return value

    def _on_device_of_caller(self, value: Any) -> Any:
        """Returns an argument with the device of the caller's tensors in place of that of the values, which
        mods ask for.
        """
        if isinstance(value, torch.device) and value.type == "meta":
            return self.recorder.device
        if isinstance(value, tuple | list):
            return type(value)([self._on_device_of_caller(part) for part in value])
        return value

    def _narrow(self, tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """Returns a subscript whose numbers are applied in the graph, which knows the derivative of that."""
        parts = index if isinstance(index, tuple) else (index,)
        if self._position_of(tensor) is not None:
            return tensor, parts
        kept: list[Any] = []
        for part in parts:
            if isinstance(part, int) and not isinstance(part, bool):
                tensor = tensor.select(len(kept), part)
            else:
                kept.append(part)
        return tensor, tuple(kept)


def _refuse(asked: str) -> NoReturn:
    raise refused_branch() if asked == "__bool__" else refused_number()


# What torch.compiler.disable does, without importing the compiler: it gives up following the mod there, which
# then runs as it is, so that its frames say where it asks.
_refuse._torchdynamo_disable = True  # type: ignore[attr-defined]  # functions take attributes


def _position(tensors: list[torch.Tensor], wanted: Any) -> int | None:
    for at, known in enumerate(tensors):
        if known is wanted:
            return at
    return None
