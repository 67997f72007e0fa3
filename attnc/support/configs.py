"""Configs of kernels: what a caller may give, what was measured, what fits the device."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .devices import Gpu
from .sizes import parse_beside_threads

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
        if all(_is_value(field, x) for field, x in fields):
            return
    raise TypeError(f"{name}: expected one of {among}, got {config!r}")


def _is_value(field: str, x: object) -> bool:
    if field == "shared" and isinstance(x, tuple):
        return all(isinstance(pair, tuple) and list(map(type, pair)) == [int, int] for pair in x)
    return isinstance(x, int) or (field, x) == ("maxnreg", None)


def shared_on(config: KernelConfig, major: int) -> int:
    """Returns bytes of shared memory that a block must be allowed on devices of a compute capability; the
    most of all on one that the config does not know.
    """
    shared = config.shared
    if isinstance(shared, tuple):
        by_major = dict(shared)
        shared = by_major.get(major, max(by_major.values(), default=0))
    found: int = shared
    return found


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
    major = gpu.capability[0]
    fitting = (config for config in in_order or configs if shared_on(config, major) <= gpu.shared)
    return next(fitting, configs[-1])


def encode_configs(config: KernelConfig | None, backward: BackwardConfigs | None) -> str:
    """Returns a caller's choice as an operator takes it: a literal, or nothing."""
    configs = {"": config, **(backward or {})}
    chosen = {name: tuple(x) for name, x in configs.items() if x is not None}
    return repr(chosen) if chosen else ""


def decode_configs(chosen: str, known: type) -> tuple[KernelConfig | None, dict[str, KernelConfig]]:
    choices = parse_beside_threads(ast.literal_eval, chosen) if chosen else {}
    configs = {name: known(*x) for name, x in choices.items()}
    return configs.pop("", None), configs
