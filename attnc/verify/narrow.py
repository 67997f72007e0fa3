"""Keys and values of 8 bits give the bits that a kernel for 16 bits gives of the same numbers.

Every number of 8 bits is one of q's type, so nothing tells the two apart: not the order of sums, not a
rounding. The twin of a module is made from the same spec and schedule, with k and v of q's type; a pair of
configs with the same tiles and splits has to agree bit for bit. Where columns have scales, the twin has
none, and is given what the reference says that k and v are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from attnc.diagnostics import DiagnosticError
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.resolve import resolve
from attnc.model.schedule import Schedule
from attnc.model.tensors import Prefix, Role, Tensor
from attnc.plan import ir
from attnc.plan.listed_rows import is_of_page
from attnc.plan.lower import plan
from attnc.reference import Array, Head, heads, rows, to_arrays
from attnc.support.arguments import DTYPES
from attnc.syntax.parser import parse, prelude
from attnc.verify.check import same_bits
from attnc.verify.rerun import FinishedRun, Inputs
from attnc.verify.subject import Subject, subject_of

#: Fields of a config that no bit depends on: how far copies run ahead, in how much memory, and how many warps
#: Hopper's kernels have, whose tiles say how many multiply.
_WITHOUT_BITS = frozenset({
    "STAGES", "num_stages", "shared", "staged", "RAW_TILES", "WARPS", "Q_TILES", "O_TILES",
    "PRODUCER_REGISTERS", "CONSUMER_REGISTERS",
})  # fmt: skip
#: Splits of both where their number follows from bytes: more than the groups of threads that share them out
#: where they are joined.
_SPLITS = 5
#: By the text of a spec, variant and schedule: a module is compiled once.
_TWINS: dict[tuple[str, ...], Subject | None] = {}


def is_narrow(attention: Attention) -> bool:
    """Returns whether k or v has 8 bits, or scales of its columns, or k is joined with other columns."""
    stored = any(DType(tensor.dtype).is_narrow for tensor in (attention.k, attention.v))
    return stored or bool(attention.column_scales) or attention.k_rest is not None


def equals_16_bits(run: FinishedRun) -> str | None:
    """Checks that the outputs have the bits of the twin's, where one has the same plan."""
    twin = None if run.subject.plan is None else twin_of(run.subject, run.subject.plan)
    if twin is None:
        return None
    inputs = widen(run.attention, run.inputs)
    if inputs is None:
        return None
    for number, own, other in _pairs(run.subject, twin):
        if number == run.case.config:
            mine, theirs = (run.subject.blank(run.inputs) for _ in range(2))
            run.subject.function(*run.inputs.values(), out=_unpack_single(mine), config=own)
            twin.function(*inputs.values(), out=_unpack_single(theirs), config=other)
            for name, output in mine.items():
                if not same_bits(output, theirs[name]):
                    count = int((output != theirs[name]).sum())
                    return f"config {own}: '{name}' differs from that of 16 bits in {count} elements"
    return None


def _unpack_single(outputs: dict[str, Any]) -> Any:
    found = tuple(outputs.values())
    return found[0] if len(found) == 1 else found


def _pairs(subject: Subject, twin: Subject) -> Iterator[tuple[int, Any, Any]]:
    """Yields the number of a config, itself, and one of the twin's with the same tiles and splits. Where the
    number of splits follows from bytes, both have as many.
    """
    for number, config in enumerate(subject.configs):
        counted = getattr(config, "splits", 1) == 0 and not getattr(config, "split_size", 0)
        own = config._replace(splits=_SPLITS) if counted else config
        for other in twin.configs:
            same = other._replace(splits=_SPLITS) if counted and other.splits == 0 else other
            if _bits_of(same) == _bits_of(own):
                yield number, own, same
                break


def _bits_of(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config._asdict().items() if name not in _WITHOUT_BITS}


def twin_of(subject: Subject, module: ir.Module) -> Subject | None:
    """Returns the same attention under the same schedule, with k and v of q's type; None where its schedule
    is not in the spec, or has no config for them, and where sequences may scale columns of a page of keys
    differently.
    """
    variant = module.variant
    key = (variant.source.text, variant.name, variant.attention.name, module.target, module.label)
    if key not in _TWINS:
        made = _plan_twin(module)
        _TWINS[key] = None if made is None else subject_of(made)
    return _TWINS[key]


def _plan_twin(module: ir.Module) -> ir.Module | None:
    attention = module.variant.attention
    if attention.k.storage.is_paged and not all(map(partial(is_of_page, attention), attention.column_reads)):
        return None  # sequences may scale a page differently
    variant = replace(module.variant, attention=widen_attention(attention))
    found = resolve(parse(module.variant.source), prelude()).schedules
    own = (attention.name, module.target, module.label)
    for schedule in (made for made in found if (made.name, made.target, made.label) == own):
        for candidate in (schedule, _without_stages(schedule)):
            try:
                return plan(variant, candidate)
            except DiagnosticError:
                continue
    return None


def _without_stages(schedule: Schedule) -> Schedule:
    knobs = {
        phase: {key: knob for key, knob in found.items() if key != "stages"}
        for phase, found in schedule.knobs.items()
    }
    return replace(schedule, knobs=knobs)


def widen_attention(attention: Attention) -> Attention:
    """Returns the attention with k and v of q's type where they have 8 bits, without scales of columns, and
    with the columns behind k in it.
    """

    def widen_tensor(tensor: Tensor) -> Tensor:
        is_narrow = DType(tensor.dtype).is_narrow
        made = replace(tensor, dtype=attention.element) if is_narrow else tensor
        if isinstance(made.storage, Prefix):
            made = replace(made, storage=replace(made.storage, joins=False))
        is_joined = tensor.name == "k" and attention.k_rest is not None
        return replace(made, shape=(*made.shape[:-1], attention.q.shape[-1])) if is_joined else made

    softmax = attention.softmax
    return replace(
        attention,
        inputs=tuple(map(widen_tensor, attention.inputs)),
        k_scale=None,
        k_rest=None,
        softmax=replace(softmax, v_scale=None) if softmax.scales_columns else softmax,
    )


def _share(head: Head, kv_heads: int) -> int:
    """Returns how many query heads share one of k and v."""
    return max(head.dims["H"] // max(kv_heads, 1), 1)


def _pages_of(tensor: Tensor, pool: Array) -> Array:
    """Returns a view [pages, page, heads, features] of rows in pages."""
    wanted = (Role.BATCH, Role.KEY, Role.HEAD, Role.FEATURE)
    found = pool.transpose([tensor.roles.index(role) for role in wanted if role in tensor.roles])
    return found if Role.HEAD in tensor.roles else found[:, :, None]


def widen(attention: Attention, inputs: Inputs) -> Inputs | None:
    """Returns the inputs with k and v of q's type, which holds their numbers exactly; of scaled or joined
    columns, what the reference multiplies. None where a scale is so small that kernels may take it for 0.
    """
    made = dict(inputs)
    stored = [tensor for tensor in (attention.k, attention.v) if not tensor.storage.is_part]
    for tensor in stored:
        if DType(tensor.dtype).is_narrow:
            made[tensor.name] = made[tensor.name].to(DTYPES[attention.element])  # type: ignore[union-attr]  # a tensor
    joined = ("k",) if attention.k_rest is not None else ()
    scaled = [tensor for tensor in stored if tensor.name in (*attention.column_scales, *joined)]
    if not scaled:
        return made
    arrays = to_arrays(attention, inputs)
    for name in joined:
        given, columns = made[name], inputs["q"].shape[-1]  # type: ignore[union-attr]  # tensors
        made[name] = torch.nn.functional.pad(given, (0, columns - given.shape[-1]))  # type: ignore[union-attr, arg-type]
    wide = {tensor.name: made[tensor.name].float().cpu().numpy() for tensor in scaled}  # type: ignore[union-attr]  # tensors
    for head in heads(attention, arrays):
        if head.tiny is not None and head.tiny.any():
            return None
        for tensor in scaled:
            own = head.k if tensor.name == "k" else head.v
            if page := tensor.storage.rows_of_page:
                pool, key = _pages_of(tensor, wide[tensor.name]), np.arange(len(own))
                at = arrays[tensor.storage.table][head.b, key // page], key % page
                pool[(*at, head.h // _share(head, pool.shape[2]))] = own
            else:
                found = rows(tensor, {**arrays, **wide}, head.b, len(head.k))  # a view
                found[:, head.h // _share(head, found.shape[1])] = own
    for name, array in wide.items():
        blank = torch.empty_like(made[name])  # type: ignore[arg-type]  # a tensor
        made[name] = blank.copy_(torch.from_numpy(array))
    return made
