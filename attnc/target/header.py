"""What stands at the top of a generated file, whatever its target: the spec's own words, and where it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attnc import __version__
from attnc.model.attention import Attention
from attnc.plan.ir import Module
from attnc.source import Span
from attnc.target.call_signature import signature

GLOSSARY = """\
Names follow FlashAttention-2 (arXiv 2307.08691, algorithm 1): m running row maximum, l running row sum,
acc unscaled output, alpha rescale factor, p probabilities. m is in base 2: exp(x) = exp2(x * log2(e)), with
log2(e) folded into the scale. Q, K, V are the matrices in global memory, q, k, v their tiles;
q_pos = q_idx + N - M aligns the last query with the last key."""
ORDERS = {
    "forward_q_kv": "forward, FlashAttention-2 loop order",
    "forward_kv_q": "forward, FlashAttention-1 loop order",
    "decode": "decode, Flash-Decoding",
}


def header(module: Module, target: str, what: str, path: str, sha256: str) -> dict[str, object]:
    """The fields that every header has. target: as the title calls it; what: the kernel computes; path: of
    the spec, as the header shows it; sha256: of the spec's text.
    """
    attention = module.variant.attention
    point = ", ".join(f"{name} = {value}" for name, value in module.variant.params.items())
    order = ORDERS[module.kernels[0].structure]
    return {
        "title": f"{attention.name}{f' ({point})' if point else ''} for {target}: {order}{what}.",
        "signature": [
            f"{tensor.name}: {signature(tensor)}" for tensor in (*attention.inputs, *attention.outputs)
        ],
        "mathematics": list(mathematics(attention)),
        "version": __version__,
        "path": path,
        "sha256": sha256,
    }


def mathematics(attention: Attention) -> Iterator[str]:
    """The spec's own lines for the score, the mask, lengths and the softmax."""
    softmax = attention.softmax
    spans = [
        attention.score.span,
        attention.mask.span,
        *(e.span for e in attention.lengths.values()),
        softmax.span,
    ]
    lines = {span.line: span for span in spans if span is not None}
    for line in sorted(lines):
        yield lines[line].source.line_text(line).split("#")[0].strip()


def quote(span: Span | None, otherwise: str = "") -> str:
    """`spec.attn:6  mask = causal`: the spec line that a piece of kernel follows from."""
    if span is None:
        return otherwise
    line = span.source.line_text(span.line).split("#")[0].strip()
    return f"{Path(span.source.path).name}:{span.line}  {line}"
