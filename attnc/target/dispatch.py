"""The functions that pick a module: in the `__init__.py` beside the modules of one schedule, for a variant,
and in the one above the targets of an attention, for a target.

A param is read off the arguments where it is an element type or a size of one of them; otherwise it is a
keyword of the function, its first choice being the default. A target is picked by what was measured for
the device, the variant and the sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from attnc.expr import nodes
from attnc.model.attention import Attention, Param
from attnc.model.dtypes import DType
from attnc.model.program import Projection
from attnc.model.tensors import Role, Tensor
from attnc.plan import ir
from attnc.plan.ir import Module
from attnc.plan.projection import ProjectionModule
from attnc.plan.signature import memory
from attnc.plan.targets import target_of
from attnc.target.call_signature import RAISES, Parameter, Signature, signature
from attnc.target.declaration import quote_word
from attnc.target.quote import command, comment, literal
from attnc.target.templates import python_environment, tidy
from attnc.tuned.tables import LabelRows, guess_rows, plain_name

# --- the signature of a family


_OPTIONS = [Parameter("out", "torch.Tensor | None", "None"), Parameter("config", "Config | None", "None")]


class FamilySignature(Signature):
    """What callers see of the modules of one attention and target; `attention` still has its params, of which
    the `chosen` are keywords.

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
        options = ["**options"] if self.may_take_more else []
        return ", ".join([*(tensor.name for tensor in self.inputs), *map(_by_name, self.passed), *options])

    @property
    def shapes(self) -> Iterator[str]:
        for tensor in (*self.inputs, *self.results):
            declared = self._attention.tensor(tensor.name)
            yield f"{tensor.name}: {signature(memory(declared) or declared)}"

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
    """What callers see of the modules of a projection, attribute by attribute as `FamilySignature`."""

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
        tensors = [tensor.name for tensor in self._projection.inputs]
        return ", ".join([*tensors, *map(_by_name, _OPTIONS)])

    @property
    def help(self) -> Iterator[str]:
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
    firsts = {param.name: param.choices[0] for param in params}
    return [Parameter(name, type(firsts[name]).__name__, repr(firsts[name])) for name in chosen]


def _help(keyword: Parameter) -> str:
    if keyword.name == "schedule":
        return "schedule: which one, instead of the table's choice."
    return f"{keyword.name}: the value of this param; it picks the module."


def _by_name(keyword: Parameter) -> str:
    return f"{keyword.name}={keyword.name}"


def _in_words(params: Iterable[Param]) -> str:
    sets = (f"{param.name} in {{{', '.join(map(_literal, param.choices))}}}" for param in params)
    text = ", ".join(sets)
    return f", for {text}" if text else ""


def _literal(value: DType | bool | int | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- the module beside the variants


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Where the value of one param comes from: `expression` over the argument `tensor`, or a keyword with a
    default.
    """

    param: str
    expression: str
    tensor: Tensor | None = None
    default: str = ""


class VariantKey:
    """How a function picks a variant. names: of the params that tell it, in words; params, values: these
    names, and what the arguments have of each, as tuples of Python.
    """

    def __init__(self, selectors: Sequence[Selector]) -> None:
        self.names = ", ".join(selector.param for selector in selectors)
        self.params = print_tuple(quote_word(selector.param) for selector in selectors)
        self.values = print_tuple(selector.expression for selector in selectors)


def print_tuple(items: Iterable[str]) -> str:
    """Returns a tuple of Python, with items as they are printed."""
    texts = [*items]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def render_dispatch(
    attention: Attention,
    family: Sequence[ir.Module],
    path: str,
    measured: Mapping[tuple[str, str], LabelRows] | None = None,
) -> str:
    """Returns the text for the modules of one attention and target, made from the spec at `path`.

    `attention` still has its params; measured: (device, variant) -> which schedule for which sizes, where
    there are several.
    """
    selectors = selectors_of(attention)
    if any(module.label for module in family):
        return _render_schedules(attention, family, path, selectors, measured or {})
    call = FamilySignature(attention, family, _list_keywords(selectors))
    return _render_variants(attention.name, call, selectors, family, path)


def selectors_of(attention: Attention) -> tuple[Selector, ...]:
    """Returns where the value of each param of an attention comes from."""
    return tuple(
        _selector(attention.inputs, param.name, literal_of(param.choices[0])) for param in attention.params
    )


def _render_schedules(
    attention: Attention,
    family: Sequence[ir.Module],
    path: str,
    selectors: Sequence[Selector],
    measured: Mapping[tuple[str, str], LabelRows],
) -> str:
    values = {plain_name(module): _values_of(module, selectors) for module in family}
    members: dict[str, list[tuple[str, str]]] = {name: [] for name in values}
    for module in family:
        members[plain_name(module)].append((module.label, module.variant.name))
    read, sizes = call_sizes(attention)
    call = FamilySignature(attention, family, _list_keywords(selectors))
    text = (
        python_environment()
        .get_template("dispatch_schedules.py.jinja")
        .render(
            name=attention.name,
            target=family[0].target,
            spec=comment(path),
            command=command(path),
            call=call,
            key=_free("key", call),
            size_name=_free("sizes", call),
            by=VariantKey(selectors),
            modules=[module for modules in members.values() for _, module in modules],
            variants=[(values[name], modules) for name, modules in members.items()],
            sizes=sizes,
            are_tensors=are_tensors([*(selector.tensor for selector in selectors), *read]),
            tuned=[
                (literal(device), values[name], [row_text(row) for row in rows])
                for (device, name), rows in sorted(measured.items())
            ],
            guess=[row_text(row) for row in guess_rows(family)],
        )
    )
    return tidy(text)


def row_text(row: tuple[tuple[int | None, ...], str]) -> str:
    """Returns a row of a table as a module has it."""
    return repr(row).replace("'", '"')


def call_sizes(attention: Attention) -> tuple[tuple[Tensor, Tensor], tuple[str, str, str]]:
    """Returns M, N, and batch times heads, of the arguments, and which those are."""
    q, k = attention.q, attention.k
    rows = f"q.shape[{q.axis(Role.QUERY)}]"
    read, keys = k, f"k.shape[{k.axis(Role.KEY)}]"
    if table := k.storage.table:
        page = keys if k.storage.page_param else str(k.storage.rows_of_page)
        read, keys = attention.tensor(table), f"{table}.shape[1] * {page}"
    axes = (q.axis(role) for role in (Role.BATCH, Role.HEAD))
    pairs = " * ".join(f"q.shape[{axis}]" for axis in axes if axis is not None)
    return (q, read), (rows, keys, pairs or "1")


def render_projection_dispatch(projection: Projection, family: Sequence[ProjectionModule], path: str) -> str:
    """Returns the text for the modules of one projection, which still has its params, and target."""
    selectors = tuple(
        _selector(projection.inputs, param.name, literal_of(param.choices[0])) for param in projection.params
    )
    call = ProjectionSignature(projection, _list_keywords(selectors))
    return _render_variants(projection.name, call, selectors, family, path)


def _render_variants(
    name: str,
    call: FamilySignature | ProjectionSignature,
    selectors: Sequence[Selector],
    family: Sequence[ir.Module] | Sequence[ProjectionModule],
    path: str,
) -> str:
    source = {"target": family[0].target, "spec": comment(path), "command": command(path)}
    if not selectors:
        alone = python_environment().get_template("dispatch_one.py.jinja")
        return tidy(alone.render(source, name=name, module=family[0].variant.name))
    text = (
        python_environment()
        .get_template("dispatch.py.jinja")
        .render(
            source,
            name=name,
            call=call,
            key=_free("key", call),
            by=VariantKey(selectors),
            are_tensors=are_tensors(selector.tensor for selector in selectors),
            variants=[(module.variant.name, _values_of(module, selectors)) for module in family],
        )
    )
    return tidy(text)


def _values_of(module: ir.Module | ProjectionModule, selectors: Iterable[Selector]) -> str:
    return print_tuple(literal_of(module.variant.params[selector.param]) for selector in selectors)


def _free(name: str, call: FamilySignature | ProjectionSignature) -> str:
    return free_name(name, {parameter.partition(":")[0] for parameter in call.parameters})


def free_name(name: str, taken: Collection[str]) -> str:
    """Returns the name, or one like it that is not taken."""
    while name in taken:
        name += "_"
    return name


def _list_keywords(selectors: Iterable[Selector]) -> list[str]:
    return [selector.param for selector in selectors if selector.default]


def _selector(inputs: Sequence[Tensor], param: str, default: str) -> Selector:
    for tensor in inputs:
        if tensor.storage.is_part:  # no argument
            continue
        if tensor.dtype == param:
            return Selector(param=param, expression=f"{tensor.name}.dtype", tensor=tensor)
        for axis, size in enumerate(tensor.shape):
            is_page = tensor.storage.page_param == param
            if (isinstance(size, nodes.Param) and size.name == param) or (
                is_page and axis == tensor.axis(Role.KEY)
            ):
                return Selector(param=param, expression=f"{tensor.name}.shape[{axis}]", tensor=tensor)
    return Selector(param=param, expression=param, default=default)


def are_tensors(read: Iterable[Tensor | None]) -> str:
    """Returns a condition on the arguments that are read: that each is a tensor with sizes, as many as are
    declared, which are numbers, as they are not while torch.jit.trace runs.
    """
    ranks = {tensor.name: len(tensor.shape) for tensor in read if tensor is not None}
    conditions = [
        f"isinstance({x}, torch.Tensor) and {x}.dim() == {rank} and not {x}.is_nested"
        for x, rank in ranks.items()
    ]
    return " and ".join([*conditions, "torch._C._get_tracing_state() is None"] if conditions else [])


def literal_of(value: DType | bool | int | float) -> str:
    """Returns the value of a param in a module."""
    return f"torch.{value.facts.torch}" if isinstance(value, DType) else repr(value)


#: Families of targets, the fastest first without a measurement, and the package that launches kernels.
_PACKAGES: Mapping[str, str] = {"sm90": "cupy", "triton": "triton", "sm80": "cupy"}
#: The family whose kernels the package runs on the CPU too.
_INTERPRETED = "triton"
#: Keywords that only the modules of one target understand.
_OF_A_MODULE = ("config", "backward_config")


class OneImportSignature(FamilySignature):
    """What callers see of the modules of one attention for all targets."""

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
    """Returns names of targets, each once, in the order in which they are tried without a measurement."""
    newest = sorted(dict.fromkeys(targets), key=lambda name: (needs_of(name)[1], name), reverse=True)
    return sorted(newest, key=lambda name: list(_PACKAGES).index(target_of(name).family))


def needs_of(name: str) -> tuple[str, int, int | None, bool]:
    """Returns what the kernels of a target need, as `attnc.support.by_target.Needs` has it."""
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
    """Returns the text for the modules of one attention, made from the spec at `path`.

    `attention` still has its params; measured: (device, variant) -> which target for which sizes.
    """
    selectors = selectors_of(attention)
    values = {plain_name(module): _values_of(module, selectors) for module in modules}
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
        python_environment()
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
            choice=free_name("CHOICE", taken | {attention.name}),
            by=VariantKey(selectors),
            variants=[(values[name], print_tuple(map(quote_word, found))) for name, found in targets.items()],
            sizes=[*sizes, f"torch.is_grad_enabled() and ({wants})" if wants else "False"],
            are_tensors=are_tensors([*(selector.tensor for selector in selectors), *read]),
            tuned=[
                (literal(device), values[name], [row_text(row) for row in rows])
                for (device, name), rows in sorted(measured.items())
            ],
        )
    )
    return tidy(text)
