"""The normal form of integer expressions, read through `show`."""

import pytest

from attnc.expr.affine import affine, at_least, normalize
from attnc.expr.construct import compare
from attnc.expr.nodes import show
from tests.expr.spell import spell


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("q_pos", "q_idx + N - M"),
        ("q_pos - kv_idx - (q_idx - kv_idx)", "N - M"),
        ("1 - (kv_idx - 3) * 2", "7 - kv_idx * 2"),
        ("2 + kv_idx * 3 * 4 - 2", "kv_idx * 12"),
        ("(16 * kv_idx + 35) // 16", "kv_idx + 2"),
        ("(kv_idx + 16 * q_idx - 5) % 16", "(kv_idx - 5) % 16"),
        ("(kv_idx - 19) // 16", "(kv_idx - 3) // 16 - 1"),
        ("kv_idx // -4", "-kv_idx // 4"),
        ("doc[b, q_pos + 1 - 1] + 1", "doc[b, q_idx + N - M] + 1"),
        ("kv_idx * width[h]", "kv_idx * width[h]"),
        ("max(kv_idx + 1 + 1, N) + prefix[b]", "max(kv_idx + 2, N) + prefix[b]"),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert show(affine(spell(text)).expr) == normal


def test_normalize_reaches_into_masks() -> None:
    assert show(normalize(spell("kv_idx + 0 < q_pos - 1 + 1 or keep[b, kv_idx * 1]"))) == (
        "kv_idx < q_idx + N - M or keep[b, kv_idx]"
    )


def test_equal_sums_are_equal() -> None:
    assert affine(spell("a + b - (c - a)")) == affine(spell("2 * a - c + b"))


@pytest.mark.parametrize(("op", "least"), [("<", 1), ("<=", 0), (">", None), (">=", None), ("==", None)])
def test_a_comparison_says_by_how_much_one_side_is_larger(op: str, least: int | None) -> None:
    a, b = spell("a"), spell("b")
    given = compare(op, a, b)  # type: ignore[arg-type]  # one of the operators
    for more in range(-3, 4):
        is_known = least is not None and more <= least
        assert at_least(b, spell(f"a + {more}"), given) == is_known
