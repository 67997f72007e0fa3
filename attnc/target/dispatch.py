"""The `__init__.py` beside the modules of one schedule: a function with the attention's name that picks the
variant.

A param is read off the arguments where it is an element type or a size of one of them; otherwise it is a
keyword of the function, its first choice being the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from attnc.expr.nodes import Param
from attnc.model.attention import Attention
from attnc.model.projection import Projection
from attnc.model.tensors import DType, Tensor
from attnc.plan import ir
from attnc.plan.ir_projection import ProjectionModule
from attnc.resources import resource
from attnc.target.triton import TORCH_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Where the value of one param comes from: `expression` over the arguments, or a keyword with a
    default.
    """

    param: str
    expression: str
    default: str = ""


def render_dispatch(attention: Attention, family: Sequence[ir.Module], path: str) -> str:
    """The text for the modules of one attention and target, made from the spec at `path`.

    `attention` still has its params.
    """
    selectors = tuple(
        _selector(attention.inputs, param.name, _literal(param.choices[0])) for param in attention.params
    )
    return (
        _environment()
        .get_template("dispatch.py.jinja")
        .render(
            name=attention.name,
            target=family[0].target,
            spec=path,
            inputs=[tensor.name for tensor in attention.inputs if _has_memory(tensor.name, family[0])],
            selectors=selectors,
            keywords=[selector for selector in selectors if selector.default],
            needs_torch=any(isinstance(value, DType) for value in family[0].variant.params.values()),
            variants=[
                (module.variant.name, [_literal(module.variant.params[s.param]) for s in selectors])
                for module in family
            ],
        )
    )


def render_projection_dispatch(projection: Projection, family: Sequence[ProjectionModule], path: str) -> str:
    """The text for the modules of one projection, which still has its params, and target."""
    inputs = projection.inputs
    selectors = tuple(
        _selector(inputs, param.name, _literal(param.choices[0])) for param in projection.params
    )
    return (
        _environment()
        .get_template("dispatch.py.jinja")
        .render(
            name=projection.name,
            target=family[0].target,
            spec=path,
            inputs=[tensor.name for tensor in inputs],
            selectors=selectors,
            keywords=[selector for selector in selectors if selector.default],
            needs_torch=any(isinstance(value, DType) for value in family[0].variant.params.values()),
            variants=[
                (module.variant.name, [_literal(module.variant.params[s.param]) for s in selectors])
                for module in family
            ],
        )
    )


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(resource("templates", "triton")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _has_memory(name: str, module: ir.Module) -> bool:
    return any(arg.tensor.name == name for arg in module.args)


def _selector(inputs: Sequence[Tensor], param: str, default: str) -> Selector:
    for tensor in inputs:
        if tensor.dtype == param:
            return Selector(param=param, expression=f"{tensor.name}.dtype")
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, Param) and size.name == param:
                return Selector(param=param, expression=f"{tensor.name}.shape[{axis}]")
    return Selector(param=param, expression=param, default=default)


def _literal(value: DType | bool | int | float) -> str:
    return TORCH_DTYPES[value] if isinstance(value, DType) else repr(value)
