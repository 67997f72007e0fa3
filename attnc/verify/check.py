"""Runs a generated module on a case, forward and backward, and judges what comes out.

A case passes when the outputs are within the plan's error bound of the reference, do not depend on what
surrounds the tensors in memory, and nothing but the outputs was written. Workspaces of the backward are full
of NaN before its kernels see them (`subject.poison_allocations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from attnc.model.tensors import Tensor
from attnc.plan.ir.backward import GradientBound
from attnc.reference import Floats
from attnc.runtime.memory import describe_lack, is_crowded, is_lost, is_of_machine, ran_out_of_memory
from attnc.runtime.watchdog import watch
from attnc.support.arguments import DTYPES
from attnc.verify.case import Case
from attnc.verify.contention import crowding_memory
from attnc.verify.gradient_bound import cotangents_of, expect_gradients, judge_gradients
from attnc.verify.memory import guarding, shuffle_programs
from attnc.verify.problem import Problem, build, place_tensor
from attnc.verify.subject import Subject, poison_allocations
from attnc.verify.tolerance import expect, to_float64
from attnc.verify.verdict import Verdict, judge

#: By the name of the input.
Gradients: TypeAlias = dict[str, torch.Tensor]

# --- gradients ----------------------------------------------------------------------------------------------


def check_gradients(subject: Subject, bound: GradientBound, problem: Problem, case: Case) -> Verdict:
    """Returns the verdict on the gradients of one case, whose outputs are known to be right. Raises what the
    module raises. The case has no special values: nothing is promised of gradients of inputs that are not
    numbers.
    """
    return _judge_gradients(subject, bound, problem, case)[0]


def _judge_gradients(
    subject: Subject, bound: GradientBound, problem: Problem, case: Case
) -> tuple[Verdict, Gradients]:
    attention = subject.variant.attention
    found, cotangents = run_backward(subject, problem, case)
    plain = {name: _detach(value) for name, value in problem.inputs.items()}
    with np.errstate(invalid="ignore"):  # of rows whose scores are all -inf
        expected = expect_gradients(attention, plain, cotangents, bound)
    return judge_gradients(expected, found), found


def run_backward(
    subject: Subject,
    problem: Problem,
    case: Case,
    *,
    dlse: Literal["drawn", "zeros", "none"] = "drawn",
    unread: torch.Tensor | None = None,
) -> tuple[Gradients, dict[str, torch.Tensor]]:
    """Returns the gradients that the module gives, and the random gradients of the outputs that
    it was given. dlse: that of lse may be zeros instead, or left out, as of a loss that does not use it.
    unread: where the gradient of o is NaN, bool like o.
    """
    attention, module = subject.variant.attention, subject.module
    leaves: dict[str, torch.Tensor] = {}
    inputs: list[Any] = []
    for name, value in problem.inputs.items():
        if name in attention.grads:
            value = leaves[name] = as_leaf(attention.tensor(name), value, _device(problem))
        inputs.append(value)
    kernels = module.BACKWARD_CONFIGS.items()
    options = {
        "config": subject.configs[case.config],
        "backward_config": {name: backward_config(configs, case) for name, configs in kernels},
    }
    function: Callable[..., Any] = getattr(module, attention.name)
    tensors, device = [x for x in inputs if isinstance(x, torch.Tensor)], _device(problem)
    what = f"the gradients of {attention.name}, case {case.to_json()},"
    with guarding(*tensors), poison_allocations(module), watch(what, device.type):
        given = function(*inputs, **options)
        outputs = dict(
            zip(
                (t.name for t in attention.outputs),
                given if isinstance(given, tuple) else (given,),
                strict=True,
            )
        )
        arrays = {name: to_float64(value) for name, value in outputs.items()}
        cotangents = {
            name: _handed_over(attention.tensor(name), value, outputs[name], problem, case)
            for name, value in cotangents_of(attention, arrays, case.seed)
        }
        if attention.lse is not None and dlse != "drawn":
            zeros = torch.zeros_like(cotangents.pop(attention.lse.name))
            cotangents |= {attention.lse.name: zeros} if dlse == "zeros" else {}
        if unread is not None:
            do = cotangents[attention.o.name]
            cotangents[attention.o.name] = do.masked_fill(unread.to(do.device), torch.nan)
        gradients = torch.autograd.grad(
            [outputs[name] for name in cotangents], list(leaves.values()), list(cotangents.values())
        )
        if device.type != "cpu":
            torch.cuda.synchronize()
    return dict(zip(leaves, gradients, strict=True)), cotangents


def as_leaf(tensor: Tensor, value: Any, device: torch.device) -> torch.Tensor:
    """Returns an input as a tensor that wants a gradient: a number, too, which has none itself."""
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, dtype=DTYPES[tensor.dtype], device=device)
    leaf: torch.Tensor = value.detach()
    return leaf.requires_grad_()


#: Blocks that share a walk over queries, of kernels where several can: as many as suit, one, and several; K/V
#: heads whose ds is kept at once, of kernels that keep it: as many as suit, none, one, and several; spans of
#: keys with a sum of dq each, of kernels that divide keys: as many as suit, one, two, and one for each tile.
_BY_SEED: Mapping[str, tuple[int, ...]] = {
    "parts": (0, 1, 3),
    "kept": (0, -1, 1, 2),
    "spans": (2, 1, 0, 32),
}


def backward_config(configs: Sequence[Any], case: Case) -> Any:
    """Returns the config of a kernel of the backward that the case has. How many blocks share a walk follows
    from its seed too, of how many heads ds is kept, and how many spans keys have: by the size of a call few
    cases would have one on a small device, or several on a large one.
    """
    config = configs[case.backward_config(len(configs))]
    drawn = {
        field: known[case.seed % len(known)] for field, known in _BY_SEED.items() if hasattr(config, field)
    }
    return config._replace(**drawn) if drawn else config


def _handed_over(
    tensor: Tensor, value: Floats, like: torch.Tensor, problem: Problem, case: Case
) -> torch.Tensor:
    data, layout = torch.from_numpy(np.array(value)).to(like.dtype), case.layouts.get(f"d{tensor.name}")
    if layout is None:
        return data.to(like.device)
    return place_tensor(tensor, data, layout, "nan", str(like.device), problem.arena).view


def _device(problem: Problem) -> torch.device:
    return next(iter(problem.outputs.values())).device


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


# --- a case -------------------------------------------------------------------------------------------------


#: Gradients of every such case, by its seed, are asked for again.
_AGAIN = 3
#: Of a case, what is wrong besides its elements; see `properties.violations`.
Rules: TypeAlias = Callable[[Subject, Case], Iterable[str]]


def check(subject: Subject, case: Case, *, fills: Iterable[str] = ("nan",)) -> Verdict:
    """Runs one case, with each of the fills around its tensors, the programs in another order each time; of
    every third case the gradients too. Nothing that the kernel does makes this raise; what does is a GPU
    whose memory others have, and OSError of a machine without room for what is compiled.
    """
    try:
        return _check_one_by_one(subject, case, fills)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        return _judge_lack(subject, case, error)
    finally:
        if subject.device != "cpu" and case.is_far and not is_lost(subject.device):
            torch.cuda.empty_cache()  # gigabytes, which other processes want too


def _judge_lack(subject: Subject, case: Case, error: Exception) -> Verdict:
    """Returns the verdict on a case that ended for want of memory: one of gigabytes is left out, any other
    has asked for too much. Raises the error where others have the memory of the GPU, and where the host has
    none for the case's own tensors.
    """
    if case.is_far:
        what = f"takes more memory than there is: {describe_lack(error)}"
        return Verdict(ok=True, message=what, is_left_out=True)
    if isinstance(error, MemoryError) or is_crowded(subject.device):
        raise error
    return report_broken(f"{type(error).__name__}: {error}")


def _check_one_by_one(subject: Subject, case: Case, fills: Iterable[str]) -> Verdict:
    """Does what `check` says. One problem lives at a time: a tensor of it may span gigabytes."""
    attention = subject.variant.attention
    first: Mapping[str, torch.Tensor] | None = None
    gradients: Gradients = {}
    verdict = Verdict(ok=True, message="nothing was run")
    for number, fill in enumerate(fills):
        problem = build(attention, case, fill=fill, device=subject.device)
        try:
            with shuffle_programs(number), crowding_memory(subject.device, is_crowded=number > 0):
                subject.run(problem.inputs, problem.outputs, case.config, case.call)
        except Exception as error:
            if is_of_machine(error):
                raise
            return report_broken(f"{type(error).__name__}: {error}")
        disturbed = problem.find_disturbed()
        if disturbed is not None:
            return report_broken(f"memory around '{disturbed}' was written to, or the input itself")
        if first is None:
            first = problem.outputs
            verdict = judge(attention, expect(attention, problem.inputs, subject.bound), problem.outputs)
            if verdict.ok and subject.gradients is not None:
                verdict, gradients = _add_gradients(subject, case, problem, verdict)
            if not verdict.ok:
                return verdict
        for name, output in problem.outputs.items():
            if not same_bits(output, first[name]):
                return report_broken(f"'{name}' depends on memory outside the tensors")
        del problem
    if first is not None and subject.gradients is not None and case.seed % _AGAIN == 0:
        verdict = keeps(subject, case, partial(_gradients_agree, first=gradients), verdict)
    return verdict


def with_gradients(subject: Subject, case: Case, problem: Problem, verdict: Verdict) -> Verdict:
    """Returns the verdict on right outputs, and on the gradients of their inputs."""
    return _add_gradients(subject, case, problem, verdict)[0]


def _add_gradients(
    subject: Subject, case: Case, problem: Problem, verdict: Verdict
) -> tuple[Verdict, Gradients]:
    assert subject.gradients is not None
    try:
        judged, found = _gradients(subject, subject.gradients, problem, case)
    except Exception as error:
        if is_of_machine(error):
            raise
        return report_broken(f"backward: {type(error).__name__}: {error}"), {}
    if problem.find_disturbed() is not None:
        return report_broken("the backward wrote to an input, or around one"), {}
    return _join_verdicts(verdict, judged), found


def _gradients_agree(subject: Subject, case: Case, *, first: Gradients) -> Iterator[str]:
    """Yields gradients that differ from those of the first run, whose programs came in order."""
    case = replace(case, special="none")
    problem = build(subject.variant.attention, case, device=subject.device)
    with shuffle_programs(case.seed + 1), crowding_memory(subject.device):
        again = run_backward(subject, problem, case)[0]
    for name in sorted(first.keys() - subject.atomic):
        if not same_bits(first[name], again[name]):
            yield f"d{name} differs from run to run"


def _gradients(
    subject: Subject, bound: GradientBound, problem: Problem, case: Case
) -> tuple[Verdict, Gradients]:
    attention = subject.variant.attention
    if case.special != "none":
        case = replace(case, special="none")
        problem = build(attention, case, device=subject.device)
    return _judge_gradients(subject, bound, problem, case)


def _join_verdicts(outputs: Verdict, gradients: Verdict) -> Verdict:
    worse = gradients if gradients.worst > outputs.worst else outputs
    return replace(
        outputs,
        ok=gradients.ok,
        message=outputs.message if gradients.ok else gradients.message,
        worst=worse.worst,
        where=worse.where,
        open=outputs.open + gradients.open,
        ratios={**outputs.ratios, **gradients.ratios},
    )


def keeps(subject: Subject, case: Case, rules: Rules, verdict: Verdict) -> Verdict:
    """Returns the verdict, unless the case breaks a rule. Raises as `check` does."""
    try:
        found = next(iter(rules(subject, case)), None)
    except Exception as error:
        if ran_out_of_memory(error):
            return _judge_lack(subject, case, error)
        if is_of_machine(error):
            raise
        found = f"{type(error).__name__}: {error}"
    return verdict if found is None else replace(report_broken(found), rule=found.partition(": ")[0])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether two tensors are bitwise equal, NaN included."""
    rows = (x.flatten().clone(memory_format=torch.contiguous_format) for x in (left, right))
    return torch.equal(*(x.view(torch.uint8) for x in rows))


def same_numbers(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether two tensors hold the same numbers, NaN included: 0 is -0."""
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def report_broken(message: str) -> Verdict:
    """Returns the verdict on what no bound has a measure for."""
    return Verdict(ok=False, message=message, worst=float("inf"))
