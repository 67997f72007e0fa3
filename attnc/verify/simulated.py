"""Cases of a CUDA module that are simulated, beside those that a GPU runs.

A copy that a kernel does not wait for is mostly there on a GPU all the same, and warps that should meet
mostly run side by side. In the simulator (`verify.simt`) copies come as late as they may and warps run in any
order, so that one case shows what thousands may not. It takes seconds, most of them a compiler's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from attnc.plan import ir
from attnc.verify.boundaries import PROCESSORS
from attnc.verify.case import Case
from attnc.verify.check import keeps
from attnc.verify.cover import Space
from attnc.verify.properties import fallback_violations, has_fallback
from attnc.verify.runners import runner_of
from attnc.verify.search import AttentionTrial
from attnc.verify.strategies import free_dims
from attnc.verify.subject import Subject, subject_of
from attnc.verify.verdict import Verdict

#: Tiles of rows, or of keys, that a case has at least, and what it has beside whole ones.
_TILES, _MORE = 2, 5
#: Sizes besides those of queries and keys; 3 of what is not here.
_FEW: Mapping[str, int] = {"B": 1, "H": 1, "Hkv": 1, "G": 2}


def simulate_beside(
    subject: Subject, module: ir.Module, text: str | Mapping[str, str] | None = None
) -> SimulatedTrial | None:
    """Returns the simulated cases of a module that is verified on a GPU, or of this text of it. None where
    the subject runs on the CPU anyway, where no simulator runs beside a GPU, and without a C++ compiler.
    """
    runner = runner_of(module.target)
    if subject.device == "cpu" or not runner.runs_beside_gpu or not runner.is_available():
        return None
    return SimulatedTrial(subject_of(module, text, on_cpu=True), spares_gradients=False)


class SimulatedTrial(AttentionTrial):
    """The cases of a module that are simulated: always the same few, with NaN around tensors."""

    def cases(self, count: int) -> Iterable[Case]:
        found = [*simulated_cases(self.subject.space)]
        yield from found
        if has_fallback(self.subject):  # the loop that follows a bad guess
            yield replace(found[0], logits="huge")

    def check(self, case: Case, fills: Iterable[str]) -> Verdict:
        verdict = super().check(case, ("nan",))
        if verdict.ok and case.logits == "huge":
            verdict = keeps(self.subject, case, _count_fallbacks, verdict)
        return verdict if verdict.ok else replace(verdict, message=f"simulated: {verdict.message}")

    def repro(self, case: Case, rule: str = "") -> str:
        return f"CUDA_VISIBLE_DEVICES= {super().repro(case, rule)}"


def _count_fallbacks(subject: Subject, case: Case) -> Iterator[str]:
    """Yields a finding if the number of fallbacks is wrong. A value that a copy has not brought yet is NaN,
    which looks like a bad guess, and is computed again: only the number shows it.
    """
    return fallback_violations(subject)


def simulated_cases(space: Space) -> Iterator[Case]:
    """Yields a case in which every loop takes more turns than a pipeline has stages, with splits that are
    joined where there are any, and else of the config with most stages; one, of another config, of hardly a
    key, in which some loops take no turn, with more tiles than programs of a persistent grid; one without
    keys, in which results are what was set before the loops; and one whose keys are seen by no query, so that
    copies are made which nothing reads.
    """
    names, levels = free_dims(space.attention), space.factors
    lengths = "full" if "full" in levels.get("lengths", ()) else "drawn"
    extras = "many" if "many" in levels.get("extras", ()) else "drawn"
    first = space.usable[0]
    deepest = max(space.usable, key=lambda n: getattr(space.configs[n], "STAGES", 1))
    filling = next((n for n in space.usable if getattr(space.configs[n], "splits", 0) > 1), deepest)
    filled, empty = (
        Case(dims={}, seed=seed, config=config, lengths=lengths, extras=extras)
        for seed, config in ((3, filling), (filling + 4, first))
    )
    tiles = {"M": (PROCESSORS + 1) * space.configs[first].BLOCK_M + _MORE, "N": _MORE}
    keyless = {"M": space.configs[first].BLOCK_M + _MORE, "N": 0}
    most = _fill(space.configs_of(filled), _joined_rows(space))
    has_lengths = "empty" in levels.get("lengths", ())
    unseen = replace(filled, lengths="empty") if has_lengths else filled
    rows = space.configs[unseen.config].BLOCK_M + _MORE if has_lengths else 0
    for case, sizes in ((filled, most), (empty, tiles), (empty, keyless), (unseen, {**most, "M": rows})):
        yield replace(case, dims={name: {**_FEW, **sizes}.get(name, 3) for name in names})


def _joined_rows(space: Space) -> int:
    """Returns how many rows of dk or dv, the narrower, all blocks that add their parts take at a time; 0:
    there are no such blocks.
    """
    backward = None if space.plan is None else space.plan.backward
    return 0 if backward is None or backward.layout is None else PROCESSORS * backward.layout.joined_rows


def _fill(configs: Mapping[str, Any], joined: int) -> dict[str, int]:
    """Returns rows and keys for the configs of a case: of the forward several tiles of rows, of each kernel
    one tile more than it has stages, on either side where it is one of the backward, and more keys than
    `joined`.
    """
    forward = configs["forward"]
    rows = [_TILES * forward.BLOCK_M]
    keys = [joined, max(getattr(forward, "splits", 0), 1) * _turns(forward) * forward.BLOCK_N]
    for name, config in configs.items():
        if name != "forward" and hasattr(config, "BLOCK_N"):
            rows.append(_turns(config) * config.BLOCK_M)
            keys.append(_turns(config) * config.BLOCK_N)
    return {"M": max(rows) + _MORE, "N": max(keys) + _MORE}


def _turns(config: Any) -> int:
    return max(getattr(config, "STAGES", 1) + 1, _TILES)
