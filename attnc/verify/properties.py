"""What must hold between runs of one module, whatever the reference says.

A property changes the inputs of a case in a way whose effect on the outputs is known: bit for bit, or within
the sum of both error bounds. Each says which attentions it applies to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from attnc.model.attention import Attention
from attnc.verify.bitwise_properties import (
    batches_permute,
    groups_equal_repeated_heads,
    heads_permute,
    masked_keys_are_invisible,
    runs_agree,
    values_scale,
)
from attnc.verify.bounded_properties import configs_agree, keys_permute, prefixes_agree, visible_keys_count
from attnc.verify.calls import call_violations
from attnc.verify.case import Case
from attnc.verify.excluded import excluded_keys_are_invisible, may_exclude
from attnc.verify.fallbacks import fallback_violations
from attnc.verify.gradient_properties import gradient_violations
from attnc.verify.rerun import Run
from attnc.verify.subject import Subject
from attnc.verify.symmetries import (
    has_values,
    ignores_key_order,
    is_dense,
    is_grouped,
    only_addresses,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """name; applies: to which attentions; holds: None, or what is wrong, for the inputs of a case and its
    outputs.
    """

    name: str
    applies: Callable[[Attention], bool]
    holds: Callable[[Run], str | None]


def violations(subject: Subject, case: Case, only: str = "") -> Iterator[str]:
    """`name: what is wrong` of every property that the module, its gradients or its host code violate on this
    case, without its special value. only: the name of the one to look at.
    """
    case = replace(case, layouts={}, special="none")
    wanted = [rule for rule in PROPERTIES if only in ("", rule.name)]
    if wanted:
        run = Run.of(subject, case)
        for rule in wanted:
            if rule.applies(run.attention) and (message := rule.holds(run)) is not None:
                yield f"{rule.name}: {message}"
    if not only or not wanted:
        yield from gradient_violations(subject, case, only)
    if only in ("", "fallbacks"):
        yield from fallback_violations(subject)
    if only in ("", "calls"):
        yield from call_violations(subject)


PROPERTIES: tuple[Property, ...] = (
    Property(name="run to run", applies=lambda attention: True, holds=runs_agree),
    Property(name="configs agree", applies=lambda attention: True, holds=configs_agree),
    Property(name="2v gives 2o", applies=has_values, holds=values_scale),
    Property(
        name="batches permute",
        applies=lambda attention: is_dense(attention) and only_addresses(attention, "b", attention.batch),
        holds=batches_permute,
    ),
    Property(
        name="heads permute",
        applies=lambda attention: is_dense(attention) and only_addresses(attention, "h", attention.heads_q),
        holds=heads_permute,
    ),
    Property(
        name="groups equal repeated heads",
        applies=lambda attention: is_dense(attention) and is_grouped(attention),
        holds=groups_equal_repeated_heads,
    ),
    Property(name="masked keys are invisible", applies=is_dense, holds=masked_keys_are_invisible),
    Property(name="excluded keys are invisible", applies=may_exclude, holds=excluded_keys_are_invisible),
    Property(name="visible keys count", applies=is_dense, holds=visible_keys_count),
    Property(
        name="keys permute",
        applies=lambda attention: is_dense(attention) and ignores_key_order(attention),
        holds=keys_permute,
    ),
    Property(
        name="prefixes agree",
        applies=lambda attention: is_dense(attention) and not attention.lengths,
        holds=prefixes_agree,
    ),
)
