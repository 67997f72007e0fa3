"""Prompts on the clock: the kernels of attnc/bench/specs/prefill and FlashAttention-3's, taking turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from attnc.bench.ours import OURS, modules_of
from attnc.bench.peers import Unavailable, need_flash3
from attnc.bench.prefill import FORMS, PAGES, WIDTH, PrefillCell, PrefillInputs, draw_prefill
from attnc.bench.report import ran_on
from attnc.runtime.timing import Launch, Timing, interleave

SPEC = Path(__file__).parent / "specs" / "prefill" / "prefill.attn"
Make: TypeAlias = Callable[[PrefillInputs], Launch]
_TITLES = {OURS: "attnc", "triton": "attnc on Triton", "fa3": "FlashAttention-3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """Milliseconds by who and form, and why others are missing."""

    cell: PrefillCell
    timings: Mapping[tuple[str, str], Timing]
    missing: Mapping[tuple[str, str], str]

    def tflops(self, who: str, form: str) -> float | None:
        timing = self.timings.get((who, form))
        return None if timing is None else self.cell.flops / timing.median * 1e-9


def makers(names: Collection[str], target: str) -> dict[tuple[str, str], Make]:
    """Who takes part in which form."""
    found: dict[tuple[str, str], Make]
    found = {(OURS, form): partial(_generated, target, form) for form in FORMS}
    if "triton" in names and target != "triton":
        found |= {("triton", form): partial(_generated, "triton", form) for form in FORMS}
    if "fa3" in names:
        found |= {("fa3", form): partial(_flash3, form) for form in FORMS}
    return found


def _generated(target: str, form: str, x: PrefillInputs) -> Launch:
    kernel = getattr(modules_of(SPEC, target)[form], form)
    if form == "dense":
        return partial(kernel, *x.dense())
    if form == "ragged":
        return partial(kernel, x.q, x.k, x.v, x.cu, x.cu)
    k, v, table = x.paged[_page(form)]
    return partial(kernel, x.q, k, v, x.cu, table, x.lengths)


def _flash3(form: str, x: PrefillInputs) -> Launch:
    need_flash3()
    forward = partial(torch.ops.flash_attn_3.fwd, softmax_scale=WIDTH**-0.5, is_causal=True)
    if form == "dense":
        return partial(forward, *x.dense())
    packed: dict[str, Any] = {"cu_seqlens_q": x.cu, "max_seqlen_q": x.longest, "max_seqlen_k": x.longest}
    if form == "ragged":
        return partial(forward, x.q, x.k, x.v, cu_seqlens_k=x.cu, **packed)
    k, v, table = x.paged[_page(form)]
    return partial(forward, x.q, k, v, seqused_k=x.lengths, page_table=table, num_splits=1, **packed)


def _page(form: str) -> int:
    return next(page for page in PAGES if form == f"page_{page}")


def prefill_jobs(target: str) -> list[Callable[[], None]]:
    """What fills the compile caches, each in a process of its own."""
    return [partial(_launch_once, target, form) for form in FORMS]


def _launch_once(target: str, form: str) -> None:
    try:
        _generated(target, form, draw_prefill(PrefillCell(lengths=(256,))))()
        torch.cuda.synchronize()
    except Exception:  # the measurement meets the same failure and reports it
        return


def measure_prefill(
    cells: Sequence[PrefillCell],
    names: Collection[str],
    target: str,
    rounds: int,
    report: Callable[[str], None],
) -> tuple[PrefillResult, ...]:
    """Times every cell. `report` is called with the name of each before it starts."""
    results = []
    for cell in cells:
        report(cell.name)
        with torch.no_grad():
            results.append(_measure(cell, makers(names, target), rounds))
        torch.cuda.empty_cache()
    return tuple(results)


def _measure(cell: PrefillCell, taking: Mapping[tuple[str, str], Make], rounds: int) -> PrefillResult:
    x = draw_prefill(cell)
    launches: dict[tuple[str, str], Launch] = {}
    missing: dict[tuple[str, str], str] = {}
    for (who, form), make in taking.items():
        try:
            if form == "dense" and not cell.is_equal:
                raise Unavailable("prompts of different lengths")
            launch = make(x)
            launch()
            torch.cuda.synchronize()
            launches[who, form] = launch
        except Exception as failure:  # a gap in the table, not the end of the run
            missing[who, form] = f"{type(failure).__name__}: {failure}".splitlines()[0][:120]
    named = {f"{who} {form}": launch for (who, form), launch in launches.items()}
    timings = interleave(named, rounds)
    by_pair = {pair: timings[" ".join(pair)] for pair in launches}
    return PrefillResult(cell=cell, timings=by_pair, missing=missing)


def markdown(results: Sequence[PrefillResult], machine: Mapping[str, str]) -> str:
    """A row for each cell and form: TFLOP/s, ratios to our dense kernel and to the same form of others."""
    others = [
        who
        for who in _TITLES
        if who != OURS and any((who, form) in r.timings for r in results for form in FORMS)
    ]
    head = ["prompts", "keys", "us", "attnc", "spread", "to dense", *(_TITLES[who] for who in others)]
    head += [f"to {_TITLES[who]}" for who in others]
    lines = [
        ran_on(machine),
        "",
        "Medians of interleaved rounds in TFLOP/s; spread is the width of the middle 80 % of the samples.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for result in results:
        for form in FORMS:
            mine = result.timings.get((OURS, form))
            row = [
                result.cell.name,
                form.replace("_", " "),
                f"{mine.median * 1e3:.1f}" if mine else "n/a",
                _figure(result.tflops(OURS, form)),
                f"{100 * mine.spread:.1f} %" if mine else "n/a",
                _ratio(result, (OURS, form), (OURS, "dense")),
                *(_figure(result.tflops(who, form)) for who in others),
                *(_ratio(result, (OURS, form), (who, form)) for who in others),
            ]
            lines.append(f"| {' | '.join(row)} |")
    missing = (item for result in results for item in result.missing.items())
    reasons = sorted({f"{_TITLES[who]}, {form}: {reason}" for (who, form), reason in missing})
    return "\n".join([*lines, "", *(f"* n/a for {reason}" for reason in reasons)]).rstrip() + "\n"


def _figure(tflops: float | None) -> str:
    return "n/a" if tflops is None else f"{tflops:.0f}"


def _ratio(result: PrefillResult, mine: tuple[str, str], other: tuple[str, str]) -> str:
    ours, theirs = result.timings.get(mine), result.timings.get(other)
    return f"{theirs.median / ours.median:.2f}x" if ours and theirs else "n/a"


def as_json(results: Sequence[PrefillResult], machine: Mapping[str, str]) -> str:
    """All figures: microseconds with quantiles, TFLOP/s, and why others are missing."""
    cells = [
        {
            "name": result.cell.name,
            "flops": result.cell.flops,
            "results": {
                f"{who} {form}": {
                    **timing.microseconds(),
                    "tflops": round(result.tflops(who, form) or 0.0, 1),
                }
                for (who, form), timing in result.timings.items()
            },
            "missing": {" ".join(pair): reason for pair, reason in result.missing.items()},
        }
        for result in results
    ]
    return json.dumps({"format": 1, "machine": dict(machine), "cells": cells}, indent=2) + "\n"


def write_prefill(
    results: Sequence[PrefillResult], machine: Mapping[str, str], folder: Path
) -> tuple[Path, ...]:
    """Writes prefill.md and prefill.json; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table, data = folder / "prefill.md", folder / "prefill.json"
    table.write_text(markdown(results, machine), encoding="utf-8")
    data.write_text(as_json(results, machine), encoding="utf-8")
    return (table, data)
