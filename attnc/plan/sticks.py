"""Tiles of keys of the gradients of stick-breaking: one kernel leaves the others sums for each such tile, so
that all have the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attnc.diagnostics import DiagnosticError
from attnc.model.schedule import BackwardConfig, Phase, Schedule
from attnc.plan.fitting import unsupported
from attnc.plan.layout import KernelName

#: The kernels of a backward, by the phase that its schedule says their tiles in.
BY_PHASE: Mapping[Phase, KernelName] = {"dq": "dq", "dkdv": "dkdv"}


def with_common_keys(
    found: tuple[BackwardConfig, ...], schedule: Schedule, sizes: Mapping[Phase, Sequence[int]]
) -> tuple[BackwardConfig, ...]:
    """Selects the configs whose tiles of keys all kernels can have. sizes: of the configs that fit, by the
    phase of their kernel. Empty where no kernel has any, and the schedule says none. Raises DiagnosticError
    (E0602) where a schedule asks for tiles that have none in common.
    """
    common = next((size for size in sizes["dq"] if size in sizes["dkdv"]), None)
    if common is not None:
        return tuple(config for config in found if config.tile_kv == common)
    if not all(sizes.values()):
        return found  # a kernel of which others say why none runs
    knobs = [schedule.phases[phase].get("tile.kv") for phase in BY_PHASE]
    named = next((knob for knob in reversed(knobs) if knob is not None), None)
    if named is None:
        return ()
    message = "gradients of stick_breaking need the same tiles of keys in all kernels"
    label = f"dq has {_list_sizes(sizes['dq'])} keys, dkdv {_list_sizes(sizes['dkdv'])}"
    raise DiagnosticError(
        [unsupported(message, named.span, label, "write one 'tile.kv' in 'backward { }', for both")]
    )


def _list_sizes(sizes: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(set(sizes)))) or "no"
