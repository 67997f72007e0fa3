"""`attnc compile --watch` and `--diff`, and what a terminal is spared."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnc.cli import compile as watch
from attnc.cli.compile import changes, watch_specs
from tests.cli.conftest import TINY, Run


def acting(*steps: Callable[[], object]) -> Callable[[], None]:
    """A `wait` that does one step each time, and is interrupted after the last."""
    left: Iterator[Callable[[], object]] = iter(steps)

    def wait() -> None:
        step = next(left, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    return wait


def test_changes_are_what_was_written_and_removed(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("1")

    def replaced() -> None:
        (tmp_path / "c").write_text("3")  # of the same length, and perhaps in the same tick of the clock
        (tmp_path / "c").replace(a)

    wait = acting(lambda: b.write_text("2"), lambda: None, replaced, a.unlink)
    found = changes(lambda: sorted(tmp_path.iterdir()), wait)
    assert [next(found), next(found), next(found)] == [((b,), ()), ((a,), ()), ((), (a,))]


def test_what_is_saved_is_compiled_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other, tiny = folder / "specs" / "other.attn", folder / "specs" / "tiny.attn"
    steps = acting(
        lambda: other.write_text(TINY.replace("tiny", "other")),
        lambda: (folder / "specs" / "tuned").mkdir(),
        lambda: (folder / "specs" / "tuned" / "tiny.json").write_text("{}"),
        lambda: other.unlink(),
    )
    monkeypatch.setattr(watch, "changes", lambda find: changes(find, steps))
    compiled: list[list[str]] = []
    watch_specs(None, lambda paths: compiled.append([path.name for path in paths]))
    assert compiled == [[tiny.name], [other.name], [tiny.name], [tiny.name]]
    assert capsys.readouterr().err == "watching; Ctrl-C ends it\nstopped\n"


def test_a_mistake_does_not_end_the_watch(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = folder / "specs" / "tiny.attn"
    steps = acting(
        lambda: tiny.write_text(TINY.replace("window(W, 0)", "widow(W, 0)")),
        lambda: tiny.write_text(TINY.replace("window(W, 0)", "causal")),
    )
    monkeypatch.setattr(watch, "changes", lambda find: changes(find, steps))
    done = run("compile", "--watch")
    assert done.code == 0
    assert "did you mean 'window'?" in done.err
    assert done.out.count("changed  generated/tiny/triton/") == 4
    assert "mask = causal" in (folder / "generated/tiny/triton/f16_w16.py").read_text()


def test_diff_shows_kernels_and_writes_nothing(run: Run, folder: Path) -> None:
    run("compile")
    module = folder / "generated" / "tiny" / "triton" / "f16_w16.py"
    before = module.read_text()
    (folder / "specs" / "tiny.attn").write_text(TINY.replace("window(W, 0)", "causal and window(W, 8)"))
    done = run("compile", "--diff")
    assert done.code == 1
    assert "--- a/tiny/triton/f16_w16.py" in done.out
    assert "+    mask = causal and window(W, 8)" in done.out
    assert module.read_text() == before
    assert run("compile").code == 0
    assert (run("compile", "--diff").code, run("compile", "--diff").out) == (0, "")


def test_diff_passes_over_the_digest_of_a_comment(run: Run, folder: Path) -> None:
    run("compile")
    (folder / "specs" / "tiny.attn").write_text(TINY + "# a word\n")
    done = run("compile", "--diff")
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith("4 of them in the record of their spec alone\n")


@pytest.mark.parametrize("modes", [("--watch", "--diff"), ("--check", "--diff"), ("--watch", "--json")])
def test_modes_exclude_each_other(run: Run, modes: tuple[str, str]) -> None:
    done = run("compile", *modes)
    assert done.code == 2
    assert f"{modes[0]} and {modes[1]} do not go together" in done.err


def test_nothing_steers_the_terminal(run: Run, folder: Path) -> None:
    """Neither by the name of a file nor by what stands in it."""
    (folder / "specs" / "a\x1b]0;title\x07\u202e.attn").write_text("attention \x1b[2J {\n")
    for arguments in (("check",), ("compile",), ("fmt", "--diff"), ("check", "missing\x1b[2J.attn")):
        done = run(*arguments)
        assert done.code
        assert not set(done.out + done.err) & set("\x1b\x07\x9b\u202e")


def test_a_shell_completes_commands_and_starting_points(spawn: Run) -> None:
    def completed(words: str) -> list[str]:
        environment = {
            "_ATTNC_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        return spawn(environment=environment).out.split()

    assert completed("attnc comp") == ["compile"]
    assert completed("attnc new x --like wi") == ["window"]
