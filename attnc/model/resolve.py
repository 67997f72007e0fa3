"""ast.File -> Program: every name looked up, every type, role and knob known, or every semantic error
reported at once.

The parts of an attention are resolved in the order of their dependencies, not of the text: params, inputs,
storage, outputs, lets from top to bottom, then what is computed. A mistake marks what it makes unknown, so
that nothing is reported twice. `rules` has the last word over whatever resolved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from attnc.diagnostics import Label, Reporter, did_you_mean
from attnc.effort import announce, finish, limit_steps
from attnc.expr.nodes import TRUE, Dot, Expr, uses, walk
from attnc.model.attention import Attention, Param, Softmax
from attnc.model.columns import Keys
from attnc.model.declarations import Declarations, DeclaredSizes, raw_dims, resolve_param
from attnc.model.dtypes import DType
from attnc.model.elaborate import Elaborator, report_limit
from attnc.model.epilogue import resolve_epilogue
from attnc.model.names import INPUTS, NOT_FUNCTIONS, NOT_PARAMS, OUTPUTS, PARAM_DIMS, RESERVED, Taken
from attnc.model.normalization import resolve_softmax
from attnc.model.order import resolve_order
from attnc.model.program import Program, Projection
from attnc.model.resolve_projection import resolve_projection
from attnc.model.resolve_schedule import resolve_projection_schedule, resolve_schedule
from attnc.model.rules import ATTENTION_RULES, SCHEDULE_RULES
from attnc.model.schedule import Schedule
from attnc.model.scope import WRONG, Definition, Scope, collect
from attnc.model.storage import Storages
from attnc.model.tensors import Tensor
from attnc.model.weight import check_outputs, resolve_weight
from attnc.source import Span
from attnc.syntax import ast

_Item = TypeVar("_Item", bound=ast.AttentionItem)


@limit_steps()
def resolve(file: ast.File, prelude: ast.File) -> Program:
    """Returns the program that the file describes. Raises DiagnosticError with every semantic error, in
    source order; warnings are in the Program.
    """
    with report_limit("the file", file.span.source.span(0, 0)):
        return _resolve(file, prelude)


def _resolve(file: ast.File, prelude: ast.File) -> Program:
    report = Reporter()
    defs = collect(prelude, file, report)
    taken = Taken(report)
    trees: dict[str, ast.Attention] = {}
    attentions: dict[str, Attention] = {}
    announce(sum(isinstance(item, ast.Attention) for item in file.items))
    for item in file.items:
        if isinstance(item, ast.Attention):
            fresh = taken.declare(item.name, reserved=NOT_FUNCTIONS, is_file=True)
            with report_limit(f"'{item.name.id}'", item.name.span):
                attention = _Resolver(item, defs, report).attention()
            finish(item.name.id)
            trees.setdefault(item.name.id, item)  # one that cannot be called so has schedules all the same
            if fresh and attention is not None:
                attentions[item.name.id] = attention
    layers = {item.name.id: item for item in file.items if isinstance(item, ast.Projection)}
    projections, projection_schedules = _projections(file, layers, taken, report)
    schedules = [
        schedule
        for item in file.items
        if isinstance(item, ast.Schedule)
        and item.attention.id not in layers
        and (schedule := resolve_schedule(item, trees, report)) is not None
    ]
    for name, attention in attentions.items():
        with report_limit(f"'{name}'", trees[name].name.span):
            for attention_rule in ATTENTION_RULES:
                attention_rule(trees[name], attention, report)
    for schedule_rule in SCHEDULE_RULES:
        schedule_rule(schedules, attentions, report)
    report.raise_errors()
    return Program(
        source=file.span.source,
        attentions=tuple(attentions.values()),
        schedules=tuple(schedules),
        projections=projections,
        projection_schedules=projection_schedules,
        warnings=report.in_source_order(),
        trees=trees,
    )


@limit_steps()
def resolve_schedules(program: Program, file: ast.File) -> tuple[Schedule, ...]:
    """Returns the schedules of a file, which has nothing else, for attentions of the program. Raises
    DiagnosticError with every error in them.
    """
    report = Reporter()
    with report_limit("the file", file.span.source.span(0, 0)):
        items = [item for item in file.items if isinstance(item, ast.Schedule)]
        made = [resolve_schedule(item, program.trees, report) for item in items]
        names = {item.attention.id for item in items}
        before = [schedule for schedule in program.schedules if schedule.name in names]
        attentions = {one.name: one for one in program.attentions if one.name in names}
        for rule in SCHEDULE_RULES:
            rule([*before, *filter(None, made)], attentions, report)
    report.raise_errors()
    return tuple(filter(None, made))


def _projections(
    file: ast.File, trees: Mapping[str, ast.Projection], taken: Taken, report: Reporter
) -> tuple[tuple[Projection, ...], tuple[Schedule, ...]]:
    made: dict[str, Projection] = {}
    for item in file.items:
        if isinstance(item, ast.Projection):
            fresh = taken.declare(item.name, reserved=NOT_FUNCTIONS, is_file=True)
            projection = resolve_projection(item, report)
            if fresh and projection is not None:
                made[item.name.id] = projection
    schedules: dict[str, Schedule] = {}
    for item in file.items:
        if isinstance(item, ast.Schedule) and (block := trees.get(item.attention.id)) is not None:
            schedule = resolve_projection_schedule(item, block, made.get(block.name.id), report)
            if schedule is not None and schedules.setdefault(schedule.name, schedule) is not schedule:
                message = f"second schedule of '{schedule.name}' for {schedule.target}"
                report.error("E0408", message, item.span, "this one")
    return tuple(made.values()), tuple(schedules.values())


@dataclass(slots=True, init=False)
class _Resolver:
    tree: ast.Attention
    report: Reporter
    scope: Scope
    elaborator: Elaborator

    def __init__(self, tree: ast.Attention, defs: Mapping[str, Definition], report: Reporter) -> None:
        self.tree = tree
        self.report = report
        self.scope = Scope(defs=defs)
        self.elaborator = Elaborator(self.scope, report)

    def attention(self) -> Attention | None:
        before = self.report.errors
        declared = self._declare()
        self._params()
        declarations = Declarations(
            self.tree, self.scope, DeclaredSizes(self.scope, self.report, declared), self.report
        )
        storages = Storages(self.scope, self.report)
        declarations.inputs()
        storages.inputs(self.tree)
        outputs = tuple(storages.output(tensor) for tensor in declarations.outputs())
        self._lets()
        lengths = self._lengths()
        score = self._score()
        mask = self._mask()
        softmax = self._softmax()
        order = self._one(ast.Order, None)
        segment = resolve_order(order, softmax, self.elaborator, self.scope, self.report)
        weight = resolve_weight(self._one(ast.Weight, None), score, softmax, self.elaborator, self.report)
        check_outputs(self.tree, softmax, self.report)
        epilogue = resolve_epilogue(self.tree, self.elaborator, self.report)
        grads, f32_grads = self._grads()
        if self.report.errors > before or score is None or weight is None or softmax is None:
            return None
        keys = next(iter(self.scope.products), Keys())
        return Attention(
            name=self.tree.name.id,
            params=tuple(param for param in self.scope.params.values() if isinstance(param, Param)),
            inputs=tuple(tensor for tensor in self.scope.tensors.values() if isinstance(tensor, Tensor)),
            outputs=outputs,
            lengths=lengths,
            score=weight,
            mask=mask,
            softmax=softmax,
            grads=grads,
            f32_grads=f32_grads,
            epilogue=epilogue,
            segment=segment,
            ordered=None if order is None else order.value.span,
            k_scale=keys.scale,
            k_rest=keys.rest,
            scored=None if weight is score else score.span,
            span=self.tree.span,
        )

    # --- declarations
    # --------------------------------------------------------------------------------------------

    def _declare(self) -> Mapping[str, str]:
        """Returns every declared name once, and what it is; params may take the names of some dimensions, q,
        k, v, o and lse are roles.
        """
        taken = Taken(self.report)
        declared: dict[str, str] = {}
        for item in self.tree.items:
            names: tuple[ast.Name, ...] = ()
            what = ""
            allowed: tuple[str, ...] = ()
            reserved = NOT_PARAMS if isinstance(item, ast.Param) else RESERVED
            match item:
                case ast.Param(name=name):
                    names, what, allowed = (name,), "a param", PARAM_DIMS
                case ast.Input():
                    names, what, allowed = item.names, "an input", INPUTS
                case ast.Output(name=name) if name.id in OUTPUTS:
                    names, what, allowed = (name,), "an output", OUTPUTS
                case ast.Let(name=name):
                    names, what = (name,), "a let"
                    self.scope.let_places.setdefault(name.id, name)
                case _:
                    pass
            for name in names:
                if taken.declare(name, allowed, reserved):
                    declared[name.id] = what
                else:
                    self.scope.refused.add(name.id)
        return {name: what for name, what in declared.items() if what != "a param"}

    def _params(self) -> None:
        for tree in self._all(ast.Param):
            name = tree.name.id
            if name not in self.scope.params and (name not in RESERVED or name in PARAM_DIMS):
                self.scope.params[name] = resolve_param(tree, self.report)
        self.scope.dims = raw_dims(self.tree, self.scope.params)

    # --- expressions
    # ---------------------------------------------------------------------------------------------

    def _lets(self) -> None:
        for tree in self._all(ast.Let):
            value = self.elaborator.expr(tree.value)
            self.scope.lets.setdefault(tree.name.id, value or WRONG)

    def _score(self) -> Expr | None:
        tree = self._one(ast.Score, "score = dot(q, k) / sqrt(D)")
        return self.elaborator.elaborate_typed(tree.value, "float", "a score") if tree else None

    def _mask(self) -> Expr:
        tree = self._one(ast.Mask, None)
        mask = self.elaborator.elaborate_typed(tree.value, "bool", "a mask") if tree else TRUE
        if tree and mask and any(isinstance(node, Dot) for node in walk(mask)):
            self.report.error(
                "E0306",
                "a mask cannot depend on the scores",
                tree.value.span,
                "contains dot(q, k)",
                hints=("write it into the score, e.g. 'where(condition, score, -inf)'",),
            )
        return mask or TRUE

    def _softmax(self) -> Softmax | None:
        tree = self._one(ast.Normalize, "normalize = softmax")
        return resolve_softmax(tree, self.elaborator, self.scope, self.report) if tree else None

    def _lengths(self) -> Mapping[str, Expr]:
        lengths: dict[str, Expr] = {}
        places: dict[str, Span] = {}
        for tree in self._all(ast.Length):
            name = tree.name
            value = self.elaborator.elaborate_typed(tree.value, "int", "a length")
            if name.id not in ("M", "N"):
                hints = did_you_mean(name.id, ("M", "N"))
                self.report.error(
                    "E0318", f"'{name.id}' is not a length", name.span, "only M and N are", hints=hints
                )
            elif name.id in places:
                self._twice(f"length {name.id}", name.span, places[name.id])
            elif value is not None and uses(value) - {"b"}:
                self.report.error(
                    "E0318", "a length depends on b only", tree.value.span, "one number for each sequence"
                )
            elif value is not None:
                lengths[name.id] = value
            places.setdefault(name.id, name.span)
        return lengths

    def _grads(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        places: dict[str, Span] = {}
        f32: list[str] = []
        for tree in self._all(ast.Grad):
            if tree.dtype is not None and tree.dtype.id != DType.F32:
                self.report.error(
                    "E0319",
                    f"gradients are f32 or of the type of their input, not {tree.dtype.id}",
                    tree.dtype.span,
                    "not a type for a gradient",
                    hints=("leave the type out, or write f32, for sums over several calls",),
                )
            elif tree.dtype is not None:
                f32 += [name.id for name in tree.names]
            for name in tree.names:
                if name.id in INPUTS and name.id not in self.scope.tensors:
                    pass  # reported, as each of them is required
                elif name.id not in self.scope.tensors:
                    known = tuple(self.scope.tensors)
                    hints = did_you_mean(name.id, known)
                    if name.id in OUTPUTS:
                        hints = ("gradients are of what is read: write 'grad q, k, v'",)
                    self.report.error(
                        "E0209", f"unknown input '{name.id}'", name.span, "not an input", hints=hints
                    )
                elif name.id in places:
                    self._twice(f"grad {name.id}", name.span, places[name.id])
                places.setdefault(name.id, name.span)
        return tuple(places), tuple(name for name in places if name in f32)

    # --- statements
    # ----------------------------------------------------------------------------------------------

    def _all(self, kind: type[_Item]) -> Sequence[_Item]:
        return [item for item in self.tree.items if isinstance(item, kind)]

    def _one(self, kind: type[_Item], required: str | None) -> _Item | None:
        """Returns the statement of this kind; an error if there are several, or none where one is
        required.
        """
        found = self._all(kind)
        for again in found[1:]:
            self._twice(kind.__name__.lower(), again.span, found[0].span)
        if not found and required:
            word = kind.__name__.lower()
            self.report.error(
                "E0301",
                f"attention without '{word}'",
                self.tree.name.span,
                f"'{word}' is required",
                hints=(f"add '{required}'",),
            )
        return found[0] if found else None

    def _twice(self, what: str, span: Span, first: Span) -> None:
        self.report.error(
            "E0302", f"'{what}' is given twice", span, "second time", related=(Label(first, "first time"),)
        )
