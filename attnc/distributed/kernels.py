"""The kernels of a derived spec: compiled, found again, called with what a rank has; and what
several ranks cannot compute, said as an error before anything moves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from attnc.api.compile import family_of
from attnc.api.family import Family
from attnc.build import digest, plan_program, schedule_all, tuned_source
from attnc.diagnostics import Diagnostic, DiagnosticError, error
from attnc.distributed.derive import Derived, Form, derive
from attnc.distributed.spans import Visibility
from attnc.expr.construct import number
from attnc.model.attention import Attention, ParamValue, Variant
from attnc.model.dtypes import DType
from attnc.model.program import Program
from attnc.model.resolve import resolve
from attnc.model.variants import variants
from attnc.plan import ir
from attnc.plan.lists import lists_blocks
from attnc.source import Source, Span
from attnc.support.arguments import DTYPES
from attnc.support.folders import named_path
from attnc.syntax.parser import load, parse, prelude


@dataclass(frozen=True)
class RankSpec:
    """The attention that is meant, and what its kernels are for. tuned: what was measured for its file;
    schedule: the label of one, None for the first that suits.
    """

    program: Program
    attention: Attention
    target: str
    tuned: Source | None
    schedule: str | None

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        return variants(self.program, self.attention)

    def variant(self, dtype: torch.dtype, width: int, params: Mapping[str, object]) -> Variant:
        """Returns the variant for elements of this type, so many columns of q, and params by name.
        ValueError.
        """
        for variant in self.variants:
            q = variant.attention.q
            fits = DTYPES[q.dtype] is dtype and number(q.shape[-1]) == width
            if fits and all(variant.params.get(name) == value for name, value in params.items()):
                return variant
        given = "".join(f", {name} = {value}" for name, value in params.items())
        known = ", ".join(variant.name for variant in self.variants)
        expected = f"q: expected what a variant of {self.attention.name} takes ({known})"
        raise ValueError(f"{expected}, got {dtype}, D = {width}{given}")


def spec_of(
    source: Any, attention: str | None = None, target: str | None = None, schedule: str | None = None
) -> RankSpec:
    """Makes the spec of a function of `generated/`, of what `attnc.compile` returned, a spec's text or its
    path.

    schedule: the label of one, where the target has several. TypeError or ValueError, by argument.
    """
    tuned = None
    if isinstance(source, Family):
        text = Source(f"{source.name}.attn", str(source.spec))
        attention, target = source.name, target or source.target
    elif callable(source) and not _is_in_file(source):
        raise TypeError(f"source: expected a generated function, a spec or its path, got {source!r}")
    elif callable(source):
        path, target = _path_of(source), target or _target_of(source)
        attention = attention or source.__name__
        text, tuned = load(path), tuned_source(path)
    elif isinstance(source, str) and ("\n" in source or "{" in source):
        text = Source("spec.attn", source)
    elif isinstance(source, str | os.PathLike):
        path = named_path(source)
        text, tuned = load(path), tuned_source(path)
    else:
        kind = type(source).__name__
        raise TypeError(f"source: expected a generated function, a spec or its path, got {kind}")
    program = resolve(parse(text), prelude())
    names = [found.name for found in program.attentions]
    if attention is None and len(names) == 1:
        attention = names[0]
    if attention not in names:
        raise ValueError(f"attention: expected one of {', '.join(names) or 'none'}, got {attention!r}")
    target = target or "triton"
    program, _ = schedule_all(replace(program, attentions=(program.attention(attention),)), [target])
    labels = [s.label for s in program.schedules if (s.name, s.target) == (attention, target)]
    if schedule is not None and schedule not in labels:
        known = ", ".join(filter(None, labels)) or "none with a label"
        raise ValueError(f"schedule: expected one of those for {target} ({known}), got {schedule!r}")
    return RankSpec(program, program.attention(attention), target, tuned, schedule)


def _is_in_file(function: Callable[..., Any]) -> bool:
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    return hasattr(function, "__name__") and bool(getattr(module, "__file__", None))


def _path_of(function: Callable[..., Any]) -> Path:
    module = sys.modules[function.__module__]
    doc, file = module.__doc__ or "", Path(module.__file__ or "")
    words = [word.rstrip(";.`'") for word in doc.split()]
    names = [word for word in words if word.endswith(".attn")]
    for name in dict.fromkeys(names):
        for folder in file.resolve().parents:
            if (folder / name).is_file():
                return folder / name
    raise ValueError(f"{function.__name__}: the spec that it was generated from was not found; pass its path")


def _target_of(function: Callable[..., Any]) -> str:
    folder = Path(sys.modules[function.__module__].__file__ or "").parent.name
    return folder.replace("_", ".", 1) if folder.startswith("cuda") else "triton"


def name_inputs(
    attention: Attention, inputs: Sequence[Any], named: Mapping[str, Any], *, whole: bool = False
) -> dict[str, Any]:
    """Returns inputs besides q, k and v by name. Raises TypeError for one too many, twice or unknown.

    whole: all of them have to be there; ValueError otherwise.
    """
    names = [tensor.name for tensor in attention.extras]
    if len(inputs) > len(names):
        raise TypeError(f"inputs: expected {', '.join(names) or 'none'}, got {len(inputs)}")
    found = dict(zip(names, inputs, strict=False))
    for name, x in named.items():
        if name not in names:
            raise TypeError(f"{name}: not an input; the spec has {', '.join(names) or 'none'}")
        if name in found:
            raise TypeError(f"{name}: expected one value, got one by place and one by name")
        found[name] = x
    missing = [name for name in names if name not in found]
    if whole and missing:
        raise ValueError(f"{missing[0]}: expected an input, none was given")
    return found


class RankKernels:
    """The derived kernels of one variant. attention: the variant's; digest: of all that they depend on."""

    def __init__(self, spec: RankSpec, variant: Variant, form: Form) -> None:
        check_covered_for(form, variant.attention)
        self.attention = variant.attention
        self.visibility = Visibility(variant.attention)
        point: dict[str, ParamValue] = dict(variant.params)
        self.derived: Derived = derive(spec.program, spec.attention, point, spec.target, form, spec.schedule)
        text = Source(f"{variant.attention.name}.attn", self.derived.text)
        self.family = family_of(text, spec.tuned, target=spec.target, attention=self.derived.name)
        name = next(file for file in self.family.files if file.endswith(".py") and file != "__init__.py")
        self._module = getattr(self.family.module, name.removesuffix(".py"))
        self.forward: Callable[..., Any] = getattr(self._module, self.derived.name)
        #: Whether v is columns of k, and no argument of its own.
        self.shares_columns = variant.attention.v.storage.is_part
        self.has_gradients = self._module.CALL.backward is not None
        self.digest = digest(spec.program.source)

    @cached_property
    def module(self) -> ir.Module:
        return _plan_of(self.derived)

    def gradients(
        self,
        do: torch.Tensor,
        dlse: torch.Tensor | None,
        tensors: tuple[torch.Tensor, ...],
        o: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Returns dq, dk and dv, and those of `derived.grads`, of q, k, v and the inputs that the forward
        took.

        o and lse are those over all keys of the row, not over these alone: then dq, dk and dv are what these
        keys add to the gradients.
        """
        found: tuple[torch.Tensor, ...] = self._module.CALL.gradients(do, dlse, *tensors, o, lse, None)
        return found


def check_kernels(spec: RankSpec, variant: Variant) -> None:
    """Raises DiagnosticError for what ranks would not run: what `check_covered` refuses, a target without a
    schedule, and what the compiler says of the kernels that they share rows out to.
    """
    check_covered(variant.attention)
    point: dict[str, ParamValue] = dict(variant.params)
    _plan_of(derive(spec.program, spec.attention, point, spec.target, "rows", spec.schedule))


def _plan_of(derived: Derived) -> ir.Module:
    program = resolve(parse(Source("derived.attn", derived.text)), prelude())
    return plan_program(program).modules[0]


def check_covered_for(form: Form, attention: Attention) -> None:
    """Raises DiagnosticError for what the form cannot do."""
    problems = [*(_problems(attention) if form == "rows" else ()), *_refuse_forms(attention)]
    if problems:
        raise DiagnosticError(problems)


def check_covered(attention: Attention) -> None:
    """Raises DiagnosticError (E0602) for what rows cannot be shared out of."""
    check_covered_for("rows", attention)


def _refuse_forms(attention: Attention) -> Iterator[Diagnostic]:
    softmax, epilogue = attention.softmax, attention.epilogue
    if epilogue is not None:
        yield _problem(
            attention,
            "an epilogue is not shared out over ranks",
            epilogue.span,
            "parts of o are added first",
            "leave it out, and apply it to what the ranks' call returns",
        )
    if softmax.form != "softmax":
        yield _problem(
            attention,
            f"'normalize = {softmax.form}' is not shared out over ranks",
            softmax.span,
            "parts of o are joined as those of a softmax",
            "share out the heads in the model (tensor parallelism)",
        )
    if attention.segment is not None:
        yield _problem(
            attention,
            "'order = absolute' is not kept over ranks",
            attention.ordered,
            "ranks join what they have of a row as it comes",
            "leave the order out, or share out the heads in the model (tensor parallelism)",
        )
    if lists_blocks(attention):
        yield _problem(
            attention,
            "lists of blocks are not shared out over ranks",
            attention.mask.span,
            "names blocks of the keys of all ranks",
            "share out the heads in the model (tensor parallelism)",
        )


def _problems(attention: Attention) -> Iterator[Diagnostic]:
    softmax = attention.softmax
    if softmax.dropout is not None and attention.q.storage.is_packed:
        yield _problem(
            attention,
            "dropout of packed sequences is not shared out over ranks",
            softmax.dropout.span or softmax.span,
            "its counters are positions within a sequence",
            "leave dropout out, or share out the heads in the model (tensor parallelism)",
        )
    for tensor in (attention.q, attention.k, attention.v):
        if tensor.storage.is_paged:
            yield _problem(
                attention,
                f"the pages of {tensor.name} are not shared out over ranks by rows",
                tensor.storage.span,
                "pages lie where a serving engine put them",
                "for one new token against keys on many ranks use attnc.distributed.SpreadKeys",
            )
        if DType(tensor.dtype).is_narrow:
            yield _problem(
                attention,
                f"{tensor.name} of {tensor.dtype} is not shared out over ranks by rows",
                tensor.span,
                "rows of 8 bits are not sent",
                "for one new token against keys on many ranks use attnc.distributed.SpreadKeys",
            )
        if tensor.storage.is_part:
            yield _problem(
                attention,
                "v as a prefix of k is not shared out over ranks yet",
                tensor.storage.span,
                "has no rows of its own to move",
                "pass v as a tensor",
            )
    q, k = attention.q.storage, attention.k.storage
    if q.is_packed != k.is_packed and not (q.is_paged or k.is_paged):
        packed, others = ("queries", "keys") if q.is_packed else ("keys", "queries")
        yield _problem(
            attention,
            f"packed {packed} with {others} that are not packed are not shared out over ranks",
            (q if q.is_packed else k).span,
            "rows of q and k lie in different ways",
            "pack both, or neither",
        )


def _problem(attention: Attention, message: str, span: Span | None, label: str, hint: str) -> Diagnostic:
    place = span or attention.span or Source("spec", " ").span(0, 0)
    return error("E0602", message, place, label, hints=(hint,))
