"""Calls of public functions that are like one before: they go to their kernels without another look at their
arguments.

A function says what its kernel depends on besides the layouts of its tensors (facts). The first call makes a
plan, and the next ones find it by facts and layouts; a call that follows itself finds it by one question in
C++, and launches what was prepared for the kernel.

`attnc export` copies this file beside kernels that run without the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch.autograd import forward_ad

from attnc.api.fastest import chosen_target
from attnc.support.memory import make_picker
from attnc.support.repeat import Again, Repeated

#: The tensors of a call -> what its kernel takes: inputs, and where its results go, or None.
Arrange: TypeAlias = Callable[[Sequence[Any]], tuple[Sequence[Any], Any]]
is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
#: Plans that are kept.
_MOST_PLANS = 4096


class Plan:
    """A call but for its tensors.

    function: of the kernel; call: its `CALL`, None where the function picks one at each call. arrange: what
    the kernel takes, of the tensors that are given; finish: what the call returns, of the kernel's results
    and those tensors; None where these are the results. axes: the order that the only result has the
    kernel's axes in, which is all that finishes it then.
    """

    __slots__ = ("arrange", "axes", "call", "finish", "function")

    def __init__(
        self,
        function: Callable[..., Any],
        call: Any,
        arrange: Arrange,
        finish: Callable[[Any, Sequence[Any]], Any] | None = None,
        axes: Sequence[int] | None = None,
    ) -> None:
        self.function, self.call, self.arrange, self.finish = function, call, arrange, finish
        self.axes = axes

    def run(self, tensors: Sequence[Any]) -> Any:
        inputs, out = self.arrange(tensors)
        found = self.function(*inputs) if out is None else self.function(*inputs, out=out)
        if self.axes is not None:
            return found.permute(self.axes)
        return found if self.finish is None else self.finish(found, tensors)

    def settle(self, tensors: Sequence[Any]) -> Again:
        arrange, finish = self.arrange, self.finish
        inputs, out = arrange(tensors)
        again = None if self.call is None else self.call.resume(inputs, out, self.axes)
        if again is None:
            return self.run
        take = _find_places(tensors, (inputs, out), arrange(tensors))
        if take is None:
            take = arrange
        if finish is None:
            return lambda tensors: again(*take(tensors))
        return lambda tensors: finish(again(*take(tensors)), tensors)


def _find_places(
    tensors: Sequence[torch.Tensor], first: tuple[Sequence[Any], Any], second: tuple[Sequence[Any], Any]
) -> Arrange | None:
    """Returns a function that takes the inputs of a kernel, and the place of its result, out of tensors like
    these. Kernels that were prepared read addresses, so a tensor serves as well as a view of it. first,
    second: the inputs that were made of these tensors, twice. An input that is the same both times is one of
    the tensors, or a constant, such as a number on the device. None if an input is a copy, or has the address
    of two tensors.
    """
    (inputs, out), (others, other) = first, second
    wants = is_grad_enabled() and any(x.requires_grad for x in tensors)  # gradients have shapes of inputs

    def place_of(x: Any, again: Any) -> Any:
        places = [at for at, y in enumerate(tensors) if y is x]
        if places or x is again:
            return places[0] if places else x
        places = [at for at, y in enumerate(tensors) if y.data_ptr() == x.data_ptr()]
        return None if wants or len(places) != 1 or not x.data_ptr() else places[0]

    order = [place_of(x, again) for x, again in zip(inputs, others, strict=True)]
    at = -1 if out is None else place_of(out, other) if isinstance(out, torch.Tensor) else None
    if not isinstance(at, int) or any(x is None for x in order):
        return None
    if all(isinstance(x, int) for x in order):
        pick = make_picker(order)
        if at < 0:
            return lambda tensors: (pick(tensors), None)
        return lambda tensors: (pick(tensors), tensors[at])
    return lambda tensors: (
        [tensors[x] if isinstance(x, int) else x for x in order],
        None if at < 0 else tensors[at],
    )


Given = ParamSpec("Given")
Found = TypeVar("Found")
_PLANS: dict[Any, Plan] = {}
#: Of calls that follow themselves, by what a guard does not see of them.
_LATEST: dict[Any, Repeated[Again]] = {}


def repeat(facts: tuple[Any, ...], tensors: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the key by which `keep` keeps the plan of a call, and the call's results in a tuple of one if a
    plan is known, else None. facts: hashable, the function among them; tensors: those of the call, None for
    what is left out. Both are None if nothing may be remembered: while torch.compile traces, under a mode of
    torch's, with tangents, in a transform of torch.func, whose tensors look like others, and for inputs that
    are no tensors.
    """
    if is_compiling() or torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
        return None, None
    given = [x for x in tensors if x is not None]
    absent = () if len(given) == len(tensors) else tuple([x is None for x in tensors])
    try:
        modes = is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), chosen_target()
        kind = facts, absent, modes, given[0].requires_grad
        latest = _LATEST.get(kind)
        again = None if latest is None else latest.call(given)
    except (AttributeError, TypeError, IndexError):  # no tensor; a window may be a list
        return None, None
    if again is not None:
        return kind, (again(given),)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None, None
    for fact in facts:
        for x in fact if isinstance(fact, tuple) else (fact,):
            if isinstance(x, torch.Tensor):  # a number that may change in place
                return None, None
    try:
        looks = [(type(x), x.layout, x.dtype, x.device, x.shape, x.stride(), x.requires_grad) for x in given]
    except (AttributeError, RuntimeError):  # nor has a nested or a sparse tensor these
        return None, None
    key = kind, tuple(looks)
    plan = _PLANS.get(key)
    if plan is None:
        return key, None
    _note(kind, plan, given)
    return key, (plan.run(given),)


def keep(key: Any, plan: Plan) -> None:
    """Keeps the plan of a call for those like it. key: what `repeat` returned for it."""
    if key is not None:
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        _PLANS[key] = plan


def are_left_out(*options: object) -> bool:
    """Returns whether none of the options is given."""
    for option in options:  # noqa: SIM110  # a generator takes longer than all else that a call does
        if option is not None:
            return False
    return True


def without_gradients(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """`torch.no_grad()` of a function, without what its context takes."""

    @wraps(function)
    def call(*given: Given.args, **named: Given.kwargs) -> Found:
        if not is_grad_enabled():
            return function(*given, **named)
        torch._C._set_grad_enabled(False)
        try:
            return function(*given, **named)
        finally:
            torch._C._set_grad_enabled(True)

    return call


def forget() -> None:
    _PLANS.clear()
    _LATEST.clear()


def _note(kind: Any, plan: Plan, tensors: Sequence[Any]) -> None:
    latest = _LATEST.get(kind)
    if latest is None:
        if len(_LATEST) >= _MOST_PLANS:
            _LATEST.clear()
        latest = _LATEST[kind] = Repeated(lambda plan, given: plan.settle(given), gradients=True)
    latest.note(plan, tensors)
