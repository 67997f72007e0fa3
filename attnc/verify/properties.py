"""What must hold between runs of one module, whatever the reference says.

A property changes the inputs of a case in a way whose effect on the outputs is known: bit for bit, or within
the sum of both error bounds. Each says which attentions it applies to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from attnc.expr.nodes import Dim
from attnc.model.attention import Attention
from attnc.model.tensors import DType, Role, Tensor
from attnc.reference import Bools, empty_outputs, heads, softmax, to_arrays
from attnc.verify.check import Subject, same_bits
from attnc.verify.gradient_properties import gradient_violations
from attnc.verify.problem import TORCH, Value, build
from attnc.verify.strategies import Case, all_dims, size
from attnc.verify.symmetries import (
    has_values,
    ignores_key_order,
    is_dense,
    is_grouped,
    only_addresses,
    sized_axes,
)
from attnc.verify.tolerance import Expected, expect, to_float64

Inputs: TypeAlias = Mapping[str, Value]
Outputs: TypeAlias = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """name; applies: to which attentions; holds: None, or what is wrong, for the inputs of a case and its
    outputs.
    """

    name: str
    applies: Callable[[Attention], bool]
    holds: Callable[[_Run], str | None]


@dataclass(frozen=True, slots=True)
class _Run:
    """A case that has been run: its dense inputs, and its outputs."""

    subject: Subject
    case: Case
    inputs: Inputs
    outputs: Outputs

    @property
    def attention(self) -> Attention:
        return self.subject.variant.attention

    def again(self, inputs: Inputs, config: int | None = None) -> Outputs:
        """The outputs for other inputs, or of another config."""
        return _outputs(self.subject, inputs, self.case.config if config is None else config)

    def tensor(self, name: str) -> torch.Tensor:
        value = self.inputs[name]
        assert isinstance(value, torch.Tensor)
        return value


def violations(subject: Subject, case: Case) -> Iterator[str]:
    """`name: what is wrong` of every property that the module, or its gradients, violate on this case,
    without its special value.
    """
    case = replace(case, layouts={}, special="none")
    inputs = build(subject.variant.attention, case, device=subject.device).inputs
    run = _Run(subject, case, inputs, _outputs(subject, inputs, case.config))
    for rule in PROPERTIES:
        if rule.applies(run.attention) and (message := rule.holds(run)) is not None:
            yield f"{rule.name}: {message}"
    yield from gradient_violations(subject, case)


def _outputs(subject: Subject, inputs: Inputs, config: int) -> Outputs:
    attention = subject.variant.attention
    shapes = {
        name: array.shape for name, array in empty_outputs(attention, to_arrays(attention, inputs)).items()
    }
    outputs = {
        t.name: torch.full(shapes[t.name], torch.nan, dtype=TORCH[DType(t.dtype)], device=subject.device)
        for t in attention.outputs
    }
    subject.run(inputs, outputs, config)
    return outputs


def _unequal(left: Outputs, right: Outputs) -> str | None:
    """Which output differs in a bit."""
    for name in left:
        if not same_bits(left[name], right[name]):
            return f"'{name}' differs in {int((left[name] != right[name]).sum())} elements"
    return None


# --- bit for bit


def _runs_agree(run: _Run) -> str | None:
    return _unequal(run.outputs, run.again(run.inputs))


def _values_scale(run: _Run) -> str | None:
    """2v gives 2o and the same lse: nothing rounds differently, short of overflow and of subnormals."""
    v, o = run.tensor("v"), run.outputs["o"]
    if v.numel() and v.abs().max() > 2.0**14:
        return None
    scaled = run.again({**run.inputs, "v": v * 2})
    normal = o.abs() > 2.0**-12
    doubled = torch.where(normal, o * 2, 0.0)
    return _unequal({**run.outputs, "o": doubled}, {**scaled, "o": torch.where(normal, scaled["o"], 0.0)})


def _batches_permute(run: _Run) -> str | None:
    order = list(range(run.case.dims.get("B", 1)))[::-1]
    return _permuted(run, lambda tensor: [(axis, order) for axis in sized_axes(tensor, run.attention.batch)])


def _heads_permute(run: _Run) -> str | None:
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


def _permuted(run: _Run, orders: Callable[[Tensor], list[tuple[int, list[int]]]]) -> str | None:
    def apply(tensor: Tensor, value: Value) -> Value:
        for axis, order in orders(tensor):
            assert isinstance(value, torch.Tensor)
            value = value.index_select(axis, torch.tensor(order, dtype=torch.int64, device=value.device))
        return value

    inputs = {t.name: apply(t, run.inputs[t.name]) for t in run.attention.inputs}
    expected = {t.name: apply(t, run.outputs[t.name]) for t in run.attention.outputs}
    return _unequal({k: v for k, v in expected.items() if isinstance(v, torch.Tensor)}, run.again(inputs))


def _groups_equal_repeated_heads(run: _Run) -> str | None:
    """Grouped queries equal the same queries with a K/V head of their own, where the plan is the same.

    A kernel that picks the number of its shares picks another for more KV heads.
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


def _masked_keys_are_invisible(run: _Run) -> str | None:
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


def _blind_rows(run: _Run) -> tuple[list[int], dict[str, Bools]]:
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


# --- within the bound


def _visible_keys_count(run: _Run) -> str | None:
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


def _keys_permute(run: _Run) -> str | None:
    """Where neither mask nor score asks for positions, the order of the keys is immaterial."""
    count = run.case.dims.get("N", 0)
    order = torch.from_numpy(np.random.default_rng(run.case.seed).permutation(count))
    inputs = dict(run.inputs)
    for tensor in (run.attention.k, run.attention.v):
        axis = tensor.axis(Role.KEY)
        assert axis is not None
        inputs[tensor.name] = run.tensor(tensor.name).index_select(axis, order.to(run.subject.device))
    expected = expect(run.attention, run.inputs, run.subject.bound)
    return _too_far(expected, run.outputs, run.again(inputs))


def _prefixes_agree(run: _Run) -> str | None:
    """Where no earlier row sees the last key, it can go together with the last query."""
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


def _configs_agree(run: _Run) -> str | None:
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


PROPERTIES: tuple[Property, ...] = (
    Property(name="run to run", applies=lambda attention: True, holds=_runs_agree),
    Property(name="configs agree", applies=lambda attention: True, holds=_configs_agree),
    Property(name="2v gives 2o", applies=has_values, holds=_values_scale),
    Property(
        name="batches permute",
        applies=lambda attention: is_dense(attention) and only_addresses(attention, "b", attention.batch),
        holds=_batches_permute,
    ),
    Property(
        name="heads permute",
        applies=lambda attention: is_dense(attention) and only_addresses(attention, "h", attention.heads_q),
        holds=_heads_permute,
    ),
    Property(
        name="groups equal repeated heads",
        applies=lambda attention: is_dense(attention) and is_grouped(attention),
        holds=_groups_equal_repeated_heads,
    ),
    Property(name="masked keys are invisible", applies=is_dense, holds=_masked_keys_are_invisible),
    Property(name="visible keys count", applies=is_dense, holds=_visible_keys_count),
    Property(
        name="keys permute",
        applies=lambda attention: is_dense(attention) and ignores_key_order(attention),
        holds=_keys_permute,
    ),
    Property(
        name="prefixes agree",
        applies=lambda attention: is_dense(attention) and not attention.lengths,
        holds=_prefixes_agree,
    ),
)
