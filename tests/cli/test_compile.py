"""`attnc compile`, `check` and `fmt`: what they write, print and return; and --watch."""

import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attnc import build, output
from attnc.cli import compile as watch
from attnc.cli.compile import changes, watch_specs
from attnc.model.attention import Variant
from attnc.model.schedule import Schedule
from attnc.plan.ir import Module
from attnc.plan.lower import plan
from attnc.syntax.ast import File
from attnc.syntax.format import format_file
from tests.cli.conftest import TINY, Run


def files(folder: Path) -> list[str]:
    """Those of attentions; the package beside them has tests of its own."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob("generated/*/*/*.py"))


def test_compile_writes_a_module_for_each_variant(run: Run, folder: Path) -> None:
    done = run("compile")
    assert (done.code, done.err) == (0, "6 files in generated/, 6 written\n")
    assert len(files(folder)) == 5
    assert all(line.startswith("new ") for line in done.out.splitlines())
    for path in files(folder):
        compile((folder / path).read_text(), path, "exec")


def test_a_tilde_that_the_shell_has_left_is_the_home(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert run("compile", "--out=~/kernels").code == 0
    assert (folder / "home" / "kernels" / "tiny" / "triton" / "__init__.py").exists()
    assert not (folder / "~").exists()


def test_the_names_of_variants(run: Run, folder: Path) -> None:
    run("compile")
    stems = {Path(path).stem for path in files(folder)}
    assert stems == {"__init__", "f16_w16", "f16_w32", "bf16_w16", "bf16_w32"}


def test_a_spec_without_a_schedule_is_compiled_for_every_target(run: Run, folder: Path) -> None:
    spec = folder / "specs" / "tiny.attn"
    spec.write_text(TINY.partition("schedule ")[0])
    assert run("compile").code == 0
    assert {path.split("/")[2] for path in files(folder) if path.count("/") > 2} >= {
        "triton",
        "cuda_sm_80",
        "cuda_sm_90a",
    }
    text = (folder / "generated" / "tiny" / "triton" / "f16_w16_prompt.py").read_text()
    assert f"Spec sha256: {hashlib.sha256(spec.read_bytes()).hexdigest()}" in text, "that of the file"
    assert run("compile", "--check").code == 0


def test_a_spec_that_no_target_has_a_kernel_for_says_why(run: Run, folder: Path) -> None:
    text = TINY.partition("schedule ")[0].replace("64]", "1024]").replace("T[", "f32[")
    (folder / "specs" / "tiny.attn").write_text(
        text.replace("  output", "  order = absolute(1024)\n  output")
    )
    done = run("compile")
    assert done.code == 1
    assert "error[E06" in done.err
    assert "write a schedule for the target 'triton'" not in done.err, "there it is refused, too"
    assert files(folder) == []


@pytest.mark.parametrize("arguments", ["compile", "explain specs/tiny.attn --no-compile", "verify --count 1"])
def test_a_spec_without_a_schedule_is_planned_once(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    planned: list[tuple[str, str]] = []

    def counted(variant: Variant, schedule: Schedule) -> Module:
        planned.append((variant.name, schedule.target))
        return plan(variant, schedule)

    (folder / "specs" / "tiny.attn").write_text(TINY.partition("schedule ")[0])
    monkeypatch.setattr(build, "plan", counted)
    assert run(*arguments.split()).code == 0
    assert len(planned) == len(set(planned)) >= 4


@pytest.mark.parametrize("command", ["explain", "verify"])
@pytest.mark.parametrize(
    ("target", "help"),
    [
        ("hopper", "write 'cuda.sm_90a'"),
        ("cuda.sm_100a", "write 'cuda.sm_80'"),
        ("abacus", "targets are triton, cuda.sm_80, cuda.sm_90a"),
    ],
)
def test_a_target_that_there_is_not_is_named_also_without_a_schedule(
    run: Run, folder: Path, command: str, target: str, help: str
) -> None:
    (folder / "specs" / "tiny.attn").write_text(TINY.partition("schedule ")[0])
    done = run(command, "specs/tiny.attn", "--target", target)
    assert done.code == 2
    assert f"there is no target '{target}'" in done.err
    assert help in done.err


def test_compiling_again_touches_nothing(run: Run, folder: Path) -> None:
    run("compile")
    before = {path: (folder / path).stat().st_mtime_ns for path in files(folder)}
    assert run("compile").out == ""
    assert {path: (folder / path).stat().st_mtime_ns for path in files(folder)} == before


def test_check_mode_reports_stale_missing_and_orphaned_files(run: Run, folder: Path) -> None:
    run("compile")
    assert run("compile", "--check").code == 0
    triton, spec = folder / "generated" / "tiny" / "triton", folder / "specs" / "tiny.attn"
    spec.write_text(TINY.replace("{16, 32}", "{16, 64}").replace("/ sqrt(64)", "/ 8"))
    (triton / "notes.py").write_text("# written by hand, with attnc compile\n")
    done = run("compile", "--check")
    assert done.code == 1
    assert "stale    generated/tiny/triton/f16_w16.py\n" in done.out
    assert "    -    score = dot(q, k) / sqrt(64)" in done.out
    assert "missing  generated/tiny/triton/f16_w64.py\n" in done.out
    assert "orphan   generated/tiny/triton/f16_w32.py\n" in done.out
    assert "stale    generated/.attnc-manifest\n" in done.out
    assert "notes" not in done.out
    assert run("compile").code == 0
    assert not (triton / "f16_w32.py").exists()
    assert (triton / "notes.py").exists()
    assert run("compile", "--check").code == 0


def test_files_of_a_removed_spec_are_orphans_of_all_specs_only(run: Run, folder: Path) -> None:
    other = folder / "specs" / "other.attn"
    other.write_text(TINY.replace("tiny", "other"))
    run("compile")
    other.unlink()
    assert run("compile", "--check", "specs/tiny.attn").code == 0
    assert run("compile", "--check").out.count("orphan") == 6
    made = folder / "generated" / "other"
    (made / "__pycache__").mkdir()
    (made / "__pycache__" / "__init__.cpython-311.pyc").touch()
    (made / "triton" / "notes.txt").touch()
    assert run("compile").err == "6 files in generated/, 0 written, 6 removed\n"
    assert [path.name for path in sorted(made.rglob("*"))] == ["triton", "notes.txt"]
    (made / "triton" / "notes.txt").unlink()
    other.write_text(TINY.replace("tiny", "other"))
    run("compile")
    other.unlink()
    run("compile")
    assert not made.exists()


def test_json_names_files_and_diagnostics(run: Run) -> None:
    data = json.loads(run("compile", "--json").out)
    assert set(data) == {"files", "diagnostics"}
    assert {entry["kind"] for entry in data["files"]} == {"missing"}
    assert data["diagnostics"] == []


def test_a_wrong_spec_does_not_stop_the_others(run: Run, folder: Path) -> None:
    (folder / "specs" / "wrong.attn").write_text(TINY.replace("tiny", "wrong").replace("kv in", "kw in"))
    done = run("compile")
    assert done.code == 1
    assert "error[E04" in done.err
    assert "did you mean 'tile.kv'?" in done.err
    assert len(files(folder)) == 5


@pytest.mark.parametrize("name", ["tiny", "Tiny"])
def test_two_specs_with_the_same_attention_are_refused(name: str, run: Run, folder: Path) -> None:
    """Also where case alone differs, which Windows and macOS do not keep apart."""
    (folder / "specs" / "twin.attn").write_text(TINY.replace("tiny", name))
    for command in ("compile", "check"):
        done = run(command)
        assert done.code == 2
        assert f"both make '{name}/__init__.py'" in done.err


def test_a_spec_that_is_named_twice_is_one(run: Run, folder: Path) -> None:
    done = run("compile", "specs/tiny.attn", "specs/../specs/tiny.attn", str(folder / "specs" / "tiny.attn"))
    assert done.code == 0, done.err


def test_a_file_that_another_process_removes_meanwhile_is_gone(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder / "specs" / "other.attn"
    other.write_text(TINY.replace("tiny", "other"))
    run("compile")
    other.unlink()
    remove = output._remove

    def after_another(path: Path, out: Path) -> None:
        path.unlink()
        remove(path, out)

    monkeypatch.setattr(output, "_remove", after_another)
    done = run("compile")
    assert done.code == 0, done.err
    assert not (folder / "generated" / "other").exists()


def test_check_writes_nothing(run: Run, folder: Path) -> None:
    done = run("check")
    assert (done.code, done.out, done.err) == (0, "", "1 spec: 0 errors, 0 warnings\n")
    assert not (folder / "generated").exists()


@pytest.mark.parametrize(
    "command", [("explain",), ("verify",), ("fuzz",), ("verify", "--ranks", "2"), ("verify", "--invariant")]
)
def test_what_is_wrong_with_a_spec_is_said_as_json_too(
    command: tuple[str, ...], run: Run, folder: Path
) -> None:
    (folder / "specs" / "tiny.attn").write_text(TINY.replace("tile.kv", "tile.kw"))
    done = run(*command, "specs/tiny.attn", "--json")
    assert done.code == 1
    (found,) = json.loads(done.out)["diagnostics"]
    assert (found["code"], found["primary"]["line"]) == ("E0402", 12)
    assert "error[E0402]" in done.err


def test_check_as_json(run: Run, folder: Path) -> None:
    (folder / "specs" / "tiny.attn").write_text(TINY.replace("window(W", "window(V"))
    done = run("check", "--json")
    assert done.code == 1
    (found,) = json.loads(done.out)
    assert found["severity"] == "error"
    assert found["primary"]["path"] == "specs/tiny.attn"


def test_warnings_are_rendered(run: Run, folder: Path) -> None:
    spec = folder / "specs" / "tiny.attn"
    spec.write_text(TINY.replace("{32, 64}\n", "{32, 64}\n  backward { tile.q = 64 }\n"))
    done = run("check")
    assert done.code == 0
    assert "warning[W0801]" in done.err


def test_fmt_is_idempotent_and_diffs(run: Run, folder: Path) -> None:
    spec = folder / "specs" / "tiny.attn"
    spec.write_text(TINY.replace("  mask = window(W, 0)", "      mask=window( W,0 )"))
    assert run("fmt", "--check").code == 1
    diff = run("fmt", "--diff")
    assert diff.code == 1
    assert "+  mask = window(W, 0)" in diff.out
    assert run("fmt").out == "formatted specs/tiny.attn\n"
    assert spec.read_text() == TINY
    assert run("fmt", "--check").code == 0


def standard_input(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_fmt_and_check_read_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    crooked = TINY.replace("score = ", "score  =").encode()
    standard_input(monkeypatch, crooked)
    done = run("fmt", "-")
    assert (done.code, done.err) == (0, "")
    formatted = done.out
    assert "score = dot" in formatted
    standard_input(monkeypatch, formatted.encode())
    assert run("fmt", "-").out == formatted
    standard_input(monkeypatch, crooked)
    assert run("fmt", "--check", "-").out == "would format <stdin>\n"
    standard_input(monkeypatch, crooked)
    assert "+++ <stdin> (formatted)" in run("fmt", "--diff", "-").out
    standard_input(monkeypatch, crooked)
    assert run("check", "-").code == 0
    standard_input(monkeypatch, b"attention {")
    done = run("fmt", "-")
    assert (done.code, done.out) == (1, "")
    assert "--> <stdin>:1:11" in done.err


def test_standard_input_is_read_alone_and_by_fmt_and_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("fmt", "-", "specs/tiny.attn")
    assert (done.code, "'-' is standard input, and goes with no file" in done.err) == (2, True)
    for command in ("explain", "compile", "verify"):
        done = run(command, "-")
        assert (done.code, "which only check and fmt read" in done.err) == (2, True)
    monkeypatch.setattr("sys.stdin", None)
    done = run("check", "-")
    assert (done.code, "standard input: bad file descriptor" in done.err) == (2, True)


def test_fmt_leaves_links_and_permissions(run: Run, folder: Path) -> None:
    spec, link = folder / "specs" / "tiny.attn", folder / "link.attn"
    spec.write_text(TINY.replace("mask =", "mask  ="))
    spec.chmod(0o640)
    link.symlink_to("specs/tiny.attn")
    assert run("fmt", "link.attn").out == "formatted link.attn\n"
    assert link.is_symlink()
    assert spec.read_text() == TINY
    assert stat.S_IMODE(spec.stat().st_mode) == 0o640


def test_fmt_writes_to_files_alone(run: Run, folder: Path) -> None:
    pipe = folder / "pipe.attn"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(pipe.write_text, TINY.replace("mask =", "mask  ="))
        done = run("fmt", "pipe.attn")
        writing.result()
    assert done.code == 2
    assert "'pipe.attn' is no file that can be written again\n   = help: --diff prints the" in done.err
    assert pipe.is_fifo()


def test_fmt_leaves_what_is_read_only_and_goes_on(run: Run, folder: Path) -> None:
    crooked = TINY.replace("mask =", "mask  =")
    first, second = folder / "specs" / "first.attn", folder / "specs" / "tiny.attn"
    for spec in (first, second):
        spec.write_text(crooked)
    first.chmod(0o444)
    done = run("fmt")
    assert (done.code, done.out) == (2, "formatted specs/tiny.attn\n")
    assert "error: 'specs/first.attn' is read-only" in done.err
    assert done.err.endswith("2 checked, 1 formatted, 1 left as they are\n")
    assert (first.read_text(), second.read_text()) == (crooked, TINY)


def test_fmt_leaves_what_is_saved_meanwhile(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = folder / "specs" / "tiny.attn"
    spec.write_text(TINY.replace("mask =", "mask  ="))

    def slowly(tree: File) -> str:
        spec.write_text("# saved by an editor\n")
        return format_file(tree)

    monkeypatch.setattr("attnc.syntax.format.format_file", slowly)
    done = run("fmt")
    assert (done.code, done.out) == (2, "")
    assert "error: 'specs/tiny.attn' was saved meanwhile\n   = help: format it again" in done.err
    assert spec.read_text() == "# saved by an editor\n"


# --- machine code -------------------------------------------------------------------------------------------


TRAINED = """\
attention trained {
  input q: f16[B, H, M, 64]
  input k, v: f16[B, H, N, 64]
  score = dot(q, k) / sqrt(D)
  normalize = softmax
  output o: f16[B, H, M, 64]
  grad q, k, v
}
schedule trained for cuda.sm_80 {
  tile.q = 64, tile.kv = 64
}
"""


def test_ahead_of_time_takes_each_module_once(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of its gradients are files of their own, and no modules."""
    (folder / "specs" / "trained.attn").write_text(TRAINED)
    built: list[tuple[str, list[str]]] = []

    def build(module: Path, archs: list[str], files: dict[str, str]) -> dict[str, bytes]:
        assert module.read_text() == files[module.name]
        assert {*files} == {module.name, *(path.name for path in module.parent.glob("*.cu"))}
        built.append((module.resolve().relative_to(folder / "generated").as_posix(), archs))
        return {f"{archs[0]}.cubin": b"machine code"}

    monkeypatch.setattr("attnc.runtime.toolchains.build_cubins", build)
    done = run("compile", "--aot", "sm_90", "--out", str(folder / "generated"))
    assert (done.code, built) == (0, [("trained/cuda_sm_80/default.py", ["sm_90"])])
    assert "wrote 1 cubin for sm_90\n" in done.out
    assert len(list(folder.glob("generated/trained/cuda_sm_80/*.cu"))) > 1

    cubins = folder / "generated/trained/cuda_sm_80/cubin"
    (cubins / "mine.cubin").write_bytes(b"mine")
    assert run("compile").code == 0
    assert run("compile", "--check").code == 0
    assert {path.name for path in cubins.iterdir()} == {"mine.cubin", "sm_90.cubin"}
    assert run("compile", "--aot", "sm_80").code == 0
    assert {path.name for path in cubins.iterdir()} == {"mine.cubin", "sm_80.cubin"}
    (folder / "specs" / "trained.attn").unlink()
    assert run("compile").code == 0
    assert [path.name for path in cubins.iterdir()] == ["mine.cubin"]


# --- files that change while somebody watches ---------------------------------------------------------------


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


def test_what_is_saved_during_the_first_compilation_is_compiled_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = folder / "specs" / "tiny.attn"
    monkeypatch.setattr(watch, "changes", lambda find: changes(find, acting(lambda: None)))
    compiled: list[str] = []

    def compile_again(paths: tuple[Path, ...]) -> None:
        compiled.append(tiny.read_text())
        if len(compiled) == 1:
            tiny.write_text(TINY + "# saved meanwhile\n")

    watch_specs(None, compile_again)
    assert compiled == [TINY, TINY + "# saved meanwhile\n"]


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


def test_a_watch_goes_on_where_a_file_was_edited(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, edited = folder / "specs" / "tiny.attn", folder / "generated/tiny/triton/f16_w16.py"

    def edit() -> None:
        edited.write_text("# mine\n")
        tiny.write_text(TINY.replace("W, 0", "W, 1"))

    def give_way() -> None:
        edited.unlink()
        tiny.write_text(TINY.replace("W, 0", "W, 2"))

    steps = acting(edit, give_way)
    monkeypatch.setattr(watch, "changes", lambda find: changes(find, steps))
    done = run("compile", "--watch")
    assert done.code == 0
    assert done.err.count("would be lost") == 1
    assert "window(W, 2)" in edited.read_text()


def test_a_watch_does_not_begin_in_a_folder_of_others(run: Run, folder: Path) -> None:
    assert run("compile", "--watch", "--out", ".").code == 2


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
    (folder / "generated" / ".attnc-manifest").unlink()  # of no interest to who reads kernels
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
