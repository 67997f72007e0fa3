"""The same spec gives the same bytes, wherever and however the command is run."""

from pathlib import Path

import pytest

from tests.cli.conftest import Run

ENVIRONMENTS = [
    {
        "PYTHONHASHSEED": "1",
        "LC_ALL": "tr_TR.UTF-8",
        "TZ": "Asia/Kathmandu",
        "COLUMNS": "37",
        "NO_COLOR": "1",
    },
    {"PYTHONHASHSEED": "4242", "LC_ALL": "C", "PYTHONUTF8": "0"},
    {"PYTHONHASHSEED": "2"},
]


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.glob("**/*.py"))}


@pytest.mark.slow
@pytest.mark.one_in(3)  # a process each; the first one differs in most
@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=" ".join)
def test_bytes_do_not_depend_on_the_environment(
    environment: dict[str, str], spawn: Run, folder: Path
) -> None:
    spec = folder / "specs" / "tiny.attn"
    spec.write_text(spec.read_text().replace("attention", "# naïve → ok\nattention", 1), encoding="utf-8")
    done = spawn("compile", environment={"PYTHONHASHSEED": "0"})
    assert done.code == 0, done.err
    expected = tree(folder / "generated")
    assert len([path for path in expected if not path.startswith("_support/")]) == 6
    done = spawn("compile", "--check", environment=environment)
    assert (done.code, done.out) == (0, "")


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_current_folder(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("compile")
    expected = tree(folder / "generated")
    monkeypatch.chdir(folder / "specs")
    done = run("compile", "--check", "tiny.attn", "--out", "../generated")
    assert (done.code, done.out) == (0, "")
    spec, out = str(folder / "specs" / "tiny.attn"), str(folder / "generated")
    monkeypatch.chdir("/")
    assert run("compile", "--check", spec, "--out", out).code == 0
    assert tree(folder / "generated") == expected


@pytest.mark.slow
def test_a_c_locale_turns_no_message_into_an_error(spawn: Run, folder: Path) -> None:
    spec = folder / "specs" / "tiny.attn"
    spec.write_text(spec.read_text().replace("mask = window", "mask = wíndow"), encoding="utf-8")
    done = spawn("check", environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert done.code == 1
    assert "error[E0101]" in done.err
    assert "Traceback" not in done.err
