"""`attnc compile`, also with --diff (what a change of a spec does to its modules) and --watch, and `attnc
check`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from attnc.cli.console import (
    Mistake,
    complain,
    count_noun,
    find_specs,
    loading,
    note,
    paint,
    progress,
    say,
    say_json,
    say_lines,
    show_diagnostics,
)
from attnc.cli.writing import FORCE, reason, write_or_refuse
from attnc.diagnostics import Diagnostic, DiagnosticError, did_you_mean, to_json
from attnc.output import MANIFEST, Drift, OutputFile, compare, write, write_folder

SPECS = Annotated[
    list[Path] | None,
    typer.Argument(metavar="SPEC", help="Spec files or folders of them; all of specs/ if left out."),
]
SPEC = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec file.")]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]

_DIFF_LINES = 12


def compile_(
    specs: SPECS = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.", file_okay=False)] = Path("generated"),
    is_check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if a file is not up to date.")
    ] = False,
    aot: Annotated[
        list[str] | None,
        typer.Option(help="Also compile the CUDA kernels for this architecture, e.g. sm_90; repeatable."),
    ] = None,
    as_json: JSON = False,
    is_diff: Annotated[
        bool, typer.Option("--diff", help="Print what would change in the modules instead of writing them.")
    ] = False,
    is_standalone: Annotated[
        bool, typer.Option("--standalone", help="Write each module as one file that needs nothing beside it.")
    ] = False,
    is_watch: Annotated[
        bool, typer.Option("--watch", help="Go on, and compile again what is saved, until Ctrl-C.")
    ] = False,
    force: FORCE = False,
) -> None:
    """Compile specs into modules below generated/.

    Each schedule becomes one readable module for every combination of its params. An attention without a
    schedule gets those that attnc.compile takes, for every target that has kernels for it; 'attnc explain'
    prints them. A module needs torch,
    triton or cupy, and the package _support beside the modules; with --standalone it does without the
    package. Files that are up to date are not touched. The files that attnc has written are listed in
    .attnc-manifest: attnc replaces these alone, and removes one when no spec makes it any more, unless it was
    edited.

    Example: attnc compile specs/causal_gqa.attn
    """
    _check_modes({"--check": is_check, "--diff": is_diff, "--aot": bool(aot)})
    _check_modes({"--standalone": is_standalone, "--watch": is_watch, "--aot": bool(aot)})
    _check_modes({"--watch": is_watch, "--check": is_check, "--diff": is_diff, "--aot": bool(aot)})
    _check_modes({"--watch": is_watch, "--diff": is_diff, "--json": as_json})
    _check_modes({"--force": force, "--check": is_check, "--diff": is_diff})
    if is_watch:
        watch_specs(specs, lambda paths: _write_again(paths, out, complete=specs is None, force=force))
        return
    paths = find_specs(specs or [])
    _check_architectures(aot or [])
    outputs, diagnostics = _compile_all(paths, out)
    if is_standalone:
        outputs = _alone(outputs)
    ok = not any(d.severity == "error" for d in diagnostics)
    complete = specs is None and ok
    if not as_json:
        show_diagnostics(diagnostics, brief=len(paths) > 1)
    if is_check or is_diff:
        drifts = compare(outputs, out, complete=complete)
        drifts = tuple(drift for drift in drifts if is_check or drift.path != MANIFEST)
    else:
        drifts = write_or_refuse(partial(write, outputs, out, complete=complete), out, force=force)
    if is_diff:
        show_differences(drifts, outputs, out)
    elif as_json:
        found = [{"path": f"{out.as_posix()}/{d.path}", "kind": d.kind, "held": d.held} for d in drifts]
        say_json({"files": found, "diagnostics": json.loads(to_json(diagnostics))})
    else:
        _report(drifts, out, _count(outputs), is_check=is_check)
        if ok and not outputs:
            note("no spec has a schedule that is compiled")
            note("   = help: add one: schedule NAME for triton { ... }")
    if not ok or ((is_check or is_diff) and drifts):
        raise typer.Exit(1)
    if aot:
        texts = {out / output.path: output.text for output in outputs}
        _ahead_of_time(aot, texts, out, force=force)


def _check_modes(asked: dict[str, bool]) -> None:
    given = [option for option, is_given in asked.items() if is_given]
    if len(given) > 1:
        raise Mistake(f"{given[0]} and {given[1]} do not go together", "run one after the other")


def _write_again(paths: tuple[Path, ...], out: Path, *, complete: bool, force: bool) -> None:
    outputs, diagnostics = _compile_all(paths, out)
    ok = not any(d.severity == "error" for d in diagnostics)
    show_diagnostics(diagnostics)
    is_all = complete and ok and paths == find_specs([])
    drifts = write_or_refuse(partial(write, outputs, out, complete=is_all), out, force=force)
    _report(drifts, out, _count(outputs), is_check=False)


def _check_architectures(archs: list[str]) -> None:
    from attnc.plan.device import DEVICES

    for arch in archs:
        if arch not in DEVICES:
            hint = "".join(did_you_mean(arch, DEVICES)) or f"known are {', '.join(DEVICES)}"
            raise Mistake(f"there is no architecture '{arch}'", hint)


def _ahead_of_time(archs: list[str], texts: Mapping[Path, str], out: Path, *, force: bool) -> None:
    """Puts the machine code of CUDA kernels beside their modules, for those of the architectures that each is
    for. texts: of all files that were written. Raises Mistake where that cannot be.
    """
    from attnc.plan.targets import TARGETS
    from attnc.runtime.toolchains import build_cubins

    devices = {target.folder: {device.arch for device in target.devices} for target in TARGETS.values()}
    modules = {path: found for path, found in sorted(_find_kernels(texts).items()) if found}
    made: dict[str, dict[str, bytes]] = {}
    try:
        with progress("aot", len(modules)) as bar:
            for module, found in modules.items():
                bar.advance(module.stem)
                files = {module.name: texts[module], **found}
                known = [arch for arch in archs if arch in devices[module.parent.name]]
                folder = (module.parent / "cubin").relative_to(out).as_posix()
                made.setdefault(folder, {}).update(build_cubins(module, known, files))
    except FileNotFoundError as failure:
        raise Mistake(str(failure), "NVRTC compiles CUDA kernels where there is no GPU") from None
    for folder, cubins in made.items():
        if cubins:
            write_or_refuse(partial(write_folder, cubins, folder, out), out, force=force)
    count = sum(map(len, made.values()))
    say(f"wrote {count_noun(count, 'cubin')} for {', '.join(archs)}")


def check(specs: SPECS = None, as_json: JSON = False) -> None:
    """Report what is wrong with specs, and write nothing. `-` is standard input.

    Example: attnc check specs/causal_gqa.attn
    """
    paths = find_specs(specs or [], reads_stdin=True)
    diagnostics, clash = _check_all(paths)
    errors = sum(d.severity == "error" for d in diagnostics)
    if as_json:
        say_lines(to_json(diagnostics))
    else:
        show_diagnostics(diagnostics)
        warnings = count_noun(len(diagnostics) - errors, "warning")
        note(f"{count_noun(len(paths), 'spec')}: {count_noun(errors, 'error')}, {warnings}")
    if clash is not None:
        raise clash
    if errors:
        raise typer.Exit(1)


def _compile_all(paths: Iterable[Path], out: Path) -> tuple[tuple[OutputFile, ...], tuple[Diagnostic, ...]]:
    """Returns the outputs of the specs without errors, and the diagnostics of all. Raises Mistake when two
    specs make the same file.
    """
    with loading():
        from attnc.build import compile_spec, support_outputs

    paths = tuple(paths)
    outputs: dict[str, OutputFile] = {}
    makers: dict[str, Path] = {}
    diagnostics: list[Diagnostic] = []
    with progress("compile", len(paths)) as bar:
        for path in paths:
            bar.advance(path.name)
            try:
                compiled = compile_spec(path, out.parent)
            except DiagnosticError as failure:
                diagnostics += failure.diagnostics
                continue
            diagnostics += compiled.warnings
            for output in compiled.outputs:
                outputs[_claim(output.path, path, makers)] = output
    support = support_outputs() if outputs else ()
    return (*outputs.values(), *support), tuple(diagnostics)


def _claim(file: str, spec: Path, makers: dict[str, Path]) -> str:
    """Notes that a spec makes a file, and returns what it is known by: case alone does not tell files apart
    everywhere. Raises Mistake where another one makes it.
    """
    place = file.lower()
    if place in makers:
        raise Mistake(f"'{makers[place]}' and '{spec}' both make '{file}'", "rename one of the attentions")
    makers[place] = spec
    return place


def _alone(outputs: tuple[OutputFile, ...]) -> tuple[OutputFile, ...]:
    """Returns the modules with all that they need in their own text. Raises Mistake where a name has two
    meanings then.
    """
    from attnc.target.support import FOLDER, standalone

    texts = {Path(output.path): output.text for output in outputs if not output.path.startswith(FOLDER)}
    found = []
    for path, kernels in _find_kernels(texts).items():
        try:
            alone = standalone(texts[path], kernels)
        except ValueError as problem:
            raise Mistake(f"{path.parent.as_posix()}: {problem}", "rename the attention") from None
        found.append(OutputFile(path=path.as_posix(), text=alone))
    return tuple(found)


def _find_kernels(texts: Mapping[Path, str]) -> dict[Path, dict[str, str]]:
    from attnc.target.support import kernel_files

    beside: dict[Path, list[str]] = {}
    for path in texts:
        beside.setdefault(path.parent, []).append(path.name)
    return {
        path: {name: texts[path.with_name(name)] for name in kernel_files(text, beside[path.parent])}
        for path, text in texts.items()
        if path.suffix == ".py"
    }


def _check_all(paths: Iterable[Path]) -> tuple[tuple[Diagnostic, ...], Mistake | None]:
    """Returns the findings about the specs, and the first mistake of two that make the same file."""
    with loading():
        from attnc.build import check_spec

    paths = tuple(paths)
    makers: dict[str, Path] = {}
    diagnostics: list[Diagnostic] = []
    clash: Mistake | None = None
    with progress("check", len(paths)) as bar:
        for path in paths:
            bar.advance(path.name)
            checked = check_spec(path)
            diagnostics += checked.diagnostics
            try:
                for package in checked.packages:
                    _claim(package, path, makers)
            except Mistake as mistake:
                clash = clash or mistake
    return tuple(diagnostics), clash


def _count(outputs: Iterable[OutputFile]) -> int:
    from attnc.target.support import FOLDER

    return sum(not output.path.startswith(f"{FOLDER}/") for output in outputs)


def _report(drifts: Iterable[Drift], out: Path, total: int, *, is_check: bool) -> None:
    from attnc.target.support import FOLDER

    # These are written with the modules, and worth a word where they are not as they should be.
    drifts = tuple(d for d in drifts if is_check or not d.path.startswith((f"{FOLDER}/", MANIFEST)))
    verbs = {"stale": "changed", "missing": "new", "orphan": "removed"}
    styles = {"stale": "33", "missing": "32", "orphan": "31"}
    for drift in drifts:
        word = drift.kind if is_check else "kept" if drift.held else verbs[drift.kind]
        say(paint(f"{word:8}", styles[drift.kind]), f" {out.as_posix()}/{drift.path}{reason(drift)}")
        if is_check and drift.diff:
            lines = drift.diff.splitlines()
            for line in lines[:_DIFF_LINES]:
                say(f"    {line}")
            if len(lines) > _DIFF_LINES:
                say(f"    ... {len(lines) - _DIFF_LINES} more lines")
    if is_check and drifts:
        force = ", with --force those that are not as it wrote them" if any(d.held for d in drifts) else ""
        count = f"{count_noun(len(drifts), 'file')} of {out.as_posix()}/ not up to date"
        note(f"{count}; 'attnc compile' writes them{force}")
    else:
        kept = sum(bool(drift.held) for drift in drifts)
        removed = sum(drift.kind == "orphan" for drift in drifts) - kept
        done = "0 out of date" if is_check else f"{len(drifts) - removed - kept} written"
        done += f", {removed} removed" if removed else ""
        done += f", {kept} kept that no spec makes: --force removes them" if kept else ""
        note(f"{count_noun(total, 'file')} in {out.as_posix()}/, {done}")


#: Changes with every byte of a spec, comments too.
_RECORD = re.compile(r"[-+]Spec sha256: [0-9a-f]+$")
_STYLES = {"@": "36", "+": "32", "-": "31"}


def show_differences(drifts: Iterable[Drift], outputs: Iterable[OutputFile], out: Path) -> None:
    """Prints a unified diff for every module that would change, and a line for one that would come or go."""
    lengths = {output.path: output.text.count("\n") for output in outputs}
    drifts = tuple(drifts)
    untouched = 0
    for drift in drifts:
        path = f"{out.as_posix()}/{drift.path}"
        if drift.kind == "missing":
            say(paint("new", "32"), f" {path}, {count_noun(lengths[drift.path], 'line')}")
        elif drift.kind == "orphan":
            say(paint("removed", "31"), f" {path}{reason(drift)}")
        elif lines := list(_changes(drift.diff)):
            for line in lines:
                say(paint(line, _STYLES.get(line[0], "1")) if line[0] != " " else line)
        else:
            untouched += 1
    same = f", {untouched} of them in the record of their spec alone" if untouched else ""
    note(f"{count_noun(len(drifts), 'file')} would change in {out.as_posix()}/{same}")


def _changes(diff: str) -> Iterator[str]:
    """Yields the lines of a unified diff but for hunks that change nothing except the digest of the spec."""
    head, *hunks = re.split(r"^(?=@@ )", diff, flags=re.MULTILINE)
    kept = [hunk for hunk in hunks if not all(map(_RECORD.match, _list_changed(hunk)))]
    if kept or not hunks:
        for part in (head, *kept):
            yield from part.splitlines()


def _list_changed(hunk: str) -> list[str]:
    return [line for line in hunk.splitlines() if line.startswith(("+", "-"))]


# --- files that change under --watch ---------------------------------------------------------------


#: What is compared of a file: it is another text if one of these differs.
_Stamp: TypeAlias = tuple[int, int, int] | None

_SECONDS = 0.25


def changes(
    find: Callable[[], Iterable[Path]], wait: Callable[[], None] = lambda: time.sleep(_SECONDS)
) -> Iterator[tuple[tuple[Path, ...], tuple[Path, ...]]]:
    """Returns (written, removed) each time that files are from now on, without end.

    find: the files as they are now; wait: returns when it is time to look again. A file that is being
    replaced, as editors do, counts when it is whole: what cannot be read is not there.
    """

    def since(before: dict[Path, _Stamp]) -> Iterator[tuple[tuple[Path, ...], tuple[Path, ...]]]:
        while True:
            wait()
            now = _stamps(find())
            written = tuple(path for path, stamp in now.items() if before.get(path) != stamp)
            removed = tuple(path for path in before if path not in now)
            before = now
            if written or removed:
                yield written, removed

    return since(_stamps(find()))


def _stamps(paths: Iterable[Path]) -> dict[Path, _Stamp]:
    stamps: dict[Path, _Stamp] = {}
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        stamps[path] = (status.st_mtime_ns, status.st_size, status.st_ino)
    return stamps


def watch_specs(specs: Sequence[Path] | None, compile_again: Callable[[tuple[Path, ...]], None]) -> None:
    """Hands over all specs meant, then those that change or whose measurements do, until Ctrl-C.

    Where one is removed it hands over all that are left. Raises Mistake if there is none at the start.
    """
    from attnc.build import dispatch_path, tuned_path

    def belonging(path: Path) -> tuple[Path, Path, Path]:
        return path, tuned_path(path), dispatch_path(path)

    def present() -> tuple[Path, ...]:
        try:
            return find_specs(specs or [])
        except Mistake:  # between the removal of a file and its return
            return ()

    found = changes(lambda: [file for path in present() for file in belonging(path)])
    compile_again(find_specs(specs or []))
    note("watching; Ctrl-C ends it")
    try:
        for written, removed in found:
            touched = tuple(path for path in present() if removed or set(belonging(path)) & set(written))
            try:
                if touched:
                    compile_again(touched)
            except Mistake as mistake:
                complain(mistake.message, mistake.hint)
    except KeyboardInterrupt:
        note("stopped")
