"""The `__init__.py` above the targets of an attention: a function that picks the target, by what was measured
for the device, the variant and the sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from attnc.model.attention import Attention
from attnc.plan import ir
from attnc.plan.targets import target_of
from attnc.target.call_signature import Parameter
from attnc.target.dispatch import (
    FamilySignature,
    are_tensors,
    call_sizes,
    free_name,
    literal_of,
    row_text,
    selectors_of,
)
from attnc.target.environment import template_environment
from attnc.target.layout import tidy
from attnc.target.quote import command, comment, literal
from attnc.tuned.tables import LabelRows, plain_name

#: Families of targets, the fastest first where nobody has measured, and the package that launches kernels.
_PACKAGES: Mapping[str, str] = {"sm90": "cupy", "triton": "triton", "sm80": "cupy"}
#: The family whose kernels the package runs on the CPU too.
_INTERPRETED = "triton"
#: Keywords that only the modules of one target understand.
_OF_A_MODULE = ("config", "backward_config")


class OneImportSignature(FamilySignature):
    """Of the modules of one attention for all targets."""

    def __init__(self, attention: Attention, modules: Sequence[ir.Module], chosen: Sequence[str]) -> None:
        super().__init__(attention, modules, chosen)
        self.own = [keyword for keyword in self.own if keyword.name != "schedule"]
        self.passed = [keyword for keyword in self.passed if keyword.name not in _OF_A_MODULE]
        taken = {parameter.name for parameter in (*self.tensor_parameters, *self.own, *self.passed)}
        self.target, self.options = free_name("target", taken), free_name("options", taken)

    @property
    def parameters(self) -> list[str]:
        keywords = [*self.own, Parameter(self.target, "str | None", "None"), *self.passed]
        tensors = map(str, self.tensor_parameters)
        return [*tensors, "*", *map(str, keywords), f"**{self.options}: object"]

    @property
    def arguments(self) -> str:
        """What the function of a target is called with."""
        named = [f"{keyword.name}={keyword.name}" for keyword in (*self.own, *self.passed)]
        return ", ".join([*(tensor.name for tensor in self.inputs), *named, f"**{self.options}"])

    @property
    def option_help(self) -> Iterator[str]:
        names = {*_OF_A_MODULE, "options", "schedule"}
        yield from (line for line in super().option_help if line.partition(":")[0] not in names)
        yield f"{self.target}: which one, instead of the table's choice."
        yield f"{self.options}: what the function of that target takes besides."


#: A compute capability that no device has yet.
_ANY_NEWER = 1000


def fastest_first(targets: Iterable[str]) -> list[str]:
    """Names of targets, each once, in the order in which they are tried where nobody has measured."""
    newest = sorted(dict.fromkeys(targets), reverse=True)
    return sorted(newest, key=lambda name: list(_PACKAGES).index(target_of(name).family))


def needs_of(name: str) -> tuple[str, int, int | None, bool]:
    """What the kernels of a target need, as `attnc.support.by_target.Needs` has it."""
    target = target_of(name)
    own = [device.capability for device in target.devices]
    most = None if target.runs_on(_ANY_NEWER) else max(own)
    return _PACKAGES[target.family], min(own), most, target.family == _INTERPRETED


def render_one_import(
    attention: Attention,
    modules: Sequence[ir.Module],
    path: str,
    measured: Mapping[tuple[str, str], LabelRows],
) -> str:
    """The text for the modules of one attention, made from the spec at `path`.

    `attention` still has its params; measured: (device, variant) -> which target for which sizes.
    """
    selectors = selectors_of(attention)
    values = {plain_name(m): [literal_of(m.variant.params[s.param]) for s in selectors] for m in modules}
    targets: dict[str, list[str]] = {name: [] for name in values}
    for target in fastest_first(module.target for module in modules):
        for module in modules:
            if module.target == target and target not in targets[plain_name(module)]:
                targets[plain_name(module)].append(target)
    read, sizes = call_sizes(attention)
    chosen = [selector.param for selector in selectors if selector.default]
    call = OneImportSignature(attention, modules, chosen)
    tensors = {tensor.name for tensor in call.inputs if tensor.shape}
    wants = " or ".join(f"{name}.requires_grad" for name in attention.grads if name in tensors)
    taken = {parameter.partition(":")[0].lstrip("*") for parameter in call.parameters}
    key, size_name, function = (free_name(name, taken) for name in ("key", "sizes", "function"))
    text = (
        template_environment()
        .get_template("dispatch_targets.py.jinja")
        .render(
            name=attention.name,
            targets=[
                (target, repr(needs_of(target)).replace("'", '"'))
                for target in fastest_first(m.target for m in modules)
            ],
            spec=comment(path),
            command=command(path),
            call=call,
            key=key,
            size_name=size_name,
            function=function,
            selectors=selectors,
            variants=[(values[name], found) for name, found in targets.items()],
            sizes=[*sizes, f"torch.is_grad_enabled() and ({wants})" if wants else "False"],
            are_tensors=are_tensors([*(selector.tensor for selector in selectors), *read]),
            tuned=[
                (literal(device), values[name], [row_text(row) for row in rows])
                for (device, name), rows in sorted(measured.items())
            ],
        )
    )
    return tidy(text)
