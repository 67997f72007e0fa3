"""`attnc demo`: from a spec to a verified kernel in one command."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnc.cli.console import Mistake, count_noun, one_spec, paint, progress, say, without_kernels
from attnc.cli.writing import write_or_refuse
from attnc.output import write
from attnc.resources import resource
from attnc.target.support import FOLDER

if TYPE_CHECKING:
    from attnc.plan import ir
    from attnc.verify.trials import Outcome


def demo(
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="SPEC", help="The spec file; specs/causal_gqa.attn, or attnc's own of it."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.", file_okay=False)] = Path("generated"),
) -> None:
    """Compile a spec, run the kernel on real tensors, and verify it against the float64 reference.

    Runs on the GPU where there is one, else on the CPU: in Triton's interpreter, or thread by thread if it is
    CUDA. Writes to generated/ of the current folder.

    Example: attnc demo specs/local_sink.attn
    """
    begin = time.perf_counter()
    spec = _usual_spec() if spec is None else one_spec(spec)
    with progress(f"compiling {spec.name}", None):
        from attnc.build import compile_spec, folder_of, front, plan_program, schedule_all, support_outputs
        from attnc.runtime.toolchains import toolchain_of

        compiled = compile_spec(spec, out.parent)
        outputs = (*compiled.outputs, *support_outputs())
    write_or_refuse(partial(write, outputs, out), out, force=None)
    took = time.perf_counter() - begin
    with progress(f"planning {spec.name}", None):
        program, _ = schedule_all(front(spec))
        planned = plan_program(program)
    modules = planned.modules
    if planned.projections and not modules:
        raise Mistake(
            f"'{spec}' has projections alone, and the demo is of attentions", f"run 'attnc verify {spec}'"
        )
    if not modules:
        raise without_kernels(f"'{spec}'", len(program.schedules))
    module = modules[0]
    path = out / folder_of(module) / f"{module.variant.name}.py"
    lines = path.read_text(encoding="utf-8").count("\n")
    say(paint("compiled", "1"), f"  {spec}: {len(compiled.outputs)} files in {took:.2f} s, without a GPU")
    needs = toolchain_of(module.target).package
    say(paint("read it", "1"), f"   {path} ({lines} lines; needs torch, {needs} and {out / FOLDER})")
    _show_mask(module)

    with progress("running the kernel and its reference", None):
        from attnc.verify.trials import rehearse

        outcome = rehearse(module)
    _show_outcome(outcome)
    if compiled.warnings:
        count = count_noun(len(compiled.warnings), "warning")
        say(paint("noted", "1"), f"     {count}, shown by: attnc check {spec}")
    if not outcome.verdict.ok:
        raise typer.Exit(1)


def _usual_spec() -> Path:
    here = Path("specs", "causal_gqa.attn")
    return here if here.is_file() else resource("specs", "causal_gqa.attn")


def _show_mask(module: ir.Module) -> None:
    from attnc.expr.nodes import show
    from attnc.plan.picture import FULL, PARTIAL, SKIP, picture

    decodes = module.kernel.structure == "decode"
    sizes = "M = 1, N = 512" if decodes else "M = N = 512"
    found = picture(module.kernel, 1 if decodes else 512, 512, 64, 64)
    say(paint("mask", "1"), f"      {show(module.variant.attention.mask)}")
    say(
        f"          {found.count(SKIP)} of {found.tiles} tiles are skipped, {found.count(FULL)} need no mask,"
        f" {found.count(PARTIAL)} evaluate it ({sizes}, tiles of 64)"
    )
    for row in found.rows:
        say(f"            {' '.join(row)}")


def _show_outcome(outcome: Outcome) -> None:
    verdict = outcome.verdict
    say(paint("ran", "1"), f"       {outcome.shapes} on {outcome.device} in {outcome.seconds:.2f} s")
    state = paint("verified", "1;32") if verdict.ok else paint("WRONG", "1;31")
    say(state, "  against the float64 reference, every element within the bound that the plan proves")
    if verdict.ok:
        say(f"          worst error: {100 * verdict.worst:.0f} % of the bound, at {verdict.where}")
    else:
        say(f"          {verdict.message}")
