"""The argument for rows that keep their bits, and schedules that break it; the messages are golden files."""

import pytest

from attnc.diagnostics import DiagnosticError
from attnc.expr.nodes import show
from attnc.plan.ir import Decode, Forward
from attnc.plan.order import explain_order, promise_of
from tests.plans import module_of, plans_of
from tests.verify.judging import modules_of

SPEC = """
attention a {{
  input q: bf16[B, M, Hkv * G, 64]
  input k, v: bf16[B, N, Hkv, 64]
  {extra}
  score = dot(q, k) * {scale}
  mask = {mask}
  normalize = {softmax}
  {order}
  output o: bf16[B, M, Hkv * G, 64]
}}

schedule a for triton {{
  {schedule}
}}
"""


def spec(
    schedule: str,
    *,
    mask: str = "causal",
    order: str = "order = absolute(1024)",
    scale: float = 0.125,
    extra: str = "",
    softmax: str = "softmax",
) -> str:
    return SPEC.format(schedule=schedule, mask=mask, order=order, scale=scale, extra=extra, softmax=softmax)


PROMPT = "loops = [q, kv]"
DECODE = "loops = [kv], pack = gqa, split.kv = fixed(1024)"


def test_prompts_walk_over_segments_and_decode_steps_split_at_them() -> None:
    prompt, decode = (modules_of(spec(schedule))[0].kernel for schedule in (PROMPT, DECODE))
    assert isinstance(prompt, Forward)
    assert prompt.segments is not None
    assert prompt.segments.size == 1024
    assert isinstance(decode, Decode)
    assert decode.split is not None
    assert decode.split.segment == 1024


def test_segments_count_in_the_error_bound() -> None:
    ordered, plain = (
        modules_of(spec(PROMPT, order=order))[0].kernel.bound for order in ("order = absolute(1024)", "")
    )
    assert plain.joining_error(4096) == 0
    assert ordered.joining_error(4096) == 24
    assert ordered.joining_error(4097) == 30


def test_the_argument_is_told() -> None:
    lines = [*explain_order(modules_of(spec(PROMPT))[0])]
    assert (
        lines[0]
        == "segments of 1024 keys, from multiples of 1024: one after the other, from the first to the last"
    )
    assert any("tile.q = 64, tile.kv = 64, warps = 4" in line for line in lines)
    assert [*explain_order(modules_of(spec(PROMPT, order=""))[0])] == []


def test_attentions_of_one_mathematics_promise_each_other_the_same_bits() -> None:
    def promise(**changes: str) -> tuple[str, ...]:
        return promise_of(modules_of(spec(PROMPT, **changes))[0])  # type: ignore[arg-type]  # all are str here

    paged = spec(PROMPT, extra="input kv_len: i32[B]\n  length N = kv_len[b]")
    assert promise() == promise_of(modules_of(paged)[0])
    assert promise() != promise(mask="true")
    assert promise() != promise(order="order = absolute(2048)")
    assert promise(order="") == ()


def test_serving_and_training_of_the_committed_spec_agree() -> None:
    modules = [module for module in plans_of("serving_invariant").modules if module.target == "triton"]
    assert len({promise_of(module) for module in modules}) == 1
    assert {module.variant.attention.name for module in modules} == {
        "serving_invariant",
        "packed_invariant",
        "training_invariant",
    }


@pytest.mark.parametrize("score", ["dot(q, k) + alibi(slope[h])", "dot(q, k) * slope[h] + 2 * slope[h]"])
def test_constants_are_folded_alike_where_rows_have_several_heads(score: str) -> None:
    text = spec("", extra="input slope: f32[H]").replace("dot(q, k) * 0.125", score)
    schedules = (text.replace("{\n  \n}", f"{{\n  {schedule}\n}}") for schedule in (PROMPT, DECODE))
    scores = [modules_of(each)[0].kernel.step.score for each in schedules]
    prompt, decode = ("" if score is None else show(score) for score in scores)
    assert prompt == decode.replace("slope_q", "slope") != ""


def test_a_kernel_without_an_order_is_as_it_was() -> None:
    kernel = module_of("extend").kernel
    assert kernel.bound.segment == 0


def test_schedules_of_another_shape_are_refused() -> None:
    text = spec(PROMPT).replace("for triton {", "for triton as one {")
    other = "\nschedule a for triton as two {\n  loops = [q, kv], tile.kv = 32\n}\n"
    with pytest.raises(DiagnosticError) as refused:
        modules_of(text + other)
    assert [found.code for found in refused.value.diagnostics] == ["E0605"]
