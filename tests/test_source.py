"""Offsets, lines and columns."""

from hypothesis import given
from hypothesis import strategies as st

from attnc.source import Source


@given(st.text(alphabet="ab\r\n\t漢\u2028"), st.data())
def test_positions_agree_with_the_lines(text: str, data: st.DataObject) -> None:
    source = Source("x.attn", text)
    offset = data.draw(st.integers(0, len(text)))
    line, column = source.position(offset)
    assert line == text[:offset].count("\n") + 1
    assert source.line_start(line) + column - 1 == offset
    assert source.line_text(line) == text.split("\n")[line - 1].removesuffix("\r")


def test_spans() -> None:
    source = Source("x.attn", "ab\ncd\nef")
    span = source.span(1, 4)
    assert (span.text, span.line, span.end_line) == ("b\nc", 1, 2)
    assert source.span(1, 3).end_line == 1
    assert source.span(8, 8).end_line == 3
    assert span.to(source.span(6, 7)).text == "b\ncd\ne"
    assert (str(span), repr(span)) == ("x.attn:1:2", "<x.attn:1:2>")


def test_spans_are_values_and_sources_are_identities() -> None:
    source, twin = Source("x.attn", "a"), Source("x.attn", "a")
    assert source.span(0, 1) == source.span(0, 1)
    assert hash(source.span(0, 1)) == hash(source.span(0, 1))
    assert source.span(0, 1) != twin.span(0, 1)
