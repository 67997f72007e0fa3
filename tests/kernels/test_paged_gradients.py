"""Gradients of attentions whose keys lie in pages: tables as nobody should make them, pages of any size, and
the forms of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch

from attnc.verify.case import Case
from attnc.verify.check import check_gradients
from attnc.verify.problem import Problem, build
from attnc.verify.subject import Subject
from tests.targets import EACH, skip_without_compiler
from tests.verify.judging import assert_within_bound, spec, subject_of_text

#: Queries, keys and what else an attention has.
GROUPED: Mapping[str, str | list[str]] = {
    "q": "[B, M, Hkv * G, WIDTH]",
    "k": "[B, N, Hkv, WIDTH] via paged(table, page = PAGE)",
    "v": "[B, N, Hkv, WIDTH] via paged(table, page = PAGE)",
    "more": ["mask = causal", "normalize = softmax", "output lse: f32[B, Hkv * G, M]", "grad q, k, v"],
}
FORMS: Mapping[str, Mapping[str, str | list[str]]] = {
    "grouped": GROUPED,
    "packed": {
        **GROUPED,
        "q": "[T, Hkv * G, WIDTH] via ragged(ends)",
        "more": ["input ends: i32[B + 1]", "mask = causal", "normalize = softmax", "grad q, k, v"],
    },
    "latents": {
        "q": "[B, M, H, WIDTH]",
        "k": "[B, N, 1, WIDTH] via paged(table, page = PAGE)",
        "v": "[B, N, 1, 16] via prefix(k)",
        "more": ["mask = causal", "normalize = softmax", "grad q, k"],
    },
    "windows, sinks and a bias of keys": {
        **GROUPED,
        "more": [
            "input sink: f32[Hkv * G]",
            "input bias: f32[B, N]",
            "mask = window(9, 3)",
            "normalize = softmax(sink = sink[h])",
            "grad q, k, v, sink, bias",
        ],
    },
    "sticks": {**GROUPED, "more": ["mask = causal", "normalize = stick_breaking", "grad q, k, v"]},
    "eight bits": {
        **GROUPED,
        "k": "e4m3[B, N, Hkv, WIDTH] via paged(table, page = PAGE)",
        "v": "i8[B, N, Hkv, WIDTH] via paged(table, page = PAGE)",
        "more": ["input bias: f32[B, N]", "mask = causal", "normalize = softmax", "grad q, bias"],
    },
    "heads before keys": {
        "q": "[M, B, H, WIDTH]",
        "k": "[H, N, B, WIDTH] via paged(table, page = PAGE)",
        "v": "[N, B, H, WIDTH] via paged(table, page = PAGE)",
        "more": ["normalize = softpick", "grad k", "grad v: f32"],
    },
}


@cache
def subject(form: str, page: int, target: str = "triton") -> Subject:
    skip_without_compiler(target)
    parts = FORMS[form]
    width = "32" if target == "triton" else "64"
    q, k, v = (str(parts[name]).replace("PAGE", str(page)).replace("WIDTH", width) for name in "qkv")
    columns = v.partition("]")[0].rpartition(", ")[2]
    score = "dot(q, k) / 8" + (" + bias[b, kv_idx]" if "bias" in str(parts["more"]) else "")
    lines = [
        f"input q: bf16{q}",
        *(f"input {name}: {'bf16' * (text[0] == '[')}{text}" for name, text in (("k", k), ("v", v))),
        "input table: i32[B, P]",
        "input lens: i32[B]",
        "length N = lens[b]",
        f"score = {score}",
        f"output o: bf16{q.partition(' via')[0].rpartition(', ')[0]}, {columns}]",
        *parts["more"],
    ]
    tiles = "loops = [q, kv], tile.q = 16, tile.kv = 32, warps = 4, stages = 1"
    schedule = (
        f"{tiles}\n  backward {{ tile.q = 16, tile.kv = 32 }}" if target == "triton" else "loops = [q, kv]"
    )
    return subject_of_text(spec(lines, schedule, target=target))


SIZES = {"B": 3, "M": 5, "N": 70, "Hkv": 2, "G": 1, "H": 2}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("page", [1, 3, 16, 48, 128, 200])
@pytest.mark.parametrize("form", FORMS)
def test_pages_of_every_size(form: str, page: int) -> None:
    assert_within_bound(subject(form, page), Case(dims=SIZES, seed=page))


@pytest.mark.nightly
@pytest.mark.parametrize("target", EACH)
@pytest.mark.parametrize("form", FORMS)
def test_every_target(form: str, target: str) -> None:
    if form == "eight bits" and target == "cuda.sm_80":
        pytest.skip("that target multiplies keys as they were copied")
    made = subject(form, 16, target)
    for seed in range(3):
        assert_within_bound(made, Case(dims={**SIZES, "M": 70, "N": 150}, seed=seed))


#: The pages of three sequences of 70, 35 and 0 keys, five and three of 16 among eight.
TABLES: Mapping[str, list[list[int]]] = {
    "one page for all": [[2] * 5, [2] * 5, [2] * 5],
    "all shared": [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]],
    "shared in another order": [[4, 3, 2, 1, 0], [0, 3, 4, -1, -1], [7, 7, 7, 7, 7]],
    "ends in none": [[5, 6, 7, 0, 1], [2, 3, 4, -1, -1], [-1] * 5],
    "ends outside": [[5, 6, 7, 0, 1], [2, 3, 4, 8, 2**31 - 1], [-(2**31)] * 5],
    "ends in a page that has keys": [[0, 1, 2, 3, 4], [5, 6, 7, 0, 0], [0] * 5],
}


def given(made: Subject, table: list[list[int]]) -> tuple[Case, Problem]:
    """A case with this table, whose pages hold numbers where a key lies, and NaN elsewhere."""
    case = Case(dims=SIZES, seed=4)
    problem = build(made.variant.attention, case, device=made.device)
    lens = torch.as_tensor(problem.inputs["lens"])
    lens.copy_(torch.tensor([70, 35, 0]))
    make = torch.Generator().manual_seed(0)
    pools = {name: torch.full((8, 16, 2, 32), torch.nan, dtype=torch.bfloat16) for name in ("k", "v")}
    for entries, keys in zip(table, (70, 35, 0), strict=True):
        for column in range(-(-keys // 16)):
            rows = min(16, keys - 16 * column)
            for pool in pools.values():
                pool[entries[column], :rows] = torch.randn(rows, 2, 32, generator=make).bfloat16()
    inputs = {**problem.inputs, **pools, "table": torch.tensor(table, dtype=torch.int32)}
    return case, Problem({name: inputs[name] for name in problem.inputs}, problem.outputs, ())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", TABLES)
def test_tables_mean_what_they_say(name: str) -> None:
    made = subject("grouped", 16)
    case, problem = given(made, TABLES[name])
    assert made.gradients is not None
    verdict = check_gradients(made, made.gradients, problem, case)
    assert verdict.ok, verdict.message


def gradients(made: Subject, problem: Problem) -> list[torch.Tensor]:
    function: Callable[..., tuple[torch.Tensor, ...]] = made.function
    inputs = [torch.as_tensor(x).detach() for x in problem.inputs.values()]
    leaves = [x.requires_grad_() for x in inputs[:3]]
    o, lse = function(*inputs)
    return [*torch.autograd.grad([o, lse], leaves, [torch.ones_like(o), torch.zeros_like(lse)])]


def test_what_entries_behind_the_end_name_changes_no_bit() -> None:
    made = subject("grouped", 16)
    found = [gradients(made, given(made, TABLES[name])[1]) for name in ("ends in none", "ends outside")]
    assert all(map(torch.equal, *found))
    _, dk, dv = found[0]
    assert not dk[[2, 3, 4]][2, 3:].any()
    assert not dv[4, 3:].any()
    assert dk[4, :3].any()


def test_pages_that_nobody_names_get_zeros() -> None:
    made = subject("grouped", 16)
    _, problem = given(made, [[2] * 5, [2] * 5, [2] * 5])
    _, dk, dv = gradients(made, problem)
    others = [0, 1, 3, 4, 5, 6, 7]
    assert not dk[others].any()
    assert not dv[others].any()
    assert dk[2].any()
    assert dk.isfinite().all()


def test_a_pool_without_pages_has_no_gradient() -> None:
    made = subject("grouped", 16)
    _, problem = given(made, TABLES["ends in none"])
    none = torch.empty(0, 16, 2, 32, dtype=torch.bfloat16)
    lens = torch.zeros(3, dtype=torch.int32)
    changed = {**problem.inputs, "k": none, "v": none.clone(), "lens": lens}
    dq, dk, dv = gradients(made, Problem({name: changed[name] for name in problem.inputs}, {}, ()))
    assert not dq.any()
    assert dk.shape == dv.shape == none.shape


def test_pages_that_have_changed_since_the_call_are_noticed() -> None:
    made = subject("grouped", 16)
    _, problem = given(made, TABLES["all shared"])
    inputs = [torch.as_tensor(x).detach() for x in problem.inputs.values()]
    q = inputs[0].requires_grad_()
    o, _ = made.function(*inputs)
    inputs[1][7].zero_()  # a server writes the next token
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(o.sum(), q)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_only_gradients_that_are_asked_for_are_summed(
    *, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = subject("grouped", 16)
    _, problem = given(made, TABLES["all shared"])
    every = gradients(made, problem)
    pages: Any = made.module.CALL.backward.pages
    names = type(pages).finish.__globals__  # of the support package in use
    sum_rows, summed = names["sum_rows"], list[int]()

    def note(*tensors: Any) -> None:
        summed[-1] += 1
        sum_rows(*tensors)

    monkeypatch.setitem(names, "sum_rows", note)
    function: Callable[..., Any] = made.function
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    for asked in ((0,), (1,), (0, 2), (1, 2)):
        inputs = [torch.as_tensor(x).detach() for x in problem.inputs.values()]
        leaves = [inputs[at].requires_grad_() for at in asked]
        o, _ = function(*inputs)
        summed.append(0)
        found = torch.autograd.grad(o, leaves, torch.ones_like(o))
        assert all(map(torch.equal, found, [every[at] for at in asked]))
    assert summed == [0, 1, 1, 2]
