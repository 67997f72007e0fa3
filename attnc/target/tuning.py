"""The configs of a module's kernels and the measured choices among them, as its text embeds them."""

from __future__ import annotations

from collections.abc import Mapping

from attnc.model.schedule import DkDvConfig
from attnc.plan.decode import has_fixed_splits, keys_of_split
from attnc.plan.ir import Decode, Kernel, Module, kernels_of
from attnc.plan.ir.backward import BackwardKernel
from attnc.target.quote import literal
from attnc.tuned.choices import Buckets, Tuned


def tuning(module: Module, tuned: Tuned) -> dict[str, object]:
    """What the templates of every target print; tuned: of each kernel."""
    (kernel,), backward = module.kernels, kernels_of(module)
    return {
        "configs": [config_text(kernel, at) for at in range(len(kernel.configs))],
        "backward": {
            name: [backward_config_text(planned, at) for at in range(len(planned.configs))]
            for name, planned in backward.items()
        },
        "table": tuned_table(tuned.get("forward", {})),
        "backward_tables": {name: tuned_table(tuned.get(name, {})) for name in backward},
    }


def config_text(kernel: Kernel, position: int) -> str:
    config, shared = kernel.configs[position], kernel.shared[position]
    values = [str(x) for x in (config.tile_q, config.tile_kv, config.warps, config.stages, shared)]
    if not isinstance(kernel, BackwardKernel) and kernel.layout is not None:
        values += map(str, kernel.layout.chosen(config))
    if isinstance(kernel, Decode) and kernel.split is not None:
        count = kernel.configs[position].split_kv
        values.append(str(count if isinstance(count, int) else 0))
        if has_fixed_splits(kernel):
            values.append(str(keys_of_split(kernel.configs[position])))
        if any(kernel.split.staged) and kernel.split.staged[position]:
            values.append(f"staged={kernel.split.staged[position]}")
    return ", ".join(values)


def backward_config_text(planned: BackwardKernel, position: int) -> str:
    """`config_text`, with what only kernels of a backward choose."""
    config, text = planned.configs[position], config_text(planned, position)
    if config.maxnreg is not None:
        text += f", maxnreg={config.maxnreg}"
    late = isinstance(config, DkDvConfig) and config.dp == "late"
    return f"{text}, early_dp=False" if planned.dp_order == "both" and late else text


def tuned_table(tuned: Mapping[str, Buckets]) -> str:
    rows = ", ".join(f"{literal(device)}: {tuned[device]!r}" for device in sorted(tuned))
    return f"{{{rows}}}"
