"""What becomes of a mutant: `attnc verify` with its default budget, up to the first case that is wrong.

Cases that compile the same configs follow each other, and machine code that is the original's is not run. A
`Bench` keeps what all mutants of a module have in common.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from attnc.plan import ir
from attnc.runtime.cubin import list_differences
from attnc.runtime.loader import program_of
from attnc.runtime.nvrtc import CompilationError, compile_cubin, compile_ptx
from attnc.support.binaries import list_defines
from attnc.support.devices import gpu_of
from attnc.verify.case import Case
from attnc.verify.check import report_broken
from attnc.verify.covering import FORGIVING
from attnc.verify.cuda_waits import wait_violations
from attnc.verify.early_launches import early_violations
from attnc.verify.offsets import offset_violations
from attnc.verify.properties import result_violations
from attnc.verify.search import AttentionTrial, Step, list_steps, run
from attnc.verify.simulated import simulate_beside
from attnc.verify.strategies import Limits
from attnc.verify.subject import Subject, subject_of
from attnc.verify.verdict import Verdict
from tests.processes import cpu_seconds
from tools.mutants.operators import Mutant
from tools.mutants.remember import keep
from tools.mutants.sample import Phase, Place, texts_of
from tools.mutants.turns import turn_for

#: `killed`: a case was wrong; `fault`: a launch failed, or the simulator found a race or a wait for ever;
#: `died`, `hung`: the process; `invalid`: no compiler takes it; `same code`: compilers make the original's
#: machine code of it; `survived`: all cases were right.
Outcome: TypeAlias = Literal["killed", "fault", "died", "hung", "invalid", "same code", "survived"]
#: The default budget of `attnc verify`: cases, and seconds.
COUNT, SECONDS = 24, 60.0
#: What a message says where a compiler refused the text.
_OF_COMPILERS = re.compile(
    r"^(?:backward: )?(?:\w+: )?(?:CompilationError|CompileException|CompileTimeAssertionFailure|PTXASError"
    r"|UnsupportedLanguageConstruct|RuntimeError: (?:\S+\.cu |PassManager::run failed|Triton Error)"
    r"|SyntaxError|IndentationError|ValueError: g\+\+ refused)"
)
#: The same of Triton's interpreter, which is no compiler: a name without a value, or shapes that do not fit.
_OF_INTERPRETER = re.compile(
    r"InterpreterError.*(NameError|UnboundLocalError|TypeError|broadcast|cannot convert|shape)"
)
_REFUSED = "g++ refused"
#: A launch that failed, in the words of CUDA, and of the simulators.
_FAULT = re.compile(r"CUDA error|CUDARuntimeError|CUDADriverError|AcceleratorError|CUDA_ERROR|SimulatorError")
_NO_MEMORY = re.compile("OutOfMemory|out of memory")
#: How often a case is tried for which the GPU, which others use too, has no memory; seconds between.
_TRIES, _PAUSE = 20, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgment:
    """What became of a mutant. cases: how many were run; message: of the first that was wrong, or what else
    there is to say.
    """

    outcome: str
    cases: int = 0
    message: str = ""


class Bench:
    """A module whose mutants are judged: the original, and the cases of the default budget. folder: keeps
    what later processes need not find out again.
    """

    def __init__(self, place: Place, phase: Phase, folder: Path) -> None:
        self.place, self.phase, self.folder = place, phase, folder
        #: The mutant that was run on all cases last.
        self.examined: Subject | None = None
        #: How many mutants each case has killed, by its number.
        self.killed = Counter[int]()

    @cached_property
    def module(self) -> ir.Module:
        return self.place.module

    @cached_property
    def original(self) -> Subject:
        return subject_of(self.module)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The cases: those that the same machine code runs follow each other, those first that show most, and
        last those that take gigabytes.
        """
        return keep(self.folder / f"steps-{self.phase}", self._order_steps)

    def _order_steps(self) -> tuple[Step, ...]:
        """Orders the cases: those of a config together, the configs and their cases by what they may show."""
        steps = list(list_steps(AttentionTrial(self.original, result_violations), COUNT))
        limits = self.original.limits()
        shows = {id(step): _rate(step.case, limits) for step in steps}
        best: dict[object, tuple[int, ...]] = {}
        for step in steps:
            configs = self.configs_of(step)
            best[configs] = max(best.get(configs, ()), shows[id(step)])
        order = {configs: number for number, configs in enumerate(sorted(best, key=best.__getitem__))}

        def rank(step: Step) -> tuple[object, ...]:
            configs, shown = order[self.configs_of(step)], shows[id(step)]
            return step.case.is_far, -configs, _is_unaligned(step.case), *(-fact for fact in shown)

        return tuple(sorted(steps, key=rank))

    def subject(self, mutant: Mutant) -> Subject:
        """Loads a mutant. Raises what the text raises."""
        return subject_of(self.module, self.texts(mutant))

    def texts(self, mutant: Mutant) -> dict[str, str]:
        """Returns the text of the file that a mutant changes, by its name."""
        return {mutant.file: mutant.apply(texts_of(self.place)[mutant.file])}

    def judge(self, mutant: Mutant, seconds: float = SECONDS) -> Judgment:
        """Runs the cases on a mutant. seconds: of processors, after which no more are begun where kernels run
        on the CPU: on a busy machine as many as on an idle one. ValueError where the module is no longer what
        the mutant was drawn from.
        """
        began, texts = cpu_seconds(os.getpid()), self.texts(mutant)
        try:
            subject = subject_of(self.module, texts)
            found = (offset_violations, wait_violations, early_violations)  # which take no run
            rules = chain.from_iterable(rule(subject) for rule in found)
            if (message := next(rules, None)) is not None:
                return Judgment(outcome="killed", message=message[:300])
            if subject.device == "cpu" and self.is_same_code(subject, mutant.file):
                return Judgment(outcome="same code")
        except Exception as error:
            return judge_message(f"{type(error).__name__}: {error}", 0)
        trial = AttentionTrial(subject, result_violations)  # what host code passes on has not changed
        order = self._by_what_they_killed()
        for count, number in enumerate(order, start=1):
            verdict = take(trial, self.steps[number])
            if _NO_MEMORY.search(verdict.message):
                return Judgment(outcome="unknown", cases=count, message=verdict.message[:300])
            if not verdict.ok:
                self.killed[number] += 1
                return judge_message(verdict.message, count)
            if subject.device == "cpu" and cpu_seconds(os.getpid()) - began > seconds:
                break
            if count == 1 and subject.device == "cuda" and self.is_same_to_compilers(subject, mutant.file):
                return Judgment(outcome="same code")
        return self.simulate(subject, mutant, count)

    def _by_what_they_killed(self) -> list[int]:
        """Returns the numbers of the cases: those first that have killed most mutants so far. What takes
        gigabytes comes last all the same.
        """
        return sorted(
            range(len(self.steps)),
            key=lambda number: (self.steps[number].case.is_far, -self.killed[number], number),
        )

    def is_same_to_compilers(self, subject: Subject, file: str) -> bool:
        """Returns whether a file has the original's machine code, after its first case: what that has
        launched is compared first. What compilers refuse of other configs, other cases will meet.
        """
        try:
            is_launched = bool(self._launched(subject, file))
            if is_launched and not self.is_same_where_launched(subject, file):
                return False
            return self.is_same_code(subject, file)
        except Exception:
            return False

    def simulate(self, subject: Subject, mutant: Mutant, cases: int) -> Judgment:
        """Runs the cases that are simulated beside those on a GPU, of which a mutant has survived so many."""
        beside = simulate_beside(subject, self.module, self.texts(mutant))
        if beside is None:
            return Judgment(outcome="survived", cases=cases)
        report = run(beside)
        cases += report.examples
        message = "" if report.ok else report.failures[0].verdict.message
        if not message or _REFUSED in message:  # g++ knows less than NVRTC, which has taken it
            return Judgment(outcome="survived", cases=cases, message=message[:300])
        return judge_message(message, cases)

    def is_same_code(self, subject: Subject, file: str) -> bool:
        """Returns whether a file's CUDA kernels have the original's machine code, at every config. Raises as
        the compiler does.
        """
        if subject.target == "triton":
            return False
        kernels = program_of(subject.module).kernels.items()
        return self._agree(
            subject,
            (
                (name, config, aligned)
                for aligned in (True, False)
                for name, kernel in kernels
                for config in (self._in_order(kernel.configs) if kernel.file == file else ())
            ),
        )

    def is_same_where_launched(self, subject: Subject, file: str) -> bool:
        """Returns whether a file's CUDA kernels have the original's machine code, of those that this process
        has launched: of tensors that lie anywhere, some kernels get copies.
        """
        launched = self._launched(subject, file)
        return bool(launched) and self._agree(subject, launched)

    def _launched(self, subject: Subject, file: str) -> list[tuple[str, Any, bool]]:
        """Lists the names, configs and alignments of a file's CUDA kernels that this process has launched."""
        if subject.target == "triton":
            return []
        program = program_of(subject.module)
        return [code[:3] for code in program._functions if program.kernels[code[0]].file == file]

    def _agree(self, subject: Subject, codes: Iterable[tuple[str, Any, bool]]) -> bool:
        """Returns whether kernels of one file have the original's machine code, compiled for configs and
        alignments. Where the first has, others mostly have too: equal PTX, which takes half the time, is
        enough for them. One compilation of a file is of all its kernels.
        """
        mine, own = program_of(subject.module), program_of(self.original.module)
        seen = set[tuple[str, ...]]()
        for code in codes:
            options = mine.options(*code[1:], _arch_of(subject))
            if options in seen:
                continue
            seen.add(options)
            if len(seen) > 1 and self._has_same_ptx(subject, code):
                continue
            one, other = (_compile(program, code, subject) for program in (own, mine))
            if one != other and list_differences(one, other):
                return False
        return True

    def _has_same_ptx(self, subject: Subject, code: tuple[str, Any, bool]) -> bool:
        name, config, aligned = code
        options = program_of(subject.module).options(config, aligned, _arch_of(subject))
        file = program_of(subject.module).kernels[name].file
        key = hashlib.sha256("\0".join((file, *options)).encode()).hexdigest()
        mine, own = (program_of(one.module).source(name) for one in (subject, self.original))
        try:
            known = keep(self.folder / f"{key}.ptx", lambda: compile_ptx(own, options))
            return compile_ptx(mine, options) == known
        except (CompilationError, FileNotFoundError):  # machine code will say
            return False

    def _in_order(self, configs: Sequence[Any]) -> list[Any]:
        """Returns configs of different machine code, those first that the first cases have."""
        used = dict.fromkeys(_macros_of(config) for step in self.steps for config in self.configs_of(step))
        order = {macros: number for number, macros in enumerate(used)}
        known = {_macros_of(config): config for config in reversed(configs)}
        return [known[macros] for macros in sorted(known, key=lambda name: order.get(name, len(order)))]

    def configs_of(self, step: Step) -> tuple[Any, ...]:
        """Returns the configs that the kernels of the phase have in a case."""
        case = step.case
        if self.phase != "backward":
            return (self.original.configs[case.config],)
        backward: Mapping[str, Any] = getattr(self.original.module, "BACKWARD_CONFIGS", {})
        return tuple(configs[case.backward_config(len(configs))] for configs in backward.values())


def judge_message(message: str, cases: int) -> Judgment:
    """Returns what a message about a wrong case, or an exception, says of a mutant."""
    if _OF_COMPILERS.search(message) or _OF_INTERPRETER.search(message):
        return Judgment(outcome="invalid", cases=cases, message=message[:200])
    outcome = "fault" if _FAULT.search(message) else "killed"
    return Judgment(outcome=outcome, cases=cases, message=message[:300])


def take(trial: AttentionTrial, step: Step) -> Verdict:
    """Runs a case, again where the GPU has no memory for it, which says nothing of the mutant."""
    for left in reversed(range(_TRIES)):
        try:
            with turn_for(step.case):
                verdict = step.take(trial)
        except torch.OutOfMemoryError as error:
            verdict = report_broken(f"OutOfMemoryError: {error}")
        if not _NO_MEMORY.search(verdict.message) or not left:
            return verdict
        torch.cuda.empty_cache()
        time.sleep(_PAUSE)
    raise AssertionError("there is a last try")


def _rate(case: Case, limits: Limits) -> tuple[int, int, int]:
    """Returns how much a case may show: several tiles and heads, and numbers that hide nothing."""
    block_m, block_n = limits.tiles[case.config]
    tiles = [-(-case.dims.get(name, 1) // block) for name, block in (("M", block_m), ("N", block_n))]
    heads = prod(case.dims.get(name, 1) for name in ("B", "H", "Hkv", "G"))
    plain = case.special == "none" and case.values not in FORGIVING and case.logits not in FORGIVING
    return min(*tiles, 1) * plain, sum(min(count, 3) for count in tiles) + min(heads, 2), plain


def _macros_of(config: Any) -> tuple[tuple[str, int], ...]:
    return tuple(list_defines(config, aligned=True).items())


def _is_unaligned(case: Case) -> bool:
    """Returns whether rows of a tensor start anywhere, for which kernels are compiled once more."""
    return any(layout.offset % 8 or any(gap % 8 for gap in layout.gaps) for layout in case.layouts.values())


def _compile(program: Any, code: tuple[str, Any, bool], subject: Subject) -> bytes:
    """Returns the machine code of a kernel. Raises as the compiler does."""
    name, config, aligned = code
    if subject.device == "cuda":
        path: Path = program.cubin(name, config, aligned, _arch_of(subject))
        return path.read_bytes()
    return compile_cubin(program.source(name), program.options(config, aligned, _arch_of(subject))).image


def _arch_of(subject: Subject) -> str:
    if subject.device == "cuda":
        return gpu_of(0).arch
    return "sm_80" if subject.target == "cuda.sm_80" else "sm_90"
