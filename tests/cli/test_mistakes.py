"""A user's mistake is a message and an exit code, never a traceback; a bug says that it is one."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnc.cli import main
from tests.cli.conftest import TINY, Run
from tests.processes import searched

COMMANDS = ("compile", "check", "fmt", "explain", "demo", "verify", "fuzz", "calibrate")


def assert_is_a_message(err: str) -> None:
    assert "Traceback" not in err
    assert "bug in attnc" not in err
    assert "rror" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_file(run: Run, command: str) -> None:
    done = run(command, "specs/tinny.attn")
    assert done.code == 2
    assert "there is no file 'specs/tinny.attn'" in done.err
    assert "did you mean 'specs/tiny.attn'?" in done.err


@pytest.mark.one_in(7)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "content", [b"\x00\x01\x02\xff", b"\x7fELF\x02\x01\x01\x00", b"caf\xe9", b"x" * 300_000]
)
def test_files_that_are_no_specs(run: Run, folder: Path, command: str, content: bytes) -> None:
    (folder / "odd.attn").write_bytes(content)
    done = run(command, "odd.attn")
    assert done.code == 1
    assert "error[E0" in done.err
    assert_is_a_message(done.err)


def test_specs_that_make_the_same_file_do_not_hide_what_is_wrong(run: Run, folder: Path) -> None:
    (folder / "specs" / "twin.attn").write_text(TINY)
    (folder / "specs" / "wrong.attn").write_text(TINY.replace("tiny", "wrong").replace("kv in", "kw in"))
    done = run("check")
    assert done.code == 2
    assert "did you mean 'tile.kv'?" in done.err
    assert "both make 'tiny/__init__.py'" in done.err
    done = run("check", "--json")
    assert done.code == 2
    assert len(json.loads(done.out)) == 1


def test_empty_file_makes_nothing(run: Run, folder: Path) -> None:
    (folder / "empty.attn").write_text("")
    assert run("compile", "empty.attn").code == 0
    done = run("explain", "empty.attn")
    assert done.code == 2
    assert "no schedule in 'empty.attn'" in done.err


def test_folder_instead_of_file(run: Run, folder: Path) -> None:
    (folder / "nothing").mkdir()
    assert "no .attn files in folder 'nothing'" in run("compile", "nothing").err
    assert "'specs' is a folder" in run("explain", "specs").err


def test_a_folder_that_is_called_like_a_spec_is_no_spec(run: Run, folder: Path) -> None:
    (folder / "specs" / "folder.attn").mkdir()
    assert run("check", "specs").code == 0


def test_an_unknown_architecture_is_told_before_anything_is_written(run: Run, folder: Path) -> None:
    done = run("compile", "--aot", "sm_81")
    assert done.code == 2
    assert "there is no architecture 'sm_81'" in done.err
    assert not (folder / "generated").exists()


def test_what_checks_writes_no_machine_code(run: Run, folder: Path) -> None:
    done = run("compile", "--check", "--aot", "sm_90")
    assert done.code == 2
    assert "--check and --aot do not go together" in done.err


def test_a_schedule_for_a_target_without_kernels_is_not_called_missing(run: Run, folder: Path) -> None:
    path = folder / "specs" / "tiny.attn"
    path.write_text(path.read_text().replace("for triton", "for cuda.sm_100a"))
    for command in ("explain", "demo", "verify"):
        done = run(command, "specs/tiny.attn")
        assert done.code == 2
        assert "is compiled yet\n   = help: 'attnc check' says why" in done.err


@pytest.mark.parametrize("more", [(), ("--decode",), ("--decode", "--target", "cuda.sm_80")])
def test_an_unknown_peer_is_told_before_a_gpu_is_sought(run: Run, more: tuple[str, ...]) -> None:
    done = run("bench", "--peers", "cudnn,fa9", *more)
    assert done.code == 2
    assert "there is no peer 'fa9'" in done.err


def test_calls_are_timed_of_specs_that_there_are(run: Run) -> None:
    done = run("bench", "--host", "specs/tinny.attn")
    assert done.code == 2
    assert "there is no file 'specs/tinny.attn'\n   = help: did you mean 'specs/tiny.attn'?" in done.err


def test_a_name_alone_is_looked_for_where_specs_are(run: Run) -> None:
    done = run("check", "tiny.attn")
    assert done.code == 2
    assert "there is no file 'tiny.attn'\n   = help: did you mean 'specs/tiny.attn'?" in done.err


@pytest.mark.parametrize(
    "modes", [("--host specs/tiny.attn", "--decode"), ("--decode", "--f32"), ("--papers", "--backward")]
)
def test_a_mode_is_not_passed_over(run: Run, modes: tuple[str, str]) -> None:
    done = run("bench", "--list", *" ".join(modes).split())
    assert done.code == 2
    assert f"{modes[0].split()[0]} and {modes[1]} are not one run" in done.err


def test_odd_sizes_are_those_of_models(run: Run) -> None:
    done = run("bench", "--list", "--decode", "--odd")
    assert (done.code, "--odd is about calls as models make them" in done.err) == (2, True)
    assert run("bench", "--list", "--models", "--odd").out.startswith("h12 d64 prompt b32 n577 ")


def test_a_list_of_calls_needs_no_gpu(run: Run) -> None:
    done = run("bench", "--host", "specs/tiny.attn", "--list")
    assert (done.code, done.out.split()) == (0, ["tiny", "triton"])


@pytest.mark.parametrize(("mode", "first"), [("--papers", "d64 h32 n1024 full"), ("--ranks=2", "causal 64k")])
def test_benchmarks_of_claims_are_found_from_any_folder(run: Run, mode: str, first: str) -> None:
    done = run("bench", mode, "--list")
    assert done.code == 0
    assert " ".join(done.out.split()).startswith(first)


@pytest.mark.parametrize("more", [("bench",), ("bench", "--decode"), ("tune",)])
def test_an_unknown_target_is_told_before_a_gpu_is_sought(run: Run, more: tuple[str, ...]) -> None:
    done = run(*more, "--target", "cuda.sm_79")
    assert done.code == 2
    assert "there is no target 'cuda.sm_79'" in done.err
    assert "cuda.sm_80" in done.err


def test_fmt_says_why_a_file_changes_in_which_no_line_does(run: Run, folder: Path) -> None:
    tiny = folder / "specs" / "tiny.attn"
    assert run("fmt").code == 0
    tiny.write_bytes(tiny.read_bytes().replace(b"\n", b"\r\n"))
    done = run("fmt", "--diff")
    assert (done.code, done.out) == (1, "specs/tiny.attn: only the ends of its lines change\n")


def test_samples_that_are_no_tensors(run: Run, folder: Path) -> None:
    (folder / "samples.pt").write_bytes(b"\x80\x05what")
    unified = TINY.replace(
        "loops = [q, kv]", "softmax = unified_max(phi = 0, bounds = [-9, 9], fallback = online)"
    )
    (folder / "specs" / "tiny.attn").write_text(unified)
    done = run("calibrate", "specs/tiny.attn", "--samples", "samples.pt")
    assert done.code == 2
    assert "samples.pt is not a file of tensors that torch.save wrote" in done.err
    assert "weights_only" not in done.err


def test_a_link_to_nothing(run: Run, folder: Path) -> None:
    (folder / "specs" / "linked.attn").symlink_to("gone.attn")
    done = run("check", "specs/linked.attn")
    assert done.code == 2
    assert "'specs/linked.attn' is a link to nothing\n   = help: it points to 'gone.attn'" in done.err


@pytest.mark.parametrize("command", ["check", "fmt", "compile", "verify"])
def test_hidden_files_of_a_folder_are_none_of_its_specs(run: Run, folder: Path, command: str) -> None:
    """Emacs keeps a link to nothing beside a file that is being written, and Vim a copy."""
    specs = folder / "other"
    specs.mkdir()
    (specs / ".#window.attn").symlink_to("somebody@host.1:2")
    (specs / ".old.attn").write_text("not a spec")
    done = run(command, "other")
    assert done.code == 2
    assert "no .attn files in folder 'other'" in done.err
    (specs / "window.attn").symlink_to("nowhere")
    done = run(command, "other")
    assert "'other/window.attn' is a link to nothing" in done.err


def test_a_file_unlike_any_other_gets_an_example(run: Run, folder: Path) -> None:
    done = run("demo", "specs/far.attn")
    assert done.code == 2
    assert "there is no file 'specs/far.attn'\n   = help: name a spec file, such as" in done.err


def test_a_spec_of_attncs_own_is_told_how_to_have(run: Run, folder: Path) -> None:
    done = run("verify", "specs/local_sink.attn")
    assert done.code == 2
    assert "= help: it is one of attnc's own: 'attnc new local_sink --like local_sink' writes it" in done.err
    assert run("new", "local_sink", "--like", "local_sink").code == 0
    assert (folder / "specs" / "local_sink.attn").read_text().count("local_sink") >= 2


def test_a_spec_of_several_attentions_is_written_under_its_own_name_alone(run: Run) -> None:
    assert run("new", "warp_split", "--like", "warp_split").code == 0
    done = run("new", "mine", "--like", "warp_split")
    assert done.code == 2
    assert "'attnc new warp_split --like warp_split' writes all of them" in done.err


def test_a_file_that_cannot_be_written_is_named_itself(run: Run, folder: Path) -> None:
    """Not the temporary file that would have become it."""
    place = folder / "generated" / "tiny" / "triton" / "f16_w16.py"
    place.mkdir(parents=True)
    done = run("compile", "--force")
    assert done.code == 2
    assert done.err.startswith("in the way generated/tiny/triton/f16_w16.py (no file)\nerror: 1 file in ")
    assert [path.name for path in folder.glob("generated/**/*")] == ["tiny", "triton", "f16_w16.py"]


def test_a_cache_that_cannot_be_made_says_what_helps(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(folder / "specs" / "tiny.attn" / "cache"))
    done = run("verify", "specs/tiny.attn", "--count", "1")
    assert done.code == 2
    assert "tiny.attn/cache cannot be made (Not a directory); set ATTNC_CACHE_DIR to" in done.err


def test_no_specs_at_all(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    done = run("compile")
    assert done.code == 2
    assert "there is no folder 'specs' here" in done.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(run: Run, folder: Path) -> None:
    (folder / "specs" / "tiny.attn").chmod(0)
    done = run("compile")
    assert done.code == 2
    assert "permission denied" in done.err


def test_output_folder_that_is_a_file(run: Run, folder: Path) -> None:
    (folder / "generated").write_text("")
    done = run("compile")
    assert done.code == 2
    assert_is_a_message(done.err)


def test_device_and_pipe_are_read_like_files(run: Run, folder: Path) -> None:
    assert run("check", "/dev/null").code == 0


@pytest.mark.parametrize("arguments", [("compile", "--chek"), ("frobnicate",), ("fmt", "--out", "x")])
def test_wrong_usage(run: Run, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "sm_91"), "there is no architecture 'sm_91'"),
        (("--variant", "bf16_w61"), "did you mean 'bf16_w16'?"),
        (("--config", "99"), "there is no config 99"),
    ],
)
def test_explain_names_what_there_is(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run("explain", "specs/tiny.attn", "--no-compile", *arguments)
    assert done.code == 2
    assert message in done.err


def test_explain_refuses_a_device_that_the_target_is_not_for(run: Run, folder: Path) -> None:
    text = (folder / "specs" / "tiny.attn").read_text()
    (folder / "specs" / "newer.attn").write_text(text.replace("for triton", "for cuda.sm_100"))
    done = run("explain", "specs/newer.attn", "--no-compile", "--arch", "sm_90")
    assert (done.code, "'cuda.sm_100' is not for sm_90" in done.err) == (2, True), done.err
    assert "on sm_100" in run("explain", "specs/newer.attn", "--no-compile").out


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_timing_without_a_gpu(run: Run, command: str) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(command)
    assert done.code == 2
    assert "needs a CUDA GPU" in done.err


def test_a_bug_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr("attnc.build.compile_spec", broken)
    assert main(["compile"]) == 3
    err = capsys.readouterr().err
    assert "this is a bug in attnc: AssertionError: planted" in err
    assert "ATTNC_DEBUG=1" in err
    assert "CONTRIBUTING.md" in err
    assert "Traceback" not in err
    monkeypatch.setenv("ATTNC_DEBUG", "1")
    main(["compile"])
    assert "Traceback" in capsys.readouterr().err


def test_memory_that_others_have_is_no_bug(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfMemoryError(RuntimeError):
        """As PyTorch's is called."""

    def full(*_: object, **__: object) -> None:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB. Process 1 has 12 GiB")

    monkeypatch.setattr("attnc.build.compile_spec", full)
    assert main(["compile"]) == 2
    err = capsys.readouterr().err
    assert "error: CUDA out of memory. Tried to allocate 4 GiB\n" in err
    assert "CUDA_VISIBLE_DEVICES" in err


def test_a_reader_that_goes_away(folder: Path) -> None:
    writer = f"{sys.executable} -m attnc explain specs/tiny.attn --no-compile --json"
    command = f"{writer} | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PYTHONPATH": searched(), "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


#: `attnc verify` of a module that never comes to an end.
ENDLESS = """
import signal, sys
from attnc.cli import main
from attnc.cli.judge import Judge

def verify(*arguments, **options):
    print("at work", flush=True)
    signal.pause()

Judge.verify = verify
sys.argv = ["attnc", "verify"]
sys.exit(main())
"""


def heed_interrupts() -> None:
    """What a shell starts behind a `&` ignores them, and so would all that the tests start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("send", [os.kill, os.killpg])  # somebody's kill; a terminal, to all of a group
def test_an_interrupt_is_a_word_and_130(folder: Path, send: Callable[[int, int], None]) -> None:
    environment = {**os.environ, "PYTHONPATH": searched()}
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=heed_interrupts,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        send(process.pid, signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, err) == (130, "error: interrupted\n")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("closed", ["1", "2"])
def test_streams_that_the_caller_closed(folder: Path, closed: str) -> None:
    command = f'exec "{sys.executable}" -m attnc check {closed}>&-'
    environment = {**os.environ, "PYTHONPATH": searched()}
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == (b"1 spec: 0 errors, 0 warnings\n" if closed == "1" else b"")


@pytest.mark.parametrize("arguments", [("check", "--json"), ("explain", "specs/tiny.attn", "--ir")])
def test_a_reader_who_has_gone_is_no_finding(folder: Path, arguments: Sequence[str]) -> None:
    """Or `attnc ... | head -1` would fail in a shell with `pipefail`, as if a spec were wrong."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "attnc", *arguments]
    environment = {**os.environ, "PYTHONPATH": searched()}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=writing, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, b"Traceback" in done.stderr) == (141, False)


def test_a_target_without_a_schedule_is_told_from_one_that_there_is_not(run: Run, folder: Path) -> None:
    (folder / "specs").mkdir(exist_ok=True)
    (folder / "specs" / "a.attn").write_text(
        "attention a {\n  input q: bf16[B, M, H, 64]\n  input k, v: bf16[B, N, H, 64]\n  score = dot(q, k)\n"
        "  normalize = softmax\n  output o: bf16[B, M, H, 64]\n}\nschedule a for triton { }\n"
    )
    done = run("verify", "specs/a.attn", "--target", "cuda.sm_90a")
    assert done.code == 2
    assert "there is no target 'cuda.sm_90a' among the schedules" in done.err
    assert "schedule NAME for cuda.sm_90a { }" in done.err


def test_an_interrupt_before_the_command_is_known_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While modules are imported, which takes a third of a second."""

    class Interrupted:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "attnc.cli.app", Interrupted())  # in its place
    assert main(("check",)) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_other_failures_of_finalisers_go_where_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that calls `main` may have a hook of its own."""
    heard: list[str] = []

    class Finalised:
        def __del__(self) -> None:
            raise ValueError("said elsewhere")

    def work(argv: object) -> int:
        Finalised()
        return 0

    monkeypatch.setattr(sys, "unraisablehook", lambda raised: heard.append(str(raised.exc_value)))
    monkeypatch.setitem(sys.modules, "attnc.cli.app", SimpleNamespace(run_guarded=work))
    assert main(("check",)) == 0
    assert heard == ["said elsewhere"]


def test_an_interrupt_in_a_finaliser_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python prints what is raised there, and goes on."""
    ended = threading.Event()

    class Finalised:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)
            ended.is_set()  # where a signal is looked at, at the latest

    def work(argv: object) -> int:
        Finalised()
        ended.wait(60)
        return 0

    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.getsignal(signal.SIGALRM)
    monkeypatch.setitem(sys.modules, "attnc.cli.app", SimpleNamespace(run_guarded=work))
    try:
        assert main(("check",)) == 130
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGALRM, before[1])
    assert capsys.readouterr().err == "error: interrupted\n"
