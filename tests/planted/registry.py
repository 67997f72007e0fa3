"""All planted bugs, and the planned modules that they are planted in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from attnc.build import Planned
from attnc.plan import ir
from attnc.plan.projection import ProjectionModule
from tests.plans import plans_of
from tests.planted import (
    cuda_backward,
    cuda_backward_tiles,
    cuda_f32,
    cuda_forms,
    cuda_forward,
    cuda_latent,
    cuda_lists,
    cuda_serving,
    edges,
    hopper,
    hopper_backward,
    hopper_columns,
    hopper_decode,
    hopper_dropped,
    hopper_held,
    hopper_kept,
    hopper_latent,
    hopper_lists,
    hopper_narrow,
    hopper_out,
    hopper_parts,
    hopper_ranges,
    hopper_rows,
    hopper_scores,
    hopper_spans,
    hopper_turns,
    hopper_wide,
    host,
    kept_blocks,
    layouts,
    list_walks,
    packed_lists,
    paged_gradients,
    precision,
    projections,
    row_lists,
    sizes,
    trees,
    triton_backward,
    triton_epilogue,
    triton_forgetting,
    triton_forward,
    triton_lists,
    triton_serving,
    triton_softpick,
    triton_sticks,
    triton_weights,
    united_lists,
)
from tests.planted.bug import Bug


def _by_target(part: str, bugs: tuple[Bug, ...]) -> dict[str, tuple[Bug, ...]]:
    names = {"triton": "triton", "cuda.sm_80": "cuda", "cuda.sm_90a": "hopper", "projection": "projection"}
    parts: dict[str, tuple[Bug, ...]] = {}
    for bug in bugs:
        key = f"{names[bug.target]} {part}"
        parts[key] = (*parts.get(key, ()), bug)
    return parts


PARTS: Mapping[str, tuple[Bug, ...]] = {
    "triton forward": triton_forward.BUGS,
    "triton serving": triton_serving.BUGS,
    "triton backward": triton_backward.BUGS,
    "triton epilogue": triton_epilogue.BUGS,
    "triton weights": triton_weights.BUGS,
    "triton softpick": triton_softpick.BUGS,
    "triton sticks": triton_sticks.BUGS,
    "triton lists": triton_lists.BUGS,
    "packed lists": packed_lists.BUGS,
    "paged gradients": paged_gradients.BUGS,
    "trees": trees.BUGS,
    "triton forgetting": triton_forgetting.BUGS,
    "cuda forward": cuda_forward.BUGS,
    "cuda serving": cuda_serving.BUGS,
    "cuda backward": cuda_backward.BUGS,
    "cuda backward tiles": cuda_backward_tiles.BUGS,
    "cuda f32": cuda_f32.BUGS,
    "cuda latent": cuda_latent.BUGS,
    "cuda lists": cuda_lists.BUGS,
    "hopper": hopper.BUGS,
    "hopper backward": hopper_backward.BUGS,
    "hopper parts": hopper_parts.BUGS,
    "hopper spans": hopper_spans.BUGS,
    "hopper held": hopper_held.BUGS,
    "hopper columns": hopper_columns.BUGS,
    "hopper dropped": hopper_dropped.BUGS,
    "hopper decode": hopper_decode.BUGS,
    "hopper narrow": hopper_narrow.BUGS,
    "hopper lists": hopper_lists.BUGS,
    "hopper kept ds": hopper_kept.BUGS,
    "hopper latent": hopper_latent.BUGS,
    "hopper wide": hopper_wide.BUGS,
    "hopper ranges": hopper_ranges.BUGS,
    "hopper rows": hopper_rows.BUGS,
    "hopper scores": hopper_scores.BUGS,
    "hopper out": hopper_out.BUGS,
    "hopper turns": hopper_turns.BUGS,
    "projections": projections.BUGS,
    **_by_target("sizes", sizes.BUGS),
    **_by_target("layouts", layouts.BUGS),
    **_by_target("edges", edges.BUGS),
    **_by_target("host", host.BUGS),
    **_by_target("precision", precision.BUGS),
    **_by_target("forms", cuda_forms.BUGS),
    **_by_target("rows of lists", row_lists.BUGS),
    **_by_target("kept blocks", kept_blocks.BUGS),
    "united lists": united_lists.BUGS,
    **_by_target("list walks", list_walks.BUGS),
}
#: By `part: name`, which is how data and tests call them.
BUGS: Mapping[str, Bug] = {f"{part}: {bug.name}": bug for part, bugs in PARTS.items() for bug in bugs}

#: Those of the repository, and some for bugs that none of these can have.
_SPECS = (Path(__file__).parents[2] / "specs", Path(__file__).parent / "specs")
_DEFINED = re.compile(r"^(?:attention|projection) (\w+)", re.M)


@cache
def planned(name: str) -> Planned:
    """The modules of the spec file that defines this attention or projection."""
    return plans_of(_files()[name])


@cache
def module_of(attention: str, target: str) -> ir.Module:
    """The first module of the attention for the target."""
    modules = planned(attention).modules
    return next(m for m in modules if (m.target, m.variant.attention.name) == (target, attention))


def projection_of(name: str) -> ProjectionModule:
    """The first module of the projection."""
    return next(m for m in planned(name).projections if m.name == name)


@cache
def _files() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in (path for folder in _SPECS for path in sorted(folder.glob("*.attn"))):
        for name in _DEFINED.findall(path.read_text(encoding="utf-8")):
            if found.setdefault(name, path) != path:
                raise ValueError(f"both {found[name].name} and {path.name} define '{name}'")
    return found
