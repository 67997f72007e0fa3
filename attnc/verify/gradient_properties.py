"""Properties of the gradients of one case that hold independently of the reference.

    sum_j dV_j . V_j = sum_i dO_i . O_i       since rowsum(dO * O) = sum_j P dP, dropped or not
    sum_j dV_j       = sum_i dO_i             where the weights of a row that sees a key sum to 1
    sum_i dQ_i . Q_i = sum_j dK_j . K_j       both are the sum of dS (d s / d dot) (q . k)
    sum_j dK_j       = c sum_i dlse_i q_i     where d s / d dot = c and no sink takes part
    dQ_i             = c sum_j P_ij e_i k_j   where all V_j = v; e_i = dO_i . (v - o_i) + dlse_i

Each holds for one K/V head, summed over the query heads that share it. They are compared within the sums of
the elements' error bounds, the last with o as the module has rounded it: between equal values only the error
of delta_i = dO_i . o_i is left of dQ. The rest is bit for bit: run to run, in other surroundings, with other
values where nobody looks, of a loss that does not use lse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from attnc.expr.construct import number
from attnc.expr.derive import derive
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.reference import Array, Floats, Head, count_sharing, heads, own_rows, rows, to_arrays
from attnc.verify.case import Case
from attnc.verify.check import run_backward, same_bits, same_numbers
from attnc.verify.epilogue_bound import EpilogueErrors
from attnc.verify.gradient_bound import HeadErrors, expect_gradients
from attnc.verify.memory import shuffle_programs
from attnc.verify.problem import Problem, Value, build
from attnc.verify.rerun import may_exclude, poisoned_keys
from attnc.verify.running_error import U
from attnc.verify.storage import convert
from attnc.verify.subject import Subject
from attnc.verify.tolerance import SLACK, expect, to_float64

#: What masked elements are replaced with: finite, since 0 times anything else is not 0.
_JUNK = 1e4
#: How far dS, rounded to 16 bits, and dq, rounded once more, may be off, in parts of them.
_ROUNDED = 2.0**-7


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientProperty:
    """name; applies: to which attentions; holds: None, or what is wrong."""

    name: str
    applies: Callable[[Attention], bool]
    holds: Callable[[GradientRun], str | None]


@dataclass(frozen=True)
class GradientRun:
    """A case that has been run forwards and backwards: inputs, gradients, and gradients of the outputs."""

    subject: Subject
    case: Case
    problem: Problem
    gradients: Mapping[str, torch.Tensor]
    cotangents: Mapping[str, torch.Tensor]

    @staticmethod
    def of(subject: Subject, case: Case) -> GradientRun:
        problem = build(subject.variant.attention, case, device=subject.device)
        subject.run(problem.inputs, problem.outputs, case.config)
        return GradientRun(subject, case, problem, *_backward(subject, case, problem))

    @property
    def attention(self) -> Attention:
        return self.subject.variant.attention

    def again(
        self,
        inputs: Mapping[str, Value] | None = None,
        fill: str = "nan",
        unread: torch.Tensor | None = None,
    ) -> str | None:
        """Finds a gradient that differs for other inputs, but for the sign of a zero: a weight of 0 times
        whatever is there now. Or in a bit, in other surroundings; those that are added in any order aside.
        """
        same = same_bits if inputs is None else same_numbers
        problem = build(self.attention, self.case, fill=fill, device=self.subject.device)
        if inputs is not None:
            problem = Problem(inputs, problem.outputs, ())
        with shuffle_programs(self.case.seed + 1):
            found, _ = _backward(self.subject, self.case, problem, unread)
        for name in found.keys() - self.subject.atomic:
            if not same(found[name], self.gradients[name]):
                return f"d{name} differs in {int((found[name] != self.gradients[name]).sum())} elements"
        return None

    def with_equal_rows(self) -> GradientRun:
        problem = build(self.attention, replace(self.case, logits="constant"), device=self.subject.device)
        inputs = dict(problem.inputs)
        if not self.attention.v.storage.is_part:  # else equal keys make equal values
            inputs["v"] = torch.ones_like(torch.as_tensor(inputs["v"]))
        problem = Problem(inputs, problem.outputs, ())
        self.subject.run(inputs, problem.outputs, self.case.config)
        return GradientRun(self.subject, self.case, problem, *_backward(self.subject, self.case, problem))

    @cached_property
    def arrays(self) -> dict[str, Array]:
        return to_arrays(self.attention, self.problem.inputs)

    @cached_property
    def heads(self) -> Mapping[tuple[int, int], list[Head]]:
        found: dict[tuple[int, int], list[Head]] = {}
        for head in heads(self.attention, self.arrays):
            group = max(head.dims["H"] // max(head.dims["Hkv"], 1), 1)
            found.setdefault((head.b, head.h // group), []).append(head)
        return found

    @cached_property
    def values(self) -> dict[str, Array]:
        return {**self.arrays, **{name: to_float64(value) for name, value in self.gradients.items()}}

    @cached_property
    def allowed(self) -> dict[str, Array]:
        assert self.subject.gradients is not None
        plain = {
            name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in self.problem.inputs.items()
        }
        expected = expect_gradients(self.attention, plain, self.cotangents, self.subject.gradients)
        return {**self.arrays, **{name: want.allowed for name, want in expected.items()}}

    @cached_property
    def outputs(self) -> dict[str, Array]:
        return {name: to_float64(value) for name, value in self.problem.outputs.items()}

    @cached_property
    def given(self) -> dict[str, Array]:
        return {name: to_float64(value) for name, value in self.cotangents.items()}

    @cached_property
    def allowed_o(self) -> Floats:
        assert self.subject.gradients is not None
        return expect(self.attention, self.problem.inputs, self.subject.gradients.forward)["o"].allowed

    @cached_property
    def shares_pages(self) -> bool:
        keys = {b: group[0].shape[1] for (b, _), group in self.heads.items()}
        return count_sharing(self.attention.k, self.arrays, keys) > 1

    def keys(self, name: str, of: Mapping[str, Array], b: int, h_kv: int) -> Floats:
        tensor = self.attention.tensor(name)
        stop = self.heads[b, h_kv][0].shape[1] if tensor.storage.is_paged else None
        return np.asarray(rows(tensor, of, b, stop)[:, h_kv])

    def queries(self, of: Mapping[str, Array], head: Head) -> Floats:
        return np.asarray(rows(self.attention.q, of, head.b)[head.first :][: head.shape[0], head.h])


def _backward(
    subject: Subject, case: Case, problem: Problem, unread: torch.Tensor | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return run_backward(subject, problem, case, unread=unread)


def gradient_violations(subject: Subject, case: Case, only: str = "") -> Iterator[str]:
    """Yields `name: what is wrong` of every property that the gradients of this case violate; none without
    gradients. only: the name of the one to look at.
    """
    wanted = [rule for rule in GRADIENT_PROPERTIES if only in ("", rule.name)]
    if subject.gradients is None or not wanted:
        return
    run = GradientRun.of(subject, case)
    for rule in wanted:
        if rule.applies(run.attention) and (message := rule.holds(run)) is not None:
            yield f"{rule.name}: {message}"


# --- sums, within the bound


def _values_weigh_outputs(run: GradientRun) -> str | None:
    return _find_wrong_head(run, _dv_dot_v)


def _dv_dot_v(run: GradientRun, at: tuple[int, int], group: list[Head]) -> tuple[Array, Array]:
    v, dv, error = (run.keys("v", of, *at) for of in (run.arrays, run.values, run.allowed))
    left, allowed = (dv * v).sum(), (error * np.abs(v)).sum()
    for head in group:
        do, o = (head.place(run.attention.o, of) for of in (run.given, run.outputs))
        left = left - (do * o).sum()
        allowed = allowed + (np.abs(do) * head.place(run.attention.o, {"o": run.allowed_o})).sum()
    return left, allowed


def _values_sum_to_outputs(run: GradientRun) -> str | None:
    def sums(run: GradientRun, at: tuple[int, int], group: list[Head]) -> tuple[Array, Array]:
        left, allowed = (run.keys("v", of, *at).sum(0) for of in (run.values, run.allowed))
        for head in group:
            seen = head.scores.max(axis=1, initial=-np.inf) > -np.inf
            left = left - head.place(run.attention.o, run.given)[seen].sum(0)
        return left, allowed

    return _find_wrong_head(run, sums)


def _queries_trade_with_keys(run: GradientRun) -> str | None:
    def sums(run: GradientRun, at: tuple[int, int], group: list[Head]) -> tuple[Array, Array]:
        k, dk, error = (run.keys("k", of, *at) for of in (run.arrays, run.values, run.allowed))
        left, allowed = -(dk * k).sum(), (error * np.abs(k)).sum()
        for head in group:
            dq, dq_error = (run.queries(of, head) for of in (run.values, run.allowed))
            left = left + (dq * head.q).sum()
            allowed = allowed + (dq_error * np.abs(head.q)).sum()
            if run.attention.v.storage.is_part:  # dk . k holds dv . v too, which is do . o
                do, o = (head.place(run.attention.o, of) for of in (run.given, run.outputs))
                left = left + (do * o).sum()
                allowed = allowed + (np.abs(do) * head.place(run.attention.o, {"o": run.allowed_o})).sum()
        return left, allowed

    return _find_wrong_head(run, sums)


def _keys_sum_to_lse(run: GradientRun) -> str | None:
    slope, lse = number(derive(run.attention.score).dot), run.attention.lse
    assert slope is not None

    def sums(run: GradientRun, at: tuple[int, int], group: list[Head]) -> tuple[Array, Array]:
        left, allowed = (run.keys("k", of, *at).sum(0) for of in (run.values, run.allowed))
        if lse is not None:
            terms = (head.place(lse, run.given) * head.q for head in group)
            left = left - float(slope) * sum(term.sum(0) for term in terms)
        if run.attention.v.storage.is_part:  # the sum of dv too, which is that of do
            for head in group:
                seen = head.scores.max(axis=1, initial=-np.inf) > -np.inf
                do = head.place(run.attention.o, run.given)[seen].sum(0)
                left[: len(do)] -= do
        return left, allowed

    return _find_wrong_head(run, sums)


def _equal_values_show_delta(run: GradientRun) -> str | None:
    """Checks delta by equal values. Keys are equal too, so that the errors of a row do not cancel."""
    slope = number(derive(run.attention.score).dot)
    assert slope is not None
    other, bound = run.with_equal_rows(), run.subject.gradients
    assert bound is not None
    # dS may vanish in its 16 bits element by element, and dq, which may be as small, is rounded itself.
    least = DType(run.attention.q.dtype).smallest_subnormal
    for head in (head for group in other.heads.values() for head in group if len(head.v)):
        if (head.v != head.v[:1]).any():  # pages that another sequence has as well, with values of its own
            continue
        o, do = (head.place(run.attention.o, of) for of in (other.outputs, other.given))
        dlse = np.zeros(len(do))
        if run.attention.lse is not None and "lse" in other.given:
            dlse = head.place(run.attention.lse, other.given)[:, 0]
        with np.errstate(all="ignore"):
            e = ((do * (head.v[:1] - o)).sum(1) + dlse)[:, None]
            sizes = np.abs(do) * np.fmax(np.abs(head.v[:1]), np.abs(o))
            noise = 4 * U * head.v.shape[1] * sizes.sum(1, keepdims=True)
            errors = HeadErrors.of(head, EpilogueErrors.of(head, do, bound), dlse, bound)
            expected = float(slope) * (errors.p * e) @ head.k
            most = (errors.p * _ROUNDED + errors.p_error) * np.abs(e) + (errors.p + errors.p_error) * noise
            allowed = abs(float(slope)) * (most + least * head.visible) @ np.abs(head.k) + least + 1e-30
            wrong = ~(np.abs(other.queries(other.values, head) - expected) <= allowed)
        wrong &= np.isfinite(allowed)  # of a row whose score is NaN, or may be infinite, nothing is promised
        if wrong.any():
            return f"{int(wrong.sum())} elements of head {head.h} of sequence {head.b} are off"
    return None


def _find_wrong_head(
    run: GradientRun, sums: Callable[[GradientRun, tuple[int, int], list[Head]], tuple[Array, Array]]
) -> str | None:
    """Finds a K/V head whose difference is too large; sums of terms without a bound say nothing, nor do
    gradients of pages that several sequences share.
    """
    if run.shares_pages:
        return None
    for at, group in run.heads.items():
        with np.errstate(all="ignore"):
            difference, allowed = sums(run, at, group)
            wrong = np.isfinite(allowed) & ~(np.abs(difference) <= SLACK * allowed + 1e-30)
        if np.any(wrong):
            worst = float(np.abs(np.where(wrong, difference, 0.0)).max())
            return f"head {at[1]} of sequence {at[0]} is off by {worst:.3g}, allowed {np.max(allowed):.3g}"
    return None


# --- run against run


def _runs_agree(run: GradientRun) -> str | None:
    return run.again()


def _surroundings_do_not_matter(run: GradientRun) -> str | None:
    return run.again(fill="large")


def _lse_need_not_be_used(run: GradientRun) -> str | None:
    found = []
    for way in ("none", "zeros"):
        problem = build(run.attention, run.case, device=run.subject.device)
        found.append(run_backward(run.subject, problem, run.case, dlse=way)[0])
    unused, zero = found
    for name in sorted(unused.keys() - run.subject.atomic):
        if not same_numbers(unused[name], zero[name]):
            return f"d{name} differs in {int((unused[name] != zero[name]).sum())} elements"
    return None


def excluded_keys_have_no_gradient(run: GradientRun) -> str | None:
    """Checks that rows of k and v that no query keeps may become NaN and infinite: the gradients stay as they
    are.
    """
    inputs = poisoned_keys(run.attention, run.problem.inputs)
    return inputs if isinstance(inputs, str) or inputs is None else run.again(inputs)


def _the_unseen_gets_nothing(run: GradientRun) -> str | None:
    seen = _mark_visible(run)
    for name in {"q", "k", "v"} & run.gradients.keys():
        promised = np.isfinite(run.allowed[name])
        stray = promised & (run.values[name] != 0) & (seen[name] != 1)  # NaN differs from 0
        if stray.any():
            return f"d{name} is not 0 in {int(stray.sum())} elements that have no part in any score"
    return None


def _the_unseen_does_not_matter(run: GradientRun) -> str | None:
    inputs = dict(run.problem.inputs)
    for name, part in _mark_visible(run).items():
        value = inputs[name]
        assert isinstance(value, torch.Tensor)
        kept = torch.from_numpy(part).to(value.device)
        junk = torch.where(kept.isnan(), kept, torch.full_like(kept, _JUNK))
        junk = convert(junk, DType(run.attention.tensor(name).dtype))  # finite in 8 bits, too
        inputs[name] = torch.where(kept == 1, value, junk)
    return run.again(inputs, unread=_rows_of_nobody(run))


def _rows_of_nobody(run: GradientRun) -> torch.Tensor:
    o = run.attention.o
    found: Array = np.ones(run.outputs[o.name].shape, np.bool_)
    views = {**run.arrays, o.name: found}
    for group in run.heads.values():
        for head in group:
            rows(o, views, head.b)[head.first :][: head.shape[0], head.h] = False
    return torch.from_numpy(found)


def _mark_visible(run: GradientRun) -> dict[str, Array]:
    """Marks each element of q, k and v: 1 where it is part of a score that is not masked, 0 where all are,
    NaN where no sequence has it.
    """
    attention = run.attention
    tensors = [x for x in (attention.q, attention.k, attention.v) if not x.storage.is_part]
    found: dict[str, Array] = {x.name: np.full(run.arrays[x.name].shape, np.nan) for x in tensors}
    views = {**run.arrays, **found}
    for (b, h_kv), group in run.heads.items():
        for head in group:
            part = run.queries(views, head)
            part[...] = head.visible.any(axis=1, keepdims=True)
            is_seen = np.asarray(head.visible).any(axis=0).reshape(-1, 1)
            for tensor in tensors[1:]:
                with own_rows(tensor, views, b, head.shape[1], np.fmax) as keys:
                    keys[:, h_kv] = np.fmax(keys[:, h_kv], is_seen)
    return found


def _has_gradients_of(*names: str) -> Callable[[Attention], bool]:
    return lambda attention: set(names) <= set(attention.grads)


def _tells_values_apart(attention: Attention) -> bool:
    """Returns whether the part of dk that values have is known where they are columns of k: an epilogue
    decides what of do they get.
    """
    return attention.epilogue is None or not attention.v.storage.is_part


def _is_softmax(attention: Attention) -> bool:
    return attention.softmax.form == "softmax"


def _sums_to_one(attention: Attention) -> bool:
    return _is_softmax(attention) and attention.softmax.sink is None and attention.softmax.dropout is None


GRADIENT_PROPERTIES: tuple[GradientProperty, ...] = (
    GradientProperty(name="gradients run to run", applies=lambda attention: True, holds=_runs_agree),
    GradientProperty(
        name="gradients in other memory", applies=lambda attention: True, holds=_surroundings_do_not_matter
    ),
    GradientProperty(
        name="lse need not be used",
        applies=lambda attention: attention.lse is not None,
        holds=_lse_need_not_be_used,
    ),
    GradientProperty(
        name="the unseen has gradient 0", applies=lambda attention: True, holds=_the_unseen_gets_nothing
    ),
    GradientProperty(
        name="gradients ignore the unseen", applies=lambda attention: True, holds=_the_unseen_does_not_matter
    ),
    GradientProperty(
        name="excluded keys have no gradient", applies=may_exclude, holds=excluded_keys_have_no_gradient
    ),
    GradientProperty(
        name="dv . v = do . o",
        applies=lambda attention: _has_gradients_of("v")(attention) and attention.epilogue is None,
        holds=_values_weigh_outputs,
    ),
    GradientProperty(
        name="dv sums to do",
        applies=lambda attention: (
            _has_gradients_of("v")(attention) and _sums_to_one(attention) and attention.epilogue is None
        ),
        holds=_values_sum_to_outputs,
    ),
    GradientProperty(
        name="dq . q = dk . k",
        applies=lambda attention: _has_gradients_of("q", "k")(attention) and _tells_values_apart(attention),
        holds=_queries_trade_with_keys,
    ),
    GradientProperty(
        name="equal values show delta",
        applies=lambda attention: (
            _has_gradients_of("q")(attention)
            and attention.softmax.dropout is None
            and attention.epilogue is None
            and _is_softmax(attention)
            and number(derive(attention.score).dot) is not None
        ),
        holds=_equal_values_show_delta,
    ),
    GradientProperty(
        name="dk sums to dlse q",
        applies=lambda attention: (
            _has_gradients_of("k")(attention)
            and _is_softmax(attention)
            and attention.softmax.sink is None
            and _tells_values_apart(attention)
            and not (attention.v.storage.is_part and attention.softmax.dropout is not None)
            and number(derive(attention.score).dot) is not None
        ),
        holds=_keys_sum_to_lse,
    ),
)
