"""Writing to output folders: what is not attnc's, or was edited, is named and stays."""

import json
import sys
from io import StringIO
from pathlib import Path

import pytest

from tests.cli.conftest import TINY, Run


def test_a_folder_of_others_is_not_written_to(run: Run, folder: Path) -> None:
    """Whose files may well speak of `attnc compile`."""
    before = {"src/train.py": '"""Run `attnc compile` first."""\n', "src/mine.cu": "// see attnc compile\n"}
    for name, text in before.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    done = run("compile", "--out", ".")
    assert done.code == 2
    assert done.err == (
        "'.' holds files, and none that attnc has written: specs, src\n"
        "error: '.' is not attnc's, and nothing was written to it\n"
        "   = help: name a folder of its own, or write beside what is there with --force\n"
    )
    assert {path.name for path in folder.iterdir()} == {"specs", "src"}
    assert run("compile", "--out", ".", "--force").code == 0
    (folder / "specs" / "tiny.attn").write_text(TINY.replace("tiny", "other"))
    assert run("compile", "--out", ".").code == 0
    assert {name: (folder / name).read_text() for name in before} == before
    assert (folder / "other" / "triton" / "f16_w16.py").exists()
    assert not (folder / "tiny").exists()


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 2), ("", 2)])
def test_a_folder_of_others_is_asked_for_on_a_terminal(
    answer: str, code: int, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "mine").write_text("mine")
    terminal = StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = run("compile", "--out", "out")
    assert done.code == code
    assert "Write to it, beside what is there? [y/N] " in done.err
    assert (folder / "out" / "tiny").exists() == (code == 0)
    assert (folder / "out" / "mine").read_text() == "mine"


@pytest.mark.parametrize("command", [["compile"], ["demo", "specs/tiny.attn"]])
def test_a_file_that_was_edited_is_named_and_stays(command: list[str], run: Run, folder: Path) -> None:
    run("compile")
    edited, stale = (folder / "generated" / "tiny" / "triton" / f"f16_{w}.py" for w in ("w16", "w32"))
    edited.write_text("# mine\n")
    before = stale.read_text()
    (folder / "specs" / "tiny.attn").write_text(TINY.replace("/ sqrt(64)", "/ 8"))
    done = run(*command)
    assert done.code == 2
    assert "in the way generated/tiny/triton/f16_w16.py (edited since attnc wrote it)\n" in done.err
    remedy = "replace them with --force" if command == ["compile"] else "name another folder"
    assert done.err.endswith(
        "error: 1 file in 'generated' would be lost, and nothing was written\n"
        f"   = help: move them elsewhere, or {remedy}\n"
    )
    assert (edited.read_text(), stale.read_text()) == ("# mine\n", before)
    check = run("compile", "--check")
    assert check.code == 1
    assert "stale    generated/tiny/triton/f16_w16.py (edited since attnc wrote it)\n" in check.out
    assert "with --force those that are not as it wrote them" in check.err
    (found,) = (f for f in json.loads(run("compile", "--check", "--json").out)["files"] if f["held"])
    assert found == {"path": "generated/tiny/triton/f16_w16.py", "kind": "stale", "held": "edited"}
    assert run("compile", "--force").code == 0
    assert "dot(q, k) / 8" in edited.read_text()
    assert run("compile", "--check").code == 0


def test_a_file_that_was_edited_outlives_its_spec(run: Run, folder: Path) -> None:
    other = folder / "specs" / "other.attn"
    other.write_text(TINY.replace("tiny", "other"))
    run("compile")
    other.unlink()
    edited = folder / "generated" / "other" / "triton" / "f16_w16.py"
    edited.write_text("# mine\n")
    done = run("compile")
    assert done.code == 0
    assert "kept     generated/other/triton/f16_w16.py (edited since attnc wrote it)\n" in done.out
    assert done.err.endswith("0 written, 5 removed, 1 kept that no spec makes: --force removes them\n")
    assert run("compile", "--check").code == 1
    assert run("compile", "--force").code == 0
    assert not edited.exists()


def test_links_in_the_output_folder_are_not_followed(run: Run, folder: Path) -> None:
    """What lies elsewhere is nobody's to write, whoever put the link there."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "__init__.py").write_text("mine")
    (folder / "generated").mkdir()
    module, package = (folder / "generated" / "tiny" / "__init__.py", folder / "generated" / "tiny")
    package.symlink_to(elsewhere)
    assert run("compile").code == 2
    done = run("compile", "--force")
    assert done.code == 2
    assert "tiny/__init__.py (a link or a file is on the way to it)\n" in done.err
    assert [path.name for path in elsewhere.iterdir()] == ["__init__.py"]
    package.unlink()
    package.mkdir()
    module.symlink_to(elsewhere / "__init__.py")
    assert run("compile", "--force").code == 0
    assert (elsewhere / "__init__.py").read_text() == "mine"
    assert not module.is_symlink()


def test_a_folder_from_before_there_was_a_manifest(run: Run, folder: Path) -> None:
    run("compile")
    manifest, stale = folder / "generated/.attnc-manifest", folder / "generated/tiny/triton/f16_w16.py"
    manifest.unlink()
    assert run("compile").err == "6 files in generated/, 0 written\n"
    manifest.unlink()
    stale.write_text("# of an older attnc\n")
    done = run("compile")
    assert done.code == 2
    assert "in the way generated/tiny/triton/f16_w16.py (not in the folder's manifest)\n" in done.err
    assert "   = help: where an older attnc has written them, replace them with --force, once" in done.err
    assert run("compile", "--force").code == 0
    assert run("compile", "--check").code == 0


def test_a_long_list_is_cut(run: Run, folder: Path) -> None:
    run("compile")
    support = sorted((folder / "generated" / "_support").glob("*.py"))
    for path in support:
        path.write_text("# mine\n")
    done = run("compile")
    assert done.code == 2
    assert done.err.count("in the way ") == 12
    assert f"           and {len(support) - 12} more\n" in done.err
    assert f"{len(support)} files in 'generated' would be lost" in done.err
