"""The signature of a generated callable and what its docstring says, for a module and for its family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from textwrap import wrap

from attnc.expr.nodes import TRUE, show
from attnc.model.attention import Attention
from attnc.model.dtypes import DType
from attnc.model.tensors import Paged, Prefix, Ragged, Tensor
from attnc.plan.ir import Arg, Bind, Module, unified_of
from attnc.target.terms import times


@dataclass(frozen=True, slots=True)
class Parameter:
    """Text of one. default: None where it must be given."""

    name: str
    type: str = "torch.Tensor"
    default: str | None = None

    @property
    def bare(self) -> str:
        return f"{self.name}: {self.type}"

    def __str__(self) -> str:
        return self.bare if self.default is None else f"{self.bare} = {self.default}"


def optional(name: str) -> Parameter:
    return Parameter(name, "torch.Tensor | None", "None")


def scalar(tensor: Tensor) -> Parameter:
    """Returns the parameter of a tensor without axes, which may be a Python number."""
    known: dict[DType | str, str] = {DType.BOOL: "bool", DType.I32: "int", DType.I64: "int", DType.U8: "int"}
    return Parameter(tensor.name, f"{known.get(tensor.dtype, 'float')} | torch.Tensor")


def names(parameters: Iterable[Parameter]) -> str:
    return ", ".join(parameter.name for parameter in parameters)


#: Of a line of help, behind its indentation.
WIDTH = 100

RAISES = "Raises ValueError or TypeError naming the argument, what was expected and what came."


class Signature:
    """Parameters, results and help of the callable of a module.

    variants: what the sizes depend on, for a reader.
    """

    variants = ""

    def __init__(self, module: Module) -> None:
        attention = module.variant.attention
        self.module, self.function = module, attention.name
        self.inputs = [arg.tensor for arg in module.args]
        self.results = [arg.tensor for arg in module.outputs]
        self.result = ", ".join(tensor.name for tensor in self.results)
        self.returns = self.result if len(self.results) == 1 else f"({self.result})"
        self.has_scalars = any(not tensor.shape for tensor in self.inputs)
        masked = "" if attention.mask == TRUE else ", masked"
        scaled = "" if attention.softmax.v_scale is None else "v_scale * "
        form = attention.softmax.form
        weights = f"{form}(score{'' if attention.softmax.sink is None else ', sink'})"
        weights = weights if attention.softmax.dropout is None else f"dropout({weights})"
        attended = "weight v" if form == "none" else f"{scaled}{weights} v"
        if attention.epilogue is not None:
            attended = f"{show(attention.epilogue)}, with attention = {attended}"
        self.summary = f"Attention of the spec's score{masked}: o = {attended}."

    @property
    def tensor_parameters(self) -> list[Parameter]:
        return [Parameter(t.name) if t.shape else scalar(t) for t in self.inputs]

    @property
    def keywords(self) -> list[Parameter]:
        return [
            Parameter("out", f"{self.return_type} | None", "None"),
            *(optional(arg.tensor.name) for arg in self.module.kept),
            Parameter("config", "Config | None", "None"),
            *([optional("fallbacks")] if self.counts_fallbacks else []),
        ]

    @property
    def gradient_keywords(self) -> list[Parameter]:
        if self.module.backward is None:
            return []
        return [Parameter("backward_config", "dict[str, Config] | None", "None")]

    @property
    def parameters(self) -> list[str]:
        return [*map(str, self.tensor_parameters), "*", *map(str, (*self.keywords, *self.gradient_keywords))]

    @property
    def call_arguments(self) -> str:
        inputs = names(self.tensor_parameters)
        if self.module.margin is not None:
            inputs += f", {margins_call(self.module)}"
        extras = [arg.tensor.name for arg in self.module.kept]
        extras += ["fallbacks"] if self.counts_fallbacks else []
        backward = ["backward_config" if self.gradient_keywords else "None"]
        more = [f"({', '.join(extras)}{',' * (len(extras) == 1)})"] if extras else []
        given = [
            f"({inputs})",
            "out",
            "config",
            *(backward if self.gradient_keywords or extras else []),
            *more,
        ]
        return ", ".join(given)

    @property
    def called(self) -> set[str]:
        return set() if self.module.margin is None else {"margins"}

    @property
    def return_type(self) -> str:
        many = f"tuple[{', '.join(['torch.Tensor'] * len(self.results))}]"
        return "torch.Tensor" if len(self.results) == 1 else many

    @property
    def shapes(self) -> Iterator[str]:
        for tensor in (*self.inputs, *self.results):
            yield f"{tensor.name}: {signature(tensor)}"

    @property
    def notes(self) -> list[str]:
        notes = [f"{t.name}[b] is ascending." for t in self.inputs if t.is_sorted]
        notes += [
            f"{t.name} is finite, and never ascends along its last axis."
            for t in self.inputs
            if t.is_descending
        ]
        notes += storage_notes(self.module.variant.attention)
        notes += narrow_notes(self.module.variant.attention)
        notes += conversion_notes(self.module)
        notes += key_rows_notes(self.module)
        if self.has_scalars:
            notes.append("Scalars may be Python numbers or 0-d tensors.")
        return notes

    @property
    def help(self) -> Iterator[str]:
        yield from wrap(self.summary, WIDTH, break_long_words=False, break_on_hyphens=False)
        yield from ("", f"Shapes and dtypes{self.variants}:")
        yield from (f"    {line}" for line in self.shapes)
        copied = "" if self.module.key_rows is not None else ", and nothing is copied"
        yield f"The last axis of q, k and v is contiguous; every other stride is free{copied}."
        yield from (*self.notes, *self.option_help)
        yield from ("", f"Returns {self.returns}.", RAISES)

    @property
    def counts_fallbacks(self) -> bool:
        unified = unified_of(self.module.kernel)
        return unified is not None and unified.fallback

    @property
    def option_help(self) -> Iterator[str]:
        yield f"out: {self.returns if len(self.results) > 1 else 'a tensor'} to write to."
        for arg in self.module.kept:
            sizes = ", ".join(show(bind.expected) for bind in arg.axes if bind.expected)
            what = "rows' log-sum-exp" if arg.tensor.name == "lse" else "attention before the epilogue"
            yield f"{arg.tensor.name}: {arg.tensor.dtype}[{sizes}] to write the {what} to, if wanted."
        yield "config: one of CONFIGS (default: the measured choice for the device, or the first)."
        if self.module.backward is not None:
            of = ", ".join(gradient.tensor.name for gradient in self.module.backward.gradients)
            yield f"backward_config: by kernel, one of its BACKWARD_CONFIGS; for the gradients of {of}."
        if self.counts_fallbacks:
            left = "splits whose scores left the bounds of the unified maximum"
            yield f"fallbacks: i32[1] that is increased by the number of {left}."


def margins_call(module: Module) -> str:
    """Returns the call that makes the margins of q and k."""
    margin = module.margin
    assert margin is not None
    axes = ", ".join(f'"{axis_letters(arg)}"' for arg in module.args if arg.tensor.name in ("q", "k"))
    return f"margins(q, k, {axes}, slope={margin.slope!r}, share={margin.share!r})"


def axis_letters(arg: Arg) -> str:
    """Returns a letter for each axis but the features: "bmh"."""
    return "".join(stride.removeprefix(f"stride_{arg.tensor.name}") for stride in arg.strides)


def narrow_notes(attention: Attention) -> list[str]:
    """Returns sentences on what is done with keys and values of 8 bits."""
    narrow = [tensor for tensor in (attention.k, attention.v) if DType(tensor.dtype).is_narrow]
    if not narrow:
        return []
    names = " and ".join(tensor.name for tensor in narrow)
    notes = [f"The numbers of {names} are converted to {attention.element}, which holds them exactly."]
    capabilities = {dtype: dtype.facts.capability for dtype in (DType(tensor.dtype) for tensor in narrow)}
    return notes + [
        f"Of {dtype} they need a GPU of compute capability {first / 10} or newer."
        for dtype, first in capabilities.items()
        if first
    ]


def conversion_notes(module: Module) -> list[str]:
    """Returns sentences on the memory that a call takes for keys and values that are converted first."""
    if module.conversion is None:
        return []
    args = [made.made for made in module.conversion.tensors]
    names = " and ".join(arg.tensor.name for arg in args)
    sizes = dict.fromkeys(" * ".join(map(_size, arg.axes)) for arg in args)
    each = " each" if len(args) > len(sizes) else ""
    taken = f"{names} in {args[0].tensor.dtype}, {' and '.join(sizes)} elements{each}"
    return [f"Before they are multiplied, a call makes {taken}."]


def key_rows_notes(module: Module) -> list[str]:
    """Returns what gradients of keys in pages are, and what memory they take."""
    rows = module.key_rows
    if rows is None:
        return []
    names = " and ".join(arg.tensor.name for arg in rows.rows)
    each = " each" if len(rows.rows) > 1 else ""
    computed = {size.name: show(size.value) for size in module.sizes}
    taken = times(*(computed.get(size, size) for size in map(_size, rows.rows[0].axes)))
    notes = [f"For gradients, a call copies the pages of {names} to rows of memory, {taken} elements{each}."]
    if {arg.tensor.name for arg in rows.rows} & set(rows.variant.attention.grads):
        notes.append("A page that several sequences name gets the sum of theirs, in the order of the table.")
    return notes


def _size(bind: Bind) -> str:
    return bind.name or ("?" if bind.expected is None else show(bind.expected))


def storage_notes(attention: Attention) -> list[str]:
    """Returns sentences on the memory of q, k and v, for a caller."""
    notes = []
    match attention.q.storage:
        case Ragged(cu_seqlens=cu):
            notes.append(
                f"Sequence b has the rows {cu}[b] .. {cu}[b + 1] of q and of the results; {cu}[0] is 0."
            )
    match attention.k.storage:
        case Ragged(cu_seqlens=cu):
            notes.append(f"Key j of sequence b is row {cu}[b] + j; {cu}[0] is 0.")
        case Paged(block_table=table, page=page):
            notes.append(f"Key j of sequence b is row j % {page} of page {table}[b, j // {page}].")
            notes.append("Entries of the table past the end of a sequence may hold anything.")
    if isinstance(attention.v.storage, Prefix):
        notes.append("The values are the first columns of k.")
    return notes


def signature(tensor: Tensor) -> str:
    """Returns `bf16[B, M, H, 128]`."""
    return f"{tensor.dtype}[{', '.join(map(show, tensor.shape))}]"
