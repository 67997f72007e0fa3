"""Text -> tree: what was written is what the tree says, and where."""

from pathlib import Path

import pytest
from lark import Lark

from attnc.diagnostics import DiagnosticError
from attnc.resources import resource
from attnc.source import Source
from attnc.syntax import ast, parser
from attnc.syntax.parser import MAX_ERRORS, load, parse
from tests.refusals import refused

EXAMPLES = sorted((Path(__file__).parent / "examples").glob("*.attn"))


def parse_text(text: str) -> ast.File:
    return parse(Source("test.attn", text))


def parse_expr(text: str) -> ast.Expr:
    [item] = parse_text(f"def f = {text}").items
    assert isinstance(item, ast.Def)
    return item.value


def errors_of(text: str) -> list[tuple[str, int]]:
    with pytest.raises(DiagnosticError) as caught:
        parse_text(text)
    return [(d.code, d.primary.span.line) for d in caught.value.diagnostics]


def show(expr: ast.Expr) -> str:
    """The structure of an expression, every operation in brackets."""
    match expr:
        case ast.Name():
            return expr.id
        case ast.Number():
            return expr.text
        case ast.Bool():
            return str(expr.value).lower()
        case ast.UnaryOp():
            return f"[{expr.op} {show(expr.operand)}]"
        case ast.Not():
            return f"[not {show(expr.operand)}]"
        case ast.BinaryOp():
            return f"[{show(expr.left)} {expr.op} {show(expr.right)}]"
        case ast.Compare():
            rest = (f"{op} {show(operand)}" for op, operand in zip(expr.ops, expr.operands[1:], strict=True))
            return f"[{' '.join((show(expr.operands[0]), *rest))}]"
        case ast.BoolOp():
            return f"[{f' {expr.op} '.join(map(show, expr.operands))}]"
        case ast.Call():
            kwargs = (f"{keyword.name.id}={show(keyword.value)}" for keyword in expr.kwargs)
            return f"{expr.function.id}({', '.join((*map(show, expr.args), *kwargs))})"
        case ast.Subscript():
            return f"{expr.tensor.id}<{', '.join(map(show, expr.indices))}>"
        case ast.ListValue():
            return f"list({', '.join(map(show, expr.items))})"


@pytest.mark.parametrize("path", [*EXAMPLES, resource("grammar", "prelude.attn")], ids=lambda path: path.stem)
def test_examples_parse(path: Path) -> None:
    assert parse(load(path)).items


@pytest.mark.parametrize(
    ("text", "structure"),
    [
        ("a or b and not c == d", "[a or [b and [not [c == d]]]]"),
        ("a and b and c or d", "[[a and b and c] or d]"),
        ("(a and b) and c", "[[a and b] and c]"),
        ("a - b - c * -d // e", "[[a - b] - [[c * [- d]] // e]]"),
        ("a - (b - c)", "[a - [b - c]]"),
        ("q - W <= kv < q + 1", "[[q - W] <= kv < [q + 1]]"),
        ("(a < b) == (c < d)", "[[a < b] == [c < d]]"),
        ("not not a", "[not [not a]]"),
        ("- -2 % 1e-6", "[[- [- 2]] % 1e-6]"),
        ("doc[b, q_pos + 1] == doc[b, f(x, y)]", "[doc<b, [q_pos + 1]> == doc<b, f(x, y)>]"),
        ("p[] * true", "[p<> * true]"),
        ("f(1, x = [a, [b]], y = g())", "f(1, x=list(a, list(b)), y=g())"),
        ("length + score + mask + where(input, 1, 2)", "[[[length + score] + mask] + where(input, 1, 2)]"),
        ("(\n  a +  # comment\n\n  b\n)", "[a + b]"),
    ],
)
def test_expressions(text: str, structure: str) -> None:
    assert show(parse_expr(text)) == structure


def test_numbers_keep_their_text() -> None:
    number = parse_expr("0.10e2")
    assert number == ast.Number(text="0.10e2", value=10.0, span=number.span)
    assert isinstance(parse_expr("010").span.text, str)
    assert parse_expr("7") == ast.Number(text="7", value=7, span=number.span)


def test_attention() -> None:
    [item] = parse_text(
        "attention a {\n"
        "  param T in {f16, bf16}, D in {64,\n    128}\n"
        "  input k, v: T[B, N, Hkv * G, D] via paged(table, page = 16) is sorted, finite\n"
        "  input p: f32[]\n"
        "  output o: T[B]\n"
        "  grad k, v\n"
        "  grad q: f32\n"
        "}\n"
    ).items
    assert isinstance(item, ast.Attention)
    first, second, tensors, scalar, output, grad, wide = item.items
    assert isinstance(first, ast.Param)
    assert (first.name.id, [show(choice) for choice in first.choices]) == ("T", ["f16", "bf16"])
    assert isinstance(second, ast.Param)
    assert (second.name.id, [show(choice) for choice in second.choices]) == ("D", ["64", "128"])
    assert second.span.text == "D in {64,\n    128}"
    assert isinstance(tensors, ast.Input)
    assert [name.id for name in tensors.names] == ["k", "v"]
    assert [show(size) for size in tensors.shape] == ["B", "N", "[Hkv * G]", "D"]
    assert tensors.storage is not None
    assert show(tensors.storage) == "paged(table, page=16)"
    assert [fact.id for fact in tensors.facts] == ["sorted", "finite"]
    assert isinstance(scalar, ast.Input)
    assert scalar.shape == ()
    assert isinstance(output, ast.Output)
    assert isinstance(grad, ast.Grad)
    assert (grad.span.text, grad.dtype) == ("grad k, v", None)
    assert isinstance(wide, ast.Grad)
    assert wide.dtype is not None
    assert (wide.span.text, wide.dtype.id) == ("grad q: f32", "f32")


def test_schedule() -> None:
    [item] = parse_text(
        "schedule a for cuda.sm_90a {\n"
        "  tile.q = 64, tile.kv in {64, 128}\n"
        "  softmax = online(rescale = lazy(8)), loops = [q, kv]\n"
        "  where tile.q <= tile.kv and stages < 3\n"
        "  backward { accumulate.dq = atomic }\n"
        "}\n"
    ).items
    assert isinstance(item, ast.Schedule)
    assert (item.attention.id, item.target.id) == ("a", "cuda.sm_90a")
    pin, tune, softmax, loops, where, backward = item.entries
    assert isinstance(pin, ast.Setting)
    assert (pin.key.id, pin.is_set) == ("tile.q", False)
    assert isinstance(tune, ast.Setting)
    assert (tune.key.id, tune.is_set, len(tune.values)) == ("tile.kv", True, 2)
    assert isinstance(softmax, ast.Setting)
    assert show(softmax.values[0]) == "online(rescale=lazy(8))"
    assert isinstance(loops, ast.Setting)
    assert show(loops.values[0]) == "list(q, kv)"
    assert isinstance(where, ast.Where)
    assert show(where.condition) == "[[tile.q <= tile.kv] and [stages < 3]]"
    assert isinstance(backward, ast.Phase)
    assert backward.span.text == "backward { accumulate.dq = atomic }"


def test_blocks_for_variants_and_listed_configs() -> None:
    [item] = parse_text(
        "schedule a for triton {\n"
        "  when D == 256 or T == bf16 { config tile.q = 64, stages in {2, 3} }\n"
        "  config warps = 8\n"
        "}\n"
    ).items
    assert isinstance(item, ast.Schedule)
    when, listed = item.entries
    assert isinstance(when, ast.When)
    assert show(when.condition) == "[[D == 256] or [T == bf16]]"
    [inner] = when.entries
    assert isinstance(inner, ast.Listed)
    assert [(setting.key.id, setting.is_set) for setting in inner.settings] == [
        ("tile.q", False),
        ("stages", True),
    ]
    assert isinstance(listed, ast.Listed)
    assert listed.span.text == "config warps = 8"


def test_spans_point_at_the_text() -> None:
    text = "# head\ndef f(x) = (x + 1) * g(x, y = 2)\n"
    file = parse_text(text)
    [item] = file.items
    assert isinstance(item, ast.Def)
    assert item.span.text == text.splitlines()[1]
    product = item.value
    assert isinstance(product, ast.BinaryOp)
    assert product.span.text == "(x + 1) * g(x, y = 2)"
    assert product.left.span.text == "x + 1"
    assert product.right.span.text == "g(x, y = 2)"
    assert [comment.span.text for comment in file.comments] == ["# head"]


def test_a_comma_may_follow_the_last_item_within_brackets() -> None:
    """As where each stands on a line of its own."""
    text = """attention a {
  param D in {64, 128COMMA}
  input q: bf16[B, M, H, DCOMMA]
  let x = max(
    dot(q, k),
    t[b, h, kv_idxCOMMA]COMMA
  )
}
def near(a, bCOMMA) = a < b
schedule a for triton { loops = [q, kvCOMMA], tile.q in {64COMMA} }
"""
    assert parse_text(text.replace("COMMA", ",")) == parse_text(text.replace("COMMA", ""))
    for wrong in ("{64,,}", "{,}"):
        with pytest.raises(DiagnosticError, match="E0102"):
            parse_text(text.replace("COMMA", "").replace("{64}", wrong))


def test_equality_ignores_spans_and_redundant_parentheses() -> None:
    assert parse_text("def f = a + b * c") == parse_text("\n\ndef  f =\ta + ((b) * c)\n\n")


def test_empty_files() -> None:
    for text in ("", "\n", "# only a comment", " \t\r\n\n#\n"):
        assert parse_text(text).items == ()


def test_line_endings_of_windows() -> None:
    text = "# c\r\nattention a {\r\n\r\n  mask = causal # d\r\n}\r\n"
    assert parse_text(text) == parse_text(text.replace("\r", "")) == parse_text(text.replace("\r", "\r\r"))
    assert parse_text("def f = 1\r") == parse_text("def f = 1")


def test_nothing_hides_behind_a_carriage_return() -> None:
    """An editor shows another line where a comment would go on."""
    assert errors_of("# c\rdef f = 1\n") == [("E0101", 1)]
    assert errors_of("def f = 1\r\n# c\r\r c\n") == [("E0101", 2)]


def test_one_error_for_each_item() -> None:
    text = "def a = 1 +\nattention b {\n  mask = x &\n  score == $\n\n"
    text += "schedule c for t { stages = }\ndef d = 1\n}\n"
    assert errors_of(text) == [("E0102", 1), ("E0106", 3), ("E0102", 6), ("E0104", 8)]


def test_a_block_that_swallows_the_next_item_is_one_error() -> None:
    assert errors_of("attention a {\n  def f = 1\n}\n") == [("E0103", 1)]


def test_errors_are_capped() -> None:
    assert len(errors_of("def\n" * 1000)) == MAX_ERRORS


def test_load_drops_the_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "bom.attn"
    path.write_bytes(b"\xef\xbb\xbfdef f = 1\n")
    assert load(path).text == "def f = 1\n"


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_load_points_at_the_first_byte_that_is_not_utf8(tmp_path: Path, mark: bytes) -> None:
    path = tmp_path / "latin.attn"
    path.write_bytes(mark + "# ä\n# ".encode() + b"\xe4\n")
    diagnostic = refused(load, path)
    span = diagnostic.primary.span
    assert (diagnostic.code, *span.source.position(span.start)) == ("E0105", 2, 3)


def test_an_item_that_was_read_before_is_where_it_is_now() -> None:
    written = "def read_before(x) = x + (x)\n"
    parse_text(written)
    hits = parser._read_short.cache_info().hits
    item = parse_text(f"# ä\ndef another = 1\n{written}").items[-1]
    assert parser._read_short.cache_info().hits == hits + 1
    assert isinstance(item, ast.Def)
    assert (item.span.line, item.span.text, item.value.span.text) == (3, written.strip(), "x + (x)")


def test_load_reads_no_more_than_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "large.attn"
    path.write_bytes("€".encode() * 2_000_000)
    with pytest.raises(DiagnosticError, match="E0501"):
        parse(load(path))


def test_tables_of_the_grammar_are_made_once_and_again_where_they_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, right, made = tmp_path / "tables", parser._lark(), []

    class Counted:
        load = Lark.load

        def __new__(cls, *args: object, **options: object) -> Lark:  # type: ignore[misc]  # of tables
            made.append(args)
            return right

    monkeypatch.setattr(parser, "kept_code", lambda module, name: place)
    monkeypatch.setattr(parser, "Lark", Counted)
    new_process = parser._lark.__wrapped__
    new_process()
    tree = new_process().parse("def f = 1\n")
    assert len(made) == 1
    assert tree == right.parse("def f = 1\n")
    written = bytearray(place.read_bytes())
    written[len(written) // 2] ^= 1
    place.write_bytes(written)
    for _ in range(2):
        assert new_process().parse("def f = 1\n") == tree
    assert len(made) == 2
