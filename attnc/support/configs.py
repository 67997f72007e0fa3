"""Configs of kernels: what a caller may give, what was measured, what fits the device."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .devices import Gpu

#: A NamedTuple of the module: tile sizes and launch parameters.
KernelConfig: TypeAlias = Any
#: By config a caller's choice for each kernel of a backward.
BackwardConfigs: TypeAlias = Mapping[str, KernelConfig]
#: Measured choices: device -> (largest N, position in the configs), ascending, the last without a limit.
Measured: TypeAlias = Mapping[str, Sequence[tuple[int | None, int]]]


def check_config(config: object, known: type, name: str = "config", among: str = "CONFIGS") -> None:
    """TypeError for what is no config of the module."""
    if isinstance(config, known):
        values: Any = config
        fields = zip(values._fields, values, strict=True)
        if all(isinstance(x, int) or (field, x) == ("maxnreg", None) for field, x in fields):
            return
    raise TypeError(f"{name}: expected one of {among}, got {config!r}")


def check_backward_configs(given: object, kernels: Mapping[str, object], known: type) -> None:
    """Refuses a backward_config that names no kernel of the backward, or no config for one."""
    if not isinstance(given, dict):
        raise TypeError(f"backward_config: expected a config by kernel ({', '.join(kernels)}), got {given!r}")
    for kernel, config in given.items():
        if kernel not in kernels:
            raise ValueError(f"backward_config: the kernels are {', '.join(kernels)}, not {kernel}")
        if config is not None:
            check_config(config, known, "backward_config", f"BACKWARD_CONFIGS['{kernel}']")


def choose_config(
    config: KernelConfig | None,
    gpu: Gpu,
    longest: int,
    configs: Sequence[KernelConfig],
    tuned: Measured,
    in_order: Sequence[KernelConfig] = (),
) -> KernelConfig:
    """Returns the caller's config, the measured one for this device and key length, or the first that fits
    the device. in_order: the configs in another order, that of a call.
    """
    if config is not None:
        return config
    for limit, index in tuned.get(gpu.name, ()):
        if limit is None or longest <= limit:
            return configs[index]
    return next((config for config in in_order or configs if config.shared <= gpu.shared), configs[-1])


def encode_configs(config: KernelConfig | None, backward: BackwardConfigs | None) -> str:
    """Returns a caller's choice as an operator takes it: a literal, or nothing."""
    configs = {"": config, **(backward or {})}
    chosen = {name: tuple(x) for name, x in configs.items() if x is not None}
    return repr(chosen) if chosen else ""


def decode_configs(chosen: str, known: type) -> tuple[KernelConfig | None, dict[str, KernelConfig]]:
    """config and backward_config again."""
    configs = {name: known(*x) for name, x in (ast.literal_eval(chosen) if chosen else {}).items()}
    return configs.pop("", None), configs
