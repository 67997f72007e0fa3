"""Calls whose mods are known by what they depend on: not read again, unless that is another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask

from attnc.api import repeats
from attnc.flex import flex_attention, programs, snapshot
from attnc.flex.trace import trace
from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

B, H, M, N, D = 2, 2, 20, 40, 16
FAR = 7
FACTOR = torch.tensor(0.5)


def draw(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, rows, D, generator=generator) for rows in (M, N, N))
    return q, k, v


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    repeats.forget()
    snapshot._TOKENS.clear()


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx + N - M >= kv_idx


def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx + N - M - kv_idx).abs() <= FAR


def helped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return bend(score)


def bend(score: Any) -> Any:
    return torch.tanh(score) * 2


def doubled(score: Any) -> Any:
    return score * 2


def damped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * FACTOR


@dataclass
class Window:
    size: int = 3

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx + N - M - kv_idx <= self.size


class Case:
    """Mods, what changes what they do, and whether a snapshot can tell."""

    is_known = True

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.options: dict[str, Any] = {}
        self.patch = patch

    def change(self) -> None: ...


class GlobalNumber(Case):
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.options = {"mask_mod": near}

    def change(self) -> None:
        self.patch.setattr(f"{__name__}.FAR", 3)


class GlobalFunction(Case):
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.options = {"score_mod": helped}

    def change(self) -> None:
        self.patch.setattr(f"{__name__}.bend", doubled)


class GlobalTensor(Case):
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.options = {"score_mod": damped}

    def change(self) -> None:
        self.patch.setattr(f"{__name__}.FACTOR", torch.tensor(2.0))


class Closure(Case):
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        size = 4.0

        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score - size * (q_idx - kv_idx).abs() / math.sqrt(D)

        def resize() -> None:
            nonlocal size
            size = 8.0

        self.options, self.resize = {"score_mod": mod}, resize

    def change(self) -> None:
        self.resize()


class Default(Case):
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)

        def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, size: int = 5) -> Any:
            return q_idx + N - M - kv_idx <= size

        self.options, self.mod = {"mask_mod": mod}, mod

    def change(self) -> None:
        self.mod.__defaults__ = (9,)


class Bias(Case):
    """Data of floats is read by the kernel."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        bias = self.bias = torch.linspace(-1, 1, H * N).view(H, N)
        self.options = {"score_mod": lambda score, b, h, q_idx, kv_idx: score + bias[h, kv_idx]}

    def change(self) -> None:
        self.bias.neg_()


class Documents(Case):
    """Data of integers is looked at: whether they ascend."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        ids = self.ids = torch.arange(N, dtype=torch.int32) // 9
        self.options = {"mask_mod": lambda b, h, q_idx, kv_idx: ids[q_idx + N - M] == ids[kv_idx]}

    def change(self) -> None:
        self.ids.copy_(self.ids[torch.randperm(N, generator=torch.Generator().manual_seed(1))])


class Joined(Case):
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.options = {"mask_mod": and_masks(causal, near)}

    def change(self) -> None:
        self.options = {"mask_mod": and_masks(causal, causal)}


class Blocks(Case):
    """Lists of blocks are looked at."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.mask = create_block_mask(causal, None, None, M, N, device="cpu", BLOCK_SIZE=16)
        self.options = {"block_mask": self.mask}

    def change(self) -> None:
        self.mask.kv_num_blocks.clamp_(max=1)


class Attribute(Case):
    is_known = False

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        window = self.window = Window()
        self.options = {"mask_mod": lambda b, h, q_idx, kv_idx: q_idx + N - M - kv_idx <= window.size}

    def change(self) -> None:
        self.window.size = 11


class Instance(Case):
    is_known = False

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.window = Window()
        self.options = {"mask_mod": self.window}

    def change(self) -> None:
        self.window.size = 11


class Listed(Case):
    is_known = False

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        sizes = self.sizes = [2]
        self.options = {"mask_mod": lambda b, h, q_idx, kv_idx: q_idx + N - M - kv_idx <= sizes[0]}

    def change(self) -> None:
        self.sizes[0] = 12


class Counted(Case):
    """A mod that writes."""

    is_known = False

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        size, calls = 1, 0

        def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            nonlocal calls
            calls += 1
            return q_idx + N - M - kv_idx <= size

        def resize() -> None:
            nonlocal size
            size = 10

        self.options, self.resize = {"mask_mod": mod}, resize

    def change(self) -> None:
        self.resize()


class Computed(Case):
    """A tensor that the mod makes of another."""

    is_known = False

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        bias = self.bias = torch.linspace(-1, 1, N)
        self.options = {"score_mod": lambda score, b, h, q_idx, kv_idx: score + (bias * 2)[kv_idx]}

    def change(self) -> None:
        self.bias.neg_()


class Asked(Case):
    """A number that the mod takes from data."""

    is_known = False

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        size = self.size = torch.tensor(2)
        self.options = {"mask_mod": lambda b, h, q_idx, kv_idx: q_idx + N - M - kv_idx <= int(size)}

    def change(self) -> None:
        self.size.fill_(13)


CASES: list[Callable[[pytest.MonkeyPatch], Case]] = [
    GlobalNumber, GlobalFunction, GlobalTensor, Closure, Default, Bias, Documents, Joined, Blocks, Attribute,
    Instance, Listed, Counted, Computed, Asked,
]  # fmt: skip


def count_reads(patch: pytest.MonkeyPatch) -> list[None]:
    """A list with an entry for each call whose mods are read."""
    reads: list[None] = []

    def noted(*given: Any, **named: Any) -> Any:
        reads.append(None)
        return trace(*given, **named)

    patch.setattr("attnc.flex.attention.trace", noted)
    return reads


@pytest.mark.one_in(6)
@pytest.mark.parametrize("make", CASES)
def test_mods_are_read_again_where_they_may_do_something_else(
    make: Callable[[pytest.MonkeyPatch], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, reads = make(monkeypatch), count_reads(monkeypatch)
    before = [flex_attention(*draw(), **case.options) for _ in range(7)]
    assert len(reads) == (2 if case.is_known else 7)
    case.change()
    found = flex_attention(*draw(), **case.options)
    forget()
    assert torch.equal(found, flex_attention(*draw(), **case.options))
    assert not torch.equal(found, before[0])
    assert all(torch.equal(o, before[0]) for o in before)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("option", ["scale", "enable_gqa", "return_aux", "strides", "expanded", "type"])
def test_other_arguments_are_other_calls(option: str) -> None:
    q, k, v = draw()
    options: dict[str, Any] = {"mask_mod": causal}
    for _ in range(6):
        flex_attention(q, k, v, **options)
    if option in ("scale", "return_aux"):
        options[option] = 0.5 if option == "scale" else AuxRequest(lse=True)
    elif option == "enable_gqa":
        k, v, options[option] = k[:, :1], v[:, :1], True
    elif option == "strides":
        k = torch.cat([k, k], -1)[..., :D]
    elif option == "expanded":
        k, v = k[:1], v[:1]
    else:
        q, k, v = q.half(), k.half(), v.half()
    found = [flex_attention(q, k, v, **options) for _ in range(6)]
    forget()
    right = flex_attention(q, k, v, **options)
    if option == "return_aux":
        found, right = [(o, aux.lse) for o, aux in found], (right[0], right[1].lse)
        assert all(torch.equal(x, y) for pair in found for x, y in zip(pair, right, strict=True))
    else:
        assert all(torch.equal(o, right) for o in found)


def test_gradients_of_what_mods_read() -> None:
    bias = torch.linspace(-1, 1, N).requires_grad_()
    found = []
    for _ in range(7):
        q, k, v = (x.requires_grad_() for x in draw())
        o = flex_attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx])
        found.append(torch.autograd.grad(o.square().sum(), (q, k, v, bias)))
    assert all(torch.equal(x, y) for other in found for x, y in zip(other, found[0], strict=True))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("rows", [1, M])
def test_numbers_that_vary_repeat_too(rows: int, learns: bool) -> None:
    """After their first few values they are arguments of one kernel, as the offset of a step of decoding."""
    slope, found = torch.ones(()), dict[int, list[torch.Tensor]]()
    for _ in range(2):
        for offset in range(7):

            def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, offset: int = offset) -> Any:
                return torch.where(
                    kv_idx <= q_idx + offset + 2, score + slope * 0.1 * (kv_idx - offset), -9.0
                )

            for at in range(6):
                q, k, v = draw()
                q = q[:, :, :rows].requires_grad_(learns)
                o = flex_attention(q, k, v, score_mod=mod)
                made = [o.detach(), *(torch.autograd.grad(o.square().sum(), q) if learns else ())]
                first = found.setdefault(offset, made)
                assert all(map(torch.equal, made, first)), (offset, at)
    assert not torch.equal(found[0][0], found[6][0])
    built_in = [numbers for program in programs._PROGRAMS.values() for numbers in program.kernels]
    assert any(None in numbers for numbers in built_in)


def test_numbers_on_a_cpu_are_read_at_every_call_on_a_gpu() -> None:
    """They are constants of a call's kernel, whichever operand they are."""
    heat = torch.tensor(0.5)
    mods: list[Callable[..., Any]] = [
        lambda score, b, h, q_idx, kv_idx: score * heat,
        lambda score, b, h, q_idx, kv_idx: heat * score,
        lambda score, b, h, q_idx, kv_idx: torch.where(q_idx > kv_idx, score, heat),
    ]
    for mod in mods:
        tape = trace(mod, None, sizes={}, device=torch.device("cuda")).tape
        assert (tape.numbers, tape.computes) == ([0.5], True)


def test_tensors_that_are_gone_are_forgotten() -> None:
    case = Documents(pytest.MonkeyPatch())
    for _ in range(3):
        flex_attention(*draw(), **case.options)
    assert snapshot._TOKENS
    del case
    assert not snapshot._TOKENS


def test_a_result_that_lies_as_its_query_is_no_view_of_another() -> None:
    """Gradients of rows before heads, of cotangents that lie in any way, once calls repeat themselves."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_() for x in draw())
    leaves = [q, k, v]
    dos = [
        torch.randn(B, H, M, D),
        torch.randn(B, M, H, D).transpose(1, 2),
        torch.ones(()).expand(B, H, M, D),
    ]
    wanted = [torch.autograd.grad(flex_attention(q, k, v, mask_mod=causal), leaves, do) for do in dos]
    for round in range(10):
        for do, gradients in zip(dos, wanted, strict=True):
            o = flex_attention(q, k, v, mask_mod=causal)
            assert o.stride() == leaves[0].stride()
            if round > 5:
                assert o._base is None
                assert "Differentiable" in type(o.grad_fn).__name__
            for _ in range(2 if round < 8 else 6):
                found = torch.autograd.grad(o, leaves, do, retain_graph=True)
                assert all(map(torch.equal, found, gradients))
