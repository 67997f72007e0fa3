"""Generated gradients keep the identities; modules with a mistake of the right kind do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from attnc.build import digest
from attnc.runtime.loader import load_text
from attnc.target.files import render_files
from attnc.verify.case import Case
from attnc.verify.check import keeps
from attnc.verify.gradient_properties import GRADIENT_PROPERTIES, gradient_violations
from attnc.verify.properties import violations
from attnc.verify.strategies import free_dims
from attnc.verify.subject import Subject, subject_of
from attnc.verify.verdict import Verdict
from tests.plans import module_of, plans_of
from tests.verify.judging import spec, subject_of_text, verify

SIZES = {"B": 2, "M": 40, "N": 33, "H": 2, "Hkv": 1, "G": 2}
#: Behind a module: gradients made from its own, by functions of autograd around its inputs and results.
BROKEN = """

class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state, q, k, v):
        ctx.state = state
        ctx.save_for_backward(q, k, v)
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        do, dlse = ctx.state["do"], ctx.state["dlse"]
        q, k, v = ctx.saved_tensors
        return None, *(RETURNED)


class _Results(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state, o, lse):
        ctx.state = state
        ctx.set_materialize_grads(False)
        return o.view_as(o), lse.view_as(lse)

    @staticmethod
    def backward(ctx, do, dlse):
        ctx.state |= {"do": do, "dlse": dlse}
        return None, do, dlse


def NAME(q, k, v, *others, right=NAME, out=None, **options):
    if out is not None:
        return right(q, k, v, *others, out=out, **options)
    state = {}
    return _Results.apply(state, *right(*_Inputs.apply(state, q, k, v), *others, **options))
"""
NOISE = "dq, dk + torch.rand(()).to(k.dtype) * 1e-4, dv"
BEHIND = "q.as_strided((1,), (1,), q.storage_offset() + q.numel())"


@cache
def text(name: str) -> str:
    made = module_of(name)
    (text,) = render_files(made, path=f"{name}.attn", sha256=digest(made.variant.source)).values()
    return text


def broken(name: str, returned: str) -> Subject:
    """The subject with other gradients than those that it computes."""
    patched = f"{text(name)}{BROKEN}".replace("NAME", name).replace("RETURNED", returned)
    return replace(subject_of(module_of(name)), module=load_text(patched))


def case(name: str) -> Case:
    sizes = {dim: SIZES[dim] for dim in free_dims(module_of(name).variant.attention)}
    return Case(dims=sizes, seed=3)


def found(subject: Subject) -> Iterator[str]:
    name = subject.variant.attention.name
    yield from (message.split(":")[0] for message in gradient_violations(subject, case(name)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["full", "local_sink", "dropout", "padding", "prefix_lm"])
def test_they_hold_where_rows_or_keys_see_nothing(name: str) -> None:
    assert list(found(subject_of(module_of(name)))) == []


def test_each_applies_somewhere() -> None:
    for rule in GRADIENT_PROPERTIES:  # a mask without queries excludes keys for all of them
        assert any(rule.applies(module_of(name).variant.attention) for name in ("full", "padding"))
    capped = {
        rule.name for rule in GRADIENT_PROPERTIES if rule.applies(module_of("local_sink").variant.attention)
    }
    assert not capped & {"dv sums to do", "dk sums to dlse q"}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("name", "returned", "violated"),
    [
        ("full", NOISE, "gradients run to run"),
        ("full", f"dq + {BEHIND} * 0, dk, dv", "gradients in other memory"),
        ("full", "dq, dk, dv + (dlse is None) * 1e-3", "lse need not be used"),
        ("padding", "dq, dk + 1e-4, dv", "the unseen has gradient 0"),
        ("varlen", "dq, dk + do.sum() * 0, dv", "gradients ignore the unseen"),
        ("padding", "dq + k[:, :, -1:].mean() * 1e-3, dk, dv", "gradients ignore the unseen"),
        ("full", "dq, dk, dv + v * 0.5", "dv . v = do . o"),
        ("full", "dq, dk, dv + 0.05", "dv sums to do"),
        ("full", "dq, dk + 0.05, dv", "dk sums to dlse q"),
        ("full", "dq + q * 0.5, dk, dv", "dq . q = dk . k"),
    ],
)
def test_violations_are_found(name: str, returned: str, violated: str) -> None:
    assert violated in found(broken(name, returned))


def test_forward_only_modules_have_none() -> None:
    assert list(gradient_violations(subject_of(module_of("decode")), case("decode"))) == []


def test_verification_holds_some_cases_to_the_rules() -> None:
    subject = broken("full", NOISE)
    small = replace(subject, gradients=None)  # so that the bound is not what fails
    assert verify(small, count=8, rules=lambda subject, case: []).ok
    report = verify(small, count=8, rules=lambda subject, case: ["a rule: broken"])
    assert {failure.verdict.message for failure in report.failures} == {"a rule: broken"}
    assert "gradients run to run" in next(
        message for message in violations(subject, case("full")) if message.startswith("gradients")
    )


def test_a_rule_that_cannot_be_checked_is_broken() -> None:
    def raises(subject: Subject, case: Case) -> list[str]:
        raise ValueError("no")

    verdict = keeps(subject_of(module_of("full")), case("full"), raises, Verdict(ok=True, message=""))
    assert (verdict.ok, verdict.message) == (False, "ValueError: no")


def test_sums_in_any_order_are_not_held_to_bits_on_cuda_either() -> None:
    made = plans_of("causal_gqa").modules
    subjects = {one.target: subject_of(one) for one in made if one.variant.name == "bf16_d64"}
    assert subjects["cuda.sm_80"].atomic == {"q"}
    assert subjects["triton"].atomic == frozenset()


#: Values that are columns of k, an epilogue, and rows past a length.
CUT = (
    "input q: bf16[B, M, H, 16]",
    "input k: bf16[B, N, H, 16]",
    "input v: bf16[B, N, H, 16]{prefix}",
    "input rows: i32[B]",
    "length M = rows[b]",
    "score = dot(q, k)",
    "normalize = softmax",
    "output o: bf16[B, M, H, 16]{epilogue}",
    "output lse: f32[B, H, M]",
    "grad {grads}",
)


def cut(**parts: str) -> Subject:
    return subject_of_text(spec([line.format(**parts) for line in CUT]))


def test_gradients_of_o_past_a_length_reach_no_key() -> None:
    """Where q has no gradient, a kernel of its own reads all rows of o and of its gradient, which is NaN."""
    made = cut(prefix="", epilogue="", grads="k, v")
    assert list(gradient_violations(made, Case(dims={"B": 2, "M": 45, "N": 5, "H": 1}, seed=3))) == []


@pytest.mark.parametrize("grads", ["k", "q, k"])
def test_an_epilogue_decides_what_values_in_keys_get(grads: str) -> None:
    """So nothing is known of the sums of dk, of which dv is a part."""
    made = cut(prefix=" via prefix(k)", epilogue=" = where(attention < 0, 0.25, attention)", grads=grads)
    assert list(gradient_violations(made, Case(dims={"B": 2, "M": 9, "N": 5, "H": 1}, seed=3))) == []


#: Keys in pages, of which sequences may have some in common, with values among their columns.
IN_PAGES = (
    "input q: bf16[T, H, 24] via ragged(q_ends)",
    "input k: bf16[H, N, B, 24] via paged(slots, page = 1)",
    "input v: bf16[H, N, B, 16] via prefix(k)",
    "input q_ends: i32[B + 1]",
    "input slots: i32[B, P]",
    "input lens: i32[B]",
    "length N = lens[b]",
    "score = dot(q, k)",
    "normalize = softmax",
    "output o: bf16[H, T, 16]",
    "grad q, k",
)


def test_keys_that_sequences_share_are_not_held_to_be_equal() -> None:
    made = subject_of_text(spec(IN_PAGES))
    one = Case(dims={"B": 4, "M": 1, "N": 3, "H": 1}, seed=4, lengths="full")
    assert list(gradient_violations(made, one, "equal values show delta")) == []
