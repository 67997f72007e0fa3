"""What becomes of a mutant: `attnc verify` with its default budget, in a process of its own kind.

Processes outlive the mutants that they judge, since imports take seconds. One that a mutant kills, or keeps
waiting, is started again; so is one whose GPU has seen a fault, after which no call of CUDA works.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal, TypeAlias, cast

from tools.mutants.operators import Mutant
from tools.mutants.sample import Draw, Place, texts_of

#: `killed`: a case was wrong; `fault`: a launch failed, or the simulator found a race or a wait for ever;
#: `died`, `hung`: the process; `invalid`: no compiler takes it; `survived`: all cases were right.
Outcome: TypeAlias = Literal["killed", "fault", "died", "hung", "invalid", "survived"]
#: The default budget of `attnc verify`: cases, and seconds.
COUNT, SECONDS = 24, 60.0
#: Seconds after which a process is taken for one that waits for ever: the budget, and what compilers take.
PATIENCE = 150.0
#: Exceptions for a text that a compiler refuses.
_OF_COMPILERS = {"CompilationError", "CompileException", "PTXASError", "SyntaxError", "IndentationError"}
#: What a verdict says where Triton's interpreter, which is no compiler, finds a name without a value, or
#: shapes that do not fit: the compiler would have refused the text.
_OF_INTERPRETER = re.compile(
    r"InterpreterError.*(NameError|UnboundLocalError|TypeError|broadcast|cannot convert|shape)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a mutant. cases: how many were run; message: of the first that was wrong."""

    outcome: Outcome
    cases: int = 0
    message: str = ""


def judge(draw: Draw) -> Verdict:
    """Runs the cases of `attnc verify` on a mutant, up to the first that is wrong."""
    from attnc.verify.properties import violations
    from attnc.verify.search import AttentionTrial, run
    from attnc.verify.subject import subject_of

    cases = 0

    class Wrong(Exception):
        """Ends a run at the first case that is wrong."""

    def stop_if_wrong(number: int, case: object, verdict: Any) -> None:
        nonlocal cases
        cases = number
        if not verdict.ok:
            raise Wrong(verdict.message)

    text = draw.mutant.apply(texts_of(draw.place)[draw.mutant.file])
    try:
        subject = subject_of(draw.place.module, {draw.mutant.file: text})
        run(AttentionTrial(subject, violations), count=COUNT, seconds=SECONDS, progress=stop_if_wrong)
    except Wrong as wrong:
        is_refused = _OF_INTERPRETER.search(str(wrong)) is not None
        return Verdict(outcome="invalid" if is_refused else "killed", cases=cases, message=str(wrong))
    except Exception as error:  # whatever a wrong kernel can do
        outcome: Outcome = "invalid" if _is_of_compiler(error) else "fault"
        return Verdict(outcome=outcome, cases=cases, message=f"{type(error).__name__}: {error}"[:400])
    return Verdict(outcome="survived", cases=cases)


def _is_of_compiler(error: BaseException) -> bool:
    """Returns whether a compiler refused the text, and no launch was made."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return bool({type(link).__name__ for link in chain} & _OF_COMPILERS)


class Judge:
    """A process that judges one mutant after the other. number: which GPU is its own, of so many."""

    def __init__(self, number: int, devices: int) -> None:
        self._environment = {
            **os.environ,
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            **({"CUDA_VISIBLE_DEVICES": str(number % devices)} if devices else {}),
        }
        self._process: subprocess.Popen[str] | None = None

    def judge(self, draw: Draw) -> Verdict:
        """Returns what became of a mutant."""
        process = self._running()
        stdin, stdout = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
        try:
            stdin.write(json.dumps(asdict(draw)) + "\n")
            stdin.flush()
        except BrokenPipeError:
            self.stop()
            return Verdict(outcome="died", message="the process was gone")
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            line = stdout.readline() if selector.select(PATIENCE) else None
        if line:
            found = Verdict(**json.loads(line))
            if found.outcome == "fault":
                self.stop()  # what a fault leaves behind is not the next mutant's
            return found
        self.stop()
        if line is None:
            return Verdict(outcome="hung", message=f"no answer after {PATIENCE:g} seconds")
        return Verdict(outcome="died", message=f"exit status {process.returncode}")

    def stop(self) -> None:
        """Ends the process; the next mutant starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.mutants.judge"],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self._process


def draw_of(data: Mapping[str, Any]) -> Draw:
    """Returns the draw of its JSON."""
    return Draw(place=Place(**data["place"]), phase=data["phase"], mutant=Mutant(**data["mutant"]))


def main() -> None:
    """Answers each line, a mutant, by a line, its verdict."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer
    for line in sys.stdin:
        print(json.dumps(asdict(judge(draw_of(json.loads(line))))), file=answers, flush=True)


if __name__ == "__main__":
    main()
