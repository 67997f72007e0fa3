"""CUDA kernels read no member of their arguments that the struct does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings

from attnc.target.files import render_files
from tests.verify.judging import modules_of, spec
from tests.verify.random_specs import specs

CUDA = ("cuda.sm_80", "cuda.sm_90a")
STORAGE = {
    "packed queries": ("T, 2, 64] via ragged(q_ends)", "B, N, 2, 64]"),
    "packed keys": ("B, M, 2, 64]", "S, 2, 64] via ragged(k_ends)"),
    "both packed": ("T, 2, 64] via ragged(q_ends)", "S, 2, 64] via ragged(k_ends)"),
    "neither": ("B, M, 2, 64]", "B, N, 2, 64]"),
}
FORMS = {"weights": ("weight = sigmoid(score)", "normalize = none"), "softmax": ("normalize = softmax",)}
GRADS = ("q", "k", "q, k, v")
_STRUCT = re.compile(r"struct Args\s*\{(.*?)\n\};", re.DOTALL)


def missing(text: str) -> set[str]:
    """Returns the members of `args` that kernels read and the struct lacks."""
    (struct,) = _STRUCT.findall(text)
    return set(re.findall(r"\bargs\.(\w+)", text)) - set(re.findall(r"\w+", struct))


def findings(text: str) -> Iterator[str]:
    """Yields what kernels of a spec lack, by file."""
    for module in modules_of(text):
        if module.target in CUDA:
            for name, source in render_files(module, path="a.attn", sha256="0" * 64).items():
                if name.endswith(".cu") and (lacking := missing(source)):
                    yield f"{module.target} {name}: {sorted(lacking)}"


@pytest.mark.one_in(6)
@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("storage", STORAGE)
def test_sizes_of_packed_rows_are_there(storage: str, target: str) -> None:
    queries, keys = STORAGE[storage]
    lines = [f"input q: f16[{queries}", f"input k, v: f16[{keys}"]
    lines += [f"input {x}_ends: i32[B + 1]" for x, rows in (("q", queries), ("k", keys)) if "ragged" in rows]
    lines += ["score = dot(q, k) / sqrt(D)", f"output o: f16[{queries.partition(']')[0]}]"]
    for form, grads in product(FORMS.values(), GRADS):
        assert not list(findings(spec([*lines, *form, f"grad {grads}"], "", target=target)))


@settings(max_examples=10)
@given(specs(targets=CUDA, with_gradients=True))
def test_members_are_there_for_random_specs(text: str) -> None:
    assert not list(findings(text))


def test_one_that_is_not_is_found() -> None:
    assert missing("struct Args {\n    int M, N;\n};\nint f(Args args) { return args.M + args.T; }") == {"T"}
