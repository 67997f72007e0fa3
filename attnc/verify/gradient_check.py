"""Runs the backward of a generated module on a case and judges what comes out.

Workspaces are full of NaN before the kernels see them (`subject.poisoned`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

from attnc.model.attention import Attention
from attnc.model.tensors import Tensor
from attnc.plan.ir.backward import GradientBound
from attnc.reference_arrays import Floats
from attnc.support.arguments import DTYPES
from attnc.verify.case import Case, Layout
from attnc.verify.gradient_bound import cotangents_of, expect_gradients, judge_gradients
from attnc.verify.memory import guarding
from attnc.verify.problem import Problem, place_tensor
from attnc.verify.subject import poisoned
from attnc.verify.verdict import Verdict, to_float64


def check_gradients(
    attention: Attention, module: ModuleType, bound: GradientBound, problem: Problem, case: Case
) -> Verdict:
    """The verdict on the gradients of one case, whose outputs are known to be right. Raises what the module
    raises. The case has no special values: nothing is promised of gradients of inputs that are not numbers.
    """
    found, cotangents = run_backward(attention, module, problem, case)
    plain = {name: _detached(value) for name, value in problem.inputs.items()}
    with np.errstate(invalid="ignore"):  # of rows whose scores are all -inf
        expected = expect_gradients(attention, plain, cotangents, bound)
    return judge_gradients(expected, found)


def run_backward(
    attention: Attention, module: ModuleType, problem: Problem, case: Case
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The gradients that the module gives, and the random gradients of the outputs that it was given."""
    leaves: dict[str, torch.Tensor] = {}
    inputs: list[Any] = []
    for name, value in problem.inputs.items():
        if isinstance(value, torch.Tensor) and name in attention.grads:
            value = value.detach().requires_grad_()
            leaves[name] = value
        elif name in attention.grads:  # a number: only a tensor has a gradient
            dtype = DTYPES[attention.tensor(name).dtype]
            value = torch.tensor(value, dtype=dtype, device=_device(problem)).requires_grad_()
            leaves[name] = value
        inputs.append(value)
    kernels = module.BACKWARD_CONFIGS.items()
    options = {
        "config": module.CONFIGS[case.config],
        "backward_config": {name: configs[case.backward_config(len(configs))] for name, configs in kernels},
    }
    function: Callable[..., Any] = getattr(module, attention.name)
    with guarding(*(x for x in inputs if isinstance(x, torch.Tensor))), poisoned(module):
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
            name: _handed_over(attention.tensor(name), value, outputs[name], case.layouts.get(f"d{name}"))
            for name, value in cotangents_of(attention, arrays, case.seed)
        }
        gradients = torch.autograd.grad(
            [outputs[name] for name in cotangents], list(leaves.values()), list(cotangents.values())
        )
    return dict(zip(leaves, gradients, strict=True)), cotangents


def _handed_over(tensor: Tensor, value: Floats, like: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """The gradient of an output as autograd may hand it over: strided in any way, in the output's type."""
    data = torch.from_numpy(np.array(value)).to(like.dtype)
    if layout is None:
        return data.to(like.device)
    return place_tensor(tensor, data, layout, "nan", str(like.device)).view


def _device(problem: Problem) -> torch.device:
    return next(iter(problem.outputs.values())).device


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
