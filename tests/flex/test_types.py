"""What types numbers in mods have: sums and products of conditions, integers of few bits that wrap around,
quotients that become integers, filled tensors, operands by torch's names; held to torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnc.flex import FlexError, flex_attention, to_spec
from tests.flex.oracle import torch_flex

M = 20
_DRAW = torch.Generator().manual_seed(1)
Q = torch.randn(1, 2, M, 16, generator=_DRAW)
#: Integers that fill their types, so that sums leave them.
U8 = torch.randint(0, 256, (M,), generator=_DRAW).to(torch.uint8)
I8 = torch.randint(-128, 128, (M,), generator=_DRAW).to(torch.int8)
I16 = torch.randint(-30000, 30000, (M,), generator=_DRAW).to(torch.int16)
SIGNED = torch.randint(-5, 5, (M,), generator=_DRAW)
TABLE = torch.randint(0, 5, (10,), generator=_DRAW)
HOLDS = torch.tensor(True)
FLAGS = torch.rand(M, 3, generator=_DRAW) > 0.4

MASKS: dict[str, Callable[..., Any]] = {
    "a negative quotient as an index": lambda b, h, q, kv: TABLE[SIGNED[kv] // 2] <= 2,
    "the product of conditions": lambda b, h, q, kv: (q >= kv) * (kv > 2),
    "the sum of conditions": lambda b, h, q, kv: (q >= kv) + (kv == 7),
    "the larger condition": lambda b, h, q, kv: torch.maximum(q >= kv, kv == 7),
    "the smaller condition": lambda b, h, q, kv: torch.minimum(q >= kv, kv != 7),
    "a captured condition and one": lambda b, h, q, kv: HOLDS & (q >= kv),
    "a captured condition or one": lambda b, h, q, kv: ~HOLDS | (q >= kv),
    "a captured condition or one alone": lambda b, h, q, kv: HOLDS ^ (q >= kv),
    "a truncated quotient": lambda b, h, q, kv: ((q - kv) / 4).int() == 0,
    "truncated by a negative number": lambda b, h, q, kv: ((q - kv) / -3).long() == 0,
    "truncated by name": lambda b, h, q, kv: torch.div(q - kv, 3, rounding_mode="trunc") == -1,
    "rounded down": lambda b, h, q, kv: torch.floor((q - kv) / 4).int() == 0,
    "a difference of uint8": lambda b, h, q, kv: U8[q] - U8[kv] < 100,
    "a sum of uint8": lambda b, h, q, kv: U8[q] + U8[kv] < 100,
    "a number less": lambda b, h, q, kv: U8[kv] - 200 < 100,
    "minus uint8": lambda b, h, q, kv: -U8[kv] < 100,
    "all bits of uint8": lambda b, h, q, kv: ~U8[kv] < 100,
    "the size of int8": lambda b, h, q, kv: torch.abs(I8[kv] // 64 * 64) < 100,
    "uint8 times int8": lambda b, h, q, kv: U8[q] * I8[kv] < 100,
    "int16": lambda b, h, q, kv: I16[q] * 3 < I16[kv] * 2,
    "int8 and a position": lambda b, h, q, kv: I8[kv] + q < 100,
    "a shift": lambda b, h, q, kv: U8[kv] << 1 < 100,
    "a choice": lambda b, h, q, kv: torch.where(kv > q, U8[kv], U8[q]) + 100 < 150,
    "a conversion": lambda b, h, q, kv: (q - kv).to(torch.uint8) > 200,
    "and back": lambda b, h, q, kv: (q * 20).to(torch.int8).long() - 100 < -120,
    "by name": lambda b, h, q, kv: (q * 5000 - kv).short() > 200,
    "as an index": lambda b, h, q, kv: TABLE[(U8[kv] + U8[q]).long() // 26] <= 2,
}

SCORES: dict[str, Callable[..., Any]] = {
    "two conditions added": lambda s, b, h, q, kv: s * ((q > 3) + (kv > 4)),
    "conditions of a row added": lambda s, b, h, q, kv: s + FLAGS[q].sum(),
    "conditions of a row multiplied": lambda s, b, h, q, kv: s + FLAGS[q].prod(),
    "an integer tensor filled by a float": lambda s, b, h, q, kv: s * torch.full_like(q, 2.7),
    "filled by its name": lambda s, b, h, q, kv: s * q.new_full((), 2.7),
    "a number as a tensor, by its name": lambda s, b, h, q, kv: s * q.new_tensor(2.7),
    "filled as a type": lambda s, b, h, q, kv: s * torch.full_like(s, 2.7, dtype=torch.int32),
    "operands by name": lambda s, b, h, q, kv: torch.where(condition=q > kv, input=s, other=kv * 1.0),
    "one operand by name": lambda s, b, h, q, kv: torch.add(torch.clamp(input=s, min=0), other=kv),
    "the end of lerp by name": lambda s, b, h, q, kv: torch.lerp(s, end=s * 2, weight=0.5),
    "a power of two": lambda s, b, h, q, kv: s / 2 ** (h + 1),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_torch(name: str) -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return MASKS[name](b, h, q, kv) | (q == kv)  # no row without a key

    found = flex_attention(Q, Q, Q, mask_mod=mask)
    torch.testing.assert_close(found.double(), torch_flex(Q, Q, Q, None, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_torch(name: str) -> None:
    found = flex_attention(Q, Q, Q, SCORES[name])
    torch.testing.assert_close(found.double(), torch_flex(Q, Q, Q, SCORES[name], None), rtol=1e-4, atol=1e-5)


def test_nothing_is_computed_for_a_type_that_holds_the_result() -> None:
    spec = to_spec(mask_mod=lambda b, h, q, kv: (q > kv).to(torch.int8) + U8[kv] // 2 == U8[q] // 4)
    assert "%" not in spec


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.complex64, torch.float8_e4m3fn])
def test_a_captured_tensor_of_a_type_that_specs_do_not_have(dtype: torch.dtype) -> None:
    captured = torch.ones(M).to(dtype)
    with pytest.raises(FlexError, match=rf"E0903.*a captured tensor of {dtype}(.|\n)*captured\[kv\]"):
        flex_attention(Q, Q, Q, mask_mod=lambda b, h, q, kv: captured[kv] > 0)


def test_an_argument_that_an_operation_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(FlexError, match=r"E0901(.|\n)*'add' with these arguments(.|\n)*'out'"):
        to_spec(lambda s, b, h, q, kv: torch.add(s, 1, out=None))
