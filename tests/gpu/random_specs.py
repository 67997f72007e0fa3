"""Whole random specs on GPUs, thousands of them: text to kernels of both targets to judged results.

    python -m tests.gpu.random_specs --count 5000 --workers 64 --out random_specs.json

Each spec is compiled for Triton and for CUDA, its forward and its gradients are judged by their bounds on a
drawn case, and the two targets are compared. A worker is a process of its own (workers take turns with the
GPUs), so that compilers run side by side; one that a kernel has killed is started again behind the spec that
did it. Ends after --seconds at the latest, and says how many specs that were, how often each feature of the
language was drawn, and which were wrong. Without a GPU kernels are interpreted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnc.verify.case import Case
    from attnc.verify.subject import Subject

#: Specs that one seed draws. The first that Hypothesis draws is always the simplest, and is not counted.
CHUNK = 24
#: Sizes of cases: those of a small one, on a GPU too, since the reference is computed on the host.
LONGEST, WORK = 200, 64
#: Words and signs of the language whose use is counted, besides the types of inputs.
WORDS = re.compile(
    r"\b(?:bf16|f16|f32|i32|i64|bool|ragged|paged|prefix|grad|dropout|sink|length|lse|mask|sorted|persistent"
    r"|longest_first|two_pass|lazy|every_step|unified_max|sequential|atomic|fixed|pack|warp_split|where|min|max"
    r"|abs|exp|exp2|log|log2|sqrt|tanh|sigmoid|erf|clamp|floor|q_pos|and|or|not|causal|window|first)\b"
    r"|//|%|==|!=|<=|>=|loops = \[[a-z, ]+\]|split\.kv"
)


@dataclass(slots=True)
class Result:
    """One drawn spec. wrong: what is, by target; refused: the compiler's message for a spec that it does not
    take.
    """

    chunk: int
    number: int
    text: str
    case: str = ""
    wrong: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    features: tuple[str, ...] = ()
    gradients: bool = False


def features_of(text: str, case: Any) -> tuple[str, ...]:
    """What a spec and its case use, each once."""
    found = {re.sub(r"\s+", " ", word) for word in WORDS.findall(text)}
    found |= {f"lengths {case.lengths}", f"extras {case.extras}", f"call {case.call}"}
    return tuple(sorted(found | {f"layout of {name}" for name in case.layouts}))


def judged(chunk: int, number: int, text: str, data: Any) -> Result:
    """The spec compiled for both targets, run on a drawn case, and compared."""
    from attnc.diagnostics import DiagnosticError
    from attnc.verify.strategies import cases
    from attnc.verify.subjects import subject_of
    from tests.verify.judging import modules_of

    result = Result(chunk=chunk, number=number, text=text)
    try:
        modules = modules_of(text)
    except DiagnosticError as error:
        result.refused = str(error)
        return result
    made = {module.target: subject_of(module) for module in modules}
    widest = made.get("cuda.sm_80", made["triton"])
    limits = replace(widest.limits(), longest=LONGEST, work=WORK)
    case = data.draw(cases(widest.variant, limits))
    if any(max(layout.gaps, default=0) > 100 for layout in case.layouts.values()):
        case = replace(case, layouts={})  # rows gigabytes apart have tests of their own
    result.case, result.features = case.to_json(), features_of(text, case)
    result.gradients = widest.gradients is not None
    result.wrong = wrong_on(made, case)
    return result


def wrong_on(made: Mapping[str, Subject], case: Case) -> dict[str, str]:
    """What is wrong with the modules of a spec, by target, on this case, each alone and compared."""
    from attnc.verify.agreement import across
    from attnc.verify.check import check, keeps

    wrong = {}
    for target, subject in made.items():
        own = replace(case, config=case.config % len(subject.configs))
        verdict = check(subject, own)
        if verdict.ok and target == "triton" and len(made) > 1:
            verdict = keeps(subject, own, across({"cuda.sm_80": made["cuda.sm_80"]}), verdict)
        if not verdict.ok:
            wrong[target] = verdict.message
    return wrong


def draw(chunk: int, skip: int) -> Iterator[Result]:
    """The results of a seed's specs, but for the first `skip`."""
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st

    from tests.verify.random_specs import specs

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
    @given(specs(on_cuda=True), st.data())
    def run(text: str, data: st.DataObject) -> None:
        nonlocal count
        count += 1
        if count == 1 or count - 2 < skip:
            return
        announce({"begin": [chunk, count - 2], "text": text})
        try:
            made = judged(chunk, count - 2, text, data)
        except Exception:
            made = Result(chunk=chunk, number=count - 2, text=text, wrong={"": traceback.format_exc()})
        results.append(made)
        announce({"result": as_data(made)})
        if any("CUDA" in message or "illegal" in message for message in made.wrong.values()):
            raise SystemExit(3)  # nothing works in this process any more

    run()
    yield from results


def as_data(result: Result) -> dict[str, Any]:
    """A result for JSON; the text of a right one says nothing that its seed does not."""
    names = ("chunk", "number", "text", "case", "wrong", "refused", "features", "gradients")
    return {name: getattr(result, name) for name in names if result.wrong or result.refused or name != "text"}


def announce(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def worker(chunks: list[int], skip: int) -> None:
    """Runs chunks one after the other, the first from a certain spec on."""
    for chunk in chunks:
        for _ in draw(chunk, skip):
            pass
        skip = 0
    announce({"end": True})


class Worker:
    """A process that runs chunks, and is started again behind a spec that has killed it."""

    def __init__(self, number: int, chunks: list[int], devices: int, folder: Path) -> None:
        self.number, self.chunks, self.devices = number, chunks, devices
        self.path, self.done = folder / f"{number}.jsonl", False
        self.results: list[dict[str, Any]] = []
        self.begun: dict[str, Any] | None = None
        self.read = 0
        self.start(skip=0)

    def start(self, skip: int) -> None:
        command = [sys.executable, "-m", "tests.gpu.random_specs", "--chunks", json.dumps(self.chunks)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        device = {"CUDA_VISIBLE_DEVICES": str(self.number % self.devices)} if self.devices else {}
        with self.path.open("ab") as out, self.path.with_suffix(".err").open("ab") as errors:
            self.process = subprocess.Popen(
                [*command, "--skip", str(skip)],
                stdout=out,
                stderr=errors,
                env={**os.environ, **threads, **device},
            )

    def collect(self) -> None:
        """Reads what the process has said, and starts it again if it has died of a spec."""
        ended = self.process.poll() is not None
        with self.path.open("rb") as said:
            said.seek(self.read)
            text = said.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.splitlines():
            message = json.loads(line)
            self.done |= "end" in message
            if "begin" in message:
                self.begun = message
            elif "result" in message:
                self.begun = None
                self.results.append(message["result"])
                self.at = (message["result"]["chunk"], message["result"]["number"])
        if not ended or self.done:
            return
        if self.begun is not None:
            self.at = tuple(self.begun["begin"])
            died = Result(*self.at, text=self.begun["text"], wrong={"": f"died: {self.process.returncode}"})
            self.results.append(as_data(died))
            self.begun = None
        elif not self.results:
            self.done = True  # it cannot even start
            self.results.append(
                as_data(Result(0, 0, "", wrong={"": self.path.with_suffix(".err").read_text()}))
            )
            return
        chunk, number = self.at
        self.chunks = self.chunks[self.chunks.index(chunk) :]
        self.start(skip=number + 1)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def run(count: int, workers: int, first_seed: int, seconds: float, out: Path | None) -> int:
    """All of it; the exit status says whether anything was wrong."""
    import torch

    devices = torch.cuda.device_count()
    total = -(-count // CHUNK)
    seeds = range(first_seed, first_seed + total)
    started = said = time.monotonic()
    with TemporaryDirectory() as folder:
        crew = [Worker(n, list(seeds[n::workers]), devices, Path(folder)) for n in range(min(workers, total))]
        try:
            while not all(member.done for member in crew) and time.monotonic() - started < seconds:
                time.sleep(0.5)
                for member in crew:
                    member.collect()
                if time.monotonic() - said > 15:
                    said = time.monotonic()
                    results = [result for member in crew for result in member.results]
                    wrong = sum(bool(result["wrong"]) for result in results)
                    print(
                        f"{said - started:5.0f} s: {len(results)} of {count} specs, {wrong} wrong", flush=True
                    )
        finally:
            for member in crew:
                member.stop()
        results = [result for member in crew for result in member.results]
    return report(results, time.monotonic() - started, devices, out)


def report(results: list[dict[str, Any]], seconds: float, devices: int, out: Path | None) -> int:
    """Prints the summary, and writes it with all that was wrong."""
    wrong = [result for result in results if result["wrong"]]
    refused = [result for result in results if result["refused"]]
    ran = len(results) - len(refused)
    features = Counter(name for result in results for name in result["features"])
    summary = {
        "specs": ran,
        "with gradients": sum(result["gradients"] for result in results),
        "wrong": len(wrong),
        "refused": len(refused),
        "seconds": round(seconds, 1),
        "devices": devices,
        "features": dict(features.most_common()),
    }
    print(f"{ran} specs on both targets, {summary['with gradients']} with gradients, in {seconds:.0f} s")
    print(f"{len(wrong)} wrong, {len(refused)} refused by the compiler")
    print("drawn: " + ", ".join(f"{name} {times}" for name, times in features.most_common()))
    for result in [*wrong, *refused][:5]:
        print(f"\nseed {result['chunk']}, spec {result['number']}: {result['wrong'] or result['refused']}")
        print(result["text"] + result["case"])
    if out is not None:
        out.write_text(
            json.dumps({**summary, "failures": [*wrong, *refused]}, indent=1) + "\n", encoding="utf-8"
        )
    return 1 if wrong or not ran else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--chunks", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.chunks is not None:
        worker(json.loads(given.chunks), given.skip)
        return 0
    return run(given.count, given.workers, given.seed, given.seconds, given.out)


if __name__ == "__main__":
    sys.exit(main())
