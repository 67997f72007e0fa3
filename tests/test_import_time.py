"""`import attnc` is cheap: little is loaded with it, so a tool can import it at start-up."""

import subprocess
import sys

HEAVY = ("cupy", "hypothesis", "jinja2", "lark", "numpy", "rich", "torch", "triton", "typer")
#: Of attnc's own; what they load of the standard library comes on top.
MODULES = 8


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return done.stdout


def test_import_loads_a_handful_of_modules() -> None:
    """Counted, not timed: a number that is the same on every machine."""
    before = "import sys; names = set(sys.modules); import attnc"
    loaded = run(f"{before}; print(*(set(sys.modules) - names))").split()
    own = [name for name in loaded if name.partition(".")[0] == "attnc"]
    assert 0 < len(own) <= MODULES
    assert len(loaded) < 100


def test_import_loads_no_heavy_package() -> None:
    program = f"import sys, attnc; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    assert run(program).split() == []
