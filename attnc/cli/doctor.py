"""`attnc doctor`: what works here, what does not, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import attnc
from attnc.cli.compile import JSON
from attnc.cli.console import Mistake, paint, progress, say, say_json
from attnc.cli.packages import WITHOUT_TRITON, install, is_installed, is_published_here

if TYPE_CHECKING:
    from attnc.runtime.one_import import TargetGpu

#: Where `attnc compile` writes to.
_GENERATED = Path("generated")
_NEEDED = ("jinja2", "lark", "numpy", "rich", "typer", "torch", "triton", "hypothesis")
_INTERPRETED = """
import torch, triton, triton.language as tl

@triton.jit
def add(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i) + 1.0)

x, y = torch.zeros(16), torch.empty(16)
add[(1,)](x, y, 16)
assert bool((y == 1).all())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A line of the report. `fix` is what to do when the state is not "ok"; "note" is no failure."""

    name: str
    state: Literal["ok", "missing", "note"]
    detail: str
    fix: str = ""


def doctor(
    device: Annotated[
        str | None,
        typer.Option(metavar="ARCH", help="Answer for a GPU that this machine lacks, e.g. sm_80."),
    ] = None,
    as_json: JSON = False,
) -> None:
    """Check this machine: versions, GPUs, interpreter, caches, CUDA. Exits with 1 if something is missing.

    For each function in generated/ with several targets, it lists the target of each kind of call, and
    whether that choice was measured; for each function of attnc, the kernels that it runs on.

    Example: attnc doctor
    """
    if device is not None:
        _check(device)
    examinations: dict[str, Callable[[], Iterator[Finding]]] = dict(_EXAMINATIONS)
    examinations["targets"] = lambda: _targets(device)
    examinations["functions"] = lambda: _functions(device)
    findings: list[Finding] = []
    with progress("doctor", len(examinations)) as bar:
        for what, examine in examinations.items():
            bar.advance(what)
            findings += examine()
    if as_json:
        say_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


def _check(device: str) -> None:
    from attnc.runtime.one_import import absent_gpu

    try:
        absent_gpu(device)
    except ValueError as failure:
        raise Mistake(str(failure), "write its compute capability, as in sm_80 or sm_90") from None


def _print(findings: list[Finding]) -> None:
    signs = {"ok": paint("ok", "32"), "missing": paint("!!", "1;31"), "note": paint("--", "33")}
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        say(signs[finding.state], f"  {finding.name:{width}}  {finding.detail}")
        if finding.fix:
            say(f"    {'':{width}}  help: {finding.fix}")


def _versions() -> Iterator[Finding]:
    from importlib import metadata

    yield Finding(name="attnc", state="ok", detail=attnc.__version__)
    yield Finding(name="python", state="ok", detail=f"{platform.python_version()} ({sys.executable})")
    for package in _NEEDED:
        try:
            yield Finding(name=package, state="ok", detail=metadata.version(package))
        except metadata.PackageNotFoundError:
            state: Literal["missing", "note"] = "missing" if is_published_here(package) else "note"
            yield Finding(name=package, state=state, detail="not installed", fix=install(package))
    try:
        yield Finding(name="matplotlib", state="ok", detail=metadata.version("matplotlib"))
    except metadata.PackageNotFoundError:
        detail = "not installed: bench draws no plot"
        yield Finding(name="matplotlib", state="note", detail=detail, fix=install("matplotlib"))


def _devices() -> Iterator[Finding]:
    try:
        from attnc.runtime.devices import gpus, is_cpu_build
    except ImportError as failure:
        yield Finding(name="gpu", state="missing", detail=str(failure), fix=install("torch"))
        return
    found = gpus()
    for index, gpu in enumerate(found):
        memory = f"{gpu.memory / 2**30:.0f} GiB"
        yield Finding(name=f"gpu {index}", state="ok", detail=f"{gpu.name}, {gpu.arch}, {memory}")
        yield _support(f"kernels {index}", gpu.arch)
    if not found:
        runs = "in Triton's interpreter" if is_installed("triton") else "of CUDA C++ on the CPU, by g++"
        detail = f"none: kernels run {runs}; bench and tune need a GPU"
        fix = "this PyTorch is a CPU build; install a CUDA build to use a GPU" if is_cpu_build() else ""
        yield Finding(name="gpu", state="note", detail=detail, fix=fix)


def _support(name: str, arch: str) -> Finding:
    from attnc.cli.platforms import FAMILIES, state_of

    capability = int(arch.removeprefix("sm_"))
    states = {target: state_of(target, capability) for target in FAMILIES}
    detail = ", ".join(f"{target} {state}" for target, state in states.items())
    return Finding(name=name, state="ok" if "tested" in states.values() else "note", detail=detail)


def _system() -> Iterator[Finding]:
    from attnc.cli.platforms import SYSTEMS, system_here

    name = system_here()
    on_gpus, on_cpu = SYSTEMS[name]
    state: Literal["ok", "note"] = "ok" if on_gpus == "tested" else "note"
    yield Finding(name="system", state=state, detail=f"{name}: GPUs {on_gpus}; CPU {on_cpu}")


def _interpreter() -> Iterator[Finding]:
    """Tries the interpreter in a process of its own: Triton decides once, when it is imported, whether it
    interprets.
    """
    if not is_installed("triton"):
        yield Finding(name="interpreter", state="note", detail=f"needs triton; {WITHOUT_TRITON}")
        return
    from attnc.runtime.loader import store

    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    try:
        command = [sys.executable, "-P", str(store(_INTERPRETED))]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    except PermissionError as failure:
        yield Finding(name="interpreter", state="missing", detail=str(failure), fix=_CACHE_FIX)
        return
    except (OSError, subprocess.TimeoutExpired) as failure:
        yield Finding(name="interpreter", state="missing", detail=str(failure), fix=_INTERPRETER_FIX)
        return
    if done.returncode == 0:
        yield Finding(name="interpreter", state="ok", detail="a Triton kernel ran on the CPU")
    else:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding(name="interpreter", state="missing", detail=reason, fix=_INTERPRETER_FIX)


_CACHE_FIX = "point ATTNC_CACHE_DIR to a folder of yours"
_INTERPRETER_FIX = "reinstall triton 3.6 with numpy below 2.4"


def _assembler() -> Iterator[Finding]:
    from attnc.runtime.toolchains import tool

    for name in ("ptxas", "cuobjdump"):
        path = tool(name)
        if path is None:
            fix = "they come with triton's wheel; 'attnc explain' shows no registers without them"
            yield Finding(name=name, state="note", detail="not found", fix=fix)
        else:
            yield Finding(name=name, state="ok", detail=str(path))


def _cuda() -> Iterator[Finding]:
    """Yields findings on the needs of CUDA kernels: to run on a GPU, to be compiled without one, to run on
    the CPU.
    """
    from importlib import metadata

    from attnc.runtime.nvrtc import nvrtc_version

    package = next(iter(metadata.packages_distributions().get("cupy", ())), None)
    if package is None:
        detail = "not installed: CUDA modules need it to run on a GPU"
        yield Finding(name="cupy", state="note", detail=detail, fix=install("cupy"))
    else:
        yield Finding(name="cupy", state="ok", detail=f"{metadata.version(package)} ({package})")
    try:
        yield Finding(name="nvrtc", state="ok", detail=nvrtc_version())
    except FileNotFoundError:
        detail = "not found: CUDA kernels cannot be compiled ahead of time, nor their registers counted"
        yield Finding(name="nvrtc", state="note", detail=detail, fix=install("nvrtc"))
    compiler = shutil.which("g++")
    if compiler is None:
        detail = "not found: CUDA kernels cannot be run on the CPU"
        yield Finding(name="g++", state="note", detail=detail, fix="install g++, of the gcc packages")
    else:
        yield Finding(name="g++", state="ok", detail=compiler)


def _caches() -> Iterator[Finding]:
    from attnc.support.cache import kept_folder

    try:
        yield Finding(name="cache", state="ok", detail=str(kept_folder()))
    except OSError as failure:
        yield Finding(name="cache", state="missing", detail=str(failure), fix=_CACHE_FIX)


def _targets(device: str | None) -> Iterator[Finding]:
    try:
        from attnc.runtime.devices import gpus
        from attnc.runtime.one_import import TargetGpu, absent_gpu
    except ImportError:
        return  # said above
    if device is not None:
        yield from _choices(device, absent_gpu(device))
        return
    for index, gpu in enumerate(gpus()):
        here = TargetGpu(name=gpu.name, capability=int(gpu.arch.removeprefix("sm_")), index=index)
        yield from _choices(str(index), here)
        yield from _tables(index, gpu.name)
    if not gpus():
        fix = "'attnc doctor --device sm_90' says what a GPU takes"
        detail = "no GPU: Triton interprets" if is_installed("triton") else "no GPU"
        yield Finding(name="targets", state="note", detail=detail, fix=fix)


def _choices(label: str, gpu: TargetGpu) -> Iterator[Finding]:
    from attnc.plan.targets import TARGETS
    from attnc.runtime.one_import import choose_functions, rule
    from attnc.runtime.toolchains import toolchain_of

    if not any(map(gpu.runs, TARGETS)):
        if gpu.index is None:
            yield Finding(name=f"targets {label}", state="note", detail="none is for it")
        else:
            fix = f"{install('triton')}, or for CUDA kernels {install('cupy')}"
            yield Finding(name=f"targets {label}", state="missing", detail="none runs", fix=fix)
        return
    found = list(choose_functions(_GENERATED, gpu))
    every = dict.fromkeys(target for function in found for target in function.targets)
    left_out = [target for target in every if gpu.could_run(target) and not gpu.runs(target)]
    needs = dict.fromkeys(toolchain_of(target).package for target in left_out)
    fix = f"{'; '.join(map(install, needs))}, for {', '.join(left_out)} too" if left_out else ""
    yield Finding(name=f"targets {label}", state="ok", detail=rule(gpu, found), fix=fix)
    for function in found:
        state: Literal["ok", "note"] = "ok" if function.runs else "note"
        yield Finding(name=f"{function.name} {label}", state=state, detail=function.text)


#: Functions that choose whose kernels a call runs on, and which of these calls they have besides prompts and
#: training of 16 bits: of f32, of a few queries, and of latent attention.
_FUNCTIONS: Mapping[str, Sequence[str]] = {
    "attnc.compile": ("f32", "latent"),
    "attnc.flex.flex_attention": ("f32", "decoding"),
    "attnc.compat.flash_attn": ("f32", "decoding"),
    "attnc.compat.sdpa": ("decoding",),
    "attnc.adapters.transformers": ("f32", "decoding"),
    "attnc.adapters.vllm": ("f32", "decoding", "latent"),
    "attnc.adapters.sglang": ("f32", "decoding", "latent"),
    "attnc.adapters.flashinfer": ("f32", "decoding", "latent"),
    "attnc export --hf-kernel": ("decoding",),
}


def _functions(device: str | None) -> Iterator[Finding]:
    """Yields the kernels that each function of attnc takes by default, on the GPUs here, or on one of
    an architecture.
    """
    try:
        from attnc.runtime.devices import gpus
        from attnc.runtime.one_import import TargetGpu, absent_gpu
    except ImportError:
        return  # said above
    if device is not None:
        yield from _choices_of_functions(device, absent_gpu(device))
        return
    for index, gpu in enumerate(gpus()):
        capability = int(gpu.arch.removeprefix("sm_"))
        here = TargetGpu(name=gpu.name, capability=capability, index=index)
        yield from _choices_of_functions(str(index), here)


def _choices_of_functions(label: str, gpu: TargetGpu) -> Iterator[Finding]:
    """Yields the choice of each function on a GPU, and at the first how to get the kernels that it would
    rather have.
    """
    from attnc.api.fastest import FEW, TRITON, ranking
    from attnc.runtime.toolchains import toolchain_of

    ranked = {kind: ranking(gpu.capability, kind) for kind in ("16 bits", "f32", "narrow f32")}
    able = {kind: [target for target in targets if gpu.runs(target)] for kind, targets in ranked.items()}
    if not all(able.values()):
        return  # said of the targets
    wide, narrow, half = (able[kind][0] for kind in ("f32", "narrow f32", "16 bits"))
    single = wide if wide == narrow else f"{wide}, forward up to 64 columns {narrow}"
    few = TRITON if TRITON in able["16 bits"] else half
    lost = ranked["16 bits"][0]
    fix = "" if lost == half or not gpu.could_run(lost) else install(toolchain_of(lost).package)
    for function, more in _FUNCTIONS.items():
        detail = f"f16 and bf16 {half}"
        detail += f"; f32 {single}" if "f32" in more else ""
        detail += f"; up to {FEW} queries {few}" if "decoding" in more else ""
        detail += f"; latent attention {half}" if "latent" in more and half != few else ""
        yield Finding(name=f"{function} {label}", state="ok", detail=detail, fix=fix)
        fix = ""


def _tables(index: int, device: str) -> Iterator[Finding]:
    from attnc.diagnostics import DiagnosticError
    from attnc.tuned.tables import ANY_TARGET, known_tables

    found: dict[str, list[str]] = {}
    for file in sorted(Path("specs", "tuned").glob("*.dispatch.json")):
        try:
            tables = known_tables(file)
        except DiagnosticError:
            fix = f"delete it, or write it again with 'attnc tune specs/{file.name.partition('.')[0]}.attn'"
            yield Finding(name=f"tables {index}", state="note", detail=f"{file} cannot be read", fix=fix)
            continue
        for table in tables:
            if (table.device, table.target) == (device, ANY_TARGET):
                found.setdefault(table.name, []).extend(row.choice["target"] for row in table.rows)
    if found:
        said = (f"{name} {' or '.join(sorted(set(targets)))}" for name, targets in sorted(found.items()))
        yield Finding(name=f"tables {index}", state="ok", detail="; ".join(said))


_EXAMINATIONS: Mapping[str, Callable[[], Iterator[Finding]]] = {
    "versions": _versions,
    "system": _system,
    "GPUs": _devices,
    "caches": _caches,
    "interpreter": _interpreter,
    "tools": _assembler,
    "CUDA": _cuda,
}
