"""The output folder: what attnc owns there, and that a set of files is whole whatever happens."""

from __future__ import annotations

import fcntl
import json
import os
import py_compile
import shutil
import stat
import subprocess
from importlib.machinery import SourceFileLoader
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from attnc import output
from attnc.files import leftovers, write_new
from attnc.output import MANIFEST, NotOurs, OutputFile, compare, write, write_folder
from tests.faults import killed, out_of_disk
from tests.processes import forked
from tests.profiles import is_night


def outputs(files: dict[str, str]) -> list[OutputFile]:
    return [OutputFile(path=path, text=text) for path, text in files.items()]


def there(out: Path) -> dict[str, str]:
    """The files of a folder but for the manifest."""
    paths = (path for path in sorted(out.rglob("*")) if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(out).as_posix(): path.read_text() for path in paths}


def kinds(drifts: tuple[output.Drift, ...]) -> dict[str, tuple[str, str]]:
    return {drift.path: (drift.kind, drift.held) for drift in drifts if drift.path != MANIFEST}


OLD = dict.fromkeys(("_support/s.py", "a/__init__.py", "a/t/gone.py", "a/t/same.py", "a/t/x.py"), "1\n")
NEW = OLD | dict.fromkeys(("_support/s.py", "a/__init__.py", "a/t/x.py", "a/u/z.py"), "2\n")
del NEW["a/t/gone.py"]
#: Of another attention.
OTHER = {"b/__init__.py": "1\n"}
MINE = {"a/t/helper.py": "# attnc compile\n", "mine.txt": "mine\n"}


def put(out: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(text)


# --- ownership ----------------------------------------------------------------------------------------------


def test_writing_makes_files_what_they_should_be(tmp_path: Path) -> None:
    assert set(kinds(write(outputs(OLD), tmp_path)).values()) == {("missing", "")}
    assert write(outputs(OLD), tmp_path) == ()
    found = {drift.path: drift for drift in write(outputs(NEW), tmp_path)}
    assert found["a/t/x.py"].diff.splitlines()[-2:] == ["-1", "+2"]
    assert {path: drift.kind for path, drift in found.items()} == {
        MANIFEST: "stale", "_support/s.py": "stale", "a/__init__.py": "stale", "a/t/x.py": "stale",
        "a/u/z.py": "missing", "a/t/gone.py": "orphan",
    }  # fmt: skip
    assert there(tmp_path) == NEW
    assert {path.name for path in tmp_path.iterdir()} == {MANIFEST, "_support", "a"}


def test_the_manifest_is_one_that_sha256sum_reads(tmp_path: Path) -> None:
    write(outputs(OLD), tmp_path)
    done = subprocess.run(["sha256sum", "-c", MANIFEST], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()) == (0, [f"{path}: OK" for path in sorted(OLD)])


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    write(outputs(OLD), tmp_path)
    put(tmp_path, MINE)
    write(outputs(NEW), tmp_path, complete=True)
    assert there(tmp_path) == NEW | MINE
    write([], tmp_path, complete=True)
    assert there(tmp_path) == MINE
    assert not (tmp_path / MANIFEST).exists()


def test_orphans_are_those_of_the_attentions_that_were_compiled(tmp_path: Path) -> None:
    write(outputs(OLD | OTHER), tmp_path)
    write(outputs(NEW), tmp_path)
    assert there(tmp_path) == NEW | OTHER
    write(outputs(NEW), tmp_path, complete=True)
    assert there(tmp_path) == NEW


def test_a_file_that_was_edited_stays_without_force(tmp_path: Path) -> None:
    write(outputs(OLD), tmp_path)
    edited = {"a/t/x.py": "mine\n", "a/t/gone.py": "mine\n"}
    put(tmp_path, edited)
    with pytest.raises(NotOurs) as raised:
        write(outputs(NEW), tmp_path)
    assert kinds(raised.value.held) == {"a/t/x.py": ("stale", "edited")}
    assert there(tmp_path) == OLD | edited
    assert kinds(compare(outputs(NEW), tmp_path))["a/t/gone.py"] == ("orphan", "edited")
    write(outputs(NEW), tmp_path, force=True)
    assert there(tmp_path) == NEW


def test_an_orphan_that_was_edited_is_in_nobodys_way(tmp_path: Path) -> None:
    write(outputs(OLD), tmp_path)
    put(tmp_path, {"a/t/gone.py": "mine\n"})
    for _ in range(2):
        write(outputs(NEW), tmp_path)
        assert there(tmp_path) == NEW | {"a/t/gone.py": "mine\n"}
        assert kinds(compare(outputs(NEW), tmp_path)) == {"a/t/gone.py": ("orphan", "edited")}
    put(tmp_path, {"a/t/gone.py": OLD["a/t/gone.py"]})
    write(outputs(NEW), tmp_path)
    assert there(tmp_path) == NEW


def test_a_file_that_was_edited_to_what_is_wanted_is_right(tmp_path: Path) -> None:
    write(outputs(OLD), tmp_path)
    put(tmp_path, NEW)
    write(outputs(NEW), tmp_path)
    assert there(tmp_path) == NEW
    assert compare(outputs(NEW), tmp_path, complete=True) == ()


def test_a_file_that_was_removed_is_written_again(tmp_path: Path) -> None:
    write(outputs(OLD), tmp_path)
    for path in OLD:
        (tmp_path / path).unlink()
    write(outputs(NEW), tmp_path)
    assert there(tmp_path) == NEW
    assert "gone" not in (tmp_path / MANIFEST).read_text()


@pytest.mark.parametrize("kind", ["unlisted", "read-only", "link", "other", "beyond"])
def test_what_stands_in_the_place_of_a_file(kind: str, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    put(elsewhere, {"x.py": "mine\n"})
    write(outputs(OTHER if kind == "unlisted" else OLD), out)
    path = out / "a" / "t" / "x.py"
    if kind == "unlisted":
        put(out, {"a/t/x.py": "mine\n"})
    elif kind == "read-only":
        path.chmod(0o444)
    elif kind == "beyond":
        shutil.rmtree(path.parent)
        path.parent.symlink_to(elsewhere)
    else:
        path.unlink()
        path.symlink_to(elsewhere / "x.py") if kind == "link" else put(path, {"mine": "mine\n"})
    before = there(out)
    for force in (False, True):
        if not force or kind in ("other", "beyond"):
            with pytest.raises(NotOurs) as raised:
                write(outputs(NEW), out, force=force)
            assert kinds(raised.value.held)["a/t/x.py"] == ("stale", kind)
            assert there(out) == before
        else:
            write(outputs(NEW), out, force=force)
            assert there(out) == NEW | (OTHER if kind == "unlisted" else {})
            assert stat.S_IMODE(path.lstat().st_mode) == 0o444 or kind != "read-only"
    assert there(elsewhere) == {"x.py": "mine\n"}
    assert leftovers(out) == []


def test_permissions_are_kept(tmp_path: Path) -> None:
    write(outputs(OLD), tmp_path)
    (tmp_path / "a/t/x.py").chmod(0o640)
    write(outputs(NEW), tmp_path)
    assert stat.S_IMODE((tmp_path / "a/t/x.py").stat().st_mode) == 0o640


# --- folders ------------------------------------------------------------------------------------------------


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    put(tmp_path, MINE)
    with pytest.raises(NotOurs) as raised:
        write(outputs(OLD), tmp_path)
    assert raised.value.others == ("a", "mine.txt")
    assert there(tmp_path) == MINE
    write(outputs(OLD), tmp_path, beside=True)
    write(outputs(NEW), tmp_path)  # which has a manifest now
    assert there(tmp_path) == NEW | MINE


@pytest.mark.parametrize("name", ["verified.json", ".gitignore", ".gitkeep", ".gitattributes"])
def test_a_folder_with_what_belongs_there_is_empty(name: str, tmp_path: Path) -> None:
    put(tmp_path, {name: "kept"})
    write(outputs(OLD), tmp_path)
    assert there(tmp_path) == OLD | {name: "kept"}


def test_a_folder_that_was_written_before_there_was_a_manifest(tmp_path: Path) -> None:
    """What is right is listed; what is not may have been edited."""
    put(tmp_path, OLD | OTHER)
    assert kinds(write(outputs(OLD), tmp_path)) == {}
    assert compare(outputs(OLD), tmp_path) == ()
    write(outputs(NEW), tmp_path)
    assert there(tmp_path) == NEW | OTHER
    (tmp_path / MANIFEST).unlink()
    put(tmp_path, {"a/t/x.py": "older\n"})
    with pytest.raises(NotOurs) as raised:
        write(outputs(NEW), tmp_path)
    assert kinds(raised.value.held) == {"a/t/x.py": ("stale", "unlisted")}
    write(outputs(NEW), tmp_path, force=True)
    assert there(tmp_path) == NEW | OTHER


def test_nothing_is_made_of_nothing(tmp_path: Path) -> None:
    assert write([], tmp_path / "out", complete=True) == ()
    assert not (tmp_path / "out").exists()


# --- the manifest -------------------------------------------------------------------------------------------


def test_both_sides_of_a_merge_are_listed(tmp_path: Path) -> None:
    """Git may have marked a conflict, or have kept the lines of both branches."""
    branches = []
    for name, files in (("ours", OLD), ("theirs", NEW)):
        write(outputs(files), tmp_path / name)
        branches.append((tmp_path / name / MANIFEST).read_text())
    out = tmp_path / "out"
    put(out, OLD | NEW)
    (out / MANIFEST).write_text("<<<<<<< ours\n{}=======\n{}>>>>>>> theirs\n".format(*branches))
    merged = {**NEW, "a/__init__.py": "3\n", "a/t/same.py": "3\n"}
    assert write(outputs(merged), out)
    assert there(out) == merged
    assert compare(outputs(merged), out, complete=True) == ()


def test_ends_of_lines_are_nobodys_edit(tmp_path: Path) -> None:
    write(outputs(OLD), tmp_path)
    for path in (*OLD, MANIFEST):
        (tmp_path / path).write_bytes((tmp_path / path).read_bytes().replace(b"\n", b"\r\n"))
    assert compare(outputs(OLD), tmp_path, complete=True) == ()
    write(outputs(NEW), tmp_path)
    assert there(tmp_path) == NEW


@pytest.mark.parametrize(
    "path", ["../mine.txt", "a/../../mine.txt", "/mine.txt", ".hidden/mine.txt", "./mine.txt"]
)
def test_a_manifest_speaks_of_files_below_it_alone(path: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(outputs(OLD), out)
    mine = (out / path.lstrip("/")).resolve()
    put(mine.parent, {mine.name: "mine\n"})
    digest = output._hash(b"mine\n")
    with (out / MANIFEST).open("a") as file:
        file.write(f"{digest}  {path}\n")
    write([], out, complete=True)
    assert mine.read_text() == "mine\n"


@pytest.mark.parametrize("size", [0, 10, 300, 400])
def test_a_manifest_that_was_cut_lists_less(size: int, tmp_path: Path) -> None:
    write(outputs(OLD), tmp_path)
    manifest = tmp_path / MANIFEST
    manifest.write_text(manifest.read_text()[:size])
    put(tmp_path, MINE)
    write(outputs(OLD), tmp_path)
    assert compare(outputs(OLD), tmp_path) == ()
    assert there(tmp_path) == OLD | MINE


def test_a_manifest_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    out.mkdir()
    (out / MANIFEST).symlink_to(elsewhere)
    with pytest.raises(NotOurs):
        write(outputs(OLD), out)
    write(outputs(OLD), out, force=True)
    assert (elsewhere.read_text(), (out / MANIFEST).is_symlink()) == ("mine", False)


# --- machine code -------------------------------------------------------------------------------------------


def test_machine_code_stays_as_long_as_a_module_is_beside_it(tmp_path: Path) -> None:
    cubins = tmp_path / "a/t/cubin"
    write(outputs(OLD), tmp_path)
    write_folder({"1.cubin": b"\x7fELF", "2.cubin": b"\x7fELF"}, "a/t/cubin", tmp_path)
    (cubins / "mine.cubin").write_bytes(b"mine")
    write(outputs(NEW), tmp_path, complete=True)
    assert compare(outputs(NEW), tmp_path, complete=True) == ()
    write_folder({"2.cubin": b"\x7fELF", "3.cubin": b"\x7fELF"}, "a/t/cubin", tmp_path)
    assert {path.name for path in cubins.iterdir()} == {"2.cubin", "3.cubin", "mine.cubin"}
    write(outputs(OTHER), tmp_path, complete=True)
    assert {path.name for path in cubins.iterdir()} == {"mine.cubin"}


# --- bytecode -----------------------------------------------------------------------------------------------


def test_bytecode_of_another_text_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python compares sizes and seconds, which may be equal, and another process may write bytecode late."""
    module = tmp_path / "a" / "x.py"

    def write_in_one_second(path: Path, content: bytes) -> None:
        write_new(path, content)
        os.utime(path, (1e9, 1e9 + 0.5))

    monkeypatch.setattr(output, "write_new", write_in_one_second)
    write(outputs({"a/x.py": "WINDOW = 1023\n"}), tmp_path)
    py_compile.compile(str(module), doraise=True)
    (late,) = module.parent.glob("__pycache__/*")
    content = late.read_bytes()
    write(outputs({"a/x.py": "WINDOW = 1022\n"}), tmp_path)
    assert not late.exists()
    late.write_bytes(content)
    names: dict[str, Any] = {}
    code = SourceFileLoader("x", str(module)).get_code("x")
    assert code is not None
    exec(code, names)
    assert names["WINDOW"] == 1022


def test_bytecode_goes_with_its_module_and_no_other(tmp_path: Path) -> None:
    cached = tmp_path / "a" / "t" / "__pycache__"
    write(outputs(OLD), tmp_path)
    put(
        cached,
        dict.fromkeys(("gone.cpython-311.pyc", "gone.cpython-311.opt-1.pyc", "gone2.cpython-311.pyc"), ""),
    )
    write(outputs(NEW), tmp_path)
    assert [path.name for path in cached.iterdir()] == ["gone2.cpython-311.pyc"]


# --- processes that end, and several ------------------------------------------------------------------------


#: By day every second step.
STRIDE = 1 if is_night() else 2


def prepared(folder: Path) -> Path:
    write(outputs(OLD), folder)
    put(folder, MINE)
    return folder


def test_a_process_that_is_killed_at_any_step_leaves_a_set_that_the_next_makes_whole(tmp_path: Path) -> None:
    numbers, whole = count(), list[bool]()
    folders = killed(
        lambda out: write(outputs(NEW), out), lambda: prepared(tmp_path / str(next(numbers))), STRIDE
    )
    for out in folders:
        left = there(out)
        assert {path: left[path] for path in MINE} == MINE
        for path in {*OLD, *NEW}:
            assert left.get(path) in (OLD.get(path), NEW.get(path))
        write(outputs(OTHER), out)  # any call, of any spec
        assert leftovers(out) == []
        found = there(out)
        assert found in (OLD | OTHER | MINE, NEW | OTHER | MINE)
        assert compare(outputs(found), out, complete=True) != ()  # `found` has files that are not attnc's
        listed = {line.split("  ")[1] for line in (out / MANIFEST).read_text().splitlines() if line[0] != "#"}
        assert listed == found.keys() - MINE.keys()
        whole.append("a/u/z.py" in found)
        write(outputs(NEW), out)
        assert there(out) == NEW | OTHER | MINE
    assert {False, True} == set(whole)


def test_a_process_may_be_killed_in_a_folder_that_was_empty(tmp_path: Path) -> None:
    numbers = count()
    for out in killed(lambda out: write(outputs(NEW), out), lambda: tmp_path / str(next(numbers))):
        write(outputs(OTHER), out)
        assert there(out) in (OTHER, NEW | OTHER)
        assert leftovers(out) == []
    assert next(numbers) > 10


def test_a_full_disk_changes_nothing_or_is_made_good(tmp_path: Path) -> None:
    numbers = count()
    for out in out_of_disk(
        lambda out: write(outputs(NEW), out), lambda: prepared(tmp_path / str(next(numbers))), STRIDE
    ):
        assert there(out) == OLD | MINE or leftovers(out)
        write(outputs(OTHER), out)
        assert there(out) in (OLD | OTHER | MINE, NEW | OTHER | MINE)
        assert leftovers(out) == []
    assert next(numbers) > 5


@pytest.mark.parametrize("size", [0, 1, 40])
def test_a_journal_that_is_not_whole_is_none(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.setattr(output, "_carry_out", lambda *_: None)
    write(outputs(NEW), tmp_path)
    monkeypatch.undo()
    (staging,) = leftovers(tmp_path)
    journal = (staging / "journal").read_bytes()
    (staging / "journal").write_bytes(journal[:size])
    write(outputs(OTHER), tmp_path)
    assert there(tmp_path) == OLD | OTHER | MINE


def test_what_changed_since_a_journal_was_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.setattr(output, "_carry_out", lambda *_: None)
    write(outputs(NEW), tmp_path)
    monkeypatch.undo()
    (staging,) = leftovers(tmp_path)
    steps = [path for path, _, _ in json.loads((staging / "journal").read_text())]
    (staging / str(steps.index("a/u/z.py"))).write_text("half of")
    edited = {"a/t/x.py": "mine\n", "a/t/gone.py": "mine\n"}
    put(tmp_path, edited)
    write(outputs(OTHER), tmp_path)
    expected = {path: text for path, text in NEW.items() if path != "a/u/z.py"}
    assert there(tmp_path) == expected | OTHER | MINE | edited
    with pytest.raises(NotOurs):
        write(outputs(NEW), tmp_path)


def test_what_a_killed_process_had_written_is_nobodys_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place = output._put

    def put_one(new: Path, place: Path) -> None:
        put_in_place(new, place)
        raise KeyboardInterrupt

    prepared(tmp_path)
    monkeypatch.setattr(output, "_put", put_one)
    with pytest.raises(KeyboardInterrupt):
        write(outputs(NEW), tmp_path)
    monkeypatch.undo()
    newer = dict.fromkeys(NEW, "3\n")
    assert {held for _, held in kinds(compare(outputs(newer), tmp_path)).values()} == {""}
    write(outputs(newer), tmp_path)
    assert there(tmp_path) == newer | MINE


@pytest.mark.parametrize("path", ["../elsewhere/x.py", ".git/hooks/post-commit", "beyond/x.py"])
def test_a_journal_writes_below_its_folder_alone(path: str, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    write(outputs(OLD), out)
    elsewhere.mkdir()
    (out / "beyond").symlink_to(elsewhere)
    put(
        out / ".attnc-0123456789abcdef.tmp",
        {"0": "planted", "journal": json.dumps([[path, "", output._hash(b"planted")]])},
    )
    (out / ".attnc-0123456789abcdee.tmp").symlink_to(elsewhere)
    put(elsewhere, {"journal": "[]", "manifest": "mine"})
    write(outputs(NEW), out)
    assert there(out) == NEW
    assert there(elsewhere) == {"journal": "[]", "manifest": "mine"}
    assert leftovers(out) == []


def test_eight_processes_write_to_one_folder(tmp_path: Path) -> None:
    def of(number: int) -> dict[str, str]:
        return {f"{number}/{name}": f"{number}\n" for name in "xyz"} | {"_support/s.py": "1\n"}

    assert forked(8, lambda number: write(outputs(of(number)), tmp_path)) == [0] * 8
    whole = {path: text for number in range(8) for path, text in of(number).items()}
    assert there(tmp_path) == whole
    assert compare(outputs(whole), tmp_path, complete=True) == ()
    assert forked(8, lambda _: write([], tmp_path, complete=True)) == [0] * 8
    assert there(tmp_path) == {}


def test_the_folder_is_locked_while_it_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)
    carry_out = output._carry_out

    def checked(staging: Path, out: Path) -> None:
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        carry_out(staging, out)

    monkeypatch.setattr(output, "_carry_out", checked)
    write(outputs(OLD), tmp_path)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)
