"""The plan as text: goldens of a dozen telling specs, and that nothing which a plan holds is left out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from attnc.expr.nodes import Binary, Const, Dim, Node
from attnc.plan.ir.text import module_text
from tests.plans import module_of, plans_of

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "ir"
#: Attention, variant and target; what it shows.
TOLD = (
    ("causal_gqa", "bf16_d128", "triton"),  # two loops, and both kernels of the backward
    ("causal_gqa", "bf16_d128", "cuda.sm_80"),  # fragments and shared memory, a kernel of rows
    ("causal_gqa", "bf16_d128", "cuda.sm_90a"),  # roles, a lazy maximum
    ("window", "d128", "cuda.sm_90a"),  # ranges of keys of each consumer
    ("alibi", "d64", "cuda.sm_90a"),  # a term of the score as a column of k
    ("softcap", "d128", "cuda.sm_90a"),  # a score by a polynomial
    ("varlen", "d128", "cuda.sm_90a"),  # a work tile of packed sequences
    ("window", "d128", "triton"),  # one loop that tests its tiles
    ("local_sink", "w128_d64", "triton"),  # a sink and its gradient, a shared derivative
    ("document", "d128", "cuda.sm_80"),  # searches of sorted inputs
    ("bias", "d64", "triton"),  # loads of three kinds and their gradients
    ("prefix_document", "d64", "triton"),  # keys that no query keeps
    ("neighborhood", "d64", "triton"),  # a guard of tiles
    ("dropout", "d64", "triton"),
    ("fa1", "bf16_d64", "triton"),  # outer loop over keys
    ("varlen", "d128", "triton"),  # packed sequences
    ("speculative", "d128", "triton"),  # a tree of queries, against paged keys
    ("paged_decode", "d128", "triton"),  # split keys in pages
    ("kv8_decode", "e4m3", "triton"),  # keys and values of 8 bits, a scale of v
    ("mla_decode", "d576_dv512", "cuda.sm_80"),  # values that are columns of keys
    ("unified_decode", "d128", "cuda.sm_80"),  # one maximum for all rows
    ("gated", "d128", "cuda.sm_90a"),  # an epilogue, and the kernel of its gradients
    ("hstu", "d128_group1", "triton"),  # weights without a softmax, of packed sequences
    ("hstu", "d64_group1", "cuda.sm_90a"),  # the same without lse and delta
    ("forgetting", "d64", "triton"),  # keys that are left out, and where a tile begins
    ("t5_bias", "d64_r128", "triton"),  # an index that is loaded, and sums that are scattered
    ("softpick", "d64", "triton"),  # a rectified softmax
    ("stick_breaking", "d64", "triton"),  # sums of keys behind and before a tile, from kernel to kernel
    ("stick_breaking_decode", "d64", "triton"),  # an ordered scan over split keys
    ("stick_breaking_decode", "d64", "cuda.sm_90a"),  # splits that are runs of keys, not tiles in turn
    ("mla_training", "d576_dv512", "triton"),  # one gradient of keys and of values that are columns of them
    ("listed_blocks", "d128", "triton"),  # a walk over lists, and over inverted ones
    ("selected_training", "default", "triton"),  # queries with lists of their own, and the keys of one
    ("paged_training", "d128", "triton"),  # rows of pages, for gradients
)


@pytest.mark.parametrize(("spec", "variant", "target"), TOLD, ids=lambda value: value)
def test_plans(spec: str, variant: str, target: str, golden: Callable[[Path, str], None]) -> None:
    golden(GOLDEN / f"{spec}.{target}.ir", module_text(module_of(spec, target, variant)))


#: Specs whose plans are told by a digest of their text, and into how many tests they are shared out.
TELLING, SHARES = sorted((ROOT / "tests" / "telling_specs").glob("*.attn")), 16
DIGESTS = GOLDEN / "telling.txt"


def digests(path: Path) -> list[str]:
    """A line for each module of a spec: target and variant, and a digest of its plan."""
    return [
        f"{path.stem} {module.target} {module.variant.name} "
        f"{hashlib.sha256(module_text(module).encode()).hexdigest()[:16]}"
        for module in plans_of(path).modules
    ]


@pytest.mark.parametrize("share", range(SHARES))
def test_telling_specs_are_planned_as_before(share: int, request: pytest.FixtureRequest) -> None:
    """Where this is meant to change, `--update-golden` writes the digests; the list that differs says of
    which specs and targets plans change. `attnc explain SPEC --ir` shows them.
    """
    if request.config.getoption("--update-golden"):
        lines = [line for path in TELLING for line in digests(path)]
        DIGESTS.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    paths = TELLING[share::SHARES]
    found = [line for path in paths for line in digests(path)]
    names = {path.stem for path in paths}
    expected = DIGESTS.read_text(encoding="utf-8").splitlines()
    if share == 0:
        assert {line.split()[0] for line in expected} == {path.stem for path in TELLING}
    assert found == [line for line in expected if line.split()[0] in names]


#: What a text need not say, and why.
UNSAID = {
    "span": "lines are in comments",
    "variant": "its name is there",
    "intrinsics": "the same table for every kernel",
    "tensor": "a gradient's name and type, an argument's type",
    "load": "by its indices",
    "row": "by its name: its indices are where it is made",
    "score_span": "lines are in comments",
    "keep_span": "lines are in comments",
}


def changes(value: Any) -> Iterator[Any]:
    """Something else of the same kind."""
    match value:
        case bool():
            yield not value
        case int() | float():
            yield value + 1
        case Enum():
            yield from (member for member in type(value) if member is not value)
        case str():
            yield f"{value}_changed"
        case Node():
            yield Binary("+", Dim("CHANGED"), Const(987654))
        case tuple():
            for i, item in enumerate(value):
                yield from ((*value[:i], new, *value[i + 1 :]) for new in changes(item))
        case dict():
            for key, item in value.items():
                yield from ({**value, key: new} for new in changes(item))
        case _ if is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                if field.name not in UNSAID:
                    told = getattr(value, field.name)
                    yield from (replace(value, **{field.name: new}) for new in changes(told))


def difference(one: Any, other: Any) -> str:
    """The path of the first field that differs."""
    for name in getattr(one, "__dataclass_fields__", {}).keys() - UNSAID.keys():
        if type(one) is type(other) and getattr(one, name) != getattr(other, name):
            return f".{name}{difference(getattr(one, name), getattr(other, name))}"
    if isinstance(one, tuple):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                return f"[{i}]{difference(a, b)}"
    return f": {one} -> {other}"


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("spec", "variant", "target"),
    [TOLD[2], TOLD[4], TOLD[8], TOLD[13], TOLD[15], TOLD[19], TOLD[21]],
    ids=lambda value: value,
)
def test_whatever_changes_in_a_plan_changes_its_text(spec: str, variant: str, target: str) -> None:
    module = module_of(spec, target, variant)
    text, count, unseen = module_text(module), 0, []
    for changed in changes(module):
        count += 1
        try:
            if module_text(changed) == text:
                unseen.append(difference(module, changed))
        except KeyError:  # a word that no plan has
            continue
    assert count > 50
    assert unseen == []
