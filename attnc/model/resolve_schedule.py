"""`schedule NAME for TARGET { ... }`: keys and values checked, sets of choices kept in the order in which
they were written.

Attentions and projections have other phases and keys (`_Form`); blocks, settings, conditions, `when` and
`config` lines are read alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from attnc.diagnostics import Label, Reporter, did_you_mean
from attnc.expr.nodes import Dim
from attnc.model.configs import check_condition
from attnc.model.dtypes import DType
from attnc.model.knobs import ACCUMULATE_DQ, KEYS, PROJECTION_KEYS, Key, Kind, keys_of
from attnc.model.names import NOT_LABELS, explain_reserved, report_reserved
from attnc.model.program import Projection
from attnc.model.schedule import (
    PARTS,
    PHASES,
    PROJECTION_PHASES,
    Knob,
    Phase,
    Schedule,
    Value,
    When,
    whole_of,
)
from attnc.model.scope import list_names
from attnc.model.targets import TARGETS, suggest_target
from attnc.syntax import ast

#: What Triton, CUTLASS and FlashAttention call the keys, in lower case.
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("block_m", "blockm", "kblockm", "tile.m", "tile_m", "tile.rows", "bm"), "tile.q"),
    **dict.fromkeys(
        ("block_n", "blockn", "kblockn", "tile.n", "tile_n", "tile.k", "tile.v", "bn"), "tile.kv"
    ),
    **dict.fromkeys(("block_d", "tile.dv", "head_dim"), "tile.d"),
    **dict.fromkeys(("num_warps", "nwarps", "knwarps", "threads", "num_threads", "warpgroups"), "warps"),
    **dict.fromkeys(("num_stages", "kstages", "buffers", "pipeline"), "stages"),
    **dict.fromkeys(("num_splits", "splits", "split", "split_k", "num_splits_kv"), "split.kv"),
    **dict.fromkeys(("tile", "block", "blocks", "tiles"), "tile.q' and 'tile.kv"),
    **dict.fromkeys(("norm", "rescale"), "softmax"),
    **dict.fromkeys(("loop", "loop_order"), "loops"),
    **dict.fromkeys(("maxregs", "max_registers", "regs"), "maxnreg"),
    **dict.fromkeys(("num_consumers", "mma_warpgroups"), "consumers"),
    **dict.fromkeys(("cluster_size", "cluster_m"), "cluster"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockForm:
    """What a schedule of one block consists of.

    phases: the first has what stands outside of blocks; blocks: phases that stand in the schedule itself;
    without: what is no such block, and why. keys: of a phase, by name; listed: all of them, for messages;
    names: what a `when` may speak of, and sizes: those of them that are no params, for messages; grads:
    gradients that `accumulate` may name, None where nothing is known of them.
    """

    phases: tuple[Phase, ...]
    blocks: tuple[Phase, ...]
    without: Mapping[str, str] = field(default_factory=dict)
    keys: Callable[[Phase], Mapping[str, Key]]
    listed: tuple[str, ...]
    names: Mapping[str, Kind]
    sizes: str
    grads: tuple[str, ...] | None = None


def _form_of_attention(tree: ast.Attention | None) -> _BlockForm:
    """Returns the keys and blocks that a schedule of an attention may have. tree: None when the attention
    does not exist, so that nothing is known of its params.
    """
    items = tree.items if tree else ()
    grads = tuple(name.id for item in items if isinstance(item, ast.Grad) for name in item.names)
    every = (*KEYS.values(), ACCUMULATE_DQ)
    names = _words(every) | _params(items) | {"D": "number", "Dv": "number"}
    return _BlockForm(
        phases=PHASES,
        blocks=tuple(phase for phase in PHASES if whole_of(phase) is None),
        keys=lambda phase: keys_of(phase, grads),
        listed=(*KEYS, "accumulate.<gradient>"),
        names=names,
        sizes="D and Dv",
        grads=None if tree is None else grads,
    )


def _form_of_projection(tree: ast.Projection, projection: Projection | None) -> _BlockForm:
    """Returns the keys and blocks that a schedule of a projection may have. projection: None if it has
    mistakes.
    """
    every = tuple(PROJECTION_KEYS.values())
    sizes: dict[str, Kind] = {
        name: "number"
        for name in ("N", "K")
        if projection is None or not isinstance(projection.sizes.get(name), Dim)
    }
    return _BlockForm(
        phases=PROJECTION_PHASES,
        blocks=PARTS["projection"],
        without={"conventional": "it is one of torch's, without keys"},
        keys=keys_of,
        listed=tuple(PROJECTION_KEYS),
        names=_words(every) | _params(tree.items) | sizes,
        sizes="N and K",
    )


def _words(keys: tuple[Key, ...]) -> dict[str, Kind]:
    """Returns the words that stand for values of keys and for element types; a param of the same name comes
    before them.
    """
    names: dict[str, Kind] = {word: "word" for key in keys for word in key.words}
    return names | {dtype.value: "word" for dtype in DType}


def _params(items: tuple[ast.AttentionItem, ...] | tuple[ast.ProjectionItem, ...]) -> dict[str, Kind]:
    return {item.name.id: _param_kind(item.choices[0]) for item in items if isinstance(item, ast.Param)}


def resolve_schedule(
    tree: ast.Schedule,
    trees: Mapping[str, ast.Attention],
    report: Reporter,
) -> Schedule | None:
    """Returns the schedule of an attention, or None after reporting what is wrong."""
    before = report.errors
    if tree.target.id not in TARGETS:
        report.error(
            "E0401",
            f"unknown target '{tree.target.id}'",
            tree.target.span,
            "not a target",
            notes=(f"the targets are {', '.join(TARGETS)}",),
            hints=suggest_target(tree.target.id),
        )
    name = tree.attention.id
    if name not in trees:
        label = "no attention of this name in the file"
        report.error(
            "E0210",
            f"unknown attention '{name}'",
            tree.attention.span,
            label,
            hints=did_you_mean(name, trees),
        )
    if tree.label is not None:
        _check_label(tree.label, report)
    return _schedule(tree, _form_of_attention(trees.get(name)), report, before)


def _check_label(label: ast.Name, report: Reporter) -> None:
    reason = explain_reserved(label.id, NOT_LABELS, is_file=True)
    if not reason and "backward_" in label.id.lower():
        reason = "files of gradients have 'backward_' in their names"
    if reason:
        report_reserved(label, reason, report)


def resolve_projection_schedule(
    tree: ast.Schedule, block: ast.Projection, projection: Projection | None, report: Reporter
) -> Schedule | None:
    """Returns the schedule of a projection, or None after reporting what is wrong.

    Which implementation is fastest depends on M and the device (FlashDecoding++, section 5: "heuristic
    dataflow"); `attnc tune` measures it, and the generated module looks it up.
    """
    before = report.errors
    if tree.target.id != "triton":
        report.error(
            "E0602",
            f"projections are not compiled for '{tree.target.id}'",
            tree.target.span,
            "only for triton",
            hints=(f"write 'schedule {tree.attention.id} for triton'",),
        )
    if tree.label is not None:
        label = "implementations are alternatives already"
        report.error("E0408", "a projection has one schedule, without a label", tree.label.span, label)
    return _schedule(tree, _form_of_projection(block, projection), report, before)


def _schedule(tree: ast.Schedule, form: _BlockForm, report: Reporter, before: int) -> Schedule | None:
    block = _Block(form, report)
    block.entries(tree.entries, form.phases[0], form.blocks)
    if report.errors > before:
        return None
    return Schedule(
        name=tree.attention.id,
        target=tree.target.id,
        knobs={phase: part.knobs for phase, part in block.parts.items() if part.knobs},
        where={phase: tuple(part.where) for phase, part in block.parts.items() if part.where},
        listed={phase: tuple(part.listed) for phase, part in block.parts.items() if part.listed},
        whens={phase: tuple(found) for phase, found in block.whens.items() if found},
        label=tree.label.id if tree.label else "",
        span=tree.span,
    )


@dataclass(slots=True)
class _PhaseEntries:
    knobs: dict[str, Knob] = field(default_factory=dict)
    where: list[ast.Expr] = field(default_factory=list)
    listed: list[Mapping[str, Knob]] = field(default_factory=list)


@dataclass(slots=True)
class _Block:
    form: _BlockForm
    report: Reporter
    parts: dict[Phase, _PhaseEntries] = field(init=False)
    whens: dict[Phase, list[When]] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = {phase: _PhaseEntries() for phase in self.form.phases}
        self.whens = {phase: [] for phase in self.form.phases}

    def entries(
        self, entries: tuple[ast.ScheduleEntry, ...], phase: Phase, allowed: tuple[Phase, ...]
    ) -> None:
        for entry in entries:
            match entry:
                case ast.Phase(name=name):
                    inner = next((known for known in allowed if known == name.id), None)
                    if inner is not None:
                        self.entries(entry.entries, inner, PARTS.get(inner, ()))
                        continue
                    label = f"the phases are {', '.join(allowed)}" if allowed else "it holds no phases"
                    label = self.form.without.get(name.id, label)
                    hints = did_you_mean(name.id, allowed) or self._where(name.id)
                    self.report.error(
                        "E0406", f"'{name.id}' is not a phase here", name.span, label, hints=hints
                    )
                case ast.When():
                    self._when(entry, phase)
                case _:
                    self._entry(entry, phase, self.parts[phase])

    def _entry(self, entry: ast.Setting | ast.Where | ast.Listed, phase: Phase, part: _PhaseEntries) -> None:
        match entry:
            case ast.Setting():
                self._setting(entry, phase, part.knobs)
            case ast.Where(condition=condition):
                if check_condition(condition, self._condition_names(phase), self.report):
                    part.where.append(condition)
            case ast.Listed(settings=settings):
                line: dict[str, Knob] = {}
                for setting in settings:
                    self._setting(setting, phase, line)
                part.listed.append(line)

    def _when(self, tree: ast.When, phase: Phase) -> None:
        names, every = self.form.names, self._everywhere()
        keys = [name for name in list_names(tree.condition) if name.id not in names and name.id in every]
        for key in keys:
            self.report.error(
                "E0407",
                f"'{key.id}' is a key, and differs from config to config",
                key.span,
                f"'when' picks variants, by params, {self.form.sizes}",
                hints=("write 'where' to prune configs",),
            )
        part = _PhaseEntries()
        is_right = not keys and check_condition(tree.condition, names, self.report)
        for entry in tree.entries:
            if isinstance(entry, ast.Phase | ast.When):
                self.report.error(
                    "E0406",
                    "a block inside 'when'",
                    entry.name.span if isinstance(entry, ast.Phase) else entry.span,
                    "it holds settings, 'where' and 'config'",
                    hints=(f"write '{entry.name.id} {{ when ... {{ ... }} }}'",)
                    if isinstance(entry, ast.Phase)
                    else ("join the conditions with 'and'",),
                )
            else:
                self._entry(entry, phase, part)
        if is_right:
            self.whens[phase].append(
                When(
                    condition=tree.condition,
                    knobs=part.knobs,
                    where=tuple(part.where),
                    listed=tuple(part.listed),
                )
            )

    def _setting(self, tree: ast.Setting, phase: Phase, knobs: dict[str, Knob]) -> None:
        key = self._key(tree.key, phase)
        if key is None:
            return
        name = tree.key.id
        choices: list[Value] = []
        for value in tree.values:
            choice = key.read(value)
            if choice is None:
                self._refuse(name, value, key)
            elif any(choice == other and type(choice) is type(other) for other in choices):
                self.report.error("E0405", f"'{value.span.text}' is listed twice", value.span, "second time")
            else:
                choices.append(choice)
        knob = Knob(key=name, choices=tuple(choices), span=tree.span)
        first = knobs.setdefault(name, knob)
        if first is not knob and first.span:
            related = (Label(first.span, "first time"),)
            self.report.error("E0405", f"'{name}' is set twice", tree.span, "second time", related=related)

    def _refuse(self, name: str, value: ast.Expr, key: Key) -> None:
        unknown = next((word.id for word in list_names(value) if word.id not in key.words), "")
        is_long = len(key.allowed) > 60
        self.report.error(
            "E0403",
            f"'{name}' cannot be '{value.span.text}'",
            value.span,
            "not a value of this key" if is_long else f"allowed: {key.allowed}",
            notes=(f"allowed: {key.allowed}",) if is_long else (),
            hints=did_you_mean(unknown, key.words),
        )

    def _key(self, name: ast.Name, phase: Phase) -> Key | None:
        keys, everywhere, grads = self.form.keys(phase), self._everywhere(), self.form.grads
        if name.id in keys:
            return keys[name.id]
        if name.id in everywhere:
            self.report.error(
                "E0404",
                f"'{name.id}' does not belong to {_name_place(phase)}",
                name.span,
                f"a key of {_name_place(everywhere[name.id])}",
                hints=(f"write it inside '{_spell_block(everywhere[name.id])}'",),
            )
        elif name.id.startswith("accumulate.") and self.form.phases is PHASES:
            if grads is not None:
                gradients = ", ".join(f"accumulate.d{grad}" for grad in grads)
                label = f"the gradients are {gradients}" if gradients else "the attention has no 'grad'"
                hints = did_you_mean(name.id, self.form.keys("backward"))
                self.report.error("E0410", f"'{name.id}' is not a gradient", name.span, label, hints=hints)
        else:
            known = _ELSEWHERE.get(name.id.lower())
            self.report.error(
                "E0402",
                f"unknown key '{name.id}'",
                name.span,
                "not a key of a schedule",
                notes=(f"the keys are {', '.join(self.form.listed)}",),
                hints=(f"write '{known}'",) if known else did_you_mean(name.id, everywhere),
            )
        return None

    def _everywhere(self) -> dict[str, Phase]:
        return {key: phase for phase in reversed(self.form.phases) for key in self.form.keys(phase)}

    def _condition_names(self, phase: Phase) -> Mapping[str, Kind]:
        keys = self.form.keys(phase)
        if (whole := whole_of(phase)) is not None:
            keys = {**self.form.keys(whole), **keys}
        return {**self.form.names, **{name: key.kind for name, key in keys.items()}}

    def _where(self, name: str) -> tuple[str, ...]:
        phases = self.form.phases[1:] if whole_of(self.form.phases[1]) else self.form.phases
        return tuple(f"'{_spell_block(phase)}' is one" for phase in phases if phase == name)


def _name_place(phase: Phase) -> str:
    return "the schedule itself" if phase == "projection" else f"the {phase} phase"


def _spell_block(phase: Phase) -> str:
    whole = whole_of(phase)
    inside = f"{phase} {{ ... }}"
    return inside if whole in (None, "projection") else f"{whole} {{ {inside} }}"


def _param_kind(choice: ast.Expr) -> Kind:
    return "bool" if isinstance(choice, ast.Bool) else "word" if isinstance(choice, ast.Name) else "number"
