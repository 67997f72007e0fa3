"""A case that has been run, and what its module gives for other inputs: what properties compare.

Also holds what properties of outputs and of gradients share: what lies in memory for keys that no query keeps
has no influence, NaN and infinities included. Which keys these are is what docs/language.md promises and
`plan.regions` plans; that no query sees them is asked of the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import TRUE, Expr
from attnc.model.attention import Attention
from attnc.plan.regions import kept_by_some
from attnc.reference import Array, Bools, Head, Integers, heads, rows, to_arrays
from attnc.verify.case import Case
from attnc.verify.check import same_bits
from attnc.verify.problem import Value, build
from attnc.verify.storage import alter
from attnc.verify.subject import Subject

Inputs: TypeAlias = Mapping[str, Value]
Outputs: TypeAlias = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A case that has been run: its dense inputs, and its outputs."""

    subject: Subject
    case: Case
    inputs: Inputs
    outputs: Outputs

    @staticmethod
    def of(subject: Subject, case: Case) -> FinishedRun:
        inputs = build(subject.variant.attention, case, device=subject.device).inputs
        return FinishedRun(subject, case, inputs, _outputs(subject, inputs, case.config))

    @property
    def attention(self) -> Attention:
        return self.subject.variant.attention

    def again(self, inputs: Inputs, config: int | None = None) -> Outputs:
        return _outputs(self.subject, inputs, self.case.config if config is None else config)

    def tensor(self, name: str) -> torch.Tensor:
        value = self.inputs[name]
        assert isinstance(value, torch.Tensor)
        return value


def _outputs(subject: Subject, inputs: Inputs, config: int) -> Outputs:
    outputs = subject.blank(inputs)
    subject.run(inputs, outputs, config)
    return outputs


# --- what excluded keys hold --------------------------------------------------------------------------------


def may_exclude(attention: Attention) -> bool:
    """Returns whether there may be keys that no query keeps: by the mask, or behind the end of a sequence."""
    return kept_by_some(attention.mask) is not None or bool(attention.lengths)


def excluded_keys_are_invisible(run: FinishedRun) -> str | None:
    """Makes rows of k and v that no query keeps NaN and infinite, and checks that the outputs stay as they
    are, bit for bit.
    """
    inputs = poisoned_keys(run.attention, run.inputs)
    if isinstance(inputs, str) or inputs is None:
        return inputs
    outputs = run.again(inputs)
    for name, before in run.outputs.items():
        if not same_bits(outputs[name], before):
            return f"'{name}' depends on keys that no query keeps"
    return None


def poisoned_keys(attention: Attention, inputs: Inputs) -> Inputs | str | None:
    """Returns the inputs with NaN, infinity and minus infinity in turn, as rows of the keys that no query
    keeps.

    None where there are none; a message where the reference says that a query sees one.
    """
    arrays = to_arrays(attention, inputs)
    kept = kept_by_some(attention.mask) or TRUE
    unused, used = [], []
    seen: dict[int, list[Head]] = {}
    for head in heads(attention, arrays):
        seen.setdefault(head.b, []).append(head)
    for b, pieces in seen.items():
        keeps = _keeps(kept, pieces[0])
        if any(piece.visible[:, ~keeps].any() for piece in pieces):
            return f"the plan says of a key of sequence {b} that no query keeps it, but one does"
        at = _places(attention, arrays, b, len(keeps))
        everywhere = np.zeros(len(at), dtype=np.bool_)
        everywhere[: len(keeps)] = keeps
        used.append(at[everywhere])
        unused.append(at[~everywhere])
    alone = {int(i) for places in unused for i in places.flat} - {int(i) for x in used for i in x.flat}
    if not alone:
        return None
    return {**inputs, **_with_junk(attention, inputs, arrays, alone)}


def _keeps(kept: Expr, head: Head) -> Bools:
    count = head.dims["N"]
    indices = {"b": np.asarray(head.b, dtype=np.int64), "kv_idx": np.arange(count, dtype=np.int64)}
    value = evaluate(kept, Env(indices=indices, dims=head.dims, tensors=head.arrays))
    return np.broadcast_to(np.asarray(value).astype(np.bool_), (count,))


def _places(attention: Attention, arrays: Mapping[str, Array], b: int, count: int) -> Integers:
    """Returns [rows, 1]: numbers of the rows of keys of sequence b, in whatever memory they are, for its
    `count` keys and, in a tensor of its own, for those behind its end.
    """
    k = attention.k
    numbers = np.arange(arrays["k"].size // max(arrays["k"].shape[-1], 1), dtype=np.int64)
    shape = (*arrays["k"].shape[:-1], 1)
    stop = None if k.storage.is_plain else count
    return np.asarray(rows(k, {**arrays, "k": numbers.reshape(shape)}, b, stop))[..., 0]


def _with_junk(
    attention: Attention, inputs: Inputs, arrays: Mapping[str, Array], alone: set[int]
) -> dict[str, Value]:
    made: dict[str, Value] = {}
    chosen = np.zeros(arrays["k"].shape[:-1], dtype=np.bool_)
    chosen.reshape(-1)[sorted(alone)] = True
    for tensor in (attention.k, attention.v):
        if tensor.storage.is_part:
            continue
        order = [attention.k.roles.index(role) for role in tensor.roles[:-1]]
        value = inputs[tensor.name]
        assert isinstance(value, torch.Tensor)
        where = torch.from_numpy(chosen.transpose(order).copy()).to(value.device)
        made[tensor.name] = alter(value, partial(_fill_rows, where)).requires_grad_(value.requires_grad)
    return made


def _fill_rows(where: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    junk = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=values.dtype, device=values.device)
    values[where] = junk[torch.arange(int(where.sum()), device=values.device) % 3][:, None]
    return values
