"""Plans that are wrong are refused before they are printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnc.expr.nodes import Compare, Dim, Index
from attnc.plan import ir
from attnc.plan.ir import Decode, Forward, Let, Loop
from attnc.plan.verify import _verify_scopes, verify_module
from tests.plan.excluding import inputs
from tests.plan.planning import planned
from tests.plan.sorted_masks import MASKS, text_of
from tests.verify.judging import modules_of


def test_what_is_known_of_a_head_or_a_query_alone_is_refused() -> None:
    module = planned("kv_idx < end[b]", inputs=inputs("end["), grads="q, k, v")
    forward = module.kernel
    for name in ("h", "q_idx"):
        kept = Compare("<", Index("kv_idx"), Index(name))
        wrong = replace(forward, step=replace(forward.step, kept=kept))
        with pytest.raises(ValueError, match=f"'{name}' has no value here"):
            verify_module(replace(module, kernel=wrong))
    unmasked = replace(forward, step=replace(forward.step, keep=None))
    with pytest.raises(ValueError, match="no tile is masked"):
        verify_module(replace(module, kernel=unmasked))


def test_a_row_of_a_head_is_refused() -> None:
    """Rows of v are the same for all heads that share them, a pointer to a head's numbers is not."""
    made = planned("valid[b, kv_idx]", inputs=inputs("valid["))
    forward = made.kernel
    program = tuple(
        replace(item, indices=(Index("h"),)) if isinstance(item, ir.Row) else item for item in forward.program
    )
    with pytest.raises(ValueError, match="changes with the head"):
        verify_module(replace(made, kernel=replace(forward, program=program)))


@pytest.mark.parametrize("name", ["kv_lo", "kv_hi", "q_hi", "kv_idx"])
def test_a_name_before_it_exists_is_refused(name: str) -> None:
    """In the order of the kernel's text: bounds of the loop over keys come before any tile of them."""
    module = planned("kv_idx <= q_pos")
    kernel = module.kernel
    bad = Compare("<", Index(name), Index("b"))
    if name == "q_hi":  # known to the loops, but not to what a program does first
        program = Let(name="x", value=bad)
        broken = replace(kernel, program=(*kernel.program, program))
    else:
        broken = _with_loops(kernel, replace(kernel.regions.loops[0], start=Index(name)))
    with pytest.raises(ValueError, match=f"'{name}' has no value here"):
        verify_module(replace(module, kernel=broken))


def test_a_value_of_a_tile_is_not_known_outside_of_it() -> None:
    (module,) = modules_of(text_of(MASKS[0], "rows", "triton"))
    kernel = module.kernel
    (loop,) = (loop for loop in kernel.regions.loops if loop.tests)
    hoisted = replace(
        kernel.regions,
        bounds=(*kernel.regions.bounds, *loop.tests),
        loops=tuple(replace(loop, tests=()) for loop in kernel.regions.loops),
    )
    with pytest.raises(ValueError, match="has no value here"):
        verify_module(replace(module, kernel=replace(kernel, regions=hoisted)))


def _with_loops(kernel: Forward | Decode, first: Loop) -> Forward | Decode:
    return replace(kernel, regions=replace(kernel.regions, loops=(first, *kernel.regions.loops[1:])))


def test_a_step_knows_the_first_key_of_its_tile_and_not_the_last() -> None:
    module = planned("kv_idx <= q_pos", grads="q, k, v")
    for kernel in module.kernels.values():
        first, last = ("kv_lo", "kv_hi") if kernel.regions.axis == "kv" else ("q_lo", "q_hi")
        for name, is_known in ((first, True), (last, False)):
            keep = Compare("<", Index("kv_idx"), Index(name))
            changed = replace(kernel, step=replace(kernel.step, keep=keep))
            if is_known:
                _verify_scopes(changed)
                continue
            with pytest.raises(ValueError, match=f"'{name}' has no value here"):
                _verify_scopes(changed)


def test_a_value_of_a_program_is_no_size() -> None:
    """But M and N, which programs find for their own sequence."""
    module = planned("kv_idx < end[b]", inputs=inputs("end["))
    kernel = module.kernel
    for name, is_size in (("N", True), ("here", False)):
        program = (*kernel.program, Let(name=name, value=Index("b")))
        bounds = (*kernel.regions.bounds, Let(name="x", value=Dim(name)))
        changed = replace(kernel, program=program, regions=replace(kernel.regions, bounds=bounds))
        if is_size:
            _verify_scopes(replace(changed, dims=tuple(size for size in kernel.dims if size != "N")))
            continue
        with pytest.raises(ValueError, match="the size 'here' is not an argument"):
            _verify_scopes(changed)


def test_what_says_that_a_tile_is_masked_is_known_there() -> None:
    module = planned("window(20, 3)")
    kernel = module.kernel
    assert not isinstance(kernel.regions.loops[0].masked, bool)
    for name, is_known in (("kv_hi", True), ("kv_idx", False)):
        masked = Compare("<", Index(name), Index("b"))
        changed = _with_loops(kernel, replace(kernel.regions.loops[0], masked=masked))
        if is_known:
            _verify_scopes(changed)
            continue
        with pytest.raises(ValueError, match=f"'{name}' has no value here"):
            _verify_scopes(changed)
