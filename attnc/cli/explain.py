"""`attnc explain`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from attnc.cli.compile import JSON, SPEC
from attnc.cli.console import Mistake, loading, note, one_spec, progress, say_json, say_lines, without_kernels
from attnc.cli.judge import only, wanted_targets
from attnc.diagnostics import did_you_mean

if TYPE_CHECKING:
    from attnc.model.program import Program
    from attnc.model.schedule import Schedule
    from attnc.plan import ir
    from attnc.plan.device import Device
    from attnc.plan.layout import KernelName, Which
    from attnc.runtime.toolchains import Usage


_SIZE = "M=8192"


def explain(
    spec: SPEC,
    variant: Annotated[
        str | None, typer.Option(help="Which variant, e.g. bf16_d128; the first if left out.")
    ] = None,
    attention: Annotated[str | None, typer.Option(help="Which attention; the first if left out.")] = None,
    target: Annotated[str | None, typer.Option(help="For which target; the first if left out.")] = None,
    config: Annotated[int, typer.Option(min=0, help="Which config, by its position; 0 is the default.")] = 0,
    arch: Annotated[
        str | None,
        typer.Option(
            help="For which GPU: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120; sm_90 if left out, or the oldest"
            " that the target is for."
        ),
    ] = None,
    is_compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Ask the compiler for registers and spills.")
    ] = True,
    shows_ir: Annotated[
        bool, typer.Option("--ir", help="Print the plan itself, in the text of the compiler's IR.")
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="Show instead how so many GPUs would share one call (context parallelism)."
        ),
    ] = None,
    size: Annotated[
        str, typer.Option(help="With --ranks: sizes of the call, such as M=65536,N=65536,H=32,Hkv=8.")
    ] = _SIZE,
    strategy: Annotated[
        str | None, typer.Option(help="With --ranks: this strategy (need, gather, heads, mixed).")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Show what a kernel does and why, without a GPU.

    It shows the tiles that the mask skips, the loops, shared memory by buffer, registers and spills, the
    roofline, for CUDA the bytes through each memory, the error bound, and the line of the spec that each
    decision follows from; then the kernels of the backward.

    With --ranks it shows how several GPUs share a call: the rows of each, work and imbalance, the bytes
    between each two beside the fewest possible, the estimate of each strategy, and a picture.

    With --ir it prints the plan of every kernel, as printers receive it: loops, loads, steps, configs.

    Of an attention without a schedule it explains the one that attnc.compile gives it, and prints that, too
    (with --json: "schedule_added").

    Example: attnc explain specs/causal_gqa.attn --arch sm_80
    """
    for option, is_given in (("--size", size != _SIZE), ("--strategy", strategy is not None)):
        if is_given and ranks is None:
            raise Mistake(f"{option} says nothing without --ranks", "add --ranks with the number of GPUs")
    if ranks is not None:
        from attnc.cli.ranks import explain_ranks

        explain_ranks(one_spec(spec), attention, variant, target, ranks, size, strategy, as_json=as_json)
        return
    with loading():
        from attnc.build import front, plan_program, schedule_all
        from attnc.effort import limit_steps, renew
        from attnc.explain.backward import backward_dict, backward_text, explain_backward
        from attnc.explain.forward import as_dict, as_text
        from attnc.explain.forward import explain as explain_plan
        from attnc.model.elaborate import report_limit
        from attnc.plan.device import DEVICES
        from attnc.plan.ir.text import module_text
        from attnc.plan.targets import USUAL

    if shows_ir and as_json:
        raise Mistake("--ir prints text, not JSON", "leave out one of --ir and --json")
    if arch is not None and arch not in DEVICES:
        raise Mistake(
            f"there is no architecture '{arch}'", "".join(did_you_mean(arch, DEVICES)) or ", ".join(DEVICES)
        )
    wanted = wanted_targets(target)
    path = one_spec(spec)
    with limit_steps():
        with progress(f"planning {path.name}", None):
            program, added = schedule_all(front(path), wanted, attention, only_first=True)
        if added and not as_json:
            chosen = dict.fromkeys(re.findall(r"^schedule \w+ for (\S+)", added, re.MULTILINE))
            note(f"'{spec}' leaves its schedule open; for {', '.join(chosen)} attnc.compile takes:")
            for line in ("", *added.splitlines(), ""):
                note(line)
            others = ", ".join(name for name in USUAL if name not in chosen)
            note("   = help: below, line numbers count it, after a blank line, at the end of the spec")
            note(f"   = help: copy it there to keep it; kernels for {others} then need schedules, too")
        with report_limit("what explains it", program.source.span(0, 0)):
            with progress(f"planning {path.name}", None):
                modules = plan_program(program).modules
            renew()
            if not modules and program.projections:
                raise Mistake(
                    f"'{spec}' has projections alone, and only attentions are explained",
                    "read the module that attnc compile writes: configs and table are at its top",
                )
            if not modules:
                raise without_kernels(f"'{spec}'", len(program.schedules))
            left = only(modules, "target", target, lambda module: module.target)
            left = only(left, "attention", attention, lambda module: module.variant.attention.name)
            module = only(left, "variant", variant, lambda module: module.variant.name)[0]
            if shows_ir:
                say_lines(module_text(module).rstrip())
                return
            count = len(module.kernel.configs)
            if config >= count:
                raise Mistake(f"there is no config {config}", f"the schedule has {count}, counted from 0")
            device = _device(module, arch)
            usage, backward_usages = None, {}
            if is_compiled:
                with progress(f"compiling for {device.arch}", None):
                    usage, backward_usages = (
                        _compile_for(module, config, device),
                        _backward_usages(module, device),
                    )
            explanation = explain_plan(module, _schedule(program, module), device, config, usage=usage)
            backward = explain_backward(module, device, backward_usages)
            if as_json:
                own = {"schedule_added": added} if added else {}
                told = {**as_dict(explanation), **own, "backward": backward_dict(backward)}
                say_json(told)
                return
            text = f"{as_text(explanation)}\n{backward_text(backward)}".rstrip()
    say_lines(text)


def _device(module: ir.Module, arch: str | None) -> Device:
    from attnc.plan.device import DEVICES
    from attnc.plan.targets import target_of

    devices = target_of(module.target).devices
    if arch is None:
        return DEVICES["sm_90"] if DEVICES["sm_90"] in devices else devices[0]
    if DEVICES[arch] not in devices:
        known = ", ".join(device.arch for device in devices)
        raise Mistake(f"'{module.target}' is not for {arch}", f"it is for {known}; --target names another")
    return DEVICES[arch]


def _schedule(program: Program, module: ir.Module) -> Schedule:
    name = module.variant.attention.name
    wanted = (name, module.target, module.label)
    return next(s for s in program.schedules if (s.name, s.target, s.label) == wanted)


def _backward_usages(module: ir.Module, device: Device) -> dict[KernelName, Usage | None]:
    from attnc.explain.backward import default_position

    return {
        name: _compile_for(module, default_position(planned, device), device, name)
        for name, planned in module.backward_kernels.items()
    }


def _compile_for(module: ir.Module, config: int, device: Device, kernel: Which = "forward") -> Usage | None:
    """Registers and spills; a compiler that is missing or too old for the architecture costs only these
    lines.
    """
    try:
        from attnc.runtime.toolchains import usage_of

        return usage_of(module, config, device, kernel)
    except Exception as failure:  # Triton raises whatever its passes raise
        reason = (str(failure).strip().splitlines() or ["no message"])[0]
        note(f"not compiled for {device.arch}: {type(failure).__name__}: {reason[:200]}")
        return None
