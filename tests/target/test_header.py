"""A header says where rows lie; constants that a file declares are those that its kernels mention."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnc.plan.targets import TARGETS
from attnc.target.files import render_files
from attnc.target.quote import without_comments
from tests.plans import plans_of

ROOT = Path(__file__).parents[2]
SPECS = (
    "specs/softcap",
    "specs/unified_decode",
    "specs/bias",
    "specs/prefix_lm",
    "tests/planted/specs/hopper",
)
NAMES = {"SCALE", "LAZY", "HEADROOM", "P_TOP", "PHI", "LOW", "HIGH", "LN2", "LOG2E", "TWO_LOG2E"}
_DECLARATION = re.compile(r"^(?:constexpr float )?(\w+)(?:: tl\.constexpr)? = (.*)$", re.M)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("spec", SPECS)
def test_kernels_mention_the_constants_that_are_declared(spec: str) -> None:
    seen = set()
    for module in plans_of(ROOT / f"{spec}.attn").modules:
        for name, text in render_files(module, path="under_test.attn", sha256="0").items():
            if name.endswith(".py") and TARGETS[module.target].family != "triton":
                continue
            code = without_comments(text, "#" if name.endswith(".py") else "//")
            declared = NAMES & {name for name, _ in _DECLARATION.findall(code)}
            mentioned = NAMES & set(re.findall(r"\w+", _DECLARATION.sub(r"\2", code)))
            assert declared == mentioned, name
            seen |= mentioned
    assert seen


@pytest.mark.parametrize(
    ("spec", "target", "lines"),
    [
        ("paged_decode", "triton", ["k: bf16[B, N, Hkv, 128] via paged(block_table, page = 16)"]),
        ("mla_training", "cuda.sm_80", ["v: bf16[B, N, 1, 512] via prefix(k)"]),
        ("varlen", "triton", ["q: bf16[T, Hkv * G, 128] via ragged(cu_q)"]),
        ("dropout", "triton", ["o = dropout(softmax(score)) v."]),
        ("local_sink", "triton", ["sink: f32[Hkv * G]", "o = softmax(score, sink) v."]),
    ],
)
def test_a_header_says_where_rows_lie_and_a_docstring_what_weighs_them(
    spec: str, target: str, lines: list[str]
) -> None:
    modules = plans_of(ROOT / "specs" / f"{spec}.attn").modules
    module = next(x for x in modules if x.target == target and x.variant.attention.name == spec)
    text = "".join(render_files(module, path="under_test.attn", sha256="0").values())
    assert [line for line in lines if line not in text] == []
