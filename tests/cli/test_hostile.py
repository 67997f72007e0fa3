"""Hostile files: no traceback, nothing raw on the terminal, no word of a spec in code, and no more work than
is allowed. `python -m tests.hostile.run` does the same with as many as one likes.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from attnc.build import compile_program
from attnc.cli import main
from attnc.diagnostics import DiagnosticError
from attnc.effort import limit_steps, watch_pieces
from attnc.model.resolve import resolve
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from tests.hostile.files import HEAD, ROOT, TAIL, HostileFile, hostile_file
from tests.hostile.run import DIRECTIVE, check_file
from tests.tokens import tokens_of

#: Small ones that compile or nearly do; and one that is planned for less than its text may cost.
SEEDS = (15, 25, 36, 71, pytest.param(16932, marks=pytest.mark.nightly))
SMALL = """\
attention a {
  input q: f16[B, M, H, 64]
  input k, v: f16[B, N, H, 64]
  score = dot(q, k)  # DANGER
  mask = (  # DANGER */
    causal
  )
  normalize = softmax
  output o: f16[B, M, H, 64]
}
schedule a for triton { tile.q = 64 }
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_hostile_files(seed: int, tmp_path: Path) -> None:
    assert check_file(hostile_file(seed), tmp_path).findings == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    [
        'DANGER"""\nimport DANGER\n"""\\.attn',
        "[DANGER]\x1b[2J\u202e\udcff$(DANGER) `DANGER` ' {{ DANGER }}.attn",
        f"{'x' * 250}.attn",
        "--help",
    ],
)
def test_hostile_names(name: str, tmp_path: Path) -> None:
    outcome = check_file(HostileFile("named", name, SMALL.encode()), tmp_path)
    assert outcome.findings == []
    assert outcome.codes == {"check": 0, "fmt --diff": 1, "explain": 0, "compile": 0, "fmt": 0}


def test_cases_that_nobody_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec.attn").write_text(SMALL)
    for case in (
        "[" * 100_000,
        '{"dims": {"\x1b[2J": 1e999}}',
        '{"dims": {}, "\u202e\n": 1}',
        "\0",
        "{}",
        "9" * 5000,
    ):
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            assert main(["verify", "spec.attn", "--target", "triton", "--case", case]) == 2
        assert all(char.isprintable() or char == "\n" for char in err.getvalue())


# --- work ---------------------------------------------------------------------------------------------------


def masked(mask: str, before: str = "", score: str = "dot(q, k)", grad: str = "") -> str:
    inputs = "  input z: i32[B, N] is sorted\n  input u: f32[N]\n"
    return (
        f"{before}attention a {{\n{HEAD}{inputs}  score = {score}\n  mask = {mask}\n{grad}{TAIL}}}\n"
        "schedule a for triton { tile.q = 64 }\nschedule a for cuda.sm_80 { tile.q = 64 }\n"
    )


def balanced(depth: int, form: str, leaf: str) -> str:
    return leaf if depth == 0 else form.replace("@", balanced(depth - 1, form, leaf))


NESTED = "".join(f"def e{n}(x) = e{n - 1}(x + {n}) and not e{n - 1}(x)\n" for n in range(1, 9))
SUMS = (f"({' + '.join(f'z[b, kv_idx - {n * m}]' for n in range(20))})" for m in range(10))
DEEP_SCORE = f"dot(q, k) + {balanced(6, 'max(@, tanh(@) * u[kv_idx])', 'dot(q, k)')}"
EXPENSIVE = {
    "unequal": masked(" and ".join(f"kv_idx != q_pos - {n}" for n in range(100))),
    "ranges": masked(" or ".join(f"{n} <= kv_idx < q_pos - {n}" for n in range(100))),
    "minima": masked(f"{balanced(7, 'min(@, max(q_idx, @))', 'kv_idx')} < q_pos"),
    "choices": masked(f"{balanced(5, 'where(@ < 3, @, h)', 'kv_idx')} < q_pos"),
    "quotients": masked(f"{balanced(7, '(@ // 3 + @ % 5)', 'kv_idx')} < q_pos"),
    "sorted": masked(" or ".join(f"z[b, kv_idx] == z[b, q_pos - {n}]" for n in range(60))),
    "terms": masked(f"{' + '.join(SUMS)} > q_pos"),
    "score": masked("causal", score=DEEP_SCORE, grad="  grad q, k, v, u\n"),
    "defs": masked("e8(kv_idx)", f"def e0(x) = x < q_pos\n{NESTED}"),
    "attentions": "".join(masked("causal").replace(" a ", f" a{n} ") for n in range(20)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", EXPENSIVE)
def test_no_work_is_done_uncounted(name: str) -> None:
    """Calls of Python functions for each step: whatever a step is, time is in proportion to steps."""
    calls = 0
    announced: list[int] = []

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    steps = 10_000
    file, shipped = parse(Source("spec.attn", EXPENSIVE[name])), prelude()
    sys.setprofile(count)
    try:
        with (
            pytest.raises(DiagnosticError) as refused,
            limit_steps(steps),
            watch_pieces(lambda pieces, _: announced.append(pieces)),
        ):
            compile_program(resolve(file, shipped), "spec.attn")
    finally:
        sys.setprofile(None)
    assert {diagnostic.code for diagnostic in refused.value.diagnostics} == {"E0510"}
    assert calls < 25 * steps * (1 + sum(announced) / 10)


def test_directives_of_committed_kernels_are_known() -> None:
    """Or the search would take them for text of a spec."""
    lines = {
        line
        for path in (ROOT / "generated").glob("**/*.cu")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    }
    assert lines
    directives = tokens_of("all.cu", "\n".join(sorted(lines)))
    assert [one for one in directives if one.startswith("# ") and not DIRECTIVE.fullmatch(one)] == []
