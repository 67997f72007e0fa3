"""`import attnc` is cheap: no heavy package comes with it, so a tool can import it at start-up."""

import subprocess
import sys
import time

HEAVY = ("cupy", "hypothesis", "jinja2", "lark", "numpy", "rich", "torch", "triton", "typer")
BUDGET_S = 0.100
RUNS = 7


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return done.stdout


def best_of(program: str) -> float:
    """Seconds that the fastest of `RUNS` fresh interpreters took: the minimum, as load only ever adds."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run(program)
        times.append(time.perf_counter() - start)
    return min(times)


def test_import_takes_under_100_ms() -> None:
    bare, imported = best_of("pass"), best_of("import attnc")
    assert imported - bare < BUDGET_S


def test_import_loads_no_heavy_package() -> None:
    program = f"import sys, attnc; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    assert run(program).split() == []
