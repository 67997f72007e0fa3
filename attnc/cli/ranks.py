"""What commands say about several GPUs: `attnc explain --ranks` and `attnc verify --ranks`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from attnc.cli.console import (
    Mistake,
    count_noun,
    loading,
    paint,
    progress,
    say,
    say_json,
    say_lines,
    split_commas,
)
from attnc.diagnostics import DiagnosticError, did_you_mean

if TYPE_CHECKING:
    from attnc.distributed.estimate import Strategy
    from attnc.model.attention import Attention, Variant
    from attnc.model.program import Program


def explain_ranks(
    path: Path,
    attention: str | None,
    variant: str | None,
    target: str | None,
    ranks: int,
    size: str,
    strategy: str | None,
    *,
    as_json: bool,
) -> None:
    """Prints the plan of one call on several ranks. target: whose kernels are estimated; Triton's if None."""
    from attnc.cli.bench import check_target

    with loading():
        from attnc.distributed.estimate import rates_of
        from attnc.distributed.explain import as_dict, as_text, example, sizes_known
        from attnc.distributed.kernels import check_covered
        from attnc.distributed.plan import Planner, widths_of
        from attnc.distributed.spans import Visibility

    target = target or "triton"
    check_target(target)
    chosen = _attention(path, attention, variant, target)
    check_covered(chosen)
    visibility = Visibility(chosen)
    dims = sizes_of(size)
    if unknown := next((name for name in dims if name not in sizes_known(chosen)), None):
        known = ", ".join(sizes_known(chosen))
        raise Mistake(f"'{chosen.name}' has no size '{unknown}'", f"its sizes are {known}")
    if ranks * max(dims.get("M", 1), dims.get("N", 1)) > _MOST:
        raise Mistake(
            f"a plan of so many rows for {ranks} ranks takes too much memory",
            f"ranks times M, and times N, is {_MOST} at most",
        )
    sizes, remarks = example(chosen, dims)
    try:
        planner = Planner(visibility, widths_of(visibility), ranks, rates_of(target))
        plan = planner.plan(sizes, strategy_of(strategy))
    except ValueError as failure:
        raise Mistake(str(failure), "leave --strategy out to have the shortest estimate") from None
    if as_json:
        say_json(as_dict(plan, visibility, remarks))
    else:
        say_lines(as_text(plan, visibility, remarks))


class _Named(NamedTuple):
    """A variant under a name that commands give it. schedule: the label in the name, None without one."""

    name: str
    variant: Variant
    schedule: str | None


def _names(program: Program, attention: Attention, target: str) -> list[_Named]:
    from attnc.model.variants import add_label, variants

    found = variants(program, attention)
    of = [s.label for s in program.schedules if (s.name, s.target) == (attention.name, target)]
    labelled = [_Named(add_label(v, label).name, v, label) for v in found for label in filter(None, of)]
    return [*(_Named(v.name, v, None) for v in found), *labelled]


def _read(path: Path, attention: str | None, target: str) -> Program:
    """Returns the program of a spec whose kernels can be made. Raises DiagnosticError."""
    with progress(f"planning {path.name}", None):
        from attnc.build import front, plan_program, schedule_all
        from attnc.effort import limit_steps

        with limit_steps():
            program = front(path)
            plan_program(schedule_all(program, [target], attention)[0])
    return program


def _attention(path: Path, name: str | None, variant: str | None, target: str) -> Attention:
    from attnc.cli.judge import only

    program = _read(path, name, target)
    if not program.attentions:
        raise Mistake(f"'{path}' declares no attention", "projections are not shared out over ranks")
    found = only(program.attentions, "attention", name, lambda a: a.name)[0]
    return only(_names(program, found, target), "variant", variant, lambda v: v.name)[0].variant.attention


def verify_ranks(
    paths: Sequence[Path],
    attention: str | None,
    variant: str | None,
    target: str,
    ranks: int,
    count: int,
    *,
    as_json: bool,
) -> None:
    """Runs the attentions of the specs that ranks can share on so many processes. Exit(1) if one is wrong.
    Raises Mistake where they can share none.
    """
    from attnc.cli.judge import only

    data, is_right, found_any = [], True, False
    for path in paths:
        program = _read(path, attention, target)
        for spec in program.attentions:
            if attention not in (None, spec.name):
                continue
            found_any = True
            chosen = only(_names(program, spec, target), "variant", variant, lambda v: v.name)[0]
            row = _verify_one(path, chosen, target, ranks, count, quiet=as_json)
            data.append(row)
            is_right &= row["ok"] is not False
    if not found_any:
        raise Mistake(
            f"there is no attention '{attention}'" if attention else "these specs have no attention"
        )
    if as_json:
        say_json(data)
    if not is_right:
        raise typer.Exit(1)
    if all(row["ok"] is None for row in data):
        raise Mistake(
            "nothing was verified: ranks share out none of these attentions",
            data[0]["reason"] if len(data) == 1 else "the reason is said beside each",
        )


def _verify_one(
    path: Path, chosen: _Named, target: str, ranks: int, count: int, *, quiet: bool
) -> dict[str, Any]:
    with loading():
        from attnc.distributed.kernels import check_kernels, spec_of
        from attnc.distributed.verify import refuse_heads, verify_on_ranks

    variant, name = chosen.variant, chosen.variant.attention.name
    row: dict[str, Any] = {"spec": str(path), "attention": name, "variant": chosen.name, "ranks": ranks}
    try:
        check_kernels(spec_of(str(path), name, target, chosen.schedule), variant)
    except DiagnosticError as failure:
        reason = failure.diagnostics[0].message
        if failure.diagnostics[0].code != "E0602":  # of what a rank would compile, not of sharing it out
            raise
    else:
        reason = refuse_heads(variant.attention, ranks)
    if reason:
        if not quiet:
            say(f"-     {name}: {reason}")
        return {**row, "ok": None, "reason": reason}
    with progress(f"{name} on {count_noun(ranks, 'rank')}", None):
        found = verify_on_ranks(str(path), name, target, ranks, count, variant.name, chosen.schedule)
    if not quiet:
        state = paint("ok   ", "32") if found.ok else paint("WRONG", "1;31")
        text = f" {name} on {ranks} ranks: {count_noun(len(found.verdicts), 'case')} on {found.place};"
        text += " worst error"
        say(state, f"{text} {100 * found.worst:.0f} % of the bound")
        for made, verdict in found.verdicts:
            if not verdict.ok:
                say(f"      {made.strategy or 'estimate'}: {verdict.message}")
                say(f"      {made.case.to_json()}")
    return {
        **row,
        "ok": found.ok,
        "place": found.place,
        "worst": found.worst,
        "cases": [
            {"strategy": made.strategy, "case": json.loads(made.case.to_json()), "ok": verdict.ok,
             "message": verdict.message, "worst": verdict.worst}
            for made, verdict in found.verdicts
        ],
    }  # fmt: skip


#: Ranks times rows, or keys, of a plan that is shown: each takes some numbers.
_MOST = 1 << 27
#: What sizes stay below, how many digits are read as a number, and how much of what is none is shown.
_LARGEST, _DIGITS, _SHOWN = 1 << 30, 20, 40


def sizes_of(text: str) -> dict[str, int]:
    """Returns `M=65536,N=65536` as numbers. Raises Mistake."""
    sizes: dict[str, int] = {}
    for part in split_commas(text):
        name, _, value = part.partition("=")
        is_number = value.strip().isdecimal() and len(value) <= _DIGITS and 1 <= int(value) < _LARGEST
        if not name.strip().isidentifier() or not is_number:
            hint = "sizes are written M=65536,N=65536,H=32,Hkv=8, and stay below 2^30"
            raise Mistake(f"'{part[:_SHOWN]}' is no size", hint)
        sizes[name.strip()] = int(value)
    return sizes


def strategy_of(name: str | None) -> Strategy | None:
    """Returns the strategy of this name. Raises Mistake."""
    from attnc.distributed.estimate import STRATEGIES

    for strategy in STRATEGIES:
        if strategy == name:
            return strategy
    if name is None:
        return None
    hint = "".join(did_you_mean(name, STRATEGIES)) or f"strategies are {', '.join(STRATEGIES)}"
    raise Mistake(f"there is no strategy '{name}'", hint)
