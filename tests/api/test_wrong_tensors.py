"""Every function that takes tensors, with every tensor of its call wrong in every way: it computes what it
computes with a right one, or says which argument is wrong, what was expected and what came. Never a traceback
of another library's, never numbers of something else.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from torch.utils._pytree import tree_map

import attnc
from attnc.adapters.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache
from attnc.flex.errors import FlexError
from attnc.verify.interpreter import ensure_interpreter
from tests.api.doors import DECODE, DOORS, Door
from tests.by_day import each_by_day

ensure_interpreter()

#: torch says so once in a process.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
]

#: A right tensor -> a wrong one; None where there is none of the kind.
Mistake: TypeAlias = Callable[[torch.Tensor], Any]


def _of_floats(change: Mistake) -> Mistake:
    return lambda x: change(x) if x.is_floating_point() else None


def _with_axes(change: Mistake) -> Mistake:
    return lambda x: change(x) if x.dim() else None


def _sized(axis: int, size: Callable[[int], int]) -> Mistake:
    def change(x: torch.Tensor) -> Any:
        if axis >= x.dim():
            return None
        shape = [*x.shape]
        shape[axis] = size(shape[axis])
        return torch.zeros(shape, dtype=x.dtype)

    return change


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, such as a DTensor: it computes with that which it holds."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device
        )
        made.held = x
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's names no function
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*tree_map(lambda x: x.held if isinstance(x, cls) else x, args), **(kwargs or {}))


def _jagged(x: torch.Tensor) -> Any:
    return torch.nested.nested_tensor([*x], layout=torch.jagged) if x.dim() > 1 else None


#: What no function takes, whatever the tensor.
WRONG: dict[str, Mistake] = {
    "a list": _with_axes(lambda x: x.tolist()),
    "an array": _with_axes(lambda x: x.numpy()),
    "a text": lambda x: "tensor",
    "an object": lambda x: object(),
    "complex": lambda x: x.to(torch.complex64),
    "an axis more": lambda x: x[None, None],
    "no axes": _with_axes(lambda x: x.new_ones(())),
    "without data": lambda x: x.to("meta"),
    "sparse": _with_axes(lambda x: x.to_sparse()),
    "sparse rows": lambda x: x.to_sparse_csr() if x.dim() == 2 else None,
    "for MKL-DNN": lambda x: x.to_mkldnn() if x.dim() and x.dtype is torch.float32 else None,
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "nested rows": lambda x: torch.nested.nested_tensor([*x]) if x.dim() > 1 else None,
    "jagged rows": _jagged,
    "wrapped": Wrapped,
}
#: What some take for some tensors: None where it may be left out, types that are converted, other sizes.
OTHER: dict[str, Mistake] = {
    "None": lambda x: None,
    "a number": lambda x: 3,
    "64 bits": lambda x: x.double() if x.is_floating_point() else x.long(),
    "16 bits": lambda x: x.half() if x.is_floating_point() else x.short(),
    "bools": lambda x: x.bool(),
    "an axis less": _with_axes(lambda x: x[0]),
    **{f"axis {axis} longer": _sized(axis, lambda size: size + 1) for axis in range(5)},
    **{f"axis {axis} shorter": _sized(axis, lambda size: size - 1) for axis in range(5)},
    **{f"axis {axis} empty": _sized(axis, lambda size: 0) for axis in range(5)},
}
#: Other layouts of the same numbers.
LAYOUTS: dict[str, Mistake] = {
    "columns apart": _with_axes(lambda x: torch.stack([x, x], -1)[..., 0]),
    "rows apart": _with_axes(lambda x: torch.stack([x, x])[0]),
    "negated": _of_floats(lambda x: torch.complex(x, -x).conj().imag),
}
#: Fewer rows than other arguments speak of by their numbers, which are not looked at: a GPU would have to be
#: waited for.
_BY_CONTENTS = {"q": ("axis 0 shorter",), "k": ("axis 0 shorter", "axis 0 empty")}
CALLS = [
    pytest.param(door, argument, id=f"{name}-{argument}")
    for name, door in DOORS.items()
    for argument in door.make()
]


#: Arguments that results are written to.
_OUT = ("o", "lse", "out")


def spoiled(door: Door, argument: str, change: Mistake) -> dict[str, Any] | None:
    """Returns the tensors of a call, of which one is wrong."""
    tensors = door.make()
    made = change(tensors[argument])
    if made is None and change is not OTHER["None"]:
        return None
    return {**tensors, argument: made}


def said_of(door: Door, argument: str, mistakes: dict[str, Mistake], *, takes: bool) -> dict[str, str]:
    """Returns what is wrong with what a call does with each mistake. takes: whether it may be right."""
    found: dict[str, str] = {}
    for kind, change in mistakes.items():
        tensors = spoiled(door, argument, change)
        if tensors is None or (argument, kind) in door.taken:
            continue
        try:
            door.call(**tensors)
            said = "" if takes else "it is taken"
        except (TypeError, ValueError, FlexError) as error:
            said = complain(door, error)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        found |= {kind: said} if said else {}
    return found


def complain(door: Door, error: Exception) -> str:
    """Returns what an error lacks."""
    text = str(error).replace("\n", " ")
    if "doors.py" in text or traceback.extract_tb(error.__traceback__)[-1].name == "score_mod":
        return ""  # the line of the mod that reads the tensor
    named = "|".join(re.escape(name) for name in (*door.make(), *door.named))
    said = re.match(rf"([\w ]+: )?(out )?({named})(:|,| has) .*\bexpected\b", text)
    # as torch says it of its own function
    said = said or re.match("Expected query, key, and value .* but got query", text)
    return "" if said else f"{type(error).__name__}: {text}"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("door", "argument"), CALLS)
def test_what_nothing_takes_is_refused_by_name(door: Door, argument: str) -> None:
    door.call(**door.make())  # what is kept of a right call with such sizes takes nothing else
    assert said_of(door, argument, WRONG, takes=False) == {}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("door", "argument"), each_by_day(CALLS, of=3))
def test_other_tensors_are_taken_or_named(door: Door, argument: str) -> None:
    known = _BY_CONTENTS.get(argument, ())
    mistakes = {kind: change for kind, change in OTHER.items() if kind not in known}
    assert said_of(door, argument, mistakes, takes=True) == {}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("door", "argument"), each_by_day([*CALLS[1:], CALLS[0]], of=3))
def test_layouts_are_taken_for_what_they_are_or_named(door: Door, argument: str) -> None:
    if argument in door.written:
        return
    right = first_of(door.call(**door.make()))
    for change in LAYOUTS.values():
        tensors = spoiled(door, argument, change)
        if tensors is None:
            continue
        try:
            result = first_of(door.call(**tensors))
        except (TypeError, ValueError) as error:
            said = complain(door, error)
        else:
            said = ""
            torch.testing.assert_close(result, right)
        assert not said


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("door", "argument"), [(door, name) for door in DOORS.values() for name in door.written if name in _OUT]
)
@pytest.mark.parametrize("repeats", [0, 6])
def test_a_result_that_shares_an_element_is_refused(door: Door, argument: str, repeats: int) -> None:
    """With any other tensor of the call; after calls that looked alike, too."""
    for other, x in door.make().items():
        if x.dtype != torch.float32 or not x.dim() or other == argument:
            continue
        tensors = door.make()
        y = tensors[argument]
        memory = torch.empty(2 * x.numel() + y.numel())
        tensors[other] = memory[: x.numel()].view(x.shape).copy_(x)
        tensors[argument] = memory[x.numel() : x.numel() + y.numel()].view(y.shape)
        for _ in range(repeats):
            door.call(**tensors)  # behind each other
        tensors[argument] = memory[x.numel() - 1 : x.numel() - 1 + y.numel()].view(y.shape)
        with pytest.raises(ValueError, match=r"out( \w+)?: expected memory of its own, got elements"):
            door.call(**tensors)


#: Tensors whose rows are heads, of functions that take heads of any number of columns.
HEADS = {
    "flex_attention": ("query", "key", "value"),
    "flash_attn_func": ("q", "k", "v", "out"),
    "flash_attn_kvpacked_func": ("q", "kv"),
    "flash_attn_with_kvcache, pages": ("q", "k_cache", "v_cache"),
    "scaled_dot_product_attention": ("query", "key", "value"),
    "transformers": ("query", "key", "value"),
    "unified_attention": ("q", "k", "v", "out"),
    "flash_mla_sparse_fwd": ("q", "kv"),
    "flash_mla_with_kvcache": ("q", "k_cache"),
    "single_prefill_with_kv_cache": ("q", "k", "v"),
    "single_decode_with_kv_cache": ("q", "k", "v"),
}


@pytest.mark.parametrize("columns", [0, 1025])
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_no_columns_or_too_many_are_refused_by_name(name: str, columns: int) -> None:
    """Not in the words of a spec that the caller has never seen."""
    door = DOORS[name]
    tensors = door.make()
    for key in HEADS[name]:
        tensors[key] = torch.zeros(*tensors[key].shape[:-1], columns)
    with pytest.raises((ValueError, FlexError)) as failure:
        door.call(**tensors)
    assert isinstance(failure.value, FlexError) or complain(door, failure.value) == ""


@pytest.mark.parametrize("values", [-1, 0, 33, 2.0, None])
def test_values_that_are_no_columns_of_keys_are_refused_by_name(values: Any) -> None:
    said = "expected an integer from 1 to 32, the columns of a key, got"
    with pytest.raises(ValueError, match=f"^flash_mla_sparse_fwd: d_v: {said}"):
        flash_mla_sparse_fwd(**DOORS["flash_mla_sparse_fwd"].make(), sm_scale=0.2, d_v=values)
    with pytest.raises(ValueError, match=f"^flash_mla_with_kvcache: head_dim_v: {said}"):
        flash_mla_with_kvcache(**DOORS["flash_mla_with_kvcache"].make(), head_dim_v=values)


@pytest.mark.parametrize(
    "door", ["attnc.compile, decode", "flex_attention", "flash_attn_func", "transformers"]
)
def test_tracing_of_torch_jit_is_refused(door: str) -> None:
    """Sizes are no numbers there."""
    names, tensors = zip(*DOORS[door].make().items(), strict=True)
    warnings.simplefilter("ignore")  # torch.jit is deprecated
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace cannot follow .*: export the program"):
        torch.jit.trace(lambda *given: DOORS[door].call(**dict(zip(names, given, strict=True))), tensors)  # type: ignore[no-untyped-call]  # torch's


def test_tracing_of_torch_jit_is_refused_of_several_variants() -> None:
    """Where the variant is found by sizes."""
    text = DECODE.replace("attention decode_door {", "attention decode_door {\n  param D in {8, 16}")
    family = attnc.compile(text.replace("Hkv * G, 16]", "Hkv * G, D]").replace("Hkv, 16]", "Hkv, D]"))
    tensors = (*DOORS["attnc.compile, decode"].make().values(),)
    warnings.simplefilter("ignore")  # torch.jit is deprecated
    with pytest.raises(RuntimeError, match=r"^q: torch\.jit\.trace cannot follow"):
        torch.jit.trace(family.function, tensors)  # type: ignore[no-untyped-call]  # torch's


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", DOORS)
def test_gradients_are_given_or_refused(name: str) -> None:
    """A tensor that requires a gradient gets one, or an error says that there is none."""
    door = DOORS[name]
    for argument, x in door.make().items():
        if not x.is_floating_point() or argument in door.detached:
            continue
        tensors = door.make()
        leaf = tensors[argument] = tensors[argument].requires_grad_()
        try:
            result = first_of(door.call(**tensors))
        except (TypeError, ValueError, RuntimeError) as error:
            said = str(error)
            assert re.search("no_grad|gradient", said), f"{argument}: {said}"
            continue
        assert result.requires_grad, f"{argument}: its gradient is lost"
        (gradient,) = torch.autograd.grad(result.sum(), leaf)
        assert gradient.shape == leaf.shape


def first_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]
