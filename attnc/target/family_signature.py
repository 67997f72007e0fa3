"""The signature of a family: what the callables of its modules have in common, in the terms of the spec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attnc.model.attention import Attention, Param
from attnc.model.projection import Projection
from attnc.model.tensors import DType
from attnc.plan.ir import Module
from attnc.target.call_signature import RAISES, Parameter, Signature, signature

_OPTIONS = [Parameter("out", "torch.Tensor | None", "None"), Parameter("config", "Config | None", "None")]


class FamilySignature(Signature):
    """Of the modules of one attention and target; `attention` still has its params, of which the `chosen` are
    keywords.

    own: keywords that pick the module; passed: those that it is called with; may_take_more: whether some
    modules have others besides.
    """

    def __init__(self, attention: Attention, family: Sequence[Module], chosen: Iterable[str]) -> None:
        super().__init__(family[0])
        self._attention = attention
        self.variants = _in_words(attention.params)
        self.own = _own(attention.params, chosen)
        if any(module.label for module in family):
            self.own.append(Parameter("schedule", "str | None", "None"))
        first, *others = ([*call.keywords, *call.gradient_keywords] for call in map(Signature, family))
        self.passed = [keyword for keyword in first if all(keyword in other for other in others)]
        self.may_take_more = any(len(taken) > len(self.passed) for taken in (first, *others))

    @property
    def parameters(self) -> list[str]:
        options = ["**options: object"] if self.may_take_more else []
        return [*map(str, self.tensor_parameters), "*", *map(str, (*self.own, *self.passed)), *options]

    @property
    def arguments(self) -> str:
        """What a module is called with."""
        options = ["**options"] if self.may_take_more else []
        return ", ".join([*(tensor.name for tensor in self.inputs), *map(_by_name, self.passed), *options])

    @property
    def shapes(self) -> Iterator[str]:
        for tensor in (*self.inputs, *self.results):
            yield f"{tensor.name}: {signature(self._attention.tensor(tensor.name))}"

    @property
    def option_help(self) -> Iterator[str]:
        yield from map(_help, self.own)
        shared = [keyword.name for keyword in self.passed]
        for line in super().option_help:
            if line.partition(":")[0] in shared:
                yield line.replace("one of CONFIGS", "one of the module's CONFIGS").replace(
                    "one of its BACKWARD_CONFIGS", "one of the module's BACKWARD_CONFIGS"
                )
        if self.may_take_more:
            yield "options: what the modules of some schedules take besides."


class ProjectionSignature:
    """Of the modules of a projection, attribute by attribute as `FamilySignature`."""

    return_type = "torch.Tensor"

    def __init__(self, projection: Projection, chosen: Iterable[str]) -> None:
        self._projection = projection
        self._own = _own(projection.params, chosen)

    @property
    def parameters(self) -> list[str]:
        tensors = [str(Parameter(tensor.name)) for tensor in self._projection.inputs]
        return [*tensors, "*", *map(str, (*self._own, *_OPTIONS))]

    @property
    def arguments(self) -> str:
        """What a module is called with."""
        tensors = [tensor.name for tensor in self._projection.inputs]
        return ", ".join([*tensors, *map(_by_name, _OPTIONS)])

    @property
    def help(self) -> Iterator[str]:
        """The lines of the docstring."""
        bias = " + bias" if self._projection.has_bias else ""
        yield from (f"A linear layer: y = x w^T{bias}.", "")
        yield f"Shapes and dtypes{_in_words(self._projection.params)}:"
        for tensor in self._projection.tensors.values():
            yield f"    {tensor.name}: {signature(tensor)}"
        yield from map(_help, self._own)
        yield "out: y to write to."
        yield "config: one of the module's CONFIGS (default: the measured choice, or a guess)."
        yield from ("", "Returns y.", RAISES)


def _own(params: Iterable[Param], chosen: Iterable[str]) -> list[Parameter]:
    """A keyword for each param that no argument shows."""
    firsts = {param.name: param.choices[0] for param in params}
    return [Parameter(name, type(firsts[name]).__name__, repr(firsts[name])) for name in chosen]


def _help(keyword: Parameter) -> str:
    if keyword.name == "schedule":
        return "schedule: which one, instead of the table's choice."
    return f"{keyword.name}: the value of this param; it picks the module."


def _by_name(keyword: Parameter) -> str:
    return f"{keyword.name}={keyword.name}"


def _in_words(params: Iterable[Param]) -> str:
    """`, for T in {bf16, f16}, D in {64, 128}`."""
    sets = (f"{param.name} in {{{', '.join(map(_literal, param.choices))}}}" for param in params)
    text = ", ".join(sets)
    return f", for {text}" if text else ""


def _literal(value: DType | bool | int | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
