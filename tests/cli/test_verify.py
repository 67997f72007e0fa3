"""`attnc verify`, `fuzz`, `demo` and `explain` on a small spec, interpreted.

In this process where it interprets already; `explain`, which compiles, has one of its own, since Triton
decides when it is imported which of the two it does.
"""

import json
import subprocess
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnc.cli import demo
from attnc.cli import verify as command
from attnc.cli.judge import Judge, Judged
from attnc.runtime.nvrtc import nvrtc_version
from attnc.verify import trials
from attnc.verify.case import Case, Kept
from attnc.verify.record import Record, Records, Supported, dump, hash_of, read, support_hash
from attnc.verify.search import Report
from attnc.verify.simt import available
from attnc.verify.verdict import Verdict
from tests.cli.conftest import TINY, Run
from tests.processes import compiling

pytestmark = pytest.mark.slow

VARIANT = ("--variant", "bf16_w16")


def test_verify_reports_the_share_of_the_bound(run: Run) -> None:
    done = run("verify", *VARIANT, "--count", "3")
    assert done.code == 0, done.err
    assert done.out.startswith("ok    tiny bf16_w16: ")
    assert " cases in " in done.out
    assert "% of the bound" in done.out


@pytest.mark.skipif(not available(), reason="CUDA kernels run on the CPU through g++")
def test_verify_takes_the_first_target_of_an_attention_without_triton(run: Run, folder: Path) -> None:
    lines = TINY.replace("for triton", "for cuda.sm_80").replace("tile.kv in {32, 64}", "tile.kv = 64")
    (folder / "specs" / "tiny.attn").write_text(lines)
    done = run("verify", *VARIANT, "--count", "2")
    assert done.code == 0, done.err
    assert done.out.startswith("ok    tiny bf16_w16 for cuda.sm_80: ")
    again = run("verify", *VARIANT, "--target", "triton")
    assert (again.code, "there are those for cuda.sm_80" in again.err) == (2, True)


def test_verify_as_json_and_one_case(run: Run) -> None:
    done = run("verify", "specs/tiny.attn", *VARIANT, "--count", "2", "--json")
    (report,) = json.loads(done.out)
    assert (report["ok"], report["attention"]) == (True, "tiny")
    assert report["cases"] >= 2
    assert 0 < report["worst"] <= 1
    case = json.dumps({"dims": {"B": 1, "H": 1, "M": 3, "N": 40}, "seed": 4})
    done = run("verify", "specs/tiny.attn", *VARIANT, "--case", case)
    assert (done.code, done.out.split(";")[0]) == (0, "within the bound")


def test_verify_says_what_its_cases_have_met(run: Run) -> None:
    done = run("verify", *VARIANT, "--count", "3", "--coverage")
    assert done.code == 0, done.err
    assert "\n      no rows " in done.out
    assert " points (those in brackets were not met), " in done.out
    assert "no case had: " in done.out
    done = run("verify", *VARIANT, "--count", "1", "--json")
    (report,) = json.loads(done.out)
    assert {met["quantity"] for met in report["coverage"]["boundaries"]} >= {"rows", "keys"}


def test_verify_leaves_out_what_has_a_record_of_its_text(run: Run, folder: Path) -> None:
    """And runs one module all the same where the code beside kernels has changed since."""
    assert run("compile", "specs/tiny.attn").code == 0
    generated = folder / "generated"
    paths = sorted(path.relative_to(generated).as_posix() for path in generated.glob("tiny/triton/*_w*.py"))
    first, *others = paths
    assert others
    noted = {path: recorded(hash_of(generated / path)) for path in others}
    support = {"triton": Supported(sha256=support_hash(generated), device="d", modules=1)}
    records = Records(verified=noted, support=support)
    (generated / "verified.json").write_text(dump(records))

    def titles(*options: str) -> list[str]:
        done = run("verify", "--lapsed", "--count", "1", *options)
        assert done.code == 0, done.err
        return [line.split(":")[0].removeprefix("ok    ") for line in done.out.splitlines()]

    assert titles() == [f"tiny {Path(first).stem}"]
    records = replace(records, verified={**noted, first: recorded(hash_of(generated / first))})
    (generated / "verified.json").write_text(dump(records))
    assert titles() == ["every module has a record of its text"]
    assert titles("--json") == ["[]"]
    (generated / "verified.json").write_text(dump(replace(records, support={})))
    assert len(titles()) == 1
    (generated / first).unlink()
    done = run("verify", "--lapsed")
    assert (done.code, f"there is no generated/{first}" in done.err) == (2, True)


def test_verify_carries_records_to_other_names(run: Run, folder: Path) -> None:
    """Of a module whose text has changed since the commit, and not its machine code."""
    lines = TINY.replace("for triton", "for cuda.sm_80").replace("tile.kv in {32, 64}", "tile.kv = 64")
    (folder / "specs" / "tiny.attn").write_text(lines)
    assert run("compile", "specs/tiny.attn").code == 0
    generated = folder / "generated"
    first, second, *_ = sorted(
        path.relative_to(generated).as_posix() for path in generated.glob("tiny/cuda*/*_w*.py")
    )
    record = replace(recorded(""), device="NVIDIA H200", toolchain=f"nvrtc {nvrtc_version()}")
    noted = {name: replace(record, sha256=hash_of(generated / name)) for name in (first, second)}
    (generated / "verified.json").write_text(dump(Records(verified=noted)))
    done = run("verify", "--carry", "HEAD")
    assert (done.code, "git has no generated/ of 'HEAD'" in done.err) == (2, True)
    identity = ("-c", "user.name=n", "-c", "user.email=e")
    for arguments in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    for name, change in ((first, ("q_lo", "first_row")), (second, ("float SCALE = 0.", "float SCALE = 1."))):
        kernel = (generated / name).with_name(name.rpartition("_")[2].replace(".py", ".cu"))
        text = kernel.read_text()
        assert change[0] in text
        kernel.write_text(text.replace(*change))
    done = run("verify", "--carry", "HEAD")
    assert done.code == 1, done.err
    told = done.out.splitlines()
    assert told[0].startswith(f"carried  {first}: ")
    assert told[1].startswith(f"left     {second}: other machine code: tiny_forward")
    assert told[2] == "1 carried, 1 left"
    now = read(generated).verified
    assert (now[first].sha256, now[second]) == (hash_of(generated / first), noted[second])
    done = run("verify", "--carry", "HEAD", "--record")
    assert (done.code, "--carry and --record are not one run" in done.err) == (2, True)


def recorded(sha256: str) -> Record:
    return Record(sha256=sha256, device="d", toolchain="t", cases=1, worst=0.5, where="")


def test_large_sizes_need_a_gpu(run: Run) -> None:
    done = run("verify", *VARIANT, "--large")
    assert (done.code, "large sizes need a GPU" in done.err) == (2, True)


def test_records_are_written_as_modules_are_verified(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("compile")
    verify, done = Judge.verify, list[str]()

    def interrupted(judge: Judge, *given: Any, **limits: Any) -> Judged:
        if done:
            raise KeyboardInterrupt
        done.append(judge.path)
        return verify(judge, None, 2, 60.0)

    def made(sha256: str, target: str, report: Report) -> Record:
        return Record(sha256=sha256, device="", toolchain="", cases=report.examples, worst=0.0, where="")

    monkeypatch.setattr(command, "read_committed", lambda name: "")
    monkeypatch.setattr(command, "record_of", made)
    monkeypatch.setattr(Judge, "verify", interrupted)
    assert run("verify", "--record").code == 130
    assert list(read(folder / "generated").verified) == done


def test_a_malformed_record_is_refused_before_anything_is_run(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("compile")
    (folder / "generated" / "verified.json").write_text("{", encoding="utf-8")
    monkeypatch.setattr(command, "read_committed", lambda name: "")
    monkeypatch.setattr(Judge, "verify", lambda *given, **limits: pytest.fail("it was run"))
    done = run("verify", "--record")
    assert done.code == 2
    assert "restore it from version control" in done.err


def test_a_case_that_is_none(run: Run) -> None:
    for text in ("{", "[]", '{"seed": 1}', '{"dims": {}, "colour": 1}'):
        done = run("verify", *VARIANT, "--case", text)
        assert done.code == 2, text
        assert "not a case" in done.err


def test_a_case_is_held_to_the_rule_that_it_broke(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That another target disagrees, for one, which the case alone does not show."""
    kept = Kept(case=Case(dims={"B": 1, "H": 1, "M": 3, "N": 4}), rule="cuda.sm_80")
    monkeypatch.setattr(trials, "violations", lambda subject, case: ())
    monkeypatch.setattr(trials, "rule_of", lambda peers, name: lambda subject, case: [f"{name}: differs"])
    (folder / "kept.json").write_text(kept.to_json())
    for given in (("verify", "--case", kept.to_json()), ("fuzz", "--repro", "kept.json")):
        done = run(given[0], "specs/tiny.attn", *VARIANT, *given[1:])
        assert (done.code, "cuda.sm_80: differs" in done.out) == (1, True), done.err
    assert run("verify", "specs/tiny.attn", *VARIANT, "--case", kept.case.to_json()).code == 0


def test_a_failure_runs_again_for_the_target_that_failed(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where another is asked for, the answer says which it was."""
    text = (folder / "specs/tiny.attn").read_text()
    schedule = "schedule tiny for cuda.sm_80 { loops = [q, kv], tile.q = 16, tile.kv = 16, warps = 1 }"
    (folder / "specs/tiny.attn").write_text(f"{text}\n{schedule}\n")
    right = Verdict(ok=True, message="within the bound", worst=0.25)
    monkeypatch.setattr(Judge, "verdict", lambda judge, kept, **how: right)
    kept = Kept(case=Case(dims={"B": 1, "H": 1, "M": 3, "N": 4}), target="cuda.sm_80")
    (folder / "kept.json").write_text(kept.to_json())
    given = ("fuzz", "specs/tiny.attn", "--variant", "bf16_w16", "--repro", "kept.json")
    assert run(*given).out == "bf16_w16 for cuda.sm_80: within the bound; 25 % of the bound\n"
    elsewhere = run(*given, "--target", "triton").out
    said = "within the bound; 25 % of the bound; it failed for cuda.sm_80\n"
    assert elsewhere == f"bf16_w16 for triton: {said}"


def test_a_failure_of_a_target_that_the_spec_has_lost(run: Run, folder: Path) -> None:
    kept = Kept(case=Case(dims={"B": 1, "H": 1, "M": 3, "N": 4}), target="cuda.sm_80")
    (folder / "kept.json").write_text(kept.to_json())
    given = ("fuzz", "specs/tiny.attn", *VARIANT, "--repro", "kept.json")
    done = run(*given)
    assert done.code == 2
    lost = "there is no target 'cuda.sm_80' among the schedules"
    assert f"the case in 'kept.json' failed for cuda.sm_80, and {lost}" in done.err
    assert "add one: schedule NAME for cuda.sm_80 { }" in done.err
    assert "--target runs the case for another" in done.err
    assert run(*given, "--target", "triton").code == 0
    mistaken = run(*given, "--target", "cuda.sm_8").err
    assert "failed for" not in mistaken
    assert "there is no target 'cuda.sm_8'" in mistaken


def test_a_case_of_another_module(run: Run) -> None:
    done = run("verify", *VARIANT, "--case", '{"dims": {"B": 1, "M": 3, "N": 4}}')
    assert done.code == 2
    assert "not a case of tiny bf16_w16: it has no size H" in done.err


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"M": 10**19}, "not a case: its size 'M' is 10000000000000000000"),
        ({"M": 2**31 - 1}, "the case takes more memory than there is"),
        ({"B": 2**31 - 1, "M": 2**31 - 1}, "the case takes more memory than there is"),
        ({"B": 2**31 - 1, "H": 2**31 - 1, "M": 2**31 - 1}, "the case takes more memory than there is"),
    ],
)
def test_a_case_that_is_too_large(sizes: dict[str, int], said: str, run: Run) -> None:
    case = json.dumps({"dims": {"B": 1, "H": 1, "M": 3, "N": 4} | sizes})
    done = run("verify", "specs/tiny.attn", *VARIANT, "--case", case)
    assert (done.code, said in done.err) == (2, True), done.err


def test_fuzz(run: Run, folder: Path) -> None:
    done = run("fuzz", "specs/tiny.attn", *VARIANT, "--examples", "4", "--seed", "1")
    assert done.code == 0, done.err
    assert done.out.startswith("ok    tiny bf16_w16: ")
    assert not (folder / ".attnc").exists()
    missing = run("fuzz", "specs/tiny.attn", "--repro", "nowhere.json")
    assert (missing.code, "there is no file 'nowhere.json'" in missing.err) == (2, True)


def test_demo_writes_runs_and_verifies(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[str] = []

    def announce(label: str, total: int | None) -> AbstractContextManager[None]:
        announced.append(label)
        return nullcontext()

    monkeypatch.setattr(demo, "progress", announce)
    done = run("demo", "specs/tiny.attn")
    assert done.code == 0, done.err
    # each takes seconds, so a terminal says what is under way
    assert announced == ["compiling tiny.attn", "planning tiny.attn", "running the kernel and its reference"]
    assert "generated/tiny/triton/f16_w16.py" in done.out
    assert "verified" in done.out
    assert (folder / "generated" / "tiny" / "triton" / "f16_w16.py").is_file()


@pytest.mark.skipif(not available(), reason="no g++ to run CUDA with")
def test_demo_of_a_spec_for_cuda_alone(run: Run, folder: Path) -> None:
    tiny = TINY.replace("for triton", "for cuda.sm_80").replace("tile.kv in {32, 64}", "tile.kv = 64")
    (folder / "specs" / "tiny.attn").write_text(tiny)
    done = run("demo", "specs/tiny.attn")
    assert done.code == 0, done.err
    assert "needs torch, cupy and generated/_support)" in done.out
    assert "verified" in done.out


def test_demo_of_a_decode_kernel_shows_a_decode_step(run: Run, folder: Path) -> None:
    (folder / "specs" / "tiny.attn").write_text(TINY.replace("loops = [q, kv]", "loops = [kv]"))
    done = run("demo", "specs/tiny.attn")
    assert done.code == 0, done.err
    assert "(M = 1, N = 512, tiles of 64)" in done.out


def test_demo_of_a_spec_that_is_wrong(run: Run, folder: Path) -> None:
    (folder / "specs" / "tiny.attn").write_text(TINY.replace("window(W, 0)", "window(W)"))
    done = run("demo", "specs/tiny.attn")
    assert done.code == 1
    assert "error[E0" in done.err
    assert not (folder / "generated").exists()


def test_doctor(run: Run) -> None:
    done = run("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(done.out)}
    assert {"attnc", "python", "torch", "triton", "cache", "interpreter"} <= set(findings)
    assert {"cupy", "nvrtc", "g++"} <= set(findings)
    assert all(finding["fix"] for finding in findings.values() if finding["state"] == "missing")
    assert done.code == any(finding["state"] == "missing" for finding in findings.values())


def test_explain_reads_registers_from_the_binary(folder: Path) -> None:
    done = compiling(
        "from attnc.cli import main; raise SystemExit(main())", "explain", "specs/tiny.attn", "--json"
    )
    data = json.loads(done.stdout)
    assert data["compiled"] is None or data["compiled"]["registers"] > 0


def test_explain_prints_the_plan(run: Run) -> None:
    done = run("explain", "specs/tiny.attn", "--ir")
    assert done.code == 0, done.err
    assert done.out.startswith("module tiny ")
    assert "for kv_lo in " in done.out
    refused = run("explain", "specs/tiny.attn", "--ir", "--json")
    assert refused.code == 2
    assert "--ir prints text" in refused.err


ORDERED = TINY.replace("  output o", "  order = absolute(64)\n  output o").replace("{32, 64}", "{32}")


def test_rows_are_compared_bit_for_bit(run: Run, folder: Path) -> None:
    (folder / "specs" / "tiny.attn").write_text(ORDERED)
    done = run("verify", *VARIANT, "--invariant")
    assert done.code == 0, done.err
    assert done.out.startswith("ok    tiny for triton, bf16_w16: ")
    assert done.out.endswith("; the same bits\n")
    done = run("verify", *VARIANT, "--invariant", "--json")
    (report,) = json.loads(done.out)
    assert (report["ok"], report["variants"], report["broken"]) == (True, ["bf16_w16"], [])


def test_rows_of_an_attention_without_an_order_are_not_compared(run: Run) -> None:
    done = run("verify", "--invariant")
    assert done.code == 2
    assert "no attention of these promises that rows keep their bits" in done.err
    done = run("verify", "--invariant", "--large")
    assert "--invariant and --large are not one run" in done.err
