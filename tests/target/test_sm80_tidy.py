"""The last touch on C++ text: blank lines, wide lines, and lines of templates that print nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnc.target.sm80 import tidy
from attnc.target.sm80.render import cuda_environment
from attnc.target.sm80.tidy import WIDTH, tidy_cuda, wrap_code, wrap_lines

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "generated").glob("*/cuda_*/*.cu"))
HEADERS = sorted((ROOT / "attnc" / "support").glob("*.cuh"))


def printed(template: str, **values: object) -> str:
    return tidy_cuda(cuda_environment().from_string(template).render(values))


def test_a_line_that_prints_an_empty_value_is_no_line() -> None:
    template = "a;\n    [[ first ]]\n[[ second ]]\n\nb;\n"
    assert printed(template, first="", second="c;") == "a;\nc;\n\nb;\n"
    assert printed(template, first="x;", second="") == "a;\n    x;\n\nb;\n"


def test_an_empty_value_within_a_line_leaves_the_line() -> None:
    assert printed("a([[ x ]]);\n[[ x ]]b;\n", x="") == "a();\nb;\n"


def test_a_macro_that_prints_nothing_is_no_line() -> None:
    template = "{% macro m() %}\n[[ x ]]\n{% endmacro %}\na;\n    [[ m() | trim | indent(4) ]]\nb;\n"
    assert printed(template, x="") == "a;\nb;\n"


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        (f"f({'a' * 60}, {'b' * 60});", [f"f({'a' * 60},", f"    {'b' * 60});"]),
        (f"    x = {'a' * 60} + {'b' * 60};", [f"    x = {'a' * 60}", f"        + {'b' * 60};"]),
        (f"f(g({'a' * 50}, c), {'b' * 60});", [f"f(g({'a' * 50}, c),", f"    {'b' * 60});"]),
        (f'"{"a " * 70}"', [f'"{"a " * 70}"']),
        (f"#define X {'a ' * 70}", [f"#define X {'a ' * 70}"]),
    ],
    ids=["comma", "operator", "outer_bracket_first", "string", "directive"],
)
def test_wide_lines_break_where_a_person_would(line: str, lines: list[str]) -> None:
    assert wrap_code(line) == lines


def test_the_body_of_a_wide_function_has_lines_of_its_own() -> None:
    body = f"return {'a' * 50} + {'b' * 50}"
    assert wrap_code(f"    auto f = [&](int x, int y) {{ g(x, y); {body}; }};") == [
        "    auto f = [&](int x, int y) {",
        "        g(x, y);",
        f"        {body};",
        "    };",
    ]
    assert wrap_code(f"__device__ int f(int x) {{ {body}; }}") == [
        "__device__ int f(int x)",
        "{",
        f"    {body};",
        "}",
    ]
    assert wrap_code("auto f = [] { return 1; };") == ["auto f = [] { return 1; };"]


def test_places_to_break_depend_on_what_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    term = "acc + (q * k) "
    once, longer = (wrap_code(f"    s = {term * count};") for count in (100, 200))
    assert longer[:10] == once[:10]

    class Counted:
        def __init__(self, pattern: re.Pattern[str]) -> None:
            self.pattern = pattern

        def finditer(self, text: str) -> Iterator[re.Match[str]]:
            assert len(text) <= 3 * WIDTH
            return self.pattern.finditer(text)

    monkeypatch.setattr(tidy, "_BREAKS", tuple(map(Counted, tidy._BREAKS)))
    assert wrap_code(f"    s = {term * 200};") == longer


def test_a_line_without_a_good_place_breaks_at_a_poor_one() -> None:
    deep = "(long)(" * 20 + "x" + ")" * 20
    assert wrap_code(f"    const int hi = {deep};") == ["    const int hi =", f"        {deep};"]
    call = f"f({'a' * WIDTH}, b);"
    assert wrap_code(call) == [call.partition(" ")[0], "    b);"]


def test_a_wide_remark_goes_in_front_and_a_wide_comment_goes_on() -> None:
    remark = "why " * 20
    assert list(wrap_lines(f"    x = {'a' * 60};  // {remark}")) == [
        f"    // {remark.strip()}",
        f"    x = {'a' * 60};",
    ]
    first, second = list(wrap_lines(f"// - {'word ' * 30}\n//   and more"))
    assert first.startswith("// - word")
    assert second.startswith("//   word")
    assert second.endswith("and more")


def test_generated_kernels_are_narrow_and_have_no_stray_blank_lines() -> None:
    for path in (*FILES, *HEADERS):
        text = path.read_text(encoding="utf-8")
        assert max(map(len, text.splitlines())) <= WIDTH, path
        assert "\n\n\n" not in text, path
    for path in FILES:
        assert not re.search(r"\{\n\n|\n\n[ \t]*\}", path.read_text(encoding="utf-8")), path


def test_kernels_and_headers_speak_of_roles_and_not_of_persons() -> None:
    texts = (*HEADERS, *(ROOT / "templates").rglob("*.jinja"), *(ROOT / "templates").rglob("*.h"))
    person = re.compile(r"\b(who|whoever|nobody|somebody|anybody)\b", re.IGNORECASE)
    found = [str(path) for path in texts if person.search(path.read_text(encoding="utf-8"))]
    assert found == []
