"""Diagnostics: the registry, the renderer, and one golden file for each code.

tests/golden/diagnostics holds `CODE_what_is_wrong.attn`, a spec with that mistake, and `.txt`: what is said.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from attnc.diagnostics import (
    CODES,
    Diagnostic,
    DiagnosticError,
    Label,
    did_you_mean,
    error,
    render,
    suggest,
    to_json,
    warning,
)
from attnc.source import Source, Span
from tests.front_end import CODE_RANGES, diagnose

GOLDEN = Path(__file__).parent / "golden" / "diagnostics"

# Specs that are no text, or too large to be kept.
GENERATED = {
    "E0105_not_utf8": b"attention a {\n  mask = causal   # caf\xe9\n}\n",
    "E0501_large_file": b"# padding\n" * 27_000,
}

NAMES = sorted({path.stem for path in GOLDEN.glob("*.attn")} | GENERATED.keys())


@pytest.mark.parametrize("name", NAMES)
def test_golden(
    name: str, golden: Callable[[Path, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if name in GENERATED:
        (tmp_path / f"{name}.attn").write_bytes(GENERATED[name])
        monkeypatch.chdir(tmp_path)
    else:
        monkeypatch.chdir(GOLDEN)
    diagnostics = diagnose(Path(f"{name}.attn"))
    assert name.split("_")[0] in {diagnostic.code for diagnostic in diagnostics}
    golden(GOLDEN / f"{name}.txt", render(diagnostics))


def test_every_code_has_a_golden_file() -> None:
    reachable = {code for code in CODES if code.startswith(CODE_RANGES)}
    assert reachable - {name.split("_")[0] for name in NAMES} == set()


def test_every_golden_file_has_its_spec() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(NAMES)


def test_codes_are_in_order_and_explained() -> None:
    assert list(CODES) == sorted(CODES, key=lambda code: (code[0] == "W", code))
    for code, info in CODES.items():
        assert re.fullmatch(r"E0[1-69]\d\d|W0[278]\d\d", code)
        assert info.title
        assert not info.title.endswith(".")
        assert info.explanation.endswith(".")


# --- the renderer -------------------------------------------------------------------------------------------


def place(text: str, mark: str) -> Span:
    """The span of `mark` in `text`."""
    start = text.index(mark)
    return Source("x.attn", text).span(start, start + len(mark))


def quoted(span: Span, label: str = "") -> list[str]:
    """The lines below the header and the place."""
    return render([error("E0102", "m", span, label)]).splitlines()[2:]


def test_render_as_documented() -> None:
    source = Source("specs/local_sink.attn", "\n" * 6 + "  mask = causal and q_pos - W < kv_indx\n")
    span = source.span(6 + 32, 6 + 39)
    label = "not an index, dimension, input, param or def"
    hints = did_you_mean("kv_indx", ("kv_idx", "q_idx"))
    assert render([error("E0102", "unknown name 'kv_indx'", span, label, hints=hints, notes=["n"])]) == (
        "error[E0102]: unknown name 'kv_indx'\n"
        "  --> specs/local_sink.attn:7:33\n"
        " 7 |   mask = causal and q_pos - W < kv_indx\n"
        "   |                                 ^^^^^^^ not an index, dimension, input, param or def\n"
        "   = note: n\n"
        "   = help: did you mean 'kv_idx'?\n"
    )


def test_the_gutter_grows_with_the_line_number() -> None:
    source = Source("x.attn", "\n" * 99 + "abc")
    lines = render([error("E0102", "m", source.span(99, 100))]).splitlines()
    assert lines[1:] == ["   --> x.attn:100:1", "100 | abc", "    | ^"]


def test_several_diagnostics_follow_each_other() -> None:
    span = place("abc", "b")
    one = render([error("E0102", "m", span)])
    assert render([error("E0102", "m", span)] * 2) == one * 2


def test_tabs_and_wide_characters_keep_the_underline_in_place() -> None:
    assert quoted(place("\tab\tx", "x")) == [" 1 |     ab  x", "   |         ^"]
    assert quoted(place("漢字 x", "字")) == [" 1 | 漢字 x", "   |   ^^"]
    assert quoted(place("e\u0301 x", "x")) == [" 1 | e\u0301 x", "   |   ^"]
    assert quoted(place("a\tb", "\t")) == [" 1 | a   b", "   |  ^^^"]


def test_characters_that_steer_a_terminal_are_replaced() -> None:
    text = render([error("E0102", "bad \x1b[31m\nname", place("a\x1b[0m\u202eb", "b"), "l\x07")])
    assert text.isprintable() is False
    assert set(text) - {"\n"} == {char for char in text if char.isprintable()}


def test_empty_spans_mark_a_place() -> None:
    source = Source("x.attn", "ab\ncd\n")
    assert quoted(source.span(2, 2), "here") == [" 1 | ab", "   |   ^ here"]
    assert quoted(source.span(6, 6), "end") == [" 3 |", "   | ^ end"]
    assert quoted(Source("x.attn", "").span(0, 0)) == [" 1 |", "   | ^"]
    assert quoted(Source("x.attn", "ab\r\n").span(3, 4)) == [" 1 | ab", "   |   ^"]


def test_spans_of_several_lines_mark_the_first_and_the_last() -> None:
    text = "a = {\n  b\n  c\n}\n"
    assert quoted(place(text, "{\n  b\n  c\n}"), "block") == [
        " 1 | a = {", "   |     ^", "...", " 4 | }", "   | ^ block",
    ]  # fmt: skip
    assert quoted(place(text, "b\n  c"), "two") == [" 2 |   b", "   |   ^", " 3 |   c", "   |   ^ two"]


def test_related_places() -> None:
    source, other = Source("x.attn", "ab\ncd\nef\ngh\n"), Source("y.attn", "uv\n")
    related = [Label(source.span(9, 10), "later"), Label(other.span(1, 2), "other"), Label(source.span(0, 1))]
    assert render([error("E0102", "m", source.span(1, 2), "here", related=related)]).splitlines()[1:] == [
        "  --> x.attn:1:2",
        " 1 | ab",
        "   | -",
        "   |  ^ here",
        "...",
        " 4 | gh",
        "   | - later",
        "  ::: y.attn:1:2",
        " 1 | uv",
        "   |  - other",
    ]


@pytest.mark.parametrize("at", [0, 100, 1000, 4999])
def test_long_lines_are_cut_around_the_place(at: int) -> None:
    text = "a" * at + "X" + "b" * (5000 - at)
    line, underline = quoted(place(text, "X"), "here")
    assert len(line) < 170
    assert line[underline.index("^")] == "X"
    assert len(quoted(Source("x", text).span(0, 5000))[1]) < 170


def test_color_only_adds_escape_sequences() -> None:
    span = place("a b", "b")
    for diagnostic in (error("E0102", "m", span, "l", hints=["h"], related=[Label(span, "r")]),):
        colored = render([diagnostic], color=True)
        assert "\x1b[1;31m" in colored
        assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == render([diagnostic])


def test_json() -> None:
    source = Source("x.attn", "ab\ncd")
    diagnostic = error("E0102", "m", source.span(1, 4), "l", related=[Label(source.span(0, 1))], notes=["n"])
    [entry] = json.loads(to_json([diagnostic]))
    assert entry["code"] == "E0102"
    assert entry["severity"] == "error"
    assert entry["primary"] == {
        "path": "x.attn", "line": 1, "column": 2, "end_line": 2, "end_column": 2, "label": "l",
    }  # fmt: skip
    assert entry["related"][0]["end_column"] == 2
    assert (entry["notes"], entry["hints"]) == (["n"], [])


# --- the types ----------------------------------------------------------------------------------------------


def test_unknown_codes_are_bugs() -> None:
    span = place("a", "a")
    with pytest.raises(KeyError, match="E9999"):
        Diagnostic(code="E9999", message="m", primary=Label(span))
    with pytest.raises(ValueError, match="severity"):
        warning("E0102", "m", span)


def test_diagnostic_error_carries_diagnostics() -> None:
    failure = DiagnosticError([error("E0102", "m", place("a b", "b"))])
    assert str(failure) == "x.attn:1:3: error[E0102]: m"
    with pytest.raises(ValueError, match="needs a diagnostic"):
        DiagnosticError([])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("kv_indx", "kv_idx"),
        ("kv_dix", "kv_idx"),
        ("KV_IDX", "kv_idx"),
        ("d", "D"),
        ("casual", "causal"),
        ("x", None),
        ("wnd", None),
        ("q_ps", "q_pos"),
        ("", None),
    ],
)
def test_suggest(name: str, found: str | None) -> None:
    assert suggest(name, ("window", "q_pos", "kv_idx", "q_idx", "causal", "D", "q", "k")) == found
    assert did_you_mean(name, ()) == ()
