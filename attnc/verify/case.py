"""A case: sizes, layouts, styles and a seed, from which its tensors follow, so that a failing one fits on a
command line.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields

from attnc.model.attention import Variant

#: Elements, at most, between two of a layout that is not `far`.
_NEAR = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """How a tensor lies in memory.

    order: its axes, slowest first (the last axis of q, k, v and o stays fastest); gaps: elements left out
    after each axis, as when the tensor is a slice of a larger one; expanded: axes of stride 0; offset:
    elements before its first one; step: stride of the fastest axis; more: elements that the stride of the
    slowest has besides, which no other stride is a multiple of.
    """

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    expanded: tuple[int, ...] = ()
    offset: int = 0
    step: int = 1
    more: int = 0

    @property
    def is_far(self) -> bool:
        return max((*self.gaps, self.step)) > _NEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem. dims: the value of every free size; layouts: of the tensors that are not contiguous, and
    of the gradients `do` and `dlse` that the backward is handed; config: its number.

    lengths: how long sequences are, see `storage.LENGTHS`; extras: what the inputs besides q, k and v hold,
    see `extras.EXTRAS`; call: `out`, into given memory, or `new`, the module allocates.
    """

    dims: Mapping[str, int]
    seed: int = 0
    logits: str = "random"
    values: str = "random"
    special: str = "none"
    layouts: Mapping[str, TensorLayout] = field(default_factory=dict)
    config: int = 0
    lengths: str = "drawn"
    extras: str = "drawn"
    call: str = "out"

    @property
    def is_far(self) -> bool:
        return any(layout.is_far for layout in self.layouts.values())

    def backward_config(self, count: int) -> int:
        """Returns the number of the config of a kernel of the backward, of so many: any together with any."""
        return (self.config + self.seed) % count

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Case:
        """Returns the case of `to_json`. ValueError, in words for a reader, for any other text."""
        made: object = json.loads(text)
        if not isinstance(made, dict):
            raise ValueError("it is not an object with 'dims'")
        known = {entry.name for entry in fields(Case)}
        if unknown := sorted(made.keys() - known):
            raise ValueError(f"there is no '{unknown[0]}' in one")
        dims = made.get("dims")
        if not isinstance(dims, dict):
            raise ValueError("its 'dims' are not sizes by name")
        for name, size in dims.items():
            _check_number(f"its size '{name}'", size, 0, _SIZES)
        layouts = made.pop("layouts", {})
        if not isinstance(layouts, dict):
            raise ValueError("its 'layouts' are not layouts by name")
        for name, kind in (
            ("seed", int),
            ("config", int),
            ("logits", str),
            ("values", str),
            ("special", str),
            ("lengths", str),
            ("extras", str),
            ("call", str),
        ):
            if name in made and type(made[name]) is not kind:
                raise ValueError(f"its '{name}' is {made[name]!r}")
        _check_number("its 'seed'", made.get("seed", 0), 0, _SEEDS)
        return Case(**made, layouts={name: _layout(name, layout) for name, layout in layouts.items()})

    def repro(self, variant: Variant, target: str = "triton", rule: str = "") -> str:
        """Returns the command that runs it again. rule: what it is held to besides (`Kept`)."""
        spec = shlex.quote(variant.source.path)
        text = Kept(case=self, rule=rule).to_json() if rule else self.to_json()
        return (
            f"attnc verify {spec} --attention {variant.attention.name} --variant {variant.name} "
            f"--target {target} --case {shlex.quote(text)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A case that failed once, as a file keeps it. rule: what it broke besides the error bound, by the name
    of a property, or of the target that disagreed; "" where it was the bound. target: of the kernel that
    failed; "" where it is not known.
    """

    case: Case
    rule: str = ""
    target: str = ""

    def to_json(self) -> str:
        told: dict[str, object] = {"case": asdict(self.case), "rule": self.rule}
        told |= {"target": self.target} if self.target else {}
        return json.dumps(told, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Kept:
        """Returns the case that `to_json`, or `Case.to_json`, wrote. ValueError, in words for a reader, for
        any other text.
        """
        made: object = json.loads(text)
        if not isinstance(made, dict) or "case" not in made:
            return Kept(case=Case.from_json(text))
        words = {name: made.get(name, "") for name in ("rule", "target")}
        for name, word in words.items():
            if not isinstance(word, str):
                raise ValueError(f"its '{name}' is {word!r}")
        return Kept(case=Case.from_json(json.dumps(made["case"])), **words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a case may say of one module. dims: the sizes that it must; ranks: of the tensors, by name;
    configs: how many there are; the rest: the styles.
    """

    dims: Collection[str]
    ranks: Mapping[str, int]
    configs: int
    logits: Collection[str]
    values: Collection[str]
    specials: Collection[str]
    lengths: Collection[str] = ("drawn",)
    extras: Collection[str] = ("drawn",)
    calls: Collection[str] = ("out",)

    def misfit(self, case: Case) -> str | None:
        """Returns why the case is not one of this module, as that of a spec that has changed since; None if
        it is.
        """
        if missing := [name for name in self.dims if name not in case.dims]:
            return f"it has no size {missing[0]}"
        if not 0 <= case.config < self.configs:
            return f"there is no config {case.config}"
        styles = {
            "logits": self.logits,
            "values": self.values,
            "special": self.specials,
            "lengths": self.lengths,
            "extras": self.extras,
            "call": self.calls,
        }
        for what, known in styles.items():
            if getattr(case, what) not in known:
                return f"there is no '{what}' called '{getattr(case, what)}'"
        for name, layout in case.layouts.items():
            axes = set(range(self.ranks.get(name, -1)))
            lists = (len(layout.order), len(layout.gaps))
            if set(layout.order) != axes or set(lists) != {len(axes)} or not set(layout.expanded) <= axes:
                return f"the layout of '{name}' does not fit it"
        return None


#: What numbers are below: sizes, seeds, and what a layout says in elements of tensors that span gigabytes.
_SIZES, _SEEDS, _ELEMENTS = 1 << 31, 1 << 63, 1 << 40


def _check_number(what: str, value: object, least: int, limit: int) -> None:
    if type(value) is not int:
        raise ValueError(f"{what} is {value!r}")
    if not least <= value < limit:
        raise ValueError(f"{what} is {value}, and has to be from {least} to {limit - 1}")


def _layout(name: str, value: object) -> TensorLayout:
    lists = ("order", "gaps", "expanded")
    if not isinstance(value, dict) or value.keys() - {"step", "more"} != {*lists, "offset"}:
        raise ValueError(f"the layout of '{name}' is none")
    numbers = {"offset": value["offset"], "step": value.get("step", 1), "more": value.get("more", 0)}
    for part, least in (("offset", 0), ("step", 1), ("more", 0)):
        _check_number(f"the '{part}' of the layout of '{name}'", numbers[part], least, _ELEMENTS)
    for part in lists:
        if not isinstance(value[part], list):
            raise ValueError(f"the '{part}' of the layout of '{name}' is {value[part]!r}")
        for number in value[part]:
            _check_number(f"the '{part}' of the layout of '{name}'", number, 0, _ELEMENTS)
    order, gaps, expanded = (tuple(value[part]) for part in lists)
    return TensorLayout(order=order, gaps=gaps, expanded=expanded, **numbers)
