"""ir.Module -> text, through the target's templates. Strict: an undefined name in a template is an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import jinja2

from attnc.expr.nodes import Binary, Call, Expr, Index, Search, walk
from attnc.plan.decode import has_fixed_splits
from attnc.plan.ir import Decode, Kernel, Module, kernels_of, split_of
from attnc.plan.ir.kernel import expressions_within
from attnc.target.call_signature import Signature
from attnc.target.declaration import operator_name
from attnc.target.environment import python_environment
from attnc.target.header import GLOSSARY, header
from attnc.target.layout import tidy
from attnc.target.numbers import module_numbers
from attnc.target.quote import without_comments
from attnc.target.support import imports
from attnc.target.triton.backward import BackwardText
from attnc.target.triton.declaration import TritonBackward, triton_declaration
from attnc.target.triton.decode import CombineText, DecodeText
from attnc.target.triton.kernel import KernelText
from attnc.target.triton.printer import SYNTAX, load, scalar, score, statement, tiled
from attnc.target.tuning import tuning
from attnc.tuned.choices import NOT_TUNED, Tuned

_OF_THE_BACKWARD = """\
In the backward (algorithm 2) dx is the gradient of x: dp = do v^T, ds = p * (dp - delta) with
delta = rowsum(do * o) - dlse; lse2 = lse * log2(e) serves exp2."""


def render_triton(
    module: Module,
    *,
    path: str,
    sha256: str,
    tuned: Tuned = NOT_TUNED,
) -> dict[str, str]:
    """The one file of a variant. Arguments as for `files.render_files`."""
    (kernel,) = module.kernels
    text = DecodeText(module, kernel) if isinstance(kernel, Decode) else KernelText(module, kernel)
    environment = _environment()
    common = {
        "module": module,
        "kernel": kernel,
        "text": text,
        "padded": text.padded,
        "precision": text.precision,
    }
    forward: dict[str, KernelText] = {kernel.structure: text}
    split = split_of(kernel)
    if isinstance(kernel, Decode) and split is not None:
        forward["combine"] = CombineText(module, kernel)
    kernels = "\n\n".join(
        environment.get_template(f"{module.target}/{name}.py.jinja").render(common, text=own)
        for name, own in forward.items()
    )
    back = None
    if module.backward is not None:
        texts = [BackwardText(module, planned) for planned in module.backward.kernels]
        back = TritonBackward(module, texts)
        kernels = "\n\n".join((kernels, *_backward_kernels(module, back, texts, common)))
    code = without_comments(kernels, "#")
    declaration = triton_declaration(module, kernel, text, back, operator_name(module, code))
    page = environment.get_template(f"{module.target}/module.py.jinja").render(
        common,
        kernels=kernels,
        call=Signature(module),
        declaration=declaration,
        imports=imports(declaration, "triton"),
        header=_header(module, path, sha256),
        numbers=tuple(module_numbers(module)),
        tuning={
            **tuning(module, tuned),
            "splits": split is not None,
            "maxnreg": any(planned.limits_registers for planned in kernels_of(module).values()),
            "early_dp": any(planned.dp_order == "both" for planned in kernels_of(module).values()),
            "fixed_split": isinstance(kernel, Decode) and has_fixed_splits(kernel),
            "staged": split is not None and any(split.staged),
        },
        device_functions=device_functions(module),
    )
    return {f"{module.variant.name}.py": tidy(page)}


def _backward_kernels(
    module: Module, back: TritonBackward, texts: Iterable[BackwardText], common: Mapping[str, object]
) -> Iterator[str]:
    if back.preprocess is not None:
        template = _environment().get_template(f"{module.target}/backward_preprocess.py.jinja")
        rows = {
            "preprocess": back.preprocess.planned,
            "text": back.preprocess,
            "prologue": back.preprocess.prologue,
        }
        yield template.render({**common, **rows})
    for text in texts:
        template = _environment().get_template(f"{module.target}/{text.kernel.structure}.py.jinja")
        own = {"kernel": text.kernel, "chain": text.chain, "text": text, "prologue": text.first}
        yield template.render({**common, **own})


def _header(module: Module, path: str, sha256: str) -> dict[str, object]:
    glossary = GLOSSARY if module.backward is None else f"{GLOSSARY}\n{_OF_THE_BACKWARD}"
    return {**header(module, "Triton", _and_back(module), path, sha256), "glossary": glossary}


def _and_back(module: Module) -> str:
    return "" if module.backward is None else "; and its gradients"


@cache
def _environment() -> jinja2.Environment:
    """Of templates of Triton kernels, which are Python."""
    environment = python_environment().overlay()
    filters = {"load": load, "scalar": scalar, "tiled": tiled, "score": score, "statement": statement}
    own = {"times_scale": _times_scale, "counter": _counter}
    environment.filters = {**environment.filters, **filters, **own}
    return environment


def _times_scale(kernel: Kernel) -> str:
    return "" if kernel.softmax.scale is None else " * SCALE"


def _counter(number: Expr) -> str:
    """A word of 32 bits that random bits are drawn at."""
    return scalar(number) if isinstance(number, Index) else f"({scalar(number)}).to(tl.int32)"


# --- device functions


def device_functions(module: Module) -> frozenset[str]:
    """Their names. What expressions call follows from the plan's; the rest from how rows lie in memory."""
    (forward,) = module.kernels
    backward = module.backward
    kernels = [forward, *(planned for planned in (backward.kernels if backward else ()))]
    called = {name for expr in expressions_within((module.kernels, backward)) for name in _called_by(expr)}
    called.update(*map(_moves_rows, kernels))
    if any(kernel.grid.sequences is not None for kernel in kernels):
        called.add("_find_sequence")
    if backward is not None:
        called |= {"_load_rows", "_store_rows"}
        packed = module.variant.attention.q.storage.is_packed
        if not packed and any(not planned.over_q for planned in backward.kernels):
            called.add("_load_vector")  # of lse2 and delta
    if any(kernel.softmax.dropout is not None for kernel in kernels):
        called.add("_keep_dropout")
    return frozenset(called)


def _moves_rows(kernel: Kernel) -> Iterator[str]:
    """What loads and stores tiles of rows; kernels that decode have functions of their own for it."""
    if kernel.structure == "decode":
        return
    yield from ("_load_rows", "_store_rows")
    if any(rows.page for rows in kernel.rows.values()):
        yield from ("_find_pages", "_load_pages")


def _called_by(expr: Expr) -> Iterator[str]:
    """What the text of an expression calls."""
    own = {*SYNTAX.functions.values()} - {"tl.minimum", "tl.maximum"}
    for node in walk(expr):
        match node:
            case Call(function=function) if SYNTAX.named(function) in own:
                yield SYNTAX.named(function)
            case Binary(op=op, left=left, right=right) if function := scalar.division(op, left, right):
                yield function
            case Search(side=side):
                yield f"_{side}_bound"
