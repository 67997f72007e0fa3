"""Whose kernels a call runs on where its caller does not say, and that threads do not get each other's."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from attnc.api import fastest
from attnc.api.compile import SpecError, compile_family
from attnc.api.fastest import HOPPER, SM80, TRITON, count_sharing
from attnc.diagnostics import error
from attnc.flex import family_of, flex_attention, programs
from attnc.flex.programs import read_options, targets_of, targets_of_steps
from attnc.source import Source
from tests.flex.mods import causal
from tests.flex.oracle import torch_flex
from tests.gpus import fake_gpu, tensor

# --- whose kernels ------------------------------------------------------------------------------------------


def test_a_call_takes_the_fastest_unless_it_says_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's options name tiles of Triton's kernels, and a target is the caller's own choice."""
    fake_gpu(monkeypatch)
    q, f32 = tensor(1, 2, 8, 128), tensor(1, 2, 8, 128, dtype=torch.float32)
    for gradients in (False, True):
        taken = partial(targets_of, gradients=gradients)
        assert taken(None, q, q, q, ()) == (HOPPER, TRITON)
        assert taken(None, f32, f32, f32, ()) == (SM80, TRITON)
        assert taken(None, q, q, q, (("tile.q", 64),)) == (TRITON, "")
        assert taken(SM80, q, q, q, ()) == (SM80, "")
    fake_gpu(monkeypatch, 80)
    assert targets_of(None, q, q, q, (), gradients=False) == (TRITON, "")


def test_few_queries_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which, depends on how many heads share keys and how many keys there are: not on how many queries there
    may be.
    """
    fake_gpu(monkeypatch)
    asked: list[Any] = []

    def targets(*given: Any, sharing: int, length: int) -> tuple[str, ...]:
        asked.append((len(given), sharing, length))
        return (HOPPER,)

    monkeypatch.setattr(programs, "targets_of_few", targets)
    q, k, prompt = tensor(2, 8, 1, 128), tensor(2, 2, 96, 128), tensor(2, 8, 300, 128)
    assert targets_of_steps(None, q, k, k) == (HOPPER,)
    assert asked == [(4, count_sharing(1, 8, 2), 96)]
    assert targets_of_steps(SM80, q, k, k) == (SM80,)
    assert targets_of_steps(None, q, k.to(torch.float8_e4m3fn), k) == (TRITON,)
    assert targets_of_steps(None, prompt, k, k) == targets_of_steps(SM80, prompt, k, k) == ()


def test_nothing_is_said_of_a_kernel_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(text: str, *, target: str, **options: Any) -> Any:
        assert target == HOPPER
        return compile_family(text, target=TRITON, **options)

    monkeypatch.setattr(programs, "compile_family", compiled)
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    monkeypatch.setattr("attnc.flex.attention.targets_of", lambda *arguments, **more: (HOPPER, TRITON))
    q = torch.zeros(1, 2, 20, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flex_attention(q, q, q, mask_mod=lambda b, h, i, j: i >= j)


@pytest.mark.parametrize(("chosen", "expected"), [(None, [TRITON]), (SM80, [SM80])])
def test_lists_run_where_they_were_timed_unless_a_caller_chose(
    chosen: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def compiled(text: str, *, target: str, **options: Any) -> Any:
        assert "mask = listed(" in text
        asked.append(target)
        return compile_family(text, target=TRITON, **options)

    monkeypatch.setattr(programs, "compile_family", compiled)
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    monkeypatch.setattr("attnc.flex.attention.targets_of", lambda *arguments, **more: (SM80, TRITON))
    monkeypatch.setattr(fastest, "_CHOSEN", [chosen or ""])
    counts, indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 2, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, seq_lengths=(16, 32))
    q, k = torch.zeros(1, 2, 16, 16), torch.zeros(1, 2, 32, 16)
    flex_attention(q, k, k, block_mask=mask)
    assert asked == expected


def test_what_a_target_cannot_say_runs_on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the caller left the choice; a target that was asked for says what it misses."""
    asked = []

    def compiled(text: str, *, target: str, **options: Any) -> Any:
        asked.append(target)
        if target == HOPPER:
            raise SpecError([error("E0602", "not yet", Source("it.attn", text).span(0, 1), "")])
        return compile_family(text, target=target, **options)

    monkeypatch.setattr(programs, "compile_family", compiled)
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    q = torch.randn(1, 2, 20, 16)
    with pytest.raises(SpecError, match="not yet"):
        flex_attention(q, q, q, mask_mod=causal, target=HOPPER)
    monkeypatch.setattr("attnc.flex.attention.targets_of", lambda *arguments, **more: (HOPPER, TRITON))
    monkeypatch.setattr(fastest, "_SAID", set())
    asked.clear()
    with pytest.warns(UserWarning, match="flex_attention: .* need a spec without this: not yet") as said:
        flex_attention(q, q, q, mask_mod=causal)
    flex_attention(q, q, q, mask_mod=causal)
    assert [warning.filename for warning in said] == [__file__]
    assert asked == [HOPPER, TRITON]
    family = family_of(q, q, q, mask_mod=causal)
    assert family.target == TRITON
    assert "mask = q_idx >= kv_idx" in family.spec


# --- threads ------------------------------------------------------------------------------------------------


def window(size: int) -> Any:
    return lambda b, h, q, kv: (q >= kv) & (q - kv < size)


def test_each_thread_gets_the_kernel_of_its_own_mod(monkeypatch: pytest.MonkeyPatch) -> None:
    """More numbers than have kernels of their own, so that they become arguments on the way."""
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    monkeypatch.setattr(programs, "_SPECIAL", 2)
    q = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))

    def attend(size: int) -> torch.Tensor:
        o: torch.Tensor = flex_attention(q, q, q, mask_mod=window(size))
        return o

    sizes = range(1, 6)
    with ThreadPoolExecutor(len(sizes)) as pool:
        found = list(pool.map(attend, sizes))
    for size, o in zip(sizes, found, strict=True):
        assert torch.equal(o, attend(size))
        kept = torch.ones(16, 16).tril() * (1 - torch.ones(16, 16).tril(-size))
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=kept.bool())
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)


def test_kernels_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that becomes an argument while a kernel that has it built in is made: that is kept apart."""
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    compiled, others = programs._compile_kernel, list[Thread]()
    q = torch.zeros(1, 1, 4, 16)

    def attend(size: int) -> None:
        flex_attention(q, q, q, mask_mod=window(size))

    def compiled_beside_another(*given: Any) -> Any:
        if not others:
            others.append(Thread(target=attend, args=(2,)))
            others[0].start()
            others[0].join(0.05)
            assert others[0].is_alive()
        return compiled(*given)

    monkeypatch.setattr(programs, "_compile_kernel", compiled_beside_another)
    attend(1)
    others[0].join()
    (program,) = programs._PROGRAMS.values()
    assert len(program.kernels) == 2


# --- numbers ------------------------------------------------------------------------------------------------


def test_a_number_that_varies_later_becomes_an_argument_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    q = torch.randn(1, 1, 4, 16, generator=torch.Generator().manual_seed(0))

    def attend(factor: float, slope: float) -> None:
        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score * factor + kv_idx * slope

        found = flex_attention(q, q, q, mod)
        torch.testing.assert_close(found.double(), torch_flex(q, q, q, mod, None), rtol=1e-4, atol=1e-5)

    for step in range(6):
        attend(1.0 + step, 0.5)
    (program,) = programs._PROGRAMS.values()
    assert program.varying == {0}
    for step in range(6):
        attend(1.0, 1.5 + step)
    assert program.varying == {0, 1}
    assert len(program.kernels) == 1


def test_integers_that_vary_may_have_more_than_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    q = torch.randn(1, 1, 8, 16, generator=torch.Generator().manual_seed(0))
    for step in range(6):

        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, large: int = (3 << 30) + step) -> Any:
            return kv_idx * large <= q_idx * large + 7

        found = flex_attention(q, q, q, mask_mod=mask)
        torch.testing.assert_close(found.double(), torch_flex(q, q, q, None, causal), rtol=1e-4, atol=1e-5)


# --- options ------------------------------------------------------------------------------------------------


def test_options_are_keys_of_a_schedule_in_their_order() -> None:
    assert read_options(None) == read_options({}) == ()
    every = {"num_stages": 3, "fwd_num_warps": 8, "BLOCK_N": 32, "fwd_BLOCK_M": 64}
    assert read_options(every) == (("tile.q", 64), ("tile.kv", 32), ("warps", 8), ("stages", 3))
    for backend in ("AUTO", "TRITON", "FLASH", "TRITON_DECODE"):
        assert read_options({"BACKEND": backend, "bwd_BLOCK_M1": 32, "PRESCALE_QK": True, "BLOCK_M": 16}) == (
            ("tile.q", 16),
        )
    others: list[dict[str, Any]] = [
        {"BLOCK_K": 32}, {"BLOCK_M": 3}, {"BLOCK_M": 0}, {"BLOCK_M": True}, {"BLOCK_M": 16.0},
        {"num_warps": 5}, {"num_stages": 0}, {"BACKEND": "CUDA"}, {"fwd_": 1},
    ]  # fmt: skip
    for wrong in others:
        with pytest.raises(ValueError, match=f"kernel_options: .*{next(iter(wrong))}"):
            read_options(wrong)
    assert read_options({"FORCE_USE_FLEX_ATTENTION": True}) == ()
    for forced in (False, True):
        both = {"BACKEND": "AUTO", "FORCE_USE_FLEX_ATTENTION": forced}
        if not forced:
            assert read_options(both) == ()
            continue
        with pytest.raises(RuntimeError, match="BACKEND cannot be combined"):
            read_options(both)
