"""What stands at the top of a generated file, whatever its target: the spec's own words, where it is, and
named constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from textwrap import wrap
from typing import TypeAlias

from attnc.expr.construct import in_float32
from attnc.expr.nodes import Call, walk
from attnc.model.attention import EPSILON, Attention, Form, Variant
from attnc.model.dtypes import DType
from attnc.model.tensors import Paged, Prefix, Ragged, Tensor
from attnc.plan.ir import Kernel, Module, unified_of
from attnc.plan.softmax import LOG2E, headroom_of, top_of
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
STICKS_GLOSSARY = """\
Stick-breaking attention (arXiv 2410.17980): every key breaks its share, sigmoid(score), off a stick, the last
key first. z is the score in base 2; left is what a key leaves of the stick, rest what all keys so far leave,
both as -log2; p is what a key takes, acc the sum of p v. Q, K, V are the matrices in global memory, q, k, v
their tiles; q_pos = q_idx + N - M aligns the last query with the last key."""
WEIGHTS_GLOSSARY = """\
Nothing is normalised: acc is the sum of weights times values; there is no maximum, no sum and no lse.
Q, K, V are the matrices in global memory, q, k, v their tiles; q_pos = q_idx + N - M aligns the last query
with the last key."""
GLOSSARIES: Mapping[Form, str] = {
    "softmax": GLOSSARY,
    "softpick": GLOSSARY,
    "stick_breaking": STICKS_GLOSSARY,
    "none": WEIGHTS_GLOSSARY,
}
ORDERS = {
    "forward_q_kv": "forward, FlashAttention-2 loop order",
    "forward_kv_q": "forward, FlashAttention-1 loop order",
    "decode": "decode, Flash-Decoding",
}


def header(module: Module, target: str, what: str, path: str, sha256: str) -> dict[str, object]:
    """Returns the fields that every header has. target: as the title calls it; what: the kernel computes;
    path: of the spec, as the header shows it; sha256: of the spec's text.
    """
    attention = module.variant.attention
    order = ORDERS[module.kernel.structure]
    tensors = (*attention.inputs, *attention.outputs)
    title = f"{title_of(attention.name, module.variant.params)} for {target}: {order}{what}."
    return {
        "title": comment(title),
        "signature": [
            comment(f"{tensor.name}: {signature(tensor)}{_storage_of(tensor)}") for tensor in tensors
        ],
        "mathematics": list(mathematics(attention)),
        **origin(path, sha256),
    }


def _storage_of(tensor: Tensor) -> str:
    """Returns where the rows of a tensor lie, as a spec says it: " via paged(table, page = 16)"."""
    match tensor.storage:
        case Ragged(cu_seqlens=ends):
            return f" via ragged({ends})"
        case Paged(block_table=table, page=page):
            return f" via paged({table}, page = {page})"
        case Prefix(of=of):
            return f" via prefix({of})"
    return ""


def generalize_element(module: Module) -> Module:
    """Returns a module as the header of its kernels shows it: with the param of the element type in the place
    of its value, where variants share them.
    """
    variant, param = module.variant, module.variant.element_param
    if not param:
        return module

    def generalize(tensor: Tensor) -> Tensor:
        return replace(tensor, dtype=param) if tensor.dtype is variant.attention.element else tensor

    attention = replace(
        variant.attention,
        inputs=tuple(map(generalize, variant.attention.inputs)),
        outputs=tuple(map(generalize, variant.attention.outputs)),
    )
    params = {name: value for name, value in variant.params.items() if name != param}
    return replace(module, variant=replace(variant, attention=attention, params=params))


def delta_of(module: Module, product: str) -> str:
    """Returns what delta is in a backward. product: of do and o, as the target writes it."""
    returns_lse = any(arg.tensor.name == "lse" for arg in module.outputs)
    return f"rowsum({product}){' - dlse' if returns_lse else ''}"


def title_of(name: str, params: Mapping[str, object]) -> str:
    """Returns `capped (D = 64)`: what is computed, at which point of its params."""
    point = ", ".join(f"{name} = {value}" for name, value in params.items())
    return f"{name} ({point})" if point else name


def origin(path: str, sha256: str) -> dict[str, str]:
    """Returns what a header says about the source of its file. Arguments as for `header`."""
    return {"version": __version__, "path": comment(path), "command": command(path), "sha256": sha256}


def mathematics(attention: Attention) -> Iterator[str]:
    """Yields the spec's own statements for the score, the mask, lengths and the softmax."""
    parts = [attention.score, attention.mask, *attention.lengths.values(), attention.softmax]
    places = [part.span for part in parts] + [attention.scored]
    places += [] if attention.epilogue is None else [attention.epilogue.span]
    statements = {span.source.statement(span.start).start: span for span in places if span}
    for start in sorted(statements):
        lines = wrap(statement(statements[start]), WIDTH, subsequent_indent="    ", break_on_hyphens=False)
        yield from lines[:MAX_LINES]
        if len(lines) > MAX_LINES:
            yield "    ..."


#: Name, value, comment.
Number: TypeAlias = tuple[str, str, str]

#: What rows of a backward read: the lse of a call.
ROW_NUMBERS: tuple[Number, ...] = (("LOG2E", repr(LOG2E), "log2(e): lse comes in natural units"),)


def _text(value: float) -> str:
    return repr(in_float32(value))


def _choose_by_type(variant: Variant, of: Callable[[DType], float]) -> str:
    if not variant.element_param:
        return _text(float(of(variant.attention.element)))
    return f"IS_F16 ? {_text(float(of(DType.F16)))}f : {_text(float(of(DType.BF16)))}"


def score_numbers(kernel: Kernel) -> Iterator[Number]:
    """Yields what turns scores into exponents, in a forward and in a backward kernel."""
    if kernel.softmax.scale is not None:
        yield "SCALE", _text(kernel.softmax.scale), "factor of the raw score in base-2 units"


def forward_numbers(module: Module) -> Iterator[Number]:
    """Yields constants of a kernel that computes o: of its scores, of maxima, and of the lse that leaves."""
    kernel = module.kernel
    yield from score_numbers(kernel)
    softmax, unified = kernel.softmax, unified_of(kernel)
    if softmax.rectifies:
        yield "EPSILON", _text(EPSILON), "joins the denominator of softpick"
    if softmax.rescale == "lazy":
        what = "growth of the maximum, in base-2 units, that forces a rescale"
        yield "LAZY", _text(softmax.threshold), what
    if softmax.headroom:
        grown = "growth of a row's maximum, in base-2 units, under which m serves on"
        choice = kernel.configs[0].softmax
        yield "HEADROOM", _choose_by_type(module.variant, partial(headroom_of, choice)), grown
        scales_keys = kernel.step.v_scale is not None
        top = "log2 of the largest p and sum of p in a tile until then"
        yield "P_TOP", _choose_by_type(module.variant, partial(top_of, scales_keys=scales_keys)), top
    if unified is not None:
        yield "PHI", _text(unified.phi), "the maximum that every row subtracts, in base-2 units"
        if unified.fallback:
            low = "least exponent that a row's largest may have, in base-2 units"
            yield "LOW", _text(unified.low), low
            yield "HIGH", _text(unified.high), "and the largest"
    if any(arg.tensor.name == "lse" for arg in (*module.outputs, *module.kept)):
        yield "LN2", repr(math.log(2)), "log(2): lse leaves in natural units"


def module_numbers(module: Module) -> Iterator[Number]:
    """Yields all of a module whose kernels are in one file."""
    yield from forward_numbers(module)
    if module.backward is not None and not module.kernel.softmax.breaks_sticks:
        yield from ROW_NUMBERS
    exprs = module.variant.attention.expressions
    if any(isinstance(node, Call) and node.function == "tanh" for expr in exprs for node in walk(expr)):
        yield "TWO_LOG2E", repr(2 * LOG2E), "exp(2 x) = exp2(2 log2(e) x)"
