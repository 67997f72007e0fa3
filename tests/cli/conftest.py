"""A folder with one small spec, and the command run in it.

Some commands run Triton's interpreter, which has to be chosen before a test imports triton.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnc.cli import main
from attnc.verify.interpreter import ensure_interpreter
from tests.processes import searched

ensure_interpreter()

TINY = """\
attention tiny {
  param T in {f16, bf16}, W in {16, 32}
  input q: T[B, H, M, 64]
  input k, v: T[B, H, N, 64]
  score = dot(q, k) / sqrt(64)
  mask = window(W, 0)
  normalize = softmax
  output o: T[B, H, M, 64]
}
schedule tiny for triton {
  loops = [q, kv]
  tile.q = 64, tile.kv in {32, 64}
}
"""

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True)
class Done:
    """What a command left behind: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with specs/tiny.attn; caches are kept in it too."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "tiny.attn").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTNC_DEBUG", raising=False)
    return tmp_path


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process."""

    def command(*arguments: str) -> Done:
        code = main(arguments)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return command


@pytest.fixture
def spawn(folder: Path) -> Run:
    """Runs the command in a process of its own, with more in its environment.

    There Triton compiles, unless the command has it interpret, whatever other tests do in this process.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def command(*arguments: str, cwd: Path = folder, environment: Mapping[str, str] | None = None) -> Done:
        done = subprocess.run(
            (sys.executable, "-m", "attnc", *arguments),
            cwd=cwd,
            env={**inherited, "PYTHONPATH": searched(), **(environment or {})},
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return command
