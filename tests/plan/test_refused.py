"""Which kernels an attention has under a schedule, or why it has none: for every target."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnc.model.attention import Variant
from attnc.model.schedule import Schedule
from attnc.model.variants import variants
from attnc.plan.checks import check_lowerable
from attnc.plan.differentiable import check_differentiable, has_backward
from attnc.plan.targets import USUAL, as_written, complete_schedule, target_of
from tests.model.resolving import resolve_text
from tests.plan.test_defaults import text_of

GOLDEN = Path(__file__).parents[1] / "golden" / "refused"
#: Rows, form and gradients of attentions; besides those of schedules that are chosen.
ATTENTIONS = {
    "dense": ("dense", "softmax", "q, k, v"),
    "dense_sticks": ("dense", "stick_breaking", "q, k, v"),
    "dense_dropped": ("dense", "softmax(dropout = p, seed = seed)", "q"),
    "packed": ("packed", "softmax(sink = sink[h])", "q, k, v"),
    "cache": ("cache", "none", "k, v"),
    "paged": ("paged", "softmax", "q"),
    "narrow": ("narrow", "softmax", ""),
    "latent": ("latent", "softpick", ""),
    "listed": ("listed", "softmax", "q, k, v"),
    "listed_none": ("listed", "none", "k"),
    "selected": ("selected", "softmax", "q, k, v"),
    "selected_none": ("selected", "none", "q, k, v"),
    "selected_sink": ("selected", "softmax(sink = sink[h])", "q, k, v, sink"),
    "ordered": ("ordered", "softmax", "q, k, v"),
}
SCHEDULES = (
    "loops = [q, kv]",
    "loops = [kv, q]",
    "loops = [kv], pack = gqa",
    "loops = [kv], pack = gqa, split.kv = 1",
    "loops = [kv], split.kv = auto, tile.kv = 32",
    "pack = gqa, split.kv in {2, 8}, tile.q = 16",
    "pack = gqa, persistent = true",
    "order = longest_first, tile.q = 32, tile.kv = 16",
    "softmax = two_pass",
    "backward { accumulate.dq = atomic }",
    "backward { order = longest_first }",
    "backward {\n    dq { tile.q = 64 }\n  }",
    "loops = [kv], pack = gqa\n  backward { accumulate.dk = atomic, accumulate.dv = atomic }",
)


#: Gradients whose sums a schedule mentions.
_SUM = re.compile(r"accumulate\.d(\w+)")


def said(variant: Variant, schedule: Schedule) -> Iterator[str]:
    """Yields what kernels a schedule has, or what is said in their place."""
    found = [*check_lowerable(variant, schedule)]
    if not found:
        completed = complete_schedule(variant, schedule)
        way = completed.knobs.get("backward", {}).get("accumulate.dq")
        yield "decodes" if schedule.is_decode else "forward"
        yield "gradients" if has_backward(variant.attention, schedule) else "no gradients"
        yield "" if way is None or as_written(completed) == completed else f"dq is summed by {way.choices[0]}"
        yield "converts before" if target_of(schedule.target).converts_before(variant, schedule) else ""
        found += check_differentiable(variant, schedule)
    for each in found:
        yield f"{each.code}: {each.message} ({each.primary.text}; {'; '.join(each.hints)})"


@pytest.mark.parametrize("name", ATTENTIONS)
def test_what_an_attention_has_under_a_schedule(name: str, golden: Callable[[Path, str], None]) -> None:
    rows, form, grads = ATTENTIONS[name]
    text = text_of(rows, (64, 64), "bf16", "causal", form, f"grad {grads}" if grads else "")
    own = [keys for keys in SCHEDULES if {*_SUM.findall(keys)} <= {*grads.split(", ")}]
    own = [keys for keys in own if grads or "backward" not in keys]
    lines = []
    for target in USUAL:
        made = [f"schedule it for {target} as s{at} {{\n  {keys}\n}}" for at, keys in enumerate(own)]
        program = resolve_text("\n".join([text, *made, ""]))
        (variant,) = variants(program, program.attention("it"))
        alike: dict[tuple[str, ...], list[str]] = {}
        for schedule, keys in zip(program.schedules, own, strict=True):
            alike.setdefault(tuple(said(variant, schedule)), []).append(" ".join(keys.split()))
        for found, schedules in alike.items():
            lines += [f"{target}: {' | '.join(schedules)}", *(f"  {line}" for line in found if line)]
    golden(GOLDEN / f"{name}.txt", "\n".join(lines) + "\n")
