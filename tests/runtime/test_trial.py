"""Launches for tuning: every kernel of a backward runs with the config that is asked for."""

from typing import Any

import pytest
import torch

from attnc.runtime.loader import load_module
from attnc.runtime.trial import backward_trial, problem_for
from attnc.verify.interpreter import ensure_interpreter
from tests.plans import SPECS, module_of, plans_of

ensure_interpreter()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["alibi", "fa1"])
def test_a_backward_can_be_tried_with_every_config(name: str) -> None:
    module = plans_of(name).modules[0]
    problem = problem_for(module, 16, device="cpu", tokens=16)
    assert list(vars(load_module(module))["BACKWARD_CONFIGS"]) == list(module.backward_kernels)
    default: Any = backward_trial(module, problem)()
    for kernel, planned in module.backward_kernels.items():
        last = len(planned.configs) - 1
        found: Any = backward_trial(module, problem, kernel, last)()
        for one, other in zip(default, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2**-6 * float(one.abs().max()))


def test_sequences_of_listed_rows_have_lengths_and_pages() -> None:
    """A kernel sees one sequence, and does not call their number B."""
    module = module_of(SPECS / "selected_pages.attn", "cuda.sm_90a")
    problem = problem_for(module, 193, device="cpu", tokens=2 * 193)
    shapes = {arg.tensor.name: tuple(x.shape) for arg, x in zip(module.args, problem, strict=True)}
    assert (shapes["cu_q"], shapes["block_table"], shapes["kv_len"]) == ((3,), (2, 4), (2,))
    assert shapes["q"][0] == shapes["selected"][0] == 2


def test_heads_that_a_spec_counts_are_as_many_as_it_says() -> None:
    """Whatever sizes are asked for: `Hkv` is a name of those of k, which the spec says."""
    module = module_of(SPECS / "selected_prompts.attn", "cuda.sm_90a")
    problem = problem_for(module, 16, device="cpu", tokens=16, sizes={"H": 4, "Hkv": 2, "G": 2})
    assert [list(x.shape[-2:]) for x in problem[:3]] == [[64, 128], [4, 128], [4, 128]]


def test_bytes_hold_what_is_drawn_for_long_sequences() -> None:
    """An eighth of a length is no byte. Of e8m0 scales 127 is 1, and 255 is no number."""
    module = module_of(SPECS / "kv8_blocks.attn", "cuda.sm_90a")
    sizes = {"B": 1, "Hkv": 1}
    problem = problem_for(module, 8192, device="cpu", tokens=8192, sizes=sizes)
    scales = [x for arg, x in zip(module.args, problem, strict=True) if "scale" in arg.tensor.name]
    assert [int(x.max()) for x in scales] == [127, 127]


def test_heads_of_keys_are_as_many_as_a_spec_says() -> None:
    module = module_of(SPECS / "selected_prompts.attn", "cuda.sm_90a")
    q, k, *_ = problem_for(module, 130, device="cpu", tokens=260, sizes={"Hkv": 2})
    assert (q.shape[1], k.shape[2]) == (64, 4)
