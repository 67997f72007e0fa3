"""Functions inside `torch.compile`, whose sizes and numbers may be symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from typing import Any

import pytest
import torch

from attnc.adapters import transformers
from attnc.compat.flash_attn import flash_attn_func, flash_attn_with_kvcache
from attnc.verify.interpreter import ensure_interpreter
from tests.api.doors import DECODE, DOORS, SPEC, family_of
from tests.by_day import each_by_day

ensure_interpreter()

#: Doors that a graph can hold whole. The others are of engines, which call them outside of graphs.
TRACED = (
    "flex_attention",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_kvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_func, pages",
    "flash_attn_with_kvcache",
    "flash_attn_with_kvcache, pages",
    "flash_attn_with_kvcache, chosen",
    "transformers",
    "merge_state",
    "PagedCache.write",
)


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, tuple | list):
        for part in found:
            yield from _tensors(part)


def _in_graph(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, dynamic=dynamic, fullgraph=True, backend="aot_eager")


def _same(found: Any, expected: Any) -> bool:
    pairs = list(zip(_tensors(found), _tensors(expected), strict=True))
    return bool(pairs) and all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        *each_by_day(((name, True) for name in TRACED), of=18),
        *(pytest.param(name, False, marks=pytest.mark.nightly) for name in TRACED[1:]),
        (TRACED[0], False),
    ],
)
def test_a_graph_of_any_sizes_computes_the_same(name: str, dynamic: bool) -> None:
    door = DOORS[name]
    inside = _in_graph(door.call, dynamic=dynamic)
    assert _same(inside(**door.make()), door.call(**door.make()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("text", [SPEC, DECODE], ids=["prompts", "tokens"])
def test_a_compiled_spec_takes_any_sizes(text: str) -> None:
    family, inside = family_of(text), _in_graph(family_of(text), dynamic=True)
    tensors = DOORS["attnc.compile" if text == SPEC else "attnc.compile, decode"].make()
    tensors = {name: x for name, x in tensors.items() if name not in ("o", "lse")}
    assert _same(inside(**tensors), family(**tensors))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "numbers",
    each_by_day(
        [
            {"softmax_scale": (0.3, 0.4, 0.5)},
            {"softcap": (5.0, 6.0, 7.0)},
            {"window_size": ((3, 0), (4, 1), (5, 2))},
            {"dropout_p": (0.1, 0.2, 0.3)},
        ],
        of=4,
    ),
    ids=lambda numbers: next(iter(numbers)),
)
def test_numbers_may_change_in_a_graph(numbers: dict[str, Iterable[Any]]) -> None:
    ((name, values),) = numbers.items()
    inside = _in_graph(flash_attn_func, dynamic=True)
    for length, value in zip((9, 12, 7), islice(cycle(values), 3), strict=True):
        q, k, v = (torch.randn(2, length, 4, 16).requires_grad_() for _ in range(3))
        torch.manual_seed(0)
        o = inside(q, k, v, **{name: value})
        torch.manual_seed(0)
        expected = flash_attn_func(q, k, v, **{name: value})
        assert torch.equal(o, expected)
        ours, right = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (o, expected))
        assert all(map(torch.equal, ours, right))


def test_a_scale_of_a_module_is_part_of_the_kernel() -> None:
    """Where sizes are symbols, so are floats that a module holds."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cap = 5.0

        def forward(self, x: torch.Tensor) -> Any:
            numbers: dict[str, Any] = {"scaling": self.cap / 20, "softcap": self.cap}
            return transformers.attention(self, x, x, x, None, is_causal=False, **numbers)[0]

    layer = Layer()
    inside = _in_graph(layer, dynamic=True)
    for length in (9, 12):
        x = torch.randn(2, 4, length, 16)
        assert torch.equal(inside(x), layer(x))


def test_a_length_that_grows_is_a_number_of_the_graph() -> None:
    """As in a loop that generates tokens."""
    q, (k, v) = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 32, 4, 16)

    def attend(length: int) -> Any:
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=length)

    inside = _in_graph(attend, dynamic=True)
    for length in (5, 6, 7):
        assert torch.equal(inside(length), attend(length))
