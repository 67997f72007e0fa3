"""Properties that hold within the error bound, where another order of additions rounds otherwise."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from attnc.expr.nodes import Dim
from attnc.model.tensors import Role
from attnc.reference import heads, softmax
from attnc.reference_arrays import empty_outputs, to_arrays
from attnc.verify.rerun import Outputs, Run
from attnc.verify.symmetries import sized_axes
from attnc.verify.tolerance import expect
from attnc.verify.verdict import Expected, to_float64


def visible_keys_count(run: Run) -> str | None:
    """V of the key that weighs most in some row moves: rows in which it weighs most move with it."""
    arrays = to_arrays(run.attention, run.inputs)
    pieces = [head for head in heads(run.attention, arrays) if min(head.shape)]
    if not pieces or run.attention.softmax.dropout is not None:
        return None
    chosen = int(np.argmax(pieces[0].scores[-1]))
    heavy = empty_outputs(run.attention, arrays)["o"] * 0
    for head in pieces:
        if chosen < head.shape[1]:
            _, lse = softmax(head)
            with np.errstate(invalid="ignore"):
                head.place(run.attention.o, {"o": heavy})[...] = np.exp(head.scores[:, chosen] - lse)[:, None]
    axis = run.attention.v.axis(Role.KEY)
    assert axis is not None
    moved = run.tensor("v").clone()
    moved.select(axis, chosen).add_(64.0)
    outputs = run.again({**run.inputs, "v": moved})
    change = to_float64(outputs["o"]) - to_float64(run.outputs["o"])
    deaf = int(((heavy > 0.5) & (change < 16)).sum())
    return f"{deaf} elements ignore key {chosen}" if deaf else None


def keys_permute(run: Run) -> str | None:
    """Checks that the order of the keys is immaterial where neither mask nor score asks for positions."""
    count = run.case.dims.get("N", 0)
    order = torch.from_numpy(np.random.default_rng(run.case.seed).permutation(count))
    inputs = dict(run.inputs)
    for tensor in (run.attention.k, run.attention.v):
        axis = tensor.axis(Role.KEY)
        assert axis is not None
        inputs[tensor.name] = run.tensor(tensor.name).index_select(axis, order.to(run.subject.device))
    expected = expect(run.attention, run.inputs, run.subject.bound)
    return _too_far(expected, run.outputs, run.again(inputs))


def prefixes_agree(run: Run) -> str | None:
    """Checks that the last key can go together with the last query where no earlier row sees it."""
    if min(run.case.dims.get("M", 0), run.case.dims.get("N", 0)) < 2:
        return None
    arrays = to_arrays(run.attention, run.inputs)
    last = run.case.dims["M"] - 1
    for head in heads(run.attention, arrays):
        if head.visible[: max(last - head.first, 0), -1:].any():
            return None
    inputs, kept = dict(run.inputs), dict(run.outputs)
    for tensor in run.attention.inputs:
        for axis in (*sized_axes(tensor, Dim("M")), *sized_axes(tensor, Dim("N"))):
            value = inputs[tensor.name]
            assert isinstance(value, torch.Tensor)
            inputs[tensor.name] = value.narrow(axis, 0, value.shape[axis] - 1)
    for tensor in run.attention.outputs:
        for axis in sized_axes(tensor, Dim("M")):
            kept[tensor.name] = kept[tensor.name].narrow(axis, 0, last)
    expected = expect(run.attention, inputs, run.subject.bound)
    return _too_far(expected, kept, run.again(inputs))


def configs_agree(run: Run) -> str | None:
    """Every config computes the same, within twice the bound."""
    expected = expect(run.attention, run.inputs, run.subject.bound)
    for config in run.subject.limits().tiles:
        outputs = run.again(run.inputs, config)
        message = _too_far(expected, run.outputs, outputs)
        if message is not None:
            return f"config {config}: {message}"
    return None


def _too_far(expected: Mapping[str, Expected], left: Outputs, right: Outputs) -> str | None:
    """Which output differs by more than two right runs may."""
    for name, want in expected.items():
        a, b = to_float64(left[name]), to_float64(right[name])
        with np.errstate(invalid="ignore"):
            wrong = ~((np.abs(a - b) <= 2 * want.allowed) | (a == b) | np.isnan(a) & np.isnan(b) | want.open)
        if wrong.any():
            return f"'{name}' differs in {int(wrong.sum())} elements"
    return None
