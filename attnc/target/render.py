"""ir.Module -> text, through the target's templates. Strict: an undefined name in a template is an error."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import jinja2

from attnc import __version__
from attnc.model.attention import Attention
from attnc.plan.decode import share_of
from attnc.plan.ir import Kernel, Module
from attnc.plan.ir_backward import BackwardKernel, kernels_of
from attnc.plan.scores import LOG2E
from attnc.plan.tuned import NOT_TUNED, Buckets, Tuned
from attnc.source import Span
from attnc.target.call import signature
from attnc.target.environment import template_environment
from attnc.target.layout import tidy
from attnc.target.operator import OperatorText
from attnc.target.triton import load, scalar, score, statement, tiled
from attnc.target.triton_backward import BackwardText
from attnc.target.triton_backward_host import BackwardHostText
from attnc.target.triton_decode import DecodeText, has_fixed_shares
from attnc.target.triton_decode_host import DecodeHost
from attnc.target.triton_host import HostText
from attnc.target.triton_kernel import KernelText
from attnc.target.triton_parameters import dp_order, limits_registers

GLOSSARY = """\
Names follow FlashAttention-2 (arXiv 2307.08691, algorithm 1): m running row maximum, l running row sum,
acc unscaled output, alpha rescale factor, p probabilities. m is in base 2: exp(x) = exp2(x * log2(e)), with
log2(e) folded into the scale. Q, K, V are the matrices in global memory, q, k, v their tiles;
q_pos = q_idx + N - M aligns the last query with the last key."""

_OF_THE_BACKWARD = """\
In the backward (algorithm 2) dx is the gradient of x: dp = do v^T, ds = p * (dp - delta) with
delta = rowsum(do * o) - dlse; lse2 = lse * log2(e) serves exp2."""


def render(
    module: Module,
    *,
    path: str,
    sha256: str,
    tuned: Tuned = NOT_TUNED,
) -> str:
    """The text of one generated file.

    path: the spec's path as the header shows it; sha256: of the spec's text; tuned: of each kernel.
    """
    (kernel,) = module.kernels
    text = DecodeText(module, kernel) if kernel.structure == "decode" else KernelText(module, kernel)
    environment = triton_environment()
    common = {
        "module": module,
        "kernel": kernel,
        "text": text,
        "padded": text.padded,
        "precision": text.precision,
    }
    templates = [kernel.structure, *(["combine"] if kernel.split is not None else [])]
    kernels = "\n\n".join(
        environment.get_template(f"{module.target}/{name}.py.jinja").render(common) for name in templates
    )
    back = None
    if module.backward is not None:
        texts = [BackwardText(module, planned) for planned in module.backward.kernels]
        back = BackwardHostText(module, module.backward, texts)
        kernels = "\n\n".join((kernels, *_backward_kernels(module, back, texts, common)))
    host = host_of(module, kernel, text)
    page = environment.get_template(f"{module.target}/module.py.jinja").render(
        common,
        kernels=kernels,
        host=host,
        call=host,
        header=_header(module, path, sha256),
        back=back,
        operator=OperatorText(module, host, kernels),
        numbers=_numbers(kernel, kernels),
        tuning={
            "configs": [config_text(kernel, at) for at in range(len(kernel.configs))],
            "backward": _backward_configs(module),
            "table": tuned_table(tuned.get("forward", {})),
            "backward_tables": {name: tuned_table(tuned.get(name, {})) for name in kernels_of(module)},
            "splits": kernel.split is not None,
            "maxnreg": any(limits_registers(planned.kernel) for planned in kernels_of(module).values()),
            "early_dp": any(dp_order(planned) == "both" for planned in kernels_of(module).values()),
            "shares": has_fixed_shares(kernel),
        },
        uses=frozenset(re.findall(r"\b_\w+", kernels)),
    )
    return tidy(page)


def host_of(module: Module, kernel: Kernel, text: KernelText) -> HostText:
    """The text of the callable."""
    return (
        DecodeHost(module, kernel, text) if isinstance(text, DecodeText) else HostText(module, kernel, text)
    )


def _backward_kernels(
    module: Module, back: BackwardHostText, texts: Iterable[BackwardText], common: Mapping[str, object]
) -> Iterator[str]:
    if back.preprocess is not None:
        template = triton_environment().get_template(f"{module.target}/backward_preprocess.py.jinja")
        rows = {
            "preprocess": back.preprocess.planned,
            "text": back.preprocess,
            "prologue": back.preprocess.prologue,
        }
        yield template.render({**common, **rows})
    for text in texts:
        template = triton_environment().get_template(f"{module.target}/{text.kernel.structure}.py.jinja")
        own = {"kernel": text.kernel, "chain": text.chain, "text": text, "prologue": text.first}
        yield template.render({**common, **own})


def _backward_configs(module: Module) -> dict[str, list[str]]:
    return {
        name: [backward_config_text(planned, at) for at in range(len(planned.kernel.configs))]
        for name, planned in kernels_of(module).items()
    }


def backward_config_text(planned: BackwardKernel, position: int) -> str:
    """`config_text`, with what only kernels of a backward choose."""
    config, text = planned.kernel.configs[position], config_text(planned.kernel, position)
    if config["maxnreg"] != "none":
        text += f", maxnreg={config['maxnreg']}"
    return f"{text}, early_dp=False" if dp_order(planned) == "both" and config["dp"] == "late" else text


@cache
def triton_environment() -> jinja2.Environment:
    """Of templates of Python text."""
    environment = template_environment()
    environment.filters.update(
        load=load,
        scalar=scalar,
        tiled=tiled,
        score=score,
        statement=statement,
        times_scale=_times_scale,
        quote=quote,
        quoted=_quoted,
    )
    return environment


def _times_scale(kernel: Kernel) -> str:
    return "" if kernel.softmax.scale is None else " * SCALE"


def quote(span: Span | None, otherwise: str = "") -> str:
    """`spec.attn:6  mask = causal`: the spec line that a piece of kernel follows from."""
    if span is None:
        return otherwise
    line = span.source.line_text(span.line).split("#")[0].strip()
    return f"{Path(span.source.path).name}:{span.line}  {line}"


def _quoted(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _header(module: Module, path: str, sha256: str) -> dict[str, object]:
    attention = module.variant.attention
    point = ", ".join(f"{name} = {value}" for name, value in module.variant.params.items())
    order = _ORDERS[module.kernels[0].structure]
    return {
        "title": f"{attention.name}{f' ({point})' if point else ''} for Triton: {order}{_and_back(module)}.",
        "signature": [
            f"{tensor.name}: {signature(tensor)}" for tensor in (*attention.inputs, *attention.outputs)
        ],
        "mathematics": list(mathematics(attention)),
        "version": __version__,
        "path": path,
        "sha256": sha256,
        "glossary": GLOSSARY if module.backward is None else f"{GLOSSARY}\n{_OF_THE_BACKWARD}",
    }


def _and_back(module: Module) -> str:
    return "" if module.backward is None else "; and its gradients"


_ORDERS = {
    "forward_q_kv": "forward, FlashAttention-2 loop order",
    "forward_kv_q": "forward, FlashAttention-1 loop order",
    "decode": "decode, Flash-Decoding",
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


def constants(kernel: Kernel) -> tuple[tuple[str, str, str], ...]:
    """(name, value, comment) of the numbers that a kernel text may mention."""
    softmax = kernel.softmax
    return (
        ("SCALE", repr(softmax.scale), "factor of the raw score in base-2 units"),
        ("LAZY", repr(softmax.threshold), "growth of the maximum, in base-2 units, that forces a rescale"),
        *_unified(kernel),
        ("LN2", repr(math.log(2)), "log(2): lse leaves in natural units"),
        ("LOG2E", repr(LOG2E), "log2(e): lse comes in natural units"),
        ("TWO_LOG2E", repr(2 * LOG2E), "exp(2 x) = exp2(2 log2(e) x)"),
    )


def _numbers(kernel: Kernel, text: str) -> list[tuple[str, str, str]]:
    """Constants that the kernel text mentions."""
    return [
        number
        for number in constants(kernel)
        if re.search(rf"\b{number[0]}\b", text) or (number[0] == "TWO_LOG2E" and "_tanh" in text)
    ]


def _unified(kernel: Kernel) -> tuple[tuple[str, str, str], ...]:
    unified = kernel.unified
    if unified is None:
        return ()
    return (
        ("PHI", repr(unified.phi), "the maximum that every row subtracts, in base-2 units"),
        ("LOW", repr(unified.low), "least exponent that a row's largest may have, in base-2 units"),
        ("HIGH", repr(unified.high), "and the largest"),
    )


def config_text(kernel: Kernel, position: int) -> str:
    config, shared = kernel.configs[position], kernel.shared[position]
    names = ("tile.q", "tile.kv", "warps", "stages")
    values = [*(str(config[name]) for name in names), str(shared)]
    if kernel.split is not None:
        count = config["split.kv"]
        values.append(str(count if isinstance(count, int) else 0))
        if has_fixed_shares(kernel):
            values.append(str(share_of(config)))
    return ", ".join(values)


def tuned_table(tuned: Mapping[str, Buckets]) -> str:
    rows = ", ".join(f'"{device}": {tuned[device]!r}' for device in sorted(tuned))
    return f"{{{rows}}}"
