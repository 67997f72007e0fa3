"""`flex_attention` under torch.compile: one operator of torch's, whatever the mods.

`attend` is traced into the caller's graph. What the mods do goes into the operator as a text, the tensors and
numbers that they read as inputs, so that gradients reach them and nothing is traced again when lengths or
data change. At every call the operator does what `flex_attention` does outside of a graph: it
reads the mods, looks at captured integers, and finds the kernel.

To be recorded, a mod is called with tensors without data (on the "meta" device), and a mode sees every
function of torch that it calls with them. Nothing is decided then: each operation is a step (its name and
references to its arguments), so that the mod can be done again later, on symbols of `trace` and the tensors
that the graph has by then. Tensors and numbers are lists beside the steps, which become inputs of the graph;
steps hold constants alone.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from attnc.flex.errors import refused
from attnc.flex.programs import Kernel, kernel_of, read_options, targets_of
from attnc.flex.spec import DTYPES, Layout
from attnc.flex.symbols import OPERATIONS, apply, tape_of
from attnc.flex.tape import element_of
from attnc.flex.trace import MaskMod, ScoreMod, Trace, trace

# --- steps: what a mod does, noted where torch.compile can follow -------------------------------------------


#: (kind, what): "symbol" and "step" by position, "tensor", "float" and "integer" by position in their lists,
#: "constant", and "several" of references.
Reference: TypeAlias = tuple[str, Any]
Step: TypeAlias = tuple[str, tuple[Reference, ...], tuple[tuple[str, Reference], ...]]
#: The steps of a mod, and what it returns.
Steps: TypeAlias = tuple[tuple[Step, ...], Reference]


class Recorder:
    """The tensors and numbers of the mods of one call, whose tensors are on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[torch.Tensor] = []
        self.floats: list[float] = []
        self.integers: list[int] = []

    def record(self, mod: Callable[..., Any], dtypes: tuple[torch.dtype, ...]) -> Steps:
        """Returns the steps of a mod of values of these types."""
        mode = _Recording(self, [torch.empty((), dtype=dtype, device="meta") for dtype in dtypes])
        with mode:
            returned = mod(*mode.values)
        result = mode.refer(returned)
        return tuple(mode.steps), result


class _Recording(TorchFunctionMode):
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
        if not self._has_value((args, tuple(kwargs.values()))):
            return function(
                *self._on_device_of_caller(args),
                **{name: self._on_device_of_caller(kwargs[name]) for name in kwargs},
            )
        name = function.__name__
        if name in ("__getitem__", "getitem"):  # the latter is Python's, as strict export has operators
            name = "__getitem__"
            tensor, index = self._narrowed(args[0], args[1])
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
            return self.references[at] if at is not None else ("tensor", self._captured(value))
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
        return ("constant", value)

    def _position_of(self, value: Any) -> int | None:
        """Returns the position of a value, None for tensors of the caller's."""
        return _position(self.values, value)

    def _captured(self, tensor: torch.Tensor) -> int:
        """Returns the position of a tensor of the caller's. RuntimeError for a value of an unseen step."""
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
        """Returns an argument with the caller's tensors on the device of the values."""
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

    def _narrowed(self, tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
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


def _position(tensors: list[torch.Tensor], wanted: Any) -> int | None:
    """Returns the position of this very tensor, or None."""
    for at, known in enumerate(tensors):
        if known is wanted:
            return at
    return None


# --- steps as a text, and as mods again ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Program:
    """A call of `flex_attention` but for its tensors and numbers.

    score, mask: the steps of the mods; scaled: whether the first float is the scale
    order: which axis of o is outer, "rows" or "heads"; lse, wanted, target: of `spec.Layout`
    """

    score: Steps | None
    mask: Steps | None
    scaled: bool
    order: str
    lse: bool
    wanted: tuple[tuple[str, int], ...]
    target: str


def written(*fields: Any) -> str:
    """Returns the fields of a program as a text, which graphs can hold and other processes can read."""
    return repr(_plain(fields))


# What torch.compiler.assume_constant_result does, without importing the compiler: tracing calls it for real.
written._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


@functools.cache
def read(program: str) -> Program:
    """Returns the program of a text."""
    return Program(*_valued(ast.literal_eval(program)))


def mod_of(
    steps: Steps | None, tensors: Sequence[torch.Tensor], floats: Sequence[float], integers: Sequence[int]
) -> Callable[..., Any] | None:
    """Returns the mod that does these steps."""
    if steps is None:
        return None
    todo, returned = steps
    lists = {"tensor": tensors, "float": floats, "integer": integers}

    def mod(*symbols: Any) -> Any:
        results: list[Any] = []

        def value(reference: Reference) -> Any:
            kind, what = reference
            if kind == "constant":
                return what
            if kind == "several":
                return tuple(value(part) for part in what)
            if kind == "symbol":
                return symbols[what]
            return results[what] if kind == "step" else lists[kind][what]

        for name, args, kwargs in todo:
            results.append(_done(name, [value(x) for x in args], {key: value(x) for key, x in kwargs}))
        return value(returned)

    return mod


def _done(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a step."""
    if name == "__getitem__":
        return args[0][args[1]]
    tape = tape_of((*args, *kwargs.values()))
    if tape is None:  # such as the filling of a tensor, which needs no symbol
        function = getattr(torch, name, None) or getattr(torch.nn.functional, name, None)
        return getattr(args[0], name)(*args[1:], **kwargs) if function is None else function(*args, **kwargs)
    name = _SPELLED.get(name, name)
    of_python = getattr(operator, name, None)
    if of_python is not None and name not in OPERATIONS:
        return of_python(*args)
    if name.startswith("__"):  # an operator the other way round
        return getattr(args[0], name)(*args[1:])
    return apply(tape, name, tuple(args), kwargs)


#: Names that torch has and Python has no more.
_SPELLED = {"__div__": "__truediv__", "__rdiv__": "__rtruediv__", "__idiv__": "__truediv__"}


def _plain(value: Any) -> Any:
    """Returns an argument with a spelling in place of what has no literal."""
    if isinstance(value, tuple | list):
        return tuple(_plain(part) for part in value)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, slice):
        return {"slice": ""}
    if value is Ellipsis:
        return {"ellipsis": ""}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise refused("E0903", f"a {type(value).__name__} in a mod", "expected a number or a tensor")


def _valued(value: Any) -> Any:
    match value:
        case tuple():
            return tuple(_valued(part) for part in value)
        case {"dtype": str(name)}:
            return getattr(torch, name)
        case {"device": str(name)}:
            return torch.device(name)
        case {"slice": _}:
            return slice(None)
        case {"ellipsis": _}:
            return Ellipsis
    return value


# --- the operator -------------------------------------------------------------------------------------------


Tensors = Sequence[torch.Tensor]

#: Of b, h, q_idx and kv_idx.
_POSITIONS = (torch.int32,) * 4


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    scale: float | None,
    lse: bool,
    rows_first: bool,
    kernel_options: Mapping[str, Any] | None,
    target: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (o, lse or None) of checked arguments, as `flex_attention` has them."""
    recorder = Recorder(query.device)
    if scale is not None:
        recorder.floats.append(float(scale))
    score = None if score_mod is None else recorder.record(score_mod, (torch.float32, *_POSITIONS))
    mask = None if mask_mod is None else recorder.record(mask_mod, _POSITIONS)
    options = read_options(kernel_options)
    order = "rows" if rows_first else "heads"  # with lengths that vary, the condition itself is a symbol
    program = written(score, mask, scale is not None, order, lse, options, target or "")
    tensors = [query, key, value, *recorder.tensors]
    grads = [at for at, x in enumerate(tensors) if x.requires_grad] if torch.is_grad_enabled() else []
    o, log_sum = torch.ops.attnc.flex_attention(
        query, key, value, recorder.tensors, recorder.floats, recorder.integers, program, grads
    )
    return o, log_sum if lse else None


@torch.library.custom_op("attnc::flex_attention", mutates_args=())
def _operate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Sequence[torch.Tensor],
    floats: Sequence[float],
    integers: Sequence[int],
    program: str,
    grads: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (o, lse); lse has no elements where neither the caller nor a gradient needs it.

    grads: which of query, key, value and captured, by position, get a gradient.
    """
    said = read(program)
    traced, kernel = _find_kernel(query, key, value, captured, floats, integers, said, grads)
    with torch.no_grad():
        found = kernel.function(query, key, value, *kernel.arguments(traced))
    o, lse = found if said.lse or grads else (found, query.new_empty(0, dtype=torch.float32))
    return (o.transpose(1, 2) if said.order == "rows" else o), lse


@_operate.register_fake
def _operate_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Sequence[torch.Tensor],
    floats: Sequence[float],
    integers: Sequence[int],
    program: str,
    grads: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of the results. FlexError for what no spec can say."""
    said = read(program)
    known = [value if type(value) is int else 1 for value in integers]  # for a torch.SymInt any value will do
    _traced(said, captured, floats, known, grads, {}, torch.device("cpu"))
    B, H, M, _ = query.shape
    width = value.shape[3]
    if said.order == "rows":
        o = query.new_empty((B, M, H, width)).transpose(1, 2)
    else:
        o = query.new_empty((B, H, M, width))
    return o, query.new_empty((B, H, M) if said.lse or grads else (0,), dtype=torch.float32)


@torch.library.custom_op("attnc::flex_attention_backward", mutates_args=())
def _pull(
    do: torch.Tensor,
    dlse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Sequence[torch.Tensor],
    floats: Sequence[float],
    integers: Sequence[int],
    o: torch.Tensor,
    lse: torch.Tensor,
    program: str,
    grads: Sequence[int],
) -> list[torch.Tensor]:
    """Returns the gradients of the tensors at `grads`."""
    said = read(program)
    traced, kernel = _find_kernel(query, key, value, captured, floats, integers, said, grads)
    if said.order == "rows":
        do, o = do.transpose(1, 2), o.transpose(1, 2)
    inputs = [_scalar(x, query) for x in kernel.arguments(traced)]
    assert kernel.gradients is not None
    own = [at for at in grads if at < 3]
    found: tuple[torch.Tensor, ...] = ()
    if own or kernel.learned:
        found = kernel.gradients(do, dlse, query, key, value, *inputs, o, lse, None)
    leaves = (query, key, value, *captured)
    made = {at: gradient.contiguous() for at, gradient in zip(own, found, strict=False)}
    for at in grads:
        if at not in made:
            made[at] = torch.zeros(leaves[at].shape, dtype=leaves[at].dtype, device=query.device)
    for at, gradient in zip(kernel.learned, found[len(own) :], strict=True):
        leaf, whole = _unfolded(traced.tape.captures[at].tensor, gradient, traced)
        made[next(at for at in grads if leaves[at] is leaf)] += whole
    return [made[at] for at in grads]


@_pull.register_fake
def _pull_fake(
    do: torch.Tensor,
    dlse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Sequence[torch.Tensor],
    floats: Sequence[float],
    integers: Sequence[int],
    o: torch.Tensor,
    lse: torch.Tensor,
    program: str,
    grads: Sequence[int],
) -> list[torch.Tensor]:
    leaves = (query, key, value, *captured)
    return [query.new_empty(leaves[at].shape, dtype=leaves[at].dtype) for at in grads]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, captured, ctx.floats, ctx.integers, ctx.program, ctx.grads = inputs
    ctx.captured = len(captured)
    ctx.save_for_backward(query, key, value, *captured, *output)


def _differentiate(ctx: Any, do: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
    query, key, value, *captured, o, lse = ctx.saved_tensors
    found = torch.ops.attnc.flex_attention_backward(
        do, dlse, query, key, value, captured, ctx.floats, ctx.integers, o, lse, ctx.program, ctx.grads
    )
    gradients: list[torch.Tensor | None] = [None] * (3 + ctx.captured)
    for at, gradient in zip(ctx.grads, found, strict=True):
        gradients[at] = gradient
    # torch wants None for a list of numbers, and a list for a list that is empty.
    numbers: list[Any] = [None if listed else [] for listed in (ctx.floats, ctx.integers)]
    return (*gradients[:3], gradients[3:], *numbers, None, None)


_operate.register_autograd(_differentiate, setup_context=_keep)


def _find_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Tensors,
    floats: Sequence[float],
    integers: Sequence[int],
    said: Program,
    grads: Sequence[int],
) -> tuple[Trace, Kernel]:
    """Returns what the mods do at this call, and its kernel: the same for the forward and the backward."""
    B, H, M, width = query.shape
    sizes = {"B": B, "H": H, "M": M, "N": key.shape[2]}
    traced = _traced(said, captured, floats, integers, grads, sizes, query.device)
    target, otherwise = targets_of(said.target, query, key, value, said.wanted, gradients=bool(grads))
    layout = Layout(
        dtype=DTYPES[query.dtype],
        head_dim=width,
        value_dim=value.shape[3],
        grouped=key.shape[1] != H,
        rows_first=said.order == "rows",
        scaled=said.scaled,
        lse=said.lse or bool(grads),
        differentiable=bool(grads),
        grad=tuple("qkv"[at] for at in grads if at < 3),
        target=target,
        otherwise=otherwise,
        wanted=said.wanted,
    )
    return traced, kernel_of(traced, layout)


def _traced(
    said: Program,
    captured: Tensors,
    floats: Sequence[float],
    integers: Sequence[int],
    grads: Sequence[int],
    sizes: dict[str, int],
    device: torch.device,
) -> Trace:
    mods = (mod_of(steps, captured, floats, integers) for steps in (said.score, said.mask))
    scale = floats[0] if said.scaled else None
    learned = {id(captured[at - 3]) for at in grads if at >= 3}
    return trace(*mods, scale=scale, sizes=sizes, device=device, learned=learned)


def _unfolded(
    tensor: torch.Tensor, gradient: torch.Tensor, traced: Trace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the captured tensor that this one is a view of, and its gradient."""
    while id(tensor) in traced.tape.views:
        tensor_of, axis, index, _ = traced.tape.views[id(tensor)]
        whole = gradient.new_zeros(tensor_of.shape)
        (whole.select(axis, index) if whole.dim() else whole.view(1)).copy_(gradient)
        tensor, gradient = tensor_of, whole
    return tensor, gradient


def _scalar(x: Any, like: torch.Tensor) -> torch.Tensor:
    """Returns an argument as a tensor: numbers on the device, without waiting for it."""
    if isinstance(x, torch.Tensor):
        return x
    dtype = {"i32": torch.int32, "i64": torch.int64, "f32": torch.float32}[element_of(x)]
    return torch.full((), x, dtype=dtype, device=like.device)
