"""What an attention without a schedule gets, or a schedule without tiles, for every target and width."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from attnc.diagnostics import DiagnosticError
from attnc.model.attention import Variant
from attnc.model.program import Program
from attnc.model.schedule import Schedule, TileConfig
from attnc.model.variants import variants
from attnc.plan.checks import check_lowerable
from attnc.plan.differentiable import has_backward
from attnc.plan.layout import KernelName
from attnc.plan.targets import USUAL, complete_schedule, schedule_for, steps_for, target_of
from tests.model.resolving import resolve_text

GOLDEN = Path(__file__).parents[1] / "golden" / "defaults"
WIDTHS = ((16, 16), (64, 64), (72, 72), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512))
#: What stands for its own in an attention, by how its rows lie and keys are selected.
CACHE = "input lens: i32[B]\n  length N = lens[b]"
PAGED, PACKED = " via paged(table, page = 16)", "input cu: i32[B + 1]\n  input cu_k: i32[B + 1]"
ROWS: dict[str, dict[str, str]] = {
    "dense": {},
    "packed": {
        "q": "{T}[R, {H}, {D}] via ragged(cu)",
        "k": "{T}[S, {K}, {D}] via ragged(cu_k)",
        "v": "{T}[S, {K}, {DV}] via ragged(cu_k)",
        "o": "{T}[R, {H}, {DV}]",
        "more": PACKED,
    },
    "cache": {"more": CACHE},
    "paged": {
        "k": "{T}[B, N, {K}, {D}]" + PAGED,
        "v": "{T}[B, N, {K}, {DV}]" + PAGED,
        "more": f"input table: i32[B, P]\n  {CACHE}",
    },
    "narrow": {
        "k": "e4m3[B, N, {K}, {D}]",
        "v": "e4m3[B, N, {K}, {DV}]",
        "more": CACHE,
        "T": "bf16",
        "grad": "",
    },
    "latent": {"v": "{T}[B, N, {K}, {DV}] via prefix(k)", "grad": "grad q, k"},
    "listed": {"mask": "listed(idx, rows = 64, keys = 64)", "more": "input idx: i32[B, {H}, R, S]"},
    "selected": {
        "mask": "listed(idx, rows = 1, keys = 1)",
        "more": "input idx: i32[B, M, S]",
        "H": "16",
        "K": "1",
    },
    "ordered": {"order": "order = absolute(256)", "form": "softmax"},
}
MASKS = ("true", "causal", "window(100, 0)", "window(20, 3)", "doc[b, q_pos] == doc[b, kv_idx]")
DROPPED = "softmax(dropout = p, seed = seed)"
FORMS = ("softmax", "softmax(sink = sink[h])", "softpick", "none", "stick_breaking", DROPPED)
#: Inputs of masks and forms, by a word of these.
GIVEN = {
    "doc": "doc: i32[B, N] is sorted",
    "sink": "sink: f32[{H}]",
    "dropout": "p: f32[]",
    "seed": "seed: i64[]",
}


def text_of(rows: str, width: tuple[int, int], dtype: str, mask: str, form: str, grad: str) -> str:
    """Returns an attention without a schedule."""
    said = {"T": dtype, "H": "Hkv * G", "K": "Hkv", "D": str(width[0]), "DV": str(width[1])}
    said |= {"mask": mask, "form": form, "grad": grad, "more": "", "order": ""}
    said |= {"q": "{T}[B, M, {H}, {D}]", "k": "{T}[B, N, {K}, {D}]"}
    said |= {"v": "{T}[B, N, {K}, {DV}]", "o": "{T}[B, M, {H}, {DV}]", **ROWS[rows]}
    used = f"{said['mask']} {said['form']}"
    lines = [
        *(f"input {name}: {said[name]}" for name in ("q", "k", "v")),
        *(f"input {text}" for word, text in GIVEN.items() if word in used),
        said["more"],
        "score = dot(q, k) / sqrt(D)",
        f"mask = {said['mask']}",
        f"normalize = {said['form']}",
        said["order"],
        f"output o: {said['o']}",
        said["grad"],
    ]
    return "attention it {\n  " + "\n  ".join(line.format(**said) for line in lines if line) + "\n}\n"


def attentions(rows: str) -> Iterator[tuple[str, Program]]:
    """Yields attentions whose rows lie so, of every width, with masks, forms and gradients in turn."""
    usual = [width for width in WIDTHS if width[0] in (64, 128, 192, 256, 576)]
    for at, (width, dtype) in enumerate([*product(usual, ("bf16",)), *product(usual[::2], ("f32",))]):
        place = at + [*ROWS].index(rows)
        mask, form, grad = MASKS[place % 5], FORMS[place % 6], ("grad q, k, v", "")[place // 2 % 2]
        text = text_of(rows, width, dtype, mask, form, grad)
        said = [
            line.strip() for line in text.splitlines() if line.split()[0] in ("mask", "normalize", "grad")
        ]
        yield f"{width[0]} and {width[1]} columns of {dtype}, {', '.join(said)}", resolve_text(text)


@pytest.mark.parametrize("rows", ROWS)
def test_what_is_chosen_without_a_schedule(rows: str, golden: Callable[[Path, str], None]) -> None:
    lines = []
    for name, program in attentions(rows):
        lines.append(name)
        for target in USUAL:
            ways = (True, False) if program.attention("it").grads else (True,)
            found = [schedule_for(program, "it", target, deterministic=same) for same in ways]
            found += steps_for(program, "it", target)
            lines += [" ".join(text.split()) for text in dict.fromkeys(found) if text]
    golden(GOLDEN / f"{rows}.txt", "\n".join(lines) + "\n")


#: Rows and keys of schedules that say nothing of tiles.
KINDS = (
    ("dense", "loops = [q, kv]"),
    ("dense", "loops = [kv], pack = gqa, split.kv = auto"),
    ("latent", "loops = [kv], pack = gqa"),
    ("packed", "softmax = two_pass"),
)
KERNELS: tuple[KernelName, ...] = ("dq", "dkdv")


def _tiles(variant: Variant, schedule: Schedule) -> Iterator[str]:
    """Yields the sizes of each kernel's configs, in their order: rows, keys, warps and stages."""
    target = target_of(schedule.target)
    if refused := [*check_lowerable(variant, schedule)]:
        yield refused[0].message
        return
    schedule = complete_schedule(variant, schedule)
    try:
        found: dict[str, Sequence[TileConfig]] = {"": target.configs(variant, schedule)}
        if has_backward(variant.attention, schedule):
            layout = target.layout(variant, schedule, found[""][0])
            layout_of_gradients = target.backward_layout(variant, schedule, layout)
            for kernel in KERNELS:
                found[kernel] = target.backward_configs(variant, schedule, kernel, layout_of_gradients)
    except DiagnosticError as error:
        yield error.diagnostics[0].message
        return
    for name, configs in found.items():
        sizes = ((config.tile_q, config.tile_kv, config.warps, config.stages) for config in configs)
        yield " ".join([name, *dict.fromkeys("x".join(map(str, each)) for each in sizes)]).strip()


@pytest.mark.parametrize(("rows", "kind"), KINDS)
def test_tiles_that_no_schedule_mentions(rows: str, kind: str, golden: Callable[[Path, str], None]) -> None:
    lines = []
    for width, dtype in [*product(WIDTHS[1:], ("bf16",)), *product(WIDTHS[1::2], ("f32",))]:
        grad = "grad q, k" if rows == "latent" else "grad q, k, v"
        text = text_of(rows, width, dtype, "causal", "softmax", grad)
        schedules = "\n".join(f"schedule it for {target} {{\n  {kind}\n}}" for target in USUAL)
        program = resolve_text(f"{text}{schedules}\n")
        (variant,) = variants(program, program.attention("it"))
        lines.append(f"{width[0]} and {width[1]} columns of {dtype}")
        for schedule in program.schedules:
            lines += [f"  {schedule.target}: {'; '.join(_tiles(variant, schedule))}"]
    name = "_".join(word for word in re.findall(r"\w+", kind) if word not in ("loops", "softmax"))
    golden(GOLDEN / f"tiles_{rows}_{name}.txt", "\n".join(lines) + "\n")
