"""The guard that stands for a key where a call repeats itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.support.memory import allocate
from attnc.support.repeat import Repeated, make_again


def tensors() -> tuple[torch.Tensor, ...]:
    return torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 4, 8), torch.zeros(2, dtype=torch.int32)


class Own(torch.Tensor):
    """A subclass, whose functions could do anything."""


@pytest.fixture
def repeated() -> Repeated[str]:
    made: Repeated[str] = Repeated()
    for _ in range(4):
        made.note("found", tensors())
    assert made.call(tensors()) == "found"
    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q[:, :2],
        lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
        lambda q: q[0],
        lambda q: q.half(),
        lambda q: q.to("meta"),
        lambda q: q.clone().requires_grad_(),
        lambda q: q.as_subclass(Own),
        lambda q: torch.nn.Parameter(q),
        lambda q: None,
        lambda q: 1.0,
    ],
    ids=[
        "size",
        "strides",
        "rank",
        "type",
        "device",
        "gradient",
        "subclass",
        "parameter",
        "nothing",
        "number",
    ],
)
@pytest.mark.parametrize("at", [0, 1])
def test_what_looks_different_is_looked_up(
    repeated: Repeated[str], change: Callable[[torch.Tensor], object], at: int
) -> None:
    given: list[object] = list(tensors())
    given[at] = change(tensors()[at])
    assert repeated.call(given) is None
    assert repeated.call(tensors()) is None  # until it is noted again


def test_the_same_tensors_again_and_others_like_them_are_the_same(repeated: Repeated[str]) -> None:
    given = tensors()
    assert repeated.call(given) == repeated.call(given) == repeated.call(tensors()) == "found"


def test_a_tensor_that_requires_a_gradient_is_never_guarded() -> None:
    """No gradient is wanted where none is recorded, but the next call may record one."""
    repeated: Repeated[str] = Repeated()
    q, *others = tensors()
    q.requires_grad_()
    with torch.no_grad():
        for _ in range(9):
            repeated.note("found", (q, *others))
        assert repeated.call((q, *others)) is None


def test_calls_that_take_turns_have_no_guard() -> None:
    repeated: Repeated[str] = Repeated()
    given, (k, _, n) = tensors(), tensors()
    for _ in range(9):
        repeated.note("one", given)
        assert repeated.guard is None
        repeated.note("other", (k, k, n))
        assert repeated.guard is None


@pytest.mark.parametrize("given", [(0, 1, 0), (0, 1, 1), (0, 0, 0)])
def test_tensors_that_are_given_twice_have_to_be_so_again(given: tuple[int, ...]) -> None:
    """As the ends of packed queries and keys are."""
    repeated: Repeated[str] = Repeated()
    made = [torch.zeros(3, 4) for _ in range(2)]
    for _ in range(4):
        repeated.note("found", [made[at] for at in given])
    others = [x.clone() for x in made]
    assert repeated.call([others[at] for at in given]) == "found"
    assert repeated.call([others[at].clone() for at in given]) is None
    for last in range(3):  # all but one
        repeated = Repeated()
        for _ in range(4):
            repeated.note("found", [made[at] for at in given])
        some = [others[at] for at in given]
        some[last] = some[last].clone()
        is_alone = given.count(given[last]) == 1
        assert repeated.call(some) == ("found" if is_alone else None)


def test_scratch_stands_behind_what_is_kept_and_what_is_not_there() -> None:
    """Kernels find tensors by their places: inputs, results, all optional ones, scratch memory, None."""
    launched = list[list[Any]]()
    call = SimpleNamespace(
        input_names=("q",), written_names=("out o",), extras=("lse", "count"), allocate=allocate
    )
    f32 = torch.float32
    o, lse, scratch = ((2, 3), (3, 1), f32), ((4,), (1,), f32), ((5,), (1,), f32)
    again = make_again(call, ((o,), (scratch,), (SimpleNamespace(run=launched.append),)), (lse,), (0, 1))
    assert again is not None
    q = torch.zeros(2, 3)
    found, needed = again((q,))
    (tensors,) = launched
    assert [None if x is None else tuple(x.shape) for x in tensors] == [
        (2, 3),
        (2, 3),
        (4,),
        None,
        (5,),
        None,
    ]
    assert (found is tensors[1], needed[0] is tensors[1], needed[1] is tensors[2]) == (True, True, True)


def test_a_repeated_call_writes_over_no_input() -> None:
    call = SimpleNamespace(input_names=("q",), written_names=("out o",), extras=(), allocate=allocate)
    layout = ((2, 3), (3, 1), torch.float32)
    again = make_again(call, ((layout,), (), (SimpleNamespace(run=lambda tensors: None),)), ())
    assert again is not None
    q = torch.zeros(2, 3)
    assert again((q,), out := torch.empty(2, 3)) is out
    with pytest.raises(
        ValueError, match=r"^out o: expected memory of its own, got elements that are those of q"
    ):
        again((q,), q)


def test_nothing_is_known_after_forgetting(repeated: Repeated[str]) -> None:
    repeated.forget()
    assert repeated.call(tensors()) is None
