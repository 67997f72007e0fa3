"""The pieces of the function that launches the backward: allocations, launches, and sums over what they
left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from attnc.expr.nodes import Const
from attnc.expr.show import show
from attnc.model.tensors import Ragged, Role, Tensor
from attnc.plan.ir import Module
from attnc.plan.ir_backward import Adjoint, Backward, Part
from attnc.plan.storage import is_plain, longest
from attnc.target.call import corrections, kept_shape
from attnc.target.parameter import Parameter, names, optional
from attnc.target.prepared import described
from attnc.target.triton.backward import BackwardText
from attnc.target.triton.parameters import config_name
from attnc.target.triton.printer import FLOATS, torch_dtype
from attnc.target.triton.prologue import Launch, PreprocessText


@dataclass(frozen=True, slots=True)
class Made:
    """Text of a tensor that the backward allocates. zero: kernels add to it, or leave some of it alone."""

    name: str
    shape: str
    dtype: str
    zero: bool = False


class BackwardHostText:
    """Text of the backward's host; attribute by attribute what `templates/_autograd.py.jinja`
    prints.
    """

    #: The template of the launches, and the type of what makes them; what configs are chosen for, and its
    #: type; how a number is divided, rounded up.
    launcher, launches_type = "triton/_backward_launches.py.jinja", "tuple[_Launch, ...]"
    device, device_type = "q.device", "torch.device"
    device_lines: tuple[str, ...] = ()
    quotient = "triton.cdiv({}, {})"

    def __init__(self, module: Module, backward: Backward, texts: list[BackwardText]) -> None:
        self.module, self._backward, self._texts = module, backward, texts
        self.configs = [config_name(planned) for planned in backward.kernels]
        self.preprocess = (
            PreprocessText(module, backward.preprocess, self.configs[0]) if backward.preprocess else None
        )
        self.inputs = [arg.tensor for arg in module.args]
        self.arguments = ", ".join(tensor.name for tensor in self.inputs)
        self.results = ", ".join(arg.tensor.name for arg in module.outputs)
        self.wanted = [gradient.tensor.name for gradient in backward.gradients]
        self.gradients = ", ".join(f"d{name}" for name in self.wanted)
        self.keeps_lse = bool(module.kept)
        self.strided = (
            self.keeps_lse or any(text.prologue is not None for text in texts) or bool(self.preprocess)
        )
        name = module.variant.attention.name
        self.alias = "_callable" if name in {tensor.name for tensor in self.inputs} else ""
        attention = module.variant.attention
        self.shortened = bool(attention.lengths)
        self.packs_queries = isinstance(attention.q.storage, Ragged)
        #: Whether programs take their heads in measured sections; where all loops are short, a constant does.
        self.in_sections = any(
            text.kernel.grid.over != "head" and not text.kernel.regions.are_short for text in texts
        )
        self._adds_dq = any(planned.chain.adds_dq is not None for planned in backward.kernels)

    @property
    def differentiable(self) -> str:
        """Every input that may require a gradient."""
        return ", ".join(t.name for t in self.inputs if torch_dtype(t) in FLOATS)

    @property
    def refused(self) -> str:
        """Those whose gradient the spec does not ask for, with their names."""
        refused = (t.name for t in self.inputs if torch_dtype(t) in FLOATS and t.name not in self.wanted)
        return ", ".join(f"{name}={name}" for name in refused)

    @property
    def lse_shape(self) -> str:
        return kept_shape(self.module)

    @property
    def _queries(self) -> str:
        """All rows of q in a head: M, or those of all packed sequences."""
        return show(longest(self.module.variant.attention, Role.QUERY))

    @property
    def longest(self) -> str:
        return show(longest(self.module.variant.attention, Role.KEY))

    @property
    def nothing_to_do(self) -> str:
        return f"B * H * {self._queries} == 0"

    @property
    def returned(self) -> str:
        """What autograd gets: a gradient or None for each input."""
        return ", ".join(
            f"d{tensor.name}" if tensor.name in self.wanted else "None" for tensor in self.inputs
        )

    @property
    def sizes(self) -> Iterator[str]:
        dims = {name for text in self._texts for name in text.kernel.dims}
        for arg in self.module.args:
            binds = [bind.name or "_" for bind in arg.axes]
            if any(name != "_" for name in binds):
                yield f"{', '.join(binds)}{',' if len(binds) == 1 else ''} = {arg.tensor.name}.shape"
            yield from corrections(arg)
        if "G" in dims:
            bound = {bind.name for arg in self.module.args for bind in arg.axes}
            if "Hkv" not in bound:
                yield "Hkv = 1"
            yield "G = H // Hkv"

    @cached_property
    def made(self) -> list[Made]:
        """What a call allocates, in the order in which it is written about."""
        return list(self._made())

    def _made(self) -> Iterator[Made]:
        # Keys that a length cuts off, and rows behind the last packed sequence, are nobody's.
        zero = self.shortened or not is_plain(self.module.variant.attention)
        matrices = dict.fromkeys(name for text in self._texts for name in text.makes)
        for name in matrices:
            yield Made(name, f"{name.removeprefix('d')}.shape", self._dtype(name.removeprefix("d")), zero)
        if self._adds_dq:
            yield from self._sum_of_dq()
        if self.stores_rows:
            yield Made("lse2", f"({self._row_sizes})", "torch.float32")
            yield Made("delta", f"({self._row_sizes})", "torch.float32")
        for adjoint, tiles in self._adjoints():
            yield self._workspace(adjoint, tiles)

    def _sum_of_dq(self) -> Iterator[Made]:
        """What dq is summed in."""
        yield Made("dq", "q.shape", "torch.float32", zero=True)

    def _dtype(self, name: str) -> str:
        """The type of the gradient of an input."""
        tensor = next(tensor for tensor in self.inputs if tensor.name == name)
        return torch_dtype(self.module.variant.attention.gradient_of(tensor))

    @property
    def planned(self) -> Iterator[str]:
        """The same without memory: their shapes and strides."""
        for x in self.made:
            yield f'{x.name} = torch.empty({x.shape}, dtype={x.dtype}, device="meta")'

    @property
    def made_layouts(self) -> str:
        layouts = [f"_layout({x.name})" for x in self.made]
        return f"{layouts[0]}," if len(layouts) == 1 else ", ".join(layouts)

    @property
    def allocations(self) -> Iterator[str]:
        for i, x in enumerate(self.made):
            yield f"{x.name} = _empty(call.made[{i}], {x.dtype}, q){'.zero_()' if x.zero else ''}"

    @property
    def _row_sizes(self) -> str:
        """The shape of what is kept of each row."""
        return f"H, {self._queries}" if self.packs_queries else "B, H, M_padded"

    @property
    def stores_rows(self) -> bool:
        return self.preprocess is not None or any(
            t.prologue is not None and t.prologue.stored for t in self._texts
        )

    def _adjoints(self) -> Iterator[tuple[Adjoint, str]]:
        """Each adjoint with the number of tiles of its kernel."""
        if self._backward.preprocess is not None:
            for adjoint in self._backward.preprocess.prologue.adjoints:
                yield adjoint, f"M_padded // {self.configs[0]}.BLOCK_M"
        for planned in self._backward.kernels:
            over_q, config = planned.kernel.grid.over == "q", config_name(planned)
            tiles = (
                f"M_padded // {config}.BLOCK_M" if over_q else self.quotient.format("N", f"{config}.BLOCK_N")
            )
            for adjoint in (
                *planned.chain.adjoints,
                *(planned.prologue.adjoints if planned.prologue else ()),
            ):
                yield adjoint, tiles

    def _workspace(self, adjoint: Adjoint, tiles: str) -> Made:
        x = adjoint.load.tensor
        if adjoint.accumulate == "atomic":
            return Made(adjoint.name, f"{x}.shape", "torch.float32", zero=True)
        shape = {(): tiles, ("q",): "M_padded", ("kv",): "N", ("q", "kv"): "M_padded, N"}[adjoint.along]
        part = next(p for g in self._backward.gradients for p in g.parts if p.name == adjoint.name)
        whole = adjoint.along == ("q", "kv") and len(part.places) == 4  # no sum: the gradient itself
        dtype = self._dtype(x) if whole else "torch.float32"
        partial = adjoint.along == ("q", "kv") or (self.shortened and adjoint.along != ())
        return Made(adjoint.name, f"(B, H, {shape})", dtype, partial)

    @property
    def places(self) -> bool:
        """Whether a gradient is of some elements of its tensor only."""
        return any("_placed(" in line for line in self.sums)

    @property
    def _given(self) -> list[Parameter]:
        """What the backward is of, do first: what came in, was given and went out."""
        cotangents = ["do"] if self.keeps_lse else ["do", "dlse"]
        given = (*(tensor.name for tensor in self.inputs), "o", "lse")
        return [*map(optional, cotangents), *map(Parameter, given)]

    @property
    def gradient_parameters(self) -> list[str]:
        """Of the function that computes gradients, but for configs."""
        return [x.bare for x in self._given]

    @property
    def prepared_parameters(self) -> list[str]:
        """Of what prepares it: by then there is a do."""
        return [Parameter("do").bare, *(x.bare for x in self._given[1:])]

    @property
    def taken(self) -> str:
        """Their names."""
        return names(self._given)

    @property
    def key(self) -> Iterator[str]:
        """What a preparation depends on, tensor by tensor."""
        for x in self._given:
            yield "_described(dlse)" if x.name == "dlse" else described(x.name)

    @property
    def launch_lines(self) -> Iterator[str]:
        for i, launch in enumerate(self.launches):
            yield f"call.backward[{i}]({launch.tensors})"

    @property
    def launches(self) -> Iterator[Launch]:
        """In the order of execution."""
        if self.preprocess is not None:
            yield self.preprocess.launch
        for text in self._texts:
            yield text.parameters.launch

    @property
    def sum_sizes(self) -> Iterator[str]:
        """The sizes again, where sums are of as many rows as there are."""
        parts = (part for gradient in self._backward.gradients for part in gradient.parts)
        if any("q" in part.along and part.accumulate != "atomic" for part in parts):
            yield from self.sizes

    @property
    def _rounded_dq(self) -> Iterator[str]:
        """dq, from what it was summed in."""
        if self._adds_dq:
            scale = self._backward.kernels[0].chain.scale
            yield f"dq = {self._rounded(f'(dq * {scale!r})' if scale != 1.0 else 'dq', 'q')}"

    @property
    def sums(self) -> Iterator[str]:
        """What is left to do once the kernels are done."""
        yield from self._rounded_dq
        for gradient in self._backward.gradients:
            name = gradient.tensor.name
            if not gradient.parts:
                if name not in ("q", "k", "v"):  # what only a condition reads
                    yield f"d{name} = torch.zeros_like({name})"
                continue
            parts = [_summed(part, gradient.tensor) for part in gradient.parts]
            total = parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"
            yield f"d{name} = {self._rounded(total, name)}"

    def _rounded(self, total: str, name: str) -> str:
        """A sum in f32 as the gradient of the input of this name."""
        dtype = "torch.float32" if name in self.module.variant.attention.f32_grads else f"{name}.dtype"
        return f"{total}.to({dtype})"

    @property
    def has_f32(self) -> bool:
        """Whether a gradient has another type than its input."""
        return bool(self.module.variant.attention.f32_grads)

    @property
    def fake(self) -> str:
        """Gradients without contents, as a tracer wants them."""
        f32 = self.module.variant.attention.f32_grads
        like = "torch.empty({0}.shape, dtype={1}, device={0}.device)"
        return ", ".join(
            like.format(name, "torch.float32" if name in f32 else f"{name}.dtype") for name in self.wanted
        )


def _summed(part: Part, tensor: Tensor) -> str:
    """f32[B, H, *along] summed over what no axis of the tensor is, its axes in the tensor's order."""
    if part.accumulate == "atomic":
        return part.name
    text = part.name
    axes: list[str] = ["b", "h", *(("tile",) if not part.along else part.along)]
    if "q" in part.along:
        text += "[:, :, :M]"
        axes[2] = "q_idx"
        if "q_pos" in part.places:
            after = "0, 0, " if "kv" in part.along else ""
            text, axes[2] = f"torch.nn.functional.pad({text}, ({after}N - M, 0))", "q_pos"
    axes = ["kv_idx" if axis == "kv" else axis for axis in axes]
    lacking = [number for number, axis in enumerate(axes) if axis not in part.places]
    kept = [axis for axis in axes if axis in part.places]
    if len(lacking) == len(axes):
        text += ".sum()"
    elif lacking:
        text += f".sum({lacking[0] if len(lacking) == 1 else tuple(lacking)})"
    order = [kept.index(place) for place in part.places if isinstance(place, str)]
    if order != sorted(order):
        text += f".permute({', '.join(map(str, order))})"
    ones = [axis for axis, place in enumerate(part.places) if isinstance(place, int)]
    if not ones:
        return text
    if all(tensor.shape[axis] == Const(1) for axis in ones):
        return f"{text}.reshape({tensor.name}.shape)"
    index = ", ".join("slice(None)" if isinstance(place, str) else str(place) for place in part.places)
    return f"_placed({text}, {tensor.name}, ({index}{',' if len(part.places) == 1 else ''}))"
