"""Text of a spec, a path or a device reaches generated text as a comment or as a literal, never as code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnc.build import compile_program, plan_program
from attnc.model.resolve import resolve
from attnc.source import Source, join_lines
from attnc.syntax.format import format_file
from attnc.syntax.parser import parse, prelude
from attnc.target.quote import comment, literal
from attnc.target.templates import tidy
from attnc.tuned.choices import TunedChoice, dump_tuned, knobs_of_kernel
from tests.tokens import cpp_tokens, python_tokens, tokens_of

ROOT = Path(__file__).parents[2]

#: What ends a comment, a docstring, a line or a string somewhere, or starts something there.
SHARP = (
    '"""', "'''", '"', "'", "\\", "\\\n", "\n", "\r", "\r\n", "\0", "\v", "\f", "\x1b[31m", "\x85", "\u2028",
    "\u202e", "\u2066", "\ufeff", "\udcff", "*/", "/*", "//", "??/", "??/\n", "\\N{", "\\x", "\\u12", "#",
    "{{ x }}", "{% x %}", "{# x #}", "[[ x ]]", "  # ", "(", ")", "[", "]", ", ", " + ", " and ",
    "\n#define x", "\nimport x", "# -*- coding: utf-7 -*-", "<U+0041>", "é", "漢",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(SHARP) | st.text(max_size=8), max_size=8).map("".join)


@given(TEXTS)
@example("a\\")
@example("a??/")
@example('a"')
def test_a_comment_is_inert_in_every_language(text: str) -> None:
    line = comment(text)
    assert line.isprintable()
    assert python_tokens(f"# {line}\nx = 1  # {line}\n") == python_tokens("x = 1")
    assert python_tokens(f'"""{line}\n\n    {line}\n"""\nx = 1\n') == python_tokens("x = 1")
    assert ast.get_docstring(ast.parse(f'"""{line}|"""'), clean=False) == f"{line}|"
    assert cpp_tokens(f"// {line}\nint x;  // {line}\nint y;") == cpp_tokens("int x; int y;")
    assert cpp_tokens(f"/* {line} */ int x;") == cpp_tokens("int x;")
    assert not any(mark in line for mark in ("{{", "{%", "{#", "[[", '"', "\\"))


@given(TEXTS)
def test_a_literal_has_the_value_of_its_text(text: str) -> None:
    assert ast.literal_eval(literal(text)) == text
    line = f"TUNED: dict[str, int] = {{{literal(text)}: ((None, 0),), {literal('x' + text)}: f(1, 2)}}"
    laid_out = tidy(f"{line}  # {comment(text)}{'.' * 100}")
    assert ast.dump(ast.parse(laid_out)) == ast.dump(ast.parse(line))


def test_what_people_write_stays_as_it_is() -> None:
    plain = "specs/my spec-2.attn: mask = (kv_idx <= q_pos and doc[b, kv_idx] // 2 != -1) é 漢"
    assert comment(plain) == plain
    assert literal("NVIDIA A100-SXM4-80GB") == '"NVIDIA A100-SXM4-80GB"'
    assert comment("a\tb\x1b") == "a<U+0009>b<U+001B>"
    assert comment("word " * 30, 20) == "word word word ..."
    assert comment("a_word_of_many_letters", 12) == "a_word_of..."


def test_a_statement_is_joined_without_its_comments() -> None:
    text = "a = 1 # x\nb = (  # one\n  c\n\n  # two )\n  and d[  # three\n    0\n  ]\n)\ne = 2\n"
    source = Source("x.attn", text)
    assert join_lines(source.statement(text.index("and")).text) == "b = (c and d[0])"
    assert source.statement(text.index("d[")).line == 2
    assert [join_lines(source.statement(at).text) for at in (0, len(text) - 2)] == ["a = 1", "e = 2"]
    assert join_lines("") == ""


# --- whole files --------------------------------------------------------------------------------------------


def compiled(text: str, path: str = "spec.attn") -> dict[str, str]:
    """The files of a spec by path."""
    program = resolve(parse(Source(path, text)), prelude())
    return {output.path: output.text for output in compile_program(program, path).outputs}


def tokens(files: dict[str, str]) -> dict[str, tuple[str, ...]]:
    return {path: tokens_of(path, text) for path, text in files.items()}


BROKEN = """\
def near(width) = (
  abs(q_pos - kv_idx)  # DANGER */ \\
  < width
)
attention broken {
  input q: f16[B, M, H, 64]
  input k, v: f16[B, N, H, 64]
  input kv_len: i32[B]
  length N = (  # DANGER
    kv_len[b]
  )
  score = (  # DANGER
#define DANGER(a) __attribute__((constructor)) void f() { system("id"); }
    dot(q, k)  # \"\"\" DANGER
    / sqrt(D)  # DANGER \\
  )
  mask = (
#include "DANGER"
    causal and near(  # DANGER ??/
      64
#pragma DANGER
    )
  )
  normalize = softmax  # DANGER
  output o: f16[B, M, H, 64]
  grad q, k, v  # DANGER
}  # DANGER
schedule broken for triton { tile.q = 64, tile.kv = 64 }
schedule broken for cuda.sm_80 { tile.q = 64, tile.kv = 64 }  # DANGER
"""


def without(text: str) -> str:
    """The spec without its comments."""
    return "\n".join(line.split("#")[0] for line in text.split("\n"))


HOSTILE_PATHS = (
    "spec.attn",
    'DANGER"""\n import DANGER #\\.attn',
    "\udcff*/DANGER??/\\",
    "LN2 SCALE _tanh tanh_ _keep_dropout add_shared_product where< .attn",  # what a kernel is searched for
)


def test_comments_and_paths_change_no_token() -> None:
    plain = tokens(compiled(without(BROKEN)))
    for path in HOSTILE_PATHS:
        made = compiled(BROKEN, path)
        assert tokens(made) == plain, path
        for text in made.values():
            text.encode()


def test_devices_are_literals() -> None:
    device = 'x": 0}\nimport DANGER  # (\\'
    text = without(BROKEN)
    modules = plan_program(resolve(parse(Source("spec.attn", text)), prelude())).modules
    choices = [
        TunedChoice(
            target=module.target, attention="broken", variant="default", device=device, toolchain="",
            kv_len=None, config=knobs_of_kernel("forward", module.kernel.configs[0]), microseconds=1,
        )
        for module in modules
    ]  # fmt: skip
    program = resolve(parse(Source("spec.attn", text)), prelude())
    tuned = Source("tuned.json", dump_tuned(choices))
    for output in compile_program(program, "spec.attn", tuned).outputs:
        if output.path.endswith("default.py"):
            tables = [
                ast.literal_eval(node.value)
                for node in ast.parse(output.text).body
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TUNED" and node.value
            ]
            assert tables == [{device: ((None, 0),)}]


# --- formatting ---------------------------------------------------------------------------------------------

_VALUE = re.compile(r"^( *(?:score|mask|let \w+|length [MN]|def \w+(?:\([\w, ]*\))?) = )(.*)$", re.M)


def spread(text: str) -> str:
    """The spec with every expression in brackets, over as many lines as there are words, with comments."""

    def lines(match: re.Match[str]) -> str:
        words = "".join(f"\n  {word}  # DANGER {at} \\" for at, word in enumerate(match[2].split(" ")))
        return f"{match[1]}(  # DANGER{words}\n)"

    return _VALUE.sub(lines, "\n".join(line.split("#")[0] for line in text.split("\n")))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["extend", "dropout"])
def test_formatting_changes_no_kernel(name: str) -> None:
    text = (ROOT / "specs" / f"{name}.attn").read_text(encoding="utf-8")
    apart = spread(text)
    formatted = format_file(parse(Source("spec.attn", apart)))
    assert apart != text != formatted != apart
    plain = tokens(compiled(text))
    assert tokens(compiled(apart)) == plain
    assert tokens(compiled(formatted)) == plain


def test_formatting_what_needs_several_lines_changes_no_kernel() -> None:
    mask = " and ".join(f"h + {n} < H + 4321" for n in range(1, 9))
    text = without(BROKEN).replace("causal and near(", f"{mask} and near(")
    formatted = format_file(parse(Source("spec.attn", text)))
    assert "mask = (\n" in formatted
    assert tokens(compiled(formatted)) == tokens(compiled(text))
