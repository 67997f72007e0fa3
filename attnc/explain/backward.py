"""The backward kernels of a plan in words and figures, as `explain` does it for the forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnc.explain.forward import tiles_of
from attnc.explain.kernel import (
    KernelUsage,
    Roofline,
    bounds_dict,
    count_exponentials,
    grid_line,
    loop_lines,
    resource_dict,
    resource_lines,
    roofline_dict,
    roofline_lines,
    roofline_of,
)
from attnc.expr.nodes import show
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.plan import ir
from attnc.plan.device import Device
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.ir.module import KeyRows
from attnc.plan.layout import Estimate, KernelName, fits
from attnc.plan.picture import picture
from attnc.plan.signature import feature
from attnc.plan.targets import target_of
from attnc.tuned.choices import knobs_of_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardExplanation:
    """One kernel of a backward under its first config that fits the device, or its first. walks: how many
    walks over queries a multiprocessor has at least before several blocks share one; 0: none is shared.
    key_rows: what is made of keys in pages before it, of the first kernel.
    """

    planned: BackwardKernel
    position: int
    walks: int
    needs: Estimate
    device: Device
    roofline: Roofline
    usage: KernelUsage | None
    key_rows: KeyRows | None = None


def explain_backward(
    module: ir.Module, device: Device, usages: Mapping[KernelName, KernelUsage | None], length: int = 4096
) -> tuple[BackwardExplanation, ...]:
    """Returns every backward kernel in the order of execution, the rooflines at M = N = `length`; usages:
    what the compiler says of each.
    """
    found: list[BackwardExplanation] = []
    layout = None if module.backward is None else module.backward.layout
    for name, planned in module.backward_kernels.items():
        position = default_position(planned, device)
        config = planned.configs[position]
        shape = picture(planned, length, length, *tiles_of(config))
        attention = module.variant.attention
        columns, moved = _work(planned, attention), _count_moved_bytes(planned, attention, length)
        d, dtype = feature(attention.q), DType(attention.q.dtype)
        found.append(
            BackwardExplanation(
                planned=planned,
                position=position,
                walks=0 if layout is None else layout.walks_for_each(name),
                needs=target_of(module.target).estimate(module, config, name, device),
                device=device,
                roofline=roofline_of(
                    d,
                    device,
                    shape,
                    dtype=dtype,
                    columns=columns,
                    moved=moved,
                    exponentials=count_exponentials(planned),
                ),
                usage=usages.get(name),
                key_rows=None if found else module.key_rows,
            )
        )
    return tuple(found)


def default_position(planned: BackwardKernel, device: Device) -> int:
    """Returns the config that a module takes on a device without measurements."""
    return next((i for i, shared in enumerate(planned.shared) if fits(shared, device)), 0)


def backward_text(explanations: tuple[BackwardExplanation, ...]) -> str:
    """Returns explanations for a reader, in a section for each kernel."""
    return "\n\n".join("\n".join(_section(e)) for e in explanations)


def backward_dict(explanations: tuple[BackwardExplanation, ...]) -> list[dict[str, Any]]:
    """Returns explanations for a program."""
    return [
        {
            "kernel": e.planned.kind,
            "config": _knobs(e),
            "grid": _grid(e),
            **({"walks": e.walks} if e.walks else {}),
            "bounds": bounds_dict(e.planned),
            "loops": [
                {"start": show(loop.start), "stop": show(loop.stop)} for loop in e.planned.regions.loops
            ],
            **resource_dict(e.needs, e.device, e.usage),
            "roofline": roofline_dict(e.roofline),
        }
        for e in explanations
    ]


def _section(e: BackwardExplanation) -> Iterator[str]:
    knobs = ", ".join(f"{key} = {value}" for key, value in _knobs(e).items())
    yield f"backward kernel {e.planned.kind}, config {e.position} of {len(e.planned.configs)}: {knobs}"
    yield f"  {_grid(e)}"
    yield from () if e.key_rows is None else _describe_key_rows(e.key_rows)
    if e.walks:
        fewer = f"  fewer than about {e.walks} for each multiprocessor"
        yield f"{fewer}: blocks share the queries of a kv tile, and their sums are added in order"
    yield from _list_sums(e)
    if e.planned.kept is not None:
        yield "  ds stays in memory, of as many heads as there is room for: dq takes no second pass"
    if e.planned.grid.longest_first:
        yield "  longest first: the last rows, which see most keys, start first"
    yield from loop_lines(e.planned, *_tiles(e))
    for lines in (resource_lines(e.needs, e.device, e.usage), roofline_lines(e.roofline, e.device)):
        yield from (f"  {line}" for line in lines)


def _describe_key_rows(rows: KeyRows) -> Iterator[str]:
    tensors = [arg.tensor for arg in rows.rows]
    names = " and ".join(tensor.name for tensor in tensors)
    size = sum(feature(tensor) * DType(tensor.dtype).bytes for tensor in tensors)
    yield f"  before it, pages of {names} are copied to rows: {size} B of memory for each key of a K/V head"
    summed = [tensor for tensor in tensors if tensor.name in rows.variant.attention.grads]
    if summed:
        made, size = " and ".join(f"d{tensor.name}" for tensor in summed), sum(map(feature, summed)) * 4
        yield f"  behind the last, {made} of rows, {size} B, are summed by page, in the order of the table"


#: What each way to sum dq is, for a reader.
_SUMS = {
    "two_pass": "in a kernel of its own: the same bits in every run",
    "ordered": "blocks add to it in turns: the same bits in every run",
    "sequential": "a block for each head adds to it: the same bits in every run",
    "atomic": "blocks add to it in any order: bits differ from run to run",
}


def _list_sums(e: BackwardExplanation) -> Iterator[str]:
    if "dq" in e.planned.makes or e.planned.chain.adds_dq is not None:
        way = e.planned.configs[e.position].accumulate("q")
        yield f"  accumulate.dq = {way}: {_SUMS[way]}"
    for name in e.planned.adds:
        yield f"  accumulate.{name} = atomic: {_SUMS['atomic']}"


def _knobs(e: BackwardExplanation) -> dict[str, str]:
    return knobs_of_kernel(e.planned.kind, e.planned.configs[e.position])


def _tiles(e: BackwardExplanation) -> tuple[int, int]:
    return tiles_of(e.planned.configs[e.position])


def _grid(e: BackwardExplanation) -> str:
    return grid_line(e.planned, *_tiles(e))


def _work(planned: BackwardKernel, attention: Attention) -> int:
    d, dv = feature(attention.q), feature(attention.v)
    made = {"dq": d, "dk": d + (dv if planned.v_in_k else 0), "dv": dv}
    summed = sum(made[name] for name in (*planned.makes, *planned.adds))
    if planned.weighs:
        return summed
    products = d + (0 if planned.kind == "dv" else dv) + summed
    return products + (d if planned.chain.adds_dq is not None else 0)


def _count_moved_bytes(planned: BackwardKernel, attention: Attention, length: int) -> float:
    d, dv = feature(attention.q), feature(attention.v)
    size = DType(attention.q.dtype).bytes
    width = {"q": d, "k": d, "v": dv, "do": dv, "o": dv, "dq": d, "dk": d, "dv": dv}
    used = ["q", "k", "do", *planned.makes, *planned.adds]
    used += ["o"] if planned.prologue is not None else []
    used += ["v"] if planned.kind != "dv" else []
    return float(length * (size * sum(width[name] for name in used) + 8))
