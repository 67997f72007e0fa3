"""Tree -> text: canonical, stable, and nothing is lost."""

import re
from pathlib import Path

import pytest

from attnc.resources import resource
from attnc.source import Source
from attnc.syntax.format import format_file
from attnc.syntax.parser import load, parse

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((Path(__file__).parent / "examples").glob("*.attn"))


def format_text(text: str) -> str:
    """Formats, and checks that the result means the same and is stable."""
    file = parse(Source("test.attn", text))
    formatted = format_file(file)
    again = parse(Source("formatted.attn", formatted))
    assert again == file
    assert format_file(again) == formatted
    return formatted


@pytest.mark.parametrize("path", [*EXAMPLES, resource("grammar", "prelude.attn")], ids=lambda path: path.stem)
def test_examples_are_formatted(path: Path) -> None:
    text = load(path).text
    assert format_text(text) == text


def test_committed_specs_are_formatted() -> None:
    folders = ("specs", "examples", "attnc/bench/specs", "tools/bench/specs")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.attn"))]
    assert files
    assert [path for path in files if format_file(parse(load(path))) != load(path).text] == []


@pytest.mark.parametrize(
    ("text", "formatted"),
    [
        ("a+b*-c", "a + b * -c"),
        ("((a+b))+(c+d)", "a + b + (c + d)"),
        ("a-(b-c)*(d/e)//f", "a - (b - c) * (d / e) // f"),
        ("a*(b/c)", "a * (b / c)"),
        ("--a", "-(-a)"),
        ("-(a+b)", "-(a + b)"),
        ("not not(a==b)", "not not a == b"),
        ("not(a and b)", "not (a and b)"),
        ("a or b and c", "a or (b and c)"),
        ("(a or b)and c", "(a or b) and c"),
        ("(a and b)and c", "(a and b) and c"),
        ("(a<b)<c", "(a < b) < c"),
        ("(not a)==b", "(not a) == b"),
        ("a<=b<c+1", "a <= b < c + 1"),
        ("f ( x , y=[1,[2]] , z = g ( ) )", "f(x, y = [1, [2]], z = g())"),
        ("doc [b,q_pos]*p[ ]", "doc[b, q_pos] * p[]"),
        ("1e-06+0.50", "1e-06 + 0.50"),
        ("tile . q", "tile.q"),
    ],
)
def test_expressions(text: str, formatted: str) -> None:
    assert format_text(f"def f={text}") == f"def f = {formatted}\n"


def test_blocks_of_a_schedule() -> None:
    text = """\
schedule a for triton {
when   D==256 { tile.q=64,tile.kv   =  64 } # wide
  when D == 64
  {
    # for narrow heads
    config  tile.q=128,stages in {2,3}
    where   tile.q==128 # and no other
  }
  backward{ dkdv{ warps=8 } }
}
"""
    assert (
        format_text(text.replace("D == 64\n  {", "D == 64 {"))
        == """\
schedule a for triton {
  when D == 256 { tile.q = 64, tile.kv = 64 }   # wide
  when D == 64 {
    # for narrow heads
    config tile.q = 128, stages in {2, 3}
    where tile.q == 128                 # and no other
  }
  backward {
    dkdv { warps = 8 }
  }
}
"""
    )


def test_statements_and_comments() -> None:
    text = """\
#head


# second
attention   a{   # after the brace

 # own line
   param T in{f16,bf16},D in {64,
     128}# choices


   input k,v:T[B,N] via paged( table,page=16 )is sorted
   mask=(a # inner

     and # deep
     b)   # after
   # last

}   # end
schedule a for cuda . sm_90a{tile.q=64,stages in{2,3}
  backward{warps=4 # four
  } # backward ends
  combine {}
  where tile.q<=64}
#tail"""
    assert (
        format_text(text)
        == """\
#head

# second
attention a {                           # after the brace
  # own line
  param T in {f16, bf16}, D in {64, 128}   # choices

  input k, v: T[B, N] via paged(table, page = 16) is sorted
  mask = (
    a                                   # inner
    # deep
    and b
  )                                     # after
  # last
}                                       # end
schedule a for cuda.sm_90a {
  tile.q = 64, stages in {2, 3}
  backward {
    warps = 4                           # four
  }                                     # backward ends
  combine {
  }
  where tile.q <= 64
}
#tail
"""
    )


def test_comments_stay_beside_the_parts_of_an_expression() -> None:
    text = """\
def keep(x) = (   # whom
  x == 1 # one
  # and all that follow
  and (x > 2 or # more
    x < b) # b: before
  # nothing else
)
attention a {
  score = (dot(q, k)   # a product
    / sqrt(D))
  normalize = softmax(
    sink = s[h], # of a head
    dropout = p, seed = seed)
}
"""
    assert (
        format_text(text)
        == """\
def keep(x) = (                         # whom
  x == 1                                # one
  # and all that follow
  and (
    x > 2                               # more
    or x < b
  )                                     # b: before
  # nothing else
)
attention a {
  score = (
    dot(q, k)                           # a product
    / sqrt(D)
  )
  normalize = softmax(
    sink = s[h],                        # of a head
    dropout = p,
    seed = seed
  )
}
"""
    )


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_comments_anywhere_in_brackets_are_kept(path: Path, every: int) -> None:
    """A comment behind every so-many-th token inside of brackets."""
    made, depth = "", 0
    tokens = re.findall(r"#.*|\s+|[\w.]+|[<>=!]=|//|.", load(path).text)
    for i, token in enumerate(tokens):
        depth += (token in "([") - (token in ")]")
        made += token + (f" # {i}) (#\n" if depth and token[0] != "#" and i % every == 0 else "")
    formatted = format_text(made)
    assert re.findall("#.*", formatted) == re.findall("#.*", made)


@pytest.mark.parametrize(
    "comment", ["# causal (as usual)", "# s)", f"# {'#' * 2_000}"], ids=lambda text: text[:9]
)
def test_a_bracket_in_a_comment_closes_nothing(comment: str) -> None:
    """Nor does it take for ever to see that a row of `#` has none."""
    whole = f"def f = (a {comment}\n  and b < 5)"
    assert format_text(whole) == f"def f = (\n{'  a':40}{comment}\n  and b < 5\n)\n"
    part = f"def f = a * (b {comment}\n  - c)"
    assert format_text(part) == f"def f = (\n  a\n  * (\n{'    b':40}{comment}\n    - c\n  )\n)\n"


def test_an_epilogue_over_several_lines_stays_one() -> None:
    gate = "sigmoid(gate[b, q_idx, h, d]) * weight_of_the_column[d]"
    text = (
        f"attention a {{\n  output o: bf16[B, M, H, D] = (\n    attention\n    * {gate} * {gate}\n  )\n}}\n"
    )
    assert len(format_text(text).splitlines()) > len(text.splitlines())


def test_long_statements_are_broken_at_the_loosest_operator() -> None:
    a, b, c = "a" * 40, "b" * 40, "c" * 40
    assert format_text(f"def f = {a} and ({b} or {c})") == f"def f = (\n  {a}\n  and ({b} or {c})\n)\n"
    assert format_text(f"def f = {a} + {b} * 2 - {c}") == f"def f = (\n  {a}\n  + {b} * 2\n  - {c}\n)\n"
    assert format_text(f"def f = {a} < {b} <= {c}") == f"def f = (\n  {a}\n  < {b}\n  <= {c}\n)\n"
    assert format_text(f"def f = g({a}, {b}, x = {c})") == f"def f = g(\n  {a},\n  {b},\n  x = {c}\n)\n"
    assert format_text(f"schedule a for t {{ where {a} < {b} + {c} }}").splitlines()[1] == "  where ("


def test_empty_file() -> None:
    assert format_text("\n \n") == ""
    assert format_text("# c") == "# c\n"


def test_comments_align_within_a_paragraph() -> None:
    text = "def f = 1 # a\ndef gggggggggggggggggggggggggggggggg = 1234 # b\n\ndef h = 1 # c\n"
    assert format_text(text).splitlines() == [
        "def f = 1                                     # a",
        "def gggggggggggggggggggggggggggggggg = 1234   # b",
        "",
        "def h = 1                               # c",
    ]
