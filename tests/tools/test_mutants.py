"""Mutants of kernels: what each operator changes, which are drawn, and what becomes of one."""

from __future__ import annotations

import fcntl
import json
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from attnc.runtime.loader import program_of
from attnc.verify.case import Case
from attnc.verify.check import report_broken
from attnc.verify.search import AttentionTrial, Step
from attnc.verify.subject import subject_of
from attnc.verify.verdict import Verdict
from tests.processes import environment_of
from tools.mutants import judge
from tools.mutants.__main__ import draw_or_read
from tools.mutants.crew import (
    BATCH,
    SECOND_BATCH,
    WAVE,
    is_of,
    judge_draws,
    list_batches,
    read_results,
    second_of,
)
from tools.mutants.host import patience_for
from tools.mutants.judge import Bench
from tools.mutants.operators import OPERATORS, Mutant, list_mutants
from tools.mutants.sample import (
    Draw,
    Place,
    draw_mutants,
    list_places,
    read_draws,
    texts_of,
    write_draws,
)
from tools.mutants.scores import (
    COLUMNS,
    DOUBTED,
    READ,
    SCORES,
    Outcome,
    join_results,
    keep_scores,
    list_table,
    summarize,
)
from tools.mutants.syntax import add_trap
from tools.mutants.turns import LOCK, turn_for

CUDA = """
// i < 7 in a comment is no code
__device__ void add(const Args& args, float* out, int lane, int k_row, int v_row)
{
    long long at = args.stride_km;
    float sum = 0.0f;
    sum = 0.0f;
    for (int i = 0; i < args.N; ++i) {
        if (i == lane)
            continue;
        sum += args.x[at + args.stride_vm - k_row + v_row] * (i > 2 ? 3.0f : 4.0f);
    }
    mbarrier_wait(out, k.parity);
    store(out, sum);
    float scale = exp2(sum);
}
"""
TRITON = '''
def host(a, b):
    return a < b


@triton.jit
def kernel(X, Y, m, BLOCK_M: tl.constexpr, stride_xm, stride_ym):
    """a < b in a docstring is no code."""
    alpha = tl.exp2(m)
    for lo in range(0, stop, BLOCK_M):
        x = tl.load(X + lo.to(tl.int64) * stride_xm, mask=lo < stop, other=0.0)
        alpha = tl.where(x == 0, alpha, x)
    Y += stride_ym
    tl.store(Y, alpha)
'''

#: An operator, and one change of CUDA and one of Triton that it makes: old and new text.
CHANGES = {
    "compare": (("<", "<="), ("<", ">")),
    "bound": (("args.N", "(args.N + 1)"), ("stop", "(stop - 1)")),
    "constant": (("2", "3"), ("0", "1")),
    "arithmetic": (("*", "+"), ("+", "-")),
    "exchange": (
        ("at + args.stride_vm - k_row", "(k_row - at + args.stride_vm)"),
        ("tl.store(Y, alpha)", "tl.store(alpha, Y)"),
    ),
    "index": (("k_row", "v_row"), None),
    "stride": (("stride_km", "stride_vm"), ("stride_xm", "stride_ym")),
    "drop": (("sum += args.x[at + args.stride_vm - k_row + v_row] * (i > 2 ? 3.0f : 4.0f);", ";"), None),
    "drop synchronisation": (("mbarrier_wait(out, k.parity);", ";"), None),
    "drop store": (("store(out, sum);", ";"), ("tl.store(Y, alpha)", "pass")),
    "drop reset": (("sum = 0.0f;", ";"), None),
    "condition": (("(i == lane)", "(!(i == lane))"), ("lo < stop", "True")),
    "leave": (("continue;", "break;"), ("range(0, stop, BLOCK_M)", "range(0 + BLOCK_M, stop, BLOCK_M)")),
    "phase": (("k.parity", "(k.parity ^ 1)"), None),
    "narrow integer": (("long long", "int"), ("lo.to(tl.int64)", "lo")),
    "narrow float": (
        ("exp2(sum)", "__uint_as_float(__float_as_uint(exp2(sum)) & 0xffff0000u)"),
        ("tl.exp2(m)", "(tl.exp2(m)).to(tl.bfloat16).to(tl.float32)"),
    ),
    "lane": (("store(out, sum);", "if (!(threadIdx.x % 32 == 5)) { store(out, sum); }"), None),
    "row": (None, ("tl.exp2(m)", "tl.where(tl.arange(0, BLOCK_M) == 11, 0.0, tl.exp2(m))")),
}


def test_every_operator_makes_its_change() -> None:
    assert CHANGES.keys() == OPERATORS.keys()
    found = [list_mutants(name, text) for name, text in (("a.cu", CUDA), ("a.py", TRITON))]
    for operator, changes in CHANGES.items():
        for mutants, change in zip(found, changes, strict=True):
            made = {(mutant.old, mutant.new) for mutant in mutants if mutant.operator == operator}
            assert change is None or change in made, (operator, made)


def test_a_mutant_changes_its_place_alone() -> None:
    for name, text in (("a.cu", CUDA), ("a.py", TRITON)):
        for mutant in list_mutants(name, text):
            made = mutant.apply(text)
            assert made != text
            assert made.startswith(text[: mutant.start])
            assert made.endswith(text[mutant.stop :])
            assert text.splitlines()[mutant.line - 1].strip() != ""


def test_a_mutant_of_another_text_is_refused() -> None:
    mutant = next(iter(list_mutants("a.cu", CUDA)))
    with pytest.raises(ValueError, match=r"a\.cu is not what the mutant was drawn from"):
        mutant.apply(CUDA.replace("// i < 7", "//"))


def test_functions_that_no_kernel_calls_are_not_changed() -> None:
    text = """
__device__ int twice(int i) { return i + i; }
__device__ int third(int i) { return i / 3; }
__device__ int more(int i) { return twice(i) + 1; }
extern "C" __global__ void kernel(int* out) { *out = more(2); }
"""
    assert {mutant.function for mutant in list_mutants("a.cu", text)} == {"twice", "more", "kernel"}


def test_neither_comments_nor_host_code_are_changed() -> None:
    assert not [m for m in list_mutants("a.cu", CUDA) if m.line == 2]
    assert {m.function for m in list_mutants("a.py", TRITON)} == {"kernel"}
    assert not [m for m in list_mutants("a.py", TRITON) if '"""' in m.old]


@pytest.mark.nightly
def test_a_seed_draws_the_same_mutants_and_takes_phases_in_turn() -> None:
    places = list_places(["triton"], ["causal_gqa", "decode"])
    draws = list(draw_mutants(30, 3, places))
    assert draws == list(draw_mutants(30, 3, places))
    assert draws != list(draw_mutants(30, 4, places))
    assert len(set(draws)) == 30
    assert [draw.phase for draw in draws[:3]] == ["backward", "decode", "forward"]


def test_draws_are_read_as_they_were_written(tmp_path: Path) -> None:
    places = list_places(["triton"], ["causal_gqa"])
    draws = dict(enumerate(draw_mutants(5, 3, places)))
    write_draws(tmp_path / "draws.jsonl", draws)
    assert read_draws(tmp_path / "draws.jsonl") == draws


def test_a_target_and_a_spec_of_what_was_drawn(tmp_path: Path) -> None:
    places = list_places((), ["causal_gqa", "decode"])
    draws = dict(enumerate(draw_mutants(40, 3, places)))
    write_draws(tmp_path / "draws.jsonl", draws)
    given = Namespace(drawn=tmp_path / "draws.jsonl", target=["triton", "cuda.sm_80"], spec=["decode"])
    found = draw_or_read(given)
    assert found.items() <= draws.items()
    assert {(draw.place.spec, draw.place.target) for draw in found.values()} == {
        ("decode", "triton"),
        ("decode", "cuda.sm_80"),
    }


@pytest.mark.parametrize(
    ("seen", "devices", "given"),
    [(None, 2, ["0", "1", "0"]), ("1", 1, ["1"] * 3), ("2,5", 2, ["2", "5", "2"]), ("", 0, [None] * 3)],
)
def test_processes_take_the_gpus_that_are_seen_in_turn(
    seen: str | None, devices: int, given: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    found = [environment_of(number, devices).get("CUDA_VISIBLE_DEVICES") for number in range(3)]
    assert found == given


def test_draws_end_where_there_are_no_more() -> None:
    place = Place(spec="linear", attention="none", variant="none", target="triton")
    assert list(draw_mutants(5, 0, [])) == []
    with pytest.raises(KeyError):
        _ = place.module


#: Of the smallest spec with a schedule for Triton.
PLACE = Place(spec="prefix_lm", attention="prefix_lm", variant="d64", target="triton")


def drawn(old: str, new: str) -> Draw:
    """Returns the mutant that replaces a text which stands once in the module."""
    text = texts_of(PLACE)["d64.py"]
    assert text.count(old) == 1, text.count(old)
    start = len(text[: text.index(old)].encode())
    mutant = Mutant(
        operator="drop",
        file="d64.py",
        function="",
        line=1,
        start=start,
        stop=start + len(old.encode()),
        old=old,
        new=new,
    )
    return Draw(place=PLACE, phase="forward", mutant=mutant)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("new", "outcome"),
    [("l_new = l + tl.sum(p, 1)", "killed"), ("l_new = nothing", "invalid"), ("l_new = (", "invalid")],
)
def test_what_becomes_of_a_mutant(new: str, outcome: str, tmp_path: Path) -> None:
    draw = drawn("l_new = l * alpha + tl.sum(p, 1)", new)
    judgment = Bench(draw.place, draw.phase, tmp_path).judge(draw.mutant)
    assert judgment.outcome == outcome, judgment


def test_a_mutant_of_another_text_is_not_judged(tmp_path: Path) -> None:
    draw = drawn("l_new = l * alpha + tl.sum(p, 1)", "l_new = l")
    changed = replace(draw.mutant, old="l_new = l * alpha + tl.sum(p, 0)")
    with pytest.raises(ValueError, match="is not what the mutant was drawn from"):
        Bench(draw.place, draw.phase, tmp_path).judge(changed)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("new", "is_same"),
    [("(STAGES)", True), ("(STAGES + (BLOCK_N == 64))", False), ("(STAGES + 1)", False)],
)
def test_machine_code_is_compared_at_every_config(new: str, is_same: bool, tmp_path: Path) -> None:
    place = Place(spec="fa1", attention="fa1", variant="f16_d64", target="cuda.sm_80")
    bench = Bench(place, "forward", tmp_path)
    last = program_of(bench.original.module).kernels["fa1_forward"].configs[0]
    assert last.BLOCK_N == 64  # the one that is compiled after the others
    assert bench.configs_of(bench.steps[0])[0].BLOCK_N == 128
    text, old = texts_of(place)["d64.cu"], "copy_q((stage + STAGES - 1) % STAGES)"
    assert text.count(old) == 1
    changed = subject_of(bench.module, {"d64.cu": text.replace(old, old.replace("% STAGES", f"% {new}"))})
    assert bench.is_same_code(changed, "d64.cu") == is_same


def test_what_was_launched_is_compared_before_other_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(spec="fa1", attention="fa1", variant="f16_d64", target="cuda.sm_80")
    bench = Bench(place, "forward", tmp_path)
    text, old = texts_of(place)["d64.cu"], "copy_q((stage + STAGES - 1) % STAGES)"
    changed = text.replace(old, old.replace("% STAGES", "% (STAGES + (BLOCK_N == 64))"))
    subject = subject_of(bench.module, {"d64.cu": changed})
    program = program_of(subject.module)
    config = next(one for one in program.kernels["fa1_forward"].configs if one.BLOCK_N == 64)
    program._functions["fa1_forward", config, True, 0] = None  # as a launch leaves it
    every = Mock(return_value=True)
    monkeypatch.setattr(bench, "is_same_code", every)
    assert not bench.is_same_to_compilers(subject, "d64.cu")
    every.assert_not_called()
    program._functions.clear()
    assert bench.is_same_to_compilers(subject, "d64.cu")
    every.assert_called_once()


def test_cases_that_have_killed_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(PLACE, "forward", tmp_path)
    far = sum(step.case.is_far for step in bench.steps)
    taken = list[Case]()

    def take(trial: AttentionTrial, step: Step) -> Verdict:
        taken.append(step.case)
        is_wrong = step.case in (bench.steps[3].case, bench.steps[-1].case)
        return report_broken("wrong") if is_wrong else Verdict(ok=True, message="")

    monkeypatch.setattr(judge, "take", take)
    draw = drawn("l_new = l * alpha + tl.sum(p, 1)", "l_new = l")
    assert bench.judge(draw.mutant).cases == 4
    assert bench.judge(draw.mutant).cases == 1
    assert taken[4] == taken[3]
    assert far
    bench.killed[len(bench.steps) - 1] = 9  # which takes gigabytes
    assert bench.judge(draw.mutant).cases == 1
    assert taken[5] == taken[3]


@pytest.mark.nightly
def test_a_mutant_that_ends_its_process_is_not_the_last(tmp_path: Path) -> None:
    old, out = "l_new = l * alpha + tl.sum(p, 1)", tmp_path / "mutants.jsonl"
    texts = ("l_new = (", "__import__('os')._exit(3)", "l_new = )", "l_new = ]")
    draws = {number: drawn(old, new) for number, new in enumerate(texts)}
    first = {number: draws[number] for number in range(3)}
    options: dict[str, Any] = {"out": out, "workers": 1, "seconds": 300, "devices": 0}
    assert judge_draws(first, looks_again=True, **options) == 3
    assert not read_results(second_of(out))  # none has survived
    with out.open("a", encoding="utf-8") as file:
        file.write('{"number": 3, "outc')  # as a run that is ended leaves it
    outcomes = {number: result["outcome"] for number, result in read_results(out).items()}
    assert outcomes == {0: "invalid", 1: "died", 2: "invalid"}
    assert [is_of(read_results(out)[0], draw) for draw in draws.values()] == [True, False, False, False]
    assert judge_draws({3: draws[3]}, **options) == 1
    assert read_results(out).keys() == draws.keys()


def test_cases_that_share_machine_code_follow_each_other(tmp_path: Path) -> None:
    bench = Bench(PLACE, "forward", tmp_path)
    order = [bench.configs_of(step) for step in bench.steps if not step.case.is_far]
    assert len([here for here, before in pairwise(order) if here != before]) == len(set(order)) - 1
    assert sorted(step.case.is_far for step in bench.steps) == [step.case.is_far for step in bench.steps]
    bench.steps[0].take(AttentionTrial(bench.original))
    again = Bench(PLACE, "forward", tmp_path)
    assert again.steps == bench.steps
    assert "original" not in vars(again)  # they were kept


def test_who_times_something_goes_before_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, gone = tmp_path / "lock", threading.Event()
    monkeypatch.setenv(LOCK, str(path))
    case = cast("Case", SimpleNamespace(is_far=False))
    with ThreadPoolExecutor(2) as pool, path.open("a") as timed:
        with turn_for(case):
            with turn_for(case):  # beside another
                pass
            alone = pool.submit(fcntl.flock, timed, fcntl.LOCK_EX)
            while f":{path.stat().st_ino} " not in "".join(
                line for line in Path("/proc/locks").read_text().splitlines() if " -> " in line
            ):
                time.sleep(0.001)

            def run_one() -> bool:
                with turn_for(case):
                    return gone.is_set()

            behind = pool.submit(run_one)
            time.sleep(0.01)
        alone.result(10)
        gone.set()
        fcntl.flock(timed, fcntl.LOCK_UN)
        assert behind.result(10)


def test_compilers_and_simulators_are_no_calls_that_hang() -> None:
    def stay(where: str, name: str = "call") -> FrameType:
        scope: dict[str, Any] = {"sys": sys}
        exec(compile(f"def {name}():\n    return sys._getframe()", where, "exec"), scope)
        found: FrameType = scope[name]()
        return found

    waiting, compiling = stay("/torch/autograd/graph.py"), stay("/triton/compiler/compiler.py")
    simulating = stay("/attnc/verify/simt.py")
    assert patience_for({1: waiting, 2: waiting}) < patience_for({1: waiting, 2: simulating}) < inf
    assert patience_for({1: waiting, 2: compiling}) == inf
    assert patience_for({1: waiting, 2: stay("/tools/mutants/turns.py")}) == inf
    loading = stay("/triton/compiler/compiler.py", "_init_handles")
    assert patience_for({1: waiting, 2: loading}) < inf  # until the kernels that run have ended


@pytest.mark.nightly
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("is_second", "most"), [(False, BATCH), (True, SECOND_BATCH)])
def test_batches_are_of_one_module(is_second: bool, most: int) -> None:
    places = [place for place in list_places(["triton"]) if place.variant in ("bf16_d128", "d64_sink")]
    draws = dict(enumerate(draw_mutants(120, 3, places, together=20)))
    batches = list(list_batches(draws, is_second=is_second))
    assert sorted(number for batch in batches for number in batch["numbers"]) == list(range(120))
    assert max(len(batch["numbers"]) for batch in batches) == most
    for batch in batches:
        assert batch["is_second"] == is_second
        judged = zip(batch["numbers"], batch["phases"], batch["mutants"], strict=True)
        for number, phase, mutant in judged:
            assert batch["place"] == asdict(draws[number].place)
            assert (phase, mutant) == (draws[number].phase, asdict(draws[number].mutant))
    later = list(list_batches({number + WAVE - 60: draw for number, draw in draws.items()}, is_second=False))
    waves = [{number // WAVE for number in batch["numbers"]} for batch in later]
    assert waves == sorted(waves, key=min)
    assert {len(wave) for wave in waves} == {1}


@pytest.mark.parametrize(
    ("file", "text", "at", "made"),
    [
        ("a.cu", "void f() { int i = 1; g(i); }", "g(", "int i = 1; __trap(); g(i);"),
        ("a.cu", "void f() { if (a) g(i); }", "g(", "if (a) { __trap(); g(i); }"),
        ("a.cu", "void f() { for (int i = 0; i < 3; ++i) g(i); }", "i < 3", "{ __trap(); for (int i = 0;"),
        ("a.py", "def f():\n    if a:\n        b = 1\n", "1", "        b = 1"),
        ("a.py", "def f():\n    for i in range(3):\n        b = 1\n", "3", "    for i in range(3):"),
    ],
)
def test_a_trap_stands_before_a_statement(file: str, text: str, at: str, made: str) -> None:
    trapped = add_trap(text, file, text.index(at))
    assert trapped is not None
    if file.endswith(".cu"):
        assert made in trapped
    else:
        lines = trapped.splitlines()
        assert "trap;" in lines[lines.index(made) - 1]
        compile(trapped, file, "exec")


#: A mutant, as results say it.
MUTANT = {"operator": "drop", "old": "a", "new": "b", "file": "a.py", "line": 1, "function": "f"}


def outcomes_of(*kinds: str) -> tuple[Outcome, ...]:
    results = {
        n: {
            "place": {"target": "python"},
            "phase": "plan",
            "mutant": MUTANT,
            "outcome": kind,
            "message": "why",
        }
        for n, kind in enumerate(kinds)
    }
    return join_results(results, {})


def test_a_score_of_the_same_seed_cannot_fall(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    keep_scores(path, "python", summarize(outcomes_of("killed", "survived"), seed=1, where="here"))
    with pytest.raises(ValueError, match=r"python, all: 0\.500 would fall to 0\.0"):
        keep_scores(path, "python", summarize(outcomes_of("survived", "survived"), seed=1, where=""))
    keep_scores(path, "python", summarize(outcomes_of("killed", "equal"), seed=1, where="there"))
    kept = json.loads(path.read_text(encoding="utf-8"))["python"]
    assert kept["groups"]["python plan"] == {**dict.fromkeys(COLUMNS, 0), "killed": 1, "equivalent": 1}
    assert kept["equivalent"] == ["equal  a.py:1, f: drop: a  ->  b (why)"]
    keep_scores(path, "python", summarize(outcomes_of("survived"), seed=2, where="there"))
    keep_scores(path, "python", summarize(outcomes_of("killed"), seed=2, where="there"))
    keep_scores(path, "python", summarize(outcomes_of("killed", "survived"), seed=2, where="of more"))


@pytest.mark.parametrize("name", list(json.loads(SCORES.read_text(encoding="utf-8"))))
def test_committed_scores_list_what_they_count(name: str) -> None:
    campaign = json.loads(SCORES.read_text(encoding="utf-8"))[name]
    for kind in ("survivor", "equivalent", "rounding"):
        assert len(campaign[kind]) == campaign["groups"]["all"][kind]
    for group in (campaign["operators"], campaign["groups"].keys() - {"all", *campaign["operators"]}):
        for kind in COLUMNS:
            counts = campaign["groups"]
            assert sum(counts[name][kind] for name in group) == counts["all"][kind]


def test_equal_bits_say_nothing_of_what_no_run_may_show() -> None:
    mutants = [{"place": {"target": "triton"}, "phase": "forward", "mutant": {**MUTANT, "operator": operator}}
               for operator in ("drop", "narrow integer")]  # fmt: skip
    first = {n: {**mutant, "outcome": "survived", "message": ""} for n, mutant in enumerate(mutants)}
    second = {n: {"outcome": "equal", "message": ""} for n in first}
    assert [outcome.kind for outcome in join_results(first, second)] == ["equivalent", "survivor"]


def test_what_verification_sees_now_is_killed_whatever_a_second_look_said() -> None:
    first = {n: {"place": {"target": "triton"}, "phase": "forward", "mutant": MUTANT, "outcome": outcome,
                 "message": ""} for n, outcome in enumerate(("killed", "survived"))}  # fmt: skip
    second = {n: {"outcome": "wrong", "message": "a case"} for n in first}
    assert [outcome.kind for outcome in join_results(first, second)] == ["killed", "survivor"]


@pytest.mark.parametrize(
    ("simulated", "kind", "outcome"),
    [("survived", "equivalent", "equal"), ("killed", "survivor", "wrong"), ("unknown", "survivor", "equal")],
)
def test_the_simulators_decide_what_a_gpu_does_not(simulated: str, kind: str, outcome: str) -> None:
    mutant = {
        "place": {"target": "cuda.sm_80"},
        "phase": "forward",
        "mutant": {**MUTANT, "operator": "drop synchronisation"},
    }
    first = {0: {**mutant, "outcome": "survived", "message": ""}}
    second = {0: {"outcome": "equal", "message": "reached"}}
    third = {0: {"outcome": simulated, "message": "a race"}}
    (found,) = join_results(first, second, third)
    assert (found.kind, found.outcome) == (kind, outcome)
    first[0]["place"] = {"target": "triton"}  # an interpreter runs one operation after the other
    (found,) = join_results(first, second, third)
    assert (found.kind, found.outcome) == ("survivor", "equal")


def test_what_was_read_is_equivalent_where_no_run_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "read.json").write_text(json.dumps({"a.py:1, f: drop: a  ->  b": "nobody reads a"}))
    monkeypatch.setattr("tools.mutants.scores.READ", tmp_path / "read.json")
    (killed, survived) = outcomes_of("killed", "survived")
    assert (killed.kind, killed.outcome) == ("killed", "killed")
    assert (survived.kind, survived.outcome, survived.message) == ("equivalent", "read", "nobody reads a")


def test_what_a_reader_doubts_is_a_survivor_though_no_bit_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doubted.json").write_text(json.dumps({"a.py:1, f: drop: a  ->  b": "a waits for a copy"}))
    monkeypatch.setattr("tools.mutants.scores.DOUBTED", tmp_path / "doubted.json")
    (killed, same) = outcomes_of("killed", "same code")
    assert (killed.kind, killed.outcome) == ("killed", "killed")
    assert (same.kind, same.outcome, same.message) == ("survivor", "doubted", "a waits for a copy")


@pytest.mark.parametrize(
    ("path", "kind", "outcome"), [(READ, "equivalent", "read"), (DOUBTED, "survivor", "doubted")]
)
def test_all_that_was_read_is_listed_with_its_reason(path: Path, kind: str, outcome: str) -> None:
    campaigns = json.loads(SCORES.read_text(encoding="utf-8")).values()
    listed = [line for campaign in campaigns for line in campaign[kind]]
    for name, reason in json.loads(path.read_text(encoding="utf-8")).items():
        assert f"{outcome}  {name} ({reason[:160]})" in listed


def test_a_table_counts_what_is_wrong() -> None:
    mutant = {"place": {"target": "triton"}, "phase": "forward", "mutant": MUTANT}
    outcomes = ("killed", "fault", "hung", *["survived"] * 3, "invalid", "same code", "unknown")
    first = {n: {**mutant, "outcome": outcome, "message": ""} for n, outcome in enumerate(outcomes)}
    second = {3: {"outcome": "equal", "message": ""}, 4: {"outcome": "rounding", "message": ""}}
    lines = list(list_table(join_results(first, second)))
    assert [line.split() for line in lines[1:]] == [
        [*name, "8", "3", "1", "2", "1", "1", "75.0", "%"]
        for name in (["all"], ["triton", "forward"], ["drop"])
    ]
