"""What stands at the top of a generated file, whatever its target: the spec's own words, and where it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import wrap

from attnc.model.attention import Attention
from attnc.plan.ir import Module
from attnc.target.call_signature import signature
from attnc.target.quote import command, comment, statement
from attnc.version import __version__

#: Columns and lines that a header gives to one statement of the spec.
WIDTH, MAX_LINES = 100, 12

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
    order = ORDERS[module.kernels[0].structure]
    title = f"{title_of(attention.name, module.variant.params)} for {target}: {order}{what}."
    tensors = (*attention.inputs, *attention.outputs)
    return {
        "title": comment(title),
        "signature": [comment(f"{tensor.name}: {signature(tensor)}") for tensor in tensors],
        "mathematics": list(mathematics(attention)),
        **origin(path, sha256),
    }


def title_of(name: str, params: Mapping[str, object]) -> str:
    """`capped (D = 64)`: what is computed, at which point of its params."""
    point = ", ".join(f"{name} = {value}" for name, value in params.items())
    return f"{name} ({point})" if point else name


def origin(path: str, sha256: str) -> dict[str, str]:
    """What a header says of where its file comes from. Arguments as for `header`."""
    return {"version": __version__, "path": comment(path), "command": command(path), "sha256": sha256}


def mathematics(attention: Attention) -> Iterator[str]:
    """The spec's own statements for the score, the mask, lengths and the softmax."""
    parts = (attention.score, attention.mask, *attention.lengths.values(), attention.softmax)
    statements = {part.span.source.statement(part.span.start).start: part.span for part in parts if part.span}
    for start in sorted(statements):
        lines = wrap(statement(statements[start]), WIDTH, subsequent_indent="    ", break_on_hyphens=False)
        yield from lines[:MAX_LINES]
        if len(lines) > MAX_LINES:
            yield "    ..."
