"""Properties of several runs of one module that hold independently of the reference.

A property changes the inputs of a case in a way whose effect on the outputs is known: bit for bit, or within
the sum of both error bounds. Each says which attentions it applies to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from attnc.expr.nodes import Const, Dim, Expr, Index, Load, children, uses, walk
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.tensors import Role, Tensor
from attnc.plan import ir
from attnc.plan.ir.kernel import UnifiedMax
from attnc.plan.softmax import LOG2E
from attnc.reference import Bools, Floats, Head, empty_outputs, heads, softmax, to_arrays
from attnc.verify.calls import call_violations
from attnc.verify.case import Case
from attnc.verify.check import same_bits
from attnc.verify.cuda_waits import wait_violations
from attnc.verify.early_launches import early_violations
from attnc.verify.gradient_properties import GRADIENT_PROPERTIES, gradient_violations
from attnc.verify.narrow import equals_16_bits, is_narrow
from attnc.verify.offsets import offset_violations
from attnc.verify.problem import Value, build
from attnc.verify.rerun import FinishedRun, Outputs, excluded_keys_are_invisible, may_exclude
from attnc.verify.running_error import RunningError
from attnc.verify.storage import alter, lengths_for
from attnc.verify.strategies import all_dims, free_dims, size
from attnc.verify.subject import Subject
from attnc.verify.tolerance import Expected, dot_products, expect, to_float64
from attnc.verify.verdict import apart

# --- which symmetries an attention has ----------------------------------------------------------------------


def is_dense(attention: Attention) -> bool:
    """Returns whether q, k and v are ordinary tensors, so that an axis can be permuted or cut."""
    return all(tensor.storage.is_plain for tensor in (attention.q, attention.k, attention.v))


def has_values(attention: Attention) -> bool:
    """Returns whether doubling v doubles o: v has its own memory, its type holds twice most of its numbers,
    and o is linear in it.
    """
    return (
        attention.epilogue is None
        and not attention.v.storage.is_part
        and not DType(attention.v.dtype).is_narrow
    )


def moves_values(attention: Attention) -> bool:
    """Returns whether a value can become larger by 64 or nearly so, and o with it."""
    is_plain = attention.epilogue is None and attention.softmax.form == "softmax"
    is_plain = is_plain and not attention.softmax.scales_columns
    return is_plain and is_dense(attention) and not DType(attention.v.dtype).is_narrow_integer


def sized_axes(tensor: Tensor, extent: Expr) -> list[int]:
    """Axes of this size, in the words of the spec."""
    return [axis for axis, expr in enumerate(tensor.shape) if expr == extent]


def _expressions(attention: Attention) -> tuple[Expr, ...]:
    return (*attention.expressions, *attention.lengths.values())


def _addresses(attention: Attention) -> Iterator[tuple[Expr, Expr]]:
    for expr in _expressions(attention):
        for node in walk(expr):
            if isinstance(node, Load):
                yield from zip(node.indices, node.extents, strict=True)


def _positions(expr: Expr) -> Iterator[str]:
    if isinstance(expr, Index):
        yield expr.name
    if not isinstance(expr, Load):
        for child in children(expr):
            yield from _positions(child)


def only_addresses(attention: Attention, name: str, *extents: Expr) -> bool:
    """Returns whether the index only picks elements of axes of the first of these sizes, and nothing else
    picks elements of axes of any of them, so that permuting the axes permutes the outputs.
    """
    if attention.softmax.dropout is not None:
        return False
    if any(name in _positions(expr) for expr in _expressions(attention)):
        return False
    at, axes = (Index(name), extents[0]), {extent for extent in extents if extent != Const(1)}
    return not any(
        (name in uses(index) or size_ in axes) and (index, size_) != at
        for index, size_ in _addresses(attention)
    )


def ignores_the_last(attention: Attention) -> bool:
    """Returns whether rows that do not see the last key depend neither on it nor on how many keys and queries
    there are: they count from each other, and read inputs at their own positions alone.
    """
    sizes: set[Expr] = {Dim("M"), Dim("N")}
    at_home = {(Index("q_idx"), Dim("M")), (Index("q_pos"), Dim("N")), (Index("kv_idx"), Dim("N"))}
    made_of = {node for tensor in attention.inputs for size_ in tensor.shape for node in walk(size_)
               if size_ not in sizes}  # fmt: skip
    counted = made_of.union(*(walk(expr) for expr in _expressions(attention)))
    return not sizes & counted and all(at in at_home or at[1] not in sizes for at in _addresses(attention))


def ignores_key_order(attention: Attention) -> bool:
    """Returns whether nothing asks for the positions of keys, so that their order is immaterial."""
    asked = {name for expr in _expressions(attention) for name in uses(expr)}
    ordered = attention.softmax.dropout is not None or attention.softmax.form == "stick_breaking"
    return "kv_idx" not in asked and not ordered and not attention.lengths


def is_grouped(attention: Attention) -> bool:
    """Returns whether query heads share K/V heads by a factor of run time, and no other input has an axis of
    K/V heads.
    """
    extents = {expr for tensor in attention.extras for expr in tensor.shape}
    names = free_dims(attention)
    return "G" in names and "Hkv" in names and attention.heads_kv not in extents


# --- bit for bit --------------------------------------------------------------------------------------------


def _unequal(left: Outputs, right: Outputs) -> str | None:
    for name in left:
        if not same_bits(left[name], right[name]):
            return f"'{name}' differs in {int((left[name] != right[name]).sum())} elements"
    return None


def runs_agree(run: FinishedRun) -> str | None:
    """Runs give the same bits every time."""
    return _unequal(run.outputs, run.again(run.inputs))


def values_scale(run: FinishedRun) -> str | None:
    """Checks that 2v gives 2o and the same lse: nothing rounds differently, short of overflow and of
    subnormals.
    """
    v, o = run.tensor("v"), run.outputs["o"]
    if v.numel() and v.abs().max() > 2.0**14:
        return None
    scaled = run.again({**run.inputs, "v": v * 2})
    normal = o.abs() > 2.0**-12
    doubled = torch.where(normal, o * 2, 0.0)
    return _unequal({**run.outputs, "o": doubled}, {**scaled, "o": torch.where(normal, scaled["o"], 0.0)})


def batches_permute(run: FinishedRun) -> str | None:
    """Sequences do not see each other: they can come in any order."""
    order = list(range(run.case.dims.get("B", 1)))[::-1]
    return _check_permuted(
        run, lambda tensor: [(axis, order) for axis in sized_axes(tensor, run.attention.batch)]
    )


def heads_permute(run: FinishedRun) -> str | None:
    """Checks that heads do not see each other: they can come in any order."""
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

    return _check_permuted(run, orders)


def _check_permuted(run: FinishedRun, orders: Callable[[Tensor], list[tuple[int, list[int]]]]) -> str | None:
    def apply(tensor: Tensor, value: Value) -> Value:
        for axis, order in orders(tensor):
            assert isinstance(value, torch.Tensor)
            value = value.index_select(axis, torch.tensor(order, dtype=torch.int64, device=value.device))
        return value

    inputs = {t.name: apply(t, run.inputs[t.name]) for t in run.attention.inputs}
    expected = {t.name: apply(t, run.outputs[t.name]) for t in run.attention.outputs}
    return _unequal({k: v for k, v in expected.items() if isinstance(v, torch.Tensor)}, run.again(inputs))


def groups_equal_repeated_heads(run: FinishedRun) -> str | None:
    """Checks that grouped queries equal the same queries with a K/V head of their own, where the plan is the
    same.

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


def masked_keys_are_invisible(run: FinishedRun) -> str | None:
    """Makes K of some keys NaN and V junk, and checks that rows that do not see them stay as they are, bit
    for bit.
    """
    chosen, blind = _blind_rows(run)
    if not len(chosen):
        return None
    inputs = dict(run.inputs)
    for tensor, junk in ((run.attention.k, torch.nan), (run.attention.v, 1e4)):
        axis = tensor.axis(Role.KEY)
        assert axis is not None
        value = run.tensor(tensor.name)
        places = torch.tensor(chosen, device=value.device)
        inputs[tensor.name] = alter(value, partial(_fill_at, axis, places, junk))
    return _see(run, inputs, chosen, blind)


def masked_scales_are_invisible(run: FinishedRun) -> str | None:
    """Makes scales of v of some keys NaN, and checks that rows that do not see them stay as they are, bit for
    bit.
    """
    chosen, blind = _blind_rows(run)
    inputs = dict(run.inputs)
    for name, axis in _scales_of_keys(run.attention):
        value = run.tensor(name)
        places = torch.tensor([j for j in chosen if j < value.shape[axis]], device=value.device)
        inputs[name] = alter(value, partial(_fill_at, axis, places.long(), torch.nan))
    return _see(run, inputs, chosen, blind) if chosen else None


def _scales_of_keys(attention: Attention) -> list[tuple[str, int]]:
    scale = attention.softmax.v_scale if attention.softmax.scales_keys else None
    others = {
        node.tensor for x in (attention.score, attention.mask) for node in walk(x) if isinstance(node, Load)
    }
    loads = [node for node in ([] if scale is None else walk(scale)) if isinstance(node, Load)]
    return [
        (load.tensor, load.indices.index(Index("kv_idx")))
        for load in loads
        if Index("kv_idx") in load.indices and load.type == "float" and load.tensor not in others
    ]


def _see(
    run: FinishedRun, inputs: Mapping[str, Value], chosen: list[int], blind: Mapping[str, Bools]
) -> str | None:
    outputs = run.again(dict(inputs))
    for name, rows in blind.items():
        where = torch.from_numpy(rows).to(outputs[name].device)
        if not same_bits(outputs[name][where], run.outputs[name][where]):
            return f"'{name}' of rows that do not see keys {chosen[:4]} depends on them"
    return None


def _fill_at(axis: int, places: torch.Tensor, junk: float, values: torch.Tensor) -> torch.Tensor:
    return values.index_fill_(axis, places, junk)


def _blind_rows(run: FinishedRun) -> tuple[list[int], dict[str, Bools]]:
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


# --- within the error bound ---------------------------------------------------------------------------------


def visible_keys_count(run: FinishedRun) -> str | None:
    """Moves V of the key that weighs most in some row, and checks that rows in which it weighs most move with
    it.
    """
    arrays = to_arrays(run.attention, run.inputs)
    pieces = [head for head in heads(run.attention, arrays) if min(head.shape)]
    if not pieces or run.attention.softmax.dropout is not None:
        return None
    last = pieces[0].scores[-1]
    chosen = int(np.argmax(np.where(np.isnan(last), -np.inf, last)))
    heavy, scale = (empty_outputs(run.attention, arrays)["o"] * 0 for _ in range(2))
    for head in pieces:
        if chosen >= head.shape[1]:
            continue
        _, lse = softmax(head)
        with np.errstate(invalid="ignore"):
            head.place(run.attention.o, {"o": heavy})[...] = np.exp(head.scores[:, chosen] - lse)[:, None]
            factor = head.v_scale * np.broadcast_to(head.key_scale, head.shape)[:, chosen, None]
        head.place(run.attention.o, {"o": scale})[...] = factor
    axis = run.attention.v.axis(Role.KEY)
    assert axis is not None
    inputs = {**run.inputs, "v": alter(run.tensor("v"), partial(_move, axis, chosen))}
    outputs = run.again(inputs)
    known = [expect(run.attention, given, run.subject.bound)["o"] for given in (run.inputs, inputs)]
    with np.errstate(invalid="ignore"):
        change = (to_float64(outputs["o"]) - to_float64(run.outputs["o"])) * np.sign(scale)
        least = 16 * np.abs(scale)  # half of what it is at least, since either run may be off
        sure = (known[0].allowed + known[1].allowed <= least) & ~(known[0].open | known[1].open)
    deaf = int((sure & (heavy > 0.5) & ~(change >= least)).sum())
    return f"{deaf} elements ignore key {chosen}" if deaf else None


def _move(axis: int, place: int, values: torch.Tensor) -> torch.Tensor:
    values.select(axis, place).add_(64.0)
    return values


def keys_permute(run: FinishedRun) -> str | None:
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


def prefixes_agree(run: FinishedRun) -> str | None:
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


def configs_agree(run: FinishedRun) -> str | None:
    """Checks that every config computes the same, within twice the bound."""
    expected = expect(run.attention, run.inputs, run.subject.bound)
    configs, count = [*run.subject.limits().tiles], run.subject.compared
    for config in configs if count is None else configs[-count:]:
        outputs = run.again(run.inputs, config)
        message = _too_far(expected, run.outputs, outputs)
        if message is not None:
            return f"config {config}: {message}"
    return None


def _too_far(expected: Mapping[str, Expected], left: Outputs, right: Outputs) -> str | None:
    for name, want in expected.items():
        wrong = apart((want, want), to_float64(left[name]), to_float64(right[name]))
        if wrong.any():
            return f"'{name}' differs in {int(wrong.sum())} elements"
    return None


# --- the counter that bounds of a unified maximum are tuned by, against the scores --------------------------
#
# With all keys in one split, a program does its rows again exactly when the largest exponent of one of them
# is outside the bounds. A row that sees no key has none.

#: Rows that see different numbers of keys, and rows that may see none.
_SIZES = ((5, 7), (9, 5))
#: Within the bounds of most plans, below them, and above.
_LOGITS = ("random", "low", "huge")
#: How far from a bound an exponent must be, in parts of it, for a program to be sure of the side.
_MARGIN = 2.0**-7


def has_fallback(subject: Subject) -> bool:
    """Returns whether a module computes again what it had guessed the maximum of."""
    kernel = None if subject.plan is None else subject.plan.kernel
    return isinstance(kernel, ir.Decode) and kernel.unified is not None and kernel.unified.fallback


def fallback_violations(subject: Subject) -> Iterator[str]:
    """Yields `fallbacks: what is wrong` of the counter; none for a module without one."""
    kernel = None if subject.plan is None else subject.plan.kernel
    if not has_fallback(subject) or not isinstance(kernel, ir.Decode):
        return
    config = next((c for c in subject.configs if getattr(c, "splits", 1) == 0), subject.configs[0])
    if hasattr(config, "split_size"):
        return
    if hasattr(config, "splits"):
        config = config._replace(splits=1)
    attention = subject.variant.attention
    lengths = "full" if "full" in lengths_for(attention) else "drawn"
    for rows, keys in _SIZES:
        few = {"M": rows, "N": keys, "B": 2, "H": 2, "Hkv": 2, "G": 3}
        dims = {name: few.get(name, 16) for name in free_dims(attention)}
        for logits in _LOGITS:
            inputs = build(
                attention, Case(dims=dims, logits=logits, lengths=lengths), device=subject.device
            ).inputs
            counter = torch.zeros(1, dtype=torch.int32, device=subject.device)
            with torch.no_grad():
                subject.function(*inputs.values(), config=config, fallbacks=counter)
            found, (least, most) = counter.item(), _tiles(subject, kernel, config.BLOCK_M, inputs)
            if not least <= found <= most:
                expected = least if least == most else f"{least} to {most}"
                yield f"fallbacks: {found} are counted of {logits} scores, expected {expected}"


def _tiles(subject: Subject, kernel: ir.Decode, block_m: int, inputs: Mapping[str, Value]) -> tuple[int, int]:
    attention, unified = subject.variant.attention, kernel.unified
    assert unified is not None
    sure: set[tuple[int, int, int]] = set()
    possible: set[tuple[int, int, int]] = set()
    for head in heads(attention, to_arrays(attention, inputs)):
        group = 1 if kernel.pack is None else head.dims["H"] // head.dims["Hkv"]
        highest = head.scores.max(axis=1, initial=-np.inf) * LOG2E - unified.phi
        margins = _MARGIN * np.abs(highest) + LOG2E * _largest_error(head, subject.bound)
        for row, (exponent, margin) in enumerate(zip(highest, margins, strict=True)):
            place = (head.first + row) * group + head.h % group
            tile = (head.b, head.h // group, place // block_m)
            if exponent == -np.inf:
                continue
            if np.isnan(exponent + margin) or _is_outside(unified, exponent, -margin):
                possible.add(tile)
            if _is_outside(unified, exponent, margin):
                sure.add(tile)
    return len(sure), len(possible)


def _largest_error(head: Head, bound: ir.ErrorBound) -> Floats:
    dot = dot_products(head, bound)[1]
    error = RunningError.of(head, dot, bound).analyse(head.attention.score).error
    return np.asarray(np.where(head.visible, error, 0.0).max(axis=1, initial=0.0))


def _is_outside(unified: UnifiedMax, exponent: float, margin: float) -> bool:
    return exponent > unified.high + margin or exponent < unified.low - margin


# --- all of them --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """name; applies: to which attentions; holds: None, or what is wrong, for the inputs of a case and its
    outputs.
    """

    name: str
    applies: Callable[[Attention], bool]
    holds: Callable[[FinishedRun], str | None]


def violations(subject: Subject, case: Case, only: str = "") -> Iterator[str]:
    """Yields `name: what is wrong` of every property that the module, its gradients or its host code violate
    on this case, without its special value. only: the name of the one to look at.
    """
    yield from result_violations(subject, case, only)
    if only in ("", "calls"):
        yield from call_violations(subject)
    if only in ("", "offsets"):
        yield from offset_violations(subject)
    if only in ("", "waits"):
        yield from wait_violations(subject)
        yield from early_violations(subject)


def result_violations(subject: Subject, case: Case, only: str = "") -> Iterator[str]:
    """Yields the findings of `violations` on the kernels' results, and none on host code."""
    case = replace(case, layouts={}, special="none")
    wanted = [rule for rule in PROPERTIES if only in ("", rule.name)]
    if wanted:
        run = FinishedRun.of(subject, case)
        for rule in wanted:
            if rule.applies(run.attention) and (message := rule.holds(run)) is not None:
                yield f"{rule.name}: {message}"
    if not only or not wanted:
        yield from gradient_violations(subject, case, only)
    if only in ("", "fallbacks"):
        yield from fallback_violations(subject)


def rule_names() -> frozenset[str]:
    """Returns the words with which messages of `violations` begin."""
    properties = {rule.name for rule in PROPERTIES} | {rule.name for rule in GRADIENT_PROPERTIES}
    return frozenset(properties | {"fallbacks", "calls", "offsets", "waits"})


PROPERTIES: tuple[Property, ...] = (
    Property(name="run to run", applies=lambda attention: True, holds=runs_agree),
    Property(name="configs agree", applies=lambda attention: True, holds=configs_agree),
    Property(name="8 bits equal 16", applies=is_narrow, holds=equals_16_bits),
    Property(name="2v gives 2o", applies=has_values, holds=values_scale),
    Property(
        name="batches permute",
        applies=lambda attention: is_dense(attention) and only_addresses(attention, "b", attention.batch),
        holds=batches_permute,
    ),
    Property(
        name="heads permute",
        applies=lambda attention: (
            is_dense(attention) and only_addresses(attention, "h", attention.heads_q, attention.heads_kv)
        ),
        holds=heads_permute,
    ),
    Property(
        name="groups equal repeated heads",
        applies=lambda attention: is_dense(attention) and is_grouped(attention),
        holds=groups_equal_repeated_heads,
    ),
    Property(name="masked keys are invisible", applies=is_dense, holds=masked_keys_are_invisible),
    Property(
        name="masked scales are invisible",
        applies=lambda attention: bool(_scales_of_keys(attention)),
        holds=masked_scales_are_invisible,
    ),
    Property(name="excluded keys are invisible", applies=may_exclude, holds=excluded_keys_are_invisible),
    Property(name="visible keys count", applies=moves_values, holds=visible_keys_count),
    Property(
        name="keys permute",
        applies=lambda attention: is_dense(attention) and ignores_key_order(attention),
        holds=keys_permute,
    ),
    Property(
        name="prefixes agree",
        applies=lambda attention: (
            is_dense(attention) and not attention.lengths and ignores_the_last(attention)
        ),
        holds=prefixes_agree,
    ),
)
