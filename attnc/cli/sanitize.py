"""`attnc verify --sanitize`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

import typer

from attnc.cli.console import Mistake, paint, progress, say, say_lines
from attnc.cli.judge import Judge
from attnc.cli.records import committed, committed_hash, update_records


def sanitize_modules(judges: Sequence[Judge], *, is_recorded: bool, as_json: bool) -> None:
    """Runs the files of generated/ under every tool, says what was found, and notes those without a finding.

    Raises Mistake without CUDA modules, a GPU or compute-sanitizer; Exit(1) if anything was found."""
    from attnc.verify.runners import runner_of
    from attnc.verify.sanitize import Job, find_sanitizer, sanitize, version
    from attnc.verify.subjects import has_gpu

    if not all(runner_of(judge.target).sanitizers for judge in judges):
        raise Mistake("the sanitizer runs over CUDA modules", "add '--target cuda.sm_80'")
    if not has_gpu():
        raise Mistake("compute-sanitizer needs a GPU", "'attnc verify' without --sanitize runs anywhere")
    texts = {judge.path: committed(judge.path) for judge in judges}
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
        say_lines(json.dumps(told, indent=2))
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
