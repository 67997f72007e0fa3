"""From text to a resolved program, for the tests of the model."""

from pathlib import Path

import pytest

from attnc.diagnostics import Diagnostic, DiagnosticError
from attnc.model.attention import Attention
from attnc.model.program import Program
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import load, parse, prelude

ROOT = Path(__file__).parent.parent.parent
SPECS = sorted((ROOT / "specs").glob("*.attn"))
EXAMPLES = sorted((Path(__file__).parent / "examples").glob("*.attn"))

#: An attention to which a test adds lines; `{extra}` stands between the inputs and the score.
PLAIN = """attention plain {{
  input q: bf16[B, M, Hkv * G, D]
  input k, v: bf16[B, N, Hkv, D]
  {extra}
  score = {score}
  mask = {mask}
  normalize = softmax
  output o: bf16[B, M, Hkv * G, D]
}}
"""


def resolve_path(path: Path) -> Program:
    return resolve(parse(load(path)), prelude())


def resolve_text(text: str) -> Program:
    return resolve(parse(Source("test.attn", text)), prelude())


def plain(extra: str = "", *, score: str = "dot(q, k) / sqrt(D)", mask: str = "causal") -> str:
    return PLAIN.format(extra=extra, score=score, mask=mask)


def attention_of(text: str) -> Attention:
    return resolve_text(text).attentions[0]


def errors_of(text: str) -> list[Diagnostic]:
    """The errors of a text that does not resolve."""
    with pytest.raises(DiagnosticError) as caught:
        resolve_text(text)
    return [d for d in caught.value.diagnostics if d.severity == "error"]


def codes_of(text: str) -> list[str]:
    return [d.code for d in errors_of(text)]


def only(path: Path) -> Attention:
    [attention] = resolve_path(path).attentions
    return attention


def spec(name: str) -> Attention:
    return only(next(path for path in (*SPECS, *EXAMPLES) if path.stem == name))
