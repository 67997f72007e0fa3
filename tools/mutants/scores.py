"""What a campaign comes to: kinds of outcomes, counted by target, phase and operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

#: killed: verification saw it; equivalent: it computes the same bits, by the same machine code or in all
#: runs; rounding: other bits within every bound; survivor: wrong and not seen, or a line that nothing runs;
#: invalid: no compiler takes it.
Kind: TypeAlias = Literal["killed", "equivalent", "rounding", "survivor", "invalid"]
KINDS: Mapping[str, Kind] = {
    "killed": "killed",
    "fault": "killed",
    "died": "killed",
    "hung": "killed",
    "same code": "equivalent",
    "equal": "equivalent",
    "rounding": "rounding",
    "wrong": "survivor",
    "unreached": "survivor",
    "survived": "survivor",
    "invalid": "invalid",
}
#: Operators whose mutants may be wrong where no run is: of tensors that fill a GPU, or for once in many runs.
#: That bits never change says nothing of them.
UNSURE = ("narrow integer", "drop synchronisation", "phase")
COLUMNS: tuple[Kind, ...] = ("killed", "survivor", "equivalent", "rounding", "invalid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A mutant's. kind: as it is counted; outcome: more exactly; result: the line of the file."""

    kind: Kind
    outcome: str
    message: str
    result: Mapping[str, Any]

    @property
    def groups(self) -> tuple[str, str, str]:
        """The names of what it is counted in."""
        return (
            "all",
            f"{self.result['place']['target']} {self.result['phase']}",
            self.result["mutant"]["operator"],
        )


Outcomes: TypeAlias = Sequence[Outcome]


def join_results(
    first: Mapping[int, Mapping[str, Any]], second: Mapping[int, Mapping[str, Any]]
) -> tuple[Outcome, ...]:
    """Returns the outcomes of a campaign, of which those in `second` were looked at again."""
    found = []
    for number, result in sorted(first.items()):
        last = second.get(number, result)
        outcome, operator = last["outcome"], result["mutant"]["operator"]
        if outcome in KINDS:
            is_unsure = outcome == "equal" and operator in UNSURE
            found.append(
                Outcome(
                    kind="survivor" if is_unsure else KINDS[outcome],
                    outcome=outcome,
                    message=last["message"],
                    result=result,
                )
            )
    return tuple(found)


def list_table(outcomes: Outcomes) -> Iterator[str]:
    """Yields lines: for all, for each target and phase, then for each operator, how many were of each kind,
    and how many were killed of those that are wrong.
    """
    counts: dict[str, Counter[str]] = {}
    order = sorted({(at, name) for outcome in outcomes for at, name in enumerate(outcome.groups)})
    for outcome in outcomes:
        for name in outcome.groups:
            counts.setdefault(name, Counter())[outcome.kind] += 1
    yield f"{'':26}{'mutants':>10}" + "".join(f"{kind:>12}" for kind in COLUMNS) + "     score"
    for _, name in order:
        found = counts[name]
        wrong = found["killed"] + found["survivor"]
        score = f"{100 * found['killed'] / wrong:8.1f} %" if wrong else ""
        numbers = "".join(f"{found[kind]:12}" for kind in COLUMNS)
        yield f"{name:26}{found.total():10}{numbers}{score}"


def describe(outcome: Outcome) -> str:
    """Returns a line that says what a mutant is."""
    place, mutant = outcome.result["place"], outcome.result["mutant"]
    old, new = (" ".join(mutant[side].split())[:90] for side in ("old", "new"))
    module = f"{place['attention']} {place['variant']} for {place['target']}, " if "variant" in place else ""
    said = f" ({outcome.message[:160]})" if outcome.message else ""
    where = f"{module}{mutant['file']}:{mutant['line']}, {mutant['function']}"
    return f"{outcome.outcome}  {where}: {mutant['operator']}: {old}  ->  {new}{said}"
