"""`schedule NAME for TARGET { ... }`: keys and values checked, sets of choices kept in the order in which
they were written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attnc.diagnostics import Label, did_you_mean
from attnc.model.attention import Attention
from attnc.model.conditions import check_condition
from attnc.model.definitions import mentioned
from attnc.model.knobs import ACCUMULATE_DQ, KEYS, Key, Kind, keys_of
from attnc.model.report import Report
from attnc.model.schedule import PARTS, PHASES, Knob, Phase, Schedule, Value, When, whole_of
from attnc.model.tensors import DType
from attnc.syntax import ast

TARGETS = (
    "triton",
    *(f"cuda.sm_{arch}" for arch in ("80", "86", "89", "90", "90a", "100", "100a", "120")),
)

#: What Triton and FlashAttention call the keys.
_ELSEWHERE: Mapping[str, str] = {
    "BLOCK_M": "tile.q", "BLOCK_N": "tile.kv", "num_warps": "warps", "num_stages": "stages",
    "num_splits": "split.kv",
}  # fmt: skip
#: Phases that stand in the schedule itself.
_TOP = tuple(phase for phase in PHASES if whole_of(phase) is None)


def resolve_schedule(
    tree: ast.Schedule,
    trees: Mapping[str, ast.Attention],
    attentions: Mapping[str, Attention],
    report: Report,
) -> Schedule | None:
    """The schedule, or None after reporting what is wrong. `attentions` lacks those of `trees` that have
    mistakes.
    """
    before = report.errors
    if tree.target.id not in TARGETS:
        report.error(
            "E0401",
            f"unknown target '{tree.target.id}'",
            tree.target.span,
            "not a target",
            notes=(f"the targets are {', '.join(TARGETS)}",),
            hints=did_you_mean(tree.target.id, TARGETS),
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
    block = _Block(trees.get(name), attentions.get(name), report)
    block.entries(tree.entries, "forward", inside=False)
    if report.errors > before:
        return None
    return Schedule(
        attention=name,
        target=tree.target.id,
        knobs={phase: part.knobs for phase, part in block.parts.items() if part.knobs},
        where={phase: tuple(part.where) for phase, part in block.parts.items() if part.where},
        listed={phase: tuple(part.listed) for phase, part in block.parts.items() if part.listed},
        whens={phase: tuple(found) for phase, found in block.whens.items() if found},
        label=tree.label.id if tree.label else "",
        span=tree.span,
    )


@dataclass(slots=True)
class _Part:
    """What is said about a phase, or in a `when` of one."""

    knobs: dict[str, Knob] = field(default_factory=dict)
    where: list[ast.Expr] = field(default_factory=list)
    listed: list[Mapping[str, Knob]] = field(default_factory=list)


@dataclass(slots=True)
class _Block:
    """The entries of one schedule, collected by phase. `tree` is None when the attention does not exist."""

    tree: ast.Attention | None
    attention: Attention | None
    report: Report
    parts: dict[Phase, _Part] = field(default_factory=lambda: {phase: _Part() for phase in PHASES})
    whens: dict[Phase, list[When]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    def entries(self, entries: tuple[ast.ScheduleEntry, ...], phase: Phase, *, inside: bool) -> None:
        for entry in entries:
            match entry:
                case ast.Phase(name=name):
                    allowed = PARTS.get(phase, ()) if inside else _TOP
                    inner = next((known for known in allowed if known == name.id), None)
                    if inner is not None:
                        self.entries(entry.entries, inner, inside=True)
                        continue
                    label = f"the phases are {', '.join(allowed)}" if allowed else "it holds no phases"
                    hints = did_you_mean(name.id, allowed) or _where(name.id)
                    self.report.error(
                        "E0406", f"'{name.id}' is not a phase here", name.span, label, hints=hints
                    )
                case ast.When():
                    self._when(entry, phase)
                case _:
                    self._entry(entry, phase, self.parts[phase])

    def _entry(self, entry: ast.Setting | ast.Where | ast.Listed, phase: Phase, part: _Part) -> None:
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
        names = self._variant_names()
        keys = [name for name in mentioned(tree.condition) if name.id not in names and name.id in KEYS]
        for key in keys:
            self.report.error(
                "E0407",
                f"'{key.id}' is a key, and differs from config to config",
                key.span,
                "'when' picks variants, by params, D and Dv",
                hints=("write 'where' to prune configs",),
            )
        part = _Part()
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

    def _grads(self) -> tuple[str, ...]:
        items = self.tree.items if self.tree else ()
        return tuple(name.id for item in items if isinstance(item, ast.Grad) for name in item.names)

    def _setting(self, tree: ast.Setting, phase: Phase, knobs: dict[str, Knob]) -> None:
        """Reads a setting into `knobs`."""
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
        unknown = next((word.id for word in mentioned(value) if word.id not in key.words), "")
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
        keys = keys_of(phase, self._grads())
        if name.id in keys:
            return keys[name.id]
        everywhere = {key: p for p in reversed(PHASES) for key in keys_of(p, self._grads())}
        if name.id in everywhere:
            self.report.error(
                "E0404",
                f"'{name.id}' does not belong to the {phase} phase",
                name.span,
                f"a key of the {everywhere[name.id]} phase",
                hints=(f"write it inside '{_spelled(everywhere[name.id])}'",),
            )
        elif name.id.startswith("accumulate."):
            if self.tree is not None:
                gradients = ", ".join(f"accumulate.d{grad}" for grad in self._grads())
                label = f"the gradients are {gradients}" if gradients else "the attention has no 'grad'"
                hints = did_you_mean(name.id, keys_of("backward", self._grads()))
                self.report.error("E0410", f"'{name.id}' is not a gradient", name.span, label, hints=hints)
        else:
            known = _ELSEWHERE.get(name.id)
            self.report.error(
                "E0402",
                f"unknown key '{name.id}'",
                name.span,
                "not a key of a schedule",
                notes=(f"the keys are {', '.join((*KEYS, 'accumulate.<gradient>'))}",),
                hints=(f"write '{known}'",) if known else did_you_mean(name.id, everywhere),
            )
        return None

    def _condition_names(self, phase: Phase) -> Mapping[str, Kind]:
        """What a `where` may speak of."""
        keys = keys_of(phase, self._grads())
        if (whole := whole_of(phase)) is not None:
            keys = keys_of(whole, self._grads()) | keys
        return {**self._variant_names(), **{name: key.kind for name, key in keys.items()}}

    def _variant_names(self) -> Mapping[str, Kind]:
        """What a `when` may speak of: words first, so that a param of the same name wins."""
        every = (*KEYS.values(), ACCUMULATE_DQ)
        names: dict[str, Kind] = {word: "word" for key in every for word in key.words}
        names |= {dtype.value: "word" for dtype in DType}
        for item in self.tree.items if self.tree else ():
            if isinstance(item, ast.Param):
                names[item.name.id] = _param_kind(item.choices[0])
        return names | {"D": "number", "Dv": "number"}


def _spelled(phase: Phase) -> str:
    """How a block of the phase is written: `backward { dq { ... } }`."""
    whole = whole_of(phase)
    return f"{phase} {{ ... }}" if whole is None else f"{whole} {{ {phase} {{ ... }} }}"


def _where(name: str) -> tuple[str, ...]:
    """Where a phase of this name could stand."""
    return tuple(f"'{_spelled(phase)}' is one" for phase in PHASES if phase == name)


def _param_kind(choice: ast.Expr) -> Kind:
    return "bool" if isinstance(choice, ast.Bool) else "word" if isinstance(choice, ast.Name) else "number"
