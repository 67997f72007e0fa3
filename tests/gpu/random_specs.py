"""Whole random specs on GPUs, thousands of them: text to kernels of three targets to judged results.

    python -m tests.gpu.random_specs --seconds 600 --out random_specs.json

Each spec is compiled for Triton, for `cuda.sm_80`, and for `cuda.sm_90a` where that has kernels for it. The
forward and the gradients of each are judged by their bounds on one drawn case, and outputs are compared.
Nearly every spec has gradients; every second one has tiles as large as those of models, which other
instructions multiply. A worker is a process of its own (workers take turns with the GPUs), so that
compilers run side by side; one that a kernel has killed, or keeps for minutes, is started again behind the
spec that did it.

The file is written as the run goes on: how many specs there were by target, how often each feature of the
language was drawn, and which were wrong, with text, seed and case. A later run with the same file adds to
it, from the next seed on; `--again` runs those that were wrong, and keeps those that still are. A spec that
found no room in memory, which workers share, is kept as unjudged, and `--again` runs it too. Without a GPU
kernels are interpreted. With `--compile` nothing runs: the front ends of the compilers read every kernel, for
which no GPU is needed, and a spec is wrong if one of them refuses; `--compile whole` goes on to machine code.

With `--foreign` the specs are those of `tests.verify.foreign_specs`, what papers and model code add to
scores, and each case is held to the rules of `attnc verify` too, on every target. `--targets triton` leaves
the others out. With `--everywhere` all specs have gradients, and kernels for every target, and every second
one is held to the rules on one target. Of both half of the cases are those that `attnc verify` has at
boundaries. With `--one` each spec runs on one target alone, which takes a third of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tests.processes import cpu_seconds, environment_of

if TYPE_CHECKING:
    from attnc.plan.ir import Module
    from attnc.verify.case import Case
    from attnc.verify.subject import Subject

#: Specs that one seed draws. The first that Hypothesis draws is always the simplest, and is not counted.
CHUNK = 24
#: Of so many specs one may be of what has no gradients: decoding.
_WITHOUT_GRADIENTS = 12
#: Of so many specs one may have a case without rows, keys or sequences, which shows little.
_EMPTY = 12
#: Rows of a case, and its scores: few on a GPU too, since the reference is computed on the host.
LONGEST, AREA = 300, 1 << 16
#: The same where a case is held to rules, which run it some twenty times.
LONGEST_HELD, AREA_HELD = 130, 1 << 14
#: Scores of a case at a boundary.
AREA_AT_BOUNDARIES = 1 << 17
#: Numbers of which one chooses a case at a boundary: there are fewer cases, and how many is not drawn.
_MOST_NEAR = 1023
#: Of four specs for every target so many are held to the rules, which cost more than all else, on one target.
_HELD = 2
#: Seconds of its worker's processor after which a spec is taken for one whose kernel does not end, which is
#: waited for in a loop: compilers alone take up to 50 for the configs of one. Of the clock ten times as many
#: pass where others keep the processors busy.
PATIENCE = 180
#: Words and signs of the language whose use is counted, besides the types of inputs.
WORDS = re.compile(
    r"\b(?:bf16|f16|f32|i32|i64|bool|e4m3|e5m2|i8|v_scale|ragged|paged|prefix|grad|dropout|sink|length|lse|mask|sorted|persistent"
    r"|longest_first|two_pass|every_step|unified_max|sequential|atomic|fixed|pack|where|min|max"
    r"|abs|exp|exp2|log|log2|sqrt|tanh|sigmoid|erf|clamp|floor|q_pos|and|or|not|causal|window|first)\b"
    r"|//|%|==|!=|<=|>=|loops = \[[a-z, ]+\]|split\.kv|warp_split = \w+|(?:rescale|maximum) = lazy"
    r"|consumers = \d|overlap = \w+|pingpong = \w+|cluster (?:=|in)|registers"
)
#: What is counted of each result, in the order of a summary.
COUNTS = (
    "specs",
    "on three targets",
    "with gradients",
    "with gradients on three targets",
    "with gradients by wgmma",
    "wrong",
    "refused",
    "without memory",
)


@dataclass(slots=True)
class Result:
    """One drawn spec. wrong: what is, by target; refused: the compiler's message for a spec that it does not
    take; lacked: what had no room in memory, which others share, so that the spec was not judged; targets:
    those that ran; gradients: whether theirs ran; wgmma: whether Hopper's did so by wgmma.
    """

    chunk: int
    number: int
    text: str
    case: str = ""
    wrong: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    lacked: str = ""
    features: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    gradients: bool = False
    wgmma: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """What it adds to each of `COUNTS`."""
        ran, three = not (self.refused or self.lacked), len(self.targets) == 3
        counted = ran, three, self.gradients, self.gradients and three, self.wgmma
        found = (*(ran and each for each in counted), self.wrong, self.refused, self.lacked)
        return {name: int(bool(value)) for name, value in zip(COUNTS, found, strict=True)}


def features_of(text: str, case: Any) -> tuple[str, ...]:
    """What a spec and its case, if it has one, use, each once."""
    found = {re.sub(r"\s+", " ", word) for word in WORDS.findall(text)}
    if case is None:
        return tuple(sorted(found))
    found |= {f"lengths {case.lengths}", f"extras {case.extras}", f"call {case.call}"}
    return tuple(sorted(found | {f"layout of {name}" for name in case.layouts if name in _LAID_OUT}))


_LAID_OUT = ("q", "k", "v", "o", "lse", "do", "dlse")


def compiled(chunk: int, number: int, text: str, *, whole: bool) -> Result:
    """The kernels of a spec given to compilers, and not run."""
    from attnc.diagnostics import DiagnosticError
    from tests.verify.judging import modules_of

    result = Result(chunk=chunk, number=number, text=text)
    try:
        modules = modules_of(text)
    except DiagnosticError as error:
        result.refused = str(error)
        return result
    _describe(result, modules)
    result.features = features_of(text, None)
    result.wrong = wrong_to_compilers(modules, whole=whole)
    return result


def wrong_to_compilers(modules: Iterable[Module], *, whole: bool) -> dict[str, str]:
    """What compilers refuse, by target."""
    from tests.compiled import refusals

    found = {module.target: refusals(module, whole=whole) for module in modules}
    return {
        target: "\n".join(f"{kernel}: {message}" for kernel, message in said.items())
        for target, said in found.items()
        if said
    }


def _describe(result: Result, modules: Iterable[Module]) -> None:
    """Says which targets a spec has kernels for, and what gradients."""
    backward = {module.target: module.backward for module in modules}
    result.targets, result.gradients = tuple(backward), any(backward.values())
    hopper = backward.get("cuda.sm_90a")
    result.wgmma = hopper is not None and type(hopper.layout).__name__ == "Sm90Backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What is done with specs. compiling: `front` or `whole`, in place of a run; is_foreign, everywhere:
    which specs; targets: for which kernels are made; one: of these any one for each spec.
    """

    compiling: str | None = None
    is_foreign: bool = False
    everywhere: bool = False
    one: bool = False
    targets: tuple[str, ...] = ("triton", "cuda.sm_80", "cuda.sm_90a")

    @property
    def has_rules(self) -> bool:
        """Whether some specs are held to rules, and have cases at boundaries."""
        return self.is_foreign or self.everywhere

    @property
    def options(self) -> list[str]:
        """How a command line says so."""
        found = ["--compile", self.compiling] if self.compiling else []
        found += ["--foreign"] if self.is_foreign else []
        found += ["--everywhere"] if self.everywhere else []
        found += ["--one"] if self.one else []
        return [*found, "--targets", *self.targets]


def judged(chunk: int, number: int, text: str, data: Any, mode: Mode) -> Result:
    """The spec compiled for its targets, run on a drawn case, and compared."""
    from hypothesis import strategies as st

    from attnc.diagnostics import DiagnosticError
    from attnc.runtime.memory import ran_out_of_memory
    from attnc.verify.subject import subject_of
    from tests.verify.judging import modules_of

    result = Result(chunk=chunk, number=number, text=text)
    try:
        modules = modules_of(text)
    except DiagnosticError as error:
        result.refused = str(error)
        return result
    if mode.one and modules:  # drawn, as all must be that decides what else is
        modules = (modules[data.draw(st.integers(0, len(modules) - 1))],)
    made = {module.target: subject_of(module) for module in modules}
    if not made:
        result.refused = "no schedule was drawn that some target compiles"
        return result
    without = [target for target, subject in made.items() if not subject.fits]
    made = {target: subject for target, subject in made.items() if target not in without}
    if not made:
        result.refused = f"no config for {', '.join(without)} is sure to fit this GPU"
        return result
    shaping = made[data.draw(st.sampled_from(sorted(made)))]
    case = drawn_case(shaping, data, number, mode)
    _describe(result, [module for module in modules if module.target in made])
    result.case = case.to_json()
    result.features = (*features_of(text, case), *(f"on {target}" for target in made))
    try:
        result.wrong = wrong_on(made, case, mode, number)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        result.lacked = str(error)
    return result


def drawn_case(subject: Subject, data: Any, number: int, mode: Mode) -> Case:
    """A case of any kind, or for half of the specs one of those that `attnc verify` has at boundaries."""
    from hypothesis import strategies as st

    from attnc.verify.covering import cases_beside_the_array, plain_case
    from attnc.verify.strategies import cases

    limits, space = subject.limits(), subject.space
    if mode.has_rules and data.draw(st.booleans()):
        found = [plain_case(space), *cases_beside_the_array(space, limits)]
        near = [case for case in found if not case.is_far and area(case) <= AREA_AT_BOUNDARIES]
        place: int = data.draw(st.integers(0, _MOST_NEAR))
        return near[place % len(near)]
    largest = max(m * n for m, n in limits.tiles.values())
    longest, most = (LONGEST_HELD, AREA_HELD) if mode.is_foreign else (LONGEST, AREA)
    limits = replace(limits, longest=longest, work=max(most // largest, 1))
    case: Case = data.draw(cases(subject.variant, limits))
    if case.is_far:
        case = replace(case, layouts={})  # rows gigabytes apart have tests of their own
    if number % _EMPTY:
        case = replace(case, dims={name: max(size, 1) for name, size in case.dims.items()})
    return case


def area(case: Case) -> int:
    """About how many scores the reference computes for a case."""
    sizes = (case.dims.get(name, 1) for name in ("B", "H", "Hkv", "G", "M", "N"))
    return math.prod(max(size, 1) for size in sizes)


def wrong_on(
    made: Mapping[str, Subject], case: Case, mode: Mode | None = None, number: int = 0
) -> dict[str, str]:
    """What is wrong with the modules of a spec, by target, on this case, each alone and compared; what rules
    they break, each of a foreign spec's, and of specs for every target so many, of the target in turn.
    """
    from attnc.verify.check import check, keeps
    from attnc.verify.properties import result_violations, violations
    from attnc.verify.trials import across

    wrong = {}
    held = _targets_held(made, case, mode, number)
    for target, subject in made.items():
        own = replace(case, config=case.config % len(subject.configs))
        verdict = check(subject, own)
        others = {name: peer for name, peer in made.items() if name != target}
        if verdict.ok and target in held:
            # Host code differs little by target. Of Hopper's configs, a second of compilers each, two compute
            # what foreign specs say: the case's and the last.
            rules = violations if target == min(held) else result_violations
            verdict = keeps(replace(subject, compared=1), own, rules, verdict)
        elif verdict.ok and target == "triton" and case.call == "out":
            verdict = keeps(subject, own, across(others), verdict)
        if not verdict.ok:
            wrong[target] = verdict.message
    return wrong


def _targets_held(made: Mapping[str, Subject], case: Case, mode: Mode | None, number: int) -> list[str]:
    """The targets whose modules are held to the rules."""
    if mode is None or not mode.has_rules or area(case) > AREA_HELD:
        return []
    names = sorted(made)
    if mode.is_foreign:
        return names
    return [names[number // 4 % len(names)]] if number % 4 < _HELD else []


def draw(chunk: int, skip: int, mode: Mode) -> Iterator[Result]:
    """The results of a seed's specs, but for the first `skip`."""
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st

    from attnc.runtime.memory import ran_out_of_memory
    from tests.verify.foreign_specs import foreign_specs
    from tests.verify.random_specs import specs

    def texts(number: int) -> st.SearchStrategy[str]:
        wide = number % 2 == 0
        if mode.is_foreign:
            return foreign_specs(targets=mode.targets, wide=wide)
        if mode.everywhere:  # large tiles take compilers thrice as long
            return specs(targets=mode.targets, wide=number % 4 == 0, with_gradients=True, everywhere=True)
        with_gradients = number < _WITHOUT_GRADIENTS
        return specs(targets=mode.targets, widest=512, wide=wide, with_gradients=with_gradients)

    results: list[Result] = []
    count = 0

    @seed(chunk)
    @settings(
        max_examples=CHUNK + 1,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(1, _WITHOUT_GRADIENTS).flatmap(texts), st.data())
    def run(text: str, data: st.DataObject) -> None:
        nonlocal count
        count += 1
        if count == 1 or count - 2 < skip:
            return
        announce({"begin": [chunk, count - 2], "text": text})
        try:
            if mode.compiling is None:
                made = judged(chunk, count - 2, text, data, mode)
            else:
                made = compiled(chunk, count - 2, text, whole=mode.compiling == "whole")
        except Exception as error:
            made = Result(chunk=chunk, number=count - 2, text=text)
            if ran_out_of_memory(error):
                made.lacked = str(error)
            else:
                made.wrong = {"": traceback.format_exc()}
        results.append(made)
        announce({"result": as_data(made)})
        is_broken = any("CUDA" in said or "illegal" in said for said in made.wrong.values())
        if mode.compiling is None and is_broken:
            raise SystemExit(3)  # nothing works in this process any more

    run()
    yield from results


def as_data(result: Result) -> dict[str, Any]:
    """A result for JSON; the text of a right one says nothing that its seed does not."""
    names = ("chunk", "number", "text", "case", "wrong", "refused", "lacked", "features")
    is_kept = result.wrong or result.refused or result.lacked
    kept = {name: getattr(result, name) for name in names if is_kept or name != "text"}
    return {**kept, "counts": result.counts}


def announce(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def worker(first: int, step: int, last: int, skip: int, mode: Mode) -> None:
    """Runs every `step`th seed from `first` up to `last`, the first from a certain spec on."""
    for chunk in range(first, last, step):
        for _ in draw(chunk, skip, mode):
            pass
        skip = 0
    announce({"end": True})


class Worker:
    """A process that runs seeds, and is started again behind a spec that has killed it."""

    def __init__(self, number: int, seeds: range, devices: int, folder: Path, mode: Mode) -> None:
        self.number, self.seeds, self.devices, self.mode = number, seeds, devices, mode
        self.path, self.done = folder / f"{number}.jsonl", False
        self.results: list[dict[str, Any]] = []
        self.begun: dict[str, Any] | None = None
        self.began = self.spent = 0.0
        self.read = 0
        self.at: tuple[int, int] | None = None
        self.start(skip=0)

    def start(self, skip: int) -> None:
        seeds = [str(self.seeds.start), str(self.seeds.step), str(self.seeds.stop)]
        command = [sys.executable, "-m", "tests.gpu.random_specs", "--seeds", *seeds, "--skip", str(skip)]
        command += self.mode.options
        with self.path.open("ab") as out, self.path.with_suffix(".err").open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=errors, env=environment_of(self.number, self.devices)
            )

    def collect(self) -> list[dict[str, Any]]:
        """Reads what the process has said since, and starts it again if it has died of a spec."""
        ended, before = self.process.poll() is not None, len(self.results)
        with self.path.open("rb") as said:
            said.seek(self.read)
            text = said.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.splitlines():
            if not line.startswith(b"{"):  # what a compiler prints
                continue
            message = json.loads(line)
            self.done |= "end" in message
            if "begin" in message:
                self.begun, self.began, self.spent = message, time.monotonic(), cpu_seconds(self.process.pid)
            elif "result" in message:
                self.begun = None
                self.results.append(message["result"])
                self.at = (message["result"]["chunk"], message["result"]["number"])
        hangs = self.begun is not None and (
            cpu_seconds(self.process.pid) - self.spent > PATIENCE
            or time.monotonic() - self.began > 10 * PATIENCE
        )
        if hangs and not ended:
            self.stop()
        if (ended or hangs) and not self.done:
            self._resume("does not end" if hangs else f"died: {self.process.returncode}")
        return self.results[before:]

    def _resume(self, why: str) -> None:
        """Starts behind the spec that the process was at, which is wrong for this reason."""
        if self.begun is not None:
            chunk, number = self.begun["begin"]
            self.at = (chunk, number)
            self.results.append(as_data(Result(chunk, number, self.begun["text"], wrong={"": why})))
            self.begun = None
        elif self.at is None:
            self.done = True  # it cannot even start
            why = self.path.with_suffix(".err").read_text(encoding="utf-8")
            self.results.append(as_data(Result(self.seeds.start, 0, "", wrong={"": why})))
            return
        assert self.at is not None
        self.seeds = range(self.at[0], self.seeds.stop, self.seeds.step)
        self.start(skip=self.at[1] + 1)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@dataclass(slots=True)
class Record:
    """All results so far, those of earlier runs with the same file included. seed: the next one."""

    counts: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    unjudged: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    devices: int = 0
    seed: int = 0

    @staticmethod
    def of(path: Path | None) -> Record:
        """What a file holds; nothing where there is none."""
        if path is None or not path.is_file():
            return Record()
        known = json.loads(path.read_text(encoding="utf-8"))
        return Record(
            counts=Counter({name: known.get(name, 0) for name in COUNTS}),
            features=Counter(known["features"]),
            failures=known["failures"],
            unjudged=known.get("unjudged", []),
            seconds=known["seconds"],
            devices=known["devices"],
            seed=known["next seed"],
        )

    def add(self, result: dict[str, Any]) -> None:
        self.counts.update(result["counts"])
        self.features.update(result["features"])
        self.seed = max(self.seed, result["chunk"] + 1)
        if result["wrong"] or result["refused"]:
            self.failures.append(result)
        elif result.get("lacked"):
            self.unjudged.append(result)

    def write(self, path: Path) -> None:
        known = {
            **{name: self.counts[name] for name in COUNTS},
            "seconds": round(self.seconds, 1),
            "devices": self.devices,
            "next seed": self.seed,
            "features": dict(self.features.most_common()),
            "failures": self.failures,
            "unjudged": self.unjudged,
        }
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")

    def summary(self) -> Iterator[str]:
        yield f"in {self.seconds:.0f} s: " + ", ".join(f"{self.counts[name]} {name}" for name in COUNTS)
        yield "drawn: " + ", ".join(f"{name} {times}" for name, times in self.features.most_common())
        for failure in self.failures[-5:]:
            why = failure["wrong"] or failure["refused"]
            yield f"\nseed {failure['chunk']}, spec {failure['number']}: {why}"
            yield failure["text"] + failure["case"]

    @property
    def is_right(self) -> bool:
        return self.counts["specs"] > 0 and not self.failures


def run(record: Record, seconds: float, workers: int, last: int, out: Path | None, mode: Mode) -> None:
    """Draws specs until the time or the seeds are over; writes what is known every ten seconds."""
    import torch

    devices = torch.cuda.device_count()
    record.devices = max(record.devices, devices)
    before, first = record.seconds, record.seed
    started = said = time.monotonic()
    with TemporaryDirectory() as folder:
        crew = [
            Worker(n, range(first + n, last, workers), devices, Path(folder), mode) for n in range(workers)
        ]
        try:
            while not all(member.done for member in crew) and time.monotonic() - started < seconds:
                time.sleep(0.5)
                for member in crew:
                    for result in member.collect():
                        record.add(result)
                record.seconds = before + time.monotonic() - started
                if out is not None and time.monotonic() - said > 10:
                    said = time.monotonic()
                    record.write(out)
                    print(next(record.summary()), flush=True)
        finally:
            for member in crew:
                member.stop()
            if out is not None:
                record.write(out)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="the first, in place of the one after those in the file")
    parser.add_argument("--last", type=int, default=1 << 31, help="the seed before which to end")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", action="store_true", help="run what was wrong once more")
    parser.add_argument("--compile", nargs="?", const="front", choices=("front", "whole"), help="and not run")
    parser.add_argument("--foreign", action="store_true", help="draw what other people's code adds to scores")
    parser.add_argument("--everywhere", action="store_true", help="draw what every target has kernels for")
    parser.add_argument("--one", action="store_true", help="run each spec on one target")
    parser.add_argument("--targets", nargs="+", default=Mode().targets, choices=Mode().targets)
    parser.add_argument("--seeds", type=int, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--these", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    from tests.gpu.random_reruns import again, rerun_here

    mode = Mode(
        compiling=given.compile,
        is_foreign=given.foreign,
        everywhere=given.everywhere,
        one=given.one,
        targets=tuple(given.targets),
    )
    if given.seeds is not None:
        first, step, last = given.seeds
        worker(first, step, last, given.skip, mode)
        return 0
    if given.these:
        rerun_here(mode)
        return 0
    record = Record.of(given.out)
    if given.again:
        again(record, given.workers, given.out, mode)
    else:
        record.seed = record.seed if given.seed is None else given.seed
        run(record, given.seconds, given.workers, given.last, given.out, mode)
    if given.out is not None:
        record.write(given.out)
    print("\n".join(record.summary()))
    return 0 if record.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
