"""Generated modules against the reference, in the interpreter: what `attnc verify` and `attnc fuzz` do."""

from __future__ import annotations

import errno
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given, settings

from attnc.verify.case import Case, Kept, TensorLayout
from attnc.verify.check import backward_config, check, keeps, report_broken, run_backward
from attnc.verify.problem import FILLS, build
from attnc.verify.strategies import Limits, cases, free_dims
from attnc.verify.subject import Subject
from tests.by_day import some_by_day
from tests.plans import SPECS, plans_of
from tests.verify.judging import committed, examples, fuzz, modules_of, right_by_day, verify

NAMES = sorted(path.stem for path in SPECS.glob("*.attn") if "\nattention " in path.read_text())


#: These take five seconds in the simulator; by day tests/kernels/test_sm90_joined.py runs such kernels, with
#: fewer columns.
BY_NIGHT = ("selected_block_pages", "selected_rows")


@pytest.mark.slow
@pytest.mark.parametrize("name", some_by_day((name for name in NAMES if name not in BY_NIGHT), of=14))
def test_specs_are_right(name: str) -> None:
    right_by_day(committed(name))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", BY_NIGHT)
def test_the_largest_specs_are_right(name: str) -> None:
    right_by_day(committed(name))


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["prefix_document", "local_sink"])
def test_drawn_cases_pass(name: str) -> None:
    report = fuzz(committed(name), examples=examples(5))
    assert report.ok, f"{report.failures[0].repro}\n{report.failures[0].verdict.message}"


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), MemoryError()])
def test_no_kernel_is_wrong_because_the_machine_has_no_room(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = committed("causal_gqa")
    case = Case(dims={"B": 1, "M": 2, "N": 2, "Hkv": 1, "G": 1}, seed=8)

    def fail(*_: Any, **__: Any) -> Any:
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(Subject, "run", fail)
        with pytest.raises(type(failure)):
            check(subject, case)
    monkeypatch.setattr("attnc.verify.check.run_backward", fail)
    with pytest.raises(type(failure)):
        check(subject, case)
    with pytest.raises(type(failure)):
        keeps(subject, case, fail, report_broken("nothing"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shrink", [True, False])
def test_a_search_ends_with_its_time(shrink: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when as many cases have been drawn as were asked for, which takes minutes."""
    clock = count()  # a second for each look at it
    monkeypatch.setattr("attnc.verify.search.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    report = fuzz(replace(committed("prefix_lm"), gradients=None), examples=100_000, seconds=5, shrink=shrink)
    assert report.ok
    assert 0 < report.examples < 20
    assert report.seconds < 50


def test_a_record_has_its_cases_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def cases_run(least: int) -> int:
        clock = count()  # a second for each look at it
        with monkeypatch.context() as patched:
            now = SimpleNamespace(monotonic=lambda: float(next(clock)))
            patched.setattr("attnc.verify.search.time", now)
            made = replace(committed("prefix_lm"), gradients=None)
            return verify(made, count=9, seconds=1, least=least, fills=("nan",)).examples

    assert cases_run(0) < 4 == cases_run(4)


def test_gradients_of_a_case_that_costs_too_much_are_left_out() -> None:
    limits = Limits(tiles={0: (64, 64)})
    few, many = {"B": 1, "M": 2, "N": 4097}, {"B": 1, "M": 2, "N": 49152}
    assert limits.includes_gradients(few, 0)
    assert limits.cost(many, 0) <= limits.most
    assert not limits.includes_gradients(many, 0)


def test_surroundings_have_no_influence() -> None:
    case = Case(
        dims={"B": 1, "M": 70, "H": 1, "N": 67},
        layouts={"k": TensorLayout(order=(0, 1, 2, 3), gaps=(0, 1, 0, 0))},
    )
    assert check(committed("prefix_lm"), case, fills=tuple(FILLS)).ok


def broken(name: str, function: object) -> Subject:
    """The subject with another callable in place of its own."""
    real = committed(name)
    module = SimpleNamespace(CONFIGS=real.module.CONFIGS, **{real.variant.attention.name: function})
    return Subject(variant=real.variant, bound=real.bound, module=module)  # type: ignore[arg-type]  # has what is used


CASE = Case(dims={"B": 1, "M": 5, "H": 1, "N": 7})


class Sharing(NamedTuple):
    """A config of a kernel whose walks blocks may share."""

    BLOCK_M: int
    parts: int = 0


class Keeping(NamedTuple):
    """The same, which may keep ds."""

    BLOCK_M: int
    parts: int = 0
    kept: int = 0


def test_cases_say_how_many_blocks_share_a_walk() -> None:
    """By their seeds, on any device; those of other kernels have their configs alone."""
    configs = (Sharing(64), Sharing(128))
    drawn = [backward_config(configs, Case(dims={}, seed=seed)) for seed in range(6)]
    assert {config.parts for config in drawn} == {0, 1, 3}
    assert [config.BLOCK_M for config in drawn] == [64, 128] * 3
    assert len(set(drawn)) == 6  # any with any
    assert backward_config((7,), Case(dims={}, seed=2)) == 7
    found = {backward_config((Keeping(64),), Case(dims={}, seed=seed)) for seed in range(12)}
    assert len(found) == 12  # three of parts with four of kept


def test_what_is_reported() -> None:
    def raises(*args: object, **named: object) -> None:
        raise ZeroDivisionError("of the kernel")

    def scribbles(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, out: torch.Tensor, config: object
    ) -> None:
        out.zero_()
        out.as_strided((1,), (1,), out.storage_offset() - 1).zero_()

    def overwrites(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, out: torch.Tensor, config: object
    ) -> None:
        q.zero_()

    def leaks(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: object, out: torch.Tensor, config: object
    ) -> None:
        real = committed("prefix_lm")
        real.module.prefix_lm(q, k, v, *args, out=out, config=config)
        out[0, 0, 0, 0] += k.as_strided((1,), (1,), k.storage_offset() + k.numel())[0].nan_to_num() * 1e-30

    def nothing(*args: object, **named: object) -> None:
        pass

    for function, message in (
        (raises, "ZeroDivisionError: of the kernel"),
        (scribbles, "memory around 'o' was written to"),
        (overwrites, "memory around 'q' was written to, or the input itself"),
        (leaks, "'o' depends on memory outside the tensors"),
        (nothing, "o[b=0, q_idx=0, h=0, d=0] = nan, expected "),
    ):
        verdict = check(broken("prefix_lm", function), CASE, fills=tuple(FILLS))
        assert not verdict.ok
        assert verdict.message.startswith(message)


def test_failures_shrink_and_are_saved(tmp_path: Path) -> None:
    real = committed("prefix_lm")

    def wrong_beyond(q: torch.Tensor, *args: object, out: torch.Tensor, config: object) -> None:
        real.module.prefix_lm(q, *args, out=out, config=config)
        out[:, 3:] += 1

    report = fuzz(broken("prefix_lm", wrong_beyond), examples=60, failures=tmp_path)
    assert not report.ok
    case = report.failures[0].case
    assert {name: case.dims[name] for name in ("B", "H")} == {"B": 1, "H": 1}
    assert case.dims["M"] <= 13
    assert not case.layouts
    (path,) = tmp_path.iterdir()
    assert Kept.from_json(path.read_text()) == Kept(case=case, rule="", target="triton")
    assert report.failures[0].repro.startswith("attnc verify ")
    assert f"--variant {real.variant.name} --target triton --case '{{" in report.failures[0].repro


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", some_by_day(NAMES, of=4))
def test_cases_are_affordable_and_survive_json(name: str) -> None:
    variant = plans_of(name).modules[0].variant
    limits = Limits(tiles={0: (64, 32), 3: (128, 64)})

    def holds(case: Case) -> None:
        assert Case.from_json(case.to_json()) == case
        assert case.dims.keys() == set(free_dims(variant.attention))
        assert limits.cost(case.dims, case.config) <= limits.work
        problem = build(variant.attention, case)
        assert problem.find_disturbed() is None

    @settings(max_examples=15)
    @given(cases(variant, limits))
    def drawn(case: Case) -> None:
        holds(case)

    drawn()


def test_contents_do_not_depend_on_surroundings_or_layout() -> None:
    attention = plans_of("causal_gqa").modules[0].variant.attention
    dims = {"B": 2, "M": 3, "N": 5, "Hkv": 2, "G": 2}
    plain = build(attention, Case(dims=dims, seed=3)).inputs
    layouts = dict.fromkeys("qkv", TensorLayout(order=(2, 1, 0, 3), gaps=(0, 1, 2, 8), offset=3))
    for fill in FILLS:
        odd = build(attention, Case(dims=dims, seed=3, layouts=layouts), fill=fill).inputs
        for name in "qkv":
            left, right = plain[name], odd[name]
            assert isinstance(left, torch.Tensor)
            assert isinstance(right, torch.Tensor)
            assert torch.equal(left, right)
            assert left.is_contiguous()
            assert not right.is_contiguous()
            assert right.storage_offset() == 64 + 3


def test_gradients_follow_a_forward_of_the_case_s_config() -> None:
    """Also where that is not one of the module's: with other numbers of splits, say."""
    attention = replace(committed("full").variant.attention, grads=("q",))
    given: list[str] = []

    def function(
        q: torch.Tensor, *others: object, config: str, backward_config: object
    ) -> tuple[torch.Tensor, ...]:
        given.append(config)
        return 2 * q, q.sum(-1).mT

    module = SimpleNamespace(CONFIGS=("first",), BACKWARD_CONFIGS={}, **{attention.name: function})
    q = torch.ones(1, 2, 1, 64, dtype=torch.float16)
    problem = SimpleNamespace(inputs={"q": q, "k": q, "v": q}, outputs={"o": q})
    stub: Any = SimpleNamespace(
        variant=SimpleNamespace(attention=attention), module=module, configs=("first", "split")
    )
    run_backward(stub, cast(Any, problem), Case(dims={"B": 1, "M": 2, "H": 1, "N": 2}, config=1))
    assert given == ["split"]


def test_scalars_hold_what_their_type_does() -> None:
    text = """
attention small {
  input q: f16[B, M, H, 16]
  input k, v: f16[B, N, H, 16]
  input most: u8[]
  score = dot(q, k)
  mask = kv_idx < most
  normalize = softmax
  output o: f16[B, M, H, 16]
}
schedule small for triton { tile.q = 16, tile.kv = 16, loops = [q, kv], softmax = online }
"""
    (module,) = modules_of(text)
    case = Case(dims={"B": 1, "M": 2, "N": 3, "H": 1}, seed=3, extras="negative")
    most = build(module.variant.attention, case).inputs["most"]
    assert isinstance(most, int)
    assert most in range(256)
