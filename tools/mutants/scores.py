"""What a campaign comes to: kinds of outcomes, counted by target, phase and operator."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from attnc.files import write_text

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
#: Operators whose mutants may be wrong once in many runs. The simulators show that: copies come late
#: there, and warps in any order.
RACES = ("drop synchronisation", "phase")
#: Those, and of tensors that fill a GPU. That bits never change there says nothing of them.
UNSURE = ("narrow integer", *RACES)
#: The scores that are committed: of kernels, and of attnc's own Python.
SCORES = Path(__file__).with_name("scores.json")
#: Why mutants compute the same that no run decides about, by their names: what somebody has read.
READ = Path(__file__).with_name("read.json")
#: Why mutants are wrong that computed the same bits in every run, by their names: what a reader found.
DOUBTED = Path(__file__).with_name("doubted.json")
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
    first: Mapping[int, Mapping[str, Any]],
    second: Mapping[int, Mapping[str, Any]],
    third: Mapping[int, Mapping[str, Any]] | None = None,
) -> tuple[Outcome, ...]:
    """Returns the outcomes of a campaign. second: of those that were looked at again; third: what the
    simulators say of those that no run on a GPU decides. What neither decides may have been read (`READ`),
    and so may be what no run has shown (`DOUBTED`).
    """
    found, reasons = [], json.loads(READ.read_text(encoding="utf-8"))
    doubts = json.loads(DOUBTED.read_text(encoding="utf-8"))
    for number, result in sorted(first.items()):
        is_looked_at = number in second and result["outcome"] == "survived"  # as verification is now
        last = second[number] if is_looked_at else result
        outcome, message, operator = last["outcome"], last["message"], result["mutant"]["operator"]
        if outcome not in KINDS:
            continue
        kind = KINDS[outcome]
        if is_looked_at and kind == "killed":  # verification had not seen it
            kind, outcome = "survivor", "wrong"
        if outcome == "equal" and operator in UNSURE:
            asked = third if third is not None and is_simulated(result) else {}
            told, kind = asked.get(number, {"outcome": "unknown"}), "survivor"
            if told["outcome"] in ("survived", "same code"):
                kind, message = "equivalent", f"{message}, and {told.get('cases')} are right in the simulator"
            elif KINDS.get(told["outcome"]) == "killed":
                outcome, message = "wrong", f"in the simulator: {told['message']}"
        if kind == "survivor" and (reason := reasons.get(name_mutant(result))) is not None:
            kind, outcome, message = "equivalent", "read", reason
        shows_nothing = kind == "equivalent" or outcome == "equal"
        if shows_nothing and (doubt := doubts.get(name_mutant(result))) is not None:
            kind, outcome, message = "survivor", "doubted", doubt
        found.append(Outcome(kind=kind, outcome=outcome, message=message, result=result))
    return tuple(found)


def is_simulated(result: Mapping[str, Any]) -> bool:
    """Returns whether a mutant's lanes and copies may come in any order on a CPU: Triton's interpreter runs
    one operation after the other, and so shows no race.
    """
    return str(result["place"].get("target", "")).startswith("cuda")


def list_table(outcomes: Outcomes) -> Iterator[str]:
    """Yields lines: for all, for each target and phase, then for each operator, how many were of each kind,
    and how many were killed of those that are wrong.
    """
    yield f"{'':26}{'mutants':>10}" + "".join(f"{kind:>12}" for kind in COLUMNS) + "     score"
    for name, found in count_groups(outcomes).items():
        score = score_of(found)
        numbers = "".join(f"{found[kind]:12}" for kind in COLUMNS)
        yield f"{name:26}{found.total():10}{numbers}" + ("" if score is None else f"{100 * score:8.1f} %")


def count_groups(outcomes: Outcomes) -> dict[str, Counter[str]]:
    """Counts outcomes by kind: of all, of each target and phase, of each operator."""
    order = sorted({(at, name) for outcome in outcomes for at, name in enumerate(outcome.groups)})
    counts: dict[str, Counter[str]] = {name: Counter() for _, name in order}
    for outcome in outcomes:
        for name in outcome.groups:
            counts[name][outcome.kind] += 1
    return counts


def describe(outcome: Outcome) -> str:
    """Returns a line that says what a mutant is, and what became of it."""
    said = f" ({outcome.message[:160]})" if outcome.message else ""
    return f"{outcome.outcome}  {name_mutant(outcome.result)}{said}"


def name_mutant(result: Mapping[str, Any]) -> str:
    """Returns where a mutant is, and what it changes."""
    place, mutant = result["place"], result["mutant"]
    old, new = (" ".join(mutant[side].split())[:90] for side in ("old", "new"))
    module = f"{place['attention']} {place['variant']} for {place['target']}, " if "variant" in place else ""
    where = f"{module}{mutant['file']}:{mutant['line']}, {mutant['function']}"
    return f"{where}: {mutant['operator']}: {old}  ->  {new}"


# --- what is committed --------------------------------------------------------------------------------------


def summarize(outcomes: Outcomes, *, seed: int, where: str) -> dict[str, Any]:
    """Returns what is committed of a campaign, as JSON: counts of all groups, and what was not killed, with
    the reason that it counts as equivalent or rounding. where: the machine, and what it ran with.
    """
    counts = count_groups(outcomes)
    listed: dict[str, list[str]] = {"survivor": [], "rounding": [], "equivalent": []}
    for outcome in outcomes:
        if outcome.kind in listed:
            listed[outcome.kind].append(describe(outcome))
    return {
        "seed": seed,
        "where": where,
        "operators": sorted({outcome.groups[-1] for outcome in outcomes}),
        "groups": {name: {kind: found[kind] for kind in COLUMNS} for name, found in counts.items()},
        **{kind: sorted(lines) for kind, lines in listed.items()},
    }


def score_of(counts: Mapping[str, int]) -> float | None:
    """Returns which part of what is wrong was killed; None where nothing is."""
    wrong = counts["killed"] + counts["survivor"]
    return counts["killed"] / wrong if wrong else None


def keep_scores(path: Path, name: str, summary: Mapping[str, Any]) -> None:
    """Writes a campaign to the file of scores, under a name. ValueError where a score of the same seed would
    fall; more mutants of it take the place of fewer, whatever their scores.
    """
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    before = known.get(name, {"groups": {}})
    is_repeated = before.get("seed") == summary["seed"] and _count(summary) <= _count(before)
    for group, counts in before["groups"].items() if is_repeated else ():
        old, new = score_of(counts), score_of(summary["groups"].get(group, dict.fromkeys(COLUMNS, 0)))
        if old is not None and (new is None or new < old):
            raise ValueError(f"{name}, {group}: {old:.3f} would fall to {'nothing' if new is None else new}")
    write_text(path, json.dumps({**known, name: summary}, indent=1) + "\n")


def _count(summary: Mapping[str, Any]) -> int:
    """Returns how many mutants a campaign has."""
    return sum(summary["groups"].get("all", {}).values())
