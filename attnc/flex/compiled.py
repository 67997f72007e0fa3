"""`flex_attention` under torch.compile: one operator of torch's, whatever the mods.

`attend` is traced into the caller's graph. What the mods do goes into the operator as a text (`recording`),
the tensors and numbers that they read as inputs, so that gradients reach them and nothing is traced again
when lengths or data change. At every call the operator does what `flex_attention` does outside of a graph: it
reads the mods, looks at captured integers and blocks, and finds the kernel.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnc.api.compile import SpecError
from attnc.api.fastest import chosen_target
from attnc.api.repeats import without_gradients
from attnc.flex.arguments import Auxiliary
from attnc.flex.blocks import Blocks, restrict
from attnc.flex.dense import max_scores
from attnc.flex.errors import FlexError, Place, defined_at, move_error, refuse, span_of_line
from attnc.flex.layouts import as_logical, as_written, laid_out, written_order
from attnc.flex.programs import FlexKernel, as_tensor, kernel_of, read_options, targets_of, targets_of_steps
from attnc.flex.recording import Recorder, Reference, Steps
from attnc.flex.spec import DTYPES, NARROW, CallLayout
from attnc.flex.symbols import OPERATIONS, apply, tape_of
from attnc.flex.trace import MaskMod, ScoreMod, Trace, trace
from attnc.support.arguments import is_transforming, refuse_tangents
from attnc.support.memory import lay_like
from attnc.support.operators import shorten
from attnc.support.sizes import parse_beside_threads

# --- steps as a text, and as mods again ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallProgram:
    """A call of `flex_attention` but for its tensors and numbers.

    score, mask: the steps of the mods; scaled: whether the first float is the scale
    blocks: None, or the position of the first of their lists among the tensors, whether there are full ones,
        and the positions of rows and columns among the integers
    order: of the axes of o, outermost first; lse, target: of `spec.Layout`
    wanted: keys of a schedule, with the positions of their values among the integers
    places: where the mods are defined
    """

    score: Steps | None
    mask: Steps | None
    blocks: tuple[int, bool, int, int] | None
    scaled: bool
    order: str
    lse: bool
    wanted: tuple[tuple[str, int], ...]
    target: str
    places: tuple[Place | None, ...]


def written(*fields: Any) -> str:
    """Returns the fields of a program as a text, which graphs can hold and other processes can read."""
    return repr(_plain(fields))


# What torch.compiler.assume_constant_result does, without importing the compiler: tracing calls it for real.
written._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


@functools.cache
def read(program: str) -> CallProgram:
    return CallProgram(*_value_of(parse_beside_threads(ast.literal_eval, program)))


def mod_of(
    steps: Steps | None,
    tensors: Sequence[torch.Tensor],
    floats: Sequence[float],
    integers: Sequence[int],
    place: Place | None,
) -> Callable[..., Any] | None:
    """Returns the mod that does these steps. place: where the user's is defined, for its errors."""
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

        try:
            for name, args, kwargs in todo:
                results.append(_done(name, [value(x) for x in args], {key: value(x) for key, x in kwargs}))
            return value(returned)
        except FlexError as failure:
            raise (move_error(failure, span_of_line(place)) if place else failure) from None

    return mod


def _done(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
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
    raise refuse("E0903", f"a {type(value).__name__} in a mod", "expected a number or a tensor")


def _value_of(value: Any) -> Any:
    match value:
        case tuple():
            return tuple(_value_of(part) for part in value)
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
#: Stands for a size that a graph does not know.
_TYPICAL = 1 << 20


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    blocks: Blocks | None,
    scale: Any,
    auxiliary: Auxiliary,
    order: str,
    kernel_options: Mapping[str, Any] | None,
    target: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns (o, lse or None, largest scores or None) of checked arguments, as `flex_attention` has them."""
    refuse_tangents("flex_attention", (query, key, value))
    # what the operator takes in lists no transform sees: it runs outside of the graph
    if torch.compiler.is_compiling() and is_transforming():
        torch._dynamo.graph_break("flex_attention inside of a transform of torch.func")
    recorder = Recorder(query.device)
    if scale is not None and not isinstance(scale, int | float):  # a tensor, as numbers of NumPy are here
        score_mod, scale = _scale_scores(score_mod, torch.as_tensor(scale, device=query.device)), 1.0
    if scale is not None:
        recorder.floats.append(float(scale))
    score = None if score_mod is None else recorder.record(score_mod, (torch.float32, *_POSITIONS))
    mask = None if mask_mod is None else recorder.record(mask_mod, _POSITIONS)
    lists = None
    if blocks is not None:
        lists = (
            len(recorder.tensors),
            blocks.full_counts is not None,
            recorder.number(blocks.rows),
            recorder.number(blocks.columns),
        )
        recorder.tensors.extend(blocks.tensors)
    options = [(name, recorder.number(size)) for name, size in read_options(kernel_options)]
    program = written(
        score, mask, lists, scale is not None, order, auxiliary.lse, options, target or "",
        (defined_at(score_mod), defined_at(mask_mod)),
    )  # fmt: skip
    tensors = [query, key, value, *recorder.tensors]
    grads = [at for at, x in enumerate(tensors) if x.requires_grad] if torch.is_grad_enabled() else []
    given = (recorder.tensors, recorder.floats, recorder.integers, program)
    o, log_sum = torch.ops.attnc.flex_attention(query, key, value, *given, grads)
    largest = None
    if auxiliary.max_scores:
        largest = torch.ops.attnc.flex_attention_max_scores(query.detach(), key.detach(), *given)
    return o, log_sum if auxiliary.lse else None, largest


def _scale_scores(score_mod: ScoreMod | None, scale: torch.Tensor) -> ScoreMod:

    def mod(score: Any, *indices: Any) -> Any:
        score = score * scale
        return score if score_mod is None else score_mod(score, *indices)

    return mod


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
    found = _run(kernel.function, query, key, value, *kernel.arguments(traced))
    o, lse = found if said.lse or grads else (found, query.new_empty(0, dtype=torch.float32))
    return laid_out(as_logical(o, said.order), said.order), lse


@without_gradients
def _run(function: Callable[..., Any], *given: Any) -> Any:
    return function(*given)


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
    said = read(program)
    known = [value if type(value) is int else 1 for value in integers]  # for a torch.SymInt any value will do
    (B, H, M, _), N, width = query.shape, key.shape[2], value.shape[3]
    # whether a mod is refused depends on how many bits positions have
    sizes = {name: x if type(x) is int else _TYPICAL for name, x in zip("BHMN", (B, H, M, N), strict=True)}
    _trace_mods(said, captured, floats, known, grads, sizes, torch.device("cpu"), is_seen=False)
    sizes = {"B": B, "H": H, "M": M, "D": width}
    o = query.new_empty([sizes[axis] for axis in said.order])
    o = o.permute([said.order.index(axis) for axis in "BHMD"])
    return o, query.new_empty((B, H, M) if said.lse or grads else (0,), dtype=torch.float32)


@torch.library.custom_op("attnc::flex_attention_backward", mutates_args=())
def _pull(
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
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
    said = read(program)
    traced, kernel = _find_kernel(query, key, value, captured, floats, integers, said, grads)
    do = None if do is None else as_written(_with_rows(do), said.order)
    o = as_written(_with_rows(o), said.order)
    inputs = [as_tensor(x, query) for x in kernel.arguments(traced)]
    assert kernel.gradients is not None
    own = [at for at in grads if at < 3]
    found: tuple[torch.Tensor, ...] = ()
    if own or kernel.learned:
        found = kernel.gradients(do, dlse, query, key, value, *inputs, o, lse, None)
    leaves = (query, key, value, *captured)
    made = {at: lay_like(gradient, leaves[at]) for at, gradient in zip(own, found, strict=False)}
    made |= {at: torch.zeros_like(leaves[at], device=query.device) for at in grads if at not in made}
    for at, gradient in zip(kernel.learned, found[len(own) :], strict=True):
        leaf, whole = _find_base(traced.tape.captures[at].tensor, gradient, traced)
        made[next(at for at in grads if leaves[at] is leaf)] += whole
    return [made[at] for at in grads]


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@_pull.register_fake
def _pull_fake(
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
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
    return [torch.empty_like(leaves[at], device=query.device) for at in grads]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, captured, ctx.floats, ctx.integers, ctx.program, ctx.grads = inputs
    ctx.captured = len(captured)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *captured, *output)


def _differentiate(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
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
shorten(_operate, _operate._init_fn)
shorten(_pull, _pull._init_fn)


def _find_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Tensors,
    floats: Sequence[float],
    integers: Sequence[int],
    said: CallProgram,
    grads: Sequence[int],
) -> tuple[Trace, FlexKernel]:
    known = None
    if not captured:  # what was found depends on no tensor's elements
        looks = [(x.shape, x.stride(), x.dtype, x.device) for x in (query, key, value)]
        numbers = tuple(floats), tuple(integers), tuple(grads)
        aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16
        known = (id(said), *numbers, *looks, chosen_target(), aligned)
        if (again := _FOUND.get(known)) is not None:
            return again
    B, H, M, width = query.shape
    sizes = {"B": B, "H": H, "M": M, "N": key.shape[2]}
    traced = _trace_mods(said, captured, floats, integers, grads, sizes, query.device)
    wanted = tuple((name, integers[at]) for name, at in said.wanted)
    steps = () if grads or wanted else targets_of_steps(said.target, query, key, value)
    target, otherwise = targets_of(said.target, query, key, value, wanted, gradients=bool(grads))
    layout = CallLayout(
        dtype=DTYPES[query.dtype],
        kept_as=NARROW.get(key.dtype, ""),
        head_dim=width,
        value_dim=value.shape[3],
        grouped=key.shape[1] != H,
        order=written_order(said.order),
        scaled=said.scaled,
        lse=said.lse or bool(grads),
        differentiable=bool(grads),
        grad=tuple("qkv"[at] for at in grads if at < 3),
        target=target,
        otherwise=otherwise,
        steps=steps,
        wanted=wanted,
    )
    try:
        found = traced, kernel_of(traced, layout)
    except SpecError as failure:
        place = next(filter(None, said.places), None)
        raise (move_error(failure, span_of_line(place)) if place else failure) from None
    if known is not None:
        if len(_FOUND) >= _MOST_FOUND:
            _FOUND.clear()
        _FOUND[known] = found
    return found


#: Of calls that capture no tensor, by all that they depend on; `read` keeps the program of an id.
_FOUND: dict[Any, tuple[Trace, FlexKernel]] = {}
_MOST_FOUND = 1024


def _trace_mods(
    said: CallProgram,
    captured: Tensors,
    floats: Sequence[float],
    integers: Sequence[int],
    grads: Sequence[int],
    sizes: dict[str, int],
    device: torch.device,
    *,
    is_seen: bool = True,
) -> Trace:
    """Returns the trace of the mods. is_seen: whether tensors hold data, so that lists of blocks count."""
    mods = (
        mod_of(steps, captured, floats, integers, place)
        for steps, place in zip((said.score, said.mask), said.places, strict=True)
    )
    scale = floats[0] if said.scaled else None
    learned = {id(captured[at - 3]) for at in grads if at >= 3}
    of_score = any(at < 2 for at in grads)  # query and key
    traced = trace(*mods, scale=scale, sizes=sizes, device=device, learned=learned, gradients=of_score)
    if said.blocks is None or not is_seen:
        return traced
    first, has_full, rows, columns = said.blocks
    full = captured[first + 2 : first + 4] if has_full else (None, None)
    lists = (captured[first], captured[first + 1], full[0], full[1])
    return restrict(traced, Blocks(*lists, integers[rows], integers[columns]))


@torch.library.custom_op("attnc::flex_attention_max_scores", mutates_args=())
def _find_largest(
    query: torch.Tensor,
    key: torch.Tensor,
    captured: Sequence[torch.Tensor],
    floats: Sequence[float],
    integers: Sequence[int],
    program: str,
) -> torch.Tensor:
    said = read(program)
    B, H, M, _ = query.shape
    sizes = {"B": B, "H": H, "M": M, "N": key.shape[2]}
    traced = _trace_mods(said, captured, floats, integers, (), sizes, query.device)
    return max_scores(traced, query, key, floats[0] if said.scaled else None)


@_find_largest.register_fake
def _find_largest_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    captured: Sequence[torch.Tensor],
    floats: Sequence[float],
    integers: Sequence[int],
    program: str,
) -> torch.Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.float32)


def _find_base(
    tensor: torch.Tensor, gradient: torch.Tensor, traced: Trace
) -> tuple[torch.Tensor, torch.Tensor]:
    while id(tensor) in traced.tape.views:
        tensor_of, axis, index, _ = traced.tape.views[id(tensor)]
        whole = gradient.new_zeros(tensor_of.shape)
        (whole.select(axis, index) if whole.dim() else whole.view(1)).copy_(gradient)
        tensor, gradient = tensor_of, whole
    return tensor, gradient
