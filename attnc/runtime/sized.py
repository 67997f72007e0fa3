"""An attention at given sizes on this GPU, in as many copies as push each other out of the L2 cache."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from attnc.model.tensors import Role, Tensor
from attnc.plan import ir
from attnc.runtime.graphs import replayed
from attnc.runtime.loader import load_module
from attnc.runtime.timing import Launch
from attnc.runtime.trial import problem_for
from attnc.tuned.choices import Choice

#: Bytes of K and V that are read between two readings of one, and most copies.
_COLD, _MOST = 256 << 20, 16


class Sized:
    """Inputs of an attention with M query rows and N keys in each of B sequences; most: copies of them."""

    def __init__(self, module: ir.Module, M: int, N: int, B: int, most: int = _MOST) -> None:
        first = problem_for(module, N, sizes={"M": M, "B": B})
        named = {arg.tensor.name: at for at, arg in enumerate(module.args)}
        q, k = (first.tensors[named[name]] for name in "qk")
        self.copies = max(1, min(most, _COLD // (2 * k.numel() * k.element_size())))
        clones = [tuple(tensor.clone() for tensor in first.tensors) for _ in range(self.copies - 1)]
        self.problems = [first.tensors, *clones]
        attention = module.variant.attention
        self.heads, self.kv_heads = _heads(attention.q, q), _heads(attention.k, k)
        keys = k.shape[attention.k.axis(Role.KEY) or 0]
        if table := attention.k.storage.table:
            keys = first.tensors[named[table]].shape[1] * attention.k.storage.rows_of_page
        rows = q.shape[attention.q.axis(Role.QUERY) or 0]
        sequences = 1 if attention.q.axis(Role.BATCH) is None else q.shape[0]
        #: What a call is chosen by: M, N, and batch times heads; of packed sequences the rows of all.
        self.seen = rows, keys, sequences * self.heads

    def graph(self, module: ir.Module, choices: Iterable[Choice]) -> Launch:
        """A graph of one call for each copy, with the config that the module takes by itself."""
        loaded: Any = load_module(module, choices)
        function = getattr(loaded, module.variant.attention.name)
        with torch.no_grad():
            return replayed([partial(function, *tensors) for tensors in self.problems])

    def with_gradients(self, module: ir.Module, choices: Iterable[Choice]) -> Launch:
        """A call and its backward by autograd, on one copy."""
        attention, loaded = module.variant.attention, load_module(module, choices)
        function: Any = getattr(loaded, attention.name)
        names = (arg.tensor.name for arg in module.args)
        inputs = [
            x.clone().requires_grad_() if name in attention.grads else x
            for name, x in zip(names, self.problems[0], strict=True)
        ]
        wanted = [x for x in inputs if x.requires_grad]
        do = torch.randn_like(_first(function(*inputs)))
        return lambda: torch.autograd.grad(_first(function(*inputs)), wanted, do)


def _first(found: Any) -> torch.Tensor:
    """o among the results."""
    o: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return o


def _heads(tensor: Tensor, values: torch.Tensor) -> int:
    """How many heads the values have: one where the tensor has no axis of heads."""
    axis = tensor.axis(Role.HEAD)
    return 1 if axis is None else int(values.shape[axis])
