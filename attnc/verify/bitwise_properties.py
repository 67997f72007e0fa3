"""Properties that hold bit for bit: the same numbers take the same road, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from attnc.model.tensors import Role, Tensor
from attnc.reference import heads
from attnc.reference_arrays import Bools, empty_outputs, to_arrays
from attnc.verify.check import same_bits
from attnc.verify.problem import Value
from attnc.verify.rerun import Outputs, Run
from attnc.verify.strategies import all_dims, size
from attnc.verify.symmetries import sized_axes


def _unequal(left: Outputs, right: Outputs) -> str | None:
    """Which output differs in a bit."""
    for name in left:
        if not same_bits(left[name], right[name]):
            return f"'{name}' differs in {int((left[name] != right[name]).sum())} elements"
    return None


def runs_agree(run: Run) -> str | None:
    return _unequal(run.outputs, run.again(run.inputs))


def values_scale(run: Run) -> str | None:
    """2v gives 2o and the same lse: nothing rounds differently, short of overflow and of subnormals."""
    v, o = run.tensor("v"), run.outputs["o"]
    if v.numel() and v.abs().max() > 2.0**14:
        return None
    scaled = run.again({**run.inputs, "v": v * 2})
    normal = o.abs() > 2.0**-12
    doubled = torch.where(normal, o * 2, 0.0)
    return _unequal({**run.outputs, "o": doubled}, {**scaled, "o": torch.where(normal, scaled["o"], 0.0)})


def batches_permute(run: Run) -> str | None:
    order = list(range(run.case.dims.get("B", 1)))[::-1]
    return _permuted(run, lambda tensor: [(axis, order) for axis in sized_axes(tensor, run.attention.batch)])


def heads_permute(run: Run) -> str | None:
    dims = all_dims(run.attention, run.case.dims)
    count, all_heads = size(run.attention.heads_kv, dims), size(run.attention.heads_q, dims)
    group = all_heads // max(count, 1)
    order = list(range(count))[::-1]
    blocks = [kv * group + member for kv in order for member in range(group)]

    def orders(tensor: Tensor) -> list[tuple[int, list[int]]]:
        if run.attention.heads_q == run.attention.heads_kv:
            return [(axis, order) for axis in sized_axes(tensor, run.attention.heads_kv)]
        of_keys = [(axis, order) for axis in sized_axes(tensor, run.attention.heads_kv)]
        return of_keys + [(axis, blocks) for axis in sized_axes(tensor, run.attention.heads_q)]

    return _permuted(run, orders)


def _permuted(run: Run, orders: Callable[[Tensor], list[tuple[int, list[int]]]]) -> str | None:
    def apply(tensor: Tensor, value: Value) -> Value:
        for axis, order in orders(tensor):
            assert isinstance(value, torch.Tensor)
            value = value.index_select(axis, torch.tensor(order, dtype=torch.int64, device=value.device))
        return value

    inputs = {t.name: apply(t, run.inputs[t.name]) for t in run.attention.inputs}
    expected = {t.name: apply(t, run.outputs[t.name]) for t in run.attention.outputs}
    return _unequal({k: v for k, v in expected.items() if isinstance(v, torch.Tensor)}, run.again(inputs))


def groups_equal_repeated_heads(run: Run) -> str | None:
    """Grouped queries equal the same queries with a K/V head of their own, where the plan is the same.

    A kernel that picks the number of its splits picks another for more KV heads.
    """
    if run.subject.split:
        return None
    group = run.case.dims["G"]
    inputs = dict(run.inputs)
    for tensor in (run.attention.k, run.attention.v):
        axis = tensor.axis(Role.HEAD)
        assert axis is not None
        inputs[tensor.name] = run.tensor(tensor.name).repeat_interleave(group, axis)
    return _unequal(run.outputs, run.again(inputs))


def masked_keys_are_invisible(run: Run) -> str | None:
    """K of some keys becomes NaN and V junk: rows that do not see them stay as they are, bit for bit."""
    chosen, blind = _blind_rows(run)
    if not len(chosen):
        return None
    inputs = dict(run.inputs)
    for tensor, junk in ((run.attention.k, torch.nan), (run.attention.v, 1e4)):
        axis = tensor.axis(Role.KEY)
        assert axis is not None
        changed = run.tensor(tensor.name).clone()
        changed.index_fill_(axis, torch.tensor(chosen, device=changed.device), junk)
        inputs[tensor.name] = changed
    outputs = run.again(inputs)
    for name, rows in blind.items():
        where = torch.from_numpy(rows).to(outputs[name].device)
        if not same_bits(outputs[name][where], run.outputs[name][where]):
            return f"'{name}' of rows that do not see keys {chosen[:4]} depends on them"
    return None


def _blind_rows(run: Run) -> tuple[list[int], dict[str, Bools]]:
    """Some keys, and for each output where its rows see none of them."""
    arrays = to_arrays(run.attention, run.inputs)
    rng = np.random.default_rng(run.case.seed)
    count = run.case.dims.get("N", 0)
    chosen = sorted({int(j) for j in rng.integers(0, count, 3)}) if count else []
    blind = empty_outputs(run.attention, arrays)
    for array in blind.values():
        array[...] = 0
    for head in heads(run.attention, arrays):
        seen = head.visible[:, [j for j in chosen if j < head.shape[1]]]
        for tensor in run.attention.outputs:
            head.place(tensor, blind)[...] = ~seen.any(axis=1, keepdims=True)
    return chosen, {name: array.astype(np.bool_) for name, array in blind.items()}
