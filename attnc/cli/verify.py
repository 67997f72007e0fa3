"""`attnc verify`, with --record and --sanitize: the files of generated/ that are judged, and what is noted of
them there; and `attnc fuzz`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnc.cli.compile import JSON, SPEC, SPECS
from attnc.cli.console import Mistake, find_specs, note, one_spec, paint, progress, say, say_json, say_lines
from attnc.cli.judge import (
    ATTENTION,
    FAILURES,
    TARGET,
    VARIANT,
    Judge,
    Judged,
    choose_judges,
    conclude,
    parse_kept,
)

if TYPE_CHECKING:
    from attnc.verify.case import Kept
    from attnc.verify.record import Record, Records
    from attnc.verify.search import Report


#: Cases that a record speaks of at least, however slow they are.
_RECORDED = 12

#: Options of which one would be passed over beside the other.
_APART = (
    *product(["--ranks"], ["--sanitize", "--case", "--large", "--record", "--coverage", "--lapsed"]),
    *product(["--sanitize"], ["--case", "--large", "--coverage"]),
    *product(["--case"], ["--record", "--coverage", "--json", "--lapsed"]),
    *product(["--large"], ["--lapsed"]),
    *product(["--carry"], ["--ranks", "--sanitize", "--case", "--large", "--record", "--coverage", "--json"]),
    ("--carry", "--lapsed"),
    *product(
        ["--invariant"],
        ["--ranks", "--sanitize", "--case", "--large", "--record", "--coverage", "--lapsed", "--carry"],
    ),
)


def verify(
    specs: SPECS = None,
    attention: ATTENTION = None,
    variant: VARIANT = None,
    target: TARGET = None,
    count: Annotated[int, typer.Option(min=1, help="Cases of the array for each variant.")] = 24,
    seconds: Annotated[float, typer.Option(min=0, help="Time for each variant.")] = 60.0,
    case: Annotated[str | None, typer.Option(help="Run this one case, as a failure printed it.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Verify the files of generated/ and note it there; needs a GPU.")
    ] = False,
    is_lapsed: Annotated[
        bool,
        typer.Option(
            "--lapsed", help="Only modules of generated/ without a record of their text, for every target."
        ),
    ] = False,
    is_sanitized: Annotated[
        bool,
        typer.Option("--sanitize", help="Run the files of generated/ under compute-sanitizer instead."),
    ] = False,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="List the boundaries of the plans that cases have met.")
    ] = False,
    is_large: Annotated[
        bool, typer.Option("--large", help="Run sizes that only a GPU reaches instead; takes minutes.")
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option(
            "--carry",
            metavar="REVISION",
            help="Run nothing: carry records to texts with the machine code of this git revision.",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Run the attentions on so many processes instead (context parallelism)."),
    ] = None,
    is_invariant: Annotated[
        bool,
        typer.Option(
            "--invariant",
            help="Compare bits of rows instead, between calls and schedules ('order = absolute').",
        ),
    ] = False,
    as_json: JSON = False,
) -> None:
    """Run kernels on chosen inputs and judge every element against the float64 reference.

    The tolerance of an element is the error bound that the plan proves for it. Kernels run on the GPU where
    there is one, and are interpreted elsewhere. The cases are the same in every run: they take sizes at the
    boundaries of the plan (of tiles, splits, searches and sections: one less, as many, one more), and combine
    layouts, lengths, styles of inputs, configs and ways to call in pairs. --coverage lists the boundaries
    that they met. Cases that failed before are run again.

    Memory around tensors is guarded, and the text of kernels is searched for offsets that are computed in 32
    bits, and for waits without their instruction. Every eighth case is also checked for properties that hold
    between runs: determinism, invariance, identities of gradients, and launches that do not depend on the
    calls before. Beside a GPU a few more cases of each CUDA module are simulated, if there is g++: copies
    come late there, and warps run in any order, which shows waits that are missing.

    --record needs twelve cases or more of each module, and takes up to ten times the time for them. --lapsed
    leaves out modules whose record is up to date. --large runs sizes that need a GPU: thousands of rows,
    sequences and splits, 65536 heads.

    --ranks runs each attention, forward and gradients, in several processes and with every strategy: on a GPU
    each where there are enough, otherwise interpreted, over gloo. --invariant is for attentions with 'order =
    absolute(...)': it computes each row in prompts, in chunks of them, in decode steps and in drafts, alone
    and in batches, with pages anywhere, under every schedule and config of a target, and compares the bits.

    --carry is for changes of a kernel's text that do not change the kernel, such as other names. It compiles
    the text of the given revision and the new one with the compiler that the record names. If the machine
    code of every config is the same, and launches are declared alike, it moves the record to the new text.
    Where comments, docstrings, line breaks and annotations alone have changed, it does so for Triton's
    modules, too. It needs git and NVRTC, but no GPU.

    Example: attnc verify specs/causal_gqa.attn --variant bf16_d64
    """
    modes = {"--ranks": ranks is not None, "--sanitize": is_sanitized, "--case": case is not None}
    modes |= {"--large": is_large, "--record": record, "--coverage": coverage, "--json": as_json}
    modes |= {"--invariant": is_invariant, "--lapsed": is_lapsed, "--carry": revision is not None}
    for first, second in _APART:
        if modes[first] and modes[second]:
            raise Mistake(f"{first} and {second} are not one run", "run one after the other")
    if revision is not None:
        from attnc.cli.carry import carry

        carry(revision, GENERATED, known_records(), update_records)
        return
    if ranks is not None:
        from attnc.cli.ranks import verify_ranks

        verify_ranks(
            find_specs(specs or []), attention, variant, target or "triton", ranks, count, as_json=as_json
        )
        return
    if is_invariant:
        from attnc.cli.invariant import verify_invariant

        verify_invariant(find_specs(specs or []), attention, variant, target, as_json=as_json)
        return
    kept = None if case is None else parse_kept(case)
    target = target or (kept and kept.target) or None
    judges = choose_judges(find_specs(specs or []), attention, variant, target, every_target=is_lapsed)
    if is_lapsed:
        judges = _list_lapsed(judges, is_sanitized=is_sanitized)
        if not judges:
            say_lines("[]") if as_json else say("every module has a record of its text")
            return
    if is_sanitized:
        attentions = [judge for judge in judges if not judge.is_projection]
        _sanitize_modules(attentions, is_recorded=record, as_json=as_json)
    elif kept is not None:
        _run(judges, kept, large=is_large)
    else:
        texts = {judge.path: read_committed(judge.path) for judge in judges} if record else {}
        hashes = {path: committed_hash(path) for path in texts}
        if record:
            known_records()  # before anything is run that could not be noted
        results, noted = [], 0
        for judge in judges:
            text = texts.get(judge.path)
            results.append(
                judge.verify_large(text, seconds)
                if is_large
                else judge.verify(text, count, seconds, least=_RECORDED if record else 0)
            )
            if not as_json:
                results[-1].show(covered=coverage)
            if record and results[-1].report.ok and not results[-1].report.left_out:
                _note(results[-1], hashes, large=is_large)
                noted += 1
        if record:
            say(f"wrote {records_path()}: {noted} verified")
        conclude(results, as_json=as_json)


def _list_lapsed(judges: Sequence[Judge], *, is_sanitized: bool) -> tuple[Judge, ...]:
    """Returns the modules of whose text there is no record, and of each target for which the support package
    has none the first; is_sanitized: those that the sanitizer has not watched.
    """
    from attnc.verify.record import lapsed_support, list_lapsed, target_of
    from attnc.verify.runners import runner_of

    if is_sanitized:
        judges = [judge for judge in judges if runner_of(judge.target).sanitizers and not judge.is_projection]
    records, paths = known_records(), [judge.path for judge in judges]
    for path in paths:
        require_committed(path)
    wanted = set(list_lapsed(GENERATED, paths, records.sanitized if is_sanitized else records.verified))
    if not is_sanitized:
        met = set(map(target_of, wanted))
        for target in lapsed_support(GENERATED, paths, records):
            if target not in met:
                wanted.add(next(path for path in paths if target_of(path) == target))
    return tuple(judge for judge in judges if judge.path in wanted)


def _run(judges: Iterable[Judge], kept: Kept, *, large: bool) -> None:
    failed = False
    for judge in judges:
        verdict = judge.verdict(kept, large=large)
        failed |= not verdict.ok
        share = f"{100 * verdict.worst:.0f} % of the bound at {verdict.where or '-'}"
        say(f"{verdict.message}; worst error {share}")
    if failed:
        raise typer.Exit(1)


def _note(judged: Judged, hashes: Mapping[str, str], *, large: bool) -> None:
    """Writes down a file whose cases were all right, before the next one is run; large: of one that has a
    record of its text.
    """
    from attnc.verify.record import support_hash

    path = judged.judge.path
    new = {path: record_of(hashes[path], judged.judge.target, judged.report)}
    support = support_hash(GENERATED)

    def change(known: Records) -> Records:
        changed = known.with_large(new) if large else known.with_verified(new)
        return changed.with_support(support, new)

    update_records(change)


def _sanitize_modules(judges: Sequence[Judge], *, is_recorded: bool, as_json: bool) -> None:
    """Runs the files of generated/ under every tool, says what was found, and notes those without a finding.

    Raises Mistake without CUDA modules, a GPU or compute-sanitizer; Exit(1) if anything was found."""
    from attnc.verify.runners import runner_of
    from attnc.verify.sanitize import Job, find_sanitizer, sanitize, version
    from attnc.verify.subject import has_gpu

    if not all(runner_of(judge.target).sanitizers for judge in judges):
        raise Mistake("the sanitizer runs over CUDA modules", "add '--target cuda.sm_80'")
    if not has_gpu():
        raise Mistake("compute-sanitizer needs a GPU", "'attnc verify' without --sanitize runs anywhere")
    texts = {judge.path: read_committed(judge.path) for judge in judges}
    hashes = {path: committed_hash(path) for path in texts}
    sanitizer = find_sanitizer()
    if sanitizer is None:
        raise Mistake("compute-sanitizer was not found", "it is part of the CUDA toolkit; set CUDA_HOME")
    jobs = tuple(
        Job(
            name=judge.path,
            spec=judge.module.variant.source.path,
            attention=judge.attention,
            variant=judge.variant,
            target=judge.target,
            tools=runner_of(judge.target).sanitizers,
        )
        for judge in judges
    )
    tools = tuple(dict.fromkeys(tool for job in jobs for tool in job.tools))
    with progress("sanitize", sum(len(job.tools) for job in jobs)) as bar:
        outcome = sanitize(sanitizer, jobs, processes=os.cpu_count() or 2, progress=bar.advance)
    if as_json:
        found = [{"module": f.name, "tool": f.tool, "message": f.message} for f in outcome.findings]
        told = {"tools": tools, "launches": dict(outcome.launches), "findings": found}
        say_json(told)
    else:
        for finding in outcome.findings:
            say(paint("FOUND", "1;31"), f" {finding.name}: {finding.tool}: {finding.message}")
        launches = sum(outcome.launches.values())
        clean = f"{len(outcome.clean)} of {len(jobs)} modules are clean under {', '.join(tools)}"
        say(f"{clean}; {launches} launches each")
    if is_recorded:
        names = {job.name: f"{version(sanitizer)}: {', '.join(job.tools)}" for job in jobs}
        _record(hashes, outcome.clean, outcome.launches, names)
    if outcome.findings:
        raise typer.Exit(1)


def _record(
    hashes: Mapping[str, str], clean: Sequence[str], launches: Mapping[str, int], tools: Mapping[str, str]
) -> None:
    from attnc.runtime.trial import device_name
    from attnc.verify.record import Sanitized

    new = {
        path: Sanitized(sha256=hashes[path], device=device_name(), tool=tools[path], launches=launches[path])
        for path in clean
    }
    written = update_records(lambda known: known.with_sanitized(new))
    say(f"wrote {written}: {len(new)} sanitized")


GENERATED = Path("generated")


def read_committed(name: str) -> str:
    """Reads the text of a file below generated/. Raises Mistake where a record would say nothing."""
    from attnc.verify.subject import has_gpu

    if not has_gpu():
        raise Mistake("a record needs a GPU", "run 'attnc verify' without --record to use the interpreter")
    return require_committed(name).read_text(encoding="utf-8")


def require_committed(name: str) -> Path:
    """Returns the path of a file below generated/. Raises Mistake where there is none."""
    path = GENERATED / name
    if not path.is_file():
        raise Mistake(f"there is no {path}", "run 'attnc compile' first, in the folder that holds generated/")
    return path


def committed_hash(name: str) -> str:
    """Returns the hash by which a record names the code of a file below generated/."""
    from attnc.verify.record import hash_of

    return hash_of(GENERATED / name)


def record_of(sha256: str, target: str, report: Report) -> Record:
    """Returns the record of a file whose cases were all right. sha256: of its code."""
    from attnc.runtime.toolchains import toolchain_of
    from attnc.runtime.trial import device_name
    from attnc.verify.record import Record

    return Record(
        sha256=sha256,
        device=device_name(),
        toolchain=toolchain_of(target).version(),
        cases=report.examples,
        worst=round(report.worst, 4),
        where=report.where,
        met=_coverage_of(report),
    )


def _coverage_of(report: Report) -> Mapping[str, Sequence[int]]:
    found = report.coverage
    if found is None:
        return {}
    large = [n for met in found.boundaries if met.boundary.reach == "large" for n in met.met]
    return {"points": found.points, "pairs": found.pairs, **({"large": sorted(set(large))} if large else {})}


def known_records() -> Records:
    """Returns the content of the file of records. Raises Mistake for one that is malformed."""
    from attnc.verify.record import read

    try:
        return read(GENERATED)
    except ValueError as error:
        raise Mistake(str(error), "restore it from version control") from None


def records_path() -> Path:
    """Names the file of records."""
    from attnc.verify.record import NAME

    return GENERATED / NAME


def update_records(change: Callable[[Records], Records]) -> Path:
    """Rewrites the file of records, without what it says of modules that are gone; returns its path."""
    from attnc.files import update_text
    from attnc.verify.record import dump

    there = [path.relative_to(GENERATED).as_posix() for path in GENERATED.glob("*/*/*.py")]
    update_text(records_path(), lambda: dump(change(known_records()).only(there)))
    return records_path()


# --- attnc fuzz ---------------------------------------------------------------------------------------------


def fuzz(
    spec: SPEC,
    attention: ATTENTION = None,
    variant: VARIANT = None,
    target: TARGET = None,
    seconds: Annotated[float, typer.Option(min=0, help="Time for each variant.")] = 60.0,
    examples: Annotated[int, typer.Option(min=1, help="Most cases for each variant.")] = 1000,
    seed: Annotated[int, typer.Option(help="A number that the cases are drawn from.")] = 0,
    targets_agree: Annotated[
        bool, typer.Option("--across", help="Compare every eighth case with the spec's other targets.")
    ] = False,
    repro: Annotated[
        Path | None,
        typer.Option(help="Run the case in this file again, for the target that failed by default."),
    ] = None,
    as_json: JSON = False,
) -> None:
    """Draw shapes, strides and values until a kernel leaves its error bound, and shrink what is found.

    Failing cases are kept in .attnc/failures/; each prints the command that runs it again.

    Example: attnc fuzz specs/causal_gqa.attn --seconds 30 --seed 7
    """
    if repro is not None:
        kept = _read_failed_case(repro)
        try:
            judges = choose_judges([one_spec(spec)], attention, variant, target or kept.target or None)
        except Mistake as lost:
            if target is not None or not lost.message.startswith(f"there is no target '{kept.target}'"):
                raise
            message = f"the case in '{repro}' failed for {kept.target}, and {lost.message}"
            raise Mistake(message, f"{lost.hint}; --target runs the case for another") from None
        _run_failed_case(kept, judges)
        return
    judges = choose_judges([one_spec(spec)], attention, variant, target)
    results = []
    for judge in judges:
        results.append(judge.fuzz(examples, seconds, seed, across=targets_agree))
        if not as_json:
            results[-1].show()
    conclude(results, as_json=as_json)


def _read_failed_case(path: Path) -> Kept:
    if not path.is_file():
        raise Mistake(f"there is no file '{path}'", f"failures are kept in {FAILURES.as_posix()}/")
    text = path.read_text(encoding="utf-8", errors="replace")
    return parse_kept(text, f"files in {FAILURES.as_posix()}/ are")


def _run_failed_case(kept: Kept, judges: Iterable[Judge]) -> None:
    failed = False
    for judge in judges:
        verdict = judge.verdict(kept)
        failed |= not verdict.ok
        elsewhere = f"; it failed for {kept.target}" if kept.target not in ("", judge.target) else ""
        told = f"{judge.variant} for {judge.target}: {verdict.message}"
        say(f"{told}; {100 * verdict.worst:.0f} % of the bound{elsewhere}")
    if failed:
        note("the case still fails")
        raise typer.Exit(1)
