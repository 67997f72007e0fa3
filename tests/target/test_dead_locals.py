"""Declarations that nothing reads are left out of CUDA text; whatever else it says stays."""

from __future__ import annotations

import pytest

from attnc.target.dead_locals import without_dead_locals

READ = """void f(Args args)
{
    const int H = args.H, M = args.M;
    int N = args.N;
    const int tile = H * M;
    N = min(N, tile);
    for (int i = 0; i < N; ++i) {
        const int key = i;
        use(key);
    }
}
"""


def test_what_is_read_stays() -> None:
    assert without_dead_locals(READ) == READ


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("const int H = args.H, B = args.B, M = args.M;", "const int H = args.H, M = args.M;"),
        (
            "const int H = args.H, M = args.M, lane = H % 32, g = lane / 4;",
            "const int H = args.H, M = args.M;",
        ),
        ("const int H = args.H, M = args.M;\n    float* const sums = at(1, 2);  // of rows", None),
        ("const int H = args.H, M = args.M;\n    const int b = M;  // and c\n    const int c = b;", None),
        ("const int H = args.H, M = args.M;\n    int B = args.B;\n    g(args.B, x.B);  // B", None),
    ],
)
def test_what_is_not_goes(line: str, left: str | None) -> None:
    first = "const int H = args.H, M = args.M;"
    expected = READ.replace(first, left or first)
    if "g(" in line:
        expected = expected.replace(first, f"{first}\n    g(args.B, x.B);  // B")
    assert without_dead_locals(READ.replace(first, line)) == expected


def test_a_name_of_one_block_is_not_read_by_the_next() -> None:
    unread, read = "        const int key = 1;\n", "        const int key = 2;\n        use(key);\n"
    blocks = "    {{\n{}    }}\n    {{\n{}    }}\n}}\n"
    assert without_dead_locals(blocks.format(unread, read)) == blocks.format("", read)


def test_what_does_something_stays() -> None:
    text = "{\n    const int ticket = atomicAdd(counter, 1);\n}\n"
    assert without_dead_locals(text) == text
