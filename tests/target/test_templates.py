"""Wrapping must keep the meaning: every wrapped statement parses to the tree of the long line. Templates are
compiled once for all processes, and again when they change.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest

from attnc.target import templates
from attnc.target.templates import KeptTemplates, fill_each, python_environment, tidy, wrap

LINES = (
    (
        "if not (isinstance(block_table, torch.Tensor) and block_table.dim() == 2 and not table.is_nested"
        " and torch._C._get_tracing_state() is None):"
    ),
    (
        "keep = (kv_idx[None, :] < N) & ((a[:, None] == b[None, :]) | (c < d))"
        " & (q_pos[:, None] - 128 <= kv_idx[None, :]) & x"
    ),
    (
        "doc = tl.load(doc_row + tl.maximum(first_pos, 0).to(tl.int64) * stride_doc_1,"
        " mask=(0 <= first) & (first < N), other=0)"
    ),
    (
        "acc, l, m = _forward_step(acc, l, m, q, K, V, b, h_kv, kv_lo, N, stride_kn, stride_vn, q_pos,"
        " MASKED=True, BLOCK_N=BLOCK_N)"
    ),
    (
        "if kv_hi >= q_lo - _floor_div(q_hi - kv_lo + N - M, 2) * 2 + N - M"
        " and a_rather_long_name_for_a_test and another_name(1):"
    ),
    (
        "if (kv_lo < text) | (tl.maximum(_floor_div(first_pos, 16) - kv_hi // 16, kv_lo // 16 - last) <= 3)"
        " & (tl.where(kv_lo // 16 == kv_hi // 16, kv_hi % 16, 15) <= 3):"
    ),
    (
        "hi = (first_rather_long_name + second_rather_long_name) * tl.minimum(third_rather_long_name, N)"
        " - fourth_rather_long_name"
    ),
    (
        "scale = tl.load(scale_ptr + b.to(tl.int64) * stride_scale_0"
        " + key_row[:, None].to(tl.int64) * stride_scale_1 + h_kv.to(tl.int64) * stride_scale_2,"
        " mask=key_row < N, other=0)"
    ),
    (
        "if (kv_lo <= last) & ((kv_lo < N - targets) | (_floor_div(q_lo + targets - M, 4) <= kv_lo // 4)"
        " & (_floor_div(q_hi + targets - M, 4) >= _floor_div(kv_hi + targets - N, 4))) | (first < context):"
    ),
    (
        "lse_rows = lse_ptr + b.to(tl.int64) * stride_lseb + h.to(tl.int64) * stride_lseh"
        " + q_idx.to(tl.int64) * stride_lsem"
    ),
)


@pytest.mark.parametrize("line", LINES)
def test_a_wrapped_statement_means_the_same(line: str) -> None:
    body = "\n    pass" if line.startswith("if") else ""
    wrapped = wrap("    " + line)
    assert wrapped.count("\n") > 0
    assert ast.dump(ast.parse(textwrap.dedent(wrapped) + body)) == ast.dump(ast.parse(line + body))


@pytest.mark.parametrize("line", [*LINES[:4], *LINES[-3:-1]])
def test_wrapped_lines_are_short(line: str) -> None:
    assert max(map(len, wrap("    " + line).split("\n"))) <= 110


def test_a_sum_in_a_call_has_a_line_for_each_operand() -> None:
    line = "x = tl.load(first_ptr + second * stride_second + third * stride_third, mask=second < N, other=0)"
    assert wrap(line, width=40).split("\n") == [
        "x = tl.load(",
        "    first_ptr",
        "    + second * stride_second",
        "    + third * stride_third,",
        "    mask=second < N, other=0,",
        ")",
    ]


def test_a_comment_that_is_too_long_goes_on_in_the_next_line() -> None:
    assert wrap("    # one two three four", width=16) == "    # one two\n    # three four"
    assert wrap("    x = 1  # one two three", width=16) == "    # one two\n    # three\n    x = 1"


def test_a_docstring_that_is_too_long_goes_on_in_the_next_line() -> None:
    words = " ".join(["word"] * 40)
    first, *others, last = wrap(f'    """{words}"""').split("\n")
    assert first.startswith('    """word')
    assert all(line.startswith("    word") and len(line) <= templates.WIDTH for line in others)
    assert last == '    """'
    assert " ".join("".join(f"{line.strip()} " for line in (first, *others)).split()) == f'"""{words}'


def test_a_remark_goes_in_front_of_a_line_that_is_too_long() -> None:
    line = "    shift = tl.where(m_new == -float(0), 0.0, m_new) if MASKED else m_new  # rows yet unseen"
    assert wrap(line, width=80) == "    # rows yet unseen\n" + line.partition("  #")[0]


def test_sentences_products_and_short_lines_stay() -> None:
    for line in ("x is a descriptor (TMA: it loads the tile), or a pointer", "if (a - b) * (c - d) * e:"):
        assert wrap(line, width=20) == line  # a comma in these brackets would make a tuple
    assert wrap("x = f(a, b)") == "x = f(a, b)"


def test_definitions_are_two_lines_apart_and_bodies_one() -> None:
    assert tidy("a = 1\n\ndef f():\n    x\n\n\n\n    y\n\n\n\n\n") == "a = 1\n\n\ndef f():\n    x\n\n    y\n"


def test_a_form_is_filled_once_for_each_item() -> None:
    assert fill_each(["a", "b"], "{0} = {0};") == "a = a;\nb = b;"
    assert fill_each([(1, "x"), (2, "y")], "at[{}] = {};") == "at[1] = x;\nat[2] = y;"
    assert fill_each([], "{};") == ""


def test_an_empty_list_or_a_value_that_is_left_out_is_no_line_of_python() -> None:
    template = (
        "a = 1\n    {{ loads | lines | indent(4) }}\n    {{ 'b = 2' if b }}\nc = {{ 3 if c }}\n{{ d }}\n"
    )

    def render(*loads: str, b: bool = False) -> str:
        return python_environment().from_string(template).render(loads=loads, b=b, c=False, d="")

    assert render() == "a = 1\nc = \n\n"
    assert render("x = 4", "y = 5", b=True) == "a = 1\n    x = 4\n    y = 5\n    b = 2\nc = \n\n"


@pytest.mark.parametrize("name", ["", "grid="])
@pytest.mark.parametrize("size", [60, 85, 100, 400])
def test_brackets_and_commas_of_strings_are_not_broken_at(name: str, size: int) -> None:
    """Grids are texts of sizes, which have calls in them: a newline there is a syntax error."""
    term = "cdiv(M * ((H + (BLOCK_M - 1)) // BLOCK_M * BLOCK_M), BLOCK_M)"
    text = (f"{term} * " * (size // len(term) + 1))[:size].rstrip()
    line = f'    Kernel("f", {name}"{text}", changes={{"shared": "max(a, b)"}})'
    wrapped = wrap(line)
    assert ast.dump(ast.parse(wrapped.strip())) == ast.dump(ast.parse(line.strip()))
    assert max(map(len, wrapped.splitlines())) <= 110


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one place of the code of templates."""
    monkeypatch.setattr(templates, "kept_code", lambda module, name: tmp_path / "code")
    return tmp_path / "code"


def rendered(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """What a new process makes of a template, and how often it compiles it."""
    loader = jinja2.DictLoader({"one": text})
    environment = jinja2.Environment(loader=loader, bytecode_cache=KeptTemplates("{{"))
    compile_, sources = environment.compile, list[str]()

    def noted(source: str, *more: str | None) -> object:
        sources.append(source)
        return compile_(source, *more)  # type: ignore[call-overload]  # of Jinja

    monkeypatch.setattr(environment, "compile", noted)
    return environment.get_template("one").render(), len(sources)


def test_a_template_is_compiled_once_for_all_processes(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendered("{{ 1 + 1 }}", monkeypatch) == ("2", 1)
    assert rendered("{{ 1 + 1 }}", monkeypatch) == ("2", 0)
    assert rendered("{{ 1 + 2 }}", monkeypatch) == ("3", 1)
    monkeypatch.setattr(templates, "_state_of_package", lambda: "a filter has changed")
    assert rendered("{{ 1 + 2 }}", monkeypatch) == ("3", 1)
    assert [*kept.parent.iterdir()] == [kept]


@pytest.mark.parametrize("damage", [
    lambda code: b"", lambda code: b"other code" * 9, lambda code: code[:-9],
    lambda code: code[:-9] + bytes([code[-9] ^ 1]) + code[-8:],
])  # fmt: skip
def test_code_that_was_damaged_is_made_again(
    damage: Callable[[bytes], bytes], kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered("{{ 1 + 1 }}", monkeypatch)
    kept.write_bytes(damage(kept.read_bytes()))
    assert rendered("{{ 1 + 1 }}", monkeypatch) == ("2", 1)
    assert rendered("{{ 1 + 1 }}", monkeypatch) == ("2", 0)


def test_nothing_is_kept_where_nothing_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (None, tmp_path / "no folder" / "code"):
        monkeypatch.setattr(templates, "kept_code", lambda module, name, place=place: place)
        assert rendered("{{ 1 + 1 }}", monkeypatch) == ("2", 1)
    assert [*tmp_path.iterdir()] == []
