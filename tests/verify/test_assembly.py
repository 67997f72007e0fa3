"""Instructions of PTX on NumPy: what they make of words, and which are not known. What conversions come to is
in `test_narrow`.
"""

from __future__ import annotations

import numpy as np
import pytest

from attnc.verify.assembly import run

WORD = np.dtype(np.uint32)


def made(text: str, *words: int) -> int:
    (result,) = run(text, [np.array([word], np.uint32) for word in words], [WORD], 1)
    return int(result[0])


def test_bytes_are_picked_from_both_words() -> None:
    assert made("prmt.b32 $0, $1, $2, 0x7160;", 0x44332211, 0x88776655) == 0x88227711
    assert made("prmt.b32 $0, $1, 0xAA, 0x4321;", 0x44332211) == 0xAA443322
    with pytest.raises(AssertionError, match="no sign is spread"):
        made("prmt.b32 $0, $1, $2, 0x8000;", 1, 2)


def test_a_word_has_two_halves_of_which_the_first_is_low() -> None:
    halves = "{ .reg .b16 a, b; .reg .f32 c, d; mov.b32 {a, b}, $1; // the numbers of both\n"
    assert made(halves + "cvt.f32.f16 c, a; mov.b32 $0, c; }", 0xC0003C00) == 0x3F800000
    assert made(halves + "cvt.f32.f16 d, b; mov.b32 $0, d; }", 0xC0003C00) == 0xC0000000
    assert made("cvt.rn.bf16x2.f32 $0, $1, $2;", 0x3F800000, 0x40008001) == 0x3F804001
    assert made("sub.f16x2 $0, $1, 0x3c003c00;", 0x40003C00) == 0x3C000000
    assert made("cvt.rn.f16x2.e4m3x2 $0, $1;", 0x38B8) == 0x3C00BC00


def test_elements_that_fill_no_word_are_converted_too() -> None:
    codes = np.array([[1, 2, 3], [4, 5, 6]], np.uint8)
    text = "prmt.b32 $0, 0, $2, 0x5040; prmt.b32 $1, 0, $2, 0x7060;"
    (result,) = run(text, [codes], [np.dtype(np.uint16)], 4)
    assert result.tolist() == [[256, 512, 768], [1024, 1280, 1536]]


@pytest.mark.parametrize("text", ["add.u32 $0, $1, $1;", "xor.b64 $0, $1, $1;", "nonsense"])
def test_what_is_not_known_is_named(text: str) -> None:
    with pytest.raises(LookupError, match=text.split()[0].rstrip(";")):
        made(text, 1)
