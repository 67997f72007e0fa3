"""Tuned choices: which config of a schedule is fastest on which device, as measured once and kept beside the
specs.

`specs/tuned/<spec>.json` is written by `attnc tune` and committed. The compiler embeds the choices in the
generated module, so that importing or calling a kernel never benchmarks. A choice names its config by its
knobs; it is dropped when the spec no longer offers them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from attnc.diagnostics import DiagnosticError, error
from attnc.model.schedule import Config
from attnc.plan import ir
from attnc.source import Source

FORMAT = 1
#: Key lengths up to which a choice holds; None: any.
BUCKETS: tuple[int | None, ...] = (1024, 4096, None)

#: (largest N, position of the config), ascending, the last one open.
Buckets: TypeAlias = tuple[tuple[int | None, int], ...]
#: Kernel ("forward", or one of the backward) -> device -> buckets.
Tuned: TypeAlias = Mapping[str, Mapping[str, Buckets]]
NOT_TUNED: Tuned = MappingProxyType({})
#: What distinguishes the configs of a backward kernel; the rest is the same for all of them.
_BACKWARD_KNOBS = ("tile.q", "tile.kv", "warps", "stages", "maxnreg", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedChoice:
    """The fastest config of one variant on one device for key lengths up to `kv_len` (None: any longer one).

    kernel: "forward", or "dq", "dkdv", "dk", "dv" of the backward; toolchain: e.g. "triton 3.6.0"; config:
    the knobs as `knobs_of_kernel` spells them; microseconds: median of one launch at the bucket's shape.
    """

    target: str
    attention: str
    variant: str
    device: str
    toolchain: str
    kv_len: int | None
    config: Mapping[str, str]
    microseconds: float
    kernel: str = "forward"

    @property
    def key(self) -> tuple[str, str, str, str, str, str, float]:
        length = float("inf") if self.kv_len is None else float(self.kv_len)
        place = (self.device, self.toolchain, length)
        return (self.attention, self.target, self.variant, "" if self.is_forward else self.kernel, *place)

    @property
    def is_forward(self) -> bool:
        return self.kernel == "forward"


def knobs_of_kernel(kernel: str, config: Config) -> dict[str, str]:
    """Returns the keys and values by which a choice describes the config of a kernel."""
    knobs = config.texts()
    return knobs if kernel == "forward" else {key: knobs[key] for key in _BACKWARD_KNOBS if key in knobs}


def load_tuned(source: Source) -> tuple[TunedChoice, ...]:
    """Returns the choices of a file. Raises DiagnosticError (E0603) when it is not such a file."""
    return read_measured(source, FORMAT, lambda data: tuple(_choice(entry) for entry in data["choices"]))


def dump_tuned(choices: Iterable[TunedChoice]) -> str:
    """Returns the text of a file with these choices, in a fixed order; of two with the same key, the later
    one stays.
    """
    newest = {choice.key: choice for choice in choices}
    entries = [
        {
            "attention": choice.attention,
            "target": choice.target,
            "variant": choice.variant,
            **({} if choice.is_forward else {"kernel": choice.kernel}),
            "device": choice.device,
            "toolchain": choice.toolchain,
            "kv_len": choice.kv_len,
            "config": dict(sorted(choice.config.items())),
            "microseconds": round(choice.microseconds, 2),
        }
        for _, choice in sorted(newest.items())
    ]
    return json.dumps({"format": FORMAT, "choices": entries}, indent=2) + "\n"


def tuned_choices(module: ir.Module, choices: Iterable[TunedChoice]) -> Tuned:
    """Returns the choices that the module embeds for each of its kernels. If several toolchains have
    measured, the newest one counts.
    """
    mine = (module.variant.attention.name, module.target, module.variant.name)
    own = [choice for choice in choices if mine == (choice.attention, choice.target, choice.variant)]
    return {
        name: _by_device(name, kernel, [choice for choice in own if choice.kernel == name])
        for name, kernel in module.kernels.items()
    }


def _by_device(name: str, kernel: ir.Kernel, choices: Iterable[TunedChoice]) -> dict[str, Buckets]:
    configs = {json.dumps(knobs_of_kernel(name, x), sort_keys=True): i for i, x in enumerate(kernel.configs)}
    found: dict[str, dict[str, dict[int | None, int]]] = {}
    for choice in choices:
        position = configs.get(json.dumps(dict(choice.config), sort_keys=True))
        if position is not None:
            found.setdefault(choice.device, {}).setdefault(choice.toolchain, {})[choice.kv_len] = position
    return {
        device: _buckets(by_toolchain[max(by_toolchain, key=version_of)])
        for device, by_toolchain in sorted(found.items())
    }


def _buckets(measured: Mapping[int | None, int]) -> Buckets:
    ascending = sorted(measured.items(), key=lambda item: float("inf") if item[0] is None else item[0])
    return (*ascending[:-1], (None, ascending[-1][1]))


def _choice(entry: Mapping[str, Any]) -> TunedChoice:
    length = entry["kv_len"]
    if not (length is None or (isinstance(length, int) and length > 0)):
        raise ValueError(f"kv_len {length!r} is not a length")
    return TunedChoice(
        target=str(entry["target"]),
        attention=str(entry["attention"]),
        variant=str(entry["variant"]),
        device=str(entry["device"]),
        toolchain=str(entry["toolchain"]),
        kv_len=length,
        config={str(key): str(value) for key, value in dict(entry["config"]).items()},
        microseconds=float(entry["microseconds"]),
        kernel=str(entry.get("kernel", "forward")),
    )


# --- files that measurements wrote


Parsed = TypeVar("Parsed")


def read_measured(source: Source, form: int, parse: Callable[[Any], Parsed]) -> Parsed:
    """Returns the result of `parse` for a JSON file that a measurement wrote in this format. Raises
    DiagnosticError (E0603) when it is not such a file.
    """
    try:
        data = json.loads(source.text)
        if data["format"] != form:
            raise ValueError(f"format {data['format']} is not {form}")
        return parse(data)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as failure:
        line = failure.lineno if isinstance(failure, json.JSONDecodeError) else 1
        start = source.line_start(line)
        span = source.span(start, start + len(source.line_text(line)))
        detail = f"no {failure}" if isinstance(failure, KeyError) else str(failure)
        hint = "delete it, or write it again with 'attnc tune'"
        message = "file of tuned choices that cannot be read"
        raise DiagnosticError([error("E0603", message, span, detail, hints=(hint,))]) from None


def version_of(toolchain: str) -> tuple[int, ...]:
    """Returns the numbers in the name of a toolchain, to compare two of them by."""
    return tuple(int(part) for part in toolchain.replace(".", " ").split() if part.isdecimal())
